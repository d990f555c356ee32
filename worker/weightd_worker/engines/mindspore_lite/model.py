"""Base class of MindSpore Lite's engines: loads the library, checks options, reads signatures and runs predicts."""

from __future__ import annotations

import os
import re
import stat
from dataclasses import dataclass, field
from typing import Any, ClassVar, Dict, List, Mapping, Optional, Tuple, Type

import numpy as np

from weightd_common.safe_open import MAX_CONFIG_BYTES, read_regular
from weightd_protocol import limits
from weightd_protocol.errors import RequestError
from weightd_protocol.messages.inference import TensorSignature
from weightd_protocol.schema import FieldError, boolean, decode, integer, list_of, mapping, one_of, text
from weightd_worker.engines.engine import (
    Arrays,
    BuildError,
    BuildSettings,
    Engine,
    EngineMissing,
    ModelCorrupted,
    ModelSignature,
)
from weightd_worker.nativelog import NativeLog

Sections = Dict[str, Dict[str, str]]

_DATATYPE: Dict[str, str] = {
    "BOOL": "BOOL",
    "UINT8": "UINT8",
    "UINT16": "UINT16",
    "UINT32": "UINT32",
    "UINT64": "UINT64",
    "INT8": "INT8",
    "INT16": "INT16",
    "INT32": "INT32",
    "INT64": "INT64",
    "FLOAT16": "FP16",
    "FLOAT32": "FP32",
    "FLOAT64": "FP64",
}

# Matches an error in the library's log, for example:
# [ERROR] ME(1234,7f...,python3.7):2026-01-01-10:00:00.123.456 [lite/src/x.cc:42] Build] the cause
_GLOG_ERROR = re.compile(r"^\[(?:ERROR|CRITICAL)\][^\[]*\[[^\]]*:\d+\]\s*(?:[^\s\[\]]+\]\s*)?(?P<text>.*)$")


class MindSporeLite(Engine):
    """Base class of engines that run a MindIR model. A subclass chooses the device and how weights are shared.

    Raises:
        EngineMissing: this interpreter does not have the library.
        BuildError: an option is not valid.
    """

    name = "mindspore_lite"
    resize_error_type: ClassVar[Type[RequestError]] = ModelCorrupted
    """The error that is raised if the library rejects a resize to the shapes of a request."""

    def __init__(self, settings: BuildSettings) -> None:
        self._settings = settings
        self._options = Options.from_mapping(settings.options)
        try:
            import mindspore_lite  # noqa: PLC0415 - only an interpreter that runs this engine has it
        except ImportError as error:
            raise EngineMissing(f"{error}; install the vendor's wheel of mindspore_lite for this interpreter") from None
        self._library = mindspore_lite
        self._log = NativeLog(_GLOG_ERROR)

    def versions(self) -> Dict[str, str]:
        """Return the library's version."""
        return {"mindspore_lite": str(self._library.__version__)}

    def _build(self, model: str, context: Any, sections: Sections) -> None:
        """Build a new Model object from the file `model`.

        Args:
            model: path of the model file.
            context: the library's Context, with the device and its options.
            sections: the library's argument config_dict: keys and values by configuration section.
        """
        arguments: Dict[str, Any] = self._options.build_arguments()
        if sections:
            arguments["config_dict"] = sections
        # Assigning the new, empty Model frees the previous Model before the build, so that memory never holds both.
        self._model = self._library.Model()
        with self._log.translate_errors(BuildError):
            self._model.build_from_file(model, self._library.ModelType.MINDIR, context, **arguments)
        self._read_signature()

    def _read_signature(self) -> None:
        """Store the input tensors and the signature of the built model."""
        self._bind_inputs(self._model.get_inputs())
        self._signature = ModelSignature(
            tuple(_tensor_signature(each) for each in self._tensors),
            tuple(_without_unknown_shape(_tensor_signature(each)) for each in self._output_tensors()),
        )

    @property
    def signature(self) -> ModelSignature:
        """The signature of the built model. An output that depends on a free dimension has the shape None."""
        return self._signature

    def predict(self, inputs: Arrays) -> Arrays:
        """Resize the model if the shapes differ from the last request, run the model, and copy the outputs."""
        arrays = [inputs[name] for name in self._names]
        with self._log.translate_errors(ModelCorrupted):
            self._resize([list(array.shape) for array in arrays])
            for tensor, array in zip(self._tensors, arrays):
                tensor.set_data_from_numpy(array)
            outputs = self._model.predict(self._tensors)
            return {name_of(each): np.array(each.get_data_to_numpy()) for each in outputs}

    def release_cached_memory(self) -> None:
        """Do nothing: the library frees the memory for predicts only with the model."""

    def _resize(self, shapes: List[List[int]]) -> None:
        if shapes != self._shapes:
            with self._log.translate_errors(self.resize_error_type):
                self._model.resize(self._tensors, shapes)
            # Get the input tensors again, because the tensors from before the resize keep the old shapes.
            self._bind_inputs(self._model.get_inputs())

    def _bind_inputs(self, tensors: List[Any]) -> None:
        self._tensors = tensors
        self._names = [name_of(tensor) for tensor in tensors]
        self._shapes = [list(tensor.shape) for tensor in tensors]

    def _output_tensors(self) -> List[Any]:
        if hasattr(self._model, "get_outputs"):
            return list(self._model.get_outputs())
        # In version 2.0.0, only the C++ binding `_model` has get_outputs.
        return [self._library.Tensor(each) for each in self._model._model.get_outputs()]


