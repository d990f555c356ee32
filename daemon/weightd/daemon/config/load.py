"""The configuration file: TOML into frozen objects, or an error that names file, key and expectation."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

from weightd.daemon.config import canary as canary_config
from weightd.daemon.config import tables
from weightd.daemon.config.canary import CanaryKey
from weightd.daemon.config.policies import Policy
from weightd.daemon.config.tables import Problems
from weightd.daemon.engines import ascend
from weightd.daemon.engines import mindspore_lite as engine_options
from weightd.daemon.engines.mindspore_lite import MindSporeLiteOptions
from weightd.daemon.host.memory import MIB
from weightd.daemon.host.paths import user_path
from weightd.protocol import limits
from weightd.protocol.errors import WeightdError
from weightd.protocol.schema import FieldError, boolean, integer, label, many, number, one_of, record, text
from weightd.shared import paths, tcp
from weightd.shared.devices import CPU, card_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ENGINE_OF_SUFFIX: Mapping[str, str] = {".onnx": "onnxruntime", ".mindir": "mindspore_lite"}
SUFFIX_OF_ENGINE: Mapping[str, str] = {engine: suffix for suffix, engine in ENGINE_OF_SUFFIX.items()}

_SOCKET_PATH = re.compile(r"ipc:///.*[^/]")

# With less, a few requests of ordinary size would be too many.
_LEAST_MEMORY_BYTES = 16 * MIB

# It becomes part of file names and of process names.
_MODEL_NAME = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9._-]{{0,{limits.MAX_MODEL_NAME_BYTES - 1}}}")


_EXPECTED_NAME = "expected a model name of 1 to 64 ASCII letters, digits, '_', '.' and '-', the last two not first"

# Of whatever takes time. Longer than that, nobody waits; and microseconds of it fit wherever they are told.
_MAX_SECONDS = 365 * 86_400.0


class ConfigError(WeightdError):
    """The configuration is not usable.

    Attributes:
        problems: all that is wrong, a line each: file, key and what was expected.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def default_runtime_dir() -> str:
    """Return the directory for sockets where the configuration names none: what systemd gives, else the user's."""
    return _from_systemd("RUNTIME_DIRECTORY") or paths.runtime_dir()


def default_cache_dir() -> str:
    """Return the directory for snapshots and page stores where the configuration names none."""
    given = _from_systemd("CACHE_DIRECTORY")
    if given or os.getuid() == 0:
        return given or "/var/cache/weightd"
    return paths.xdg_dir("XDG_CACHE_HOME") or _home_cache_dir()


def _home_cache_dir() -> str:
    try:
        return str(Path.home() / ".cache" / "weightd")
    except RuntimeError:  # a uid without an entry in the user database
        return f"/var/tmp/weightd-{os.getuid()}"  # noqa: S108 - the daemon checks whose it is


def _from_systemd(variable: str) -> str:
    return os.environ.get(variable, "").split(":")[0]


@dataclass(frozen=True)
class DaemonConfig:
    """The table [daemon]."""

    socket: str = field(default="", metadata=user_path(limits.MAX_PATH_BYTES, empty=True))
    """Where clients connect: ipc://PATH or tcp://HOST:PORT. Default: weightd.sock in `runtime_dir`."""

    runtime_dir: str = field(default="", metadata=user_path(limits.MAX_PATH_BYTES, empty=True))
    """Directory of the sockets. Default: what systemd gives, /run/weightd for root, XDG_RUNTIME_DIR/weightd."""

    cache_dir: str = field(default="", metadata=user_path(limits.MAX_PATH_BYTES, empty=True))
    """Directory of model snapshots and page stores, on a disk. Default: /var/cache/weightd or ~/.cache/weightd."""

    drain_timeout: float = field(default=30.0, metadata=number(_MAX_SECONDS))
    """Seconds that accepted requests may take when the daemon is asked to stop."""

    max_memory_bytes: int = field(default=0, metadata=integer(0, 2**62))
    """Bytes that the daemon keeps for its clients: requests under way and answers that they have not read. Past it who
    has most is refused or hung up first. At least 16 MiB. Default: a quarter of the memory of host or control group."""

    @property
    def key(self) -> str:
        """A short name for this daemon, made from its socket: two daemons never share a file."""
        return hashlib.sha256(os.fsencode(self.socket)).hexdigest()[:12]

    @property
    def private_dir(self) -> Path:
        """The directory of this daemon's snapshots and page stores."""
        return Path(self.cache_dir, self.key)

    @property
    def children_socket(self) -> Path:
        """The socket of this daemon's children."""
        return Path(self.runtime_dir, f"{self.key}.sock")


