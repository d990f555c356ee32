"""The pages of one device, and its workers and tenants: the part of direct channels that belongs to a device."""

from __future__ import annotations

import mmap
from collections.abc import Collection
from dataclasses import dataclass

from weightd_common import memfd
from weightd_common.channels.pages import DEVICE_BYTES, DEVICE_LAYOUT, WORD_BYTES, daemon_page, row_page
from weightd_daemon.channels.page import DaemonPage
from weightd_daemon.channels.rows import Activity, RowReader
from weightd_daemon.channels.table import ChannelTable
from weightd_daemon.scheduling.direct import DirectLoss, DirectWorker
from weightd_daemon.tenants.tenant import Tenant
from weightd_protocol import limits
from weightd_protocol.errors import ResourceExhausted
from weightd_protocol.messages.channels import SetChannelRows

# Size of a channel's entry in a row, and of the block of entries that is compared at once.
_ENTRY_BYTES = WORD_BYTES * (DEVICE_LAYOUT.row_channel(1) - DEVICE_LAYOUT.row_channel(0))
_BLOCK_BYTES = 16 * _ENTRY_BYTES


@dataclass(eq=False)
class ChannelWorker:
    """A worker that can read direct channels.

    Attributes:
        info: the worker.
        generation: the serial of its generation.
        row: the index of its row.
        has_pages: whether the worker has received the descriptor of the pages.
        is_leaving: whether the worker takes no new channels, because it will exit.
        is_faulty: whether the process is being ended because of a fault.
        seen_run: the request and the start of the latest run that the daemon has seen.
        seen_at: when it has seen it for the first time.
    """

    info: DirectWorker
    generation: int
    row: int = 0
    has_pages: bool = False
    is_leaving: bool = False
    is_faulty: bool = False
    seen_run: tuple[int, float] = (0, 0.0)
    seen_at: float = 0.0

    @property
    def process(self) -> str:
        """The name of the process."""
        return self.info.process

    def end(self, loss: DirectLoss | None, reason: str, now: float) -> None:
        """End the process because of a fault, unless it is being ended already."""
        if not self.is_faulty:
            self.is_faulty = True
            self.info.on_fault(self.process, loss, reason, now)


class Device:
    """The pages of one device, in a memfd that the daemon and the workers map.

    Args:
        first_serial: the serial of the device's first channel.

    Attributes:
        table: the channels.
        workers: the workers, by the name of the process.
        memfd: the descriptor of the memory of the pages.
    """

    def __init__(self, first_serial: int) -> None:
        self.memfd = memfd.create(DEVICE_BYTES, "weightd-channels")
        self._memory = memoryview(mmap.mmap(self.memfd, DEVICE_BYTES))
        self.table = ChannelTable(DEVICE_LAYOUT, DaemonPage(DEVICE_LAYOUT, daemon_page(self._memory)), first_serial)
        self.workers: dict[str, ChannelWorker] = {}
        # The row that each reader reads, and the rows that no worker writes. A row outlives its worker.
        self._readers: list[RowReader] = []
        self._free_rows: list[int] = []
        self._last_activity: dict[str, Activity] = {}
        # The memory of the channel entries of each row, and its content at the last look.
        self._entries: list[memoryview] = []
        self._seen_entries: list[bytes] = []
        self._tenants: dict[Tenant, int] = {}

    def add_worker(self, worker: ChannelWorker, now: float) -> bool:
        """Add a worker, and give it a row; return False if all rows are in use."""
        if self._free_rows:
            worker.row = self._free_rows.pop()
        elif len(self._readers) < limits.MAX_CHANNEL_ROWS:
            worker.row = len(self._readers)
            page = row_page(self._memory, worker.row)
            self._readers.append(RowReader(DEVICE_LAYOUT, page, now))
            self._entries.append(page.words[DEVICE_LAYOUT.row_channel(0) :].cast("B"))
            self._seen_entries.append(bytes(self._entries[-1]))
        else:
            return False
        self.workers[worker.process] = worker
        self.table.add_worker(worker.process, worker.generation, self._readers[worker.row])
        return True

    def remove_worker(self, process: str, now: float) -> None:
        """Remove a worker that has exited. Its row stays for the next one."""
        worker = self.workers.pop(process)
        self.table.on_worker_exit(process, now)
        self._free_rows.append(worker.row)

    def reader(self, worker: ChannelWorker) -> RowReader:
        """Return the reader of a worker's row."""
        return self._readers[worker.row]

    def take_active(self) -> list[ChannelWorker]:
        """Return the workers that have taken a request since the last call, or have one."""
        before, self._last_activity = self._last_activity, {}
        active: list[ChannelWorker] = []
        for process, worker in self.workers.items():
            activity = self._last_activity[process] = self._readers[worker.row].activity
            if activity.is_busy or activity != before.get(process):
                active.append(worker)
        return active

    def take_changed_slots(self, worker: ChannelWorker) -> set[int]:
        """Return the channel slots whose counts in a worker's row have changed since the last call."""
        entries, before = bytes(self._entries[worker.row]), self._seen_entries[worker.row]
        self._seen_entries[worker.row] = entries
        # Compare several entries at once, because most of them are equal.
        return {
            at // _ENTRY_BYTES
            for begin in range(0, len(entries), _BLOCK_BYTES)
            if entries[begin : begin + _BLOCK_BYTES] != before[begin : begin + _BLOCK_BYTES]
            for at in range(begin, min(begin + _BLOCK_BYTES, len(entries)), _ENTRY_BYTES)
            if entries[at : at + _ENTRY_BYTES] != before[at : at + _ENTRY_BYTES]
        }

    def rows_order(self, worker: ChannelWorker) -> SetChannelRows:
        """Return the order that tells a worker which rows are in use."""
        peers = [each.row for each in self.workers.values() if each.generation == worker.generation]
        return SetChannelRows(worker.generation, worker.row, len(self._readers), tuple(sorted(peers)))

    def tenant_slot(self, tenant: Tenant, used: Collection[int], now: float) -> int:
        """Return the slot of a tenant. A new tenant gets a free slot, or the slot of an idle tenant.

        Args:
            tenant: the tenant.
            used: the slots of all tenants that have channels.
            now: the time.

        Raises:
            ResourceExhausted: too many tenants have channels of this device.
        """
        slot = self._tenants.get(tenant)
        if slot is not None:
            return slot
        if len(self._tenants) < limits.MAX_CHANNEL_TENANTS:
            slot = len(self._tenants)
        else:
            idle = next((each for each, slot in self._tenants.items() if slot not in used), None)
            if idle is None:
                raise ResourceExhausted(f"{limits.MAX_CHANNEL_TENANTS} tenants have direct channels of this device")
            slot = self._tenants.pop(idle)
        self._tenants[tenant] = slot
        self.table.add_tenant(slot, tenant.config.weight, now)
        return slot

    def update_weights(self, now: float) -> None:
        """Apply the weights of the tenants, which a reload may have changed."""
        for tenant, slot in self._tenants.items():
            self.table.set_weight(slot, tenant.config.weight, now)
