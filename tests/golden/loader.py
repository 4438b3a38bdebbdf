"""Golden transcripts: one file of events, rendered by every wire format.

`events/NAME.json` holds what the engine said:

    {"about": "...", "header": {...}, "bodies": {"chat_completions": {...}}, "events": [{"type": "Text", "text": "Hi"}, ...]}

An event is the class name and its fields; `{"type": "KeepAlive"}` stands for ten seconds of silence. `bodies` holds request
fields for each API on top of `DEFAULT_BODIES`; all parts but `events` may be absent. The expected renderings are
`API/NAME.sse` (the exact stream) and `API/NAME.json` (the whole answer, or status and body of the error).
`UPDATE_GOLDEN=1 pytest tests/golden` writes them anew; read the difference before you commit it.
"""

from __future__ import annotations

import json
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from pooled_mlx.api.edge import Edge, Header, Parsed
from pooled_mlx.core import events as core_events
from pooled_mlx.core.answer import fold
from pooled_mlx.core.errors import ApiError, ErrorKind
from pooled_mlx.core.events import Event, Failed, Finished, Prefill, Queued, Usage, check_order

FOLDER = Path(__file__).parent
REQUEST_ID = "golden0001"
DEFAULT_BODIES: dict[str, dict[str, Any]] = {
    "chat_completions": {"messages": [{"role": "user", "content": "What is a KV cache?"}]},
    "responses": {"input": "What is a KV cache?"},
    "messages": {"max_tokens": 1000, "messages": [{"role": "user", "content": "What is a KV cache?"}]},
}


@dataclass(frozen=True)
class KeepAlive:
    """Ten seconds of silence."""


@dataclass(frozen=True)
class Case:
    """One event file."""

    name: str
    header: Header
    steps: tuple[Event | KeepAlive, ...]
    bodies: dict[str, dict[str, Any]] = field(default_factory=dict)

    @property
    def events(self) -> list[Event]:
        """The events alone."""
        return [step for step in self.steps if not isinstance(step, KeepAlive)]

    def body(self, api: str, *, stream: bool) -> dict[str, Any]:
        """The request body for an API."""
        return {"model": "pooled", **DEFAULT_BODIES[api], **self.bodies.get(api, {}), "stream": stream}


def case_names() -> list[str]:
    """The names of all event files."""
    return sorted(path.stem for path in (FOLDER / "events").glob("*.json"))


def load_case(name: str) -> Case:
    """Read an event file; its events are in legal order."""
    raw = json.loads((FOLDER / "events" / f"{name}.json").read_text(encoding="utf-8"))
    header = Header(**{"model": "pooled/fake-1b", "created": 1_760_000_000, "prompt_tokens": 31, **raw.get("header", {})})
    case = Case(name, header, tuple(_step(dict(step)) for step in raw["events"]), raw.get("bodies", {}))
    check_order(case.events)
    return case


def render_stream(edge: Edge, api: str, case: Case) -> str:
    """The stream as the server would send it."""
    renderer = edge.renderer(_parse(edge, api, case, stream=True), case.header)
    frames = [renderer.start()]
    waiting: Queued | Prefill | None = None
    for step in case.steps:
        if isinstance(step, KeepAlive):
            frames.append(renderer.keep_alive(waiting))
        else:
            waiting = step if isinstance(step, Queued | Prefill) else None
            frames.append(renderer.event(step))
    return "".join(frames)


def render_whole(edge: Edge, api: str, case: Case) -> dict[str, Any]:
    """The whole answer; for a failed request its status and error body."""
    try:
        answer = fold(case.events)
    except ApiError as error:
        status, body, _ = edge.error(error)
        return {"status": status, "body": body}
    return edge.whole(_parse(edge, api, case, stream=False), case.header, answer)


def check_golden(api: str, file_name: str, text: str) -> None:
    """Compare with the expected file, or write it when UPDATE_GOLDEN=1."""
    path = FOLDER / api / file_name
    if os.environ.get("UPDATE_GOLDEN") == "1":
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(text.encode())
    assert path.exists(), f"{path.name} is missing: run UPDATE_GOLDEN=1 pytest tests/golden and read what it wrote"
    assert text == path.read_bytes().decode()


def whole_text(body: dict[str, Any]) -> str:
    """A whole answer as it stands in its file."""
    return json.dumps(body, ensure_ascii=False, indent=2) + "\n"


def _parse(edge: Edge, api: str, case: Case, *, stream: bool) -> Parsed:
    return edge.parse(case.body(api, stream=stream), request_id=REQUEST_ID, client="golden")


def _step(raw: dict[str, Any]) -> Event | KeepAlive:
    kind = raw.pop("type")
    if kind == "KeepAlive":
        return KeepAlive()
    if kind == "Failed":
        return Failed(ApiError(ErrorKind[raw.pop("kind")], raw.pop("message"), **raw))
    if kind == "Finished":
        return Finished(raw.pop("reason"), Usage(**raw.pop("usage")), **raw)
    return getattr(core_events, kind)(**raw)
