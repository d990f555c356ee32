"""Load of a model onto a card (model_process.cc): as the holder of shared weights, as an importer, or privately.

The holder and the importer return `_MASKED`, which is true, where the vendor's code returns RET_ERROR (-1) from a
function of type bool: when allocating, exporting, listing pids, mapping or importing fails. The failure then shows
one step later, without its cause - or not at all, if this process has a model whose id is 0.
"""

from __future__ import annotations

import re
import threading
from typing import Dict, List, NamedTuple, Optional

from ascendsim import driver as drivers
from ascendsim import driver_state, faults, glog, modelfile
from ascendsim.driver import AclError, Driver
from ascendsim.driver_state import GRANULE, MIB
from ascendsim.library import groups
from ascendsim.modelfile import Floats, ModelFile

_INT_MAX = 2**31 - 1
_UINT64 = 2**64
_MASKED = True
_NO_MODEL = 2**32 - 1
_SOURCE_FILE = "extendrt/kernel/ascend/model/model_process.cc"
_PIDS = re.compile(r"(?!,\Z)(\d+(,\s*\d+)*,?)?", re.ASCII)


class Options(NamedTuple):
    """Options of a load: `pids` and `handle` as given, and `path` as the key of its group."""

    device: int
    pids: str = ""
    handle: str = ""
    path: str = ""


class Loaded(NamedTuple):
    """A model that the driver has loaded for this process; `memory` is the number of the shared weights, or 0."""

    model: ModelFile
    weights: Floats
    memory: int


_loaded: Dict[int, Loaded] = {}  # the driver's models of this process, by id
_ids_given: List[int] = []


