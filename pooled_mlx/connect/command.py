"""`pooled-mlx connect`: settings of an agent or tool for the running server."""

from __future__ import annotations

import argparse
import http.client
import json
import os
import sys
import urllib.error
import urllib.parse
import urllib.request
from pathlib import Path
from typing import Any

from pooled_mlx.config import TOKEN_ENV, ConfigError, config_file, is_loopback, load_settings, resolve_token
from pooled_mlx.connect.registry import AGENTS, DEFAULT_URL, profile_of
from pooled_mlx.connect.target import Surroundings, Target
from pooled_mlx.connect.write import ConnectError, Record, launch, undo_changes, write_changes

_SERVICE_TOKEN = "token"
"""The file beside the settings in which `pooled-mlx service install` keeps the server's token."""
_RECORD = "connect.json"
"""The file beside the settings in which we remember what --write has changed."""
_ANSWER_SECONDS = 10


def add(subparsers: Any) -> None:
    """Add the command's parser."""
    parser = subparsers.add_parser(
        "connect",
        help="settings for an agent or SDK",
        description="Prints the exact settings with which an agent uses the running server. --write puts them into the "
        "agent's own configuration file (a backup is kept, --undo takes them out again), --run starts the agent with them and "
        "changes nothing permanent: with --run the agent talks to this server whatever its own settings say.",
    )
    parser.add_argument("agent", choices=list(AGENTS), metavar="AGENT", help=", ".join(AGENTS))
    action = parser.add_mutually_exclusive_group()
    action.add_argument("--write", action="store_true", help="change the agent's configuration file, with a backup")
    action.add_argument("--undo", action="store_true", help="take back what --write did")
    parser.add_argument("--url", help="where the server is (default: 127.0.0.1 and the port of your settings, 8080)")
    parser.add_argument("--token", help=f"the server's token (better: --token-file or {TOKEN_ENV})")
    parser.add_argument("--token-file", help="file with the server's token (default: that of the service on this machine)")
    parser.add_argument("--model", help="model id, where the server is not running")
    parser.add_argument("--context", type=int, help="context in tokens, where the server is not running")
    action.add_argument(
        "--run",
        dest="start",
        nargs=argparse.REMAINDER,
        metavar="ARGUMENT",
        help="start the agent; everything behind --run is its arguments",
    )
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print, write or start; the exit code is the agent's own with --run."""
    try:
        return _run(args)
    except ConnectError as error:
        print(f"pooled-mlx connect: {error}", file=sys.stderr)
        return 1


def _run(args: argparse.Namespace) -> int:
    around = Surroundings(os.environ, Path.home(), Path.cwd())
    record = Record(config_file().with_name(_RECORD))
    if args.undo:  # what was written is on record: no server is asked
        for line in undo_changes(profile_of(args.agent, Target(DEFAULT_URL, "pooled", 32_768)).changes, around, record):
            print(line)
        return 0
    url, token = find_server(args.url, args.token_file, args.token)
    target = find_target(url, token, args.model, args.context)
    profile = profile_of(args.agent, target)
    if args.start is not None:
        if profile.launch is None:
            raise ConnectError(f"{profile.title} cannot be started from here; the printed settings show how it is used")
        if managed := profile.managed(around):
            raise ConnectError(f"{profile.title} would not talk to this server: {'; '.join(managed)}")
        return launch(profile.launch, args.start, profile.install, urllib.parse.urlsplit(target.base_url).hostname or "")
    if not args.write:
        print(profile.text, end="" if profile.text.endswith("\n") else "\n")
        return 0
    if not profile.changes:
        raise ConnectError(f"{profile.title} has no configuration file to write; leave out --write to see what to do")
    for written in write_changes(profile.changes, around, record):
        if not written.changed:
            print(f"{written.path}: has these settings already")
        elif written.backup is None:
            print(f"{written.path}: written")
        else:
            print(f"{written.path}: changed, the old file is {written.backup.name}")
    if stronger := [*profile.managed(around), *profile.stronger(around)]:
        print(f"{profile.title} will not use these settings yet. They are overruled:", file=sys.stderr)
        for line in stronger:
            print(f"- {line}", file=sys.stderr)
        print(f"Until then: pooled-mlx connect {args.agent} --run", file=sys.stderr)
        return 1
    if profile.after:
        print(f"Start it with: {profile.after}")
    return 0


def find_server(url: str | None, token_file: str | None, token: str | None) -> tuple[str, str | None]:
    """Address and token of the server by flags, environment and settings. Raises `ConnectError`.

    Without any token, a server of this machine gets that of the service, if there is one.
    """
    try:
        settings = load_settings({"token_file": token_file, "token": token}).settings
        found = resolve_token(settings)
    except ConfigError as error:
        raise ConnectError(str(error)) from None
    url = url or f"http://127.0.0.1:{settings.port}"
    service = config_file().with_name(_SERVICE_TOKEN)
    if found is None and is_loopback(urllib.parse.urlsplit(url).hostname or "") and service.is_file():
        try:
            found = service.read_text(encoding="utf-8").strip() or None
        except (OSError, UnicodeDecodeError) as error:
            raise ConnectError(f"cannot read the service's token in {service}: {error}") from None
    return url, found


def find_target(url: str, token: str | None, model: str | None, context_tokens: int | None) -> Target:
    """The server's facts, asked of it unless both `model` and `context_tokens` are given. Raises `ConnectError`."""
    base = url.rstrip("/").removesuffix("/v1")
    parts = urllib.parse.urlsplit(base)
    if parts.scheme not in ("http", "https") or not parts.netloc:
        raise ConnectError(f"--url {url!r} is no address; it should look like http://127.0.0.1:8080")
    if model and context_tokens:
        return Target(base, model, context_tokens, token)
    entry = _ask(base, token)
    return Target(base, model or entry["id"], context_tokens or entry["context_length"], token, entry["thinking"])


def _ask(base: str, token: str | None) -> dict[str, Any]:
    request = urllib.request.Request(f"{base}/v1/models")
    if token:
        request.add_header("Authorization", f"Bearer {token}")
    # A proxy of the environment knows nothing of this machine's own ports.
    opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))
    try:
        with opener.open(request, timeout=_ANSWER_SECONDS) as response:
            entry = json.load(response)["data"][0]
            thinks = entry.get("thinking") is not False  # an older server does not say
            return {"id": str(entry["id"]), "context_length": int(entry["context_length"]), "thinking": thinks}
    except urllib.error.HTTPError as error:
        advice = f"Give its token with --token-file or {TOKEN_ENV}." if error.code == 401 else "Is it pooled-mlx?"
        raise ConnectError(f"{base} answered {error.code} to GET /v1/models. {advice}") from None
    except (OSError, http.client.HTTPException) as error:
        reason = getattr(error, "reason", error)
        raise ConnectError(
            f"no server at {base} ({reason}). Start it with `pooled-mlx serve`, or give --model and --context."
        ) from None
    except (ValueError, KeyError, IndexError, TypeError):
        raise ConnectError(f"{base} did not answer as pooled-mlx does to GET /v1/models.") from None
