"""System shared memory in the form of Triton's clients: callers name files in /dev/shm that hold their tensors.

A caller can name any file of the gateway's user in /dev/shm, but no file of another user. Therefore the feature is off
by default, and available only to callers on this host. The gateway reads and writes the files instead of mapping them:
if a caller truncates a file, the request fails, but the gateway does not crash.
"""

from __future__ import annotations

import os
import re
import stat
import weakref
from pathlib import Path
from typing import Any, NamedTuple

from weightd_gateway.auth import Caller
from weightd_protocol import limits
from weightd_protocol.errors import InvalidArgument, NotFound, ResourceExhausted
from weightd_protocol.schema import describe_value, label

DIRECTORY = Path("/dev/shm")  # noqa: S108 - where shm_open(3) creates its files

# Maximum number of regions of one caller, and of all callers. Each region keeps a file descriptor open.
MAX_REGIONS_PER_CALLER = 64
MAX_REGIONS = 1024

# Valid names of files: as for shm_open(3), but only with characters that are harmless in paths and logs.
_KEY = re.compile(r"/?([A-Za-z0-9_][A-Za-z0-9_.+-]{0,254})")

# Prefix of the files of sem_open(3), which contain no tensors.
_SEMAPHORE_PREFIX = "sem."

_DISABLED = "shared memory is disabled at this gateway (shared_memory)"


class RegisteredRegion:
    """A part of a shared-memory file that a caller has registered."""

    def __init__(self, key: str, descriptor: int, offset: int, nbytes: int) -> None:
        self.key = key
        self.offset = offset
        self.nbytes = nbytes
        self._descriptor = descriptor
        # Close the file with the last reference to the region: requests may use the region after it is unregistered.
        weakref.finalize(self, os.close, descriptor)

    def read(self, offset: int, buffer: memoryview) -> None:
        """Fill `buffer` from the region, beginning at `offset`.

        Raises:
            InvalidArgument: the file has been truncated.
        """
        done = 0
        while done < len(buffer):
            count = os.preadv(self._descriptor, [buffer[done:]], self.offset + offset + done)
            if not count:
                raise InvalidArgument("the file of the region has been truncated since its registration")
            done += count

    def write(self, offset: int, content: memoryview) -> None:
        """Write `content` to the region, beginning at `offset`.

        Raises:
            InvalidArgument: the file has been truncated.
        """
        if os.fstat(self._descriptor).st_size < self.offset + offset + len(content):
            raise InvalidArgument("the file of the region has been truncated since its registration")
        done = 0
        while done < len(content):
            done += os.pwrite(self._descriptor, content[done:], self.offset + offset + done)


class ShmSlice(NamedTuple):
    """The location of a tensor within a region."""

    region: RegisteredRegion
    offset: int
    nbytes: int


class RegisteredRegions:
    """The registered regions by caller; a caller has access only to its own regions.

    Args:
        enabled: whether the configuration allows shared memory.
        directory: the directory of the files.
    """

    def __init__(self, *, enabled: bool, directory: Path = DIRECTORY) -> None:
        self._enabled = enabled
        self._directory = directory
        self._by_caller: dict[Caller, dict[str, RegisteredRegion]] = {}

    def register(self, caller: Caller, name: str, key: object, offset: object, byte_size: object) -> None:
        """Register a part of the file `key` as the region `name`.

        Raises:
            InvalidArgument: the file cannot be used, or the caller has a region of that name.
            ResourceExhausted: the caller, or all callers together, have too many regions.
        """
        own = self._regions_of(caller)
        if not 0 < len(name.encode("utf-8", "surrogatepass")) <= limits.MAX_NAME_BYTES:
            raise InvalidArgument(f"region: expected a name of 1 to {limits.MAX_NAME_BYTES} bytes")
        if name in own:
            raise InvalidArgument(f"region {label(name)} is registered already")
        if len(own) >= MAX_REGIONS_PER_CALLER or sum(map(len, self._by_caller.values())) >= MAX_REGIONS:
            raise ResourceExhausted(
                f"expected at most {MAX_REGIONS_PER_CALLER} registered regions per caller and {MAX_REGIONS} in total"
            )
        first, size = _check_integer("offset", offset), _check_integer("byte_size", byte_size)
        own[name] = self._open_region(key, first, size)

    def unregister(self, caller: Caller, name: str = "") -> None:
        """Remove a region of the caller or, with "", all regions of the caller; unknown names are ignored."""
        own = self._regions_of(caller)
        if name:
            own.pop(name, None)
        if not (name and own):
            self._by_caller.pop(caller, None)

    def status(self, caller: Caller, name: str = "") -> list[dict[str, Any]]:
        """Describe the region `name` of the caller, or all of its regions.

        Raises:
            NotFound: the caller has no region of that name.
        """
        own = self._regions_of(caller)
        chosen = {name: self._find_region(caller, name)} if name else own
        return [
            {"name": each, "key": region.key, "offset": region.offset, "byte_size": region.nbytes}
            for each, region in chosen.items()
        ]

    def resolve(self, caller: Caller, name: object, offset: object, byte_size: object) -> ShmSlice:
        """Return the location of a tensor within a region.

        Raises:
            InvalidArgument: the tensor extends beyond the region.
            NotFound: the caller has no region of that name.
        """
        region = self._find_region(caller, name)
        first, size = (
            _check_integer("shared_memory_offset", offset),
            _check_integer("shared_memory_byte_size", byte_size),
        )
        if first + size > region.nbytes:
            raise InvalidArgument(
                f"region {label(name)}: expected at most {region.nbytes} bytes, its size, got {first} + {size}"
            )
        return ShmSlice(region, first, size)

    def _regions_of(self, caller: Caller) -> dict[str, RegisteredRegion]:
        if not self._enabled:
            raise InvalidArgument(_DISABLED)
        return self._by_caller.setdefault(caller, {})

    def _find_region(self, caller: Caller, name: object) -> RegisteredRegion:
        region = self._regions_of(caller).get(name) if type(name) is str else None
        if region is None:
            raise NotFound(f"no region {label(name)} is registered by this caller")
        return region

    def _open_region(self, key: object, offset: int, nbytes: int) -> RegisteredRegion:
        match = _KEY.fullmatch(key) if type(key) is str else None
        if match is None or match.group(1).startswith(_SEMAPHORE_PREFIX):
            raise InvalidArgument(f"key: expected the name of a file in {self._directory}, got {describe_value(key)}")
        path = self._directory / match.group(1)
        try:
            descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            # The error is the same for a missing file and for a file of another user, so callers cannot find out names
            # of files.
            raise InvalidArgument(
                f"key: expected a file that belongs to the gateway's user, got {describe_value(key)}"
            ) from None
        region = RegisteredRegion(str(key), descriptor, offset, nbytes)
        found = os.fstat(descriptor)
        if not stat.S_ISREG(found.st_mode) or found.st_uid != os.geteuid():
            raise InvalidArgument(f"key: expected a file that belongs to the gateway's user, got {describe_value(key)}")
        if not nbytes or offset + nbytes > found.st_size:
            raise InvalidArgument(
                f"byte_size: expected 1 to {max(0, found.st_size - offset)} from {offset} on, got {nbytes}"
            )
        return region


def _check_integer(what: str, value: object) -> int:
    if type(value) is not int or not 0 <= value <= limits.MAX_COUNT:
        raise InvalidArgument(f"{what}: expected integer, 0 to {limits.MAX_COUNT}, got {describe_value(value)}")
    return value
