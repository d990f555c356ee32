"""Tests that docs/gateway.md agrees with the code: its paths, codes, limits and configurations."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from unittest import mock

import pytest

from weightd_common import toml_schema
from weightd_common.toml_schema import ErrorCollector
from weightd_gateway import tensors
from weightd_gateway.config.load import parse
from weightd_gateway.config.schema import GatewayConfig
from weightd_gateway.error_codes import STATUSES
from weightd_gateway.http import app, infer_json
from weightd_gateway.http.routes import Operation, parse_route

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

DOCS = Path(__file__).resolve().parents[2] / "docs"
TEXT = (DOCS / "gateway.md").read_text("utf-8")


def rows(heading: str) -> list[list[str]]:
    section = TEXT.partition(f"\n## {heading}\n")[2].partition("\n## ")[0]
    lines = [line for line in section.splitlines() if line.startswith("|")][2:]
    return [[cell.strip(" `") for cell in line.strip("|").split(" |")] for line in lines]


def test_documents_each_path() -> None:
    documented = {
        parse_route(path.replace("{model}", "m").replace("{region}", "r")).methods[method]
        for method, path, _ in rows("HTTP")
    }
    assert documented == {*Operation} - {Operation.CHANGE_SETTING, Operation.CUDA_REGISTER}


def test_documents_each_code() -> None:
    documented = {code: (int(http), int(grpc)) for code, http, grpc, _ in rows("Errors") if not code.startswith("…")}
    assert documented == {code: tuple(status) for code, status in STATUSES.items()}


def test_documents_defaults_of_limits() -> None:
    defaults = {field.name: field.default for field in toml_schema.table_keys(GatewayConfig)}
    for key, by_default, _ in rows("Limits"):
        number = int(re.sub(r"\D.*", "", by_default.replace(",", "")))
        unit = {"MiB": 2**20, "GiB": 2**30}.get(by_default.split()[1], 1)
        assert defaults[key] == number * unit, key


def test_documents_fixed_limits() -> None:
    text = " ".join(TEXT.split())
    for sentence in (
        f"JSON of more than {infer_json.MAX_JSON_BYTES >> 20} MiB, of more than {tensors.MAX_VALUES:,} values",
        f"or of more than {infer_json.MAX_KEYS:,} keys of maps",
        f"429 where {app.MAX_PROBES} requests already wait for the daemon",
    ):
        assert sentence in text


@pytest.mark.parametrize("block", re.findall(r"```toml\n(.*?)```", TEXT, re.DOTALL))
def test_configurations_are_valid(block: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("os.access", mock.Mock(return_value=True))
    monkeypatch.setattr("weightd_gateway.config.load._parse_user_id", hash)
    problems = ErrorCollector()
    parse(tomllib.loads(block), Path("/"), problems)
    assert problems.errors == []


def test_lines_are_short_and_links_work() -> None:
    assert [line for line in TEXT.splitlines() if len(line) > 120 and not line.startswith("|")] == []
    for name, anchor in re.findall(r"\]\((?!https?:)([^)#]*)#?([^)]*)\)", TEXT):
        text = (DOCS / name).read_text("utf-8") if name else TEXT
        headings = {re.sub(r"[^\w -]", "", line.lstrip("# ").lower()).replace(" ", "-") for line in text.splitlines()}
        assert not anchor or anchor in headings, f"{name}#{anchor}"
