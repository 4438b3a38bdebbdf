"""One life of the server: it listens at once, gets its model ready in the background, and goes down in order."""

from __future__ import annotations

import asyncio
import logging
import os
import sys
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from importlib.metadata import version
from pathlib import Path
from typing import Any

from pooled_mlx import __version__
from pooled_mlx.api.chat_completions import EDGE as CHAT_COMPLETIONS
from pooled_mlx.api.messages import MessagesEdge
from pooled_mlx.api.responses import ResponsesEdge
from pooled_mlx.catalog import EMBEDDED_CARD
from pooled_mlx.cli.banner import banner
from pooled_mlx.cli.common import Refused, check_fit, convert, engine_settings, load_user_catalog
from pooled_mlx.cli.quiet_check import CheckRecords, QuietCheck
from pooled_mlx.cli.starting import StartingEngine
from pooled_mlx.config import Settings
from pooled_mlx.connect.registry import AGENTS, profile_of
from pooled_mlx.connect.target import Target
from pooled_mlx.core.card import ModelCard
from pooled_mlx.core.errors import ApiError, ErrorKind
from pooled_mlx.core.events import Event, Failed, Finished
from pooled_mlx.core.memory import DeviceFacts
from pooled_mlx.core.ports import Engine
from pooled_mlx.mac.power import power_guard
from pooled_mlx.mac.pressure import PressureWatch, system_pressure
from pooled_mlx.metrics import METRICS_CONTENT_TYPE, Metrics, RequestWatch, render_metrics
from pooled_mlx.page import page_html
from pooled_mlx.replay.script import ReplayScript
from pooled_mlx.server.app import create_app
from pooled_mlx.server.hooks import Hooks
from pooled_mlx.server.serve import StopSignal, port_of, serve
from pooled_mlx.server.settings import ServerSettings
from pooled_mlx.store import Progress, Ready, StoreError, ensure_model
from pooled_mlx.store.paths import cache_folder
from pooled_mlx.store.progress import TerminalBar

_log = logging.getLogger("pooled.serve")

LOADER_SECONDS = 10.0
ENGINE_SECONDS = 60.0
"""Within `mac.supervisor.STOP_SECONDS` together: whoever started this process may kill it after those."""


class _Stopped(Exception):
    """The server is going down while the model is still being made ready."""


