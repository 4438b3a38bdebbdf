"""How requests end that cannot go on, and which of them get a second try."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass

from pooled_mlx.core.errors import ApiError, OwnFault, engine_failed
from pooled_mlx.engine.keep import Keeper, NotFinite
from pooled_mlx.engine.row import Row
from pooled_mlx.grammar.match import GrammarFailed

_log = logging.getLogger("pooled.engine")

OWN_FAULTS = (NotFinite, GrammarFailed, OwnFault)
"""What ends one request and says nothing about the engine."""

_NOT_FINITE = "The model's output was not a number at this step; the answer was stopped and nothing of it was kept."


@dataclass(slots=True)
class Counters:
    """What the loop did since its start."""

    pieces: int = 0
    steps: int = 0
    tokens: int = 0
    drafted: int = 0
    accepted: int = 0
    prefilled_tokens: int = 0
    not_finite: int = 0
    failures: int = 0
    rebuilds: int = 0
    device_failures: int = 0
    halved: int = 0
    grammar_failures: int = 0


class Failures:
    """Ends rows with their errors, or says which of them to read again. Owned by the engine thread."""

    def __init__(self, keeper: Keeper, counters: Counters) -> None:
        self._keeper, self._counters = keeper, counters

    def broken(self, row: Row) -> bool:
        """`row.broken` says what went wrong. True when the row is to be read again, else it is closed."""
        error, row.broken = row.broken, None
        assert error is not None
        if isinstance(error, NotFinite) and self._was_poisoned(row):
            return True
        self._keeper.close(row, self._explained(row, error))
        return False

    def failed(self, rows: Sequence[Row], error: Exception) -> list[Row]:
        """A step failed for all these rows. Returns those to read again: each has one second try."""
        self._counters.failures += 1
        _log.error("a step of %d request(s) failed", len(rows), exc_info=error)
        again: list[Row] = []
        for row in rows:
            self._keeper.discard(row)
            if row.finish is not None or row.cancelled:
                self._keeper.close(row, None)
            elif row.broken is not None:
                self._keeper.close(row, self._explained(row, row.broken))
            elif row.retried:
                self._keeper.close(row, engine_failed(f"The engine failed at this step: {error}"))
            else:
                row.retried = True
                self._counters.rebuilds += 1
                again.append(row)
        return again

    def _was_poisoned(self, row: Row) -> bool:
        """True when what the row resumed from may be the cause: that is dropped, and the prompt can be read anew, once."""
        if not row.cached_tokens or row.out or row.cold:
            return False
        self._counters.not_finite += 1
        _log.warning("request %s: a stored prefix gave output that is not finite; it is read again", row.id)
        self._keeper.drop_own(row)
        self._keeper.drop_source(row)
        row.cold = True
        return True

    def _explained(self, row: Row, error: Exception) -> ApiError:
        """Count and log the failure of one row; returns the client's error."""
        if isinstance(error, NotFinite):
            self._counters.not_finite += 1
            _log.error("request %s: %s", row.id, _NOT_FINITE)
            self._keeper.drop_own(row)
            return engine_failed(_NOT_FINITE)
        if isinstance(error, GrammarFailed):
            self._counters.grammar_failures += 1
            _log.error("request %s: the grammar failed: %s", row.id, error)
            return engine_failed(f"The answer's grammar cannot go on: {error}")
        self._counters.failures += 1
        _log.error("request %s failed", row.id, exc_info=error)
        return error if isinstance(error, ApiError) else engine_failed(f"The answer could not be continued: {error}")
