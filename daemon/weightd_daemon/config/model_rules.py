"""The completion of a table [models.NAME]: defaults, absolute paths, and the rules for combinations of keys."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from weightd_common import devices as cores
from weightd_common.devices import CPU, card_of, has_cores, is_cpu
from weightd_common.toml_schema import ErrorCollector
from weightd_daemon.config import selftest as selftest_config
from weightd_daemon.config.devices import DeviceConfig
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.config.ranks import MINDSPORE_LITE
from weightd_daemon.engines import ENGINES, engine_for, ranktable
from weightd_protocol import limits
from weightd_protocol.model_names import join_version
from weightd_protocol.schema import FieldError

# Prefixes of the device names that other programs use for GPUs.
_GPU_NAMES = ("cuda", "gpu", "nvidia", "rocm")


def version_configs(name: str, config: ModelConfig) -> dict[str, ModelConfig]:
    """Return the configuration of each version by name, oldest first; without versions, the model's own by its name."""
    if not config.versions:
        return {name: config}
    return {
        join_version(name, str(version)): dataclasses.replace(config, path=path, versions=(), traffic=())
        for version, path in config.versions
    }


def check_versions(name: str, config: ModelConfig, *, is_member: bool) -> Iterator[FieldError]:
    """Yield the errors in a model's keys `path`, `versions` and `traffic`; `is_member`: the model is in a group."""
    if config.versions:
        yield from _check_version_table(name, config)
        if is_member:
            yield FieldError("a model in a group cannot have versions").at(".versions")
        if config.path:
            yield FieldError("has no effect with versions").at(".path")
    else:
        if not config.path:
            yield FieldError("missing").at(".path")
        if config.traffic:
            yield FieldError("has no effect without versions").at(".traffic")


def _check_version_table(name: str, config: ModelConfig) -> Iterator[FieldError]:
    numbers = [version for version, _ in config.versions]
    for version, _ in config.traffic:
        if version not in numbers:
            text = f"expected one of the versions {', '.join(map(str, numbers))}, got {version}"
            yield FieldError(text).at(f".traffic.{version}")
    for version, path in config.versions:
        for error in _check_path(dataclasses.replace(config, path=path)):
            yield FieldError(error.problem).at(f".versions.{version}")
    longest = join_version(name, str(numbers[-1]))
    if len(longest) > limits.MAX_MODEL_NAME_BYTES:
        most = limits.MAX_MODEL_NAME_BYTES
        yield FieldError(f"expected a name of at most {most} bytes with its version, got {longest}").at(".versions")


def complete_model(
    config: ModelConfig, devices: Mapping[str, DeviceConfig], base: Path, problems: ErrorCollector
) -> ModelConfig:
    """Return `config` with its defaults filled in and its paths made absolute.

    The caller must have filled in the defaults that depend on ranks and groups.

    Args:
        config: the table as it was read.
        devices: the tables [devices.NAME] by name.
        base: the directory to which paths are relative.
        problems: see `complete_daemon`.
    """
    config = dataclasses.replace(config, sharing=config.sharing or "on")
    problems.add(_name_rank_devices(config, _check_core_tables(config, devices)), "devices", "ranks")
    for needed, rule in _RULES:
        problems.add(_name_rank_devices(config, rule(config)), *needed, *(["ranks"] if "devices" in needed else []))
    inputs_path = selftest_config.inputs_path(config.selftest)
    # A name without a slash is a command in a directory of PATH, not a path relative to the configuration file.
    python = str(base / config.python) if "/" in config.python else config.python or sys.executable
    return dataclasses.replace(
        config,
        path=str(base / config.path),
        engine=engine_name(config),
        python=python,
        spares=_spare_count(config),
        batching=config.batching.fill_defaults(),
        cores=tuple(
            cores.format_cpulist(devices[each].cores) for each in config.devices if has_cores(each) and each in devices
        ),
        mindspore_lite=config.mindspore_lite.resolve_paths(base),
        selftest=str(base / inputs_path) if inputs_path else config.selftest,
    )


# --- Rules for combinations of keys -------------------------------------------------------------------------------


def engine_name(config: ModelConfig) -> str:
    """Return the engine of a model, as configured or by the suffix of its file; "" if neither determines it."""
    return config.engine or engine_for(Path(config.path).suffix)


def _spare_count(config: ModelConfig) -> int:
    if config.spares is not None or config.ranks is not None:
        return config.spares or 0
    return ranktable.DEFAULT_SPARES if config.is_on_cards else 0


def _name_rank_devices(config: ModelConfig, errors: Iterable[FieldError]) -> Iterator[FieldError]:
    """Change the path of errors in `devices` to `ranks.devices` if the model has ranks, which list its devices."""
    for error in errors:
        theirs = config.ranks is not None and error.path.startswith(".devices")
        yield FieldError(error.problem).at(".ranks.devices") if theirs else error


def _check_path(config: ModelConfig) -> Iterator[FieldError]:
    engine, suffix = engine_name(config), Path(config.path).suffix
    expected = ""
    if not engine:
        expected = f"a file that ends in {' or '.join(dict.fromkeys(each.suffix for each in ENGINES.values()))}"
    elif suffix != ENGINES[engine].suffix:
        expected = f"a {ENGINES[engine].suffix} file for engine {engine}"
    if expected:
        yield FieldError(f"expected {expected}, got {config.path!r}").at(".path")


