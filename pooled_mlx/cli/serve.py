"""`pooled-mlx serve`: settings, model, engine, server, in this order, and the way down."""

from __future__ import annotations

import argparse
import asyncio
import logging
import os
import sys
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pooled_mlx import __version__
from pooled_mlx.catalog import CatalogError
from pooled_mlx.cli.common import Refused, choose_card, load_user_catalog
from pooled_mlx.config import ConfigError, Settings, add_flags, check_host, load_settings, resolve_token, token_file_is_open
from pooled_mlx.core.card import ModelCard
from pooled_mlx.log import set_up_logging
from pooled_mlx.store import StoreError

if TYPE_CHECKING:
    from pooled_mlx.core.memory import DeviceFacts
    from pooled_mlx.replay.script import ReplayScript

_log = logging.getLogger("pooled.serve")

DESCRIPTION = """\
Serves one model on http://127.0.0.1:8080: POST /v1/chat/completions, /v1/responses and /v1/messages, GET /health and a
status page at /. Without --model the best card that fits this machine is downloaded once and served. Ctrl-C ends it.
"""


def add(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "serve",
        help="serve a model to agents and SDKs",
        description=DESCRIPTION,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    add_flags(parser)
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Serve until stopped; returns the exit code: 0 after a normal end, 1 after a refusal or a failure."""
    try:
        settings, problem = load_settings(vars(args)).settings, None
    except ConfigError as error:
        settings, problem = Settings(service=bool(getattr(args, "service", False))), error
    if not settings.service:
        return _attempt(settings, problem, lambda text, temporary: _print_refusal(text))
    from pooled_mlx.mac.places import places
    from pooled_mlx.mac.runs import unattended

    with unattended(places(), __version__) as life:
        code = _attempt(settings, problem, lambda text, temporary: _print_refusal(text) if temporary else life.refuse(text))
        life.end(code)
        return code


def _print_refusal(text: str) -> int:
    print(f"pooled-mlx serve: {text}", file=sys.stderr)
    return 1


def _attempt(settings: Settings, problem: ConfigError | None, refuse: Callable[[str, bool], int]) -> int:
    """One run of the server; every refusal goes to `refuse`, which gives the exit code."""
    try:
        if problem is not None:
            raise problem
        return _serve(settings)
    except (StoreError, Refused) as error:
        return refuse(str(error), error.temporary)
    except (ConfigError, CatalogError) as error:
        return refuse(str(error), False)


def _serve(settings: Settings) -> int:
    set_up_logging(settings.log_level, json_lines=settings.json_log, quiet=settings.quiet)
    token = resolve_token(settings)
    check_host(settings, token)
    if token_file_is_open(settings):
        _log.warning("other users of this machine can read the token file %s: chmod 600 it", settings.token_file)
    # The hub's client reads this when it is imported: a model server calls nobody to report its use.
    os.environ.setdefault("HF_HUB_DISABLE_TELEMETRY", "1")
    from pooled_mlx.runner.devices import read_device

    facts = read_device()
    script = _script(settings)
    card = _card(settings, facts)
    from pooled_mlx.cli.running import Server
    from pooled_mlx.cli.sockets import listen
    from pooled_mlx.server.settings import ServerSettings

    server_settings = ServerSettings(
        host=settings.host,
        port=settings.port,
        token=token,
        allow_hosts=settings.allow_host,
        allow_origins=settings.allow_origin,
    )
    server = Server(settings, server_settings, card, facts, script)
    return asyncio.run(server.run(listen(server_settings)))


def _script(settings: Settings) -> ReplayScript | None:
    """The scripted answers of --replay. Raises `Refused` for a file that cannot be read or has a wrong line."""
    if settings.replay is None:
        return None
    from pooled_mlx.replay.script import ReplayScript, ScriptError, parse_script

    try:
        return ReplayScript(parse_script(Path(settings.replay).expanduser().read_text(encoding="utf-8")))
    except (OSError, UnicodeDecodeError) as error:
        raise Refused(f"--replay {settings.replay}: {getattr(error, 'strerror', None) or error}") from error
    except ScriptError as error:
        raise Refused(f"--replay {settings.replay}: {error}") from error


def _card(settings: Settings, facts: DeviceFacts) -> ModelCard:
    if settings.replay is not None:
        from pooled_mlx.replay.engine import REPLAY_CARD

        return REPLAY_CARD
    card = choose_card(settings, load_user_catalog(), facts)
    # The context of a repo without a card is not known before its config.json is there.
    if settings.context and card.weights_bytes and settings.context > card.context_max:
        raise Refused(f"--context {settings.context} is more than {card.id} can have: {card.context_max} tokens")
    return card
