"""Configuration reference: weightd.toml(5), weightd-gateway.toml(5), docs/configuration.md and example files.

All of them list the keys that the configuration classes declare. The docstring of a field is the description of its
key.
"""

from __future__ import annotations

import ast
import dataclasses
import inspect
import itertools
import json
import re
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
from weightd_daemon.config.repository import RepositoryConfig
from weightd_daemon.config.tenants import TenantConfig
from weightd_daemon.engines.mindspore_lite import MindSporeLiteOptions
from weightd_gateway.config.schema import GatewayConfig

# In the usual order of a configuration file.
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
    "repository": RepositoryConfig,
}

_TABLE_DESCRIPTIONS: Mapping[str, str] = {
    "daemon": "The daemon itself. Optional.",
    "listeners.NAME": (
        "An address on which the daemon listens for ZeroMQ clients. NAME follows the rules for a model's name. "
        "Optional: without these tables, ZeroMQ clients connect to the daemon's `socket`, or to the sockets that a "
        "service manager passes. If there are tables, they must list all addresses, including those sockets."
    ),
    "tenants.NAME": (
        "The identities, rights and limits of one tenant. Other clients belong to the tenant `default`; without a "
        "table `default`, the daemon rejects them. Optional: without these tables, all clients belong to one tenant."
    ),
    "models.NAME": (
        "A model; at least one is required, here or in the repository. Clients use the model as NAME: 1 to 64 ASCII "
        "letters, digits, `_`, `.` "
        "and `-`; the first character is a letter, a digit or `_`."
    ),
    "models.NAME.batching": (
        "Combines several requests in one predict, for a model whose inputs and outputs have one row for each entry "
        "of their first dimension. Optional: without this table, every request runs alone."
    ),
    "models.NAME.split": (
        "Splits one request into several predicts that run in parallel, for the same kind of models. Optional."
    ),
    "models.NAME.mindspore_lite": "Options for a model that MindSpore Lite runs. Optional.",
    "models.NAME.ranks": (
        "The processes, called ranks, that run one model together. Each rank loads its own slice of the model: in the "
        "model's `path`, {rank} stands for 0, 1 and so on. Optional: without this table, the model is a single file."
    ),
    "groups.NAME": (
        "A model group: models on cards that share one process, with MindSpore Lite 2.1 or later. Optional."
    ),
    "devices.NAME": (
        'The resources that weightd may use of a card (optional), with a NAME such as `"ascend:0"`, or a set of cores '
        '(required for each set in the `devices` of a model), with a NAME such as `"cpu:0"`.'
    ),
    "repository": (
        "A directory of models in the layout of Triton, which the daemon searches for new models and versions. "
        "Optional. A changed directory does not need a reload."
    ),
}

_FILE_RULES = """\
Unknown keys and invalid values are errors. {program} reports all errors of the file at once, each with its key and the
expected value; {check} does so without starting anything. Paths are absolute, or relative to the directory of the
file; `~` is not expanded."""

_WEIGHTD_DESCRIPTION = """\
The configuration file of `weightd serve`, in TOML. Only `path` of a model is required; every other key has a default. A
model name with a dot must be quoted: `[models."resnet.v1"]`. A generation is one loaded version of a model; its holder
owns the shared weights, and its workers attach to them.

`weightctl reload` or SIGHUP reads the file again and adds, replaces and removes models without interrupting requests.
Changes to `[daemon]` and `[listeners.NAME]` take effect after a restart, except for `drain_timeout`,
`accounting_interval`, `max_batch_seconds`, `max_model_bytes`, `cache_bytes`, `min_resident` and `max_load_queue`."""

_GATEWAY_DESCRIPTION = """\
The configuration file of `weightd gateway`, in TOML. Every key has a default, but the gateway rejects all callers until
`tokens`, `anonymous`, or one of the tables `[certificates]` and `[users]` admits them.

SIGHUP reads this file and the file of tokens again. Changes to `tokens`, `anonymous` and the two tables take effect at
once, also for connected callers; all other changes take effect after a restart. A gateway in the foreground of a
terminal stops when the terminal closes, unless it runs under nohup(1)."""

_CALLERS = """\
Each caller acts for a tenant of the daemon's configuration, which must allow this (`acts_for`), or, with "-" instead of
a tenant, for the gateway's own tenant. A token takes precedence over a certificate, a certificate over a user, and a
user over `anonymous`."""

