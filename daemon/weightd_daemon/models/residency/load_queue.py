"""The queue of on-demand models that have requests and wait until their load may start."""

from __future__ import annotations

from collections.abc import Iterator


class LoadQueue:
    """The models that wait for their turn to load, and the models whose files are being read.

    Attributes:
        max_starting: the maximum number of models whose files may be read at the same time.
    """

    def __init__(self, max_starting: int) -> None:
        self.max_starting = max_starting
        # The waiting models in the order of their first requests, each with the tenant of that request.
        self._waiting: dict[str, str] = {}
        self._starting: set[str] = set()

    def __contains__(self, model: str) -> bool:
        return model in self._waiting

    def __bool__(self) -> bool:
        return bool(self._waiting)

    @property
    def tenants(self) -> list[str]:
        """For each waiting model, the tenant whose request put the model into the queue."""
        return list(self._waiting.values())

    def put(self, model: str, tenant: str) -> None:
        """Add a model for which a tenant has sent a request; a waiting model keeps its place and its tenant."""
        self._waiting.setdefault(model, tenant)

    def take(self) -> Iterator[tuple[str, str]]:
        """Remove and yield the models whose load may start now, each with its tenant.

        The caller must call `on_starting` for each model that it loads, before it takes the next one.
        """
        while self._waiting and len(self._starting) < self.max_starting:
            model = next(iter(self._waiting))
            yield model, self._waiting.pop(model)

    def on_starting(self, model: str) -> None:
        """Record that the load of a model has started, and that its files are being read."""
        self._starting.add(model)

    def on_read(self, model: str) -> None:
        """Record that the files of a model have been read, or that the load of the model has ended."""
        self._starting.discard(model)
