"""Base class of engines on the host CPU, which share the memory pages of the built model (`pagesharing`)."""

from __future__ import annotations

import contextlib
import logging
import os
from pathlib import Path
from typing import Collection, Optional, Sequence

from weightd_protocol.messages.worker_common import DeviceMemory, SharingTraits
from weightd_worker import pagesharing
from weightd_worker.engines.engine import (
    Arrays,
    BuildError,
    BuildSettings,
    Engine,
    NotShared,
    SharedWeights,
    WeightSharing,
)

_log = logging.getLogger("weightd.worker")
_STORE_IN_MEMORY = "the page store is on a memory file system: its cold pages stay in memory"

_NO_LARGE_BLOCKS = (
    f"weights are not shared: the model has no memory of {pagesharing.MIN_BLOCK_BYTES >> 10} KiB or more in one piece"
)


class CpuEngine(Engine):
    """Base class of an engine on the CPU, whose weights are shared as memory pages.

    A subclass builds the model and runs predicts.

    Raises:
        BuildError: the device in the settings is a card.
    """

    def __init__(self, settings: BuildSettings) -> None:
        if settings.card is not None:
            raise BuildError(f"device: {self.name} runs on the cpu only, got {settings.device}")
        self._settings = settings
        self._page_sharing = PageSharing() if settings.is_sharing else None
        self.sharing = self._page_sharing or NotShared()

    def _start_build(self, handle: str) -> None:
        """Prepare page sharing for a build. A subclass calls this method at the start of each build.

        Args:
            handle: the path of the page store to attach to later; "" if there is no store.
        """
        if self._page_sharing is not None:
            self._page_sharing.start_build(handle)

    def update_weights(self, weights: Arrays) -> None:
        """Raise a BuildError: engines on the CPU cannot replace the weights of a built model."""
        raise BuildError(f"{self.name} cannot update weights on the CPU")

    def memory(self) -> Optional[DeviceMemory]:
        """Return None: the engine uses no card."""
        return None


class PageSharing(WeightSharing):
    """Shares weights as memory pages. The handle is the path of the page store.

    Pages that cannot be shared stay private to the process.
    """

    traits = SharingTraits(pids_fixed_at_build=False, holder_must_outlive=False, attach_rewrites_weights=False)

    def __init__(self) -> None:
        self._starts_before: Optional[pagesharing.MappingStarts] = None
        # Path of the page store whose pages the built model shares; "" if the model shares no pages.
        self._store = ""
        self._mmap_threshold_bytes: Optional[int] = None

    def start_build(self, handle: str) -> None:
        """Record the memory mappings that exist before a build, so that `export` and `attach` find the build's memory.

        If `handle` is not "", also start to read the page store into memory, because `attach` will compare all of its
        pages.
        """
        self._mmap_threshold_bytes = pagesharing.mmap_threshold_bytes()
        self._starts_before = pagesharing.start_build()
        if handle:
            pagesharing.prefetch(handle)

    def current_pid(self) -> str:
        """Return the pid of this process."""
        return str(os.getpid())

    def export(self, store: str) -> SharedWeights:
        """Write the pages of the built model to the page store `store`. Any process of this user can attach to it."""
        try:
            sharing = pagesharing.export_pages(store, self._starts_before)
        except pagesharing.PageSharingUnavailable as error:
            return SharedWeights("", 0, f"weights are not shared: {error}", has_sharing_failed=True)
        if not sharing.shared_bytes:
            Path(store).unlink()
            return SharedWeights("", 0, _NO_LARGE_BLOCKS)
        self._store = store
        in_memory = "" if pagesharing.is_on_disk(store) else _STORE_IN_MEMORY
        return SharedWeights(store, sharing.shared_bytes, in_memory)

    def allow(self, pids: Sequence[str]) -> None:
        """Do nothing: any process of this user may attach to a page store."""

    def attach(self, handle: str) -> SharedWeights:
        """Replace pages of the built model by equal pages of the page store at the path `handle`."""
        try:
            if not handle:
                return SharedWeights("", 0, "")  # no note: the holder has already reported the reason
            sharing = pagesharing.attach_pages(handle, self._starts_before)
        except pagesharing.PageSharingUnavailable as error:
            return SharedWeights("", 0, f"weights are not shared: {error}")
        finally:
            pagesharing.prepare()  # reset malloc for predicts; `attach_pages` may have failed before it did so
        self._store = handle
        return SharedWeights(handle, sharing.shared_bytes, "")

    def reattach(self) -> None:
        """Share the pages of a model that was built again. Call this method after the model's first predict.

        If the pages cannot be shared, the reason is only logged.
        """
        if self._store:
            note = self.attach(self._store).note
            if note:
                _log.warning("%s", note)
        self.end_build()

    def end_build(self) -> None:
        """Restore malloc's mmap threshold from before the build, so that smaller blocks come from the heap again."""
        pagesharing.restore_mmap_threshold(self._mmap_threshold_bytes)

    def trim_store(self, handle: str) -> None:
        """Free the memory of the page store's pages that no process uses. They stay in the store's file."""
        try:
            pagesharing.evict(handle)
        except pagesharing.PageSharingUnavailable as error:
            _log.warning("the page store's cold pages stay in memory: %s", error)


def set_cpu_affinity(cores: Collection[int]) -> None:
    """Pin all threads of this process to these cores. Threads that they start later inherit the affinity.

    Raises:
        OSError: none of the cores is available.
    """
    for task in Path("/proc/self/task").iterdir():
        # A thread may exit after its number was listed.
        with contextlib.suppress(ProcessLookupError):
            os.sched_setaffinity(int(task.name), cores)
