"""The commands weightd and weightctl as an operator types them. test_vocabulary runs each command once."""

from __future__ import annotations

import re
import shlex
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from weightd_protocol.version import VERSION

from .support import ONE_ENGINE, BareEngine, DaemonPaths, Weightd, Zoo, ask_all, interpreter, pairs, weightd

pytestmark = [pytest.mark.e2e, ONE_ENGINE]

BAD_CONFIG = 78
SCRIPTS = Path(sys.executable).parent


@pytest.mark.parametrize("name", ["weightd", "weightctl"])
def test_commands_are_installed(name: str) -> None:
    done = subprocess.run([SCRIPTS / name, "--version"], capture_output=True, text=True, timeout=30, check=False)
    assert (done.returncode, done.stdout) == (0, f"{name} {VERSION}\n")


def test_serve_rejects_bad_configuration_with_file_and_key(tmp_path: Path) -> None:
    config = tmp_path / "weightd.toml"
    config.write_text("[models.m]\npath = 'm.bin'\nworkers = 0", encoding="utf-8")
    done = weightd("serve", config)
    assert done.returncode == BAD_CONFIG
    lines = done.stderr.splitlines()
    assert all(line.startswith(f"weightd: {config}: models.m.") for line in lines), lines
    assert [each for each in ("models.m.workers: ", "models.m.path: ") if each not in done.stderr] == [], lines


def test_check_loads_each_model_and_leaves_no_files(zoo: Zoo, place: DaemonPaths, tmp_path: Path) -> None:
    path = zoo.path("two_inputs", "onnxruntime")
    bad = tmp_path / path.name
    # Valid protobuf for the daemon, but not a model for the engine.
    bad.write_bytes(b"\x08\x08")
    tables = {"sums": {"path": path}, "bad": {"path": bad}}
    config = place.config({**tables, "gone": {"path": path.with_stem("gone")}})
    done = weightd("check", "--load", config)
    assert done.returncode == BAD_CONFIG
    assert "models.gone.path: " in done.stderr
    assert "gone on cpu" not in done.stderr
    config = place.config(tables)
    done = weightd("check", "--load", config)
    assert (done.returncode, done.stdout) == (1, "")
    assert "sums on cpu: loading, 1 of 2" in done.stderr
    assert re.search(r"sums on cpu: loaded in \d+\.\d s; ", done.stderr)
    assert f"{config}: models.bad: does not load on cpu: holder: build: " in done.stderr
    assert place.left == []


def test_check_prints_sockets_of_unit_that_serves_file(
    zoo: Zoo, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("CONFIGURATION_DIRECTORY", str(tmp_path))
    monkeypatch.delenv("RUNTIME_DIRECTORY", raising=False)
    config = tmp_path / "card0.toml"
    config.write_text(f"[models.m]\npath = '{zoo.path('two_inputs', 'onnxruntime')}'\n", encoding="utf-8")
    done = weightd("check", config)
    where = "unix:///run/weightd/card0.sock.unix, ipc:///run/weightd/card0.sock"
    assert (done.returncode, done.stderr) == (0, "")
    assert done.stdout.splitlines()[-1] == f"{config}: valid for weightd@card0.service; clients connect to {where}"


def test_check_prints_tenants_and_warnings(zoo: Zoo, place: DaemonPaths) -> None:
    config = place.config({"m": {"path": zoo.path("two_inputs", "onnxruntime")}})
    with config.open("a", encoding="utf-8") as file:
        file.write('\n[tenants.research]\nuids = ["root"]\nmodels = ["m", "gone"]\n')
    done = weightd("check", config)
    assert done.returncode == 0
    assert "tenant research: user 0; may infer; models m, gone\n" in done.stdout
    assert done.stderr == f"weightd: {config}: warning: tenants.research.models: there is no model 'gone'\n"


def test_run_serves_one_model_without_configuration(
    engine: str, zoo: Zoo, bare: BareEngine, place: DaemonPaths, tmp_path: Path
) -> None:
    path = zoo.path("two_inputs", engine)
    socket = place.address
    options = ("--python", interpreter(engine), "--socket", socket, "--cache-dir", place.cache)
    with Weightd(tmp_path / "log", "run", path, "--workers", 2, *options) as daemon:
        with daemon.client(place.address) as client:
            ask_all(client, "two_inputs", bare.questions(path, pairs((2, 1))))
            daemon.wait_for("two_inputs.1: serving")
            daemon.wait_for("ready; try: ")
            suggestion = (tmp_path / "log").read_text("utf-8").partition("ready; try: ")[2].splitlines()[0]
            command = [str(SCRIPTS / "weightctl"), *shlex.split(suggestion)[1:]]
            done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
            assert (done.returncode, done.stderr) == (0, "")
            [model] = client.status().models
            assert sum(each.role == "worker" for each in model.generations[0].processes) == 2
        assert daemon.end(signal.SIGINT) == 0
    # `run` keeps no usage counters either, since no later daemon would read them.
    assert [*place.cache.iterdir()] == []
    assert place.left == []
