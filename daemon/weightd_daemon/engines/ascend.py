"""What an Ascend card takes, whichever engine runs there."""

from __future__ import annotations

from weightd_daemon.platform.memory import MIB

# aclcppdevg_000222: on training cards and 800I A2; other hosts allow 64, virtual machines 32.
MAX_PROCESSES = 63
MAX_PROCESSES_IN_VM = 32

# Only processes that the holder knew at its build attach there: who is to take a lost worker's place has to be one.
DEFAULT_SPARES = 1

# Shared weights take whole huge pages of the card, and one more even where they fit exactly.
_HUGE_PAGE_BYTES = 2 * MIB


def card_bytes(weight_bytes: int) -> int:
    """Return the bytes of a card that so many bytes of weights take."""
    return (weight_bytes // _HUGE_PAGE_BYTES + 1) * _HUGE_PAGE_BYTES


def physical_id(device: int, visible: str) -> int | None:
    """Return a host's own number of a device, of which a process sees only those that ASCEND_RT_VISIBLE_DEVICES lists.

    None where the list is too short, or has something there that is no number.
    """
    if not visible.strip():
        return device
    listed = [each.strip() for each in visible.split(",")]
    number = listed[device] if device < len(listed) else ""
    return int(number) if number.isdecimal() else None
