"""Loads failed models again after their files have changed.

The daemon does not repeat a load that has failed because of the content of a file. A thread compares the files of such
models with the files that the load has read, because a file system may not answer for a long time. For the models of
the repository, `repository.py` does the same.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Mapping

from weightd_daemon.generations.spec import ModelSource
from weightd_daemon.models.registry import ModelRegistry
from weightd_daemon.platform.event_loop import Timer
from weightd_daemon.platform.log_setup import subject_extra
from weightd_daemon.platform.resource_limits import with_limit_hint
from weightd_daemon.processes.snapshots import SnapshotService
from weightd_daemon.processes.snapshotter import SnapshotOrder, identify_files

_log = logging.getLogger("weightd")

# Seconds between two searches for changed files. A model is loaded again if two searches have found the same files:
# files that differ in every search are still being written.
INTERVAL_S = 2.0

_Failure = tuple[str, ModelSource]
"""The name of a model, and the source that it failed to load."""


class ChangedFiles:
    """Searches for changes in the files of failed models, as long as there are any, and loads these models again.

    Args:
        registry: the models.
        snapshots: knows which files a load reads, and their identity before the last load.
        start: starts a thread that calls a function.

    Attributes:
        timer: calls `tick` when it is due.
    """

    def __init__(
        self,
        registry: ModelRegistry,
        snapshots: SnapshotService,
        start: Callable[[Callable[[], None]], object] | None = None,
    ) -> None:
        self.timer = Timer(self.tick)
        self._registry = registry
        self._snapshots = snapshots
        self._start = start or _start_thread
        self._is_searching = False
        # The identities that the last search has found. No lock is needed, because the thread replaces all of them with
        # one assignment.
        self._found: Mapping[_Failure, str] = {}
        # For each failure, the identity of the files that the load has read, and the identity in the last search.
        self._known: Mapping[_Failure, tuple[str, str]] = {}

    def on_change(self, now: float) -> None:
        """Schedule a search, because a model may have failed."""
        self.timer.set_no_later_than(now + INTERVAL_S)

    def tick(self, now: float) -> None:
        """Load the models again whose files have changed, and start the next search."""
        failed = {
            (name, model.versions.current): model
            for name, model in self._registry.models.items()
            if model.loading.awaits_change and not model.config.revision
        }
        if failed:
            self.timer.set(now + INTERVAL_S)
        if self._is_searching:
            return
        known: dict[_Failure, tuple[str, str]] = {}
        for failure, model in failed.items():
            found = self._found.get(failure, "")
            if not found:
                continue
            read, previous = self._known.get(failure) or (self._snapshots.identity(*failure) or found, "")
            known[failure] = (read, found)
            if read != found == previous:
                _log.info("%s: loading, the files have changed", model.name, extra=subject_extra(model.name))
                model.loading.retry(now)
        self._known, self._found = known, {}
        if failed:
            self._search(
                {
                    (name, source): self._snapshots.order(name, model.config, source)
                    for (name, source), model in failed.items()
                }
            )

    def _search(self, orders: Mapping[_Failure, SnapshotOrder]) -> None:
        def search() -> None:
            try:
                self._found = {failure: identify_files(order) for failure, order in orders.items()}
            finally:
                self._is_searching = False

        self._is_searching = True
        try:
            self._start(search)
        except RuntimeError as error:
            self._is_searching = False
            _log.warning("cannot search for changed model files: %s", with_limit_hint(str(error)))


def _start_thread(target: Callable[[], None]) -> None:
    # Use a daemon thread, so that the process can exit even if the file system does not answer.
    threading.Thread(target=target, name="files", daemon=True).start()
