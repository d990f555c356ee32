"""Metrics of a real daemon: content of a scrape, and the dashboard and alert rules that use it."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import socket
import subprocess
import sys
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
from prometheus_client.parser import text_string_to_metric_families

from testkit import models
from testkit.service import Service
from testkit.waiting import until
from weightd import ResourceExhausted
from weightd_common.exposition import FAMILIES

from .support import ONE_ENGINE, DaemonPaths, Weightd

pytestmark = [pytest.mark.e2e, ONE_ENGINE]

CONTRIB = Path(__file__).parents[2] / "contrib"
PROMTOOL = shutil.which("promtool")
needs_promtool = pytest.mark.skipif(PROMTOOL is None, reason="promtool is not installed: apt-get install prometheus")

ROW = np.zeros((1, 64), np.float32)
TENANTS = {"research": {"uids": [os.getuid()], "may": ["infer", "status"], "max_rows": 4}}

# Labels that Prometheus adds to each sample.
TARGET = {"instance", "job"}

# Metrics that no panel and no alert uses.
UNUSED: set[str] = set()

NOT_NAMES = {"by", "on", "group_left", "and", "or", "unless"}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
    return port


def scrape(port: int) -> str:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=60) as answer:
        assert answer.headers["Content-Type"] == "text/plain; version=0.0.4; charset=utf-8"
        text: str = answer.read().decode()
    return text


class World(NamedTuple):
    """A daemon with at least one sample for each of its metrics."""

    service: Service
    port: int
    text: str


@contextlib.contextmanager
def exporter(address: str, port: int) -> Iterator[None]:
    """Serve the metrics of the daemon at `address`."""
    command = [sys.executable, "-m", "weightctl", "--socket", address, "metrics", "--listen", str(port)]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as process:
        try:
            assert process.stderr is not None
            assert f":{port}/metrics" in process.stderr.readline()
            yield
        finally:
            process.terminate()


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> Iterator[World]:
    directory = tmp_path_factory.mktemp("metrics")
    tiny, port = models.tiny(directory / "tiny.onnx"), free_port()
    tables: Mapping[str, Any] = {
        "tiny": {"path": tiny, "workers": 2},
        "rows": {"path": tiny, "batching": {"max_rows": 8}},
    }
    with Service(tables, tenants=TENANTS) as service, exporter(service.address, port):
        service.ready()
        with service.client() as client:
            for name in ("tiny", "rows"):
                client.infer(name, {"x": ROW})
            with pytest.raises(ResourceExhausted, match="max_rows"):
                client.infer("rows", {"x": np.zeros((5, 64), np.float32)})
        # The first scrape starts the memory measurement for later ones.
        scrape(port)
        until(lambda: "weightd_model_pss_bytes" in scrape(port), "the scrape has the memory")
        yield World(service, port, scrape(port))


def labels_of(text: str) -> dict[str, set[str]]:
    """Return the labels of each metric of a scrape, by the name used in expressions."""
    found: dict[str, set[str]] = {}
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            found.setdefault(sample.name, set()).update(sample.labels)
    return found


def panels() -> list[dict[str, Any]]:
    board: Any = json.loads((CONTRIB / "grafana-weightd.json").read_text("utf-8"))
    return [*board["panels"], *({"targets": [each]} for each in board["annotations"]["list"])]


def alerts() -> list[str]:
    text = (CONTRIB / "alerts.yml").read_text("utf-8")
    assert (rules := text.count("- alert: ")) > 5
    found = re.findall(r"^ +expr: (?:>-\n((?: {10}\S.*\n)+)|(.*)\n)", text, re.MULTILINE)
    assert len(found) == rules
    return [" ".join((block or line).split()) for block, line in found]


EXPRESSIONS = [*(target["expr"] for panel in panels() for target in panel.get("targets", ())), *alerts()]


def names_in(expression: str) -> set[str]:
    """Return the metrics of an expression: all names except functions, labels and keywords."""
    bare = re.sub(r'"[^"]*"|\{[^}]*\}|\[[^\]]*\]', " ", re.sub(r'"[^"]*"', "", expression))
    bare = re.sub(r"\b(?:by|on|group_left|without)\s*\([^)]*\)", " ", bare)
    return set(re.findall(r"\b[a-z_][a-z_0-9]*\b(?!\s*\()", bare)) - NOT_NAMES


@pytest.mark.parametrize(
    ("expression", "expected"),
    [
        ('histogram_quantile(0.99, sum by (le, model) (rate(a_bucket{model=~"x{y}"}[5m])))', {"a_bucket"}),
        ('a / on (instance) group_left sum by (instance) (b{x="1"}) > 0.8', {"a", "b"}),
    ],
)
def test_finds_metrics_in_expression(expression: str, expected: set[str]) -> None:
    assert names_in(expression) == expected


@pytest.mark.parametrize("expression", EXPRESSIONS, ids=[f"{number}" for number in range(len(EXPRESSIONS))])
def test_expressions_use_existing_metrics_and_labels(expression: str, world: World) -> None:
    there = {**labels_of(world.text), "up": set[str]()}
    assert names_in(expression)
    for name in names_in(expression):
        assert name in there, f"{name} is in no scrape"
    for name, matchers in re.findall(r"\b([a-z_][a-z_0-9]*)\{([^}]*)\}", expression):
        asked = set(re.findall(r"(\w+)\s*(?:=~|!=|!~|=)", matchers))
        assert asked <= there[name] | TARGET, f"{name} has no labels {asked - there[name] - TARGET}"
    grouped = re.findall(r"\b(?:by|on)\s*\(([^)]*)\)", expression)
    known = set[str]().union(*(there[name] for name in names_in(expression)))
    for label in {each.strip() for group in grouped for each in group.split(",")}:
        assert label in known | TARGET, f"no label {label}"


def test_legends_use_labels_of_their_expression() -> None:
    for panel in panels():
        for target in panel.get("targets", ()):
            named = set(re.findall(r"\{\{(\w+)\}\}", target.get("legendFormat", "")))
            groups = re.findall(r"\bby \(([^)]*)\)", target["expr"])
            if groups and "group_left" not in target["expr"]:
                assert named <= {each.strip() for each in groups[0].split(",")}, target


def test_all_exported_metrics_are_used(world: World) -> None:
    families = {each.name for each in FAMILIES}
    exported = {re.sub("_(bucket|sum|count)$", "", name) for name in labels_of(world.text)}
    assert exported == families
    used = {re.sub("_(bucket|sum|count)$", "", name) for each in EXPRESSIONS for name in names_in(each)}
    assert families - used == UNUSED


def test_metrics_of_tenant(world: World) -> None:
    assert 'weightd_requests_total{model="rows",tenant="research",code="RESOURCE_EXHAUSTED"} 1\n' in world.text
    assert 'weightd_refused_total{tenant="research",reason="max_rows"} 1\n' in world.text
    assert 'weightd_requests_total{model="tiny",tenant="research",code="OK"} 1\n' in world.text
    assert 'weightd_batch_rows_count{model="rows"} 1\n' in world.text


@needs_promtool
def test_promtool_accepts_metrics_and_rules(world: World, tmp_path: Path) -> None:
    assert PROMTOOL is not None
    done = subprocess.run(
        [PROMTOOL, "check", "metrics"], input=world.text, capture_output=True, text=True, timeout=60, check=False
    )
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    # promtool can parse expressions only in rules, so the dashboard's expressions become rules too.
    plain = [each.replace("$__rate_interval", "5m").replace("$__interval", "5m") for each in EXPRESSIONS]
    rules = [{"record": f"r{number}", "expr": each} for number, each in enumerate(plain)]
    (tmp_path / "rules.yml").write_text(json.dumps({"groups": [{"name": "all", "rules": rules}]}), "utf-8")
    for path in (CONTRIB / "alerts.yml", tmp_path / "rules.yml"):
        done = subprocess.run(
            [PROMTOOL, "check", "rules", str(path)], capture_output=True, text=True, timeout=60, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr


def test_invalid_connections_do_not_block_scrapes(world: World) -> None:
    with contextlib.ExitStack() as stack, world.service.client() as client:
        peers = [stack.enter_context(socket.create_connection(("127.0.0.1", world.port), 60)) for _ in range(300)]
        for number, peer in enumerate(peers):
            # The exporter may already have closed the oldest connections.
            with contextlib.suppress(ConnectionError):
                peer.sendall((b"", b"G", b"\0" * 100, b"GET /metrics HTTP/1.1\r\nx: y\r\n")[number % 4])
        client.infer("tiny", {"x": ROW})
        assert "weightd_build_info" in scrape(world.port)
        client.infer("tiny", {"x": ROW})


def test_counters_and_histograms_survive_restart(place: DaemonPaths, tmp_path: Path) -> None:
    """Counters of the default tenant, in a configuration without tenants."""
    config = place.config({"tiny": {"path": models.tiny(tmp_path / "tiny.onnx")}})
    command = [sys.executable, "-m", "weightctl", "--socket", place.address, "metrics"]
    for served in (2, 4):
        with Weightd(tmp_path / f"{served}.log", "serve", config) as daemon, daemon.client(place.address) as client:
            for _ in range(2):
                client.infer("tiny", {"x": ROW})
            text = subprocess.run(command, capture_output=True, text=True, timeout=60, check=True).stdout
            assert f'weightd_requests_total{{model="tiny",tenant="default",code="OK"}} {served}\n' in text
            assert f'weightd_request_duration_seconds_count{{model="tiny"}} {served}\n' in text
            assert daemon.end() == 0
    assert [each.suffix for each in place.cache.iterdir()] == [".counters"]
    assert place.left == []
