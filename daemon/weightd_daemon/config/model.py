"""The table [models.NAME]: its keys, their defaults, and the rules for their combinations."""

from __future__ import annotations

import dataclasses
import enum
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from weightd_common.devices import CPU, is_cpu
from weightd_common.toml_schema import MAX_SECONDS, derived, user_path
from weightd_daemon.config import selftest as selftest_config
from weightd_daemon.config import versions as versions_config
from weightd_daemon.config import workers as workers_config
from weightd_daemon.config.batching import BatchingConfig, SplitConfig
from weightd_daemon.config.ranks import RanksConfig
from weightd_daemon.config.selftest import SelfTestSetting
from weightd_daemon.config.versions import TrafficWeights, VersionFiles
from weightd_daemon.config.workers import WorkerRange, WorkersSetting
from weightd_daemon.engines import ENGINES
from weightd_daemon.engines.mindspore_lite import MindSporeLiteOptions
from weightd_daemon.engines.spec import EngineOptions, EngineSpec
from weightd_protocol import limits
from weightd_protocol.schema import boolean, integer, list_of, number, one_of, record, text

_NAME = text(limits.MAX_NAME_BYTES)


@dataclass(frozen=True)
class Membership:
    """Membership of a model in a model group. `digest` differs if the configuration of any model of the group differs.

    Attributes:
        name: the name of the group.
        share: the value of `share` in the group's table.
        models: the names of the group's models, in the order in which the shared process loads them.
        digest: the digest of the configuration of the group and of its models.
    """

    name: str = field(metadata=_NAME)
    share: str = field(metadata=_NAME)
    models: tuple[str, ...] = field(metadata=list_of(_NAME, limits.MAX_MODELS))
    digest: str = field(metadata=_NAME)


class ReplacementPolicy(enum.Enum):
    """How to replace a generation whose lost workers cannot be restarted."""

    AUTO = "auto"  # "overlap" if the device has memory for both generations, otherwise "replace"
    OVERLAP = "overlap"  # load the new generation beside the old one; if memory does not suffice, keep the old workers
    REPLACE = "replace"  # stop the old generation first; requests wait until the new generation is loaded


class LoadMode(enum.Enum):
    """When a model is loaded."""

    START = "start"  # when the daemon starts
    ON_DEMAND = "on_demand"  # when the first request arrives
    MANUAL = "manual"  # when an operator runs `weightctl load`


# Keys for the handling of requests. They affect the load of a model only by its tests of batching and splitting.
_REQUEST_KEYS = ("batching", "split", "default_priority", "idle_unload")

# Keys that determine the files and the interpreter with which a model is loaded.
LOAD_KEYS = ("path", "engine", "python", "devices", "sharing", "selftest", "ranks", *ENGINES)


