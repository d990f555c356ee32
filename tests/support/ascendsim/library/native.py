"""Model below the Python API (model_impl.cc), which reports the reasons of failures only in the log."""

from __future__ import annotations

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any, Dict, List, NamedTuple, Optional, Sequence, Tuple, Union

import numpy as np

from ascendsim import faults, glog, modelfile, network
from ascendsim.driver import AclError, Driver
from ascendsim.library import ge
from ascendsim.library import shapes as sizes
from ascendsim.library.ge import Graph
from ascendsim.library.load import ModelProcess, Options, open_driver
from ascendsim.library.tensor import Tensor, data_type, numpy_type
from ascendsim.modelfile import Floats, ModelFile, ModelFileError

_ASCEND = "ascend_context"
_PIDS = "shareable_weight_pid_list"
_HANDLE = "shareable_weight_mem_handle"
_PROVIDER = "provider"
_GE = "ge"
_DECRYPT_MODES = ("AES-GCM", "AES-CBC", "SM4-CBC")
_IMPL = "extendrt/cxx_api/model/model_impl.cc"


class Placement(NamedTuple):
    """Placement of a model, from its Context."""

    target: str
    device: int
    provider: str
    rank: int = 0
    group_info: str = ""
    is_own: bool = True


class _RefusedError(Exception):
    """Error of a predict; the log has its text."""


class _Cpu:
    """A model on the CPU, without sharing. It runs every simulated model."""

    def __init__(self, model: ModelFile) -> None:
        self.model = model
        self._weights = modelfile.as_floats(model.weights, model)

    def run(self, inputs: List[Floats]) -> Optional[List[Floats]]:
        return modelfile.compute(self.model, self._weights, inputs)


class _Card:
    """A model on a card."""

    def __init__(self, driver: Driver, process: ModelProcess) -> None:
        self._driver = driver
        self._process = process
        self.model = process.model
        self.handle = process.shareable_handle
        self.update = process.update
        self.unload = process.unload

    def run(self, inputs: List[Floats]) -> Optional[List[Floats]]:
        if self._process.lock is None:
            return self._run(inputs)
        with self._process.lock:
            return self._run(inputs)

    def _run(self, inputs: List[Floats]) -> Optional[List[Floats]]:
        try:
            faults.begin(self._driver, "predict", self._process.who)
        except (AclError, faults.Failed):
            glog.error("extendrt/kernel/ascend/model/model_process.cc:1201", "PredictFromHost", "Execute Model Failed")
            return None
        except faults.Garbage:
            return [-1 - each for each in self._process.run(inputs) or ()]
        outputs, noise = self._process.run(inputs), self._driver.switches.noise
        if outputs is None or not noise:
            return outputs
        # The seed is unique for each process and predict.
        random = np.random.RandomState([os.getpid(), self._driver.count("noise")])
        return [each * (1 + noise * random.rand(*each.shape)).astype(np.float32) for each in outputs]


