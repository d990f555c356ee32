"""The few calls to libascendcl.so, the layer beneath MindSpore Lite, that the library has no counterpart for.

The library is there once CANN's set_env.sh was read, or mindspore_lite has loaded its plugin. A call takes effect on
the card that this thread has set (`Acl.use`). None is ever reset: in older versions that takes the card away from
everybody in this process, MindSpore Lite included; the end of the process gives it back.
"""

from __future__ import annotations

import ctypes
from typing import Any, Optional, Sequence

from weightd_protocol.errors import WeightdError
from weightd_protocol.messages.worker_common import DeviceMemory

_LIBRARY = "libascendcl.so"
_HBM = 1  # aclrtMemAttr: ACL_HBM_MEM
_REPEATED_INITIALIZE = 100002

_SOURCE = "run set_env.sh of CANN in this environment"
_UPGRADE = "this version of CANN has no such call; install a later one"
_HINTS = {
    107000: "an argument is wrong",
    107001: "there is no such card",
    107002: "no card is set",
    207000: "this card, driver or virtual instance does not support it",
    207001: "the card has no memory left",
    507899: "the driver refuses; dmesg or its log under /var/log/ascend_seclog says why",
}


class AclError(WeightdError):
    """A call failed.

    Attributes:
        call: its name, or the library's where that cannot be loaded.
        code: what it returned, None where it could not be called.
        hint: what that means, or what to do; may be "".
    """

    def __init__(self, call: str, code: Optional[int], hint: str) -> None:
        self.call = call
        self.code = code
        self.hint = hint
        what = call if code is None else f"{call} returned {code}"
        super().__init__(f"{what}: {hint}" if hint else what)


class Acl:
    """The loaded library.

    Raises:
        AclError: it cannot be loaded. So does each method whose call is missing or does not succeed.
    """

    def __init__(self) -> None:
        try:
            self._library: Any = ctypes.CDLL(_LIBRARY)
        except OSError as error:
            # It begins with the name of what is missing: this library, or one that it needs.
            reason = str(error).replace(f"{_LIBRARY}: ", "", 1)
            raise AclError(_LIBRARY, None, f"{reason}; {_SOURCE}") from None

    def initialize(self) -> None:
        """Make the other calls possible in a process in which no model was built."""
        self._call("aclInit", ctypes.c_char_p(None), accepted_code=_REPEATED_INITIALIZE)

    def device_count(self) -> int:
        """Return how many cards this process can see."""
        count = ctypes.c_uint32()
        self._call("aclrtGetDeviceCount", ctypes.byref(count))
        return int(count.value)

    def soc_name(self) -> str:
        """Return the kind of card, such as Ascend910B3."""
        function = self._function("aclrtGetSocName")
        function.restype = ctypes.c_char_p
        name: Optional[bytes] = function()
        if not name:
            raise AclError("aclrtGetSocName", None, "it knows no name for this card")
        return name.decode("ascii", "replace")

    def set_device(self, device: int) -> None:
        """Let the calls that follow concern this card; in a process that used none, that takes some of its memory."""
        self._call("aclrtSetDevice", ctypes.c_int32(device))

    def memory(self) -> DeviceMemory:
        """Return what the card's own memory is."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("aclrtGetMemInfo", ctypes.c_int(_HBM), ctypes.byref(free), ctypes.byref(total))
        return DeviceMemory(int(total.value), int(free.value))

    def bare_pid(self) -> int:
        """Return the driver's number for this process, which is not os.getpid() in a container."""
        pid = ctypes.c_int32()
        self._call("aclrtDeviceGetBareTgid", ctypes.byref(pid))
        return int(pid.value)

    def allow(self, handle: int, pids: Sequence[int]) -> None:
        """Put pids on the list of a handle that this process has exported; those on it stay there."""
        numbers = (ctypes.c_int32 * len(pids))(*pids)
        # Without its type a handle would lose its upper half.
        self._call("aclrtMemSetPidToShareableHandle", ctypes.c_uint64(handle), numbers, ctypes.c_size_t(len(pids)))

    def _call(self, name: str, *arguments: Any, accepted_code: int = 0) -> None:
        function = self._function(name)
        function.restype = ctypes.c_int
        code: int = function(*arguments)
        if code not in (0, accepted_code):
            raise AclError(name, code, _HINTS.get(code, ""))

    def _function(self, name: str) -> Any:
        try:
            return getattr(self._library, name)
        except AttributeError:
            raise AclError(name, None, _UPGRADE) from None
