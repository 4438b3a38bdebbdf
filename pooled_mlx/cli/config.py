"""`pooled-mlx config`: the settings in force, all settings, where the file is."""

from __future__ import annotations

import argparse
import json
from typing import Any

from pooled_mlx.cli.common import plainly, table
from pooled_mlx.config import GROUPS, TABLE, add_flags, config_file, load_settings, shown


def add(subparsers: Any) -> None:
    """Add the command."""
    parser = subparsers.add_parser("config", help="show the settings and where they come from")
    actions = parser.add_subparsers(dest="action", metavar="ACTION", required=True)
    entry = actions.add_parser("show", help="the values in force, and where each one was set; takes the flags of serve")
    entry.add_argument("--json", action="store_true", help="print JSON")
    add_flags(entry)
    actions.add_parser("list", help="every setting: name, flag, variable, meaning")
    actions.add_parser("path", help="the settings file")
    parser.set_defaults(run=run)


@plainly
def run(args: argparse.Namespace) -> int:
    """Run the command."""
    if args.action == "path":
        print(config_file())
    elif args.action == "list":
        for group, title in GROUPS.items():
            rows = [(row.name, row.env, row.text) for row in TABLE.values() if row.group == group]
            print(f"{title}\n{table(rows, ('NAME', 'VARIABLE', 'MEANING'))}\n")
    else:
        _show(args)
    return 0


def _show(args: argparse.Namespace) -> None:
    loaded = load_settings(vars(args))
    rows = [(row, getattr(loaded.settings, name), loaded.origin[name]) for name, row in TABLE.items()]
    if args.json:
        values = {
            row.name: {"value": shown(row, value) if row.secret else value, "from": origin} for row, value, origin in rows
        }
        print(json.dumps(values, indent=1))
        return
    print(table([(row.name, shown(row, value), origin) for row, value, origin in rows], ("NAME", "VALUE", "FROM")))
