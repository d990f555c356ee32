"""Memory layout of the pages that the daemon and the workers of one device share. No I/O, no clock.

The daemon writes one page for each device. A worker writes one page, its row, for each predict that it can run at the
same time. Each page has exactly one writer, so no page needs a lock.

A page is an array of words of 8 bytes, aligned to 8 bytes. A `Page` has two views of the same memory: `words` reads a
word as an unsigned integer, `reals` as a double. A store through such a view is atomic: a reader sees either the old or
the new value. `struct.pack_into` is not atomic; never use it here.

A page has a header, then an entry for each tenant slot, then an entry for each channel slot::

    daemon page   header    (not used)
                  tenant    weight, offset (seconds of virtual time)
                  channel   serial, state, generation, tenant slot, limit of requests, limit of bytes, expiry
    row           header    start, finish, current channel, current request, since, stage
                  tenant    used (device seconds divided by the weight), base (seconds of virtual time)
                  channel   requests taken, bytes taken, device seconds, requests by outcome, bytes of answers

All counters and limits are cumulative: they only grow while the daemon runs, also when a channel slot is used again and
when a new worker continues the row of a worker that has exited. The virtual time of a tenant is the sum of `used` over
all rows, plus the greatest `base` of all rows, plus the tenant's `offset`. `start` and `finish` are the virtual time of
the tenant of the latest request, before and after the charge of its expected cost.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

from weightd_protocol import limits

if TYPE_CHECKING:
    Words = memoryview[int]
    Reals = memoryview[float]

WORD_BYTES = 8
_HEADER_WORDS = 8

# The daemon's entry of a tenant slot.
WEIGHT = 0
OFFSET = 1
_TENANT_WORDS = 2

# The daemon's entry of a channel slot. An entry fills a cache line of 64 bytes.
SERIAL = 0
STATE = 1
GENERATION = 2
TENANT = 3
REQUEST_LIMIT = 4
BYTE_LIMIT = 5
EXPIRES_AT = 6
_CHANNEL_WORDS = 8

# The states of a channel slot, in the order in which a slot passes through them.
SLOT_FREE = 0  # no channel
SLOT_OPEN = 1  # workers read the channel
SLOT_ENDING = 2  # workers close their descriptors of the channel

# The header of a row.
START = 0
FINISH = 1
CURRENT_CHANNEL = 2
CURRENT_REQUEST = 3
SINCE = 4
STAGE = 5

# A worker's entry of a tenant slot.
USED = 0
BASE = 1
_ROW_TENANT_WORDS = 2

# A worker's entry of a channel slot.
REQUESTS = 0
BYTES = 1
SECONDS = 2
ANSWERED = 3  # requests with an answer of the model
ANSWER_BYTES = 4
INVALID = 5  # requests whose inputs the model has refused
FAILED = 6  # requests that the model has not answered for another reason
LATE = 7  # requests that were read after their deadline
RETURNED = 8  # requests that were handed over, or whose answer was dropped: the daemon counts them
_ROW_CHANNEL_WORDS = 9

OUTCOMES = (ANSWERED, INVALID, FAILED, LATE, RETURNED)
"""The counts of ended requests in a worker's entry of a channel slot. Each ended request counts in one of them."""

# The stages of a worker's current request, in the order in which the worker writes them.
STAGE_IDLE = 0  # the worker has no request
STAGE_TAKING = 1  # the worker reads a request from the current channel; the current request is not valid yet
STAGE_TAKEN = 2  # the worker has taken the current request and has not run it
STAGE_RUNNING = 3  # the request may have run, and may have been answered
STAGE_HANDING_OVER = 4  # the worker sends the request, which has not run, to the daemon

# Maximum virtual time in seconds. A value beyond it was not written by a working worker: with the lowest weight of
# 0.001, a device reaches this time after 30 years.
MAX_VIRTUAL_S = 1e12

MAX_WORD = 2**64 - 1


class Page(NamedTuple):
    """Two views of the same memory: words as unsigned integers, and as doubles."""

    words: Words
    reals: Reals


def page_over(buffer: memoryview) -> Page:
    """Return the views of a page's memory. `buffer` starts at an address that is a multiple of `WORD_BYTES`."""
    return Page(buffer.cast("B").cast("Q"), buffer.cast("B").cast("d"))


class Layout(NamedTuple):
    """The numbers of slots in the pages of one device.

    Attributes:
        tenant_slots: the number of tenant slots.
        channel_slots: the number of channel slots.
    """

    tenant_slots: int
    channel_slots: int

    @property
    def daemon_page_bytes(self) -> int:
        """Size of the daemon's page."""
        return WORD_BYTES * self.channel(self.channel_slots)

    @property
    def row_bytes(self) -> int:
        """Size of a row."""
        return WORD_BYTES * self.row_channel(self.channel_slots)

    def tenant(self, slot: int) -> int:
        """Return the index of a tenant's entry in the daemon's page."""
        return _HEADER_WORDS + _TENANT_WORDS * slot

    def channel(self, slot: int) -> int:
        """Return the index of a channel's entry in the daemon's page."""
        return _HEADER_WORDS + _TENANT_WORDS * self.tenant_slots + _CHANNEL_WORDS * slot

    def row_tenant(self, slot: int) -> int:
        """Return the index of a tenant's entry in a row."""
        return _HEADER_WORDS + _ROW_TENANT_WORDS * slot

    def row_channel(self, slot: int) -> int:
        """Return the index of a channel's entry in a row."""
        return _HEADER_WORDS + _ROW_TENANT_WORDS * self.tenant_slots + _ROW_CHANNEL_WORDS * slot


DEVICE_LAYOUT = Layout(limits.MAX_CHANNEL_TENANTS, limits.MAX_CHANNELS)
"""Layout of the pages of a real device."""

# The pages of a device are in one memory: the daemon's page, then the rows. Each begins at a new memory page.
_MEMORY_PAGE_BYTES = 4096
_FIRST_ROW = -(-DEVICE_LAYOUT.daemon_page_bytes // _MEMORY_PAGE_BYTES) * _MEMORY_PAGE_BYTES
_ROW_STRIDE = -(-DEVICE_LAYOUT.row_bytes // _MEMORY_PAGE_BYTES) * _MEMORY_PAGE_BYTES

DEVICE_BYTES = _FIRST_ROW + limits.MAX_CHANNEL_ROWS * _ROW_STRIDE
"""Size of the memory of a device's pages. The kernel allocates only the pages that are used."""


def daemon_page(memory: memoryview) -> Page:
    """Return the daemon's page in the memory of a device's pages."""
    return page_over(memory[: DEVICE_LAYOUT.daemon_page_bytes])


def row_page(memory: memoryview, row: int) -> Page:
    """Return a row in the memory of a device's pages."""
    begin = row_offset(row)
    return page_over(memory[begin : begin + DEVICE_LAYOUT.row_bytes])


def row_offset(row: int) -> int:
    """Return the position of a row in the memory of a device's pages, a multiple of the size of a memory page."""
    return _FIRST_ROW + row * _ROW_STRIDE
