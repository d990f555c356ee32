"""Rank engine of MindSpore, on the CPU or on an Ascend card.

Observed behaviour of MindSpore 2.7.1 on the CPU, and how this module handles it:

- The ranks of a group find each other through an additional process, MindSpore's scheduler, which is weightd's broker
  (`serve_broker`). The library reads its settings from environment variables, which must be set before the import.
- `init` returns when all ranks have joined the group. Only `init` and predicts wait for other processes.
- By default the library compiles the model for each new shape, which takes a third of a second and memory that is never
  freed. So this module sets the shape in the file, with its free dimensions, before the first predict. The library then
  compiles the model only once, and the answers are the same, bit for bit.
- Before the library sends data to other ranks, it checks inputs against this shape. But it does not check whether free
  dimensions fit each other, for example in two inputs that are added. Such inputs fail in the middle of a
  predict, and all ranks are lost. So if the model has several free dimensions, this module first compiles the model for
  each new combination of shapes, which sends no data, and rejects the inputs if the compilation fails.
- Collective operators fail with empty tensors, and all ranks are lost. So this module rejects empty inputs.
- After a failed predict, all later predicts fail, and the data that was already sent corrupts an answer of the other
  ranks. So a rank exits after a failed predict.
- If two threads run predicts, both hang forever. So one thread makes all calls.
- The library keeps no names of inputs and outputs. So this module reads the signature from the file.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import types
from typing import Any, Dict, Generator, Iterator, List, Mapping, Optional, Sequence, Set, Tuple, cast

from weightd_common.devices import card_of, is_cpu
from weightd_common.modelfiles import mindir
from weightd_common.modelfiles.protobuf import Malformed
from weightd_protocol.datatypes import ITEM_BYTES
from weightd_protocol.messages.inference import TensorSignature
from weightd_protocol.messages.worker_common import DeviceMemory
from weightd_worker.engines.engine import Arrays, BuildError, EngineMissing, ModelCorrupted, ModelSignature
from weightd_worker.engines.ranks import RankEngine, RankRejected, RankRendezvous

# Maximum number of stored combinations of input shapes that are known to be compatible. If there are more, all stored
# combinations are dropped. Each combination is then compiled again when it next occurs.
_MAX_SHAPES = 4096


class MindSporeRank(RankEngine):
    """Rank engine for a MindIR file that MindSpore has exported. A process can have only one such engine."""

    name = "mindspore"
    needs_broker = True

    def __init__(self, rendezvous: RankRendezvous) -> None:
        super().__init__(rendezvous)
        self._library = _import_mindspore("MS_WORKER", rendezvous)
        card = card_of(rendezvous.device)
        if card is None and not is_cpu(rendezvous.device):
            raise BuildError(f"device: expected cpu, cpu:N or ascend:N, got {rendezvous.device!r}")
        context: Dict[str, Any] = {"mode": self._library.GRAPH_MODE}
        if card is None:
            context.update(device_target="CPU", runtime_num_threads=rendezvous.threads)
        else:
            context.update(device_target="Ascend", device_id=card)
        with _as_build_error("the context"):
            self._library.set_context(**context)

    @classmethod
    def load_broker(cls, rendezvous: RankRendezvous) -> None:
        """Import the library for MindSpore's scheduler, which needs the same modules as a rank."""
        _import_mindspore("MS_SCHED", rendezvous)

    @classmethod
    def serve_broker(cls, rendezvous: RankRendezvous) -> None:
        """Run MindSpore's scheduler. The library runs it within the call of `init`."""
        library = _import_mindspore("MS_SCHED", rendezvous)
        with _as_build_error("the scheduler"):
            library.set_context(mode=library.GRAPH_MODE, device_target="CPU")
            # The library ends the scheduler by raising SystemExit.
            with contextlib.suppress(SystemExit):
                library.communication.init()

    def versions(self) -> Mapping[str, str]:
        """Return the library's version."""
        return {"mindspore": str(self._library.__version__)}

    def join_group(self) -> None:
        """Join the rank group, and return when all ranks have joined."""
        with _as_build_error("the group"):
            self._library.communication.init()

    def load(self, path: str, options: Mapping[str, Any] = types.MappingProxyType({})) -> ModelSignature:
        """Load the slice. If its file declares free dimensions, set the input shapes that the file declares."""
        for name in options:
            raise BuildError(f"options.{name}: unknown; engine mindspore has no options")
        self._path = path
        self._signature = read_signature(path)
        self._free_dim_count = sum(
            ((-1, -1) if each.shape is None else each.shape).count(-1) for each in self._signature.inputs
        )
        self._compatible_shapes: Set[Tuple[Tuple[int, ...], ...]] = set()
        with _as_build_error(path):
            self._cell = self._library.nn.GraphCell(self._library.load(path))
            if self._free_dim_count:
                self._cell.set_inputs(*(self._dynamic_tensor(each) for each in self._signature.inputs))
        return self._signature

    def predict(self, inputs: Arrays) -> Arrays:
        """Run the slice together with the other ranks. The outputs are new arrays."""
        for each in self._signature.inputs:
            if inputs[each.name].size == 0:
                raise RankRejected(f"input {each.name}: has no elements, which a group of ranks does not support")
        tensors = [self._library.Tensor.from_numpy(inputs[each.name]) for each in self._signature.inputs]
        if self._free_dim_count > 1:
            self._check_compatible(tensors)
        try:
            results = [each.asnumpy() for each in _flatten(self._cell(*tensors))]
        except Exception as error:
            raise ModelCorrupted(f"mindspore: {_first_lines(error)}") from error
        return {each.name: result for each, result in zip(self._signature.outputs, results)}

    def leave_group(self) -> None:
        """Run the interpreter's exit functions: the library has registered one that leaves the group.

        The scheduler exits when the last rank has left. It treats a rank that exits without leaving as lost after
        `exec_timeout_s`.
        """
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]

    def memory(self) -> Optional[DeviceMemory]:
        """Return None: the library reports only the memory that it has allocated itself, not the card's memory."""
        return None

    def _check_compatible(self, tensors: Sequence[Any]) -> None:
        """Compile the model once for the shapes of these tensors, and drop the compiled model.

        Raises:
            RankRejected: the compilation fails, because the shapes do not fit each other.
        """
        shapes = tuple(tuple(each.shape) for each in tensors)
        if shapes in self._compatible_shapes:
            return
        try:
            self._library.nn.GraphCell(self._library.load(self._path)).compile(*tensors)
        except Exception as error:  # noqa: BLE001 - RuntimeError, ValueError, TypeError and others
            raise RankRejected(f"mindspore: {_first_lines(error)}") from None
        if len(self._compatible_shapes) == _MAX_SHAPES:
            self._compatible_shapes.clear()
        self._compatible_shapes.add(shapes)

    def _dynamic_tensor(self, each: TensorSignature) -> Any:
        datatype = getattr(self._library, _LIBRARY_DTYPE[each.datatype])
        shape = None if each.shape is None else [None if dim < 0 else dim for dim in each.shape]
        return self._library.Tensor(shape=shape, dtype=datatype)


