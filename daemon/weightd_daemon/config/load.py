"""Configuration file: parses TOML into immutable objects; errors name the file, the key and the expected value."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

from weightd_common import toml_schema
from weightd_common.safe_open import MAX_CONFIG_BYTES, read_regular
from weightd_common.toml_schema import ErrorCollector, check_name
from weightd_daemon.config import rank_rules
from weightd_daemon.config.daemon import DaemonConfig, UnitDefaults, complete_daemon
from weightd_daemon.config.devices import DeviceConfig, read_devices
from weightd_daemon.config.groups import (
    GroupConfig,
    complete_groups,
    read_groups,
    with_member_defaults,
    with_memberships,
)
from weightd_daemon.config.listeners import ListenerConfig, read_listeners
from weightd_daemon.config.model import LOAD_KEYS, ModelConfig
from weightd_daemon.config.model_rules import check_versions, complete_model, version_configs
from weightd_daemon.config.repository import CONFIG_FILE, RepositoryConfig, scan
from weightd_daemon.config.tenants import TenantConfig, read_tenants
from weightd_daemon.config.versions import VersionSetConfig
from weightd_protocol import limits
from weightd_protocol.errors import WeightdError
from weightd_protocol.model_names import split_version
from weightd_protocol.schema import FieldError, label

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_TABLES = ("daemon", "listeners", "tenants", "models", "groups", "devices", "repository")


class ConfigError(WeightdError):
    """The configuration is invalid.

    Attributes:
        problems: one line for each error, with the file, the key and the expected value.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


@dataclass(frozen=True)
class Config:
    """A complete configuration file.

    Attributes:
        daemon: the table [daemon].
        models: the models by name.
        devices: the tables [devices.NAME] by name.
        listeners: all listeners for clients that speak ZeroMQ, by name.
        groups: the model groups by name.
        version_sets: the models with several versions by name; `models` has each version as NAME@VERSION.
        repository: the table [repository]; None without one.
        repository_problems: as in `Repository.problems`, with the errors in the keys of the models.
        unsettled: as in `Repository.unsettled`.
        tenants: the tenants by name; without tenants, all clients have the same rights.
    """

    daemon: DaemonConfig
    models: Mapping[str, ModelConfig]
    devices: Mapping[str, DeviceConfig] = field(default_factory=dict[str, DeviceConfig])
    listeners: Mapping[str, ListenerConfig] = field(default_factory=dict[str, ListenerConfig])
    groups: Mapping[str, GroupConfig] = field(default_factory=dict[str, GroupConfig])
    tenants: Mapping[str, TenantConfig] = field(default_factory=dict[str, TenantConfig])
    version_sets: Mapping[str, VersionSetConfig] = field(default_factory=dict[str, VersionSetConfig])
    repository: RepositoryConfig | None = None
    repository_problems: Mapping[str, str] = field(default_factory=dict[str, str])
    unsettled: frozenset[str] = frozenset()


class CheckedConfig(NamedTuple):
    """Result of checking a configuration file.

    Attributes:
        config: the valid parts of the file; models with an error are left out.
        loadable: the models whose keys in `LOAD_KEYS` are valid; their other keys may have errors.
        problems: all errors.
    """

    config: Config
    loadable: Mapping[str, ModelConfig]
    problems: list[str]


def load(path: Path, listen_addresses: Sequence[str] = ()) -> Config:
    """Read the configuration at `path`.

    Args:
        path: the path of the TOML file.
        listen_addresses: addresses of sockets for clients that a service manager has opened, see `config.daemon`.

    Raises:
        ConfigError: the file is unreadable, not TOML, or invalid.
    """
    return load_text(read_text(path), path, listen_addresses)


def load_text(text: str, path: Path, listen_addresses: Sequence[str] = ()) -> Config:
    """Return the configuration in `text`, which was read from `path` before. For the other arguments, see `load`."""
    checked = _check_text(text, path, listen_addresses)
    if checked.problems:
        raise ConfigError(*checked.problems)
    return checked.config


