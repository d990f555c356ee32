"""The configuration: weightd.toml(5), weightd-gateway.toml(5), docs/configuration.md, and files to begin with.

All of them list the keys that the classes of the configuration declare, with the docstrings below them as what they
mean.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import json
import textwrap
from collections.abc import Iterator, Mapping
from typing import Any, NamedTuple

from tools.manual.page import ManPage, bold, italic

from weightd_common import toml_schema
from weightd_daemon.config.batching import BatchingConfig, SplitConfig
from weightd_daemon.config.daemon import DaemonConfig
from weightd_daemon.config.devices import DeviceConfig
from weightd_daemon.config.groups import GroupConfig
from weightd_daemon.config.listeners import ListenerConfig
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.config.ranks import RanksConfig
from weightd_daemon.config.tenants import TenantConfig
from weightd_daemon.engines.mindspore_lite import MindSporeLiteOptions
from weightd_gateway.config.schema import GatewayConfig

# As they stand in the file, in the order in which one writes them.
TABLES: Mapping[str, type[Any]] = {
    "daemon": DaemonConfig,
    "listeners.NAME": ListenerConfig,
    "tenants.NAME": TenantConfig,
    "models.NAME": ModelConfig,
    "models.NAME.batching": BatchingConfig,
    "models.NAME.split": SplitConfig,
    "models.NAME.mindspore_lite": MindSporeLiteOptions,
    "models.NAME.ranks": RanksConfig,
    "groups.NAME": GroupConfig,
    "devices.NAME": DeviceConfig,
}

_TABLE_DESCRIPTIONS: Mapping[str, str] = {
    "daemon": "The daemon itself. The table may be left out.",
    "listeners.NAME": (
        "Where clients connect that speak ZeroMQ. NAME is chosen as that of a model. The tables may be left out: then "
        "such clients connect to the daemon's `socket`, or wherever a service manager listens for them. If there are "
        "tables, they name all such places, those where a service manager listens among them."
    ),
    "tenants.NAME": (
        "Who may ask what, and how much of it. `default` is who is in no other. The tables may be left out: then "
        "whoever may connect is one tenant."
    ),
    "models.NAME": (
        "A model; at least one is needed. Clients ask for it as NAME: 1 to 64 ASCII letters, digits, `_`, `.` and "
        "`-`, the last two not first."
    ),
    "models.NAME.batching": (
        "Requests that run as one predict, for a model whose inputs and outputs have a row for each entry of their "
        "first dimension. The table may be left out: then each is a predict of its own."
    ),
    "models.NAME.split": (
        "A request that runs as several predicts side by side, for such a model. The table may be left out: then none "
        "is cut."
    ),
    "models.NAME.mindspore_lite": "More for a model that MindSpore Lite runs. The table may be left out.",
    "models.NAME.ranks": (
        "The processes, called ranks, that compute one model together, each with a slice of it that was exported for "
        "it: in the model's `path`, {rank} stands for 0, 1 and so on. The table may be left out: then the model is one "
        "file."
    ),
    "groups.NAME": (
        "Models of a card that one process serves, by MindSpore Lite from 2.1 on. The tables may be left out: then "
        "each model has processes of its own."
    ),
    "devices.NAME": (
        'What of a card weightd may take, for a NAME such as `"ascend:0"`: the table may be left out. Or a set of '
        'cores, for a NAME such as `"cpu:0"`, on which a model runs that has it among its `devices`.'
    ),
}

_WEIGHTD_DESCRIPTION = """\
The file that `weightd serve` reads, in TOML. Every key but `path` of a model has a default. A key that is unknown, or a
value that a key does not take, is refused with its name and what was expected, all of them at once, and `weightd check`
says so without starting anything. Paths are absolute, or relative to the directory of this file; `~` is not expanded. A
model whose name has a dot is quoted: `[models."resnet.v1"]`.

