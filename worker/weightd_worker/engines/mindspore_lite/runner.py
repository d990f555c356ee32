"""MindSpore Lite's ModelParallelRunner on the CPU, which runs several predicts at once in one process.

A runner has several workers, which are threads of the library and not processes of weightd. The runner's workers share
the weights, and each runs one predict at a time. A runner has the limits of a Model object (see `cpu`) and further
limits, measured on MindSpore Lite 2.0.0. This module handles them as follows:

- A second build of a runner reports success but does nothing. So each build makes a new runner.
- A runner takes a configuration file as a part of its context, and does not support decryption keys.
- A runner has no resize, but uses the shapes of the input tensors. So each predict gets new tensors. The runner accepts
  a tensor with a wrong number of dimensions, and crashes the process on an empty tensor. So this module checks shapes.
- If the caller passes output tensors and the predict fails, the runner reports no error, and the tensors keep the
  answer to an earlier predict. So this module passes no output tensors. The runner then makes new ones for each
  predict, to which no later predict writes.
- The build changes the CPU affinity of all threads of the process to all cores. So this module restores the affinity
  afterwards, unless an option binds the threads to other cores.
- The first predict runs on all workers of the runner, one after another. This is the predict of the self-test.
- If a predict fails because of its shapes, the runner's worker keeps the shapes of the predict before, and its next
  predict may return the answer for these shapes. So a predict of shapes that this process has not run yet runs alone,
  and after a failure no further predict runs on the runner.
- When a runner is built again, other threads may be receiving requests or freeing outputs. Pages may be replaced only
  when no other thread is active, so the session calls `reshare_weights` later.
- Other failures occur while other predicts run, and the library does not report which of its workers has failed. So a
  predict that ends after a failure, or after an error in the log, raises `MaybeCorrupted`.
"""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Any, Dict, Generator, List, Optional, Sequence, Set, Tuple

from weightd_protocol.errors import InvalidArgument
from weightd_protocol.messages.inference import TensorSignature
from weightd_worker.engines.cpu import set_cpu_affinity
from weightd_worker.engines.engine import Arrays, BuildError, BuildSettings, MaybeCorrupted, ModelCorrupted
from weightd_worker.engines.mindspore_lite.cpu import InputShapes, MindSporeLiteCpu
from weightd_worker.engines.mindspore_lite.model import name_of

# Maximum number of stored shapes that have already run without a failure. Predicts of all other shapes run alone.
_MAX_KNOWN_SHAPES = 1024