def read_signature(path: str) -> ModelSignature:
    """Return the model's signature, as stored in a MindIR file.

    Raises:
        BuildError: the file was not exported by MindSpore, or weightd's protocol cannot carry the inputs or outputs.
    """
    try:
        with open(path, "rb") as file:  # noqa: PTH123 - the path is a string, and part of error messages
            found = mindir.read(file)
    except Malformed:
        raise BuildError(f"{path}: expected a complete MindIR file") from None
    except OSError as error:
        raise BuildError(f"{path}: {error.strerror}") from None
    if not found.is_mindspore_export:
        raise BuildError(f"{path}: expected a MindIR exported by MindSpore, got one of the Converter")
    return ModelSignature(
        tuple(_to_signatures(path, "input", found.inputs)), tuple(_to_signatures(path, "output", found.outputs))
    )


def _to_signatures(path: str, what: str, tensors: Sequence[mindir.MindIrTensor]) -> List[TensorSignature]:
    for problem in mindir.find_problems(what, tensors):
        raise BuildError(f"{path}: {problem}")
    return [TensorSignature(*each) for each in tensors]


_LIBRARY_DTYPE = {
    "BOOL": "bool_",
    "FP16": "float16",
    "FP32": "float32",
    "FP64": "float64",
    **{name: name.lower() for name in ITEM_BYTES if "INT" in name},
}


def _import_mindspore(role: str, rendezvous: RankRendezvous) -> Any:
    """Set the environment variables for a role ("MS_WORKER" or "MS_SCHED"), and import the library.

    The variables stay set, because the library may read them at any time.
    """
    os.environ.update(
        MS_ROLE=role,
        MS_WORKER_NUM=str(rendezvous.rank_count),
        MS_SCHED_HOST=rendezvous.host,
        MS_SCHED_PORT=str(rendezvous.port),
        MS_NODE_TIMEOUT=str(rendezvous.exec_timeout_s),
        MS_TOPO_TIMEOUT=str(rendezvous.connect_timeout_s),
    )
    if role == "MS_WORKER":
        os.environ["MS_NODE_ID"] = str(rendezvous.rank)
    # Log only errors. At each start, the library would log a dozen less severe messages, which do not help an operator.
    os.environ.setdefault("GLOG_v", "3")
    try:
        import mindspore  # noqa: PLC0415 - only an interpreter that runs this engine has it
    except ImportError as error:
        raise EngineMissing(f"{error}; install it from a checkout: pip install './weightd[mindspore]'") from None
    return mindspore


@contextlib.contextmanager
def _as_build_error(subject: str) -> Generator[None, None, None]:
    """Convert any exception in the block to a BuildError whose text names `subject`."""
    try:
        yield
    except Exception as error:  # noqa: BLE001 - RuntimeError, ValueError, TypeError and others
        raise BuildError(f"mindspore: {subject}: {_first_lines(error)}") from None


def _first_lines(error: Exception) -> str:
    """Return the text of a library's exception without the C++ stack trace in it."""
    return str(error).partition("\n\n---")[0].strip()


def _flatten(results: Any) -> Iterator[Any]:
    if isinstance(results, (tuple, list)):
        for each in cast("Sequence[Any]", results):
            yield from _flatten(each)
    else:
        yield results