class ModelProcess:
    """One model on one card. Memory of a failed `load` is only released when the process exits."""

    def __init__(self, driver: Driver, options: Options) -> None:
        self._driver = driver
        self._options = options
        self._handle = to_uint64(options.handle) if options.handle else 0
        self._id = _NO_MODEL
        self._infer_id = 0
        self._memory: List[int] = []
        self.shareable_handle = 0
        self.lock: Optional[threading.Lock] = None
        self.who = self._role()

    @property
    def model(self) -> ModelFile:
        """The loaded model."""
        return _loaded[self._infer_id].model

    def load(self, model: ModelFile) -> bool:
        """Allocate memory and load the model."""
        try:
            self._driver.set_device(self._options.device)
        except AclError as error:
            _error(118, "Init", f"Acl open device {self._options.device} failed. ret = {error.code}")
            return False
        # Groups have priority, then bundles; for both, the sharing keys are ignored silently (:828).
        is_grouped = bool(groups.flags(self._options.path))
        self.who = "private" if is_grouped or model.bundle else self.who
        load = {"holder": self._main, "importer": self._sub, "private": self._plain}[self.who]
        load = self._grouped if is_grouped else load
        if not load(model):
            return False
        faults.suffer(self._driver, "build", self.who, "loaded")
        if self._infer_id not in _loaded:
            _error(142, "PreInitModelResource", "Read model desc failed, ret = 100000")
            _error(868, "Load", "Pre init model resource failed.")
            return False
        return True

    def run(self, inputs: List[Floats]) -> Optional[List[Floats]]:
        """Return the outputs, or None."""
        current = _loaded.get(self._infer_id)
        lost = current is None or not (current.memory == 0 or self._driver.is_valid(current.memory))
        if current is None or (lost and self._driver.switches.after_death == "error"):
            _error(1201, "PredictFromHost", "Execute Model Failed, ret = 507899")
            return None
        return modelfile.compute(current.model, current.weights, inputs)

    def update(self, weights: Dict[str, Floats]) -> bool:
        """Replace the weights of a bundle model."""
        current = _loaded[self._infer_id]
        width = current.model.width
        layers = current.weights.reshape(-1, width, width)
        names = [f"w{i}" for i in range(len(layers))]
        if not weights or any(name not in names or array.size != width * width for name, array in weights.items()):
            return False
        for name, array in weights.items():
            layers[names.index(name)] = array.reshape(width, width)
        return True

    def unload(self) -> None:
        """Release all memory (UnLoad), or none if aclmdlUnload fails."""
        if _loaded.pop(self._id, None) is None:
            glog.error(f"{_SOURCE_FILE}:892", "UnLoad", "Unload model failed, ret = 100000")
            return
        for number in reversed(self._memory):
            self._driver.free(number)
        if not _loaded:
            groups.release_memory(self._driver, self._options.path, self._options.device)
        self._driver.reset_device(self._options.device)

    def _role(self) -> str:
        if self._options.pids:
            return "holder"
        return "importer" if self._handle else "private"

    def _main(self, model: ModelFile) -> bool:
        driver, size = self._driver, _shared_size(model)
        step = (0, "")
        try:
            step = (681, "aclrtMallocPhysical failed! ret:")
            memory = driver.allocate(self._options.device, size, driver_state.WEIGHTS)
            step = (687, "aclrtMemExportToShareableHandle failed! ret:")
            self.shareable_handle = driver.export(memory)
            pids = _pids(self._options.pids)
            if pids is None:
                _error(692, "MainProcess", "ConvertStringToIntVector failed!")
                _error(858, "Load", "Main process failed!")
                return False
            step = (697, "Set pid to shareable_handle failed! ret:")
            driver.set_pids(self.shareable_handle, pids)
            step = (709, "aclrtmapmem failed! ret:")
            weights = driver.map(memory, size, len(model.weights))
        except AclError as error:
            _error(step[0], "MainProcess", f"{step[1]}{error.code}")
            return _MASKED
        self._memory.append(memory)
        return self._load_there(model, memory, weights, "Main")

    def _sub(self, model: ModelFile) -> bool:
        driver, size = self._driver, _shared_size(model)
        try:
            memory = driver.import_(self._handle, self._options.device)
        except AclError as error:
            text = "please Keep the main process running, otherwise the shared memory will become invalid!"
            _error(745, "SubProcess", f"acl rt mem import from shareable handle failed! ret:{error.code} {text}")
            return _MASKED
        try:
            weights = driver.map(memory, size, len(model.weights))
        except AclError:
            _error(753, "SubProcess", f"aclrtmapmem failed! weight size:{size}")
            return _MASKED
        self._memory.append(memory)
        return self._load_there(model, memory, weights, "Sub")

    def _load_there(self, model: ModelFile, memory: int, mapped: object, who: str) -> bool:
        if not self._take_workspace(model):
            _error(860, "Load", f"{who} process failed!")
            return False
        weights = modelfile.as_floats(mapped, model)
        # DavinciModel::InitWeightMem: each load writes the weights of its file, even while other processes use them.
        weights[:] = modelfile.as_floats(model.weights, model)
        self._loaded(model, weights, memory)
        return True

    def _plain(self, model: ModelFile) -> bool:
        try:
            self._memory.append(
                self._driver.allocate(self._options.device, model.weight_bytes, driver_state.PRIVATE_WEIGHTS)
            )
        except AclError as error:
            _error(855, "Load", f"Call aclmdlLoadFromMem failed, ret = {error.code}")
            return False
        if not self._take_workspace(model):
            return False
        self._loaded(model, modelfile.as_floats(model.weights, model).copy(), 0)
        return True

    def _grouped(self, model: ModelFile) -> bool:
        path, device = self._options.path, self._options.device
        weights = groups.take(self._driver, path, device, model, self._memory)
        if weights is None:
            return False
        self.lock = groups.lock(path, device, model, self._driver)
        self._loaded(model, weights, 0)
        return True

    def _take_workspace(self, model: ModelFile) -> bool:
        size = model.workspace_bytes or self._driver.switches.workspace_mib * MIB
        if size:
            try:
                self._memory.append(self._driver.allocate(self._options.device, size, driver_state.WORKSPACE))
            except AclError as error:
                _error(764, "AllocWorkMemory", f"Call aclrtMalloc failed, err_code = {error.code}")
                return False
        return True

    def _loaded(self, model: ModelFile, weights: Floats, memory: int) -> None:
        self._id = self._driver.switches.first_model_id + len(_ids_given)
        self._infer_id = self._id
        _ids_given.append(self._id)
        _loaded[self._id] = Loaded(model, weights, memory)


def open_driver() -> Optional[Driver]:
    """Return the driver, or None on a machine without Ascend."""
    driver = drivers.driver()
    return driver if driver.switches.ascend else None


def to_uint64(text: str) -> int:
    """Parse like std::stoull: leading blanks, a sign that wraps around, and digits; ignore the rest."""
    match = re.match(r"[ \t\n\v\f\r]*([+-]?)([0-9]+)", text)
    if match is None:
        raise ValueError("stoull")
    value = int(match.group(2))
    if value >= _UINT64:
        raise IndexError("stoull")
    return -value % _UINT64 if match.group(1) == "-" else value


def _pids(text: str) -> Optional[List[int]]:
    """Parse like ConvertStringToIntVector; return None for invalid text."""
    if not _PIDS.fullmatch(text):
        return None
    pids = [int(each) for each in text.split(",") if each]
    if any(pid > _INT_MAX for pid in pids):
        raise IndexError("stoi")
    return pids


def _shared_size(model: ModelFile) -> int:
    """Return the size of shared weights; one granule too many if the size is a multiple of a granule."""
    return (model.weight_bytes // GRANULE + 1) * GRANULE


def _error(line: int, function: str, text: str) -> None:
    glog.error(f"{_SOURCE_FILE}:{line}", function, text)