@dataclass(frozen=True)
class DeviceConfig:
    """A table [devices.NAME], for a NAME such as "ascend:0"."""

    memory_mib: int = field(default=0, metadata=integer(0, 2**40))
    """MiB that weightd may use there. Default: what is free when the first model is loaded."""

    processes: int = field(default=ascend.MAX_PROCESSES, metadata=integer(1, 4096))
    """Processes that may use the device: the driver's limit is 63 on training cards, 32 in virtual machines."""


@dataclass(frozen=True)
class ModelConfig:
    """A table [models.NAME]."""

    path: str = field(metadata=user_path(limits.MAX_PATH_BYTES))
    """The model file, absolute or relative to the configuration file: .onnx or .mindir."""

    engine: str = field(default="", metadata=one_of(["", *SUFFIX_OF_ENGINE]))
    """The library that runs it. Default: onnxruntime for .onnx, mindspore_lite for .mindir."""

    python: str = field(default="", metadata=user_path(limits.MAX_PATH_BYTES, empty=True))
    """The interpreter that has the engine: a command, or a path as `path` is. Default: the daemon's own."""

    workers: int = field(default=1, metadata=integer(1, 1024))
    """Worker processes."""

    threads: int = field(default=1, metadata=integer(1, 1024))
    """Threads that one predict uses."""

    spares: int | None = field(default=None, metadata=integer(0, 1024))
    """Further processes that are attached, and take requests when a worker is lost. Default: 0, on Ascend 1."""

    devices: tuple[str, ...] = field(default=("cpu",), metadata=many(text(limits.MAX_NAME_BYTES), limits.MAX_DEVICES))
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

    load_timeout: float = field(default=600.0, metadata=number(_MAX_SECONDS, positive=True))
    """Seconds that one process may take to copy the model, or to build it, and before that to come up: it imports the
    engine and reads the whole model for its digest. For coming up it has a minute in any case."""

    predict_timeout: float = field(default=60.0, metadata=number(_MAX_SECONDS, positive=True))
    """Seconds after which a worker that computes one answer is held to hang: it is aborted and replaced."""

    watchdog: float = field(default=30.0, metadata=number(_MAX_SECONDS, positive=True))
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

    canary_interval: float = field(default=0.0, metadata=number(_MAX_SECONDS))
    """Seconds after which each worker runs the canary again, and is replaced if its answer is wrong. 0: never."""

    max_queue: int = field(default=1024, metadata=integer(1, 1_000_000))
    """Requests that may wait; further ones are answered RESOURCE_EXHAUSTED."""

    max_queue_bytes: int = field(default=1024**3, metadata=integer(1, 2**62))
    """Tensor bytes that may wait; further ones are answered RESOURCE_EXHAUSTED."""

    mindspore_lite: MindSporeLiteOptions = field(default=MindSporeLiteOptions(), metadata=record(MindSporeLiteOptions))
    """More for this engine."""


@dataclass(frozen=True)
class Config:
    """A whole configuration file."""

    daemon: DaemonConfig
    models: Mapping[str, ModelConfig]
    devices: Mapping[str, DeviceConfig] = field(default_factory=dict[str, DeviceConfig])


def default_path() -> Path:
    """Return the configuration of the service: in the directory that systemd gives, else where that would be."""
    return Path(_from_systemd("CONFIGURATION_DIRECTORY") or "/etc/weightd", "weightd.toml")


class Examined(NamedTuple):
    """What a file says.

    Attributes:
        config: as far as it is good: a model with a problem is not among its models.
        loadable: the models whose files and interpreter are told rightly, whatever else is wrong with them.
        problems: all that is wrong.
    """

    config: Config
    loadable: Mapping[str, ModelConfig]
    problems: list[str]


def load(path: Path, listening: Sequence[str] = ()) -> Config:
    """Read the configuration at `path`.

    Args:
        path: of the TOML file.
        listening: addresses for clients that a service manager has opened.

    Raises:
        ConfigError: it is unreadable, not TOML, or says something that it must not.
    """
    return load_text(read(path), path, listening)