def read_text(path: Path) -> str:
    """Return the text of a configuration file.

    Raises:
        ConfigError: the file is unreadable or not UTF-8.
    """
    try:
        # Some editors write a byte order mark at the beginning of a file.
        return read_regular(path, MAX_CONFIG_BYTES).decode("utf-8").removeprefix("\ufeff")
    except OSError as error:
        raise ConfigError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError as error:
        byte = error.object[error.start]
        raise ConfigError(f"{path}: not UTF-8: invalid byte 0x{byte:02x} at offset {error.start}") from None
    except ValueError as error:
        raise ConfigError(f"{path}: {error}") from None


def check_config(path: Path, unit: UnitDefaults | None = None) -> CheckedConfig:
    """Read the configuration at `path`; return the valid parts together with the errors of the invalid keys.

    The default directories and the default socket come from `unit` or, without a unit, from this process.

    Raises:
        ConfigError: the file is unreadable, not UTF-8 or not TOML.
    """
    return _check_text(read_text(path), path, (), unit)


def _check_text(
    text: str, path: Path, listen_addresses: Sequence[str], unit: UnitDefaults | None = None
) -> CheckedConfig:
    try:
        content = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ConfigError(f"{path}: not TOML: {error}") from None
    config, loadable, problems = _parse_tables(content, path.resolve().parent, listen_addresses, unit)
    return CheckedConfig(config, loadable, [f"{path}: {error}" for error in problems.errors])


def parse(content: Mapping[str, Any], base: Path, listen_addresses: Sequence[str] = ()) -> Config:
    """Return the configuration in parsed TOML; paths are relative to `base`. `listen_addresses`: see `load`.

    Raises:
        ConfigError: the configuration is invalid; the texts name the key and the expected value.
    """
    config, _, problems = _parse_tables(content, base, listen_addresses)
    if problems.errors:
        raise ConfigError(*map(str, problems.errors))
    return config


def _parse_tables(
    content: Mapping[str, Any], base: Path, listen_addresses: Sequence[str], unit: UnitDefaults | None = None
) -> tuple[Config, dict[str, ModelConfig], ErrorCollector]:
    problems = ErrorCollector()
    daemon = DaemonConfig()
    listeners: Mapping[str, ListenerConfig] = {}
    devices: dict[str, DeviceConfig] = {}
    groups: dict[str, GroupConfig] = {}
    tenants: dict[str, TenantConfig] = {}
    for key in content:
        if key not in _TABLES:
            problems.add([FieldError(toml_schema.unknown_name_text("table", key, _TABLES)).at(f".{label(key)}")])
    with problems.at(".daemon"):
        daemon = toml_schema.read_table(DaemonConfig, content.get("daemon", {}), problems)
        daemon = complete_daemon(daemon, base, listen_addresses, problems, unit)
    with problems.at(".tenants"):
        tenants = read_tenants(content.get("tenants", {}), base, problems)
    with problems.at(".listeners"):
        listeners = read_listeners(content.get("listeners", {}), daemon, tenants, base, listen_addresses, problems)
    with problems.at(".devices"):
        devices = read_devices(content.get("devices", {}), problems)
    with problems.at(".groups"):
        named = content.get("models")
        names = list(cast("dict[str, Any]", named)) if type(named) is dict else []
        groups = read_groups(content.get("groups", {}), names, problems)
    repository = None
    if "repository" in content:
        with problems.at(".repository"):
            repository = toml_schema.read_table(RepositoryConfig, content["repository"], problems)
    read = _ReadModels({}, {}, {})
    with problems.at(".models"):
        members = {name for group in groups.values() for name in group.models}
        if "models" in content or repository is None:
            _read_models(content.get("models"), read, _ModelContext(devices, members, base, problems))
    if repository is not None:
        repository = dataclasses.replace(repository, path=str(base / (repository.path or "")))
    content_problems, unsettled = _read_repository(None if problems.errors else repository, read, devices)
    models = read.valid
    with problems.at(".groups"):
        groups = complete_groups(groups, models, problems)
    models.update(with_memberships(groups, models))
    config = Config(
        daemon,
        models,
        devices,
        listeners,
        groups,
        tenants,
        read.version_sets,
        repository,
        content_problems,
        unsettled,
    )
    return config, read.loadable, problems


