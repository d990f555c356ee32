"""MindSpore Lite on the CPU.

The library rearranges some weights only in the first predict of a built model, so weights are shared after this predict
(see `Engine`). The first predict also determines how later predicts of the same Model object compute. Measured on
MindSpore Lite 2.0.0:

- An LSTM sizes its buffers in the first predict. If a later predict has a larger shape, it writes past the end of the
  buffers: the answer is wrong without an error, or the process crashes. After a first predict of the largest shape, the
  answers to all smaller shapes have the same bits as in a new process.
- A convolution chooses its kernel in the first predict. A later predict of another height or width uses the same
  kernel, and the last bits of its answer differ from the answer of a new process.
- A new Model object in the same process gives the same bits as a new process.

Therefore this engine builds a new Model object if a dimension of the inputs is larger than in the first predict. If
answers depend on the shape of the first predict, the engine builds a new Model object for each change of shape.
"""

from __future__ import annotations

import contextlib
import fcntl
import logging
import os
import time
from typing import Any, Dict, Generator, List, Optional, Sequence, Tuple

import numpy as np

from weightd_worker.engines.cpu import CpuEngine
from weightd_worker.engines.engine import Arrays, BuildError, BuildSettings, ModelCorrupted, NotRun
from weightd_worker.engines.mindspore_lite.model import MindSporeLite

_log = logging.getLogger("weightd.worker")

# Maximum number of seconds for which a process waits for the build lock: much less than a predict's default time limit.
_LOCK_TIMEOUT_S = 5.0
Shape = Tuple[int, ...]
InputShapes = Tuple[Shape, ...]
"""The shapes of all inputs, in the order in which the model declares them."""

# Maximum growth of the first predict: in a new Model, its inputs have at most this many times the elements of the old
# Model's first predict or of the request, whichever has more. Without this limit, shapes that cover both might be far
# larger than either, and the Model keeps memory for its first shapes.
_MAX_GROWTH = 4


class MindSporeLiteCpu(MindSporeLite, CpuEngine):
    """Engine that runs a MindIR model on the CPU. weightd shares the model's memory pages."""

    is_limited_by_first_shape = True

    def __init__(self, settings: BuildSettings) -> None:
        MindSporeLite.__init__(self, settings)
        CpuEngine.__init__(self, settings)
        self._path = ""
        self._handle = ""
        # The shapes of the first and of the last predict of the built Model; None before the first predict.
        self._first_shapes: Optional[InputShapes] = None
        self._last_shapes: Optional[InputShapes] = None

    @property
    def max_shape(self) -> Optional[Dict[str, Shape]]:
        """The option `max_shape`; None if it is not set."""
        max_shape = self._options.max_shape
        return None if max_shape is None else dict(max_shape)

    def build(self, model: str, *, pids: Sequence[str] = (), handle: str = "") -> None:
        """Build a new Model."""
        self._path, self._handle = model, handle
        self.was_rebuilt_larger = False
        self._start_build(handle)
        self._build_model()

    def predict(self, inputs: Arrays) -> Arrays:
        """Run the model. Build a new Model first if the current Model must not compute these shapes."""
        shapes = self._shapes_of(inputs)
        if shapes == (self._first_shapes if self.should_rebuild_per_shape else self._last_shapes):
            return self._compute(inputs)
        return self._compute_other_shapes(shapes, inputs)

    def _compute_other_shapes(self, shapes: InputShapes, inputs: Arrays) -> Arrays:
        """Run the model on inputs whose shapes differ from the shapes in the last predict.

        Raises:
            NotRun: the shapes are larger than the option `max_shape`.
            ModelCorrupted: the predict failed, or the model could not be built again.
        """
        self._check_max_shape(shapes)
        if self._first_shapes is None:
            self._first_shapes = shapes
        elif shapes != self._first_shapes and (self.should_rebuild_per_shape or not covers(self._first_shapes, shapes)):
            return self._compute_on_new_model(shapes, inputs)
        outputs = self._compute(inputs)
        self._last_shapes = shapes
        return outputs

    def _compute_on_new_model(self, shapes: InputShapes, inputs: Arrays) -> Arrays:
        """Build a new Model, run it on these inputs, and return the outputs.

        If possible, then build and keep a Model whose first shapes also cover the first shapes of the previous Model.
        """
        with _build_lock(self._path):
            target = shapes
            if self._first_shapes is not None and not self.should_rebuild_per_shape:
                target = grow_shapes(self._first_shapes, shapes, [each.shape or () for each in self._signature.inputs])
                self.was_rebuilt_larger = True
            self._rebuild()
            outputs = self._compute(inputs)
            if target != shapes:
                target = self._build_larger(shapes, target, inputs, outputs)
        self._first_shapes, self._last_shapes = target, shapes
        self._on_rebuilt()
        return outputs

    def _on_rebuilt(self) -> None:
        if self._page_sharing is not None:
            self._page_sharing.reattach()

    def _build_larger(self, shapes: InputShapes, target: InputShapes, inputs: Arrays, outputs: Arrays) -> InputShapes:
        """Build a Model whose first predict has the shapes `target`. Return the first shapes of the Model that is kept.

        If this Model does not run on `target`, a Model with the first shapes `shapes` is kept. If the new Model's
        answer to `inputs` differs from `outputs`, the engine builds a new Model at each change of shape from now on.
        """
        self._rebuild()
        try:
            self._compute({name: np.resize(inputs[name], shape) for name, shape in zip(self._names, target)})
        except ModelCorrupted:
            self._rebuild()
            target = shapes
        recomputed = self._compute(inputs)
        if any(recomputed[name].tobytes() != outputs[name].tobytes() for name in outputs):
            _log.warning("answers depend on earlier shapes; rebuilding the model at each change of shape")
            self.should_rebuild_per_shape = True
        return target

    def _compute(self, inputs: Arrays) -> Arrays:
        return MindSporeLite.predict(self, inputs)

    def _shapes_of(self, inputs: Arrays) -> InputShapes:
        # Take the inputs from the signature and not from the Model, because another thread may be building a new Model.
        return tuple([inputs[each.name].shape for each in self._signature.inputs])

    def _check_max_shape(self, shapes: InputShapes) -> None:
        max_shape = self._options.max_shape
        if max_shape is None:
            return
        for name, shape in zip(self._names, shapes):
            if not covers((max_shape.get(name, shape),), (shape,)):
                raise NotRun(
                    f'input "{name}": expected a shape of at most {list(max_shape[name])}, which the key '
                    f"mindspore_lite.max_shape of the model sets, got {list(shape)}"
                )

    def _rebuild(self) -> None:
        # Free the old Model first, so that both Models are never in memory at the same time.
        self.discard_model()
        try:
            self._start_build(self._handle)
            self._build_model()
        except BuildError as error:
            raise ModelCorrupted(f"rebuilding the model for another shape failed: {error}") from None

    def _build_model(self) -> None:
        self._first_shapes = self._last_shapes = None
        self._build(self._path, self._context(), {})

    def discard_model(self) -> None:
        """Free the built model. Its shared pages stay in the file of the page store."""
        self._bind_inputs([])
        del self._model

    def _context(self) -> Any:
        context = self._library.Context()
        context.target = ["cpu"]
        context.cpu.thread_num = self._settings.threads
        self._options.set_cpu(context.cpu)
        return context


