"""ONNX Runtime on the CPU."""

from __future__ import annotations

import contextlib
import functools
import os
from pathlib import Path
from typing import AbstractSet, Any, Dict, List, Sequence, Tuple

import numpy as np

from weightd_protocol.errors import InvalidArgument
from weightd_protocol.messages.inference import TensorSignature
from weightd_protocol.tensors import NUMPY_DTYPE
from weightd_worker.engines import onnxfile
from weightd_worker.engines.cpu import CpuEngine
from weightd_worker.engines.engine import Arrays, BuildSettings, ModelSignature
from weightd_worker.engines.errors import BuildError, EngineMissing, ModelCorrupted

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
        scalar_names: AbstractSet[str] = onnxfile.scalar_names(Path(model)) if has_ambiguous_ranks else set()
        self._file = Path(model)
        self._signature = ModelSignature(
            tuple(_tensor_signature(each, scalar_names) for each in inputs),
            tuple(_tensor_signature(each, scalar_names) for each in outputs),
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
        return onnxfile.is_stochastic(self._file)

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