_CERTIFICATES = (
    "With `client_ca`: maps the common name of a client certificate to the tenant of its owner, as in "
    '`"shop.example.org" = "sales"`.'
)

_USERS = (
    "With a unix: address in `http`: maps a user of this host, by name or number, to its tenant, as in "
    '`alice = "research"`. The kernel identifies the user of each connection.'
)

# Example values for keys without a default, and for keys whose default is empty or 0.
EXAMPLES: Mapping[str, str] = {
    "accounting_interval": "3600",
    "acts_for": '["shop-*"]',
    "address": '"ipc:///run/weightd/weightd.sock"',
    "anonymous": '"-"',
    "cache_bytes": "50000000000",
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
    "RepositoryConfig.path": '"/srv/models"',
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
    "traffic": "{ 1 = 90, 2 = 10 }",
    "uids": '["alice", 1001]',
    "versions": '{ 1 = "/srv/models/one.onnx", 2 = "/srv/models/two.onnx" }',
}

_WEIGHTD_EXAMPLE = """\
[models.resnet50]
path = "/srv/models/resnet50.onnx"
workers = 4

[models.unet]
path = "/srv/models/unet.mindir"
python = "/opt/mslite/bin/python"
workers = 8

[tenants.sales]
uids = [1000]
models = ["resnet50"]
max_rate = 100.0
"""

_GATEWAY_EXAMPLE = """\
[gateway]
anonymous = "-"                 # every user of this host may send requests
"""

_WEIGHTD_FILE_HEADER = """\
# The configuration of weightd, see weightd.toml(5). `weightd check FILE` reports all errors in this file.
# Commented-out keys show their defaults or, if a key has no default to write down, an example.
# Only `path` is required.
"""

_GATEWAY_FILE_HEADER = """\
# The configuration of the gateway, see weightd-gateway.toml(5). `weightd gateway --check FILE` reports all errors in
# this file. Commented-out keys show their defaults.
[gateway]
"""

_GATEWAY_FILE_FOOTER = """\
# [certificates]
# "shop.example.org" = "sales"

# [users]
# alice = "research"
"""


def _wrap(text: str) -> str:
    return textwrap.fill(" ".join(text.split()), 120, break_long_words=False, break_on_hyphens=False)


_REFERENCE_HEADER = f"""\
<!-- `make manual` writes this page from the classes of the configuration. -->
# Configuration

This page is for administrators who write `weightd.toml` or `gateway.toml`. It lists every key with its type, bounds,
default, meaning and, unless the default shows it, an example line. A text without bounds has at most 4096 bytes, a list
without a maximum at most 256 entries. The man pages weightd.toml(5) and weightd-gateway.toml(5) have the same content.
[operations.md](operations.md) lists the keys for each task.

{_wrap(_FILE_RULES.format(program="The program", check="`weightd check` or `weightd gateway --check`"))}
"""


def weightd_page() -> str:
    """Return weightd.toml(5)."""
    page = ManPage("weightd.toml", 5, "the configuration of weightd")
    page.heading("DESCRIPTION")
    page.text(f"{_WEIGHTD_DESCRIPTION}\n\n{_FILE_RULES.format(program='The daemon', check='`weightd check`')}")
    for table, cls in TABLES.items():
        page.heading(f"[{table}]")
        page.text(_TABLE_DESCRIPTIONS[table])
        _write_keys(page, cls)
    page.heading("FILES")
    page.entry(bold("/etc/weightd/weightd.toml"), "The default configuration file of `weightd serve`.")
    page.heading("EXAMPLE")
    page.code(_WEIGHTD_EXAMPLE)
    page.see_also([("weightd", 8), ("weightctl", 1)])
    return page.source()


def gateway_page() -> str:
    """Return weightd-gateway.toml(5)."""
    page = ManPage("weightd-gateway.toml", 5, "the configuration of the gateway of weightd")
    page.heading("DESCRIPTION")
    page.text(
        f"{_GATEWAY_DESCRIPTION}\n\n{_FILE_RULES.format(program='The gateway', check='`weightd gateway --check`')}"
    )
    page.heading("[gateway]")
    _write_keys(page, GatewayConfig)
    page.heading("CALLERS")
    page.text(_CALLERS)
    for name, meaning in (("certificates", _CERTIFICATES), ("users", _USERS)):
        page.entry(bold(f"[{name}]"), meaning)
    page.heading("FILES")
    page.entry(bold("/etc/weightd/gateway.toml"), "The default configuration file of `weightd gateway`.")
    page.heading("EXAMPLE")
    page.code(_GATEWAY_EXAMPLE)
    page.see_also([("weightd", 8), ("weightd.toml", 5)])
    return page.source()


