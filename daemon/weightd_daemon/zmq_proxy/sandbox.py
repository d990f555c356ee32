"""What a proxy cannot do, whatever runs in it: it is left its sockets, its memory and its processor."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import stat

_libc = ctypes.CDLL(None, use_errno=True)

# Of <linux/prctl.h> and <linux/capability.h>.
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_PR_SET_NAME = 15
_CAPABILITY_VERSION_3 = 0x20080522
_CAPABILITY_COUNT = 64

# Of <linux/landlock.h>, the numbers of system calls are the same on all machines. By the version of its ABI: bits of
# what a rule set handles, that is, forbids where it has no rule.
_LANDLOCK_CREATE, _LANDLOCK_RESTRICT = 444, 446
_LANDLOCK_VERSION = 1
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}
_NETWORK_RIGHTS = {4: 2}
_SCOPES = {6: 2}

_STDERR = 2


def set_process_name(name: str) -> None:
    """Give this process a name, of which ps shows 15 bytes."""
    _libc.prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def drop_privileges() -> None:
    """Keep no capability, get none back, and reach no file: before threads are started, which inherit it."""
    for number in range(_CAPABILITY_COUNT):
        _libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)
    _libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _libc.capset(header, (ctypes.c_uint32 * 6)())
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _restrict_access()
    _set_limit(resource.RLIMIT_CORE, 0)
    if not stat.S_ISREG(os.fstat(_STDERR).st_mode):
        # Else it could not say what goes wrong; to open another file is forbidden above where the kernel can.
        _set_limit(resource.RLIMIT_FSIZE, 0)


def limit_growth(max_bytes: int, *, may_start_threads: bool = False) -> None:
    """Start no process or thread any more, and map no more than so much memory in all."""
    if not may_start_threads:
        _set_limit(resource.RLIMIT_NPROC, 0)
    _set_limit(resource.RLIMIT_AS, max_bytes)


def _restrict_access() -> None:
    """No file, no port and no process outside (landlock(7)), as far as the kernel can forbid it."""
    version = landlock_version()
    if version < 1:
        return
    handled_rights = [sum(_supported_bits(bits, version)) for bits in (_FILE_RIGHTS, _NETWORK_RIGHTS, _SCOPES)]
    rules = (ctypes.c_uint64 * 3)(*handled_rights)
    # Older kernels take no more than they know.
    size = 8 * (1 + (version >= min(_NETWORK_RIGHTS)) + (version >= min(_SCOPES)))
    descriptor = _libc.syscall(_LANDLOCK_CREATE, rules, ctypes.c_size_t(size), 0)
    if descriptor >= 0:
        _libc.syscall(_LANDLOCK_RESTRICT, descriptor, 0)
        os.close(descriptor)


def landlock_version() -> int:
    """Return the version of landlock that the kernel has; less than 1 for none."""
    version: int = _libc.syscall(_LANDLOCK_CREATE, None, ctypes.c_size_t(0), _LANDLOCK_VERSION)
    return version


def _supported_bits(bits: dict[int, int], version: int) -> list[int]:
    bit_counts = [count for since, count in bits.items() if since <= version]
    return [1 << bit for bit in range(max(bit_counts, default=0))]


def _set_limit(resource_id: int, limit: int) -> None:
    _, hard = resource.getrlimit(resource_id)
    if hard != resource.RLIM_INFINITY:
        limit = min(limit, hard)
    resource.setrlimit(resource_id, (limit, limit))


# Only glibc has it.
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

# Less than a holder's (`weightd_common.process_attributes`, not imported, to stay small): it is there again at once.
_OOM_SCORE_INCREMENT = 100
_OOM_SCORE_PATH = "/proc/self/oom_score_adj"


def raise_oom_score() -> None:
    """When memory runs out, have the kernel choose this process rather than the daemon."""
    with contextlib.suppress(OSError, ValueError), open(_OOM_SCORE_PATH, "rb+", 0) as file:
        score = min(int(file.read()) + _OOM_SCORE_INCREMENT, 1000)
        file.seek(0)
        file.write(b"%d\n" % score)


def mapped_bytes() -> int:
    """Return how much is mapped, whether it is used or not."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def trim_heap() -> None:
    """Give memory that was freed back to the kernel; this takes a few milliseconds for each 50 MiB."""
    if _malloc_trim is not None:
        _malloc_trim(0)