def _check_core_tables(config: ModelConfig, devices: Mapping[str, DeviceConfig]) -> Iterator[FieldError]:
    device_by_core: dict[int, str] = {}
    for index, device in enumerate(config.devices):
        if not has_cores(device):
            continue
        if device not in devices:
            yield FieldError(f'expected a table [devices."{device}"] with the key cpus').at(f".devices[{index}]")
            continue
        common = sorted(core for core in devices[device].cores if device_by_core.setdefault(core, device) != device)
        if common:
            text = f"{device} and {device_by_core[common[0]]} have cores in common: {cores.format_cpulist(common)}"
            yield FieldError(text).at(f".devices[{index}]")


def _check_devices(config: ModelConfig) -> Iterator[FieldError]:
    if not config.devices:
        yield FieldError("expected at least one device").at(".devices")
    for index, device in enumerate(config.devices):
        problem = _device_problem(device, config.devices)
        if problem and config.devices.index(device) == index:
            yield FieldError(problem).at(f".devices[{index}]")


def _device_problem(device: str, devices: Sequence[str]) -> str:
    if not is_cpu(device) and card_of(device) is None:
        hint = "; GPUs are not supported" if device.lower().startswith(_GPU_NAMES) else ""
        return f'expected "cpu", a set of cores such as "cpu:0" or a card such as "ascend:0", got {device!r}{hint}'
    if devices.count(device) > 1:
        return f"{device} is given twice"
    if device == CPU and any(map(has_cores, devices)):
        return 'expected either "cpu" or sets of cores'
    if is_cpu(device) and not all(map(is_cpu, devices)):
        return "expected either the CPU or cards, not both: their outputs differ"
    return ""


def _check_copies(config: ModelConfig) -> Iterator[FieldError]:
    if config.copies == "each" and not all(map(has_cores, config.devices)):
        yield FieldError('has an effect only on sets of cores such as "cpu:0"').at(".copies")


def _check_priority(config: ModelConfig) -> Iterator[FieldError]:
    if config.default_priority > config.priority_levels:
        expected = f"expected at most priority_levels, {config.priority_levels}, got {config.default_priority}"
        yield FieldError(expected).at(".default_priority")


def _check_load(config: ModelConfig) -> Iterator[FieldError]:
    if config.required and not config.loads_at_start:
        yield FieldError(f'a model with load = "{config.load}" cannot be required').at(".required")


def _check_batching(config: ModelConfig) -> Iterator[FieldError]:
    yield from (error.at(".batching") for error in config.batching.problems(is_on_cards=config.is_on_cards))
    yield from (error.at(".split") for error in config.split.problems(config.batching))


def _check_engine(config: ModelConfig) -> Iterator[FieldError]:
    engine = engine_name(config)
    if config.ranks is not None and not (engine == MINDSPORE_LITE or ENGINES[engine].is_ranks_only):
        expected = f"expected mindspore, or mindspore_lite on cards; engine {engine} does not support ranks"
        yield FieldError(expected).at(".engine")
        return
    if config.ranks is None and ENGINES[engine].is_ranks_only:
        text = f"engine {engine} needs a table [models.NAME.ranks]"
        yield FieldError(text).at(".engine")
        return
    for index, device in enumerate(config.devices):
        if not ENGINES[engine].can_run_on(device):
            yield FieldError(f"expected cpu, the only device of engine {engine}, got {device!r}").at(
                f".devices[{index}]"
            )
            return


def _check_engine_options(config: ModelConfig) -> Iterator[FieldError]:
    engine = engine_name(config)
    for name, options in config.options_by_engine.items():
        if name == engine:
            yield from (error.at(f".{name}") for error in options.problems(config.devices, config.sharing))
        elif options != type(options)():
            yield FieldError(f"has no effect: the engine of the model is {engine}").at(f".{name}")


def _check_process_count(config: ModelConfig) -> Iterator[FieldError]:
    max_devices_per_copy = max(map(len, config.devices_by_weight_copy.values()), default=1)
    count = (config.max_workers + _spare_count(config)) * max_devices_per_copy
    if count > limits.MAX_PIDS:
        on = f" on {max_devices_per_copy} sets of cores" if max_devices_per_copy > 1 else ""
        yield FieldError(f"expected at most {limits.MAX_PIDS} workers and spares{on}, got {count}").at(".spares")


def _check_workers(config: ModelConfig) -> Iterator[FieldError]:
    if config.min_workers < config.max_workers and config.is_on_cards:
        yield FieldError("expected a number on cards, where the processes are known when the model is built").at(
            ".workers"
        )


def _check_selftest(config: ModelConfig) -> Iterator[FieldError]:
    if config.selftest != selftest_config.OFF:
        return
    for key in ("selftest_tolerance", "selftest_interval"):
        if getattr(config, key):
            yield FieldError('has no effect with selftest = "off"').at(f".{key}")
    if config.is_on_cards and config.sharing == "on":
        reason = "on a card only the self-test detects wrong weights after an attach"
        yield FieldError(f'{reason}; set sharing = "off" as well, or give inputs').at(".selftest")


_Rule = Callable[[ModelConfig], Iterable[FieldError]]

# The keys that each rule reads, and the rule. A rule is evaluated only if the values of these keys are valid and no
# earlier rule has reported an error in them.
_RULES: Sequence[tuple[Sequence[str], _Rule]] = (
    (("path", "versions", "engine"), _check_path),
    (("devices",), _check_devices),
    (("path", "versions", "engine", "devices"), _check_engine),
    (("path", "versions", "engine", "devices", "sharing", *ENGINES), _check_engine_options),
    (("devices", "copies"), _check_copies),
    (("workers", "spares", "devices", "copies"), _check_process_count),
    (("workers", "devices"), _check_workers),
    (("priority_levels", "default_priority"), _check_priority),
    (("load", "required"), _check_load),
    (("batching", "split", "devices"), _check_batching),
    (("selftest", "selftest_tolerance", "selftest_interval", "devices", "sharing"), _check_selftest),
)