class MindSporeLiteRunner(MindSporeLiteCpu):
    """Engine that runs a MindIR model on the CPU with several of the library's workers (option `parallel_workers`).

    Raises:
        EngineMissing: this interpreter does not have the library.
        BuildError: an option is not valid, or a runner does not support the option.
    """

    def __init__(self, settings: BuildSettings) -> None:
        super().__init__(settings)
        self._has_unshared_weights = False
        if self._options.dec_key_file:
            raise BuildError("options.dec_key_file: the library's runner of parallel workers does not support keys")

    @property
    def concurrency(self) -> int:
        """The number of the runner's workers. Any further predict would wait in the library's queue."""
        return self._options.parallel_workers

    def build(self, model: str, *, pids: Sequence[str] = (), handle: str = "") -> None:
        """Build a new runner."""
        self._rw_lock = ReadersWriterLock()
        super().build(model, pids=pids, handle=handle)

    def _build_model(self) -> None:
        context, arguments = self._context(), self._options.build_arguments()
        cores = os.sched_getaffinity(0)
        self._first_shapes = self._last_shapes = None
        self._known_shapes: Set[InputShapes] = set()
        self._is_corrupted = False
        with self._log.translate_errors(BuildError):
            context.parallel.workers_num = self.concurrency
            if arguments:
                context.parallel.config_path = arguments["config_path"]
            # This assignment frees the previous runner as soon as the runner's workers are idle.
            self._model = self._library.ModelParallelRunner()
            self._model.build_from_file(self._path, context)
        if not (self._options.thread_affinity_mode or self._options.thread_affinity_cores):
            set_cpu_affinity(cores)
        self._read_signature()
        self._checked_log_bytes = self._log.size()

    def predict(self, inputs: Arrays) -> Arrays:
        """Run the model: alone if its shapes have not run before, otherwise at the same time as other predicts."""
        shapes, rw_lock = self._shapes_of(inputs), self._rw_lock
        outputs: Optional[Arrays] = None
        if self._are_known_shapes(shapes):
            with rw_lock.shared():
                # Check again, because another thread may have built a new runner meanwhile, for which no shape is
                # known.
                if self._are_known_shapes(shapes):
                    outputs = self._compute(inputs)
        if outputs is None:
            for signature, shape in zip(self._signature.inputs, shapes):
                _check_shape(signature, shape)
            with rw_lock.exclusive():
                outputs = self._compute_other_shapes(shapes, inputs)
                if len(self._known_shapes) < _MAX_KNOWN_SHAPES:
                    self._known_shapes.add(shapes)
        if self._log.size() != self._checked_log_bytes:
            self._check_log()
        if self._is_corrupted:
            raise MaybeCorrupted("another predict failed while this one ran")
        return outputs

    @property
    def has_unshared_weights(self) -> bool:
        """Whether the runner was built again and its pages are not shared yet."""
        return self._has_unshared_weights

    def reshare_weights(self) -> None:
        """Share the pages of the runner that was built again."""
        self._has_unshared_weights = False
        if self._page_sharing is not None:
            self._page_sharing.reattach()

    def _on_rebuilt(self) -> None:
        if self._page_sharing is not None:
            self._page_sharing.end_build()
            self._has_unshared_weights = True

    def _are_known_shapes(self, shapes: InputShapes) -> bool:
        return shapes == self._first_shapes if self.should_rebuild_per_shape else shapes in self._known_shapes

    def _compute(self, inputs: Arrays) -> Arrays:
        return self._run([inputs[name] for name in self._names])

    def _run(self, arrays: List[Any]) -> Arrays:
        if self._is_corrupted:
            raise MaybeCorrupted("another predict failed before this one began")
        try:
            with self._log.translate_errors(ModelCorrupted):
                tensors = [self._make_tensor(of, array) for of, array in zip(self._tensors, arrays)]
                outputs: Dict[str, Any] = {
                    name_of(each): each.get_data_to_numpy() for each in self._model.predict(tensors)
                }
        except BaseException:
            self._is_corrupted = True
            raise
        return outputs

    def _make_tensor(self, template: Any, array: Any) -> Any:
        tensor = self._library.Tensor()
        tensor.name, tensor.dtype, tensor.shape = template.name, template.dtype, list(array.shape)
        tensor.set_data_from_numpy(array)
        return tensor

    def _check_log(self) -> None:
        """If the log has new errors, wait until all running predicts have ended, because one of them may still fail."""
        size = self._log.size()
        if self._log.errors_since(self._checked_log_bytes):
            with self._rw_lock.exclusive():
                pass
        self._checked_log_bytes = size


def _check_shape(signature: TensorSignature, shape: Tuple[int, ...]) -> None:
    dims = signature.shape or ()
    fits = len(shape) == len(dims) and all(known in (-1, size) for known, size in zip(dims, shape))
    if not fits or 0 in shape:
        raise InvalidArgument(f"{signature.name}: expected shape {list(dims)} without a size of 0, got {list(shape)}")


class ReadersWriterLock:
    """Readers-writer lock that prefers writers: while a writer waits for the current readers, new readers wait."""

    def __init__(self) -> None:
        self._entry_lock = threading.Lock()
        self._reader_left = threading.Condition()
        self._reader_count = 0

    @contextlib.contextmanager
    def shared(self) -> Generator[None, None, None]:
        """Hold the lock as a reader during the block."""
        with self._entry_lock, self._reader_left:
            self._reader_count += 1
        try:
            yield
        finally:
            with self._reader_left:
                self._reader_count -= 1
                self._reader_left.notify()

    @contextlib.contextmanager
    def exclusive(self) -> Generator[None, None, None]:
        """Hold the lock as the only writer during the block. The entry lock keeps out all other readers and writers."""
        with self._entry_lock:
            with self._reader_left:
                self._reader_left.wait_for(lambda: not self._reader_count)
            yield
