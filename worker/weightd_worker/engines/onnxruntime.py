"""ONNX Runtime on the CPU, and what an ONNX file says of its model that the library does not pass on."""

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

# How an arena grows: by what is asked of it. By powers of two it never gives back its first piece.
_EXTEND_AS_REQUESTED = 1


class OnnxRuntime(CpuEngine):
    """Runs an ONNX model. The library checks inputs itself and a refused input leaves the session intact."""

    name = "onnxruntime"
    may_corrupt = False  # a session keeps nothing from one run to the next

    def __init__(self, settings: BuildSettings) -> None:
        super().__init__(settings)
        for name in settings.options:
            raise BuildError(f"options.{name}: unknown; onnxruntime has none")
        # From its import on the library has a thread that tells its maker of its use; it would be in the way of a fork.
        os.environ.setdefault("ORT_DISABLE_TELEMETRY", "1")
        try:
            import onnxruntime  # noqa: PLC0415 - only an interpreter that runs this engine has it
            from onnxruntime.capi import onnxruntime_pybind11_state  # noqa: PLC0415
        except ImportError as error:
            raise EngineMissing(f"{error}; install it with: pip install 'weightd[onnxruntime]'") from None
        self._library = onnxruntime
        self._errors = onnxruntime_pybind11_state

    def versions(self) -> Dict[str, str]:
        """Return the library's version."""
        return {"onnxruntime": str(self._library.__version__)}

    def build(self, model: str, *, pids: Sequence[str] = (), handle: str = "") -> None:
        """Build a session whose weights lie in large allocations of their own, so that they can be shared."""
        options = self._library.SessionOptions()
        options.intra_op_num_threads = self._settings.threads
        options.inter_op_num_threads = 1
        # The arena has what predicts need, and its pages differ between processes: weights lie beside it.
        options.add_session_config_entry("session.use_device_allocator_for_initializers", "1")
        options.add_session_config_entry("session.use_env_allocators", "1")
        # One piece for all that a predict needs is no faster, and more; and a plan of it stays for each form of inputs.
        options.enable_mem_pattern = False
        self._start_build(handle)
        try:
            _make_arena()
            self._session = self._library.InferenceSession(model, options, providers=["CPUExecutionProvider"])
        except Exception as error:  # noqa: BLE001 - a dozen types that have only Exception in common
            raise BuildError(f"onnxruntime: {error}") from None
        inputs, outputs = self._session.get_inputs(), self._session.get_outputs()
        has_ambiguous_ranks = not all(each.shape for each in (*inputs, *outputs))
        scalars: AbstractSet[str] = scalar_names(Path(model)) if has_ambiguous_ranks else set()
        self._file = Path(model)
        self._signature = ModelSignature(
            tuple(_tensor_signature(each, scalars) for each in inputs),
            tuple(_tensor_signature(each, scalars) for each in outputs),
        )
        self._output_names: List[str] = [each.name for each in self._signature.outputs]

    def release_cached_memory(self) -> None:
        """Shrink the arena. Only a run does that: this one is told to end before its first operator."""
        run = self._library.RunOptions()
        run.add_run_config_entry("memory.enable_memory_arena_shrinkage", "cpu:0")
        run.terminate = True
        inputs = {each.name: np.zeros(_min_shape(each), NUMPY_DTYPE[each.datatype]) for each in self._signature.inputs}
        # It says that it was ended; and no request has asked for it, whatever it says.
        with contextlib.suppress(Exception):
            self._session.run(self._output_names, inputs, run)

    @property
    def signature(self) -> ModelSignature:
        """What the session says; a symbolic dimension is free. Only the file tells a scalar from an unknown rank."""
        return self._signature

    @property
    def is_stochastic(self) -> bool:
        """What the file says: a session has a generator, which knows no fork."""
        return is_stochastic(self._file)

    def predict(self, inputs: Arrays) -> Arrays:
        """Run the session; its outputs are fresh arrays."""
        try:
            outputs = self._session.run(self._output_names, inputs)
        except self._errors.InvalidArgument as error:
            raise InvalidArgument(f"onnxruntime: {error}") from None
        except (self._errors.Fail, self._errors.RuntimeException) as error:
            # A node failed on these values or shapes. The session keeps no state between runs.
            raise InvalidArgument(f"onnxruntime cannot run the model on these inputs: {error}") from None
        except Exception as error:
            raise ModelCorrupted(f"onnxruntime: {error}") from error
        return dict(zip(self._output_names, outputs))