def _write_keys(page: ManPage, cls: type[Any]) -> None:
    for key in iterate_keys(cls):
        # The text explains an empty or missing default.
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
    """Return a configuration that admits every user of this host; all other keys are comments."""
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
        parts += [f"### `[{table}]`\n", _TABLE_DESCRIPTIONS[table], "", *_markdown_list(cls)]
    parts += [f"### Example\n\n```toml\n{_WEIGHTD_EXAMPLE}```\n", "## gateway.toml\n", _GATEWAY_DESCRIPTION, ""]
    parts += ["### `[gateway]`\n", _CALLERS, "", *_markdown_list(GatewayConfig)]
    parts += [f"### `[certificates]`\n\n{_CERTIFICATES}\n", f"### `[users]`\n\n{_USERS}\n"]
    return "\n".join([*parts, f"### Example\n\n```toml\n{_GATEWAY_EXAMPLE}```"]) + "\n"


def _markdown_list(cls: type[Any]) -> Iterator[str]:
    for key in iterate_keys(cls):
        default = "required" if key.is_required else f"default `{key.default}`" if key.default.strip('"') else ""
        example = example_of(key)
        has_example = example != f"{key.name} = {key.default}"
        head = "; ".join(filter(None, (short_kind(key.kind), default)))
        meaning = " ".join(key.meaning.split())
        yield f"- **`{key.name}`** ({head}): {meaning}{f' `{example}`' if has_example else ''}"
    yield ""


def short_kind(kind: str) -> str:
    """Return a type without the bounds that the header of the reference states for all keys."""
    return re.sub(r"\btext, [01] to 4096 bytes", "text", kind).replace("list of at most 256: ", "list: ")


def example_of(key: Key) -> str:
    """Return an example of the key's line in the file."""
    is_telling = key.default not in ("", '""', "[]", "{}", "0", "0.0", "false")
    own = EXAMPLES.get(f"{key.table}.{key.name}")
    value = own or EXAMPLES.get(key.name, "true" if key.kind == "boolean" else key.default)
    return f"{key.name} = {key.default if is_telling else value}"


class Key(NamedTuple):
    """One key of a table.

    Attributes:
        table: the name of the class of its table.
        name: the name in the file.
        kind: the type and the bounds in words.
        default: the default in TOML; "" if TOML has no such value.
        is_required: whether the key must be given.
        meaning: the description.
    """

    table: str
    name: str
    kind: str
    default: str
    is_required: bool
    meaning: str


def iterate_keys(cls: type[Any]) -> Iterator[Key]:
    """Yield the keys of a configuration table, without those that are tables themselves."""
    meanings = _docstrings(cls)
    for field in toml_schema.table_keys(cls):
        if field.metadata["field_type"].record:
            continue
        # A model has either a path or versions, and most have a path.
        required = field.default is dataclasses.MISSING or (cls, field.name) == (ModelConfig, "path")
        default = "" if required or field.default is None else _toml(field.default)
        kind = _interval(field.metadata["field_type"].description)
        if kind.startswith("table of") and not field.default:
            default = "{}"
        yield Key(cls.__name__, field.name, kind, default, required, meanings[field.name])


def _interval(kind: str) -> str:
    """Return the bounds of a number in the form that integers have."""
    kind = re.sub(r"^number of at least (\d+) and at most ", r"number, \1 to ", kind)
    return re.sub(r"^number of more than (\d+) and at most ", r"number above \1, at most ", kind)


def _toml(value: object) -> str:
    """Return a default in TOML: JSON is valid TOML for all types of defaults."""
    return json.dumps(value)


def _docstrings(cls: type[Any]) -> dict[str, str]:
    """Return the docstring of each field from the source, because Python does not keep these docstrings."""
    [definition] = ast.parse(textwrap.dedent(inspect.getsource(cls))).body
    assert isinstance(definition, ast.ClassDef)  # noqa: S101 - the source of a class is a class definition
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