def name_of(tensor: Any) -> str:
    """Return the tensor's name without the spaces that the library may append to it."""
    return str(tensor.name).rstrip()


def _tensor_signature(tensor: Any) -> TensorSignature:
    # The library's Python interface reports None for a datatype that it does not support.
    datatype = _DATATYPE.get(tensor.dtype.name) if tensor.dtype is not None else None
    if datatype is None:
        problem = (
            "the datatype is not supported; the library's Python interface does not report it (BF16, for example)"
            if tensor.dtype is None
            else f"{tensor.dtype} is not a supported datatype"
        )
        raise BuildError(f"{name_of(tensor)}: {problem}")
    return TensorSignature(name_of(tensor), datatype, _dims(tensor.shape))


def _without_unknown_shape(output: TensorSignature) -> TensorSignature:
    """Replace the shape [-1], which the library reports for any output that depends on a free dimension, by None."""
    return TensorSignature(output.name, output.datatype, None) if output.shape == (-1,) else output


def _dims(shape: List[int]) -> Tuple[int, ...]:
    return tuple(int(dim) if dim >= 0 else -1 for dim in shape)


_MAX_SHAPE = mapping(list_of(integer(1, limits.MAX_DIM), limits.MAX_RANK), limits.MAX_TENSORS)
_PATH = text(limits.MAX_PATH_BYTES, empty=True)
_PRECISIONS = ("enforce_fp32", "preferred_fp32", "enforce_fp16", "enforce_origin", "preferred_optimal")

# Maximum size of a decryption key in bytes. The longest key of any supported cipher is much shorter.
_MAX_KEY_BYTES = 4096

# Keys of the library that are not allowed in a configuration file, because only the daemon decides which processes
# share weights.
_SHARING_KEYS = ("shareable_weight_pid_list", "shareable_weight_mem_handle")