class Server:
    """Model, engine and HTTP server of one process. `script`: answers instead of those of a model."""

    def __init__(
        self,
        settings: Settings,
        server_settings: ServerSettings,
        card: ModelCard,
        facts: DeviceFacts,
        script: ReplayScript | None = None,
    ) -> None:
        self._settings, self._server_settings, self._card, self._facts = settings, server_settings, card, facts
        self._script = script
        self._starting = StartingEngine(card, settings.context)
        self._stopping = threading.Event()
        self._failure: Exception | None = None
        self._room: Any = None
        self._metrics = Metrics()
        self._awake = power_guard(settings.keep_awake, _log.warning)
        # Starting and ending a process takes milliseconds, which the event loop does not have; one thread keeps the order.
        self._power = ThreadPoolExecutor(1, thread_name_prefix="power")
        self._busy, self._busy_lock = 0, threading.Lock()
        self._was_ready = False
        self._port = server_settings.port
        self._agents: list[dict[str, str]] = []
        self._pressure: PressureWatch | None = None
        self._quiet = QuietCheck(lambda: self._was_ready and self._busy == 0, CheckRecords(cache_folder() / "checks.json"))
        self._folder = Path()

    async def run(self, sockets: Sequence[Any]) -> int:
        """Serve until asked to stop; returns the exit code. Raises what made the start impossible."""
        port = self._port = port_of(sockets)
        # A worker that decodes a large body holds the interpreter: let the event loop have it back sooner.
        sys.setswitchinterval(0.001)
        stop = StopSignal()
        app = create_app(self._starting, **self._routes(), settings=self._server_settings, hooks=self._hooks())
        # A daemon, so that a second Ctrl-C need not wait for a silent network. The engine has its own, joined thread.
        loader = threading.Thread(target=self._get_ready, args=(stop, port), name="pooled-start", daemon=True)
        served = asyncio.create_task(serve(app, sockets, stop=stop, handle_signals=True))
        await asyncio.sleep(0)  # from here on Ctrl-C is the server's, so the start may begin
        loader.start()
        quiet = asyncio.create_task(self._check_quietly())
        try:
            code = await served
        finally:
            quiet.cancel()
            self._stopping.set()
            await asyncio.to_thread(self._go_down, loader)
        if self._failure is not None:
            raise self._failure
        if code == 0:
            _log.info("stopped")
        return code

    async def _check_quietly(self) -> None:
        if not self._settings.self_check or self._script is not None:
            self._quiet.facts = {"state": "off"}
            return
        try:
            await self._quiet.run(lambda: self._room, self._check_key)
        except Exception:
            _log.exception("the self-check could not be made")

    def _check_key(self) -> str:
        from pooled_mlx.runner.fingerprint import files_key

        versions = " ".join(f"{name} {version(name)}" for name in ("mlx", "mlx-lm"))
        return f"{files_key(self._folder)} pooled-mlx {__version__} {versions}"

    def _go_down(self, loader: threading.Thread) -> None:
        loader.join(LOADER_SECONDS)
        if self._room is not None:
            self._room.stop(ENGINE_SECONDS)
        if self._pressure is not None:
            self._pressure.close()
        self._power.submit(self._awake.close)
        self._power.shutdown()

    # --- on the start thread

    def _get_ready(self, stop: StopSignal, port: int) -> None:
        self.count_busy(1)
        try:
            self._open(stop, port)
        except _Stopped:
            _log.info("stopped before the model was ready; the next start goes on from there")
        except (StoreError, Refused) as error:
            self._fail(error, stop)
        except Exception as error:
            _log.exception("the model cannot be loaded")
            self._fail(Refused(f"the model {self._card.id} cannot be loaded: {error}"), stop)
        finally:
            self.count_busy(-1)

    def _open(self, stop: StopSignal, port: int) -> None:
        settings = self._settings
        with TerminalBar() as bar:
            ready = ensure_model(
                self._card if self._script is None else load_user_catalog().cards[EMBEDDED_CARD],
                convert=convert,
                report=lambda progress: self._report(progress, bar),
                check_fit=check_fit(self._facts, settings.memory_limit),
            )
        self._folder = ready.folder
        died = threading.Event()

        def on_dead(reason: str) -> None:
            if not died.is_set():
                died.set()
                self._died(reason, stop)

        _log.info("loading %s; http://127.0.0.1:%s/health tells how far it is", self._card.id, port)
        self._room = self._make_room(ready, on_dead)
        self._starting.become(self._room)
        if self._stopping.is_set():
            raise _Stopped
        if not self._room.wait_ready():
            return
        self._was_ready = True
        self._pressure = PressureWatch(
            system_pressure(),
            lambda hold, level: self._room.set_pool_share(hold.share, keep_pins=hold.keeps_pins),
            used=self._room.pool_share_used,
            warn=_log.info,
        )
        self._pressure.start()
        _log.info("serving %s on port %s", self._starting.model.public_id, port)
        if not (settings.quiet or settings.json_log or settings.service):
            try:
                print(banner(self._server_settings, port, self._room), flush=True)
            except OSError:  # nobody reads it any more; the log goes elsewhere
                sys.stdout = open(os.devnull, "w")  # noqa: SIM115

    def _make_room(self, ready: Ready, on_dead: Callable[[str], None]) -> Any:
        from pooled_mlx.engine.engine import open_engine
        from pooled_mlx.runner.model import BLAS
        from pooled_mlx.runner.start import MlxSource

        if sys.platform == "linux" and BLAS is None:
            _log.info("OpenBLAS is not installed: for a 30 times faster CPU backend apt-get install libopenblas0-pthread")
        room_settings = engine_settings(self._settings)
        if self._script is None:
            room = open_engine(ready.card, ready.folder, room_settings, MlxSource(), on_dead=on_dead)
            if notice := room.call_form.notice:
                _log.warning("%s: %s", ready.card.id, notice)
            return room
        from pooled_mlx.replay.engine import open_replay_engine

        return open_replay_engine(self._script, ready.folder, cache_folder() / "replay", room_settings, on_dead=on_dead)

    def _report(self, progress: Progress, bar: TerminalBar) -> None:
        if self._stopping.is_set():
            raise _Stopped
        self._starting.report(progress)
        if not (self._settings.quiet or self._settings.service):
            bar(progress)

    def _fail(self, error: Exception, stop: StopSignal) -> None:
        self._failure = error
        self._starting.fail(str(error))
        stop.request(1)

    def _died(self, reason: str, stop: StopSignal) -> None:
        """The engine is gone: before it was ready the start is refused, afterwards the process ends as a crash."""
        if self._stopping.is_set():
            return
        if not self._was_ready:
            self._failure = Refused(f"the model {self._card.id} cannot be loaded: {reason}")
        else:
            _log.critical("the engine is dead, the server ends: %s", reason)
        stop.request(1)

    # --- what the server is made of

    def _routes(self) -> dict[str, Any]:
        responses, messages = ResponsesEdge(), MessagesEdge()
        return {
            "edges": {"/v1/chat/completions": CHAT_COMPLETIONS, "/v1/responses": responses, "/v1/messages": messages},
            "count_routes": [*responses.count_routes(), *messages.count_routes()],
            "extra_routes": responses.extra_routes(),
        }

    def _hooks(self) -> Hooks:
        return Hooks(
            page=page_html(),
            metrics=self._metrics_text,
            metrics_content_type=METRICS_CONTENT_TYPE,
            watch=lambda api: _Watch(self, self._metrics.watch(api)),
            refused=self._count_refusal,
            unenforced=self._metrics.unenforced,
            health=self._page_facts,
        )

    def _page_facts(self) -> dict[str, Any]:
        """What the status page shows beside the engine's facts: the agents' settings, made once the model is known."""
        if not self._agents and self._was_ready:
            model = self._starting.model
            token = "YOUR_TOKEN" if self._server_settings.token else None
            target = Target(f"http://127.0.0.1:{self._port}", model.public_id, model.context_tokens, token)
            self._agents = [{"id": name, "label": name, "text": profile_of(name, target).text} for name in AGENTS]
        return {"agents": self._agents, "self_check": self._quiet.facts}

    def _metrics_text(self) -> str:
        engine: Engine = self._starting
        try:
            pool = engine.pool()
        except ApiError:
            pool = {}
        return render_metrics(engine.health(), pool, self._metrics)

    def _count_refusal(self, kind: ErrorKind) -> None:
        self._metrics.error(kind)

    def request_came(self) -> None:
        """A request was queued; called on the event loop."""
        self._quiet.request_came()

    def count_busy(self, change: int) -> None:
        """One request, or the start, is under way or over: the Mac is kept awake meanwhile. Safe to call on any thread."""
        with self._busy_lock:
            before, self._busy = self._busy, self._busy + change
            if (before > 0) != (self._busy > 0) and not self._stopping.is_set():
                self._power.submit(self._awake.update, self._busy)


class _Watch:
    """Counts one request in the metrics, and keeps the Mac awake while it is under way."""

    def __init__(self, server: Server, counts: RequestWatch) -> None:
        self._server, self._counts = server, counts
        self._open = True
        server.count_busy(1)
        server.request_came()

    def event(self, event: Event) -> None:
        """The next event."""
        self._counts.event(event)
        if isinstance(event, Finished | Failed):
            self._end()

    def cancelled(self) -> None:
        """The client went away, or the stream is over."""
        self._counts.cancelled()
        self._end()

    def _end(self) -> None:
        if self._open:
            self._open = False
            self._server.count_busy(-1)
