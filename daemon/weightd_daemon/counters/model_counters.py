"""What is counted of one model, whichever generation of it serves: plain counters."""

from __future__ import annotations

from weightd_daemon.counters.histogram import ROWS_BOUNDS, SECONDS_BOUNDS, HistogramCounter


class ModelCounters:
    """Counts what becomes of the requests for one model, and of its processes.

    Attributes:
        requests: seconds from the arrival of each to its answer, of those that were answered.
        queue: seconds from the arrival of each to when a slot was given it, or the first of it.
        compute: seconds for which batches ran.
        rows: of batches, as far as those of the model are known.
        unexpected_exits: processes that ended without being asked to.
        restarts: processes that were started in the place of lost ones.
        selftest_failures: workers that did not reproduce the known answer.
        batch_mismatches: generations of which rows together were found not to be what each is alone.
    """

    __slots__ = (
        "_unreplaced",
        "batch_mismatches",
        "compute",
        "queue",
        "requests",
        "restarts",
        "rows",
        "selftest_failures",
        "unexpected_exits",
    )

    def __init__(self) -> None:
        self.requests = HistogramCounter(SECONDS_BOUNDS)
        self.queue = HistogramCounter(SECONDS_BOUNDS)
        self.compute = HistogramCounter(SECONDS_BOUNDS)
        self.rows = HistogramCounter(ROWS_BOUNDS)
        self.unexpected_exits = 0
        self.restarts = 0
        self.selftest_failures = 0
        self.batch_mismatches = 0
        # Processes that were lost, in whose place none has been started yet.
        self._unreplaced = 0

    def on_lost(self, count: int) -> None:
        """So many are of no use any more, without having been asked to leave for another model."""
        self._unreplaced += count

    def on_started(self) -> None:
        """One is started."""
        if self._unreplaced:
            self._unreplaced -= 1
            self.restarts += 1


class ProcessCounters:
    """Counts what befalls processes, of each model that these serve.

    Args:
        counters: of the models.
    """

    __slots__ = ("_counters",)

    def __init__(self, *counters: ModelCounters) -> None:
        self._counters = counters

    def on_death(self) -> None:
        """One has ended, or had to be ended, without being asked to."""
        for each in self._counters:
            each.unexpected_exits += 1

    def on_lost(self, count: int = 1) -> None:
        """So many are of no use any more, be it that they said so: others may be started in their place."""
        for each in self._counters:
            each.on_lost(count)

    def on_started(self) -> None:
        """One is started."""
        for each in self._counters:
            each.on_started()

    def on_selftest_failed(self) -> None:
        """A worker's answer to the self-test is not the holder's."""
        for each in self._counters:
            each.selftest_failures += 1

    def on_batch_mismatch(self) -> None:
        """Rows together were found not to be what each is alone."""
        for each in self._counters:
            each.batch_mismatches += 1
