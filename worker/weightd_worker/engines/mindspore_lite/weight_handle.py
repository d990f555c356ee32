"""Sharing on an Ascend card, where the library shares by itself, while it builds: what it takes, and what it gives."""

from __future__ import annotations

import contextlib
import re
from pathlib import Path
from typing import Any, Dict, Sequence

from weightd_common.modelfiles.files import ModelFileError, model_files
from weightd_protocol.messages.worker import SharingTraits
from weightd_worker.engines.errors import AttachRefused, BuildError, EngineMissing
from weightd_worker.engines.mindspore_lite.acl import Acl, AclError
from weightd_worker.engines.sharing import SharedWeights, WeightSharing
from weightd_worker.nativelog import NativeLog

_PIDS = "shareable_weight_pid_list"
_HANDLE = "shareable_weight_mem_handle"

_DECIMAL = re.compile(r"[0-9]{1,20}")
_MAX_PID = 2**31 - 1
_MAX_HANDLE = 2**64 - 1

_GRANULE = 2 * 1024 * 1024  # a huge page of the card

_TOO_OLD = "mindspore_lite {} shares no weights between processes; install 2.7 or later, or set sharing = 'off'"
_NO_PID = (
    "the library has no number for this process: it finds no Ascend driver. Run set_env.sh of CANN in the "
    "environment of weightd, and let its user open /dev/davinci*"
)
_NOT_EXPORTED = (
    "the library has built the model without exporting its weights, got handle {!r}. It does so without an error where "
    "the provider is ge or ENABLE_MULTI_BACKEND_RUNTIME is on, the model is encrypted (dec_key_file), was converted "
    "for changing weights (variable_weights) or is in a ModelGroup, or the library is older than 2.7; set sharing = "
    "'off' to serve it with a copy of the weights in each process"
)


class WeightHandleSharing(WeightSharing):
    """Shares by the library's handle, a decimal number.

    Args:
        library: the module.
        log: where the library says what it fails of.
        card: the number of the card.

    Raises:
        EngineMissing: the library cannot share, or the machine has no Ascend driver.
    """

    traits = SharingTraits(pids_fixed_at_build=True, holder_must_outlive=True, attach_rewrites_weights=True)

    def __init__(self, library: Any, log: NativeLog, card: int) -> None:
        self._card = card
        self._pid = _read_pid(library, log)
        self._model: Any = None
        self._path = ""
        self._is_sharing = False
        self._exported_handle = ""

    def current_pid(self) -> str:
        """Return the driver's number for this process, which is not os.getpid() in a container."""
        return self._pid

    def build_section(self, pids: Sequence[str], handle: str) -> Dict[str, str]:
        """Return what a build is told in the section ascend_context: these processes, or else this handle.

        Raises:
            BuildError: one of them is no number that the library would take for what it is.
        """
        section: Dict[str, str] = {}
        if pids:
            section[_PIDS] = ",".join(str(_parse_decimal("pid", each, _MAX_PID)) for each in pids)
        elif handle:
            section[_HANDLE] = str(_parse_decimal("handle", handle, _MAX_HANDLE))
        self._is_sharing = bool(section)
        return section

    def on_built(self, model: Any, path: str) -> None:
        """Take the library's model, built from the file at `path` with what `build_section` said."""
        self._model = model
        self._path = path

    def export(self, store: str) -> SharedWeights:
        """Return the handle that the build has made."""
        if not self._is_sharing:
            return SharedWeights("", 0, "weights are not shared: the build named no process to share with")
        handle = self._model.get_model_info(_HANDLE)
        if not _DECIMAL.fullmatch(handle) or not 0 < int(handle) <= _MAX_HANDLE:
            raise BuildError(_NOT_EXPORTED.format(handle))
        self._exported_handle = handle
        return SharedWeights(handle, self._shared_bytes(), "")

    def allow(self, pids: Sequence[str]) -> None:
        """Tell the driver."""
        if not self._exported_handle:
            raise AttachRefused("this process has exported no weights")
        try:
            numbers = [_parse_decimal("pid", each, _MAX_PID) for each in pids]
            acl = Acl()
            acl.set_device(self._card)
            acl.allow(int(self._exported_handle), numbers)
        except (AclError, BuildError) as error:
            raise AttachRefused(str(error)) from None

    def attach(self, handle: str) -> SharedWeights:
        """Do nothing: the build has attached."""
        if not self._is_sharing:
            return SharedWeights("", 0, "weights are not shared: the holder has no handle")
        return SharedWeights(handle, self._shared_bytes(), "")

    def trim_store(self, handle: str) -> None:
        """Do nothing: there is nothing that only an attach needs."""

    def _shared_bytes(self) -> int:
        """An estimate: the library rounds the size of the weights so, and the file holds little else."""
        size = 0
        with contextlib.suppress(ModelFileError, OSError):
            size = sum(file.nbytes for file in model_files(Path(self._path), is_own_copy=True))
        return (size // _GRANULE + 1) * _GRANULE


def _read_pid(library: Any, log: NativeLog) -> str:
    model = library.Model()
    if not hasattr(model, "get_model_info"):
        raise EngineMissing(_TOO_OLD.format(library.__version__))
    with log.translate_errors(EngineMissing):
        pid: str = model.get_model_info("current_pid")
        if not _DECIMAL.fullmatch(pid):
            raise RuntimeError(_NO_PID)
    return pid


def _parse_decimal(what: str, text: str, max_value: int) -> int:
    """Where the library is lenient, another number would be meant."""
    if not _DECIMAL.fullmatch(text) or not 0 < int(text) <= max_value:
        raise BuildError(f"{what}: expected a decimal number from 1 to {max_value}, got {text!r}")
    return int(text)
