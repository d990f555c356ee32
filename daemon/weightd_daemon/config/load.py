"""Configuration file: parses TOML into frozen objects, or raises errors that name file, key and expectation."""

from __future__ import annotations

import sys
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple, cast

from weightd_common import toml_schema
from weightd_common.safe_open import MAX_CONFIG_BYTES, read_regular
from weightd_common.toml_schema import ErrorCollector
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
from weightd_daemon.config.model_rules import complete_model
from weightd_daemon.config.tenants import TenantConfig, read_tenants
from weightd_protocol import limits
from weightd_protocol.errors import WeightdError
from weightd_protocol.schema import FieldError, label

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_TABLES = ("daemon", "listeners", "tenants", "models", "groups", "devices")


class ConfigError(WeightdError):
    """The configuration is invalid.

    Attributes:
        problems: all errors, one line each: file, key and expected value.
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
        tenants: the tenants by name; without tenants, all clients have the same rights.
    """

    daemon: DaemonConfig
    models: Mapping[str, ModelConfig]
    devices: Mapping[str, DeviceConfig] = field(default_factory=dict[str, DeviceConfig])
    listeners: Mapping[str, ListenerConfig] = field(default_factory=dict[str, ListenerConfig])
    groups: Mapping[str, GroupConfig] = field(default_factory=dict[str, GroupConfig])
    tenants: Mapping[str, TenantConfig] = field(default_factory=dict[str, TenantConfig])


class CheckedConfig(NamedTuple):
    """Result of checking a configuration file.

    Attributes:
        config: the valid parts of the file; models with an error are left out.
        loadable: the models whose keys for files and interpreter are valid, whatever errors their other keys have.
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
    """Return the configuration in a text, which is or was the content of the file at `path`. See `load`."""
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
    """Read the configuration at `path`, see `load`; return its valid parts together with the errors in its keys.

    The defaults come from `unit` or, without a unit, from the environment of this process.

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
        ConfigError: the configuration is invalid; the texts name key and expectation.
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
    models: dict[str, ModelConfig] = {}
    loadable: dict[str, ModelConfig] = {}
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
    with problems.at(".models"):
        members = {name for group in groups.values() for name in group.models}
        models, loadable = _read_models(content.get("models"), devices, members, base, problems)
    with problems.at(".groups"):
        groups = complete_groups(groups, models, problems)
    models.update(with_memberships(groups, models))
    return Config(daemon, models, devices, listeners, groups, tenants), loadable, problems


def _read_models(
    content: Any,
    devices: Mapping[str, DeviceConfig],
    group_members: Collection[str],
    base: Path,
    problems: ErrorCollector,
) -> tuple[dict[str, ModelConfig], dict[str, ModelConfig]]:
    """Return the valid models, and the models that are `loadable`; `group_members` are the models of all groups."""
    if type(content) is not dict or not content:
        raise FieldError("expected at least one table [models.NAME]")
    models = cast("dict[str, Any]", content)
    if len(models) > limits.MAX_MODELS:
        raise FieldError(f"expected at most {limits.MAX_MODELS} models, got {len(models)}")
    valid: dict[str, ModelConfig] = {}
    loadable: dict[str, ModelConfig] = {}
    for name, table in models.items():
        before = len(problems.errors)
        with problems.at(f".{label(name)}"):
            model = toml_schema.read_table(ModelConfig, table, problems, section=f"models.{name}")
            model = with_member_defaults(model) if name in group_members else model
            model = rank_rules.with_rank_defaults(model, devices, base, problems)
            model = complete_model(name, model, devices, base, problems)
            model = rank_rules.apply_rank_rules(model, problems)
            if problems.wrong_keys().isdisjoint(LOAD_KEYS):
                loadable[name] = model
            if len(problems.errors) == before:
                valid[name] = model
    problems.add(rank_rules.check_card_ports(valid))
    return valid, loadable
