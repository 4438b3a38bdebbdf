"""Text that a client changes from request to request and that says nothing to the model.

In a system prompt it would make every prompt new from that place on. It is replaced by fixed words before anything is rendered
or counted. Only system text is touched: the same words in a user message are the user's own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class VolatileRule:
    """`pattern` is looked for only where `mark` is in the text, and replaced by `fixed` (may refer to groups).

    Clients that add a line of this kind on every turn and keep the old ones get one for a row of them.
    """

    name: str
    mark: str
    pattern: re.Pattern[str]
    fixed: str

    @property
    def row(self) -> re.Pattern[str]:
        """All of a row but its last."""
        one = self.pattern.pattern
        return re.compile(rf"(?:{one}\s*)+(?={one})", self.pattern.flags)


RULES: tuple[VolatileRule, ...] = (
    VolatileRule(
        "Claude Code's billing line: a code of the conversation, a number of the request",
        "x-anthropic-billing-header:",
        re.compile(
            r"^x-anthropic-billing-header:(?:[ \t]*[A-Za-z_][\w.-]*=[^;\s]*(?:;|(?=[ \t]*$)))+[ \t]*(?:\r?\n)*", re.MULTILINE
        ),
        "",
    ),
    VolatileRule(
        "Claude Code's countdown of tokens",
        "<total_tokens>",
        re.compile(r"<total_tokens>\s*[\d,._ ]+\s*tokens left\s*</total_tokens>"),
        "<total_tokens>enough tokens left</total_tokens>",
    ),
    VolatileRule(
        "token use as reported to Claude models",
        "oken usage:",
        re.compile(r"(\b[Tt]oken usage:) *[\d,._]+ */ *[\d,._]+; *[\d,._]+ remaining"),
        r"\1 within the limit",
    ),
)


def neutralise(text: str) -> str:
    """System text with its volatile parts replaced."""
    for rule in RULES:
        if rule.mark in text:
            if rule.fixed:  # a row of them counts once, however many turns have added theirs
                text = rule.row.sub("", text)
            text = rule.pattern.sub(rule.fixed, text)
    return text
