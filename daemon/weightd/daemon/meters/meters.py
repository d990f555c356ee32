"""The meters of all models, by name; and what is counted of the daemon itself."""

from __future__ import annotations

from collections.abc import Collection

from weightd.daemon.meters.meter import Meter


class Meters:
    """There are as many as models are configured; a model that is gone takes its own with it.

    Attributes:
        reloads: how often another configuration was put in force.
        refused_reloads: how often that was refused.
    """

    def __init__(self) -> None:
        self.reloads = 0
        self.refused_reloads = 0
        self._models: dict[str, Meter] = {}

    def of(self, model: str) -> Meter:
        """Return the meter of a model of the configuration."""
        meter = self._models.get(model)
        if meter is None:
            meter = self._models[model] = Meter()
        return meter

    def keep(self, models: Collection[str]) -> None:
        """These are all there are: forget the others."""
        self._models = {name: meter for name, meter in self._models.items() if name in models}