@dataclass(frozen=True, slots=True)
class ModelConfig:
    """A table [models.NAME]."""

    path: str = field(default="", metadata=user_path(limits.MAX_PATH_BYTES))
    """The model file, .onnx or .mindir. Required unless there are `versions`."""

    engine: str = field(default="", metadata=one_of(["", *ENGINES]))
    """Engine that runs the model. Default: onnxruntime for .onnx, mindspore_lite for .mindir."""

    python: str = field(default="", metadata=user_path(limits.MAX_PATH_BYTES, empty=True))
    """Python interpreter in which the engine is installed: a command or a path. Default: the daemon's interpreter."""

    start: str = field(default="fork", metadata=one_of(["fork", "spawn"]))
    """How processes start on the CPU. "fork": within milliseconds, from a process that has loaded the engine or the
    model. "spawn": with a new interpreter, as always on a card."""

    load: str = field(default=LoadMode.START.value, metadata=one_of([each.value for each in LoadMode]))
    """When the model is loaded. "start": when the daemon starts; it stays loaded. "on_demand": when the first request
    arrives; it may be unloaded when idle, or to make room for another model. "manual": by `weightctl load`."""

    idle_unload: float = field(default=600.0, metadata=number(MAX_SECONDS))
    """Seconds without requests after which a model with `load = "on_demand"` is unloaded. 0: never."""

    versions: VersionFiles = field(default=(), metadata=versions_config.files_metadata())
    """Model files by number of the version, instead of `path`. Each version is served as the model NAME@VERSION, with
    the other keys of this table."""

    traffic: TrafficWeights = field(default=(), metadata=versions_config.traffic_metadata())
    """Share of each version in the requests that name no version, as a weight. Default: the newest version that can
    serve answers all of them."""

    workers: WorkersSetting = field(default=1, metadata=workers_config.field_metadata())
    """Worker processes on each device. With a table such as {min = 1, max = 8, idle = 30.0}, further workers start
    while requests wait, and stop when they were idle for this time; not on cards, with ranks or in a model group."""

    threads: int = field(default=1, metadata=integer(1, 1024))
    """Threads that one predict uses."""

    spares: int | None = field(default=None, metadata=integer(0, 1024))
    """Additional attached workers on each device that serve requests only after another worker has exited. Default: 0
    on the CPU, 1 on Ascend."""

    devices: tuple[str, ...] = field(default=(CPU,), metadata=list_of(text(limits.MAX_NAME_BYTES), limits.MAX_DEVICES))
    """Devices that run the model, each with its own workers: ["cpu"], sets of cores such as ["cpu:0", "cpu:1"] (each
    needs a table [devices."cpu:N"]), or cards such as ["ascend:0", "ascend:1"]."""

    copies: str = field(default="one", metadata=one_of(["one", "each"]))
    """Copies of the weights on sets of cores: "one" for all sets, or one for "each" set, in memory near its cores. Each
    card has its own copy."""

    sharing: str = field(default="", metadata=one_of(["", "on", "auto", "off"]))
    """Whether workers share the weights. "on": yes; the model fails if it cannot share them. "auto": yes, but on a card
    without sharing as "off". "off": each worker loads its own copy. Default: "on"; "off" for a model with ranks or in a
    model group."""

    process_mib: int = field(default=0, metadata=integer(0, 2**30))
    """Memory of a card in MiB that each process needs besides the weights. 0: measured on the first generation."""

    policy: str = field(default="auto", metadata=one_of([each.value for each in ReplacementPolicy]))
    """How to replace a generation whose workers cannot be restarted one by one. "overlap": load the new generation
    beside the old one. "replace": stop the old one first, while requests wait. "auto": overlap if the device has enough
    memory."""

    holder_loss: str = field(default="strict", metadata=one_of(["strict", "frozen"]))
    """On a card, when the holder exits. "strict": the weights count as invalid, and the generation is replaced.
    "frozen": the workers continue with the weights."""

    timeout: float = field(default=30.0, metadata=number(limits.MAX_TIMEOUT_US / 1e6, positive=True))
    """Seconds after which a request without its own timeout fails with DEADLINE_EXCEEDED."""

    required: bool = field(default=False, metadata=boolean())
    """Whether the daemon reports readiness to the service manager only after this model is ready; if the model fails,
    so does the start."""

    load_timeout: float = field(default=600.0, metadata=number(MAX_SECONDS, positive=True))
    """Maximum seconds for one process to start (import the engine and read the model for its digest; at least 60
    seconds), and again to copy or build the model."""

    predict_timeout: float = field(default=60.0, metadata=number(MAX_SECONDS, positive=True))
    """Maximum seconds of one predict, after which the daemon kills and replaces the worker."""

    watchdog: float = field(default=30.0, metadata=number(MAX_SECONDS, positive=True))
    """Maximum seconds without a message from a worker; idle workers are pinged. The model is ready while a worker
    responds. During a longer predict the model counts as not ready."""

    selftest: SelfTestSetting = field(default=selftest_config.AUTO, metadata=selftest_config.field_metadata())
    """Inputs for which each worker must reproduce the holder's outputs before it serves requests. "auto": the daemon
    searches for inputs that the model accepts. A table gives their shapes, such as {x = [1, 3, 48, 320]}; a path names
    an .npz file with an array for each input. "off": wrong outputs stay undetected, and memory that the engine arranges
    in its first predict is not shared."""

    selftest_tolerance: float = field(default=0.0, metadata=number(1.0))
    """Maximum difference between outputs in the self-test, as a fraction of the largest value of that output, for
    models whose last bits vary. 0: outputs must be equal."""

    selftest_interval: float = field(default=0.0, metadata=number(MAX_SECONDS))
    """Interval in seconds at which each worker repeats the self-test; the daemon replaces a worker with wrong outputs.
    0: never."""

    max_queue: int = field(default=1024, metadata=integer(1, 1_000_000))
    """Maximum queued requests; further requests fail with RESOURCE_EXHAUSTED."""

    max_queue_bytes: int = field(default=1024**3, metadata=integer(1, 2**62))
    """Maximum tensor bytes of the queued requests; further requests fail with RESOURCE_EXHAUSTED."""

    priority_levels: int = field(default=1, metadata=integer(1, limits.MAX_PRIORITY))
    """Number of request priorities; 1 is the highest priority."""

    default_priority: int = field(default=0, metadata=integer(0, limits.MAX_PRIORITY))
    """Priority of a request that names none, at most `priority_levels`. 0: the middle level."""

    batching: BatchingConfig = field(default=BatchingConfig(), metadata=record(BatchingConfig))
    """Which requests are combined in one batch."""

    split: SplitConfig = field(default=SplitConfig(), metadata=record(SplitConfig))
    """Which requests are split into parts that run in parallel."""

    mindspore_lite: MindSporeLiteOptions = field(default=MindSporeLiteOptions(), metadata=record(MindSporeLiteOptions))
    """Options for MindSpore Lite."""

    ranks: RanksConfig | None = field(default=None, metadata=record(RanksConfig))
    """The ranks that run this model together, each with one slice of it."""

    cores: tuple[str, ...] = field(
        default=(), metadata=derived(list_of(text(limits.MAX_NAME_BYTES), limits.MAX_DEVICES))
    )
    """The cores of each of the model's devices, if they are sets of cores."""

    group: Membership | None = field(default=None, metadata=derived(record(Membership)))
    """The model group that the model belongs to, if any."""

    revision: int = field(default=0, metadata=derived(integer(0, limits.MAX_COUNT)))
    """When the files of a model in the repository last changed, in nanoseconds since the epoch."""

    @property
    def is_on_cards(self) -> bool:
        """Whether the model runs on cards. Cards and CPU cannot be mixed."""
        return not all(map(is_cpu, self.devices))

    @property
    def is_on_demand(self) -> bool:
        """Whether the first request loads the model."""
        return self.load == LoadMode.ON_DEMAND.value

    @property
    def loads_at_start(self) -> bool:
        """Whether the model is loaded when the daemon starts, and stays loaded."""
        return self.load == LoadMode.START.value

    @property
    def devices_by_weight_copy(self) -> Mapping[str, tuple[str, ...]]:
        """By the device that holds a copy of the weights, the devices whose workers use this copy."""
        if self.is_on_cards or self.copies == "each" or len(self.devices) == 1:
            return {each: (each,) for each in self.devices}
        return {CPU: self.devices}

    @property
    def max_batch_rows(self) -> int:
        """Maximum number of rows in a batch of several requests or parts; 1 if each request runs alone and unsplit."""
        return max(self.batching.max_rows, 2 * self.split.part_rows, 1)

    @property
    def max_concurrency(self) -> int:
        """Maximum number of the model's predicts that can run at the same time."""
        if self.ranks is not None:
            return max(1, len(self.ranks.groups))
        return len(self.devices) * (self.max_workers if self.group is None else 1)

    @property
    def min_workers(self) -> int:
        """The minimum number of workers on each device."""
        return self.workers.min if isinstance(self.workers, WorkerRange) else self.workers

    @property
    def max_workers(self) -> int:
        """The maximum number of workers on each device."""
        return self.workers.max if isinstance(self.workers, WorkerRange) else self.workers

    @property
    def default_level(self) -> int:
        """The priority of a request that does not set one."""
        return self.default_priority or (self.priority_levels + 1) // 2

    def cores_of(self, device: str) -> str:
        """Return the cores of a set of cores or, for "cpu", of all the model's sets; "" means all cores of weightd."""
        cores_by_device = dict(zip(self.devices, self.cores, strict=False))
        return cores_by_device.get(device, ",".join(self.cores))

    @property
    def can_fork(self) -> bool:
        """Whether a fork server forks the model's processes. Ranks and processes on cards are always spawned."""
        return self.start == "fork" and not self.is_on_cards and self.ranks is None

    @property
    def can_fork_from_holder(self) -> bool:
        """Whether the holder may fork workers, which inherit the model that the holder has built."""
        return self.can_fork and self.sharing != "off" and self.threads <= self.engine_spec.template_threads

    def has_same_load(self, other: ModelConfig) -> bool:
        """Return whether `other` differs only in `_REQUEST_KEYS`.

        If so, the loads of both configurations differ at most in their tests of batching and splitting.
        """
        request_settings: Any = {key: getattr(other, key) for key in _REQUEST_KEYS}
        return dataclasses.replace(self, **request_settings) == other

    @property
    def engine_spec(self) -> EngineSpec:
        """The specification of the model's engine."""
        return ENGINES[self.engine]

    @property
    def engine_options(self) -> EngineOptions:
        """The options of the model's engine."""
        return self.options_by_engine.get(self.engine, EngineOptions())

    @property
    def options_by_engine(self) -> Mapping[str, EngineOptions]:
        """The model's options for each engine that has options, by the name of the engine."""
        return {"mindspore_lite": self.mindspore_lite}
