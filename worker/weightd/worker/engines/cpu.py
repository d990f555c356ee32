"""Engines on the host CPU, which have no sharing of their own: weightd shares their pages."""

from __future__ import annotations

import logging
import os
from pathlib import Path
from typing import Optional, Sequence

from weightd.protocol.messages.children import DeviceMemory, Traits
from weightd.worker import pagesharing
from weightd.worker.engines.base import SHARING_IS_OFF, Arrays, BuildError, Engine, Settings, Shared

_log = logging.getLogger("weightd.worker")


_IN_MEMORY = "the page store is on a memory file system: its cold pages stay in memory"
_SMALL = f"weights are not shared: the model has no memory of {pagesharing.LEAST >> 10} KiB or more in one piece"


class CpuEngine(Engine):
    """Shares the pages of the built model (`weightd.worker.pagesharing`); the handle is the store's path.

    A subclass builds and predicts. What cannot be shared stays private: that costs memory, never an answer.

    Raises:
        BuildError: the settings name a card.
    """

    traits = Traits(pids_fixed_at_build=False, holder_must_outlive=False, attach_rewrites_weights=False)

    def __init__(self, settings: Settings) -> None:
        if settings.card is not None:
            raise BuildError(f"device: {self.name} runs on the cpu only, got {settings.device}")
        self._settings = settings
        self._before: Optional[pagesharing.Starts] = None

    def _begin(self) -> None:
        """To be called before each build, after which weights are to be shared."""
        if self._settings.sharing:
            self._before = pagesharing.begin()

    def current_pid(self) -> str:
        """Return this process's pid: no engine library has another number for it on the CPU."""
        return str(os.getpid())

    def export(self, store: str) -> Shared:
        """Write the pages of the built model to `store`; any process of this user can attach."""
        if not self._settings.sharing:
            return SHARING_IS_OFF
        try:
            sharing = pagesharing.hold(store, self._before)
        except pagesharing.Unavailable as error:
            return Shared("", 0, f"weights are not shared: {error}", is_loss=True)
        if not sharing.shared_bytes:
            Path(store).unlink()
            return Shared("", 0, _SMALL)
        in_memory = "" if pagesharing.on_disk(store) else _IN_MEMORY
        return Shared(store, sharing.shared_bytes, in_memory)

    def allow(self, pids: Sequence[str]) -> None:
        """Do nothing: any process of this user may attach."""

    def attach(self, handle: str) -> Shared:
        """Give back each page of the built model that the store has too."""
        if not self._settings.sharing:
            return SHARING_IS_OFF
        try:
            if not handle:
                return Shared("", 0, "")  # the holder has said why
            sharing = pagesharing.join(handle, self._before)
        except pagesharing.Unavailable as error:
            return Shared("", 0, f"weights are not shared: {error}")
        finally:
            pagesharing.prepare()  # whether or not `join` has come that far: predicts are to come
        return Shared(handle, sharing.shared_bytes, "")

    def settle(self, handle: str) -> None:
        """Let the store's pages that no process uses leave memory."""
        try:
            pagesharing.evict(handle)
        except pagesharing.Unavailable as error:
            _log.warning("the page store's cold pages stay in memory: %s", error)

    def update_weights(self, weights: Arrays) -> None:
        """Refuse."""
        raise BuildError(f"{self.name} cannot update weights on the CPU")

    def memory(self) -> Optional[DeviceMemory]:
        """Return None: there is no card."""
        return None
