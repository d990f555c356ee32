"""`Context`: where and how to run (context.py). A misspelt attribute is taken without a word."""

from __future__ import annotations

import os
from typing import Any, Dict, List, Sequence

from ascendsim.library import check

_TARGETS = ("cpu", "gpu", "ascend")
_CPU_PRECISION = ("enforce_fp32", "preferred_fp16")
_ASCEND_PRECISION = ("enforce_fp32", "preferred_fp32", "enforce_fp16", "enforce_origin", "preferred_optimal")


class _Checked:
    """An attribute that refuses values of another type, below 0 or out of a list of choices."""

    def __init__(self, name: str, kind: type, default: Any, choices: Sequence[str] = (), *, any_sign: bool = False):
        self._name = name
        self._kind = kind
        self._default = default
        self._choices = choices
        self._any_sign = any_sign

    def __set_name__(self, _: type, name: str) -> None:
        self._key = f"_{name}"

    def __get__(self, owner: Any, _: Any = None) -> Any:
        return owner.__dict__.get(self._key, self._default)

    def __set__(self, owner: Any, value: Any) -> None:
        check.instance(self._name, value, self._kind)
        if self._kind is int and value < 0 and not self._any_sign:
            raise ValueError(f"{self._name} must be a non-negative int.")
        if self._choices and value not in self._choices:
            raise ValueError(f"{self._name} must be in [{', '.join(self._choices)}], but got {value}.")
        owner.__dict__[self._key] = value


class _Constant(_Checked):
    """An attribute that can only be read."""

    def __set__(self, owner: Any, value: Any) -> None:
        raise AttributeError("can't set attribute")


class _Cpu:
    precision_mode = _Checked("cpu_precision_mode", str, "enforce_fp32", _CPU_PRECISION)
    thread_num = _Checked("cpu_thread_num", int, 0)
    inter_op_parallel_num = _Checked("cpu_inter_op_parallel_num", int, 0)
    thread_affinity_mode = _Checked("cpu_thread_affinity_mode", int, 0, any_sign=True)

    def __init__(self) -> None:
        self._cores: List[int] = []

    @property
    def thread_affinity_core_list(self) -> List[int]:
        return self._cores

    @thread_affinity_core_list.setter
    def thread_affinity_core_list(self, cores: List[int]) -> None:
        check.elements("cpu_thread_affinity_core_list", cores, int)
        self._cores = list(cores)


class _Gpu:
    precision_mode = _Checked("gpu_precision_mode", str, "enforce_fp32", _CPU_PRECISION)
    device_id = _Checked("gpu_device_id", int, 0)
    rank_id = _Constant("rank_id", int, 0)
    group_size = _Constant("group_size", int, 0)


class _Ascend:
    precision_mode = _Checked("ascend_precision_mode", str, "enforce_fp16", _ASCEND_PRECISION)
    device_id = _Checked("ascend_device_id", int, 0)
    rank_id = _Checked("ascend_rank_id", int, 0)
    provider = _Checked("ascend_provider", str, "")  # any text: "ge" counts, everything else is ACL


class _Parallel:
    workers_num = _Checked("workers_num", int, 0)

    def __init__(self) -> None:
        self._info: Dict[str, Dict[str, str]] = {}
        self._path = ""
        self._devices: List[int] = []

    @property
    def config_info(self) -> str:
        """As text: what was set does not come back as it was."""
        sections = self._info.items()
        return "\n".join(f"{name}: " + " ".join(f"{k} {v}" for k, v in items.items()) for name, items in sections)

    @config_info.setter
    def config_info(self, info: Dict[str, Dict[str, str]]) -> None:
        check.sections("config_info", info)
        self._info.update(info)

    @property
    def config_path(self) -> str:
        return self._path

    @config_path.setter
    def config_path(self, path: str) -> None:
        check.instance("config_path", path, str)
        if path and not os.path.exists(path):  # noqa: PTH110 - a str, as there
            raise ValueError("Set parallel failed, config_path does not exist!")
        self._path = path

    @property
    def device_ids(self) -> List[int]:
        return self._devices

    @device_ids.setter
    def device_ids(self, devices: List[int]) -> None:
        check.elements("device_ids", devices, int)
        if any(each < 0 for each in devices):
            raise ValueError("Set parallel failed, device_ids contain a negative number.")
        self._devices = list(devices)


class Context:
    """The default target is the CPU, also for an empty list. Only the first target decides (infer_session.cc:125)."""

    def __init__(self) -> None:
        self.cpu = _Cpu()
        self.gpu = _Gpu()
        self.ascend = _Ascend()
        self.parallel = _Parallel()
        self._group_info_file = ""
        self.target = ["cpu"]

    def __str__(self) -> str:
        return f"target: {self.target}."

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

    @property
    def group_info_file(self) -> str:
        return self._group_info_file

    @group_info_file.setter
    def group_info_file(self, file: str) -> None:
        check.instance("group_info_file", file, str)
        self._group_info_file = file

    def get_first_target(self) -> str:
        """The target that counts, as it was when it was set. Not part of the vendor's API."""
        return self._first