@contextlib.contextmanager
def _build_lock(path: str) -> Generator[None, None, None]:
    """Lock the model's file while the block runs, so that only one process at a time builds this model.

    A build temporarily needs several times the memory of the weights.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise ModelCorrupted(f"rebuilding the model for another shape failed: {path}: {error.strerror}") from None
    try:
        _acquire_lock(descriptor)
        yield
    finally:
        os.close(descriptor)


def _acquire_lock(descriptor: int) -> None:
    """Lock the file. If this is impossible for some seconds, return without the lock.

    Without the lock, two processes may build the model at the same time, which only takes more memory.
    """
    # Do not wait forever: the process that holds the lock may be stopped by SIGSTOP, and the file system may not
    # support locks.
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    with contextlib.suppress(OSError):
        while time.monotonic() < deadline:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                time.sleep(0.01)


def covers(first: InputShapes, shapes: InputShapes) -> bool:
    """Return whether no dimension of `shapes` is larger than the same dimension of `first`."""
    return all(
        len(one) == len(other) and all(dim <= bound for dim, bound in zip(one, other))
        for one, other in zip(shapes, first)
    )


def grow_shapes(first: InputShapes, shapes: InputShapes, declared: Sequence[Shape]) -> InputShapes:
    """Return the shapes for the first predict of a new Model. They cover `shapes` and, if possible, also `first`.

    By covering `first`, two clients that alternately send different shapes do not cause a build with each request. The
    number of rows is rounded up to a power of two, so that a client whose requests grow by one row each time causes
    only few builds. If the resulting shapes had more than four times the elements of `first` and of `shapes`, the
    function returns `shapes`.

    Args:
        first: the shapes in the first predict of the Model that is replaced.
        shapes: the shapes of the request that the new Model must compute.
        declared: the shapes in the model's signature; a free dimension is -1.
    """
    rows = {shape[0] for shape, known in zip(shapes, declared) if known[:1] == (-1,)}
    (count,) = rows if len(rows) == 1 else (0,)
    if any(known[:1] == (-1,) and shape[0] >= count for shape, known in zip(first, declared)):
        count = 0
    merged: List[Shape] = []
    for before, shape, known in zip(first, shapes, declared):
        dims = list(map(max, shape, before)) if len(before) == len(shape) else list(shape)
        if known[:1] == (-1,):
            dims[0] = max(dims[0], _power_of_two(count))
        merged.append(tuple(dims))
    max_elements = _MAX_GROWTH * max(_element_count(first), _element_count(shapes))
    return tuple(merged) if _element_count(tuple(merged)) <= max_elements else shapes


def _power_of_two(count: int) -> int:
    return 1 << (count - 1).bit_length() if count > 0 else 0


def _element_count(shapes: InputShapes) -> int:
    total = 0
    for shape in shapes:
        count = 1
        for dim in shape:
            count *= dim
        total += count
    return total
