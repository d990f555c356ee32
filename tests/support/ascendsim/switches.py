"""Switches of the simulator, which tests may change at any time: each process reads them at each operation."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any, Dict, NamedTuple, Tuple

_FILE = "switches.json"


class Fault(NamedTuple):
    """A fault of an operation, made by `Host.fault`.

    Attributes:
        number: id of the fault.
        operation: "build" or "predict".
        action: "fail" (a RuntimeError without a reason), "crash" (SIGSEGV to the process itself), "hang" (never
            returns; Python's signal handlers do not run, as in native code), "slow" (`seconds` longer), in a
            predict "garbage" (a wrong answer; a rank gives the others wrong numbers, too) or, of a rank, "skip" (it
            answers without having taken part), and in the build of a rank "table" (it reads the table of another
            group).
        who: "all", "holder" (builds with a pid list), "importer" (with a handle), "rank" (with a rank table),
            "group" (the builds of a ModelGroup's calculation) or "private" (with none of these).
        skip: number of matching operations that succeed first.
        times: number of operations that fail afterwards; 0 means all.
        seconds: for "slow".
        at: "start"; in a build "loaded", after memory is allocated and weights are written; in a predict of a rank
            "sent", after the rank has sent its numbers and before it receives the others'.
        rank: the process of this rank only; -1: any.
    """

    number: int
    operation: str
    action: str
    who: str
    skip: int
    times: int
    seconds: float
    at: str
    rank: int = -1


@dataclasses.dataclass
class Switches:
    """The variants of a host. The defaults are an Ascend 910B (v2) in a container.

    Attributes:
        ascend: False is a machine without Ascend: builds for it fail, `current_pid` is '' (acl_env_guard.cc:90).
        soc_name: result of aclrtGetSocName.
        capacity_mib: memory of each card.
        context_mib: memory that each process takes on a card for its context.
        workspace_mib: memory of each loaded model in each process, in addition to its weights (aclrtMalloc).
        max_processes: maximum number of processes of one card; docs aclcppdevg_000222: 63 on A2.
        pid_offset: aclrtDeviceGetBareTgid is the pid outside of the container: os.getpid() plus this.
        lifetime: effect of the exit of the exporting process. "counted" (source of v2): importers keep the memory
            until the last one exits. "strict" (the library's own log text): the memory becomes invalid.
        after_death: a predict on invalid memory: "error" or "garbage" (a wrong answer).
        vnpu: the cards are virtual instances, which refuse every import (docs).
        first_model_id: the id that the driver gives to the first model of a process. With 0, a build whose sharing
            failed "succeeds" and runs that model (model_process.cc: infer_id_ is 0 by default).
        exports: False: aclrtMemExportToShareableHandle returns 207000, as a guess at 310P (docs contradict each other).
        libascendcl: False: loading libascendcl.so is an OSError.
        acl_set_pid: aclrtMemSetPidToShareableHandle, by ctypes and in a build: "ok", "unsupported" (returns 207000)
            or, by ctypes only, "missing" (no such symbol).
        hccl_second: duration of a second of HCCL's timeouts: 120 s to connect, 1836 s in a predict.
        libhccl: False: libhccl.so is missing, which the provider "ge" needs even for one card.
        driver_version: decides whether HCCL uses a table's device_port.
        port_linger: seconds for which a card's port stays in use after its process has exited (a guess: the real
            driver was not measured).
        noise: answers of a card differ by up to this share between predicts, as sums of atomic additions do.
        faults: see `Fault`.
    """

    ascend: bool = True
    soc_name: str = "Ascend910B3"
    capacity_mib: int = 32 * 1024
    context_mib: int = 200
    workspace_mib: int = 16
    max_processes: int = 63
    pid_offset: int = 100_000
    lifetime: str = "counted"
    after_death: str = "error"
    vnpu: bool = False
    first_model_id: int = 1
    exports: bool = True
    libascendcl: bool = True
    acl_set_pid: str = "ok"
    hccl_second: float = 0.05
    libhccl: bool = True
    driver_version: str = "25.0.RC1"
    port_linger: float = 0.0
    noise: float = 0.0
    faults: Tuple[Fault, ...] = ()


_CHOICES: Dict[str, Tuple[str, ...]] = {
    "lifetime": ("counted", "strict"),
    "after_death": ("error", "garbage"),
    "acl_set_pid": ("ok", "unsupported", "missing"),
    "operation": ("build", "predict"),
    "action": ("fail", "crash", "hang", "slow", "garbage", "skip", "table"),
    "at": ("start", "loaded", "sent"),
    "who": ("all", "holder", "importer", "rank", "group", "private"),
}


def check(**values: Any) -> None:
    """Raise an error for an invalid value, because a misspelt one would test nothing."""
    for name, value in values.items():
        if name in _CHOICES and value not in _CHOICES[name]:
            raise ValueError(f"{name}: {value!r} is not one of {', '.join(_CHOICES[name])}")


def write(directory: Path, switches: Switches) -> None:
    """Write the switches to the host's directory, where all processes read them."""
    new = directory / f"{_FILE}.{os.getpid()}"
    new.write_text(json.dumps(dataclasses.asdict(switches)), encoding="ascii")
    new.replace(directory / _FILE)


def read(directory: Path) -> Switches:
    """Return the current switches."""
    values = json.loads((directory / _FILE).read_text(encoding="ascii"))
    values["faults"] = tuple(Fault(*row) for row in values["faults"])
    return Switches(**values)
