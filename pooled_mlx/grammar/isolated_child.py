"""The child process of `isolated`: reads grammars from stdin, writes what the engine says of each to stdout.

Run as a script. It imports the grammar engine and nothing of this package.
"""

from __future__ import annotations

import resource
import select
import struct
import sys

from llguidance import LLMatcher, LLParserLimits, LLTokenizer

_HEADER = struct.Struct("<I")
_IDLE_SECONDS = 300.0
_MEMORY_BYTES = 3 * 2**30


def main() -> None:
    """Answer until the parent is gone or silent for five minutes."""
    # not every system has the limit; where it has none, the parent's clock is the bound
    hard = resource.getrlimit(resource.RLIMIT_AS)[1]
    if hard == resource.RLIM_INFINITY or hard > _MEMORY_BYTES:
        try:
            resource.setrlimit(resource.RLIMIT_AS, (_MEMORY_BYTES, hard))
        except (OSError, ValueError) as error:
            print(f"no memory limit: {error}", file=sys.stderr)
    tokenizer = LLTokenizer("byte")
    limits = LLParserLimits(max_lexer_states=50_000, max_items_in_row=20_000, step_max_items=200_000, verbose_errors=False)
    _write("")
    while select.select([sys.stdin.buffer], [], [], _IDLE_SECONDS)[0]:
        header = sys.stdin.buffer.read(_HEADER.size)
        if len(header) < _HEADER.size:
            return
        text = sys.stdin.buffer.read(_HEADER.unpack(header)[0]).decode()
        matcher = LLMatcher(tokenizer, LLMatcher.grammar_from_lark(text), log_level=0, limits=limits)
        if not matcher.is_error():
            matcher.compute_bitmask()
        _write(matcher.get_error() if matcher.is_error() else "")


def _write(text: str) -> None:
    data = text.encode()
    sys.stdout.buffer.write(_HEADER.pack(len(data)) + data)
    sys.stdout.buffer.flush()


if __name__ == "__main__":
    main()
