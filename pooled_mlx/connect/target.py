"""What a profile is made from, and what it consists of."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Protocol

TEMPORARY = "@TEMPORARY@"
"""Stands in a `Launch` for the folder that holds its files while the client runs."""

_MOST_OUTPUT_TOKENS = 16_384
_LEAST_OUTPUT_TOKENS = 1_024
_ANY_KEY = "pooled"


@dataclass(frozen=True, slots=True)
class Target:
    """The server that a client is to use.

    `base_url` is its root without `/v1` and without a slash at the end, `model_id` the public id, `token` the token that
    clients must send or None when any key works. `thinks`: the model can think.
    """

    base_url: str
    model_id: str
    context_tokens: int
    token: str | None = None
    thinks: bool = True

    @property
    def openai_url(self) -> str:
        """The base URL of the OpenAI APIs."""
        return f"{self.base_url}/v1"

    @property
    def key(self) -> str:
        """What to send as API key: the token, or any word."""
        return self.token or _ANY_KEY

    @property
    def output_tokens(self) -> int:
        """Tokens that a client should plan for one answer: an eighth of the context, 1024 to 16384.

        Clients reserve this much of the window: with more, one with a long system prompt would compact its first turn.
        """
        return max(_LEAST_OUTPUT_TOKENS, min(_MOST_OUTPUT_TOKENS, self.context_tokens // 8))

    @property
    def compact_tokens(self) -> int:
        """Prompt length at which a client should compact: room is left for one answer and for the summary itself."""
        return self.context_tokens - 2 * self.output_tokens

    @property
    def label(self) -> str:
        """The model's name in a client's menu."""
        return f"{self.model_id} (local)"


class Merge(Protocol):
    """How our settings come into a client's file, and out of it again."""

    def __call__(self, old: str | None) -> str:
        """The new text for the old one (None: no such file). Raises `CannotMerge`."""
        ...

    def undo(self, current: str, written: str, original: str | None) -> str | None:
        """`current`, which somebody has changed since we had `written` it, without our settings; None: nothing is left.

        What ours replaced comes back from `original`, the text before our first change (None: there was no file). Raises
        `CannotMerge`.
        """
        ...


@dataclass(frozen=True, slots=True)
class FileChange:
    """A file of the client's own and how it changes.

    `path` begins with `~/` or is relative to the working folder. `variable` names the environment variable with which the
    user may have moved the folder `moved`, the beginning of `path`. `better` are names of files in the same folder that
    the client prefers to this one where they exist.
    """

    path: str
    merge: Merge
    variable: str = ""
    moved: str = ""
    better: tuple[str, ...] = ()


class CannotMerge(Exception):
    """The client's file has a form that cannot be changed safely; the message says what to do by hand."""


@dataclass(frozen=True, slots=True)
class Launch:
    """How to start the client with these settings and nothing permanent. `TEMPORARY` in any text is the folder of `files`.

    Whatever the user has set elsewhere, the client must talk to our server and to no other: `env` replaces variables, `without`
    are those it must not see, and `own_options` are options that we give and the user may not give again.
    """

    argv: tuple[str, ...]
    env: Mapping[str, str] = field(default_factory=dict[str, str])
    files: Mapping[str, str] = field(default_factory=dict[str, str])
    without: tuple[str, ...] = ()
    own_options: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class Surroundings:
    """Where a client would look for settings: environment, home folder, working folder."""

    env: Mapping[str, str]
    home: Path
    folder: Path


def no_conflicts(_: Surroundings) -> list[str]:
    """For clients in which nothing wins over what we write."""
    return []


@dataclass(frozen=True, slots=True)
class Profile:
    """The settings of one client for one server.

    `text` is what to print. `changes` is empty where there is nothing to write, `launch` None where nothing can be started.
    `install` says where the program comes from, `after` what to type once the files are written. `stronger` finds settings of
    the user's, each a sentence, that win over what --write has written; `managed` those that win over --run as well.
    """

    name: str
    title: str
    text: str
    install: str
    changes: tuple[FileChange, ...] = ()
    launch: Launch | None = None
    after: str = ""
    stronger: Callable[[Surroundings], list[str]] = no_conflicts
    managed: Callable[[Surroundings], list[str]] = no_conflicts
