"""Engine for ONNX Runtime on the CPU, and functions that read from an ONNX file what the library does not report."""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path
from typing import AbstractSet, Any, BinaryIO, Dict, FrozenSet, Iterator, List, Sequence, Tuple

import numpy as np

from weightd_common.modelfiles.protobuf import Malformed, Span, fields
from weightd_protocol.datatypes import NUMPY_DTYPE
from weightd_protocol.errors import InvalidArgument
from weightd_protocol.messages.inference import TensorSignature
from weightd_worker import pagesharing
from weightd_worker.engines.cpu import CpuEngine
from weightd_worker.engines.engine import (
    Arrays,
    BuildError,
    BuildSettings,
    EngineMissing,
    ModelCorrupted,
    ModelSignature,
)

_DATATYPE: Dict[str, str] = {
    "tensor(bool)": "BOOL",
    "tensor(uint8)": "UINT8",
    "tensor(uint16)": "UINT16",
    "tensor(uint32)": "UINT32",
    "tensor(uint64)": "UINT64",
    "tensor(int8)": "INT8",
    "tensor(int16)": "INT16",
    "tensor(int32)": "INT32",
    "tensor(int64)": "INT64",
    "tensor(float16)": "FP16",
    "tensor(float)": "FP32",
    "tensor(double)": "FP64",
}

# Value of the arena's setting arena_extend_strategy: the arena grows by the requested size. With the other strategy,
# growth by powers of two, the arena would never free its first region.
_EXTEND_AS_REQUESTED = 1


class OnnxRuntime(CpuEngine):
    """Engine that runs an ONNX model. The library itself checks inputs, and its session stays intact after an error."""

    name = "onnxruntime"
    may_corrupt = False  # a session keeps no data from one predict to the next

    def __init__(self, settings: BuildSettings) -> None:
        super().__init__(settings)
        for name in settings.options:
            raise BuildError(f"options.{name}: unknown; engine onnxruntime has no options")
        # Without this, the import would start a telemetry thread, and a process with several threads cannot be forked.
        os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
        try:
            import onnxruntime  # noqa: PLC0415 - only an interpreter that runs this engine has it
            from onnxruntime.capi import onnxruntime_pybind11_state  # noqa: PLC0415
        except ImportError as error:
            raise EngineMissing(f"{error}; install it from a checkout: pip install './weightd[onnxruntime]'") from None
        self._library = onnxruntime
        self._errors = onnxruntime_pybind11_state

    def versions(self) -> Dict[str, str]:
        """Return the library's version."""
        return {"onnxruntime": str(self._library.__version__)}

    def build(self, model: str, *, pids: Sequence[str] = (), handle: str = "") -> None:
        """Build a session. The weights are in separate large memory blocks, so that their pages can be shared."""
        options = self._library.SessionOptions()
        options.intra_op_num_threads = self._settings.threads
        options.inter_op_num_threads = 1
        # Allocate the weights outside of the arena. Predicts write to the arena, so its pages differ between processes
        # and cannot be shared.
        options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
        options.add_session_config_entry("session.use_env_allocators", "1")
        # With memory patterns, the library would allocate one block for all memory of a predict. That is not faster,
        # takes more memory, and the library would keep a plan for each set of shapes.
        options.enable_mem_pattern = False
        if self.shares_pages:
            self._start_build(handle)
        else:
            pagesharing.keep_blocks_in_heap()
        try:
            _make_arena()
            self._session = self._library.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # noqa: BLE001 - about a dozen types, with only Exception as a common base
            raise BuildError(f"onnxruntime: {error}") from None
        # Run the extension module's session. The methods of the Python class around it take as long as the run of a
        # small model: they look for missing inputs, which the daemon has done, and support devices not used here.
        self._run = getattr(self._session, "_sess", self._session).run
        inputs, outputs = self._session.get_inputs(), self._session.get_outputs()
        has_ambiguous_ranks = not all(each.shape for each in (*inputs, *outputs))
        scalars: AbstractSet[str] = scalar_names(Path(model)) if has_ambiguous_ranks else set()
        self._signature = ModelSignature(
            tuple(_tensor_signature(each, scalars) for each in inputs),
            tuple(_tensor_signature(each, scalars) for each in outputs),
        )
        self._output_names: List[str] = [each.name for each in self._signature.outputs]

    def release_cached_memory(self) -> None:
        """Shrink the arena. The library does this only at the end of a run, so start a run that ends at once."""
        run = self._library.RunOptions()
        run.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        run.terminate = True
        inputs = {each.name: np.zeros(_min_shape(each), NUMPY_DTYPE[each.datatype]) for each in self._signature.inputs}
        # The run always fails, because `terminate` is set. It belongs to no request, so ignore any error.
        with contextlib.suppress(Exception):
            self._session.run(self._output_names, inputs, run)

    @property
    def signature(self) -> ModelSignature:
        """The signature of the session. Dimensions with a symbolic name are free.

        The library reports the same shape for scalars and for tensors of unknown rank. The file shows which of them
        are scalars.
        """
        return self._signature

    def is_stochastic(self, model: str) -> bool:
        """Return whether the model has random operators. A forked process would draw the same random numbers."""
        return is_stochastic(Path(model))

    def predict(self, inputs: Arrays) -> Arrays:
        """Run the model. The outputs are new arrays."""
        try:
            outputs = self._run(self._output_names, inputs, None)
        except self._errors.InvalidArgument as error:
            raise InvalidArgument(f"onnxruntime: {error}") from None
        except (self._errors.Fail, self._errors.RuntimeException) as error:
            # An operator failed on these values or shapes. The session is intact, because it keeps no data between
            # runs.
            raise InvalidArgument(f"onnxruntime cannot run the model on these inputs: {error}") from None
        except Exception as error:
            raise ModelCorrupted(f"onnxruntime: {error}") from error
        return dict(zip(self._output_names, outputs))


