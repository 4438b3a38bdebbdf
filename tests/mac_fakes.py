"""Stand-ins for the Mac: a clock moved by hand, child processes, launchd, and a server's facts as `/health` gives them."""

from __future__ import annotations

import plistlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from pooled_mlx.mac.launchd import Ran
from pooled_mlx.mac.places import Places


class FakeClock:
    """Seconds that pass only when a test says so. `sleep` moves it."""

    def __init__(self, now: float = 1_000.0) -> None:
        self.now = now

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.now += seconds


class FakeChild:
    """A process that ends when the test sets `code`, or when it is asked to and does not resist."""

    def __init__(self, pid: int, *, resists: bool = False) -> None:
        self.pid = pid
        self.code: int | None = None
        self.resists = resists
        self.asked = 0
        self.killed = 0

    def poll(self) -> int | None:
        return self.code

    def terminate(self) -> None:
        self.asked += 1
        if not self.resists:
            self.code = 0

    def kill(self) -> None:
        self.killed += 1
        self.code = -9


class FakeLaunchd:
    """Answers the launchctl commands for any number of agents, and keeps what it was told.

    `on_start` is called with the plist's content when an agent starts. A bootout takes `slow_bootouts` looks to finish.
    Without a `desktop` there is no domain `gui/501`. Agents that `resist` do not end when they are asked to.
    """

    def __init__(self, on_start: Callable[[dict[str, Any]], None] = lambda _: None) -> None:
        self.commands: list[list[str]] = []
        self.loaded: dict[str, dict[str, Any]] = {}
        self.running: set[str] = set()
        self.on_start = on_start
        self.slow_bootouts = 0
        self.desktop = True
        self.resists = False
        self.domains: dict[str, str] = {}
        self.refuse: str | None = None
        self._leaving: dict[str, int] = {}

    def __call__(self, command: Sequence[str]) -> Ran:
        assert command[0] == "/bin/launchctl"
        self.commands.append(list(command[1:]))
        verb, *rest = command[1:]
        if self.refuse == verb:
            return Ran(5, f"{verb.capitalize()} failed: 5: Input/output error\n")
        if not self.desktop and rest[0].startswith("gui/"):
            return Ran(125, "Domain does not support specified action\n")
        if verb == "print":
            return self._print(rest[0])
        if verb == "bootstrap":
            facts = plistlib.loads(Path(rest[1]).read_bytes())
            if facts["Label"] in self.loaded:
                return Ran(5, "Bootstrap failed: 5: Input/output error\n")
            if (facts.get("LimitLoadToSessionType") == "Background") != rest[0].startswith("user/"):
                return Ran(134, "Bootstrap failed: 134: Service cannot load in requested session\n")
            self.loaded[facts["Label"]] = facts
            self.domains[facts["Label"]] = rest[0]
            self._start(facts["Label"])
        elif verb == "bootout":
            label = rest[0].rsplit("/", 1)[1]
            self.running.discard(label)
            self._leaving[label] = self.slow_bootouts
            if not self.slow_bootouts:
                del self.loaded[label]
        elif verb == "kickstart":
            self._start(rest[-1].rsplit("/", 1)[1])
        elif verb == "kill" and not self.resists:
            self.running.discard(rest[1].rsplit("/", 1)[1])
        return Ran(0, "")

    def _start(self, label: str) -> None:
        self.running.add(label)
        self.on_start(self.loaded[label])

    def _print(self, target: str) -> Ran:
        if target.count("/") == 1:
            return Ran(0, f"{target} = {{\n}}\n")
        domain, _, label = target.rpartition("/")
        if self._leaving.get(label):
            self._leaving[label] -= 1
            if not self._leaving[label]:
                self.loaded.pop(label, None)
        if label not in self.loaded or self.domains.get(label) != domain:
            return Ran(113, f'Could not find service "{label}" in domain for user gui: 501\n')
        running = label in self.running
        lines = [
            f"gui/501/{label} = {{",
            "\tactive count = 1",
            f"\tpath = /Users/somebody/Library/LaunchAgents/{label}.plist",
            f"\tstate = {'running' if running else 'not running'}",
            "\truns = 3",
            *(["\tpid = 4242"] if running else []),
            "\tlast exit code = 0",
            "\tspawn type = interactive (4)",
            "}",
        ]
        return Ran(0, "\n".join(lines) + "\n")


def mac_places(home: Path) -> Places:
    """The Mac's folders under a temporary home."""
    library = home / "Library"
    return Places(
        logs=library / "Logs" / "pooled-mlx",
        state=library / "Application Support" / "pooled-mlx",
        agents=library / "LaunchAgents",
        config=home / ".config" / "pooled-mlx",
    )


GIB = 1024**3