`weightctl reload`, or SIGHUP, has the file read again: models come, change and go without an interruption. The tables
`[daemon]` and `[listeners.NAME]` take a restart, but for `drain_timeout`, `accounting_interval` and
`max_batch_seconds`."""

_GATEWAY_DESCRIPTION = """\
The file that `weightd gateway` reads, in TOML. Every key has a default, but nobody may ask before `tokens`,
`anonymous`, or one of the tables `[certificates]` and `[users]` says who. A key that is unknown, or a value that a key
does not take, is refused with its name and what was expected, all of them at once, and `weightd gateway --check` says
so without serving anything. Paths are absolute, or relative to the directory of this file; `~` is not expanded.

SIGHUP has the file and that of the tokens read again: `tokens`, `anonymous` and the two tables hold from then on, also
for who is connected; all else takes a restart. A gateway that was started in the foreground of a terminal stops when
the terminal closes, unless it runs under nohup(1)."""

_CALLERS = """\
A caller asks for a tenant of the daemon's configuration, which has to let the gateway do so (`acts_for`), or, where "-"
stands in the place of a tenant, for the gateway itself. A token goes before a certificate, that before a user, and that
before `anonymous`."""

_CERTIFICATES = (
    "With `client_ca`: the common name of a certificate, and the tenant that its owner asks for, as in "
    '`"shop.example.org" = "sales"`.'
)

_USERS = (
    "With a unix: address among `http`: a user of this host by name or number, as the kernel tells of who has "
    'connected, and its tenant, as in `alice = "research"`.'
)

# What may stand for a key without a default, or with one that is empty.
EXAMPLES: Mapping[str, str] = {
    "accounting_interval": "3600",
    "acts_for": '["shop-*"]',
    "address": '"ipc:///run/weightd/weightd.sock"',
    "anonymous": '"-"',
    "cache_dir": '"/var/cache/weightd"',
    "client_ca": '"/etc/weightd/clients.pem"',
    "config_file": '"/etc/weightd/resnet50.cfg"',
    "cpus": '"0-3,8"',
    "daemon": '"/run/weightd/weightd.sock.unix"',
    "dec_key_file": '"/etc/weightd/resnet50.key"',
    "default_priority": "1",
    "device_ports": "[16666, 16667]",
    "devices": '["ascend:0", "ascend:1"]',
    "engine": '"onnxruntime"',
    "group_info_file": '"groups.json"',
    "groups": '["research"]',
    "inter_op_parallel": "2",
    "ip": '"192.0.2.7"',
    "key": '"/etc/weightd/listener.key"',
    "keys": '["/etc/weightd/alice.pub"]',
    "max_connections": "100",
    "max_in_flight": "64",
    "max_memory_bytes": "1073741824",
    "max_queue": "32",
    "max_queue_bytes": "268435456",
    "max_rate": "50",
    "max_rows": "16",
    "max_shape": "{ data = [16, 3, 224, 224] }",
    "max_shared_bytes": "268435456",
    "max_shm_bytes": "1073741824",
    "memory_mib": "16384",
    "metrics": '"127.0.0.1:9464"',
    "model_dirs": '["/srv/models/sales"]',
    "models": '["resnet50", "resnet101"]',
    "part_rows": "8",
    "pass_environment": '["HCCL_*"]',
    "path": '"/srv/models/resnet50.onnx"',
    "precision_mode": '"enforce_fp32"',
    "priority_max": "1",
    "process_mib": "512",
    "provider": '"ge"',
    "python": '"/opt/mslite/bin/python"',
    "rank_table": '"ranktable.json"',
    "runtime_dir": '"/run/weightd"',
    "selftest_interval": "600",
    "selftest_tolerance": "0.001",
    "sharing": '"auto"',
    "size": "2",
    "sizes": "[1, 4, 16]",
    "socket": '"ipc:///run/weightd/weightd.sock"',
    "spares": "1",
    "tenants": '["sales"]',
    "thread_affinity_cores": "[0, 1]",
    "thread_affinity_mode": "1",
    "tls_cert": '"/etc/weightd/gateway.crt"',
    "tls_key": '"/etc/weightd/gateway.key"',
    "tokens": '"/etc/weightd/tokens"',
    "uids": '["alice", 1001]',
}

_WEIGHTD_EXAMPLE = """\
[models.resnet50]
path = "/srv/models/resnet50.onnx"
workers = 4

