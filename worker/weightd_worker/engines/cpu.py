"""What engines on the host CPU have in common."""

from __future__ import annotations

from typing import Optional

from weightd_protocol.messages.worker_common import DeviceMemory
from weightd_worker.engines.engine import Arrays, BuildSettings, Engine
from weightd_worker.engines.errors import BuildError
from weightd_worker.engines.page_sharing import PageSharing
from weightd_worker.engines.sharing import NotShared


class CpuEngine(Engine):
    """Shares its pages; a subclass builds and predicts.

    Raises:
        BuildError: the settings name a card.
    """

    def __init__(self, settings: BuildSettings) -> None:
        if settings.card is not None:
            raise BuildError(f"device: {self.name} runs on the cpu only, got {settings.device}")
        self._settings = settings
        self._page_sharing = PageSharing() if settings.is_sharing else None
        self.sharing = self._page_sharing or NotShared()

    def _start_build(self, handle: str) -> None:
        """To be called before each build, after which weights are to be shared; with the handle, if there is one."""
        if self._page_sharing is not None:
            self._page_sharing.start_build(handle)

    def update_weights(self, weights: Arrays) -> None:
        """Refuse."""
        raise BuildError(f"{self.name} cannot update weights on the CPU")

    def memory(self) -> Optional[DeviceMemory]:
        """Return None: there is no card."""
        return None
