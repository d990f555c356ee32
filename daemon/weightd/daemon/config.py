"""The configuration file: TOML into frozen objects, or an error that names file, key and expectation."""

from __future__ import annotations

import dataclasses
import hashlib
import os
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from weightd.daemon import budget, engine_options
from weightd.daemon.deployment import Policy
from weightd.daemon.engine_options import MindSporeLiteOptions
from weightd.protocol import limits, paths
from weightd.protocol.errors import WeightdError
from weightd.protocol.schema import FieldError, boolean, decode, integer, label, many, number, one_of, record, text

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

ENGINE_OF_SUFFIX: Mapping[str, str] = {".onnx": "onnxruntime", ".mindir": "mindspore_lite"}
_SUFFIX_OF_ENGINE: Mapping[str, str] = {engine: suffix for suffix, engine in ENGINE_OF_SUFFIX.items()}

_SOCKET = re.compile(r"ipc:///.*[^/]|tcp://.+:[0-9]{1,5}")

_DEVICE = re.compile(r"cpu|ascend:(0|[1-9][0-9]{0,2})")

# It becomes part of file names and of process names.
_MODEL_NAME = re.compile(rf"[A-Za-z0-9_][A-Za-z0-9._-]{{0,{limits.MAX_MODEL_NAME_BYTES - 1}}}")


class ConfigError(WeightdError):
    """The configuration is not usable; the text names file, key and what was expected."""


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

    socket: str = field(default="", metadata=text(limits.MAX_PATH_BYTES, empty=True))
    """Where clients connect: ipc://PATH or tcp://HOST:PORT. Default: weightd.sock in `runtime_dir`."""

    runtime_dir: str = field(default="", metadata=text(limits.MAX_PATH_BYTES, empty=True))
    """Directory of the sockets. Default: what systemd gives, /run/weightd for root, XDG_RUNTIME_DIR/weightd."""

    cache_dir: str = field(default="", metadata=text(limits.MAX_PATH_BYTES, empty=True))
    """Directory of model snapshots and page stores, on a disk. Default: /var/cache/weightd or ~/.cache/weightd."""

    drain_timeout: float = field(default=30.0, metadata=number())
    """Seconds that accepted requests may take when the daemon is asked to stop."""

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

    processes: int = field(default=budget.MAX_PROCESSES, metadata=integer(1, 4096))
    """Processes that may use the device: the driver's limit is 63 on training cards, 32 in virtual machines."""


@dataclass(frozen=True)
class ModelConfig:
    """A table [models.NAME]."""

    path: str = field(metadata=text(limits.MAX_PATH_BYTES))
    """The model file, absolute or relative to the configuration file: .onnx or .mindir."""

    engine: str = field(default="", metadata=one_of(["", *_SUFFIX_OF_ENGINE]))
    """The library that runs it. Default: onnxruntime for .onnx, mindspore_lite for .mindir."""

    python: str = field(default="", metadata=text(limits.MAX_PATH_BYTES, empty=True))
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

    timeout: float = field(default=30.0, metadata=number())
    """Seconds until a request that names no timeout of its own is answered DEADLINE_EXCEEDED."""

    required: bool = field(default=False, metadata=boolean())
    """Whether weightd is ready, for a service manager, only once this model serves. If it fails, so does the start."""

    load_timeout: float = field(default=600.0, metadata=number())
    """Seconds that one process may take to build the model."""

    predict_timeout: float = field(default=60.0, metadata=number())
    """Seconds after which a worker that computes one answer is held to hang: it is aborted and replaced."""

    watchdog: float = field(default=30.0, metadata=number())
    """Seconds within which each worker has to be heard of; the model is ready while one of them is. Idle ones are
    pinged. Longer than the longest predict."""

    canary_interval: float = field(default=0.0, metadata=number())
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


def load(path: Path, listening: Sequence[str] = ()) -> Config:
    """Read the configuration at `path`.

    Args:
        path: of the TOML file.
        listening: addresses for clients that a service manager has opened.

    Raises:
        ConfigError: it is unreadable, not TOML, or says something that it must not.
    """
    try:
        tables = tomllib.loads(path.read_text("utf-8"))
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None
    try:
        return parse(tables, path.resolve().parent, listening)
    except FieldError as error:
        raise ConfigError(f"{path}: {error}") from None


def parse(tables: Mapping[str, Any], base: Path, listening: Sequence[str] = ()) -> Config:
    """Return the configuration of parsed TOML; relative paths are relative to `base`. `listening`: see `load`.

    Raises:
        FieldError: the text names key and expectation.
    """
    for key in tables:
        if key not in ("daemon", "models", "devices"):
            raise FieldError("unknown table; expected one of daemon, models, devices").at(f".{label(key)}")
    try:
        daemon = complete_daemon(decode(DaemonConfig, tables.get("daemon", {})), base, listening)
    except FieldError as error:
        raise error.at(".daemon") from None
    models = cast("dict[str, Any]", tables.get("models"))
    if type(models) is not dict or not models:
        raise FieldError("expected at least one table [models.NAME]").at(".models")
    if len(models) > limits.MAX_MODELS:
        raise FieldError(f"expected at most {limits.MAX_MODELS} models, got {len(models)}").at(".models")
    complete: dict[str, ModelConfig] = {}
    for name, table in models.items():
        try:
            complete[name] = complete_model(name, decode(ModelConfig, table), base)
        except FieldError as error:
            raise error.at(f".models.{label(name)}") from None
    return Config(daemon, complete, _devices(tables.get("devices", {})))