@dataclass(frozen=True)
class Options:
    """The engine's options.

    The daemon has already checked which options can be combined (`weightd_daemon.engines.mindspore_lite`).
    """

    provider: str = field(default="", metadata=one_of(["", "ge"]))
    precision_mode: str = field(default="", metadata=one_of(["", *_PRECISIONS]))
    thread_affinity_mode: int = field(default=0, metadata=integer(0, 2))
    thread_affinity_cores: Tuple[int, ...] = field(default=(), metadata=list_of(integer(0, 65535), 4096))
    inter_op_parallel: int = field(default=0, metadata=integer(0, 1024))
    parallel_workers: int = field(default=1, metadata=integer(1, limits.MAX_CONCURRENCY))
    max_shape: Optional[Mapping[str, Tuple[int, ...]]] = field(default=None, metadata=_MAX_SHAPE)
    config_file: str = field(default="", metadata=_PATH)
    dec_key_file: str = field(default="", metadata=_PATH)
    dec_mode: str = field(default="AES-GCM", metadata=one_of(["AES-GCM", "AES-CBC", "SM4-CBC"]))
    variable_weights: bool = field(default=False, metadata=boolean())

    @classmethod
    def from_mapping(cls, options: Mapping[str, Any]) -> Options:
        """Return an Options object with the keys and values in `options`.

        Raises:
            BuildError: a key or value is not valid. The text names the key.
        """
        try:
            return decode(cls, dict(options))
        except FieldError as error:
            raise BuildError(str(error.at(".options"))) from None

    def set_cpu(self, cpu: Any) -> None:
        """Set the thread options in a CPU context of the library."""
        # 0 means that the option is not configured. Then keep the library's default, which is not always 0.
        if self.thread_affinity_mode:
            cpu.thread_affinity_mode = self.thread_affinity_mode
        if self.thread_affinity_cores:
            cpu.thread_affinity_core_list = list(self.thread_affinity_cores)
        if self.inter_op_parallel:
            cpu.inter_op_parallel_num = self.inter_op_parallel

    def set_ascend(self, ascend: Any) -> None:
        """Set the Ascend options in an Ascend context of the library."""
        if self.precision_mode:
            ascend.precision_mode = self.precision_mode
        if self.provider:
            ascend.provider = self.provider

    def build_arguments(self) -> Dict[str, Any]:
        """Return arguments of the library's `build_from_file` for the options that are set.

        Arguments for other options are left out, because version 2.0 does not accept all of them.

        Raises:
            BuildError: a configuration or key file cannot be used.
        """
        arguments: Dict[str, Any] = {}
        if self.config_file:
            _check_config(self.config_file)
            arguments["config_path"] = self.config_file
        if self.dec_key_file:
            arguments.update(dec_key=_read_key(self.dec_key_file), dec_mode=self.dec_mode)
        return arguments


def _check_config(path: str) -> None:
    """Reject a configuration file that contains one of `_SHARING_KEYS`.

    With such a key, the library's build would fail, or would share weights with other processes.
    """
    try:
        lines = read_regular(path, MAX_CONFIG_BYTES).decode("utf-8", "replace").splitlines()
    except (OSError, ValueError) as error:
        raise BuildError(f"options.config_file: {path}: {_describe_error(error)}") from None
    for line in lines:
        key = line.partition("=")[0].strip()
        if key in _SHARING_KEYS:
            raise BuildError(f"options.config_file: {path}: {key} is set by weightd; remove it from the file")


def _read_key(path: str) -> bytes:
    """Return the content of a file as decryption key, after checking the file's type, owner and mode."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        with os.fdopen(descriptor, "rb") as file:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise BuildError(f"options.dec_key_file: {path}: expected a regular file")
            if stat.S_IMODE(status.st_mode) not in (0o600, 0o400):
                mode = stat.S_IMODE(status.st_mode)
                raise BuildError(f"options.dec_key_file: {path}: expected mode 0600 or 0400, got {mode:04o}")
            if status.st_uid not in (0, os.geteuid()):
                raise BuildError(f"options.dec_key_file: {path}: expected a file of this user or root")
            key = file.read(_MAX_KEY_BYTES + 1)
    except (OSError, ValueError) as error:
        raise BuildError(f"options.dec_key_file: {path}: {_describe_error(error)}") from None
    if not 0 < len(key) <= _MAX_KEY_BYTES:
        raise BuildError(f"options.dec_key_file: {path}: expected a key of 1 to {_MAX_KEY_BYTES} bytes")
    return key


def _describe_error(error: Exception) -> str:
    return str(error.strerror) if isinstance(error, OSError) else "the path contains a NUL"
