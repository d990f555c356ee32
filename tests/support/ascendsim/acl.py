"""Simulated libascendcl.so: the result of `ctypes.CDLL` for that name after `install`.

Its functions are real C functions without a declared signature, as ctypes finds them in any library: a caller that
passes a handle as a plain int instead of c_uint64 passes only 32 bits of it.
"""

from __future__ import annotations

import ctypes
import os
from pathlib import Path
from typing import Any, Callable, Dict, List

from ascendsim import driver as drivers
from ascendsim.driver import INVALID_PARAM, NO_CONTEXT, AclError

_NAME = "libascendcl.so"
_REPEATED_INIT = 100002
_HBM_ATTRIBUTES = (1, 4, 5, 8, 9, 10, 11)  # enum aclrtMemAttr: ACL_HBM_MEM is 1, ACL_HBM_MEM_HUGE 4, ...

_CDLL: Any = ctypes.CDLL
_I32 = ctypes.c_int32
_SIZE = ctypes.POINTER(ctypes.c_size_t)


_devices: List[int] = []  # the devices that this process has set; the last one is the current device
_initialised: List[bool] = []
_soc_name = ctypes.create_string_buffer(64)


def install() -> None:
    """Make `ctypes.CDLL` find the simulated library. Other names are not affected."""
    if ctypes.CDLL is _CDLL:
        module: Any = ctypes
        module.CDLL = _FakeCDLL
        module.cdll = ctypes.LibraryLoader(module.CDLL)


class _FakeCDLL(_CDLL):  # type: ignore[misc]
    """ctypes.CDLL with one simulated library."""

    def __new__(cls, name: Any = None, *args: Any, **kwargs: Any) -> Any:
        file = "" if name is None else os.fsdecode(name)
        if not Path(file).name.startswith(_NAME):
            return object.__new__(cls)
        if not drivers.switches().libascendcl:
            raise OSError(f"{file}: cannot open shared object file: No such file or directory")
        return _Library(file)


class _Library:
    """The loaded library."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._handle = id(self)

    def __getattr__(self, name: str) -> Any:
        missing = name == "aclrtMemSetPidToShareableHandle" and drivers.switches().acl_set_pid == "missing"
        if name not in _FUNCTIONS or missing:
            raise AttributeError(f"{self._name}: undefined symbol: {name}")
        address = ctypes.cast(_FUNCTIONS[name], ctypes.c_void_p).value
        function: Any = _pointer(address)
        function.__name__ = name
        setattr(self, name, function)
        return function


_BASE: Any = ctypes._CFuncPtr  # type: ignore[attr-defined]


class _FunctionPointer(_BASE):  # type: ignore[misc]
    """A C function without a declared signature."""

    _flags_ = 1  # FUNCFLAG_CDECL
    _restype_ = ctypes.c_int


_pointer: Any = _FunctionPointer


def _init(_: Any) -> int:
    if _initialised:
        return _REPEATED_INIT
    _initialised.append(True)
    return 0


def _set_device(device: int) -> int:
    drivers.driver().set_device(device)
    _devices.append(device)
    return 0


def _get_device_count(count: Any) -> int:
    driver = drivers.driver()
    count[0] = driver.cards if driver.switches.ascend else 0
    return 0 if driver.switches.ascend else drivers.DRIVER_ERROR


def _get_memory_info(attribute: int, free: Any, total: Any) -> int:
    if not _devices:
        return NO_CONTEXT
    # A card with HBM reports no DDR.
    values = drivers.driver().memory_info(_devices[-1]) if attribute in _HBM_ATTRIBUTES else (0, 0)
    free[0], total[0] = values
    return 0


def _get_bare_tgid(pid: Any) -> int:
    pid[0] = drivers.driver().pid
    return 0


def _get_soc_name() -> int:
    _soc_name.value = drivers.switches().soc_name.encode()
    return ctypes.addressof(_soc_name)


def _set_pids(handle: int, pids: Any, count: int) -> int:
    if not pids or count == 0:
        return INVALID_PARAM
    drivers.driver().set_pids(handle, pids[:count])
    return 0


def _function(function: Callable[..., int], *types: Any) -> Any:
    def call(*args: Any) -> int:
        try:
            return function(*args)
        except AclError as error:
            return error.code

    return ctypes.CFUNCTYPE(ctypes.c_int, *types)(call)


_FUNCTIONS: Dict[str, Any] = {
    "aclInit": _function(_init, ctypes.c_char_p),
    "aclrtSetDevice": _function(_set_device, _I32),
    "aclrtGetDeviceCount": _function(_get_device_count, ctypes.POINTER(ctypes.c_uint32)),
    "aclrtGetMemInfo": _function(_get_memory_info, ctypes.c_int, _SIZE, _SIZE),
    "aclrtDeviceGetBareTgid": _function(_get_bare_tgid, ctypes.POINTER(_I32)),
    "aclrtGetSocName": ctypes.CFUNCTYPE(ctypes.c_void_p)(_get_soc_name),
    "aclrtMemSetPidToShareableHandle": _function(_set_pids, ctypes.c_uint64, ctypes.POINTER(_I32), ctypes.c_size_t),
}
