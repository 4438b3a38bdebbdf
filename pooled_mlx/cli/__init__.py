"""The command line. A subcommand is one module with `add(subparsers)` and `run(args) -> exit code`.

Only the module of the command that is called is imported, so that `pooled-mlx --help` is quick.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from importlib import import_module

from pooled_mlx import __version__

COMMANDS: dict[str, tuple[str, str]] = {
    "serve": ("pooled_mlx.cli.serve", "serve a model to agents and SDKs"),
    "models": ("pooled_mlx.cli.models", "list, show, download and remove models"),
    "connect": ("pooled_mlx.connect.command", "settings for an agent or SDK"),
    "status": ("pooled_mlx.mac.status_command", "what the running server does"),
    "doctor": ("pooled_mlx.cli.doctor", "check this machine and installation"),
    "bench": ("pooled_mlx.cli.bench", "measure the running server"),
    "config": ("pooled_mlx.cli.config", "show the settings and where they come from"),
    "service": ("pooled_mlx.mac.service_command", "run the server as a launchd agent (macOS)"),
    "menubar": ("pooled_mlx.mac.menubar_command", "show the server in the menu bar (macOS)"),
    "completion": ("pooled_mlx.cli.completion", "print a shell completion script"),
}
"""Command -> (module, help)."""

DESCRIPTION = """\
One local model on Apple Silicon, served to coding agents, warm across turns: OpenAI Chat Completions, OpenAI Responses and
Anthropic Messages on one port.

  pooled-mlx serve              picks the best model that fits this machine, downloads it and serves it
  pooled-mlx connect opencode   prints what an agent needs
"""


def build_parser(wanted: Sequence[str] = ()) -> argparse.ArgumentParser:
    """The parser; of the commands in `wanted` with all their options, of the others with their name and help only."""
    parser = argparse.ArgumentParser(
        prog="pooled-mlx", description=DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--version", action="version", version=f"pooled-mlx {__version__}")
    subparsers = parser.add_subparsers(dest="command", metavar="COMMAND", title="commands")
    for name, (module, text) in COMMANDS.items():
        if name in wanted:
            import_module(module).add(subparsers)
        else:
            subparsers.add_parser(name, help=text)
    return parser


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command line; returns the exit code."""
    arguments = list(sys.argv[1:] if argv is None else argv)
    command = next((word for word in arguments if not word.startswith("-")), "")
    parser = build_parser([command] if command in COMMANDS else [])
    args = parser.parse_args(arguments)
    if args.command is None:
        parser.print_help()
        return 0
    try:
        return int(args.run(args) or 0)
    except KeyboardInterrupt:
        print("pooled-mlx: stopped", file=sys.stderr)
        return 130
    except BrokenPipeError:
        # The reader (head, less) has what it wanted.
        sys.stderr.close()
        return 0
