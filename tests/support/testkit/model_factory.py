"""Factory of daemon models for tests, by default without a main loop, a limit of loads or other shared state."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from weightd_daemon.models.factory import ModelFactory
from weightd_daemon.models.interfaces import ClientNotifier, ProcessManager
from weightd_daemon.models.lifecycle import ModelLifecycle
from weightd_daemon.models.placement import DeviceBudget
from weightd_daemon.scheduling.dispatcher import SharedScheduling


def model_factory(
    devices: Mapping[str, DeviceBudget],
    host: ProcessManager,
    sink: Any,
    scheduling: SharedScheduling | None = None,
    lifecycle: ModelLifecycle | None = None,
) -> ModelFactory:
    """Return a factory of models on these devices; `sink` receives the replies to clients."""
    notifier = ClientNotifier(sink, sink)
    return ModelFactory(
        devices, host, lambda: notifier, lambda _: None, scheduling or SharedScheduling(), None, lifecycle
    )
