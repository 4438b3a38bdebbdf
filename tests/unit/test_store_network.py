"""What failed connections are said to be, from the messages that the clients give."""

from __future__ import annotations

import pytest

from pooled_mlx.store.network import certificate_text, explain_connection, explain_output, is_certificate_error


class ConnectError(Exception):
    """Named as the hub's client names it."""


class ProxyError(Exception):
    """Named as the hub's client names it."""


class ConnectTimeout(Exception):
    """Named as the hub's client names it."""


VERIFY = "[SSL: CERTIFICATE_VERIFY_FAILED] certificate verify failed: {} (_ssl.c:1006)"
UNKNOWN = "unable to get local issuer certificate"


@pytest.mark.parametrize(
    ("message", "expected"),
    [
        (VERIFY.format(UNKNOWN), f"is not trusted ({UNKNOWN}), as behind a proxy"),
        (VERIFY.format("self-signed certificate in certificate chain"), "what helps is THIS"),
        (VERIFY.format("certificate has expired"), "(certificate has expired): are date and time of this machine right?"),
        (VERIFY.format("certificate is not yet valid"), "are date and time of this machine right?"),
        (
            VERIFY.format("Hostname mismatch, certificate is not valid for 'huggingface.co'."),
            "is for another name (Hostname mismatch, certificate is not valid for 'huggingface.co')",
        ),
        ("“*.example.com” certificate name does not match input", "is for another name (“*.example.com” certificate name"),
        ("“Corp Root” certificate is not trusted", "is not trusted (“Corp Root” certificate is not trusted)"),
        ("invalid peer certificate: UnknownIssuer", "is not trusted (UnknownIssuer)"),
    ],
)
def test_what_is_wrong_with_a_certificate(message: str, expected: str):
    text = certificate_text(message, "THIS")
    assert text.startswith("its certificate is ")
    assert expected in text
    assert ("THIS" in text) == ("not trusted" in text)  # no file helps against a wrong clock or a wrong host


@pytest.mark.parametrize(
    ("environ", "expected"),
    [
        ({}, "what helps is SSL_CERT_FILE=FILE, a PEM file with the issuer's certificate and the public ones"),
        ({"REQUESTS_CA_BUNDLE": "/a.pem"}, "SSL_CERT_FILE=/a.pem (REQUESTS_CA_BUNDLE is set to that file, which this download"),
        ({"CURL_CA_BUNDLE": "/a.pem"}, "SSL_CERT_FILE=/a.pem (CURL_CA_BUNDLE is set to that file, which this download"),
        ({"SSL_CERT_FILE": "/b.pem"}, "its issuer's certificate in /b.pem, which SSL_CERT_FILE names"),
    ],
)
def test_the_variable_that_the_hubs_client_reads_is_named(environ: dict[str, str], expected: str):
    error = OSError("cannot be done")
    error.__cause__ = ConnectError(VERIFY.format(UNKNOWN))
    assert is_certificate_error(error)
    assert expected in (explain_connection(error, environ) or "")


def test_the_keychain_is_named_where_it_is_asked(monkeypatch: pytest.MonkeyPatch):
    import httpx2  # noqa: F401  (it asks the system's store)

    error = ConnectError(VERIFY.format(UNKNOWN))
    assert "keychain" not in (explain_connection(error, {}) or "")
    monkeypatch.setattr("sys.platform", "darwin")
    assert (explain_connection(error, {}) or "").endswith("or the certificate in the keychain, set to be trusted")


PROXY = {"HTTPS_PROXY": "http://me:secret@proxy:3128"}


@pytest.mark.parametrize(
    ("error", "environ", "expected"),
    [
        (
            ProxyError("407 Proxy Authentication Required"),
            PROXY,
            "HTTPS_PROXY=http://…@proxy:3128, its user and password belong",
        ),
        (ProxyError("403 Forbidden"), {}, "the proxy refuses: 403 Forbidden (set in the settings of the system)"),
        (
            ConnectError("[Errno 111] Connection refused"),
            PROXY,
            "refused. The way goes through the proxy HTTPS_PROXY=http://…@pro",
        ),
        (ConnectError("[Errno 111] Connection refused"), {}, None),
        (ConnectError("[Errno -2] Name or service not known"), {}, "no address is found for its name"),
        (ConnectError("[Errno 8] nodename nor servname provided, or not known"), {}, "no address is found for its name"),
        (ConnectTimeout("timed out"), {}, "it does not answer in time"),
        (ConnectTimeout("timed out"), PROXY, "through the proxy"),
        (ValueError("Unknown scheme for proxy URL URL('x://y')"), {"ALL_PROXY": "x://y"}, "correct ALL_PROXY=x://y"),
        (ValueError("nothing of the kind"), PROXY, None),
    ],
)
def test_other_connections(error: Exception, environ: dict[str, str], expected: str | None):
    text = explain_connection(error, environ)
    assert (text is None) == (expected is None)
    assert (expected or "") in (text or "")
    assert "secret" not in (text or "")


@pytest.mark.parametrize(
    ("output", "expected"),
    [
        (
            f"Could not fetch URL https://i/: (Caused by SSLError(SSLCertVerificationError(1, '{VERIFY.format(UNKNOWN)}')))\n"
            "ERROR: No matching distribution found for x==1",
            f"not trusted ({UNKNOWN}), as behind a proxy that opens encrypted connections",
        ),
        ("error: client error\n  Caused by: invalid peer certificate: UnknownIssuer\n", "SSL_CERT_FILE for uv"),
        ("WARNING: Certificate did not match expected hostname: i.\nERROR: No matching distribution", "is for another name"),
        ("ProxyError('Cannot connect to proxy.', OSError('Tunnel connection failed: 407 Proxy", "the proxy refuses"),
        ("Failed to establish a new connection: [Errno -2] Name or service not known'", "no address is found"),
        ("ReadTimeoutError(\"HTTPSConnectionPool(host='i', port=443): Read timed out.", "does not answer in time"),
        ("ERROR: No matching distribution found for x==1", None),
        ("ERROR: THESE PACKAGES DO NOT MATCH THE HASHES, hash mismatch: the Python version does not match", None),
    ],
)
def test_output_of_pip_and_uv(output: str, expected: str | None):
    text = explain_output(output)
    assert (text is None) == (expected is None)
    assert (expected or "") in (text or "")
