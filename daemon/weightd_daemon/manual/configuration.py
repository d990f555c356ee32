"""weightd.toml(5), and a file to begin with: each key of the configuration, its default and its meaning."""

from __future__ import annotations

import textwrap
from collections.abc import Iterator, Mapping
from typing import Any

from weightd_common.manual.reference import Key, iterate_keys
from weightd_common.manual.roff import ManPage, bold, italic
from weightd_daemon.config.batching import BatchingConfig, SplitConfig
from weightd_daemon.config.daemon import DaemonConfig
from weightd_daemon.config.devices import DeviceConfig
from weightd_daemon.config.groups import GroupConfig
from weightd_daemon.config.listeners import ListenerConfig
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.config.ranks import RanksConfig
from weightd_daemon.config.tenants import TenantConfig
from weightd_daemon.engines.mindspore_lite import MindSporeLiteOptions
from weightd_protocol.version import VERSION

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

_DESCRIPTION = """\
The file that `weightd serve` reads, in TOML. Every key but `path` of a model has a default. A key that is unknown, or a
value that a key does not take, is refused with its name and what was expected, all of them at once, and `weightd check`
says so without starting anything. Paths are absolute, or relative to the directory of this file; `~` is not expanded. A
model whose name has a dot is quoted: `[models."resnet.v1"]`.

`weightctl reload`, or SIGHUP, has the file read again: models come, change and go without an interruption. The tables
`[daemon]` and `[listeners.NAME]` take a restart, but for `drain_timeout`, `accounting_interval` and
`max_batch_seconds`."""

_EXAMPLE = """\
[models.resnet50]
path = "/srv/models/resnet50.onnx"
workers = 4

[models.unet]
path = "/srv/models/unet.mindir"
python = "/opt/mslite/bin/python"
workers = 8
"""

# What stands in the example for keys without a default.
_EXAMPLE_VALUES: Mapping[str, str] = {
    "path": '"/srv/models/resnet50.onnx"',
    "address": '"ipc:///run/weightd/weightd.sock"',
    "models": '["resnet50", "resnet101"]',
    "max_shape": "{ data = [16, 3, 224, 224] }",
}

_EXAMPLE_HEADER = """\
# The configuration of weightd, see weightd.toml(5); `weightd check FILE` says what is wrong with it.
# What is commented out shows the default, or where there is none that could be written down, what may stand there.
# Only `path` is needed.
"""


def page() -> str:
    """Return weightd.toml(5)."""
    page = ManPage("weightd.toml", 5, VERSION, "the configuration of weightd")
    page.heading("DESCRIPTION")
    page.text(_DESCRIPTION)
    for table, cls in TABLES.items():
        page.heading(f"[{table}]")
        page.text(_TABLE_DESCRIPTIONS[table])
        for key in iterate_keys(cls):
            page.entry(f"{bold(key.name)} ({italic(_describe_kind(key))})", key.meaning)
    page.heading("FILES")
    page.entry(bold("/etc/weightd/weightd.toml"), "What `weightd serve` reads where it is given no other file.")
    page.heading("EXAMPLE")
    page.code(_EXAMPLE)
    page.see_also([("weightd", 8), ("weightctl", 1)])
    return page.source()


def _describe_kind(key: Key) -> str:
    kind = key.kind.replace('one of "", ', "one of ")
    if key.is_required:
        return f"{kind}; required"
    # Where a default is empty, or none, the text says what that means.
    return f"{kind}; default {key.default}" if key.default.strip('"') else kind


def example() -> str:
    """Return a configuration with one model, and each other key as a comment."""
    lines = [_EXAMPLE_HEADER]
    for table, cls in TABLES.items():
        named = table.replace("models.NAME", "models.resnet50").replace("devices.NAME", 'devices."ascend:0"')
        there = table in ("daemon", "models.NAME")
        lines.append(f"[{named}]" if there else f"# [{named}]")
        lines += [line for key in iterate_keys(cls) for line in _example_lines(key, is_table_shown=there)]
    return "\n".join(lines)


def _example_lines(key: Key, *, is_table_shown: bool) -> Iterator[str]:
    yield from textwrap.wrap(" ".join(key.meaning.split()), 116, initial_indent="# ", subsequent_indent="# ")
    value = _EXAMPLE_VALUES[key.name] if key.is_required else key.default or _EXAMPLE_VALUES.get(key.name, "0")
    yield f"{'' if is_table_shown and key.is_required else '# '}{key.name} = {value}\n"