def load_text(text: str, path: Path, listening: Sequence[str] = ()) -> Config:
    """Return the configuration that a text is; it is, or was, that of the file at `path`. See `load`."""
    examined = _examine(text, path, listening)
    if examined.problems:
        raise ConfigError(*examined.problems)
    return examined.config


def read(path: Path) -> str:
    """Return the text of a configuration file.

    Raises:
        ConfigError: it is unreadable, or no text.
    """
    try:
        # Some editors begin a text with a byte order mark.
        return path.read_text("utf-8-sig")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None


def examine(path: Path, listening: Sequence[str] = ()) -> Examined:
    """Read the configuration at `path`, see `load`, and tell what is wrong with its keys beside what is good.

    Raises:
        ConfigError: it is unreadable, or not TOML.
    """
    return _examine(read(path), path, listening)


def _examine(text: str, path: Path, listening: Sequence[str]) -> Examined:
    try:
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None
    config, loadable, problems = _parse(content, path.resolve().parent, listening)
    return Examined(config, loadable, [f"{path}: {error}" for error in problems.errors])


def parse(content: Mapping[str, Any], base: Path, listening: Sequence[str] = ()) -> Config:
    """Return the configuration of parsed TOML; relative paths are relative to `base`. `listening`: see `load`.

    Raises:
        ConfigError: the texts name key and expectation.
    """
    config, _, problems = _parse(content, base, listening)
    if problems.errors:
        raise ConfigError(*map(str, problems.errors))
    return config


def _parse(
    content: Mapping[str, Any], base: Path, listening: Sequence[str]
) -> tuple[Config, dict[str, ModelConfig], Problems]:
    problems = Problems()
    daemon = DaemonConfig()
    models: dict[str, ModelConfig] = {}
    loadable: dict[str, ModelConfig] = {}
    devices: dict[str, DeviceConfig] = {}
    for key in content:
        if key not in _TABLES:
            problems.note([FieldError(tables.unknown("table", key, _TABLES)).at(f".{label(key)}")])
    with problems.at(".daemon"):
        daemon = tables.read(DaemonConfig, content.get("daemon", {}), problems)
        daemon = complete_daemon(daemon, base, listening, problems)
    with problems.at(".models"):
        models, loadable = _models(content.get("models"), base, problems)
    with problems.at(".devices"):
        devices = _devices(content.get("devices", {}), problems)
    return Config(daemon, models, devices), loadable, problems


def _models(content: Any, base: Path, problems: Problems) -> tuple[dict[str, ModelConfig], dict[str, ModelConfig]]:
    """Return the models that are good, and those that are `loadable`."""
    if type(content) is not dict or not content:
        raise FieldError("expected at least one table [models.NAME]")
    models = cast("dict[str, Any]", content)
    if len(models) > limits.MAX_MODELS:
        raise FieldError(f"expected at most {limits.MAX_MODELS} models, got {len(models)}")
    good: dict[str, ModelConfig] = {}
    loadable: dict[str, ModelConfig] = {}
    for name, table in models.items():
        before = len(problems.errors)
        with problems.at(f".{label(name)}"):
            model = tables.read(ModelConfig, table, problems, section=f"models.{name}")
            model = complete_model(name, model, base, problems)
            if problems.wrong().isdisjoint(_LOADING):
                loadable[name] = model
            if len(problems.errors) == before:
                good[name] = model
    return good, loadable


def _devices(content: Any, problems: Problems) -> dict[str, DeviceConfig]:
    if type(content) is not dict:
        raise FieldError("expected tables [devices.NAME]")
    devices: dict[str, DeviceConfig] = {}
    for name, table in cast("dict[str, Any]", content).items():
        with problems.at(f".{label(name)}"):
            if card_of(name) is None:
                raise FieldError('expected the name of a card, such as "ascend:0"')
            devices[name] = tables.read(DeviceConfig, table, problems)
    return devices


def complete_daemon(config: DaemonConfig, base: Path, listening: Sequence[str], problems: Problems) -> DaemonConfig:
    """Return `config` with its defaults filled in, its socket checked, and its paths made absolute.

    `listening`: see `load`; the first of them is the socket by default. What is wrong is added to `problems`, where
    that of single keys is already; what is returned is of use if there is none.
    """
    runtime_dir = str((base / (config.runtime_dir or default_runtime_dir())).absolute())
    cache_dir = str((base / (config.cache_dir or default_cache_dir())).absolute())
    socket = config.socket or (listening[0] if listening else paths.socket_address(runtime_dir))
    complete = dataclasses.replace(config, socket=socket, runtime_dir=runtime_dir, cache_dir=cache_dir)
    problems.note(_too_long(str(complete.children_socket), ".runtime_dir"), "runtime_dir")
    problems.note(_of_socket(socket, listening), "socket", "runtime_dir")
    problems.note(_too_little(config.max_memory_bytes), "max_memory_bytes")
    return complete