class NativeModel:
    """One model. A failed build makes it unusable, and so does a predict that failed because of its shapes."""

    def __init__(self) -> None:
        self._config: Dict[str, Dict[str, str]] = {}
        self._built = False
        self._runner: Union[_Cpu, _Card, Graph, None] = None
        self._handle = ""
        self._path = ""
        self._shapes: List[List[int]] = []
        self._buffers: List[_Buffer] = []
        self._outputs: List[Tensor] = []
        self._poisoned = False
        self._mutex = threading.Lock()
        self.turn = threading.Lock()
        """Held by a thread that sets shapes and then predicts with them."""
        self._session: Optional[ge.Session] = None

    def __del__(self) -> None:
        runner = self._runner
        # The exit of the process releases everything anyway.
        if isinstance(runner, (_Card, Graph)) and not sys.is_finalizing():
            # A forked child has nothing to release, nor has a process whose host has been removed.
            try:
                runner.unload()
            except (AclError, OSError):
                return

    def join(self, session: ge.Session) -> bool:
        """Join a group for the graph engine. After the build this has no effect."""
        if self._session is not None:
            return False
        self._session = session
        return True

    def load_config(self, path: str) -> None:
        """Read a file of sections; other lines are ignored. Sections set from a dict stay."""
        section = ""
        for line in Path(path).read_text(encoding="utf-8", errors="replace").splitlines():
            text = line.strip()
            if text.startswith("[") and text.endswith("]"):
                section = text[1:-1]
            elif section and "=" in text and not text.startswith("#"):
                key, _, value = text.partition("=")
                self.update_config(section, {key.strip(): value.strip()})

    def update_config(self, section: str, items: Dict[str, str]) -> None:
        """Set a section from a dict; unknown names are ignored silently."""
        self._config.setdefault(section, {}).update(items)

    def build(
        self,
        path: str,
        placement: Placement,
        *,
        is_mindir: bool,
        key: bytes = b"",
        mode: str = "",
        is_pooled: bool = False,
    ) -> bool:
        """Build from a file, with a key from an encrypted file. A model of a pool has no path, so no group has it."""
        if key and mode not in _DECRYPT_MODES:
            glog.error("../python/src/model_pybind.cc:146", "PyModelBuild", "Decrypt failed!")
            return False
        if self._built:
            glog.error(f"{_IMPL}:478", "BuildByBufferImpl", "Model has been called Build")
            return False
        self._built = True
        self._path = "" if is_pooled else path
        model = self._read(path, key) if is_mindir else None
        sharing = self._config.get(_ASCEND, {})
        if sharing.get(_PIDS) and sharing.get(_HANDLE):
            text = "You can only set pids or sharable_handle, but not set both of them!"
            glog.error(f"{_IMPL}:417", "UpdateSharingWorkspaceConfig", text)
            return False
        if model is None:
            glog.error(f"{_IMPL}:215", "Build", "Load model failed, please check the file and its type.")
            return False
        try:
            return self._create_session(model, placement, encrypted=bool(key))
        except (ValueError, IndexError) as error:  # as pybind11 names std::invalid_argument and std::out_of_range
            if key:
                raise  # the overload with cryptoInfo has no try
            glog.error("extendrt/cxx_api/model/model.cc:95", "Build", f"Catch exception: {error}")
            return False

    def resize(self, count: int, shapes: List[List[int]]) -> bool:
        """Set the inputs' shapes. Only the next predict checks whether the model supports them."""
        runner = self._runner
        if runner is None or not count == len(shapes) == len(self._shapes):
            glog.error(f"{_IMPL}:603", "Resize", "The inputs size is wrong, or the model has not been called Build.")
            return False
        if any(dim <= 0 for shape in shapes for dim in shape):
            glog.error(f"{_IMPL}:610", "Resize", "New shape of input cannot be dynamic")
            return False
        reason = sizes.refusal(runner.model, shapes) if not isinstance(runner, _Cpu) and shapes != self._shapes else ""
        if reason:
            glog.error("extendrt/kernel/ascend/model/dyn_shape_process.cc:228", "GetRealBatchSize", reason)
            glog.error("extendrt/kernel/ascend/model/model_process.cc:1035", "Resize", "Failed to resize")
            return False
        self._shapes = [list(shape) for shape in shapes]
        return True

    def inputs(self) -> List[Tensor]:
        """Return new tensors without data, in the shapes of the last resize."""
        runner = self._runner
        if runner is None:
            return []
        pairs = zip(runner.model.inputs, self._shapes)
        return [Tensor.of(spec.name, data_type(spec.dtype), shape) for spec, shape in pairs]

    def outputs(self) -> List[Tensor]:
        """Return the outputs of the last predict; before the first, the known shapes (on the CPU none)."""
        runner = self._runner
        if self._outputs or runner is None:
            return self._outputs
        result: List[Tensor] = []
        for spec in runner.model.outputs:
            unknown = -1 in spec.shape and isinstance(runner, _Cpu)
            shape = [-1] if unknown else sizes.reported_shape(runner.model, spec)
            result.append(Tensor.of(spec.name, data_type(spec.dtype), shape))
        return result

    def predict(self, inputs: Sequence[Tensor]) -> Optional[List[Tensor]]:
        """Run the model. The next predict overwrites the outputs."""
        with self._mutex:
            try:
                return self._predict(inputs)
            except _RefusedError as error:
                glog.error(f"{_IMPL}:655", "Predict", str(error))
                return None

    def update_weights(self, weights: List[List[Tensor]]) -> bool:
        """Replace weights of a bundle model, without a lock against concurrent predicts."""
        runner = self._runner
        if not isinstance(runner, _Card):
            glog.error(f"{_IMPL}:700", "UpdateWeights", "update weight only support ascend.")
            return False
        if not weights:
            # The vendor's code reads weights[0] without a check of the size.
            os.kill(os.getpid(), signal.SIGSEGV)
        if len(weights) != 1 or not runner.model.bundle:
            glog.error("extendrt/kernel/ascend/src/custom_ascend_kernel.cc:390", "UpdateWeight", "update weight failed")
            return False
        arrays = {each.name: each.get_data_to_numpy() for each in weights[0]}
        return runner.update({name: np.asarray(array, np.float32).reshape(-1) for name, array in arrays.items()})

    def info(self, key: str) -> str:
        """get_model_info (model.cc:476): return '' for unknown keys."""
        if key == "current_pid":
            driver = open_driver()
            if driver is None:
                text = "dlopen libascend_kernel_plugin.so failed"
                glog.error("extendrt/kernel/ascend/src/acl_env_guard.cc:90", "GetPid", text)
            return "" if driver is None else str(driver.pid)
        if key == _HANDLE:
            return self._handle
        if key in ("input_shape", "dynamic_dims"):
            return "" if self._runner is None else str(getattr(self._runner.model, key))
        if key != "user_info":
            glog.warning("extendrt/cxx_api/model/model.cc:489", "GetModelInfo", f"Invalid model info key: {key}")
        return ""

    def _read(self, path: str, key: bytes) -> Optional[ModelFile]:
        try:
            return modelfile.read(Path(path), key)
        except ModelFileError as error:
            glog.error(f"{_IMPL}:210", "Build", f"Read model file failed: {error}")
            return None

    def _create_session(self, model: ModelFile, placement: Placement, *, encrypted: bool) -> bool:
        if placement.target == "cpu" and model.kind == network.SLICE:
            # Observed with 2.0.0: the CPU rejects a model with an AllReduce.
            glog.error(
                "extendrt/delegate/graph_executor/litert/graph_executor.cc:320",
                "CompileGraph",
                "construct model failed",
            )
            return False
        if placement.target == "cpu":
            self._runner = _Cpu(model)
        elif placement.target == "ascend":
            runner = self._load(model, placement)
            if runner is None:
                return False
            self._runner = runner
            if runner.handle and not encrypted:
                self._handle = str(runner.handle)
        else:
            glog.error("extendrt/infer_session.cc:125", "CreateSession", f"No session for {placement.target}")
            return False
        self._shapes = [list(spec.shape) for spec in self._runner.model.inputs]
        self._buffers = [_Buffer() for _ in self._runner.model.outputs]
        return True

    def _load(self, model: ModelFile, placement: Placement) -> Union[_Card, Graph, None]:
        driver = open_driver()
        if driver is None:
            glog.error("extendrt/infer_session.cc:130", "CreateSession", "Load libascend_kernel_plugin.so failed.")
            return None
        is_ge = self._provider(placement) == _GE
        misfit = self._misfit(model, placement, is_ge=is_ge)
        if misfit is not None:
            glog.error(*misfit)
            return None
        if is_ge:
            options = ge.Options(placement.device, placement.rank, placement.group_info, self._config)
            return ge.build(driver, model, options, self._session)
        process = ModelProcess(driver, self._options(driver, placement)._replace(path=self._path))
        try:
            faults.begin(driver, "build", process.who)
            return _Card(driver, process) if process.load(model) else None
        except (AclError, faults.Failed, faults.Garbage):
            glog.error("extendrt/session/single_op_session.cc:310", "CompileGraph", "Init kernel failed.")
            return None

    def _misfit(self, model: ModelFile, placement: Placement, *, is_ge: bool) -> Optional[Tuple[str, str, str]]:
        """Return the reason for the log why such a model cannot be built here, or None."""
        if model.exported and not self._path:
            return f"{_IMPL}:729", "Build", "not supported on Ascend, due to the func_graph is unoptimized!"
        if model.exported and not is_ge:
            text = "The graph does not have exactly one node of the type Custom."
            return "extendrt/session/single_op_session.cc:280", "CompileGraph", text
        if not placement.is_own and not is_ge:
            return f"{_IMPL}:420", "Build", "The device info of the context belongs to another model of the group."
        return None

    def _provider(self, placement: Placement) -> str:
        """Return the Context's provider, else the configuration's (UpdateProvider, model_impl.cc:436)."""
        return placement.provider or self._config.get(_ASCEND, {}).get(_PROVIDER, "")

    def _options(self, driver: Driver, placement: Placement) -> Options:
        device = placement.device
        if device >= driver.cards:
            text = f"Invalid device id {device}, use 0"
            glog.warning("extendrt/kernel/ascend/src/custom_ascend_kernel.cc:70", "GenAclOptions", text)
            device = 0
        if os.environ.get("ENABLE_MULTI_BACKEND_RUNTIME") == "on":
            return Options(device)
        section = self._config.get(_ASCEND, {})
        return Options(device, section.get(_PIDS, ""), section.get(_HANDLE, ""))

    def _predict(self, inputs: Sequence[Tensor]) -> List[Tensor]:
        runner = self._runner
        if runner is None or len(inputs) != len(self._shapes):
            raise _RefusedError("The inputs size is wrong, or the model has not been called Build.")
        if self._poisoned:
            # Return the answer to the previous request, if there is one.
            if not self._outputs:
                raise _RefusedError("Run graph failed.")
            return self._outputs
        if any(-1 in shape for shape in self._shapes):
            self._poisoned = all(-1 not in each.shape for each in inputs)
            raise _RefusedError("Input shape is dynamic, please resize first.")
        try:
            arrays = self._arrays(inputs, runner.model)
            outputs = runner.run(sizes.as_the_card_reads(runner.model, arrays) if isinstance(runner, _Card) else arrays)
        except ValueError as error:
            self._poisoned = True
            raise _RefusedError(f"Input shapes do not fit: {error}") from None
        if outputs is None:
            raise _RefusedError("Model predict failed.")
        self._outputs = self._copy_out(runner.model, outputs)
        return self._outputs

    def _arrays(self, inputs: Sequence[Tensor], model: ModelFile) -> List[Floats]:
        arrays: List[Floats] = []
        for tensor, shape, spec in zip(inputs, self._shapes, model.inputs):
            if tensor.dtype is not data_type(spec.dtype) or tensor.shape != shape:
                raise ValueError(f"{tensor.name} is {tensor.shape}, not {shape}")
            if len(shape) != len(spec.shape) or shape[1:] != spec.shape[1:]:
                raise ValueError(f"{shape} is not {spec.shape}")
            arrays.append(np.asarray(tensor.get_data_to_numpy(), np.float32))
        return arrays

    def _copy_out(self, model: ModelFile, arrays: List[Floats]) -> List[Tensor]:
        outputs: List[Tensor] = []
        for spec, buffer, array in zip(model.outputs, self._buffers, arrays):
            dtype = data_type(spec.dtype)
            view = buffer.put(array.astype(numpy_type(dtype)))
            outputs.append(Tensor.of(spec.name, dtype, list(array.shape), view))
        return outputs


class _Buffer:
    """Memory of an output, reused until a larger output replaces it."""

    def __init__(self) -> None:
        self._memory: Any = np.zeros(0, np.float32)

    def put(self, array: Any) -> Any:
        """Copy an array in; return the view of it."""
        if array.size > self._memory.size or array.dtype != self._memory.dtype:
            self._memory = np.zeros(array.size, array.dtype)
        view = self._memory[: array.size].reshape(array.shape)
        view[...] = array
        return view
