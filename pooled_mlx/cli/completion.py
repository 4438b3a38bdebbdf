"""`pooled-mlx completion`: completion of commands, flags and card ids for a shell, made from the parser."""

from __future__ import annotations

import argparse
from collections.abc import Iterator
from typing import Any

_WORDS = 'compgen -W "$words" -- "$current"'
_INSTALL = {
    "bash": 'eval "$(pooled-mlx completion bash)"   # in ~/.bashrc',
    "zsh": 'eval "$(pooled-mlx completion zsh)"    # in ~/.zshrc, after compinit',
    "fish": "pooled-mlx completion fish | source     # in ~/.config/fish/config.fish",
}


def add(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser(
        "completion",
        help="print a shell completion script",
        description="Install it with one line:\n\n" + "\n".join(f"  {line}" for line in _INSTALL.values()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("shell", choices=tuple(_INSTALL))
    parser.set_defaults(run=run)


def run(args: argparse.Namespace) -> int:
    """Print the script."""
    from pooled_mlx.catalog import load_catalog
    from pooled_mlx.cli import COMMANDS, build_parser

    paths = dict(_walk(build_parser(list(COMMANDS)), ()))
    cards = sorted(load_catalog().cards)
    print({"bash": _bash, "zsh": _zsh, "fish": _fish}[args.shell](paths, cards), end="")
    return 0


def _walk(parser: argparse.ArgumentParser, path: tuple[str, ...]) -> Iterator[tuple[tuple[str, ...], list[str]]]:
    """(command path, the words that may follow it) for every command and sub-command."""
    words: list[str] = []
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            words += action.choices
            for name, child in action.choices.items():
                yield from _walk(child, (*path, name))
        elif action.option_strings:
            words += [option for option in action.option_strings if option.startswith("--")]
        elif action.choices:
            words += [str(choice) for choice in action.choices]
    yield path, words


def _cases(paths: dict[tuple[str, ...], list[str]]) -> str:
    longest_first = sorted(paths.items(), key=lambda entry: (-len(entry[0]), entry[0]))
    return "".join(f'    "{" ".join(path)}"*) words="{" ".join(words)}" ;;\n' for path, words in longest_first if path)


def _bash(paths: dict[tuple[str, ...], list[str]], cards: list[str]) -> str:
    return f"""_pooled_mlx() {{
  local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}" words
  case "${{COMP_WORDS[*]:1:COMP_CWORD-1}}" in
{_cases(paths)}    *) words="{" ".join(paths[()])}" ;;
  esac
  case "$previous" in
    --model|show|pull|rm) words="{" ".join(cards)}" ;;
    --config|--token-file|--replay) COMPREPLY=($(compgen -f -- "$current")); return ;;
  esac
  COMPREPLY=($({_WORDS}))
}}
complete -F _pooled_mlx pooled-mlx
"""


def _zsh(paths: dict[tuple[str, ...], list[str]], cards: list[str]) -> str:
    return "autoload -Uz bashcompinit && bashcompinit\n" + _bash(paths, cards)


def _fish(paths: dict[tuple[str, ...], list[str]], cards: list[str]) -> str:
    lines = ["complete -c pooled-mlx -f", f'complete -c pooled-mlx -n __fish_use_subcommand -a "{" ".join(paths[()])}"']
    for path, words in sorted(paths.items()):
        if not path:
            continue
        seen = "; and ".join(f"__fish_seen_subcommand_from {name}" for name in path)
        lines.append(f'complete -c pooled-mlx -n "{seen}" -a "{" ".join(words)}"')
    models = "__fish_seen_subcommand_from show pull rm"
    lines.append(f'complete -c pooled-mlx -n "{models}" -a "{" ".join(cards)}"')
    return "\n".join(lines) + "\n"
