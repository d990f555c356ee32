"""A file on a FUSE file system that never answers FLUSH, so that `close` and `exec` block in processes that hold it."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import select
import struct
import threading
from pathlib import Path
from typing import Generator

# See include/uapi/linux/fuse.h.
_GETATTR, _OPEN, _RELEASE, _FLUSH, _INIT = 3, 14, 18, 25, 26
_WITHOUT_REPLY = (2, 36, 42)  # FORGET, INTERRUPT, BATCH_FORGET
_HEADER = struct.Struct("=IIQQIIIHH")
_REPLY = struct.Struct("=IiQ")
_MAX_REQUEST_BYTES = 1 << 17

_MODE = 0o100666


def is_available() -> bool:
    """Return whether this process may mount such a file system."""
    return os.getuid() == 0 and os.access("/dev/fuse", os.R_OK | os.W_OK)


@contextlib.contextmanager
def unclosable(path: Path) -> Generator[None, None, None]:
    """Mount such a file at `path` for the block. The end of the block releases all blocked processes.

    Raises:
        OSError: the kernel refuses the mount.
    """
    path.touch()
    device = os.open("/dev/fuse", os.O_RDWR | os.O_CLOEXEC | os.O_NONBLOCK)
    options = f"fd={device},rootmode={_MODE:o},user_id=0,group_id=0,allow_other".encode()
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.mount(b"unclosable", os.fsencode(path), b"fuse.unclosable", 0, options):
        number = ctypes.get_errno()
        os.close(device)
        raise OSError(number, os.strerror(number), str(path))
    stopping, stop = os.pipe()
    server = threading.Thread(target=_serve, args=(device, stopping))
    server.start()
    try:
        yield
    finally:
        os.close(stop)
        server.join()
        # The kernel fails every pending request.
        os.close(device)
        libc.umount2(os.fsencode(path), 2)  # MNT_DETACH
        os.close(stopping)


def _serve(device: int, stopping: int) -> None:
    while True:
        ready, _, _ = select.select([device, stopping], [], [])
        if stopping in ready:
            return
        with contextlib.suppress(BlockingIOError, FileNotFoundError):
            request = os.read(device, _MAX_REQUEST_BYTES)
            _, opcode, unique, *_ = _HEADER.unpack_from(request)
            if opcode != _FLUSH and opcode not in _WITHOUT_REPLY:
                _reply(device, opcode, unique)


def _reply(device: int, opcode: int, unique: int) -> None:
    attributes = struct.pack("=6Q10I", 1, 0, 0, 0, 0, 0, 0, 0, 0, _MODE, 1, 0, 0, 0, 4096, 0)
    bodies = {
        _INIT: struct.pack("=IIIIHHI", 7, 22, 0, 0, 0, 0, 4096),
        _GETATTR: struct.pack("=QII", 1 << 30, 0, 0) + attributes,
        _OPEN: struct.pack("=QII", 0, 0, 0),
        _RELEASE: b"",
    }
    body = bodies.get(opcode)
    error = -errno.ENOSYS if body is None else 0
    os.write(device, _REPLY.pack(_REPLY.size + len(body or b""), error, unique) + (body or b""))
