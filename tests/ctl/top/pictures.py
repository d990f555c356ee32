"""An overview for the tests of `weightctl top`: two serving models and a failed one."""

from __future__ import annotations

from testkit import looks
from testkit.looks import MB
from weightd_common.dashboard.history import History
from weightd_common.dashboard.overview import Overview


def picture(*names: str) -> Overview:
    """Return an overview of these models, each with 100 times the request rate of the one before."""
    history = History()
    for second in range(4):
        models = [
            looks.counted(name, (second * 100**index, 0, 0, 0), workers=4, queued=len(names) - index)
            for index, name in enumerate(names)
        ]
        history.on_metrics(looks.metrics(float(second), *models, tenants=[looks.tenant("research", share=0.5)]))
    statuses = [
        looks.model(name, looks.processes(name, 4, private=10 * MB, weights=100 * MB), copy=100 * MB) for name in names
    ]
    history.on_status(looks.status(1.0, *statuses))
    return history.overview()
