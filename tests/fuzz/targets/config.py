"""Target for the configuration: a text is not TOML, or raises ConfigError, or is complete and within its limits.

An input is the file.
"""

from __future__ import annotations

import dataclasses
import sys
from itertools import chain
from pathlib import Path

from weightd_common.peer_credentials import OVERFLOW_ID
from weightd_daemon.config import load as config
from weightd_daemon.config.daemon import DaemonConfig
from weightd_daemon.config.devices import DeviceConfig
from weightd_daemon.config.groups import GroupConfig
from weightd_daemon.config.listeners import ListenerConfig
from weightd_daemon.config.load import Config, ConfigError
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.config.ranks import MAX_RANKS, RanksConfig
from weightd_daemon.config.tenants import TenantConfig
from weightd_daemon.engines import ENGINES
from weightd_daemon.engines.mindspore_lite import MindSporeLiteOptions
from weightd_protocol import limits

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

_BASE = Path("/etc/weightd")

_TABLES = (DaemonConfig, DeviceConfig, ListenerConfig, ModelConfig, GroupConfig, RanksConfig, TenantConfig)

MAX_BYTES = 8192
WORDS = (
    b"[daemon]\n",
    b"[listeners.l]\n",
    b"[tenants.t]\n",
    b"[tenants.default]\n",
    b'uids = ["root", 65534]\n',
    b"[models.m]\n",
    b'[models.m.mindspore_lite]\nprovider = "ge"\n',
    b'[devices."ascend:0"]\n',
    b'path = "m.onnx"\n',
    b'path = "m.mindir"\n',
    b'[models.m.ranks]\ndevices = ["ascend:0", "ascend:1"]\n',
    b'path = "r{rank}.mindir"\nselftest = "c.npz"\n',
    b"[groups.g]\nmodels = [",
    b'"ascend:1"',
    *sorted(
        {f"{field.name} = ".encode() for cls in (*_TABLES, MindSporeLiteOptions) for field in dataclasses.fields(cls)}
    ),
)


def one_input(data: bytes) -> None:
    try:
        tables = tomllib.loads(data.decode("utf-8"))
    except (ValueError, RecursionError):  # `load` reports these errors as "not TOML".
        return
    try:
        parsed = config.parse(tables, _BASE)
    except ConfigError as error:
        _check_refusal(error)
    else:
        _check(parsed)


def _check_refusal(error: ConfigError) -> None:
    """Check that each problem names a key and fits on a line."""
    assert error.problems
    for text in error.problems:
        key, colon, problem = text.partition(": ")
        assert key
        assert colon
        assert problem
        assert "\n" not in text


def _check(parsed: Config) -> None:
    assert 0 < len(parsed.models) <= limits.MAX_MODELS
    assert len(bytes(parsed.daemon.channel_socket)) <= limits.MAX_IPC_PATH_BYTES
    assert 0 < len(parsed.listeners) <= limits.MAX_LISTENERS
    assert all(each.address.startswith(("ipc:///", "tcp://")) for each in parsed.listeners.values())
    assert parsed.daemon.private_dir.is_absolute()
    _check_tenants(parsed)
    for name, model in parsed.models.items():
        assert name.isprintable()
        assert "/" not in name
        assert Path(model.path).is_absolute()
        assert model.engine in ENGINES
        assert model.python
        assert model.spares is not None
        assert model.max_workers + model.spares <= limits.MAX_PIDS
        assert 0 < model.timeout <= limits.MAX_TIMEOUT_US / 1e6
        assert min(model.load_timeout, model.predict_timeout, model.watchdog) > 0
        assert model.devices
        assert model.mindspore_lite.to_json().isprintable()
        _check_ranks(model)
    assert "cpu" not in parsed.devices


def _check_tenants(parsed: Config) -> None:
    assert len(parsed.tenants) <= limits.MAX_TENANTS
    tenants = parsed.tenants.values()
    for every in ([*chain.from_iterable(getattr(each, key) for each in tenants)] for key in ("user_ids", "group_ids")):
        assert len({*every}) == len(every)
        assert OVERFLOW_ID not in every
    for tenant in parsed.tenants.values():
        assert len(tenant.public_keys) <= len(tenant.keys)
        assert 1e-3 <= tenant.weight <= 1e3
        assert all(each.isprintable() for each in (*tenant.models, *tenant.acts_for))


def _check_ranks(model: ModelConfig) -> None:
    if model.ranks is None:
        assert not ENGINES[model.engine].is_ranks_only
        return
    assert {len(group) for group in model.ranks.groups} == {model.ranks.size}
    assert 2 <= model.ranks.size <= len(model.ranks.paths) <= MAX_RANKS
    assert len({*model.ranks.paths}) == model.ranks.size
    assert model.devices == model.ranks.all_devices
    assert (model.workers, model.spares, model.sharing) == (1, 0, "off")
    assert model.predict_timeout < model.ranks.exec_timeout