[models.unet]
path = "/srv/models/unet.mindir"
python = "/opt/mslite/bin/python"
workers = 8
"""

_GATEWAY_EXAMPLE = """\
[gateway]
anonymous = "-"                 # whoever is on this host may ask, as a client of weightd's may
"""

_WEIGHTD_FILE_HEADER = """\
# The configuration of weightd, see weightd.toml(5); `weightd check FILE` says what is wrong with it.
# What is commented out shows the default, or where there is none that could be written down, what may stand there.
# Only `path` is needed.
"""

_GATEWAY_FILE_HEADER = """\
# The configuration of the gateway, see weightd-gateway.toml(5); `weightd gateway --check FILE` says what is wrong with
# it. What is commented out shows the default.
[gateway]
"""

_GATEWAY_FILE_FOOTER = """\
# [certificates]
# "shop.example.org" = "sales"

# [users]
# alice = "research"
"""

_REFERENCE_HEADER = """\
<!-- `make manual` writes this page from the classes of the configuration. -->
# Configuration

For whoever writes `weightd.toml` or `gateway.toml`: every key, with its type, its default, an example and its meaning.
The same is in the man pages weightd.toml(5) and weightd-gateway.toml(5). [operations.md](operations.md) says which keys
a task needs.
"""


def weightd_page() -> str:
    """Return weightd.toml(5)."""
    page = ManPage("weightd.toml", 5, "the configuration of weightd")
    page.heading("DESCRIPTION")
    page.text(_WEIGHTD_DESCRIPTION)
    for table, cls in TABLES.items():
        page.heading(f"[{table}]")
        page.text(_TABLE_DESCRIPTIONS[table])
        _write_keys(page, cls)
    page.heading("FILES")
    page.entry(bold("/etc/weightd/weightd.toml"), "What `weightd serve` reads where it is given no other file.")
    page.heading("EXAMPLE")
    page.code(_WEIGHTD_EXAMPLE)
    page.see_also([("weightd", 8), ("weightctl", 1)])
    return page.source()


def gateway_page() -> str:
    """Return weightd-gateway.toml(5)."""
    page = ManPage("weightd-gateway.toml", 5, "the configuration of the gateway of weightd")
    page.heading("DESCRIPTION")
    page.text(_GATEWAY_DESCRIPTION)
    page.heading("[gateway]")
    _write_keys(page, GatewayConfig)
    page.heading("CALLERS")
    page.text(_CALLERS)
    for name, meaning in (("certificates", _CERTIFICATES), ("users", _USERS)):
        page.entry(bold(f"[{name}]"), meaning)
    page.heading("FILES")
    page.entry(bold("/etc/weightd/gateway.toml"), "What `weightd gateway` reads where it is given no other file.")
    page.heading("EXAMPLE")
    page.code(_GATEWAY_EXAMPLE)
    page.see_also([("weightd", 8), ("weightd.toml", 5)])
    return page.source()


def _write_keys(page: ManPage, cls: type[Any]) -> None:
    for key in iterate_keys(cls):
        # Where a default is empty, or none, the text says what that means.
        default = f"; default {key.default}" if key.default.strip('"') else ""
        page.entry(
            f"{bold(key.name)} ({italic(key.kind + ('; required' if key.is_required else default))})", key.meaning
        )


def weightd_file() -> str:
    """Return a configuration with one model, and each other key as a comment."""
    lines = [_WEIGHTD_FILE_HEADER]
    for table, cls in TABLES.items():
        named = table.replace("models.NAME", "models.resnet50").replace("devices.NAME", 'devices."ascend:0"')
        is_shown = table in ("daemon", "models.NAME")
        lines.append(f"[{named}]" if is_shown else f"# [{named}]")
        for key in iterate_keys(cls):
            lines += _explain(key)
            unset = "0" if key.kind.startswith("integer") else EXAMPLES.get(key.name, "")
            value = EXAMPLES[key.name] if key.is_required else key.default or unset
            lines.append(f"{'' if is_shown and key.is_required else '# '}{key.name} = {value}\n")
    return "\n".join(lines)


def gateway_file() -> str:
    """Return a configuration in which whoever is on this host may ask, and each other key is a comment."""
    lines = [_GATEWAY_FILE_HEADER]
    for key in iterate_keys(GatewayConfig):
        lines += _explain(key)
        lines.append('anonymous = "-"\n' if key.name == "anonymous" else f"# {key.name} = {key.default}\n")
    return "\n".join([*lines, _GATEWAY_FILE_FOOTER])


def _explain(key: Key) -> list[str]:
    return textwrap.wrap(" ".join(key.meaning.split()), 116, initial_indent="# ", subsequent_indent="# ")


def reference() -> str:
    """Return docs/configuration.md."""
    parts = [_REFERENCE_HEADER, "## weightd.toml\n", _WEIGHTD_DESCRIPTION, ""]
    for table, cls in TABLES.items():
        parts += [f"### `[{table}]`\n", _TABLE_DESCRIPTIONS[table], "", *_markdown_table(cls)]
    parts += [f"### Example\n\n```toml\n{_WEIGHTD_EXAMPLE}```\n", "## gateway.toml\n", _GATEWAY_DESCRIPTION, ""]
    parts += ["### `[gateway]`\n", _CALLERS, "", *_markdown_table(GatewayConfig)]
    parts += [f"### `[certificates]`\n\n{_CERTIFICATES}\n", f"### `[users]`\n\n{_USERS}\n"]
    return "\n".join([*parts, f"### Example\n\n```toml\n{_GATEWAY_EXAMPLE}```"]) + "\n"


def _markdown_table(cls: type[Any]) -> Iterator[str]:
    yield "| key | type | default | example | meaning |"
    yield "|---|---|---|---|---|"
    for key in iterate_keys(cls):
        default = "required" if key.is_required else f"`{key.default}`" if key.default.strip('"') else ""
        cells = (f"`{key.name}`", key.kind, default, f"`{example_of(key)}`", " ".join(key.meaning.split()))
        yield f"| {' | '.join(cell.replace('|', chr(92) + '|') for cell in cells)} |"
    yield ""


def example_of(key: Key) -> str:
    """Return an assignment of a key as it may stand in the file."""
    is_telling = key.default not in ("", '""', "[]", "0", "0.0", "false")
    value = EXAMPLES.get(key.name, "true" if key.kind == "boolean" else key.default)
    return f"{key.name} = {key.default if is_telling else value}"


class Key(NamedTuple):
    """One key of a table.

    Attributes:
        name: as in the file.
        kind: what it takes.
        default: as it would stand in the file; "" where there is none that could.
        is_required: whether it must be given.
        meaning: what it is for.
    """

    name: str
    kind: str
    default: str
    is_required: bool
    meaning: str


def iterate_keys(cls: type[Any]) -> Iterator[Key]:
    """Yield the keys of a table of the configuration, without those that are tables themselves."""
    meanings = _docstrings(cls)
    for field in toml_schema.table_keys(cls):
        if field.metadata["field_type"].record:
            continue
        required = field.default is dataclasses.MISSING
        default = "" if required or field.default is None else _toml(field.default)
        yield Key(field.name, field.metadata["field_type"].description, default, required, meanings[field.name])


def _toml(value: object) -> str:
    """JSON is TOML for all that a default can be."""
    return json.dumps(value)


def _docstrings(cls: type[Any]) -> dict[str, str]:
    """The text below each field: Python drops it, so it is read from the source."""
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)  # noqa: S101 - a class is nothing else
    body = definition.body
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in itertools.pairwise(body)
        if isinstance(field, ast.AnnAssign)
        and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr)
        and isinstance(text.value, ast.Constant)
        and isinstance(text.value.value, str)
    }
