"""The Kubernetes manifest: validity against Kubernetes' schemas, and behaviour of its containers.

The tests do not need Kubernetes: commands and probes of the containers run on this host, with other paths.
"""

from __future__ import annotations

import re
import signal
import subprocess
import sys
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from importlib import import_module
from pathlib import Path
from typing import Any

import pytest

from testkit import models
from testkit.ports import free_ports
from testkit.waiting import until

# Only the environment of these tests has these packages.
kubernetes_validate: Any = import_module("kubernetes_validate")
yaml: Any = import_module("yaml")

MANIFEST = Path(__file__).parents[2] / "contrib" / "kubernetes.yaml"
DOCUMENTS: list[Any] = list(yaml.safe_load_all(MANIFEST.read_text()))
OF_KIND: Mapping[str, Any] = {each["kind"]: each for each in DOCUMENTS}
FILES: Mapping[str, str] = OF_KIND["ConfigMap"]["data"]
POD: Mapping[str, Any] = OF_KIND["Deployment"]["spec"]["template"]["spec"]
DAEMON, GATEWAY, EXPORTER = POD["containers"]

# The oldest maintained version, and the newest one with schemas.
VERSIONS = ["1.34", "1.37"]

PROGRAMS = {"weightd": "weightd_daemon", "weightctl": "weightctl"}


@pytest.mark.parametrize("version", VERSIONS)
def test_documents_match_schemas(version: str) -> None:
    assert len(DOCUMENTS) == len(OF_KIND) == 4
    for each in DOCUMENTS:
        kubernetes_validate.validate(each, version, strict=True)


def test_unknown_key_is_rejected() -> None:
    with pytest.raises(kubernetes_validate.ValidationError):
        kubernetes_validate.validate({**OF_KIND["Deployment"], "spek": {}}, VERSIONS[0], strict=True)


def test_references_between_documents() -> None:
    labels = OF_KIND["Deployment"]["spec"]["template"]["metadata"]["labels"]
    assert OF_KIND["Deployment"]["spec"]["selector"]["matchLabels"] == labels
    assert OF_KIND["PodDisruptionBudget"]["spec"]["selector"]["matchLabels"] == labels
    assert OF_KIND["Service"]["spec"]["selector"] == labels
    ports = {
        each["name"]: each["containerPort"] for container in POD["containers"] for each in container.get("ports", ())
    }
    assert {each["targetPort"] for each in OF_KIND["Service"]["spec"]["ports"]} == {"http", "grpc"}
    for name in ("http", "grpc"):
        assert f"0.0.0.0:{ports[name]}" in FILES["gateway.toml"]
    assert f"0.0.0.0:{ports['metrics']}" in EXPORTER["args"]
    volumes = {each["name"] for each in POD["volumes"]}
    assert {each["name"] for container in POD["containers"] for each in container["volumeMounts"]} == volumes


def test_grace_period_covers_drain() -> None:
    pauses = [each["lifecycle"]["preStop"]["sleep"]["seconds"] for each in POD["containers"]]
    drains = [float(found) for text in FILES.values() for found in re.findall(r"drain_timeout = (\d+)", text)]
    assert len(drains) == 2
    assert max(pauses) + max(drains) < POD["terminationGracePeriodSeconds"]


class Pod:
    """The containers of the manifest as processes; `root` is their file system."""

    def __init__(self, root: Path) -> None:
        self._root = root
        self.ports = dict(zip(("http", "grpc", "metrics"), free_ports(3), strict=True))
        for name, text in FILES.items():
            self._write(f"etc/weightd/{name}", self._moved(text))
        (root / "run/weightd").mkdir(parents=True)
        (root / "var/cache/weightd").mkdir(parents=True)

    def _write(self, name: str, text: str) -> None:
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)

    def _moved(self, text: str) -> str:
        for port, name in ((8000, "http"), (8001, "grpc"), (9464, "metrics")):
            text = text.replace(f"0.0.0.0:{port}", f"127.0.0.1:{self.ports[name]}")
        return re.sub(r'(?<=")/(?=(run|var|srv|etc)/)|(?<!.)/(?=(run|etc)/)', f"{self._root}/", text)

    def command(self, words: list[str]) -> list[str]:
        program, *arguments = words
        return [sys.executable, "-m", PROGRAMS[program], *map(self._moved, arguments)]

    @contextmanager
    def container(self, one: Mapping[str, Any]) -> Iterator[None]:
        process = subprocess.Popen(self.command(one["args"]), stdin=subprocess.DEVNULL)
        try:
            yield
            process.send_signal(signal.SIGTERM)
            assert process.wait(30) == 0
        finally:
            process.kill()
            process.wait()

    def probe(self, one: Mapping[str, Any]) -> bool:
        if "exec" in one:
            return (
                subprocess.run(self.command(one["exec"]["command"]), capture_output=True, check=False).returncode == 0
            )
        place = f"http://127.0.0.1:{self.ports[one['httpGet']['port']]}{one['httpGet']['path']}"
        try:
            # The kubelet sends the pod's address as Host header, which the gateway does not know.
            with urllib.request.urlopen(urllib.request.Request(place, headers={"Host": "10.0.0.7:8000"}), timeout=5):
                return True
        except urllib.error.URLError:
            return False

    def is_scraped(self) -> bool:
        try:
            with urllib.request.urlopen(f"http://127.0.0.1:{self.ports['metrics']}/metrics", timeout=5):
                return True
        except urllib.error.URLError:
            return False


def test_containers_serve_and_probes_report_state(tmp_path: Path) -> None:
    pod = Pod(tmp_path)
    (tmp_path / "srv/models").mkdir(parents=True)
    models.tiny(tmp_path / "srv/models/digits.onnx")
    secret = tmp_path / "etc/weightd/secret"
    secret.mkdir()
    (secret / "tokens").write_text(f"{'0' * 64} - nobody\n")
    with ExitStack() as gateway:
        with pod.container(DAEMON):
            until(lambda: pod.probe(DAEMON["startupProbe"]), "the models serve")
            assert pod.probe(DAEMON["livenessProbe"])
            gateway.enter_context(pod.container(GATEWAY))
            until(lambda: pod.probe(GATEWAY["readinessProbe"]), "the gateway is ready")
            assert pod.probe(GATEWAY["livenessProbe"])
            with pod.container(EXPORTER):
                until(pod.is_scraped, "metrics are served")
        assert not pod.probe(DAEMON["livenessProbe"])
        assert not pod.probe(GATEWAY["readinessProbe"])
        assert pod.probe(GATEWAY["livenessProbe"])
