"""What `format` means, as expressions that a grammar can hold. All of them assert; none accepts what its RFC refuses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

NATIVE = frozenset({"email", "ipv4", "ipv6", "uri", "uuid", "duration"})
"""Enforced exactly by the grammar engine itself (addresses in quotes, `IPv6:` literals and mixed IPv6 are refused)."""

_DAY31, _DAY30, _DAY28 = "(?:0[1-9]|[12][0-9]|3[01])", "(?:0[1-9]|[12][0-9]|30)", "(?:0[1-9]|1[0-9]|2[0-8])"
_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"
_LEAP = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-{_DAY31}|(?:0[469]|11)-{_DAY30}|02-{_DAY28})|{_LEAP}-02-29)"  # fmt: skip
# A leap second is 23:59:60 in UTC. With other offsets the right minute depends on the offset: those spellings are left out.
_TIME = (
    r"(?:(?:[01][0-9]|2[0-3]):[0-5][0-9]:[0-5][0-9](?:\.[0-9]+)?(?:[Zz]|[+\-](?:[01][0-9]|2[0-3]):[0-5][0-9])"
    r"|23:59:60(?:\.[0-9]+)?(?:[Zz]|[+\-]00:00))"
)
_HOST_END, _HOST_MID = "[0-9A-Za-z]", r"[0-9A-Za-z\-]"
# Two hyphens in third and fourth place mark encoded names (xn--), whose validity no expression decides: left out.
_LABEL = (
    f"(?:{_HOST_END}{{1,2}}|{_HOST_END}{_HOST_MID}{{1,2}}{_HOST_END}"
    f"|{_HOST_END}{_HOST_MID}(?:{_HOST_END}{_HOST_MID}|\\-{_HOST_END}){_HOST_MID}{{0,58}}{_HOST_END})"
)
_POINTER = "(?:/(?:[^~/]|~[01])*)*"
_PERCENT = "%[0-9A-Fa-f]{2}"
_PLAIN = r"0-9A-Za-z\-._~!$&'()*+,;="
_BEYOND_ASCII = r"\x{A0}-\x{D7FF}\x{F900}-\x{FDCF}\x{FDF0}-\x{FFEF}\x{10000}-\x{1FFFD}\x{20000}-\x{2FFFD}\x{30000}-\x{3FFFD}"
_VARIABLE = f"(?:(?:[0-9A-Za-z_]|{_PERCENT})(?:\\.?(?:[0-9A-Za-z_]|{_PERCENT}))*(?::[1-9][0-9]{{0,3}}|\\*)?)"


def _reference(more: str, *, absolute: bool) -> str:
    plain = _PLAIN + more
    host, user = f"(?:[{plain}]|{_PERCENT})*", f"(?:(?:[{plain}:]|{_PERCENT})*@)?"
    char, first = f"(?:[{plain}:@]|{_PERCENT})", f"(?:[{plain}@]|{_PERCENT})"
    path = f"(?:/{char}*)*"
    authority = f"//{user}{host}(?::[0-9]*)?{path}"
    rooted = f"/(?:{char}+{path})?"
    ends = f"(?:\\?(?:{char}|[/?])*)?(?:#(?:{char}|[/?])*)?"
    whole = f"[A-Za-z][0-9A-Za-z+.\\-]*:(?:{authority}|{rooted}|{char}+{path})?"
    relative = "" if absolute else f"|{authority}|{rooted}|{first}+{path}|"
    return f"(?:{whole}{relative}){ends}"


PATTERNS: Mapping[str, str] = {
    name: f"^(?:{body})$"
    for name, body in {
        "date": _DATE,
        "time": _TIME,
        "date-time": f"{_DATE}[Tt]{_TIME}",
        "hostname": f"{_LABEL}(?:\\.{_LABEL})*",
        "json-pointer": _POINTER,
        "relative-json-pointer": f"(?:0|[1-9][0-9]*)(?:#|{_POINTER})",
        "uri-reference": _reference("", absolute=False),
        "iri": _reference(_BEYOND_ASCII, absolute=True),
        "iri-reference": _reference(_BEYOND_ASCII, absolute=False),
        "uri-template": (
            f'(?:[^\\x{{0}}-\\x{{20}}"%<>\\\\\\^`{{|}}\\x{{7F}}]|{_PERCENT}|\\{{[+#./;?&]?{_VARIABLE}(?:,{_VARIABLE})*\\}})*'
        ),
    }.items()
}
"""Formats held by an expression of ours."""

MAX_LENGTHS: Mapping[str, int] = {"hostname": 253}

RANGES: Mapping[str, Mapping[str, Any]] = {
    **{f"int{bits}": {"minimum": -(2 ** (bits - 1)), "maximum": 2 ** (bits - 1) - 1} for bits in (8, 16, 32, 64)},
    **{f"uint{bits}": {"minimum": 0, "maximum": 2**bits - 1} for bits in (8, 16, 32)},
    "uint64": {"minimum": 0},
    "float": {},
    "double": {},
}
"""Formats of numbers, as bounds."""
