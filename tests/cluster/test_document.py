"""Tests that docs/ray.md, docs/kubernetes.md and the example agree with the code: arguments, limits, links."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from weightd_common import toml_schema
from weightd_protocol.schema import label
from weightd_ray import daemon_supervisor, model_cache
from weightd_ray.options import Arguments, parse_arguments

REPOSITORY = Path(__file__).resolve().parents[2]
PAGE = (REPOSITORY / "docs" / "ray.md").read_text("utf-8")
KUBERNETES_PAGE = (REPOSITORY / "docs" / "kubernetes.md").read_text("utf-8")
EXAMPLE = (REPOSITORY / "examples" / "ray" / "serve.yaml").read_text("utf-8")


def test_documents_each_argument() -> None:
    table = PAGE.partition("## Arguments")[2].partition("\n## ")[0]
    named = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert named == [each.name for each in toml_schema.table_keys(Arguments)]


def test_documents_limits() -> None:
    own_bytes = len("/work/") + 8
    assert f"has at most {daemon_supervisor.MAX_DIRECTORY_BYTES - own_bytes} bytes" in PAGE
    assert model_cache.MAX_UNUSED == 4
    assert "keeps the last four models" in PAGE


def test_links_to_files_work() -> None:
    for target in re.findall(r"\]\((?!https?:|#)([^)#]+)", PAGE + KUBERNETES_PAGE):
        assert (REPOSITORY / "docs" / target).exists(), target


@pytest.mark.parametrize("name", ["resnet", "words"])
def test_arguments_of_example_are_valid(name: str) -> None:
    block = EXAMPLE.partition(f"name: {name}\n")[2].partition("deployments:")[0].partition("args:\n")[2]
    lines = [each.partition("#")[0].strip() for each in block.splitlines()]
    args = dict(each.split(": ", 1) for each in lines if ": " in each)
    args.pop("batching", None)  # a map of YAML
    assert label(parse_arguments(args).name) == name