@functools.lru_cache(maxsize=None)
def _make_arena() -> None:
    """Make the arena of this process's sessions. Unlike one that a session makes, it can shrink to nothing."""
    import onnxruntime as library  # noqa: PLC0415 - only an interpreter that runs this engine has it

    cpu = library.OrtMemoryInfo("Cpu", library.OrtAllocatorType.ORT_ARENA_ALLOCATOR, 0, library.OrtMemType.DEFAULT)
    library.create_and_register_allocator(cpu, library.OrtArenaCfg({"arena_extend_strategy": _EXTEND_AS_REQUESTED}))


def _tensor_signature(node: Any, scalar_names: AbstractSet[str]) -> TensorSignature:
    datatype = _DATATYPE.get(node.type)
    if datatype is None:
        raise BuildError(
            f"{node.name}: {node.type} has no datatype on the wire; expected one of {', '.join(_DATATYPE)}"
        )
    has_known_rank = node.shape or node.name in scalar_names
    return TensorSignature(node.name, datatype, _dims(node.shape) if has_known_rank else None)


def _min_shape(signature: TensorSignature) -> Tuple[int, ...]:
    """A shape that the session takes; of an unknown rank it takes any."""
    return tuple(abs(dim) for dim in signature.shape or ())


def _dims(shape: List[Any]) -> Tuple[int, ...]:
    """A dimension is an int, or the name of a symbolic one, or None."""
    return tuple(dim if isinstance(dim, int) and dim >= 0 else -1 for dim in shape)


# Field numbers of onnx.proto.
_GRAPH, _FUNCTION = 7, 25  # in a model
_GRAPH_NODE, _FUNCTION_NODE = 1, 7
_NODE_INPUT, _OP_TYPE, _ATTRIBUTE = 1, 4, 5  # in a node
_SUBGRAPH, _SUBGRAPHS = 6, 11  # in an attribute
_INPUT, _OUTPUT = 11, 12  # in a graph
_NAME, _TYPE = 1, 2  # in an input or output
_TENSOR = 1  # in its type
_SHAPE = 2  # in that of a tensor

# Beside those whose names begin with Random. A dropout does where its third input says that it is trained.
_RANDOM_OPS = ("Multinomial", "Bernoulli", "Sampling", "SampleOp")
_TRAINING_INPUT_COUNT = 3


def scalar_names(path: Path) -> FrozenSet[str]:
    """Return the names of the inputs and outputs that the file says are scalars.

    Of them the library says [], as of those whose rank the file leaves open. A file that is no ONNX says it of none.
    """
    try:
        with path.open("rb") as file:
            model = 0, os.fstat(file.fileno()).st_size
            return frozenset(_iter_scalar_names(file, model))
    except (OSError, Malformed):
        return frozenset()


def is_stochastic(path: Path) -> bool:
    """Return whether a node of the model draws at random, in a branch that is rarely taken, too. In doubt it does."""
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
    """Whether this node does, or one of the graphs that it runs."""
    # Of several the last one counts for who reads all of the file.
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
            # Its fields are the dimensions.
            if shapes and all(start == end for start, end in shapes):
                for name in _submessages(file, tensor, _NAME):
                    yield _read_text(file, name)


def _submessages(file: BinaryIO, message: Span, *numbers: int) -> Iterator[Span]:
    return (value for number, value in fields(file, *message) if number in numbers and isinstance(value, tuple))
