"""Queries the free memory of accelerator cards before the first model is loaded on them."""

from __future__ import annotations

import functools
import logging
import os
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import Protocol

from weightd_common.devices import is_cpu
from weightd_daemon.platform.exit_cause import ExitCause
from weightd_daemon.platform.memory import MIB
from weightd_daemon.processes.process_table import OneshotResult, ProcessTable, run_oneshot

_log = logging.getLogger("weightd")


class DeviceMemoryInfo(Protocol):
    """A device and its memory.

    Attributes:
        name: the name of the device.
        capacity_bytes: the bytes that models may use on the device; None if unknown.
        reported_bytes: the free bytes that the card itself has reported; None before its first report.
    """

    name: str
    capacity_bytes: int | None
    reported_bytes: int | None


class DeviceProbe:
    """Queries the free memory of each card once, with the interpreter of a model that uses the card.

    Args:
        process_table: starts and watches the helper processes.
        devices: all devices, by name. `probe` stores its results in these objects.
    """

    def __init__(self, process_table: ProcessTable, devices: Mapping[str, DeviceMemoryInfo]) -> None:
        self._process_table = process_table
        self._devices = devices
        # The names of the devices that were queried. If the query of a device has failed, its name here prevents a
        # second query.
        self._failed_devices: set[str] = set()

    def probe(self, python: str, names: Iterable[str], log: Path, on_done: Callable[[], None]) -> None:
        """Query the cards whose memory is unknown, one after another, then call `on_done`.

        Args:
            python: the interpreter in which the library of the cards is installed.
            names: the names of the devices; CPU devices are skipped.
            log: the file to which the helper processes write their stderr. Its directory is the directory of the
                snapshot that will be loaded on the cards.
            on_done: called after the last query, or at once if no card has to be queried.
        """
        names = list(names)
        device = next((self._devices[each] for each in names if self._is_unprobed(each)), None)
        if device is None:
            on_done()
            return
        self._failed_devices.add(device.name)
        probe_next = functools.partial(self.probe, python, names, log, on_done)
        argv = [python, "-m", "weightd_worker.device_probe", "--device", device.name, "--parent", str(os.getpid())]
        try:
            # The name of the helper process begins with the name of the snapshot, so that
            # `SnapshotService.remove_snapshot` also kills this process.
            name = f"{log.parent.name}.{device.name}"
            run_oneshot(self._process_table, name, argv, log, functools.partial(self._on_result, device, probe_next))
        except OSError as error:
            _log.warning("%s: cannot query its memory: %s", device.name, error.strerror)
            probe_next()

    def _is_unprobed(self, name: str) -> bool:
        return not is_cpu(name) and self._devices[name].capacity_bytes is None and name not in self._failed_devices

    def _on_result(
        self, device: DeviceMemoryInfo, probe_next: Callable[[], None], result: OneshotResult, exit_cause: ExitCause
    ) -> None:
        free = result.get("free_bytes")
        if isinstance(free, int):
            device.capacity_bytes = device.reported_bytes = free
            _log.info("%s: %d MiB are free", device.name, free // MIB)
        else:
            why = result.get("error") or exit_cause.detail or exit_cause.description
            _log.warning("%s: cannot query its memory: %s", device.name, why)
        probe_next()
