"""Memory that the models of a process share on a card (model_group_impl.cc, acl_mem_manager.cc, model_manager).

Groups are keyed by the text of a path, and never removed; two groups over one path merge their flags.
"""

from __future__ import annotations

import threading
from pathlib import Path
from typing import Dict, List, NamedTuple, Optional, Sequence, Set, Tuple

from ascendsim import driver_state, faults, glog, modelfile
from ascendsim.driver import AclError, Driver
from ascendsim.driver_state import MIB
from ascendsim.modelfile import Floats, ModelFile, ModelFileError

SHARE_WEIGHT, SHARE_WORKSPACE = 1, 2
"""Bits of ModelGroupFlag."""

_MANAGER = "extendrt/kernel/ascend/model/acl_mem_manager.cc"
_GROUP = "extendrt/cxx_api/model/model_group_impl.cc"


class Weights(NamedTuple):
    """Weights that all models of one path have on one card."""

    memory: int
    floats: Floats


_members: Dict[str, int] = {}  # path: flags
_sizes: Dict[int, int] = {}  # card: calculated size of its common workspace
_workspaces: Dict[int, int] = {}  # card: number of the workspace's memory
_weights: Dict[Tuple[int, str], Weights] = {}
_built: Set[int] = set()  # the cards on which a model of a group was ever built
_locks: Dict[int, threading.Lock] = {}


def flags(path: str) -> int:
    """Return the flags of a path, or 0 if it is in no group or its group was never calculated."""
    return _members.get(path, 0)


def work_size(driver: Driver, model: ModelFile) -> int:
    """Return the workspace size that an OM reports: 0 for a model that accepts any input size."""
    is_dynamic = not model.gears and any(-1 in spec.shape for spec in model.inputs)
    return 0 if is_dynamic else model.workspace_bytes or driver.switches.workspace_mib * MIB


def calculate(driver: Driver, paths: Sequence[str], flag: int, device: int) -> bool:
    """Build each model once to get its size. A failure clears every group of the process (ClearModel)."""
    for path in paths:
        if not _measure(driver, path, device):
            glog.error(f"{_GROUP}:111", "CalMaxSizeOfWorkspace", f"Model build failed, path: {path}")
            _members.clear()
            return False
        _members[path] = _members.get(path, 0) | flag
    return True


def _measure(driver: Driver, path: str, device: int) -> bool:
    try:
        driver.set_device(device)
        try:
            faults.begin(driver, "build", "group")
        finally:
            driver.reset_device(device)
        model = modelfile.read(Path(path))
    except (AclError, ModelFileError, faults.Failed, faults.Garbage, faults.Skipped, faults.OtherTable):
        return False
    if model.exported:
        return False
    if model.bundle:
        _refuse_bundle()
        return False
    if device in _built:
        # This check fails for the rest of the process, even after the memory was released.
        glog.error(f"{_MANAGER}:62", "UpdateWorkspace", f"Device {device} has alloc memory!")
        return False
    _sizes[device] = max(_sizes.get(device, 0), work_size(driver, model))
    return True


def take(driver: Driver, path: str, device: int, model: ModelFile, memory: List[int]) -> Optional[Floats]:
    """Take the weights and workspace of a model of a group; add private memory to `memory`. Return None on failure."""
    if model.bundle:
        _refuse_bundle()
        return None
    _built.add(device)
    try:
        weights = _take_weights(driver, path, device, model, memory)
        return weights if _take_workspace(driver, path, device, model, memory) else None
    except AclError as error:
        glog.error(f"{_MANAGER}:150", "GetModelMem", f"Call aclrtMalloc failed, err_code = {error.code}")
        return None


def lock(path: str, device: int, model: ModelFile, driver: Driver) -> Optional[threading.Lock]:
    """Return the lock of models with a common workspace (model_process.cc:1501), or None for other models."""
    if not flags(path) & SHARE_WORKSPACE or not work_size(driver, model):
        return None
    return _locks.setdefault(device, threading.Lock())


def release_memory(driver: Driver, path: str, device: int) -> None:
    """Release workspaces and this path's weights with the last model on any card. Other weights stay (:223)."""
    for memory in _workspaces.values():
        driver.free(memory)
    _workspaces.clear()
    weights = _weights.pop((device, path), None)
    if weights is not None:
        driver.free(weights.memory)


def _take_weights(driver: Driver, path: str, device: int, model: ModelFile, memory: List[int]) -> Floats:
    own = modelfile.as_floats(model.weights, model)
    if not flags(path) & SHARE_WEIGHT:
        memory.append(driver.allocate(device, model.weight_bytes, driver_state.PRIVATE_WEIGHTS))
        return own.copy()
    if (device, path) not in _weights:
        number = driver.allocate(device, model.weight_bytes, driver_state.PRIVATE_WEIGHTS)
        _weights[device, path] = Weights(number, own.copy())
    shared = _weights[device, path].floats
    # Each load writes the current weights of the file, as for weights shared between processes.
    shared[: own.size] = own[: shared.size]
    return shared


def _take_workspace(driver: Driver, path: str, device: int, model: ModelFile, memory: List[int]) -> bool:
    size = work_size(driver, model)
    if not flags(path) & SHARE_WORKSPACE or not size:
        if flags(path) & SHARE_WORKSPACE:
            text = "Dynamic input model not support share workspace"
            glog.warning("extendrt/kernel/ascend/model/model_process.cc:657", "GetModelWorkspace", text)
        own = size or model.workspace_bytes or driver.switches.workspace_mib * MIB
        if own:
            memory.append(driver.allocate(device, own, driver_state.WORKSPACE))
        return True
    if device not in _sizes:
        glog.error(f"{_MANAGER}:97", "GetModelWorkMem", "Get work mem failed!")
        return False
    if device not in _workspaces:
        _workspaces[device] = driver.allocate(device, _sizes[device], driver_state.WORKSPACE)
    return True


def _refuse_bundle() -> None:
    text = "Update weight model don't support mem share!"
    glog.error("extendrt/kernel/ascend/model/model_process.cc:776", "Load", text)
