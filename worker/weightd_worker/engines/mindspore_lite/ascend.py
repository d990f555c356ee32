"""MindSpore Lite on an Ascend card, where the library itself shares weights between processes.

Limits of the library, from the source of MindSpore Lite 2.7.0, and how this module handles them:

- Two keys of the library's configuration section ascend_context enable sharing, but the library silently ignores them
  in many cases (`_NOT_EXPORTED`) and then exports "" as the handle. This module raises a `BuildError` in this case,
  because each worker would have a private copy of the weights.
- The library parses the list of pids, or the handle, only after it has allocated memory, and accepts a handle with
  trailing text. So this module checks both before the build.
- If sharing fails during a build, the library may still report success. It then fails later for another reason, or runs
  another model of the process, the one with the id 0. So a process has only one model and one build, and runs a
  self-test after the build.
- After a failed build, the card's memory stays allocated until the process exits. So `can_rebuild` is false.
- Each attaching process writes the weights from its own file again into the shared memory, and the library does not
  check that the files are equal. The daemon does, by the digests in the HELLO messages.
- If a card does not exist, the library uses card 0 and only logs a warning. So this module checks the card's number.
- The library cannot allow further pids after the build, but libascendcl can (`acl`).
- If the model was not converted for a size, the library rejects the resize, and the model stays intact: this is an
  `InvalidArgument`. But if the model has gears for the batch size, the library checks the batch size of the first input
  only, and reads other inputs beyond their end. So if the shapes of the outputs show that the model has gears, this
  module rejects inputs with different batch sizes.
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
_VISIBLE = "ASCEND_RT_VISIBLE_DEVICES"  # lists the cards that a process may use; the process numbers them from 0
OUT_OF_MEMORY_MARKS = ("Acl open device", "207001", "EI0019")
"""Texts in the library's log that show that the card cannot be used now: it accepts no further process
(model_process.cc:118), it has no free memory (a return code of ACL), or another process uses its port (an error code of
HCCL)."""


class MindSporeLiteAscend(MindSporeLite):
    """Engine that runs a MindIR model on one card. The library's handle for shared weights is a decimal number.

    Raises:
        EngineMissing: the library cannot share weights, or the host has no Ascend driver.
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
        """Build the model. Weights are shared with the processes in `pids`, or taken from `handle`, or else private."""
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
        context.target = ["ascend"]  # the library uses only the first target, so "cpu" must not come first
        context.ascend.device_id = self._card
        self._options.set_ascend(context.ascend)
        return context

    def _ascend_section(self) -> Dict[str, str]:
        """Return the keys and values of the configuration section ascend_context, except the keys for sharing."""
        return {}

    @property
    def gears(self) -> Gears:
        """The gears that the converter has recorded in the model.

        The converter records only gears from its option ge.dynamicDims, and the library reports them since version 2.7.
        """
        info = getattr(self._model, "get_model_info", None)
        if info is None:
            return ()
        return parse_gears(self.signature.inputs, info("dynamic_dims"), info("input_shape"))

    def predict(self, inputs: Arrays) -> Arrays:
        """Run the model. Reject inputs with different batch sizes if the card would check only the first input."""
        batches = {name: len(inputs[name]) for name in self._batch_inputs}
        if len(set(batches.values())) > 1:
            raise InvalidArgument(f"inputs: expected one batch for all, got {batches}: the model has gears for it")
        return super().predict(inputs)

    def update_weights(self, weights: Arrays) -> None:
        """Replace weights of a model that was converted for changing weights (the option variable_weights)."""
        if not self._options.variable_weights:
            raise BuildError("the weights of this model cannot be changed: the option variable_weights is not set")
        if not weights:
            raise BuildError("the file contains no weights")
        tensors: List[Any] = []
        for name, array in weights.items():
            # The library silently ignores arrays that are not contiguous or not in native byte order.
            tensor = self._library.Tensor(np.ascontiguousarray(array, array.dtype.newbyteorder("=")))
            tensor.name = name
            tensors.append(tensor)
        with self._log.translate_errors(BuildError):
            self._model.update_weights([tensors])

    def memory(self) -> Optional[DeviceMemory]:
        """Return the total and free memory of the card as the driver reports it; None if the query fails."""
        try:
            acl = Acl()
            acl.set_device(self._card)
            return acl.memory()
        except AclError as error:
            _log.warning("cannot read the card's memory: %s", error)
            return None

    def _find_batch_inputs(self) -> List[str]:
        """Return the inputs whose batch size must be one of the model's gears; empty if any batch size is accepted.

        The method infers this from the output shapes: the library reports the shapes for the largest gear if the model
        has gears, but -1 for a dimension that may have any size.
        """
        inputs, outputs = self.signature
        free = {each.name: each.shape for each in inputs if each.shape is None or -1 in each.shape}
        any_size = any(each.shape is None or -1 in each.shape for each in outputs)
        if self.gears or any_size or any(shape is None or -1 in shape[1:] for shape in free.values()):
            return []
        return list(free)

    def _failure_hint(self, cause: str) -> str:
        """Return advice for the operator if a build failed because the card cannot share memory; otherwise ""."""
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
    """Return the gears that the converter has recorded in the model.

    The result is () if the texts cannot be parsed or do not match the model's inputs. The card then rejects sizes that
    it does not support.

    Args:
        inputs: the inputs of the model.
        dynamic_dims: the recorded sizes, such as "1,224;8,224".
        input_shape: the recorded shapes with -1 for each free dimension, such as "x:-1,3,-1,224".
    """
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
_GRANULE = 2 * 1024 * 1024  # size of a huge page of the card in bytes; the library rounds shared memory up to it
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
    """Shares weights between processes by the library's handle, which is a decimal number.

    Args:
        library: the module mindspore_lite.
        log: finds the library's errors in the process's log.
        card: the number of the card.

    Raises:
        EngineMissing: the library cannot share weights, or the host has no Ascend driver.
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
        """Return the pid by which the driver identifies this process. In a container it differs from os.getpid()."""
        return self._pid

    def build_section(self, pids: Sequence[str], handle: str) -> Dict[str, str]:
        """Return the keys and values of the configuration section ascend_context that enable sharing in a build.

        Args:
            pids: in a holder, the processes to share the weights with.
            handle: in a worker, the holder's handle.

        Raises:
            BuildError: a pid or the handle is not a valid number. The library might read it as another number.
        """
        section: Dict[str, str] = {}
        if pids:
            section[_PIDS] = ",".join(str(_parse_decimal("pid", each, _MAX_PID)) for each in pids)
        elif handle:
            section[_HANDLE] = str(_parse_decimal("handle", handle, _MAX_HANDLE))
        self._is_sharing = bool(section)
        return section

    def on_built(self, model: Any, path: str) -> None:
        """Store the built model, from which `export` later reads the handle. `path` is the model's file."""
        self._model = model
        self._path = path

    def export(self, store: str) -> SharedWeights:
        """Return the handle with which the build has exported the weights."""
        if not self._is_sharing:
            return SharedWeights("", 0, "weights are not shared: the build order lists no process to share with")
        handle = self._model.get_model_info(_HANDLE)
        if not _DECIMAL.fullmatch(handle) or not 0 < int(handle) <= _MAX_HANDLE:
            raise BuildError(_NOT_EXPORTED.format(handle))
        self._exported_handle = handle
        return SharedWeights(handle, self._shared_bytes(), "")

    def allow(self, pids: Sequence[str]) -> None:
        """Call libascendcl, so that the driver lets further processes attach."""
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
        """Return how much is shared. The build has already attached to the weights."""
        if not self._is_sharing:
            return SharedWeights("", 0, "weights are not shared: the holder has no handle")
        return SharedWeights(handle, self._shared_bytes(), "")

    def trim_store(self, handle: str) -> None:
        """Do nothing: attaching needs no additional resources."""

    def _shared_bytes(self) -> int:
        """Estimate the size of the shared weights in bytes: the size of the model's files, rounded up to huge pages."""
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
    """Parse a decimal number strictly. The library's lenient parser might read an invalid text as another number."""
    if not _DECIMAL.fullmatch(text) or not 0 < int(text) <= max_value:
        raise BuildError(f"{what}: expected a decimal number from 1 to {max_value}, got {text!r}")
    return int(text)