def _devices(tables: Any) -> dict[str, DeviceConfig]:
    if type(tables) is not dict:
        raise FieldError("expected tables [devices.NAME]").at(".devices")
    devices: dict[str, DeviceConfig] = {}
    for name, table in cast("dict[str, Any]", tables).items():
        try:
            if name == "cpu" or not _DEVICE.fullmatch(name):
                raise FieldError('expected the name of a card, such as "ascend:0"')
            devices[name] = decode(DeviceConfig, table)
        except FieldError as error:
            raise error.at(f".devices.{label(name)}") from None
    return devices


def complete_daemon(config: DaemonConfig, base: Path = Path(), listening: Sequence[str] = ()) -> DaemonConfig:
    """Return `config` with its defaults filled in, its socket checked, and its paths made absolute.

    `listening`: see `load`; the first of them is the socket by default.

    Raises:
        FieldError: the text names key and expectation.
    """
    _check_texts(config)
    runtime_dir = str((base / (config.runtime_dir or default_runtime_dir())).absolute())
    cache_dir = str((base / (config.cache_dir or default_cache_dir())).absolute())
    if config.socket and listening and config.socket not in listening:
        expected = f"expected {' or '.join(listening)}, where the service manager listens (weightd.socket)"
        raise FieldError(f"{expected}, got {config.socket!r}").at(".socket")
    socket = config.socket or (listening[0] if listening else paths.socket_address(runtime_dir))
    if not _SOCKET.fullmatch(socket):
        raise FieldError(f"expected ipc:///ABSOLUTE/PATH or tcp://HOST:PORT, got {socket!r}").at(".socket")
    complete = dataclasses.replace(config, socket=socket, runtime_dir=runtime_dir, cache_dir=cache_dir)
    _check_ipc_path(str(complete.children_socket), ".runtime_dir")
    _check_ipc_path(socket.removeprefix("ipc://") if socket.startswith("ipc://") else "", ".socket")
    return complete


def _check_texts(config: DaemonConfig | ModelConfig) -> None:
    for key, value in vars(config).items():
        if isinstance(value, str) and "\0" in value:
            raise FieldError(f"expected text without a NUL character, got {value!r}").at(f".{key}")


def _check_ipc_path(path: str, key: str) -> None:
    size = len(os.fsencode(path))
    if size > limits.MAX_IPC_PATH_BYTES:
        raise FieldError(
            f"expected a socket path of at most {limits.MAX_IPC_PATH_BYTES} bytes, got {size}: {path!r}"
        ).at(key)


def complete_model(name: str, config: ModelConfig, base: Path) -> ModelConfig:
    """Return `config` with its defaults filled in and its paths made absolute.

    Raises:
        FieldError: the text names key and expectation.
    """
    if not _MODEL_NAME.fullmatch(name):
        raise FieldError(
            "expected a model name of 1 to 64 ASCII letters, digits, '_', '.' and '-', the last two not first"
        )
    _check_texts(config)
    path = base / config.path
    engine = config.engine or ENGINE_OF_SUFFIX.get(path.suffix)
    if engine is None:
        raise FieldError(f"expected a file that ends in {' or '.join(ENGINE_OF_SUFFIX)}, got {config.path!r}").at(
            ".path"
        )
    if path.suffix != _SUFFIX_OF_ENGINE[engine]:
        raise FieldError(f"expected a {_SUFFIX_OF_ENGINE[engine]} file for engine {engine}, got {config.path!r}").at(
            ".path"
        )
    if not 0 < config.timeout <= limits.MAX_TIMEOUT_US / 1e6:
        raise FieldError(
            f"expected more than 0 and at most {limits.MAX_TIMEOUT_US / 1e6:.0f} seconds, got {config.timeout:g}"
        ).at(".timeout")
    for key in ("load_timeout", "predict_timeout", "watchdog"):
        if not getattr(config, key):
            raise FieldError("expected more than 0 seconds, got 0").at(f".{key}")
    _check_devices(engine, config)
    options = engine_options.complete(config.mindspore_lite, base)
    engine_options.check(options, engine, config.devices, config.sharing)
    spares = config.spares if config.spares is not None else int(config.devices != ("cpu",))
    if config.workers + spares > limits.MAX_PIDS:
        raise FieldError(f"expected at most {limits.MAX_PIDS} workers and spares, got {config.workers + spares}").at(
            ".spares"
        )
    # A name without a slash is a command of the PATH.
    python = str(base / config.python) if "/" in config.python else config.python or sys.executable
    return dataclasses.replace(
        config, path=str(path), engine=engine, python=python, spares=spares, mindspore_lite=options
    )


def _check_devices(engine: str, config: ModelConfig) -> None:
    if not config.devices:
        raise FieldError("expected at least one device").at(".devices")
    for index, device in enumerate(config.devices):
        if not _DEVICE.fullmatch(device):
            raise FieldError(f'expected "cpu" or a card such as "ascend:0", got {device!r}').at(f".devices[{index}]")
        if config.devices.count(device) > 1:
            raise FieldError(f"{device} is given twice").at(f".devices[{index}]")
        if device == "cpu" and len(config.devices) > 1:
            raise FieldError("expected the CPU alone or cards alone: their answers differ").at(f".devices[{index}]")
        if device != "cpu" and engine != "mindspore_lite":
            raise FieldError(f"expected cpu: engine {engine} runs there only, got {device!r}").at(f".devices[{index}]")
