"""MindSpore Lite on an Ascend card, where the library itself shares weights between processes.

Limits of the library, from the source of 2.7.0, and what this module does about them:

- Sharing is set by two keys of the section ascend_context, which the library silently ignores in many cases
  (`_NOT_EXPORTED`). It then exports the handle "". This is a `BuildError`, because otherwise each worker would have a
  private copy of the weights.
- It parses the list of pids, or the handle, only after it has allocated memory, and reads a handle only as far as it
  is a number. Both are checked before.
- If sharing fails in a build, the build reports success to the layer above, which then fails for another reason, or
  runs the model of this process that has the id 0. So a process has one model and one build, and runs a self-test
  after it.
- A failed build keeps the card's memory until the process ends: `can_rebuild` is false.
- Each attach writes the weights again, from its process's file, into the memory that all processes use, and the library
  does not compare the files. The daemon does, by the digests in the HELLO messages.
- It uses card 0 instead of a card that does not exist, with a warning in the log. So the card is checked before.
- It cannot add a pid after the build, but libascendcl can (`acl`).
- It rejects a resize to a size that the model was not converted for, and changes nothing: `InvalidArgument`. But in a
  model with gears for the batch, it checks the batch of the first input only, and reads other inputs beyond their end.
  So if the outputs show that there are gears, batches that differ are rejected here.
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
_VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"  # the cards that a process sees, which it then numbers from 0
OUT_OF_MEMORY_MARKS = ("Acl open device", "207001", "EI0019")
"""Marks in the log of a full card: no place for a process (model_process.cc:118), no memory (a code of ACL), a port
that another process uses (a code of HCCL)."""


class MindSporeLiteAscend(MindSporeLite):
    """Runs a MindIR model on one card. The handle is the library's, a decimal number.

    Raises:
        EngineMissing: the library cannot share weights, or the machine has no Ascend driver.
        BuildError: an option is not valid.
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
        """Build the model: for the processes of `pids`, on the handle, or, with neither, with private weights."""
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
        context.target = ["ascend"]  # the first target decides; after "cpu" the card would never be used
        context.ascend.device_id = self._card
        self._options.set_ascend(context.ascend)
        return context

    def _ascend_section(self) -> Dict[str, str]:
        """Return the keys of the library's section ascend_context, except those for sharing."""
        return {}

    @property
    def gears(self) -> Gears:
        """The gears that the converter has recorded: only from ge.dynamicDims, and readable from version 2.7 on."""
        info = getattr(self._model, "get_model_info", None)
        if info is None:
            return ()
        return parse_gears(self.signature.inputs, info("dynamic_dims"), info("input_shape"))

    def predict(self, inputs: Arrays) -> Arrays:
        """Run the model; reject inputs of different batches if the card would use the first input's for all."""
        batches = {name: len(inputs[name]) for name in self._batch_inputs}
        if len(set(batches.values())) > 1:
            raise InvalidArgument(f"inputs: expected one batch for all, got {batches}: the model has gears for it")
        return super().predict(inputs)

    def update_weights(self, weights: Arrays) -> None:
        """Replace weights of a model that was converted for it (the option variable_weights)."""
        if not self._options.variable_weights:
            raise BuildError("the weights of this model cannot be changed: the option variable_weights is not set")
        if not weights:
            raise BuildError("the file contains no weights")
        tensors: List[Any] = []
        for name, array in weights.items():
            # The library ignores arrays of other layouts or byte orders, without an error.
            tensor = self._library.Tensor(np.ascontiguousarray(array, array.dtype.newbyteorder("=")))
            tensor.name = name
            tensors.append(tensor)
        with self._log.translate_errors(BuildError):
            self._model.update_weights([tensors])

    def memory(self) -> Optional[DeviceMemory]:
        """Return the total and free memory of the card, according to the driver; None if that fails."""
        try:
            acl = Acl()
            acl.set_device(self._card)
            return acl.memory()
        except AclError as error:
            _log.warning("cannot read the card's memory: %s", error)
            return None

    def _find_batch_inputs(self) -> List[str]:
        """Return the inputs with a free batch that the model's gears determine; empty if it accepts any batch.

        A card reports the output shapes of the largest gear if there are gears, and -1 for a dimension of any size.
        """
        inputs, outputs = self.signature
        free = {each.name: each.shape for each in inputs if each.shape is None or -1 in each.shape}
        any_size = any(each.shape is None or -1 in each.shape for each in outputs)
        if self.gears or any_size or any(shape is None or -1 in shape[1:] for shape in free.values()):
            return []
        return list(free)

    def _failure_hint(self, cause: str) -> str:
        """Return advice about a failed build, according to the library's log, or ""."""
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
            _log.warning("cannot check whether card %d exists: %s", self._card, error)
            return
        if self._card >= count:
            listed = os.environ.get(_VISIBLE)
            why = f" among those of {_VISIBLE}={listed}" if listed is not None else ""
            raise BuildError(f"device: there is no card {self._card}; this process sees {count}, counted from 0{why}")


