"""The daemon's page of one device: weights of tenants, and states and limits of direct channels. No I/O, no clock.

Only this module writes the page. Workers read it at any time, between any two stores of a method.
"""

from __future__ import annotations

from weightd_common.channels.pages import (
    BYTE_LIMIT,
    EXPIRES_AT,
    GENERATION,
    OFFSET,
    REQUEST_LIMIT,
    SERIAL,
    SLOT_ENDING,
    SLOT_FREE,
    SLOT_OPEN,
    STATE,
    TENANT,
    WEIGHT,
    Layout,
    Page,
)


class DaemonPage:
    """Writes the daemon's page of one device.

    Args:
        layout: the layout of the pages.
        page: the memory of the page, filled with zeros.
    """

    def __init__(self, layout: Layout, page: Page) -> None:
        self._layout = layout
        self._words, self._reals = page
        # The tenants' weights and offsets, and the channels' limits. They are never read from the page: a worker that a
        # request has corrupted might have written to it.
        self._tenants: dict[int, tuple[float, float]] = {}
        self._limits: dict[int, tuple[int, int]] = {}

    def assign_tenant(self, slot: int, weight: float, used_s: float, device_s: float) -> None:
        """Give a tenant slot to a tenant, which begins at the device's virtual time.

        Args:
            slot: the tenant slot.
            weight: the tenant's weight.
            used_s: the virtual time of the slot without the offset: used seconds and base of an earlier tenant.
            device_s: the virtual time of the device.
        """
        self._set_tenant(slot, weight, device_s - used_s)

    def offset(self, slot: int) -> float:
        """Return the offset of a tenant slot in seconds of virtual time."""
        return self._tenants[slot][1]

    def set_weight(self, slot: int, weight: float, ahead_s: float) -> None:
        """Change the weight of a tenant, which is `ahead_s` seconds of virtual time ahead of the device.

        Virtual time is device seconds divided by the weight. The offset keeps the device seconds by which the tenant is
        ahead. Without it, a tenant whose weight is raised would wait longer for the seconds that it used before.
        """
        earlier, offset = self._tenants[slot]
        self._set_tenant(slot, weight, offset + ahead_s * (earlier / weight - 1.0))

    def open_channel(
        self, slot: int, serial: int, generation: int, tenant: int, limits: tuple[int, int], expires_at: float
    ) -> None:
        """Describe a channel in a free slot. No worker may hold a channel of this slot.

        Args:
            slot: the channel slot.
            serial: the channel's serial.
            generation: the serial of the generation.
            tenant: the tenant slot.
            limits: the limits of requests and bytes, which include the counts of earlier channels of the slot.
            expires_at: the time of CLOCK_MONOTONIC at which workers stop reading, in seconds.
        """
        index, words = self._layout.channel(slot), self._words
        words[index + SERIAL] = serial
        words[index + GENERATION] = generation
        words[index + TENANT] = tenant
        self._limits[slot] = limits
        words[index + REQUEST_LIMIT], words[index + BYTE_LIMIT] = limits
        self._reals[index + EXPIRES_AT] = expires_at
        words[index + STATE] = SLOT_OPEN

    def raise_limits(self, slot: int, requests: int, nbytes: int, expires_at: float) -> None:
        """Raise the limits of an open channel by numbers of requests and bytes, and set a later expiry."""
        index, words = self._layout.channel(slot), self._words
        earlier_requests, earlier_bytes = self._limits[slot]
        self._limits[slot] = limits = earlier_requests + requests, earlier_bytes + nbytes
        words[index + REQUEST_LIMIT], words[index + BYTE_LIMIT] = limits
        self._reals[index + EXPIRES_AT] = expires_at

    def end_channel(self, slot: int) -> None:
        """Make workers stop reading a channel."""
        self._words[self._layout.channel(slot) + STATE] = SLOT_ENDING

    def free_channel(self, slot: int) -> None:
        """Mark a slot as free. No worker holds the slot's channel."""
        self._words[self._layout.channel(slot) + STATE] = SLOT_FREE

    def _set_tenant(self, slot: int, weight: float, offset: float) -> None:
        self._tenants[slot] = weight, offset
        index = self._layout.tenant(slot)
        self._reals[index + WEIGHT] = weight
        self._reals[index + OFFSET] = offset