@functools.lru_cache(maxsize=None)
def _make_arena() -> None:
    """Make the arena that all sessions of this process use. Unlike a session's own arena, it can shrink to size 0."""
    import onnxruntime as library  # noqa: PLC0415 - only an interpreter that runs this engine has it

    cpu = library.OrtMemoryInfo("Cpu", library.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, library.OrtMemType.DEFAULT)
    library.create_and_register_allocator(cpu, library.OrtArenaCfg({"arena_extend_strategy": _EXTEND_AS_REQUESTED}))


def _tensor_signature(node: Any, scalar_names: AbstractSet[str]) -> TensorSignature:
    datatype = _DATATYPE.get(node.type)
    if datatype is None:
        raise BuildError(
            f"{node.name}: {node.type} is not a supported datatype; expected one of {', '.join(_DATATYPE)}"
        )
    has_known_rank = node.shape or node.name in scalar_names
    return TensorSignature(node.name, datatype, _dims(node.shape) if has_known_rank else None)


def _min_shape(signature: TensorSignature) -> Tuple[int, ...]:
    """Return the smallest shape that the session accepts for an input; () if the input may have any rank."""
    return tuple(abs(dim) for dim in signature.shape or ())


def _dims(shape: List[Any]) -> Tuple[int, ...]:
    """Return the dimensions of a shape, with -1 for each free dimension, for which ONNX Runtime has a name or None."""
    return tuple(dim if isinstance(dim, int) and dim >= 0 else -1 for dim in shape)


# Field numbers of onnx.proto.
_GRAPH, _FUNCTION = 7, 25  # in a model
_GRAPH_NODE, _FUNCTION_NODE = 1, 7
_NODE_INPUT, _OP_TYPE, _ATTRIBUTE = 1, 4, 5  # in a node
_SUBGRAPH, _SUBGRAPHS = 6, 11  # in an attribute
_INPUT, _OUTPUT = 11, 12  # in a graph
_NAME, _TYPE = 1, 2  # field numbers in the message of an input or output
_TENSOR = 1  # field number in the message of an input's or output's type
_SHAPE = 2  # in a tensor type

# Random operators whose names do not begin with "Random". Dropout operators are random as well if they have a third
# input, which enables training.
_RANDOM_OPS = ("Multinomial", "Bernoulli", "Sampling", "SampleOp")
_TRAINING_INPUT_COUNT = 3


def scalar_names(path: Path) -> FrozenSet[str]:
    """Return the names of the inputs and outputs that are scalars according to the file.

    The library reports the shape [] both for scalars and for tensors that may have any rank. The result is empty if the
    file is not an ONNX model.
    """
    try:
        with path.open("rb") as file:
            model = 0, os.fstat(file.fileno()).st_size
            return frozenset(_iter_scalar_names(file, model))
    except (OSError, Malformed):
        return frozenset()


def is_stochastic(path: Path) -> bool:
    """Return whether any node of the model draws random numbers, even in a branch that rarely runs.

    The result is True if the file cannot be parsed.
    """
    try:
        with path.open("rb") as file:
            model = 0, os.fstat(file.fileno()).st_size
            owners = ((_GRAPH, _GRAPH_NODE), (_FUNCTION, _FUNCTION_NODE))
            nodes = (
                node
                for owner, node_of in owners
                for each in _submessages(file, model, owner)
                for node in _submessages(file, each, node_of)
            )
            return any(_is_node_stochastic(file, node) for node in nodes)
    except (OSError, Malformed, RecursionError):
        return True


def _is_node_stochastic(file: BinaryIO, node: Span) -> bool:
    """Return whether a node, or any node in its subgraphs, draws random numbers."""
    # If the field op_type occurs several times, a full parser uses the last value. Here the node counts as random if
    # any of the values is a random operator.
    for kind in [_read_text(file, each) for each in _submessages(file, node, _OP_TYPE)]:
        if kind.startswith("Random") or kind in _RANDOM_OPS:
            return True
        if kind.endswith("Dropout") and len([*_submessages(file, node, _NODE_INPUT)]) >= _TRAINING_INPUT_COUNT:
            return True
    attributes = _submessages(file, node, _ATTRIBUTE)
    graphs = (graph for each in attributes for graph in _submessages(file, each, _SUBGRAPH, _SUBGRAPHS))
    return any(_is_node_stochastic(file, each) for graph in graphs for each in _submessages(file, graph, _GRAPH_NODE))


def _read_text(file: BinaryIO, span: Span) -> str:
    start, end = span
    file.seek(start)
    return file.read(end - start).decode("utf-8", "replace")


def _iter_scalar_names(file: BinaryIO, model: Span) -> Iterator[str]:
    for graph in _submessages(file, model, _GRAPH):
        for tensor in _submessages(file, graph, _INPUT, _OUTPUT):
            shapes = [
                shape
                for each in _submessages(file, tensor, _TYPE)
                for kind in _submessages(file, each, _TENSOR)
                for shape in _submessages(file, kind, _SHAPE)
            ]
            # A shape message has one field for each dimension, so the shape message of a scalar is empty.
            if shapes and all(start == end for start, end in shapes):
                for name in _submessages(file, tensor, _NAME):
                    yield _read_text(file, name)


def _submessages(file: BinaryIO, message: Span, *numbers: int) -> Iterator[Span]:
    return (value for number, value in fields(file, *message) if number in numbers and isinstance(value, tuple))