DimPosition = Tuple[str, int]
_SIZE = re.compile(r"[0-9]{1,9}")


def parse_gears(inputs: Sequence[TensorSignature], dynamic_dims: str, input_shape: str) -> Gears:
    """Return the gears, or () if the texts cannot be parsed or concern other inputs; the card then rejects sizes."""
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
    "the library has no pid for this process: it finds no Ascend driver. Run set_env.sh of CANN in the "
    "environment of weightd, and let its user open /dev/davinci*"
)

_NOT_EXPORTED = (
    "the library has built the model without exporting its weights, got handle {!r}. It does so without an error where "
    "the provider is ge or ENABLE_MULTI_BACKEND_RUNTIME is on, the model is encrypted (dec_key_file), was converted "
    "for changing weights (variable_weights) or is in a ModelGroup, or the library is older than 2.7; set sharing = "
    "'off' to serve it with a copy of the weights in each process"
)


class WeightHandleSharing(WeightSharing):
    """Shares weights by the library's handle, a decimal number.

    Args:
        library: the module mindspore_lite.
        log: the log to which the library writes its errors.
        card: the number of the card.

    Raises:
        EngineMissing: the library cannot share weights, or the machine has no Ascend driver.
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
        """Return the driver's number for this process, which differs from os.getpid() in a container."""
        return self._pid

    def build_section(self, pids: Sequence[str], handle: str) -> Dict[str, str]:
        """Return the keys of the section ascend_context for a build: the processes to share with, or else the handle.

        Raises:
            BuildError: a pid or the handle is not a valid number, which the library might take for another one.
        """
        section: Dict[str, str] = {}
        if pids:
            section[_PIDS] = ",".join(str(_parse_decimal("pid", each, _MAX_PID)) for each in pids)
        elif handle:
            section[_HANDLE] = str(_parse_decimal("handle", handle, _MAX_HANDLE))
        self._is_sharing = bool(section)
        return section

    def on_built(self, model: Any, path: str) -> None:
        """Take the library's model after a build from the file at `path` with the keys of `build_section`."""
        self._model = model
        self._path = path

    def export(self, store: str) -> SharedWeights:
        """Return the handle that the build has exported."""
        if not self._is_sharing:
            return SharedWeights("", 0, "weights are not shared: the build order lists no process to share with")
        handle = self._model.get_model_info(_HANDLE)
        if not _DECIMAL.fullmatch(handle) or not 0 < int(handle) <= _MAX_HANDLE:
            raise BuildError(_NOT_EXPORTED.format(handle))
        self._exported_handle = handle
        return SharedWeights(handle, self._shared_bytes(), "")

    def allow(self, pids: Sequence[str]) -> None:
        """Let the driver accept further processes, through libascendcl."""
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
        """Return the shared weights. The build has already attached to them."""
        if not self._is_sharing:
            return SharedWeights("", 0, "weights are not shared: the holder has no handle")
        return SharedWeights(handle, self._shared_bytes(), "")

    def trim_store(self, handle: str) -> None:
        """Do nothing: attaching needs no resources that could be freed."""

    def _shared_bytes(self) -> int:
        """Estimate the shared bytes: the size of the files, mostly weights, rounded up as the library does."""
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
    """Parse a decimal number strictly, because the library's lenient parser might take it for another number."""
    if not _DECIMAL.fullmatch(text) or not 0 < int(text) <= max_value:
        raise BuildError(f"{what}: expected a decimal number from 1 to {max_value}, got {text!r}")
    return int(text)
