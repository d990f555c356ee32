"""`Context`: where and how a model runs (context.py). A misspelt attribute is accepted silently."""

from __future__ import annotations

import os
from typing import Any, Dict, List, Sequence

from ascendsim import glog
from ascendsim.library import check

_TARGETS = ("cpu", "gpu", "ascend")
_CPU_PRECISION = ("enforce_fp32", "preferred_fp16")
_ASCEND_PRECISION = ("enforce_fp32", "preferred_fp32", "enforce_fp16", "enforce_origin", "preferred_optimal")


class _Checked:
    """An attribute that rejects values of another type, below `min_value`, or outside a list of choices."""

    def __init__(self, name: str, default: Any, choices: Sequence[str] = (), *, min_value: float = 0) -> None:
        self._name = name
        self._default = default
        self._kind: type = type(default)
        self._choices = choices
        self._min_value = min_value

    def __get__(self, owner: Any, _: Any = None) -> Any:
        return owner.__dict__.get(self._name, self._default)

    def __set__(self, owner: Any, value: Any) -> None:
        check.instance(self._name, value, self._kind)
        if isinstance(value, int) and value < self._min_value:
            raise ValueError(f"{self._name} must be a non-negative int.")
        if self._kind is list:
            check.elements(self._name, value, int)
        if self._choices and value not in self._choices:
            raise ValueError(f"{self._name} must be in [{', '.join(self._choices)}], but got {value}.")
        owner.__dict__[self._name] = value


class _Cpu:
    precision_mode = _Checked("cpu_precision_mode", "enforce_fp32", _CPU_PRECISION)
    thread_num = _Checked("cpu_thread_num", 0)
    inter_op_parallel_num = _Checked("cpu_inter_op_parallel_num", 0)
    thread_affinity_mode = _Checked("cpu_thread_affinity_mode", 0, min_value=float("-inf"))
    thread_affinity_core_list = _Checked("cpu_thread_affinity_core_list", [])


class _Ascend:
    precision_mode = _Checked("ascend_precision_mode", "enforce_fp16", _ASCEND_PRECISION)
    device_id = _Checked("ascend_device_id", 0)
    rank_id = _Checked("ascend_rank_id", 0)
    provider = _Checked("ascend_provider", "")  # any text: "ge" counts, everything else is ACL


class _Parallel:
    workers_num = _Checked("workers_num", 0)
    device_ids = _Checked("device_ids", [])

    def __init__(self) -> None:
        self._config_info: Dict[str, Dict[str, str]] = {}
        self._config_path = ""

    @property
    def config_info(self) -> Dict[str, Dict[str, str]]:
        return self._config_info

    @config_info.setter
    def config_info(self, sections: Dict[str, Dict[str, str]]) -> None:
        check.instance("config_info", sections, dict)
        for section, items in sections.items():
            check.instance("config_info_key", section, str)
            check.instance("config_info_value", items, dict)
            check.elements("config_info_value", [*items, *items.values()], str)
        self._config_info = sections

    @property
    def config_path(self) -> str:
        return self._config_path

    @config_path.setter
    def config_path(self, path: str) -> None:
        check.instance("config_path", path, str)
        if not os.path.exists(path):  # noqa: PTH110 - a str, as in the vendor's code
            raise ValueError("config_path does not exist.")
        self._config_path = path


class _Gpu:
    """GPU settings without the plugin for TensorRT: one rank, and a log line for each access (context.cc:381)."""

    device_id = _Checked("gpu_device_id", 0)

    @property
    def rank_id(self) -> int:
        return _without_plugin("GetGPURankID", 0)

    @property
    def group_size(self) -> int:
        return _without_plugin("GetGPUGroupSize", 1)


def _without_plugin(function: str, value: int) -> int:
    glog.error("extendrt/cxx_api/context.cc:381", function, "Load tensorrt plugin failed.")
    return value


class Context:
    """The targets of a model. An empty list means the CPU; only the first target counts (infer_session.cc:125)."""

    group_info_file = _Checked("group_info_file", "")

    def __init__(self) -> None:
        self.cpu = _Cpu()
        self.ascend = _Ascend()
        self.gpu = _Gpu()
        self.parallel = _Parallel()
        self.target = ["cpu"]
        self._uses = 0

    @property
    def target(self) -> List[str]:
        return self._target

    @target.setter
    def target(self, target: List[str]) -> None:
        target = target or ["cpu"]
        check.elements("target", target, str)
        for each in target:
            if each.lower() not in _TARGETS:
                raise ValueError(f"target elements must be in {list(_TARGETS)}, but got {each.lower()}.")
        self._target = target
        self._first = target[0].lower()  # changing the list later changes nothing

    def use_once(self) -> bool:
        """Use the context for a model of a group; return False if it was used before. Not part of the vendor's API."""
        self._uses += 1
        return self._uses == 1

    def get_first_target(self) -> str:
        """Return the first target at the time of the assignment. Not part of the vendor's API."""
        return self._first
