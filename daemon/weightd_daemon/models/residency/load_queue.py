"""The queue of models that requests want loaded."""

from __future__ import annotations

from collections.abc import Iterator


class LoadQueue:
    """Models that wait for their turn to load, and the models whose files are being read.

    Attributes:
        max_starting: how many models' files may be read at the same time.
    """

    def __init__(self, max_starting: int) -> None:
        self.max_starting = max_starting
        # The models, with the tenants whose requests want them, in the order of their requests.
        self._waiting: dict[str, str] = {}
        self._starting: set[str] = set()

    def __contains__(self, model: str) -> bool:
        return model in self._waiting

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def tenants(self) -> list[str]:
        """The tenants of the waiting models, one for each model."""
        return list(self._waiting.values())

    def put(self, model: str, tenant: str) -> None:
        """Add a model that a request of a tenant wants."""
        self._waiting.setdefault(model, tenant)

    def take(self) -> Iterator[tuple[str, str]]:
        """Remove and yield the models that may start now, with their tenants; the caller starts or drops each."""
        while self._waiting and len(self._starting) < self.max_starting:
            model = next(iter(self._waiting))
            yield model, self._waiting.pop(model)

    def on_starting(self, model: str) -> None:
        """Record that the files of a model are being read."""
        self._starting.add(model)

    def on_read(self, model: str) -> None:
        """Record that the files of a model have been read, or that its load has ended."""
        self._starting.discard(model)
