"""What a failed connection means and what helps: certificates, proxies, names, refusals, by what the clients say of them."""

from __future__ import annotations

import os
import re
import socket
import ssl
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

_CERTIFICATE = re.compile(
    r"CERTIFICATE_VERIFY_FAILED|certificate verify failed|invalid peer certificate|certificate did not match", re.IGNORECASE
)
_EXPIRED = re.compile(r"expired|not yet valid|not valid yet", re.IGNORECASE)
_OTHER_NAME = re.compile(r"mismatch|name does not match|doesn.t match|not valid for name|did not match", re.IGNORECASE)
_REASON = re.compile(r"(?:certificate verify failed|invalid peer certificate): ([^(\n]+)", re.IGNORECASE)
_PROXY = re.compile(r"ProxyError|tunnel connection failed|proxy authentication", re.IGNORECASE)
_NAME = re.compile(
    r"name or service not known|nodename nor servname|temporary failure in name resolution|failed to resolve|dns error",
    re.IGNORECASE,
)
_TIMEOUT = re.compile(r"timed out|timeouterror", re.IGNORECASE)
_PROXY_VARIABLES = ("HTTPS_PROXY", "https_proxy", "ALL_PROXY", "all_proxy", "HTTP_PROXY", "http_proxy")

HUB_CERTIFICATES = "SSL_CERT_FILE"
"""The variable that the hub's client (httpx) reads: a PEM file, in place of the certificates of the system. SSL_CERT_DIR too;
REQUESTS_CA_BUNDLE and CURL_CA_BUNDLE are those of requests and curl, and of pip."""


def chain_of(error: BaseException) -> Iterator[BaseException]:
    """The error and what led to it, each once."""
    seen: set[int] = set()
    step: BaseException | None = error
    while step is not None and id(step) not in seen:
        seen.add(id(step))
        yield step
        step = step.__cause__ or (None if step.__suppress_context__ else step.__context__)


def is_certificate_error(error: BaseException) -> bool:
    """Whether a certificate was not accepted: the same connection will not be either."""
    return any(isinstance(step, ssl.SSLCertVerificationError) or _CERTIFICATE.search(str(step)) for step in chain_of(error))


def explain_connection(error: BaseException, environ: Mapping[str, str] | None = None) -> str | None:
    """What an error of the hub's client (httpx) is and what helps, without a full stop; None where nothing can be added."""
    environ = os.environ if environ is None else environ
    chain = list(chain_of(error))
    if is_certificate_error(error):
        text = next(str(step) for step in reversed(chain) if _CERTIFICATE.search(str(step)) or isinstance(step, ssl.SSLError))
        return certificate_text(text, _hub_certificates_help(environ))
    for name in (HUB_CERTIFICATES, "SSL_CERT_DIR"):
        if (place := environ.get(name)) and isinstance(chain[-1], ssl.SSLError | FileNotFoundError):
            there = Path(place).is_file() if name == HUB_CERTIFICATES else Path(place).is_dir()
            return f"{name} is {place}, which {'holds no certificate' if there else 'is not there'}: correct it or unset it"
    if "proxy url" in str(chain[0]).lower():
        return f"{chain[0]}: correct {_proxy(environ) or 'the proxy in the settings of the system'}"
    proxy = _proxy(environ)
    if any(type(step).__name__ == "ProxyError" for step in chain):
        wants = ", its user and password belong into that address" if "407" in str(chain[-1]) else ""
        return f"the proxy refuses: {_first_line(chain[-1])} ({proxy or 'set in the settings of the system'}{wants})"
    through = f" The way goes through the proxy {proxy}" if proxy else ""
    if any(isinstance(step, socket.gaierror) for step in chain) or _NAME.search(str(chain[-1])):
        return f"no address is found for its name ({_first_line(chain[-1])}): is there a network?{through}"
    if any("Timeout" in type(step).__name__ for step in chain):
        return f"it does not answer in time: is there a network, or a firewall in between?{through}"
    broken = any(type(step).__name__ in ("ConnectError", "ReadError", "RemoteProtocolError") for step in chain)
    return f"{_first_line(chain[-1])}.{through}" if proxy and broken else None


def explain_output(output: str) -> str | None:
    """What the output of pip or uv says of a failed connection and what helps, without a full stop; None for nothing."""
    if _CERTIFICATE.search(output):
        return certificate_text(
            output, "a PEM file with the issuer's certificate in REQUESTS_CA_BUNDLE (or PIP_CERT) for pip, SSL_CERT_FILE for uv"
        )
    if _PROXY.search(output):
        return "the proxy refuses the connection: look at HTTPS_PROXY, and at proxy in pip config list"
    if _NAME.search(output):
        return "no address is found for the index's name: is there a network?"
    if _TIMEOUT.search(output):
        return "the index does not answer in time: is there a network, or a firewall in between?"
    return None


def certificate_text(message: str, help_text: str) -> str:
    """What is wrong with a certificate, by a client's message, and what helps: `help_text` where the issuer is not known."""
    found = _REASON.search(message)
    reason = found[1].strip(" .") if found else message.strip().splitlines()[0][:200] if "\n" not in message.strip() else ""
    if _EXPIRED.search(reason or message):
        return f"its certificate is not valid at this time ({reason}): are date and time of this machine right?"
    if _OTHER_NAME.search(reason or message):
        return (
            f"its certificate is for another name ({reason or 'host name mismatch'}): something answers in its place, such as "
            "the login page of a network or a proxy"
        )
    return (
        f"its certificate is not trusted ({reason}), as behind a proxy that opens encrypted connections. "
        f"Ask who runs it for the certificate; what helps is {help_text}"
    )


def _hub_certificates_help(environ: Mapping[str, str]) -> str:
    if place := environ.get(HUB_CERTIFICATES):
        return f"its issuer's certificate in {place}, which {HUB_CERTIFICATES} names"
    for other in ("REQUESTS_CA_BUNDLE", "CURL_CA_BUNDLE"):
        if place := environ.get(other):
            return f"{HUB_CERTIFICATES}={place} ({other} is set to that file, which this download does not read)"
    text = f"{HUB_CERTIFICATES}=FILE, a PEM file with the issuer's certificate and the public ones"
    if sys.platform == "darwin" and "httpx2" in sys.modules:  # it asks the system, httpx 0 does not
        text += ", or the certificate in the keychain, set to be trusted"
    return text


def _proxy(environ: Mapping[str, str]) -> str:
    """The proxy in the environment without its password, "" for none."""
    for name in _PROXY_VARIABLES:
        if value := environ.get(name):
            return f"{name}={re.sub('//[^/@]*@', '//…@', value)}"
    return ""


def _first_line(error: BaseException) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0].rstrip(". ") or type(error).__name__
