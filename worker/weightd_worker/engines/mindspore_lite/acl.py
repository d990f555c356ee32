"""Calls to libascendcl.so, CANN's library beneath MindSpore Lite, for functions that MindSpore Lite does not offer.

libascendcl can be loaded only if CANN's set_env.sh has set the environment variables, or if mindspore_lite has already
loaded its plugin for Ascend. Calls use the card that the calling thread has set (`Acl.set_device`). This module never
resets a card, because a reset in older versions closes the card for the whole process, including MindSpore Lite. The
driver releases the card when the process exits.
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
    107000: "invalid argument",
    107001: "the card does not exist",
    107002: "no card is set",
    207000: "this card, driver or virtual instance does not support it",
    207001: "the card has no memory left",
    507899: "the driver rejected the call; see dmesg or its log under /var/log/ascend_seclog",
}


class AclError(WeightdError):
    """A call to libascendcl failed.

    Attributes:
        call: the name of the called function, or of the library if it cannot be loaded.
        code: the return code of the function; None if it could not be called.
        hint: the meaning of the return code, or advice for the operator; may be "".
    """

    def __init__(self, call: str, code: Optional[int], hint: str) -> None:
        self.call = call
        self.code = code
        self.hint = hint
        what = call if code is None else f"{call} returned {code}"
        super().__init__(f"{what}: {hint}" if hint else what)


class Acl:
    """Loads libascendcl, and has a method for each function that weightd uses.

    Raises:
        AclError: the library cannot be loaded. Each method raises it if the library lacks the function or the call
            fails.
    """

    def __init__(self) -> None:
        try:
            self._library: Any = ctypes.CDLL(_LIBRARY)
        except OSError as error:
            # The message begins with the name of the missing library: libascendcl, or a library on which it depends.
            # Remove the name of libascendcl, because the AclError names it as well.
            reason = str(error).replace(f"{_LIBRARY}: ", "", 1)
            raise AclError(_LIBRARY, None, f"{reason}; {_SOURCE}") from None

    def initialize(self) -> None:
        """Initialize libascendcl. Other calls require this in a process that has built no model on a card."""
        self._call("aclInit", ctypes.c_char_p(None), accepted_code=_REPEATED_INITIALIZE)

    def device_count(self) -> int:
        """Return the number of cards that this process can see."""
        count = ctypes.c_uint32()
        self._call("aclrtGetDeviceCount", ctypes.byref(count))
        return int(count.value)

    def soc_name(self) -> str:
        """Return the kind of card, such as Ascend910B3."""
        function = self._function("aclrtGetSocName")
        function.restype = ctypes.c_char_p
        name: Optional[bytes] = function()
        if not name:
            raise AclError("aclrtGetSocName", None, "the library reports no name for this card")
        return name.decode("ascii", "replace")

    def set_device(self, device: int) -> None:
        """Set the card for later calls of this thread. The first card that a process sets costs memory on the card."""
        self._call("aclrtSetDevice", ctypes.c_int32(device))

    def memory(self) -> DeviceMemory:
        """Return the total and free memory of the card that this thread has set."""
        free, total = ctypes.c_size_t(), ctypes.c_size_t()
        self._call("aclrtGetMemInfo", ctypes.c_int(_HBM), ctypes.byref(free), ctypes.byref(total))
        return DeviceMemory(int(total.value), int(free.value))

    def bare_pid(self) -> int:
        """Return the pid by which the driver identifies this process. In a container it differs from os.getpid()."""
        pid = ctypes.c_int32()
        self._call("aclrtDeviceGetBareTgid", ctypes.byref(pid))
        return int(pid.value)

    def allow(self, handle: int, pids: Sequence[int]) -> None:
        """Allow further processes to use weights that this process has exported.

        Args:
            handle: the handle of the exported weights.
            pids: the processes' `bare_pid` numbers.
        """
        numbers = (ctypes.c_int32 * len(pids))(*pids)
        # The handle needs an explicit type, because ctypes would pass a Python int as a C int of 32 bits.
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
