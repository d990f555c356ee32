"""MindSpore Lite on the CPU.

The library rearranges some weights only in the first predict, so weights are shared after it (`Engine`). The first
predict also determines how later predicts of the same Model compute. Measured on 2.0.0:

- An LSTM sizes its buffers in the first predict. A later predict of a larger shape writes past their end: its answer is
  wrong without an error, or the process crashes. After a first predict of the largest shape, every smaller shape has
  the same bits as in a new process.
- A convolution chooses its kernel in the first predict. A later predict of another height or width uses that kernel,
  too, and its answer differs in the last bits from the answer of a new process.
- A new Model in the same process gives the same bits as a new process.

So a Model never computes a shape that its first one does not cover, and a model with a kernel that depends on the first
shape gets a new Model for each shape.
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

# The wait for the lock, in seconds, is much shorter than the default time limit of a predict.
_LOCK_TIMEOUT_S = 5.0
Shape = Tuple[int, ...]
InputShapes = Tuple[Shape, ...]
"""The shapes of all inputs, in the order in which the model declares them."""

# Limit of the growth of the first shape: the joined shape of two requests may be far larger than either, and a Model
# keeps the memory for it.
_MAX_GROWTH = 4


class MindSporeLiteCpu(MindSporeLite, CpuEngine):
    """Runs a MindIR model on the CPU, where weightd shares its pages."""

    is_limited_by_first_shape = True

    def __init__(self, settings: BuildSettings) -> None:
        MindSporeLite.__init__(self, settings)
        CpuEngine.__init__(self, settings)
        self._path = ""
        self._handle = ""
        # The shapes of the first predict of the built Model, and of the last one.
        self._first_shapes: Optional[InputShapes] = None
        self._last_shapes: Optional[InputShapes] = None

    @property
    def max_shape(self) -> Optional[Dict[str, Shape]]:
        """The option `max_shape`, None if it is not set."""
        max_shape = self._options.max_shape
        return None if max_shape is None else dict(max_shape)

    def build(self, model: str, *, pids: Sequence[str] = (), handle: str = "") -> None:
        """Build a new Model."""
        self._path, self._handle = model, handle
        self.was_rebuilt_larger = False
        self._start_build(handle)
        self._build_model()

    def predict(self, inputs: Arrays) -> Arrays:
        """Run the model, on a new Model if the current one must not compute these shapes."""
        shapes = self._shapes_of(inputs)
        if shapes == (self._first_shapes if self.should_rebuild_per_shape else self._last_shapes):
            return self._compute(inputs)
        return self._compute_other_shapes(shapes, inputs)

    def _compute_other_shapes(self, shapes: InputShapes, inputs: Arrays) -> Arrays:
        """Compute shapes that differ from the last predict.

        Raises:
            NotRun: the option `max_shape` does not cover the shapes.
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
        """Compute on a new Model whose first shapes are these; keep one that also covers the first shapes before."""
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
        """Build a Model that computes `target` first; return the first shapes of the Model that is kept.

        If that Model answers this request differently, the engine builds a new Model for each shape from now on.
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
        # Read from the signature, because other threads may call this while a new Model is being built.
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
        # Free the old Model before the new one is built, to save memory.
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
        """Free the built model. Its shared pages stay in the page store, which is a file."""
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
    """Let one process of a model build at a time, because a build needs several times the memory of the weights."""
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
    """Take the lock, or give up after some seconds: a build without the lock costs memory, but changes no answer."""
    # The process that holds the lock may be stopped, and a file system may not support locks.
    deadline = time.monotonic() + _LOCK_TIMEOUT_S
    with contextlib.suppress(OSError):
        while time.monotonic() < deadline:
            try:
                fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
                return
            except BlockingIOError:
                time.sleep(0.01)


def covers(first: InputShapes, shapes: InputShapes) -> bool:
    """Return whether every dimension of `shapes` is at most the same dimension of `first`."""
    return all(
        len(one) == len(other) and all(dim <= bound for dim, bound in zip(one, other))
        for one, other in zip(shapes, first)
    )


def grow_shapes(first: InputShapes, shapes: InputShapes, declared: Sequence[Shape]) -> InputShapes:
    """Return the shapes that a new Model computes first so that it covers `shapes`.

    They also cover `first`, so that clients with different shapes do not cause a build each in turn. The number of rows
    is rounded up to a power of two, so that a client whose requests have one row more each time causes few builds. If
    the result had more than four times the elements of the larger of both, `shapes` is returned.

    Args:
        first: the first shapes of the Model that is replaced.
        shapes: the shapes of a request.
        declared: the shapes that the model declares; a free dimension is -1.
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
