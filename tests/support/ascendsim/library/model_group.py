"""`ModelGroup` (model.py): models of one process that share memory. It disables sharing between processes."""

from __future__ import annotations

import enum
from typing import Any, List

from ascendsim import faults, glog
from ascendsim.library import check, groups
from ascendsim.library.context import Context
from ascendsim.library.ge import Session
from ascendsim.library.load import open_driver
from ascendsim.library.model import Model, ModelType


class ModelGroupFlag(enum.Enum):
    SHARE_WEIGHT = 1
    SHARE_WORKSPACE = 2
    SHARE_WEIGHT_WORKSPACE = 3


class ModelGroup:
    """A group of files, or with SHARE_WEIGHT of `Model` objects, which only "ge" uses."""

    # The vendor's docstring says SHARE_WEIGHT.
    def __init__(self, flags: ModelGroupFlag = ModelGroupFlag.SHARE_WORKSPACE) -> None:
        if flags not in list(ModelGroupFlag):
            text = "ModelGroupFlag.SHARE_WORKSPACE or ModelGroupFlag.SHARE_WEIGHT"
            raise RuntimeError(f"Parameter flags should be {text} or ModelGroupFlag.kShareWeightAndWorkspace")
        self._flags = flags
        self._paths: List[str] = []
        self._session = Session()

    def add_model(self, models: Any) -> None:
        """Add paths, which has no effect before the calculation; or models, before they are built."""
        if not check.is_sequence(models):
            raise TypeError(f"models must be list/tuple, but got {type(models)}")
        members: List[Any] = list(models)
        if not members:
            raise RuntimeError("models cannot be empty")
        kind = str if isinstance(members[0], str) else Model
        for index, each in enumerate(members):
            if not isinstance(each, kind):
                raise TypeError(f"models element must be all str or Model, but got {type(each)} at index {index}.")
        if kind is str:
            self._paths += members
        elif self._flags is not ModelGroupFlag.SHARE_WEIGHT or not all(each.join(self._session) for each in members):
            raise RuntimeError("ModelGroup's add model failed.")

    def cal_max_size_of_workspace(self, model_type: Any, context: Any) -> None:
        """Build every file once, with the GIL held (model_pybind.cc:334)."""
        check.instance("context", context, Context)
        check.instance("model_type", model_type, ModelType)
        if not self._calculate(model_type, context):
            raise RuntimeError("ModelGroup's cal max size of workspace failed.")

    def _calculate(self, model_type: ModelType, context: Context) -> bool:
        if context.ascend.provider == "ge":
            glog.error("extendrt/cxx_api/model/model_group_impl.cc:90", "CalMaxSizeOfWorkspace", "GE does not need it")
            return False
        if not self._paths:
            return True
        context.use_once()
        driver = open_driver()
        if driver is None or model_type is not ModelType.MINDIR or context.get_first_target() != "ascend":
            return False
        device = context.ascend.device_id if context.ascend.device_id < driver.cards else 0
        with faults.holding_the_gil():
            return groups.calculate(driver, self._paths, self._flags.value, device)
