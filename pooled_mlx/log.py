"""The log: one plain line per record, or one JSON object with --json-log. Everything goes to standard error."""

from __future__ import annotations

import json
import logging
import sys
import time
from typing import Any, TextIO

LOGGER = "pooled"
"""The parent of all our loggers."""

_LEVELS = {"debug": logging.DEBUG, "info": logging.INFO, "warning": logging.WARNING, "error": logging.ERROR}
_QUIET_LOGGERS = ("pooled.request",)
_WARNINGS_ONLY = ("pooled.http",)  # the HTTP library announces its addresses, which the banner does too


class PlainFormatter(logging.Formatter):
    """`2026-01-31 12:34:56 info engine: text`; line breaks in the text are escaped, a traceback follows as it is."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        stamp = time.strftime("%Y-%m-%d %H:%M:%S", time.localtime(record.created))
        text = record.getMessage().replace("\r", "\\r").replace("\n", "\\n")
        line = f"{stamp} {record.levelname.lower()} {record.name.removeprefix(LOGGER + '.')}: {text}"
        if record.exc_info:
            line += "\n" + self.formatException(record.exc_info)
        return line


class JsonFormatter(logging.Formatter):
    """One JSON object a line: time (Unix seconds), level, logger, message; the fields of a finished request as `request`."""

    def format(self, record: logging.LogRecord) -> str:
        """The line of a record."""
        entry: dict[str, Any] = {
            "time": round(record.created, 3),
            "level": record.levelname.lower(),
            "logger": record.name,
            "message": record.getMessage(),
        }
        request = getattr(record, "request", None)
        if isinstance(request, dict):
            entry["request"] = request
        if record.exc_info:
            entry["traceback"] = self.formatException(record.exc_info)
        return json.dumps(entry, ensure_ascii=False, default=str)


def set_up_logging(level: str = "info", *, json_lines: bool = False, quiet: bool = False, stream: TextIO | None = None) -> None:
    """Send our log to `stream` (standard error by default). `quiet` leaves out the line of each request.

    Other libraries' warnings go the same way; they never log prompts or answers. May be called again.
    """
    handler = logging.StreamHandler(stream or sys.stderr)
    handler.setFormatter(JsonFormatter() if json_lines else PlainFormatter())
    root, ours = logging.getLogger(), logging.getLogger(LOGGER)
    for old in list(root.handlers):
        root.removeHandler(old)
    root.addHandler(handler)
    root.setLevel(logging.WARNING)
    ours.setLevel(_LEVELS[level])
    for name in _QUIET_LOGGERS:
        logging.getLogger(name).setLevel(logging.WARNING if quiet else logging.NOTSET)
    for name in _WARNINGS_ONLY:
        logging.getLogger(name).setLevel(logging.NOTSET if level == "debug" else logging.WARNING)
