"""Where system and developer messages go: one rule for every API."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from pooled_mlx.core.request import Turn
from pooled_mlx.core.volatile import neutralise

_BLANK_LINE = "\n\n"


def arrange_turns(turns: Iterable[Turn]) -> tuple[Turn, ...]:
    """Join the leading system turns into one and move late ones into the conversation.

    A late system turn is appended to the user turn just before it, or, after an assistant turn, put before the next user
    turn, a blank line between. After a tool result it is appended to that result, so that it never becomes a user query of
    its own (Qwen's templates drop the reasoning of a tool chain at the next user query). With no user turn left it becomes
    a user turn of its own. Volatile parts of system text are neutralised (`core.volatile`). Nothing else is moved, merged or
    dropped.
    """
    arranged: list[Turn] = []
    waiting: list[str] = []
    leading: list[str] = []
    for turn in turns:
        if turn.role == "system":
            text = neutralise(turn.text)
            if not text and (turn.text or arranged):
                continue
            if text != turn.text and not arranged and text in leading:
                continue  # one more of the blocks that a client adds on every turn: they all have one place
            if not arranged:
                leading.append(text)
            elif arranged[-1].role in ("user", "tool") and not waiting:
                arranged[-1] = replace(arranged[-1], text=_join([arranged[-1].text, text]))
            else:
                waiting.append(text)
        elif turn.role == "user" and waiting:
            arranged.append(replace(turn, text=_join([*waiting, turn.text])))
            waiting = []
        elif turn.role == "tool" and waiting:
            arranged.append(replace(turn, text=_join([turn.text, *waiting])))
            waiting = []
        else:
            arranged.append(turn)
    if waiting:
        arranged.append(Turn("user", _join(waiting)))
    if leading:
        arranged.insert(0, Turn("system", _join(leading)))
    return tuple(arranged)


def _join(texts: list[str]) -> str:
    return _BLANK_LINE.join(text for text in texts if text)
