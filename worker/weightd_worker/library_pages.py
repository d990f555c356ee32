"""The pages of libraries that a process has mapped: those that only its start or a build needs are not to count for it.

They stay in the page cache, and come from there again when they are used; where memory is scarce the kernel drops them.
"""

from __future__ import annotations

import contextlib
from typing import Iterable, Iterator, Tuple

from weightd_worker.pagesharing.libc import libc, unsupported_reason

_SMAPS = "/proc/self/smaps"

# A mapping without a file has no path.
_PATH_FIELD = 5


def drop_unchanged_pages() -> None:
    """Let go of each page of a library that this process has not changed and cannot: its code and its constants."""
    if unsupported_reason():
        return
    # Not to count less is no failure.
    with contextlib.suppress(OSError):
        with open(_SMAPS, encoding="utf-8", errors="replace") as file:  # noqa: PTH123 - a path object costs memory
            mappings = list(unchanged_mappings(file))
        for begin, end in mappings:
            libc().drop_file_pages(begin, end - begin)


def unchanged_mappings(lines: Iterable[str]) -> Iterator[Tuple[int, int]]:
    """Yield begin and end of each mapping of a library that cannot be written to, and has no page of its own.

    What a loader has put right before it was protected is such a page: without it the library would be of no use.

    Args:
        lines: of /proc/PID/smaps.
    """
    address_range, is_candidate = "", False
    for line in lines:
        words = line.split()
        if not words[0].endswith(":"):
            address_range, is_candidate = (
                words[0],
                "w" not in words[1] and len(words) > _PATH_FIELD and ".so" in words[_PATH_FIELD],
            )
        elif words[0] == "Anonymous:" and is_candidate and words[1] == "0":
            begin, _, end = address_range.partition("-")
            yield int(begin, 16), int(end, 16)
