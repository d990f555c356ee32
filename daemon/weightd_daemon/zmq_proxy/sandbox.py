"""The sandbox of a proxy process, which can then use only its sockets, a limited amount of memory, and CPU time."""

from __future__ import annotations

import contextlib
import ctypes
import os
import resource
import stat

_libc = ctypes.CDLL(None, use_errno=True)

# From <linux/prctl.h> and <linux/capability.h>.
_PR_CAPBSET_DROP = 24
_PR_SET_NO_NEW_PRIVS = 38
_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL = 47, 4
_PR_SET_NAME = 15
_CAPABILITY_VERSION_3 = 0x20080522
_CAPABILITY_COUNT = 64

# System calls and flags of landlock(7). The system call numbers are the same on all architectures. Each table maps a
# version of the landlock ABI to the number of rights that this version knows; each right is one bit, as in
# <linux/landlock.h>. A rule set forbids all rights that it handles, unless a rule allows them.
_LANDLOCK_CREATE, _LANDLOCK_RESTRICT = 444, 446
_LANDLOCK_VERSION = 1
_FILE_RIGHTS = {1: 13, 2: 14, 3: 15, 5: 16}
_NETWORK_RIGHTS = {4: 2}
_SCOPES = {6: 2}

_STDERR = 2


def set_process_name(name: str) -> None:
    """Set the name that ps shows for this process. The kernel keeps its first 15 bytes."""
    _libc.prctl(_PR_SET_NAME, name.encode()[:15], 0, 0, 0)


def drop_privileges() -> None:
    """Drop all capabilities permanently, and deny access to files.

    Call this before other threads are started: later threads inherit the restrictions, existing threads do not get
    them.
    """
    for number in range(_CAPABILITY_COUNT):
        _libc.prctl(_PR_CAPBSET_DROP, number, 0, 0, 0)
    _libc.prctl(_PR_CAP_AMBIENT, _PR_CAP_AMBIENT_CLEAR_ALL, 0, 0, 0)
    header = (ctypes.c_uint32 * 2)(_CAPABILITY_VERSION_3, 0)
    _libc.capset(header, (ctypes.c_uint32 * 6)())
    _libc.prctl(_PR_SET_NO_NEW_PRIVS, 1, 0, 0, 0)
    _restrict_access()
    _set_limit(resource.RLIMIT_CORE, 0)
    if not stat.S_ISREG(os.fstat(_STDERR).st_mode):
        # Forbid writing to files, but only if stderr is not a log file, which must be able to grow. With a log file,
        # only landlock protects the files.
        _set_limit(resource.RLIMIT_FSIZE, 0)


def limit_growth(max_bytes: int, *, may_start_threads: bool = False) -> None:
    """Limit the address space to `max_bytes`; forbid new processes and threads, unless `may_start_threads`.

    The limit on processes has no effect if the process runs as root.
    """
    if not may_start_threads:
        _set_limit(resource.RLIMIT_NPROC, 0)
    _set_limit(resource.RLIMIT_AS, max_bytes)


def _restrict_access() -> None:
    """Deny access to files, TCP ports and other processes, as far as the kernel's landlock(7) supports this."""
    version = landlock_version()
    if version < 1:
        return
    handled_rights = [sum(_supported_bits(bits, version)) for bits in (_FILE_RIGHTS, _NETWORK_RIGHTS, _SCOPES)]
    rules = (ctypes.c_uint64 * 3)(*handled_rights)
    # Pass only the fields that this landlock version knows, because the kernel rejects a structure with other fields.
    size = 8 * (1 + (version >= min(_NETWORK_RIGHTS)) + (version >= min(_SCOPES)))
    descriptor = _libc.syscall(_LANDLOCK_CREATE, rules, ctypes.c_size_t(size), 0)
    if descriptor >= 0:
        _libc.syscall(_LANDLOCK_RESTRICT, descriptor, 0)
        os.close(descriptor)


def landlock_version() -> int:
    """Return the version of the kernel's landlock ABI; a number less than 1 if the kernel has no landlock."""
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


# Only glibc has this function.
_malloc_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)

# Increment of the OOM score that the proxy has inherited from the daemon. The increment is less than a holder's
# increment in `weightd_common.process_attributes`, a module that is not imported here to save memory. So the kernel
# kills a holder first. The loss of a proxy costs less than the loss of a holder, but frees memory only for a moment,
# because the daemon restarts the proxy at once.
_OOM_SCORE_INCREMENT = 100
_OOM_SCORE_PATH = "/proc/self/oom_score_adj"


def raise_oom_score() -> None:
    """Raise the OOM score of this process, so that the kernel kills it before the daemon when memory runs out."""
    with contextlib.suppress(OSError, ValueError), open(_OOM_SCORE_PATH, "rb+", 0) as file:
        score = min(int(file.read()) + _OOM_SCORE_INCREMENT, 1000)
        file.seek(0)
        file.write(b"%d\n" % score)


def mapped_bytes() -> int:
    """Return the size in bytes of this process's mapped address space, including pages that are not in memory."""
    with open("/proc/self/statm", "rb") as file:
        return int(file.read().split()[0]) * resource.getpagesize()


def trim_heap() -> None:
    """Return the free memory of the C allocator to the kernel. This takes a few milliseconds for each 50 MiB."""
    if _malloc_trim is not None:
        _malloc_trim(0)