def health_body(**changes: Any) -> dict[str, Any]:
    """A whole `/health` body of a server with one request in decode and one waiting, changed as given."""
    body: dict[str, Any] = {
        "ok": True,
        "ready": True,
        "reason": None,
        "version": "0.1.0",
        "state": "ready",
        "progress": None,
        "model": {
            "id": "pooled/qwen3.6-35b-moe",
            "card": "qwen3.6-35b-moe",
            "label": "Qwen3.6 35B A3B",
            "quantization": "4-bit",
            "context": 131072,
        },
        "ctx": 131072,
        "queue": 1,
        "running": 2,
        "served": 214,
        "failed": 1,
        "uptime_seconds": 4321.0,
        "requests": [
            {
                "id": "req_3",
                "client": "claude-cli",
                "api": "messages",
                "state": "decode",
                "ahead": 0,
                "prefill_done": 21034,
                "prefill_total": 21034,
                "cached": 20480,
                "generated": 312,
                "seconds": 8.4,
                "tokens_per_second": 61.2,
            },
            {
                "id": "req_4",
                "client": "codex",
                "api": "responses",
                "state": "prefill",
                "ahead": 0,
                "prefill_done": 12288,
                "prefill_total": 29971,
                "cached": 8192,
                "generated": 0,
                "seconds": 3.1,
                "tokens_per_second": None,
            },
            {
                "id": "req_5",
                "client": "opencode",
                "api": "chat_completions",
                "state": "queued",
                "ahead": 2,
                "prefill_done": 0,
                "prefill_total": 8133,
                "cached": 0,
                "generated": 0,
                "seconds": 1.2,
                "tokens_per_second": None,
            },
        ],
        "recent": [
            {
                "id": "req_2",
                "client": "claude-cli",
                "finished_at": 1_790_000_000.0,
                "prompt_tokens": 20512,
                "cached_tokens": 19968,
                "prefilled_tokens": 544,
                "completion_tokens": 230,
                "reasoning_tokens": 0,
                "seconds": 6.2,
                "ttft_seconds": 1.1,
                "finish": "tool_calls",
                "why": "all but the last turn was in the pool",
            },
            {
                "id": "req_1",
                "client": "codex",
                "finished_at": 1_789_999_970.0,
                "prompt_tokens": 9841,
                "cached_tokens": 0,
                "prefilled_tokens": 9841,
                "completion_tokens": 801,
                "reasoning_tokens": 512,
                "seconds": 31.0,
                "ttft_seconds": 14.8,
                "finish": "stop",
                "why": "first request of this conversation: nothing to reuse",
            },
        ],
        "rates": [{"t": 1_790_000_000.0 + second, "tokens_per_second": 40.0 + second % 25} for second in range(0, 240, 5)],
        "memory": {
            "limit_bytes": 48 * GIB,
            "weights_bytes": 19 * GIB,
            "pool_budget_bytes": 16 * GIB,
            "pool_bytes": 5 * GIB,
            "live_bytes": 1 * GIB,
            "active_bytes": 25 * GIB,
            "peak_bytes": 27 * GIB,
            "cache_bytes": 1 * GIB,
            "process_bytes": 27 * GIB,
            "wired_bytes": 0,
        },
        "sampling": {"temperature": 0.7, "top_k": 20},
        "prefill_step": 2048,
    }
    body.update(changes)
    return body


def pool_body() -> dict[str, Any]:
    """A `/pool` body: two clients; one has two conversations and a side request above one system prompt."""
    mib = 1024**2

    def segment(name: str, start: int, end: int, **more: Any) -> dict[str, Any]:
        facts = {
            "id": name,
            "start": start,
            "end": end,
            "bytes": (end - start) * 48 * 1024,
            "state_bytes": 30 * mib,
            "resumable": True,
            "kind": "prompt",
            "boundary": "turn",
            "hits": 0,
            "in_use": 0,
        }
        return {**facts, **more}

    def node(kind: str, client: str, idle: float, rows: list[dict[str, Any]], *children: Any, why: str = "") -> dict[str, Any]:
        return {
            "id": rows[-1]["id"],
            "client": client,
            "label": f"{client}: system + tools" if kind == "system" else client,
            "kind": kind,
            "start": rows[0]["start"],
            "end": rows[-1]["end"],
            "tokens": rows[-1]["end"] - rows[0]["start"],
            "bytes": sum(row["bytes"] for row in rows),
            "states": sum(row["resumable"] for row in rows),
            "hits": rows[0]["hits"],
            "in_use": rows[0]["in_use"],
            "age_seconds": idle,
            "lifetime_seconds": idle + 600,
            "why": why,
            "segments": rows,
            "children": list(children),
        }

    a1 = segment("a1", 0, 16384, boundary="system", hits=41)
    a2 = segment("a2", 16384, 20480, boundary="user", hits=37, in_use=1)
    a3 = segment("a3", 20480, 21034, kind="answer", hits=2)
    b1, b2 = segment("b1", 16384, 18020, hits=12), segment("b2", 18020, 18540, resumable=False, state_bytes=0)
    c1 = segment("c1", 16384, 16500, kind="side")
    d1, d2 = segment("d1", 0, 9841, boundary="user", hits=3), segment("d2", 9841, 10642, kind="answer", hits=1)
    nodes = [
        node(
            "system",
            "claude-cli",
            3.0,
            [a1],
            node("conversation", "claude-cli", 3.0, [a2, a3]),
            node("conversation", "claude-cli", 1260.0, [b1, b2], why="reused 16384 of 18540: edited in turn 4"),
            node("side", "claude-cli", 4000.0, [c1]),
        ),
        node("conversation", "codex", 45.0, [d1, d2]),
    ]
    used = sum(row["bytes"] for row in (a1, a2, a3, b1, b2, c1, d1, d2))
    return {
        "budget_bytes": 16 * GIB,
        "used_bytes": used,
        "segment_bytes": used,
        "reserved_bytes": 0,
        "spare_bytes": 0,
        "segments": 8,
        "states": 7,
        "tokens": 34_000,
        "conversation_count": 4,
        "conversations": nodes,
        "pins": [{"client": "claude-cli", "id": "a1", "tokens": 16384}],
        "exact_ids": {"answers": 12, "bytes": 90_000, "budget_bytes": 64 * mib},
        "divisible": False,
        "cut_rule": {"step": 2048, "spacing": 4096, "minimum": 64, "shrinks": []},
        "counters": {"hits": 90, "misses": 4, "inserted": 118, "evicted: side": 3},
        "reasons": [],
        "snapshot_age_seconds": 0.2,
    }
