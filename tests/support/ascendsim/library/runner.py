"""`ModelParallelRunner` (model.py, model_parallel_runner_impl.cc, model_pool.cc): several models behind one queue."""

from __future__ import annotations

import os
import threading
from typing import Any, Dict, List, Optional

from ascendsim import glog
from ascendsim.library import check
from ascendsim.library.context import Context
from ascendsim.library.native import NativeModel, Placement
from ascendsim.library.tensor import Tensor

_POOL = "extendrt/cxx_api/model_pool/model_pool.cc"
_PER_CORE = 5
_MAX_QUEUE = 1000  # model_pool.cc:39


class ModelParallelRunner:
    """A thread-safe pool of models; later predicts do not overwrite its outputs."""

    def __init__(self) -> None:
        self._pool = _Pool()
        self.model_path_ = ""

    def __str__(self) -> str:
        return f"model_path: {self.model_path_}."

    def build_from_file(self, model_path: str, context: Optional[Context] = None) -> None:
        """Build the models. A second call has no effect except on `str`, which names the new file (:28)."""
        check.instance("model_path", model_path, str)
        failed = "ModelParallelRunner's build from file failed"
        if not os.path.exists(model_path):  # noqa: PTH110 - a str, as in the vendor's code
            raise RuntimeError(f"{failed}, model_path does not exist!")
        self.model_path_ = model_path
        context = Context() if context is None else context
        check.instance("context", context, Context)
        if not self._pool.build(model_path, context):
            raise RuntimeError(f"{failed}! Error is Common error code.")

    def get_inputs(self) -> List[Tensor]:
        """Return new tensors; before the build, an empty list."""
        return self._pool.inputs()

    def predict(self, inputs: Any, outputs: Optional[List[Tensor]] = None) -> List[Tensor]:
        """Run a predict. With `outputs`, a failure in the queue is lost: they return unchanged (model_worker.cc:94)."""
        if not check.is_sequence(inputs):
            raise TypeError(f"inputs must be list or tuple, but got {type(inputs)}.")
        check.elements("inputs", list(inputs), Tensor)
        if outputs is not None:
            check.elements("outputs", outputs, Tensor)
        results = self._pool.predict(list(inputs), outputs or [])
        if not results:
            raise RuntimeError("predict failed!")
        return results


class _Pool:
    """The pool of models. The first predicts run at once; further ones are queued until a model is idle."""

    def __init__(self) -> None:
        self._workers: List[NativeModel] = []
        self._lock = threading.Lock()
        self._idle: List[NativeModel] = []
        self._turn = 0
        self._queued = 0
        self._has_predicted = False

    def build(self, path: str, context: Context) -> bool:
        if self._workers:
            return True
        parallel, cores = context.parallel, os.cpu_count() or 1
        count = parallel.workers_num or cores
        if count > _PER_CORE * cores:
            glog.error(f"{_POOL}:200", "CheckConfig", f"workers_num {count} is more than {_PER_CORE} x {cores} cores")
            return False
        workers = [_worker(path, context, index) for index in range(count)]
        if None in workers:
            return False
        self._workers = [each for each in workers if each is not None]
        self._idle = list(self._workers)
        return True

    def inputs(self) -> List[Tensor]:
        return self._workers[0].inputs() if self._workers else []

    def predict(self, inputs: List[Tensor], given: List[Tensor]) -> List[Tensor]:
        if not self._workers:
            return []
        with self._lock:
            if not self._has_predicted:
                # The first predict runs on all models, one after another (:1080).
                self._has_predicted = True
                return [_run(each, inputs, given) for each in self._workers][-1]
            worker = self._idle.pop() if self._idle else None
            if worker is None:
                return self._queue(inputs, given)
        results = _run(worker, inputs, given)
        if results:
            with self._lock:
                self._idle.append(worker)
        # After a failed predict, the model never becomes idle again (:1125).
        return results

    def _queue(self, inputs: List[Tensor], given: List[Tensor]) -> List[Tensor]:
        """Wait for a worker; report a failure as a success with unchanged outputs."""
        if self._queued >= _MAX_QUEUE:
            glog.error(f"{_POOL}:1137", "Predict", "The number of waiting tasks in the queue reaches the limit.")
            return []
        self._turn = (self._turn + 1) % len(self._workers)
        worker = self._workers[self._turn]
        self._queued += 1
        self._lock.release()
        try:
            return _run(worker, inputs, given) or given
        finally:
            self._lock.acquire()
            self._queued -= 1


def _worker(path: str, context: Context, index: int) -> Optional[NativeModel]:
    """Build one model of the pool. Only device and provider of the context are used (CopyContext, :442)."""
    parallel, target = context.parallel, context.get_first_target()
    device = context.ascend.device_id
    if parallel.device_ids:
        device = parallel.device_ids[index % len(parallel.device_ids)]
    model = NativeModel()
    if parallel.config_path:
        model.load_config(parallel.config_path)
    sections: Dict[str, Dict[str, str]] = parallel.config_info
    for name, items in sections.items():
        model.update_config(name, items)
    built = model.build(path, Placement(target, device, context.ascend.provider), is_mindir=True, is_pooled=True)
    return model if built else None


def _run(worker: NativeModel, inputs: List[Tensor], given: List[Tensor]) -> List[Tensor]:
    with worker.turn:
        if not worker.resize(len(inputs), [each.shape for each in inputs]):
            return []
        results = worker.predict(inputs) or []
        if not results:
            return []
        arrays = [each.get_data_to_numpy().copy() for each in results]
    for mine, array in zip(given, arrays):
        mine.get_data_to_numpy()[...] = array
    return given or [Tensor.of(each.name, each.dtype, each.shape, array) for each, array in zip(results, arrays)]
