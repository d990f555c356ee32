"""Checks docs/ascend.md against the code: example configurations, names of checks, and configuration keys."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from weightd_common import toml_schema as config_tables
from weightd_daemon.config import load as config
from weightd_daemon.doctor import checks, ranks
from weightd_daemon.doctor.findings import PROCESS_EXITS
from weightd_daemon.doctor.selftest import sharing
from weightd_daemon.engines.mindspore_lite import MindSporeLiteOptions
from weightd_daemon.engines.ranktable import card_bytes
from weightd_daemon.platform.memory import MIB
from weightd_protocol.schema import decode

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

TEXT = Path(__file__).resolve().parents[3].joinpath("docs", "ascend.md").read_text("utf-8")
# Options that apply only to the CPU, which docs/ascend.md does not describe.
CPU_OPTIONS = {"thread_affinity_mode", "thread_affinity_cores", "inter_op_parallel", "parallel_workers", "max_shape"}


def blocks(language: str) -> list[str]:
    return re.findall(rf"```{language}\n(.*?)```", TEXT, re.DOTALL)


@pytest.mark.parametrize("block", blocks("toml"))
def test_example_configurations_are_valid(block: str) -> None:
    tables: dict[str, Any] = tomllib.loads(block)
    for model in tables["models"].values():
        # Decode these options separately, so that errors name the option.
        decode(MindSporeLiteOptions, model.pop("mindspore_lite", {}))
    parsed = config.parse(tables, Path("/etc/weightd"))
    assert set(parsed.devices) <= {device for model in parsed.models.values() for device in model.devices}


def test_all_card_options_are_listed() -> None:
    (table,) = re.findall(r"^\| key of `\[models\.NAME\.mindspore_lite\]`.*?\n\n", TEXT, re.DOTALL | re.MULTILINE)
    keys = {key for row in table.strip().splitlines()[2:] for key in re.findall(r"`(\w+)`", row.split("|")[1])}
    assert keys == {field.name for field in config_tables.table_keys(MindSporeLiteOptions)} - CPU_OPTIONS


def test_memory_example_is_correct() -> None:
    weights = card_bytes(4000 * MIB) // MIB
    assert f"| {weights:,} MiB | 10 x 600 MiB | {weights + 10 * 600:,} MiB |" in TEXT
    assert f"{8 * (4000 + 600):,} MiB" in TEXT


def test_troubleshooting_covers_all_checks() -> None:
    section = TEXT.partition("## Trouble-shooting")[2].partition("\n## ")[0]
    cells = [row.split("|")[2] for row in section.splitlines() if row.startswith("|")]
    named = {name.strip() for cell in cells for name in cell.split(",")}
    names = {*checks.INDEPENDENT_CHECKS, *checks.CHECKS, *ranks.CHECKS, *sharing.CHECK_NAMES, "clean-up"}
    assert names - named == {"mindspore_lite", "driver", PROCESS_EXITS}


def test_internal_links_are_valid() -> None:
    headings = {re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-") for line in TEXT.splitlines()}
    assert set(re.findall(r"\]\(#([^)]+)\)", TEXT)) <= headings


def test_lines_are_at_most_120_columns() -> None:
    assert [line for line in TEXT.splitlines() if len(line) > 120 and not line.startswith("|")] == []
