"""A table [models.NAME]: its keys, and which of them go together."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from weightd.daemon.config import canary as canary_config
from weightd.daemon.config.canary import CanaryKey
from weightd.daemon.config.names import of_name
from weightd.daemon.config.policies import Policy
from weightd.daemon.config.tables import MAX_SECONDS, Problems
from weightd.daemon.engines import ENGINES, ascend, engine_for
from weightd.daemon.engines.mindspore_lite import MindSporeLiteOptions
from weightd.daemon.engines.spec import EngineOptions, EngineSpec
from weightd.daemon.host.paths import user_path
from weightd.protocol import limits
from weightd.protocol.schema import FieldError, boolean, integer, many, number, one_of, record, text
from weightd.shared.devices import CPU, card_of

# What tells which files and which interpreter a model is loaded with.
LOADING = ("path", "engine", "python", "devices", "sharing", "canary", *ENGINES)


@dataclass(frozen=True)
class ModelConfig:
    """A table [models.NAME]."""

    path: str = field(metadata=user_path(limits.MAX_PATH_BYTES))
    """The model file, absolute or relative to the configuration file: .onnx or .mindir."""

    engine: str = field(default="", metadata=one_of(["", *ENGINES]))
    """The library that runs it. Default: onnxruntime for .onnx, mindspore_lite for .mindir."""

    python: str = field(default="", metadata=user_path(limits.MAX_PATH_BYTES, empty=True))
    """The interpreter that has the engine: a command, or a path as `path` is. Default: the daemon's own."""

    start: str = field(default="fork", metadata=one_of(["fork", "spawn"]))
    """How processes come to be on the CPU: "fork" makes them within milliseconds of one that has loaded the engine, or
    built the model; "spawn" starts an interpreter for each, as is always done for a card."""

    workers: int = field(default=1, metadata=integer(1, 1024))
    """Worker processes."""

    threads: int = field(default=1, metadata=integer(1, 1024))
    """Threads that one predict uses."""

    spares: int | None = field(default=None, metadata=integer(0, 1024))
    """Further processes that are attached, and take requests when a worker is lost. Default: 0, on Ascend 1."""

    devices: tuple[str, ...] = field(default=(CPU,), metadata=many(text(limits.MAX_NAME_BYTES), limits.MAX_DEVICES))
    """Where the model runs: ["cpu"], or cards as in ["ascend:0", "ascend:1"], each with workers of its own."""

    sharing: str = field(default="on", metadata=one_of(["on", "auto", "off"]))
    """Whether the weights are shared. On a card "on" fails where they cannot be, "auto" then loads them per worker."""

    process_mib: int = field(default=0, metadata=integer(0, 2**30))
    """MiB of a card that each process takes beside the weights. Default: 0, then what the first generation takes."""

    policy: str = field(default="auto", metadata=one_of([each.value for each in Policy]))
    """How workers that cannot be replaced one by one are replaced: beside the old ones, in their place, or auto."""

    holder_loss: str = field(default="strict", metadata=one_of(["strict", "frozen"]))
    """On a card, when the process that built the weights dies: "strict" takes them for invalid, "frozen" goes on."""

    timeout: float = field(default=30.0, metadata=number(limits.MAX_TIMEOUT_US / 1e6, positive=True))
    """Seconds until a request that names no timeout of its own is answered DEADLINE_EXCEEDED."""

    required: bool = field(default=False, metadata=boolean())
    """Whether weightd is ready, for a service manager, only once this model serves. If it fails, so does the start."""

    load_timeout: float = field(default=600.0, metadata=number(MAX_SECONDS, positive=True))
    """Seconds that one process may take to copy the model, or to build it, and before that to come up: it imports the
    engine and reads the whole model for its digest. For coming up it has a minute in any case."""

    predict_timeout: float = field(default=60.0, metadata=number(MAX_SECONDS, positive=True))
    """Seconds after which a worker that computes one answer is held to hang: it is aborted and replaced."""

    watchdog: float = field(default=30.0, metadata=number(MAX_SECONDS, positive=True))
    """Seconds within which each worker has to be heard of; the model is ready while one of them is. Idle ones are
    pinged. Longer than the longest predict."""

    canary: CanaryKey = field(default=canary_config.AUTO, metadata=canary_config.metadata())
    """What a worker has to answer as the holder did before it serves: "auto" looks for inputs that the model runs on, a
    table such as {x = [1, 3, 48, 320]} gives their shapes, a path that of an .npz with an array for each input. "off":
    nothing is asked; then nobody notices a worker that answers wrongly, and what an engine arranges in its first
    predict is not shared."""

    canary_tolerance: float = field(default=0.0, metadata=number(1.0))
    """How far answers to the canary may be apart, as a share of the largest value of that output, for a model that does
    not repeat itself to the last bit. Default: 0, not at all."""

    canary_interval: float = field(default=0.0, metadata=number(MAX_SECONDS))
    """Seconds after which each worker runs the canary again, and is replaced if its answer is wrong. 0: never."""

    max_queue: int = field(default=1024, metadata=integer(1, 1_000_000))
    """Requests that may wait; further ones are answered RESOURCE_EXHAUSTED."""

    max_queue_bytes: int = field(default=1024**3, metadata=integer(1, 2**62))
    """Tensor bytes that may wait; further ones are answered RESOURCE_EXHAUSTED."""

    mindspore_lite: MindSporeLiteOptions = field(default=MindSporeLiteOptions(), metadata=record(MindSporeLiteOptions))
    """More for this engine."""

    @property
    def on_cards(self) -> bool:
        """Whether the model runs on cards, all of it: a mixture is refused."""
        return self.devices != (CPU,)

    @property
    def forks(self) -> bool:
        """Whether processes are forked of one that has loaded the engine."""
        return self.start == "fork" and not self.on_cards

    @property
    def forks_built(self) -> bool:
        """Whether workers may be forked of the process that has built the model."""
        return self.forks and self.sharing != "off" and self.threads <= self.spec.template_threads

    @property
    def spec(self) -> EngineSpec:
        """What is known of its engine."""
        return ENGINES[self.engine]

    @property
    def options(self) -> EngineOptions:
        """What its engine is told."""
        return self.engine_tables.get(self.engine, EngineOptions())

    @property
    def engine_tables(self) -> Mapping[str, EngineOptions]:
        """The options for each engine that has some, by its name."""
        return {"mindspore_lite": self.mindspore_lite}