class _ReadModels(NamedTuple):
    """The models of a configuration file by name, each version as NAME@VERSION.

    Attributes:
        valid: the models without an error.
        loadable: see `CheckedConfig`.
        version_sets: see `Config`.
    """

    valid: dict[str, ModelConfig]
    loadable: dict[str, ModelConfig]
    version_sets: dict[str, VersionSetConfig]


class _ModelContext(NamedTuple):
    """The other tables and values to which the tables of models refer.

    Attributes:
        devices: the tables [devices.NAME] by name.
        group_members: the models of all groups.
        base: the directory to which paths are relative.
        problems: receives the errors.
    """

    devices: Mapping[str, DeviceConfig]
    group_members: Collection[str]
    base: Path
    problems: ErrorCollector


def _read_models(content: Any, read: _ReadModels, context: _ModelContext) -> None:
    """Add the models of the tables [models.NAME] to `read`."""
    if type(content) is not dict or not content:
        raise FieldError("expected at least one table [models.NAME]")
    tables = cast("dict[str, Any]", content)
    if len(tables) > limits.MAX_MODELS:
        raise FieldError(f"expected at most {limits.MAX_MODELS} models, got {len(tables)}")
    for name, table in tables.items():
        _read_model(name, table, read, context)
        if len(read.loadable) > limits.MAX_MODELS:
            raise FieldError(f"expected at most {limits.MAX_MODELS} models and versions, got more")
    context.problems.add(rank_rules.check_card_ports(read.valid))


def _read_model(name: str, table: Any, read: _ReadModels, context: _ModelContext, keep: int = 0) -> None:
    """Add a model, or each of its versions, to `read`; `keep`: see `VersionSetConfig`."""
    problems = context.problems
    before = len(problems.errors)
    with problems.at(f".{label(name)}"):
        model = toml_schema.read_table(ModelConfig, table, problems, section=f"models.{name}")
        problems.add(check_name("model", name))
        is_member = name in context.group_members
        problems.add(check_versions(name, model, is_member=is_member), "path", "versions", "traffic", "engine")
        model = with_member_defaults(model) if is_member else model
        if model.versions:
            numbers = tuple(version for version, _ in model.versions)
            read.version_sets[name] = VersionSetConfig(numbers, model.traffic, keep)
        for each, version in version_configs(name, model).items():
            config = rank_rules.with_rank_defaults(version, context.devices, context.base, problems)
            config = complete_model(config, context.devices, context.base, problems)
            config = rank_rules.apply_rank_rules(config, problems)
            if problems.wrong_keys().isdisjoint(LOAD_KEYS):
                read.loadable[each] = config
            if len(problems.errors) > before:
                break  # the other versions differ only in their paths, so they have the same errors
            read.valid[each] = config


def _read_repository(
    repository: RepositoryConfig | None, read: _ReadModels, devices: Mapping[str, DeviceConfig]
) -> tuple[Mapping[str, str], frozenset[str]]:
    """Add the models of a repository to `read`; return `repository_problems` and `unsettled` of `Config`."""
    if repository is None:
        return {}, frozenset()
    found = scan(repository)
    errors = dict(found.problems)
    for name, model in found.models.items():
        if name in read.version_sets or name in read.loadable:
            errors[name] = f"{model.directory}: the configuration has a table [models.{label(name)}]"
            continue
        own, problems = _ReadModels({}, {}, {}), ErrorCollector()
        try:
            table = {"load": repository.load, **model.table()}
        except ValueError as error:
            errors[name] = f"{model.directory / CONFIG_FILE}: {error}"
            continue
        _read_model(name, table, own, _ModelContext(devices, (), model.directory, problems), repository.keep)
        if problems.errors:
            errors[name] = "\n".join(f"{model.directory / CONFIG_FILE}: {error}" for error in problems.errors)
            continue
        read.version_sets.update(own.version_sets)
        for each, config in own.valid.items():
            changed_at = model.changed_at[split_version(each)[1]]
            read.valid[each] = read.loadable[each] = dataclasses.replace(config, revision=changed_at)
    return errors, found.unsettled
