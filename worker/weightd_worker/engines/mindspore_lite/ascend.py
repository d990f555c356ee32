"""MindSpore Lite on an Ascend card, where the library itself shares weights between processes.

What the library does not do, read in the source of 2.7.0, and what this module does about it:

- It knows two keys of the section ascend_context, and ignores them in silence in many cases (`weight_handle`). What it
  exports is "" then: that is a `BuildError`, not a model whose every worker has a copy of its own.
- It takes a list of pids or a handle apart only after it has taken memory, and a handle as far as it is a number: both
  are checked before.
- A build whose sharing has failed is told as a success to the layer above, which then fails for another reason, or runs
  whichever model of this process has the id 0: there is one model in a process, one build, and a self-test after it.
- A failed build keeps the card's memory until the process ends: `can_rebuild` is false.
- Each attach writes the weights again, from its own file, into what everybody runs on, and nobody compares the files:
  the daemon does, by the digests in the HELLOs.
- A card that is not there is taken for card 0, with a warning in the log: it is looked for before.
- It can add no pid after the build; libascendcl can (`acl`).
- A resize to a size that the model was not converted for is refused and changes nothing: `InvalidArgument`. But of a
  model whose gears are batches only the first input's is looked at, and other ones are read beyond their end: where the
  outputs show that there are gears, batches that differ are refused here.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
from pathlib import Path
from typing import Any, Dict, List, Optional, Sequence, Tuple

import numpy as np

from weightd_common.modelfiles.files import ModelFileError, model_files
from weightd_protocol import limits
from weightd_protocol.errors import InvalidArgument
from weightd_protocol.messages.inference import TensorSignature
from weightd_protocol.messages.worker_common import DeviceMemory, SharingTraits
from weightd_worker.engines.engine import (
    Arrays,
    AttachRefused,
    BuildError,
    BuildSettings,
    EngineMissing,
    Gears,
    NotShared,
    OutOfDeviceMemory,
    SharedWeights,
    WeightSharing,
)
from weightd_worker.engines.mindspore_lite.acl import Acl, AclError
from weightd_worker.engines.mindspore_lite.model import MindSporeLite
from weightd_worker.nativelog import NativeLog

_log = logging.getLogger("weightd.worker")
_VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"  # which cards a process sees; it counts them anew
OUT_OF_MEMORY_MARKS = ("Acl open device", "207001", "EI0019")
"""What the log says of a card that is full: no place for a process (model_process.cc:118), no memory (ACL's number), a
port that another process has (HCCL's number)."""


class MindSporeLiteAscend(MindSporeLite):
    """Runs a MindIR model on one card; the handle is the library's, a decimal number.

    Raises:
        EngineMissing: the library cannot share, or the machine has no Ascend driver.
        BuildError: an option is not one.
    """

    can_rebuild = False
    resize_error_type = InvalidArgument

    def __init__(self, settings: BuildSettings, card: int) -> None:
        super().__init__(settings)
        self._batch_inputs: List[str] = []
        self._card = card
        self._is_built = False
        self._handle_sharing = WeightHandleSharing(self._library, self._log, card) if settings.is_sharing else None
        self.sharing = self._handle_sharing or NotShared()

    def build(self, model: str, *, pids: Sequence[str] = (), handle: str = "") -> None:
        """Build the model: for these processes, on this handle, or, with neither, with a copy of the weights."""
        if self._is_built:
            raise BuildError("this process has built a model on a card before; only a new process can build another")
        self._is_built = True
        section = self._ascend_section()
        if self._handle_sharing is not None:
            section.update(self._handle_sharing.build_section(pids, handle))
        self._check_card()
        context = self._context()
        try:
            self._build(model, context, {"ascend_context": section} if section else {})
        except BuildError as error:
            kind = OutOfDeviceMemory if any(each in str(error) for each in OUT_OF_MEMORY_MARKS) else BuildError
            raise kind(f"{error}{self._failure_hint(str(error))}") from None
        if self._handle_sharing is not None:
            self._handle_sharing.on_built(self._model, model)
        self._batch_inputs = self._find_batch_inputs()

    def _context(self) -> Any:
        context = self._library.Context()
        context.target = ["ascend"]  # the first one decides; with "cpu" in front the card would never be used
        context.ascend.device_id = self._card
        self._options.set_ascend(context.ascend)
        return context

    def _ascend_section(self) -> Dict[str, str]:
        """What is set of the library's section ascend_context, beside what is shared."""
        return {}

    @property
    def gears(self) -> Gears:
        """What the converter has recorded; it does so for ge.dynamicDims alone. Libraries before 2.7 do not tell."""
        info = getattr(self._model, "get_model_info", None)
        if info is None:
            return ()
        return parse_gears(self.signature.inputs, info("dynamic_dims"), info("input_shape"))

    def predict(self, inputs: Arrays) -> Arrays:
        """Run, unless batches differ where the card would take the first one's for all."""
        batches = {name: len(inputs[name]) for name in self._batch_inputs}
        if len(set(batches.values())) > 1:
            raise InvalidArgument(f"inputs: expected one batch for all, got {batches}: the model has gears for it")
        return super().predict(inputs)

    def update_weights(self, weights: Arrays) -> None:
        """Replace weights of a model that was converted for it."""
        if not self._options.variable_weights:
            raise BuildError("the weights of this model cannot be changed: the option variable_weights is not set")
        if not weights:
            raise BuildError("there are no weights to change")
        tensors: List[Any] = []
        for name, array in weights.items():
            # Others are not taken, and that is no error to the library.
            tensor = self._library.Tensor(np.ascontiguousarray(array, array.dtype.newbyteorder("=")))
            tensor.name = name
            tensors.append(tensor)
        with self._log.translate_errors(BuildError):
            self._model.update_weights([tensors])

    def memory(self) -> Optional[DeviceMemory]:
        """Ask the driver."""
        try:
            acl = Acl()
            acl.set_device(self._card)
            return acl.memory()
        except AclError as error:
            _log.warning("the card's memory is not known: %s", error)
            return None

    def _find_batch_inputs(self) -> List[str]:
        """The inputs whose free batch the model's gears give; none if it takes any size.

        Of outputs a card tells the shapes for the largest gear, where there are gears, and -1 where any size goes.
        """
        inputs, outputs = self.signature
        free = {each.name: each.shape for each in inputs if each.shape is None or -1 in each.shape}
        any_size = any(each.shape is None or -1 in each.shape for each in outputs)
        if self.gears or any_size or any(shape is None or -1 in shape[1:] for shape in free.values()):
            return []
        return list(free)

    def _failure_hint(self, cause: str) -> str:
        """What to do about a failed build, as far as the library's log tells."""
        if "ExportToShareableHandle" not in cause:
            return ""
        kind = "this card"
        with contextlib.suppress(AclError):
            kind = Acl().soc_name()
        return f"; {kind} cannot share memory between processes: set sharing = 'off' (310P and vNPU are known for it)"

    def _check_card(self) -> None:
        try:
            count = Acl().device_count()
        except AclError as error:
            _log.warning("whether there is a card %d is not known: %s", self._card, error)
            return
        if self._card >= count:
            listed = os.environ.get(_VISIBLE)
            why = f" among those of {_VISIBLE}={listed}" if listed is not None else ""
            raise BuildError(f"device: there is no card {self._card}; this process sees {count}, counted from 0{why}")


DimPosition = Tuple[str, int]
_SIZE = re.compile(r"[0-9]{1,9}")


def parse_gears(inputs: Sequence[TensorSignature], dynamic_dims: str, input_shape: str) -> Gears:
    """Return the gears; none where the texts are not understood, or not about these inputs: then the card decides."""
    model_dims = [(each.name, axis) for each in inputs for axis, dim in enumerate(each.shape or ()) if dim == -1]
    recorded_dims = _free_dims(input_shape)
    if not dynamic_dims or sorted(recorded_dims) != sorted(model_dims):
        return ()
    gears: List[Tuple[int, ...]] = []
    for text in dynamic_dims.strip("\"' ;").split(";"):
        sizes = [each.strip(" []") for each in text.split(",")]
        if len(sizes) != len(recorded_dims) or not all(map(_is_size, sizes)):
            return ()
        size_by_dim: Dict[DimPosition, int] = dict(zip(recorded_dims, map(int, sizes)))
        gears.append(tuple(size_by_dim[each] for each in model_dims))
    too_many = len(gears) > limits.MAX_GEARS or len(model_dims) > limits.MAX_GEAR_DIMS
    return () if too_many else tuple(gears)


def _is_size(text: str) -> bool:
    return _SIZE.fullmatch(text) is not None and 0 < int(text) <= limits.MAX_GEAR_SIZE


def _free_dims(input_shape: str) -> List[DimPosition]:
    free_dims: List[DimPosition] = []
    for text in filter(None, input_shape.strip("\"' ;").split(";")):
        name, _, dims = text.rpartition(":")
        free_dims += [(name.strip(), axis) for axis, dim in enumerate(dims.split(",")) if dim.strip(" []") == "-1"]
    return free_dims


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