def complete_model(name: str, config: ModelConfig, base: Path, problems: Problems) -> ModelConfig:
    """Return `config` with its defaults filled in and its paths made absolute; `problems`: see `complete_daemon`."""
    problems.note(of_name("model", name))
    for needed, rule in _RULES:
        problems.note(rule(config), *needed)
    sample = canary_config.sample(config.canary)
    # A name without a slash is a command of the PATH.
    python = str(base / config.python) if "/" in config.python else config.python or sys.executable
    return dataclasses.replace(
        config,
        path=str(base / (config.path or "")),  # None where it is missing
        engine=_engine(config),
        python=python,
        spares=_spares(config),
        mindspore_lite=config.mindspore_lite.complete(base),
        canary=str(base / sample) if sample else config.canary,
    )


# --- Which keys of a model go together ----------------------------------------------------------------------------


def _engine(config: ModelConfig) -> str:
    return config.engine or engine_for(Path(config.path or "").suffix)


def _spares(config: ModelConfig) -> int:
    if config.spares is not None:
        return config.spares
    return ascend.SPARES if config.on_cards else 0


def _of_path(config: ModelConfig) -> Iterator[FieldError]:
    engine, suffix = _engine(config), Path(config.path).suffix
    expected = ""
    if not engine:
        expected = f"a file that ends in {' or '.join(each.suffix for each in ENGINES.values())}"
    elif suffix != ENGINES[engine].suffix:
        expected = f"a {ENGINES[engine].suffix} file for engine {engine}"
    if expected:
        yield FieldError(f"expected {expected}, got {config.path!r}").at(".path")


def _of_devices(config: ModelConfig) -> Iterator[FieldError]:
    if not config.devices:
        yield FieldError("expected at least one device").at(".devices")
    for index, device in enumerate(config.devices):
        problem = _of_device(device, config.devices)
        if problem and config.devices.index(device) == index:
            yield FieldError(problem).at(f".devices[{index}]")


def _of_device(device: str, devices: Sequence[str]) -> str:
    if device != CPU and card_of(device) is None:
        return f'expected "cpu" or a card such as "ascend:0", got {device!r}'
    if devices.count(device) > 1:
        return f"{device} is given twice"
    return "expected the CPU alone or cards alone: their answers differ" if device == CPU and len(devices) > 1 else ""


def _of_engine(config: ModelConfig) -> Iterator[FieldError]:
    engine = _engine(config)
    for index, device in enumerate(config.devices):
        if not ENGINES[engine].runs_on(device):
            yield FieldError(f"expected cpu: engine {engine} runs there only, got {device!r}").at(f".devices[{index}]")
            return


def _of_options(config: ModelConfig) -> Iterator[FieldError]:
    engine = _engine(config)
    for name, options in config.engine_tables.items():
        if name == engine:
            yield from (error.at(f".{name}") for error in options.problems(config.devices, config.sharing))
        elif options != type(options)():
            yield FieldError(f"the model's engine is {engine}").at(f".{name}")


def _of_number(config: ModelConfig) -> Iterator[FieldError]:
    count = config.workers + _spares(config)
    if count > limits.MAX_PIDS:
        yield FieldError(f"expected at most {limits.MAX_PIDS} workers and spares, got {count}").at(".spares")


def _of_canary(config: ModelConfig) -> Iterator[FieldError]:
    if config.canary != canary_config.OFF:
        return
    for key in ("canary_tolerance", "canary_interval"):
        if getattr(config, key):
            yield FieldError('it has no effect with canary = "off"').at(f".{key}")
    if config.on_cards and config.sharing == "on":
        reason = "on a card nothing else shows that an attach has left the weights right"
        yield FieldError(f'{reason}; set sharing = "off" too, or name an input').at(".canary")


_Rule = Callable[[ModelConfig], Iterable[FieldError]]

# A rule is asked if the keys that it reads are right by themselves, and by the rules before it.
_RULES: Sequence[tuple[Sequence[str], _Rule]] = (
    (("path", "engine"), _of_path),
    (("devices",), _of_devices),
    (("path", "engine", "devices"), _of_engine),
    (("path", "engine", "devices", "sharing", *ENGINES), _of_options),
    (("workers", "spares", "devices"), _of_number),
    (("canary", "canary_tolerance", "canary_interval", "devices", "sharing"), _of_canary),
)