def _of_socket(socket: str, listening: Sequence[str]) -> Iterator[FieldError]:
    if listening and socket not in listening:
        expected = f"expected {' or '.join(listening)}, where the service manager listens (weightd.socket)"
        yield FieldError(f"{expected}, got {socket!r}").at(".socket")
    elif not _SOCKET_PATH.fullmatch(socket) and not tcp.is_address(socket):
        yield FieldError(f"expected ipc:///ABSOLUTE/PATH or {tcp.FORM}, got {socket!r}").at(".socket")
    elif socket.startswith("ipc://"):
        yield from _too_long(socket.removeprefix("ipc://"), ".socket")


def _too_little(max_memory_bytes: int) -> Iterator[FieldError]:
    if 0 < max_memory_bytes < _LEAST_MEMORY_BYTES:
        expected = f"expected 0 or at least {_LEAST_MEMORY_BYTES}, got {max_memory_bytes}"
        yield FieldError(expected).at(".max_memory_bytes")


def _too_long(path: str, key: str) -> Iterator[FieldError]:
    size = len(os.fsencode(path))
    if size > limits.MAX_IPC_PATH_BYTES:
        yield FieldError(
            f"expected a socket path of at most {limits.MAX_IPC_PATH_BYTES} bytes, got {size}: {path!r}"
        ).at(key)


def complete_model(name: str, config: ModelConfig, base: Path, problems: Problems) -> ModelConfig:
    """Return `config` with its defaults filled in and its paths made absolute; `problems`: see `complete_daemon`."""
    if not _MODEL_NAME.fullmatch(name):
        problems.note([FieldError(_EXPECTED_NAME)])
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
        mindspore_lite=engine_options.complete(config.mindspore_lite, base),
        canary=str(base / sample) if sample else config.canary,
    )


# --- Which keys of a model go together ----------------------------------------------------------------------------


def _engine(config: ModelConfig) -> str:
    return config.engine or ENGINE_OF_SUFFIX.get(Path(config.path or "").suffix, "")


def _spares(config: ModelConfig) -> int:
    return config.spares if config.spares is not None else int(config.devices != ("cpu",))


def _of_path(config: ModelConfig) -> Iterator[FieldError]:
    engine, suffix = _engine(config), Path(config.path).suffix
    expected = ""
    if not engine:
        expected = f"a file that ends in {' or '.join(ENGINE_OF_SUFFIX)}"
    elif suffix != SUFFIX_OF_ENGINE[engine]:
        expected = f"a {SUFFIX_OF_ENGINE[engine]} file for engine {engine}"
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
        if device != "cpu" and engine != "mindspore_lite":
            yield FieldError(f"expected cpu: engine {engine} runs there only, got {device!r}").at(f".devices[{index}]")
            return


def _of_options(config: ModelConfig) -> Iterator[FieldError]:
    return engine_options.check(config.mindspore_lite, _engine(config), config.devices, config.sharing)


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
    if config.devices != ("cpu",) and config.sharing == "on":
        reason = "on a card nothing else shows that an attach has left the weights right"
        yield FieldError(f'{reason}; set sharing = "off" too, or name an input').at(".canary")


_Rule = Callable[[ModelConfig], Iterable[FieldError]]

_TABLES = ("daemon", "models", "devices")

# What tells which files and which interpreter a model is loaded with.
_LOADING = ("path", "engine", "python", "devices", "sharing", "canary", "mindspore_lite")

# A rule is asked if the keys that it reads are right by themselves, and by the rules before it.
_RULES: Sequence[tuple[Sequence[str], _Rule]] = (
    (("path", "engine"), _of_path),
    (("devices",), _of_devices),
    (("path", "engine", "devices"), _of_engine),
    (("path", "engine", "devices", "sharing", "mindspore_lite"), _of_options),
    (("workers", "spares", "devices"), _of_number),
    (("canary", "canary_tolerance", "canary_interval", "devices", "sharing"), _of_canary),
)
