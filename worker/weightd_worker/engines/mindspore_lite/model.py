"""What MindSpore Lite does alike on every device, with every trap of the library closed.

What the library does not do, measured on 2.0.0, and what this module does about it:

- It binds inputs by position and checks only their size: here they are bound by name, in the model's order.
- It ignores F-order and big-endian arrays without an error: `Arrays` are C order and native by contract.
- Its inputs are not copied: the arrays stay alive and unchanged until the predict has ended.
- Its outputs are views that the next predict overwrites: they are copied out.
- A failed predict spoils the model, and the next answer may be the previous request's: `ModelCorrupted`.
- A failed build spoils the Model object: each build makes a new one.
- Its exceptions have no cause: that is in the native log, from which it is read.
- Of an output that depends on a free dimension it says [-1], of whatever rank: its shape is unknown.
- The dtypes of the file are not those that it takes (int64 becomes int32): they are read from the built model.
"""

from __future__ import annotations

import re
from typing import Any, ClassVar, Dict, List, Tuple, Type

import numpy as np

from weightd_protocol.errors import RequestError
from weightd_protocol.messages.inference import TensorSignature
from weightd_worker.engines.engine import Arrays, BuildSettings, Engine, ModelSignature
from weightd_worker.engines.errors import BuildError, EngineMissing, ModelCorrupted
from weightd_worker.engines.mindspore_lite.options import Options
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

# "[ERROR] ME(1234,7f...,python3.7):2026-01-01-10:00:00.123.456 [lite/src/x.cc:42] Build] the cause"
_GLOG_ERROR = re.compile(r"^\[(?:ERROR|CRITICAL)\][^\[]*\[[^\]]*:\d+\]\s*(?:[^\s\[\]]+\]\s*)?(?P<text>.*)$")


class MindSporeLite(Engine):
    """Runs a MindIR model; a subclass knows the device, and what is shared.

    Raises:
        EngineMissing: this interpreter has not the library.
        BuildError: an option is not one.
    """

    name = "mindspore_lite"
    resize_error_type: ClassVar[Type[RequestError]] = ModelCorrupted
    """What a refused resize is, where nothing has run yet."""

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
        """Build a new Model; `sections` is what the library calls config_dict."""
        arguments: Dict[str, Any] = self._options.build_arguments()
        if sections:
            arguments["config_dict"] = sections
        # This lets go of the one before: two at once would be two copies of the weights.
        self._model = self._library.Model()
        with self._log.translate_errors(BuildError):
            self._model.build_from_file(model, self._library.ModelType.MINDIR, context, **arguments)
        self._read_signature()

    def _read_signature(self) -> None:
        """Bind the inputs of what was built, and keep what it takes and gives."""
        self._bind_inputs(self._model.get_inputs())
        self._signature = ModelSignature(
            tuple(_tensor_signature(each) for each in self._tensors),
            tuple(_without_unknown_shape(_tensor_signature(each)) for each in self._output_tensors()),
        )

    @property
    def signature(self) -> ModelSignature:
        """What the built model takes. The shape of an output that depends on a free dimension is not known."""
        return self._signature

    def predict(self, inputs: Arrays) -> Arrays:
        """Resize where the shape is not that of the last request, run, and copy the outputs out."""
        arrays = [inputs[name] for name in self._names]
        with self._log.translate_errors(ModelCorrupted):
            self._resize([list(array.shape) for array in arrays])
            for tensor, array in zip(self._tensors, arrays):
                tensor.set_data_from_numpy(array)
            outputs = self._model.predict(self._tensors)
            return {name_of(each): np.array(each.get_data_to_numpy()) for each in outputs}

    def release_cached_memory(self) -> None:
        """Do nothing: what the library has for a predict is the model's, for as long as there is one."""

    def _resize(self, shapes: List[List[int]]) -> None:
        if shapes != self._shapes:
            with self._log.translate_errors(self.resize_error_type):
                self._model.resize(self._tensors, shapes)
            # The old tensors keep the old shape.
            self._bind_inputs(self._model.get_inputs())

    def _bind_inputs(self, tensors: List[Any]) -> None:
        self._tensors = tensors
        self._names = [name_of(tensor) for tensor in tensors]
        self._shapes = [list(tensor.shape) for tensor in tensors]

    def _output_tensors(self) -> List[Any]:
        if hasattr(self._model, "get_outputs"):
            return list(self._model.get_outputs())
        # 2.0.0 has it only in the binding beneath.
        return [self._library.Tensor(each) for each in self._model._model.get_outputs()]


def name_of(tensor: Any) -> str:
    """Names may be padded (the vendor's own examples strip them)."""
    return str(tensor.name).rstrip()


def _tensor_signature(tensor: Any) -> TensorSignature:
    # None is what the Python interface says of those that it does not know.
    datatype = _DATATYPE.get(tensor.dtype.name) if tensor.dtype is not None else None
    if datatype is None:
        what = tensor.dtype or "its type, which the library's Python interface cannot tell (as of BF16),"
        raise BuildError(f"{name_of(tensor)}: {what} has no datatype on the wire")
    return TensorSignature(name_of(tensor), datatype, _dims(tensor.shape))


def _without_unknown_shape(output: TensorSignature) -> TensorSignature:
    """The library says [-1] of every output, of whatever rank, whose shape depends on a free dimension."""
    return TensorSignature(output.name, output.datatype, None) if output.shape == (-1,) else output


def _dims(shape: List[int]) -> Tuple[int, ...]:
    return tuple(int(dim) if dim >= 0 else -1 for dim in shape)
