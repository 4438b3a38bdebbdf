"""What can be wrong with a schema, and what of it is not enforced."""

from __future__ import annotations

from typing import NamedTuple


class Unenforced(NamedTuple):
    """A keyword that no rule enforces: its JSON pointer, its name, and why."""

    pointer: str
    keyword: str
    why: str


class SchemaError(Exception):
    """A schema that is broken, over a limit, or (strict) not enforceable. `pointer` is the JSON pointer of the keyword."""

    def __init__(self, pointer: str, keyword: str, message: str) -> None:
        super().__init__(f"{pointer or '#'}: {message}")
        self.pointer = pointer
        self.keyword = keyword
        self.message = message
