"""Start of the service: by systemctl or by a client's connection, readiness, and starts that cannot succeed."""

from __future__ import annotations

import subprocess
import time
from collections.abc import Iterator

import pytest

from testkit.waiting import until

from . import materials
from .service import MLP, STRANGER_UID, Weightd, ended, table
from .units import DIRECTORY, INSTALLED

pytestmark = [pytest.mark.e2e, pytest.mark.long]

BAD_CONFIG = "78"
TCP = "tcp://127.0.0.1:7878"

# Long enough for a daemon on a busy machine to report that it is still starting.
TIMEOUT_S = 8
LONGER_S = 10

# A start that cannot succeed ends within this time, including all restarts.
HOPELESS_S = 100.0


@pytest.fixture
def starting(weightd: Weightd) -> Iterator[subprocess.Popen[str]]:
    """A running `systemctl start`; the model takes longer to load than TimeoutStartSec."""
    weightd.configure({"mlp": {**MLP, "python": materials.slow_python(weightd.manager, LONGER_S)}})
    weightd.drop_in(f"TimeoutStartSec={TIMEOUT_S}")
    process = weightd.manager.popen(["systemctl", "start", weightd.service])
    yield process
    process.kill()
    process.communicate()


def test_start_waits_for_required_models(weightd: Weightd, starting: subprocess.Popen[str]) -> None:
    begin = time.monotonic()
    until(lambda: weightd.show("StatusText"), "the service has a status text")
    texts: set[str] = set()
    while starting.poll() is None:
        shown = weightd.manager.shows(weightd.service, "ActiveState", "StatusText")
        assert shown["ActiveState"] == "activating" or starting.wait(5) is not None
        if shown["ActiveState"] == "activating":
            texts.add(shown["StatusText"])
        time.sleep(0.1)
    assert starting.returncode == 0, weightd.journal()
    assert time.monotonic() - begin > TIMEOUT_S
    # Every user of the host may read the status texts, so they name no model.
    assert any("1 model is " in each for each in texts), texts
    assert not any("mlp" in each for each in texts), texts
    # Other workers may still load; one that serves is enough.
    assert weightd.workers()
    weightd.ask()
    assert weightd.restarts == 0


def test_start_does_not_wait_for_optional_models(weightd: Weightd) -> None:
    slow = {**MLP, "python": materials.slow_python(weightd.manager, LONGER_S), "required": False}
    weightd.configure({"mlp": MLP, "slow": slow, "broken": {"path": materials.BROKEN}})
    weightd.start()
    assert not weightd.workers("slow")
    weightd.ask()


def test_stuck_start_fails(weightd: Weightd) -> None:
    weightd.configure({"mlp": {**MLP, "python": materials.STUCK_PYTHON, "load_timeout": 1}})
    weightd.drop_in(f"TimeoutStartSec={TIMEOUT_S}", "Restart=no")
    begin = time.monotonic()
    done = weightd.manager.try_run(["systemctl", "start", weightd.service])
    assert done.returncode != 0
    assert time.monotonic() - begin < HOPELESS_S
    assert weightd.show("ActiveState") == "failed"
    assert "mlp" in weightd.journal()
    until(lambda: not weightd.pids(), "all processes exit")


def test_invalid_configuration_is_not_retried(weightd: Weightd) -> None:
    weightd.write_config("nonsense")
    assert weightd.manager.try_run(["systemctl", "start", weightd.service]).returncode != 0
    time.sleep(0.3)  # more than RestartSec
    shown = weightd.manager.shows(weightd.service, "Result", "ExecMainStatus", "NRestarts", "ActiveState")
    assert shown == {"Result": "exit-code", "ExecMainStatus": BAD_CONFIG, "NRestarts": "0", "ActiveState": "failed"}
    assert "weightd.toml" in weightd.journal()


def test_connection_starts_service(weightd: Weightd) -> None:
    assert weightd.show("ActiveState") == "inactive"
    report = ended(weightd.client("ask", materials.QUESTIONS))
    assert (report.get("wrong"), weightd.show("ActiveState")) == (0, "active"), f"{report}\n{weightd.journal()}"


def test_tcp_listener_of_socket_unit(weightd: Weightd) -> None:
    example = "weightd.socket.d/tcp.conf"
    manager = weightd.manager
    manager.write(f"{INSTALLED}/{example}", (DIRECTORY / "examples" / example).read_text("utf-8"))
    manager.systemctl("daemon-reload")
    listeners: dict[str, dict[str, object]] = {"listeners.local": {"address": f"ipc://{weightd.address}"}}
    listeners["listeners.lan"] = {"address": TCP, "insecure": True}
    weightd.write_config("".join(table(name, keys) for name, keys in {**listeners, "models.mlp": MLP}.items()))
    try:
        manager.systemctl("restart", weightd.socket)
        for verb in ("start", "restart"):
            manager.systemctl(verb, weightd.service)
            weightd.ask()
            done = manager.try_run(["weightctl", "--socket", TCP, "health"], STRANGER_UID, STRANGER_UID)
            assert done.returncode == 0, done.stderr
    finally:
        manager.run(["rm", "-r", f"{INSTALLED}/weightd.socket.d"])
        manager.run(["systemctl", "stop", weightd.service, weightd.socket])
        manager.systemctl("daemon-reload")


def test_additional_socket_for_another_group(weightd: Weightd) -> None:
    manager, path, unit = weightd.manager, "/run/weightd/lab.sock", "weightd-lab.socket"
    lines = (DIRECTORY / weightd.socket).read_text("utf-8").splitlines()
    kept = [each for each in lines if not each.startswith(("ListenStream=", "SocketGroup="))]
    more = ["[Socket]", f"ListenStream={path}", "SocketGroup=users", f"Service={weightd.service}"]
    manager.write(f"{INSTALLED}/{unit}", "\n".join([*kept, *more, ""]))
    tables = {"listeners.local": {"address": f"ipc://{weightd.address}"}, "listeners.lab": {"address": f"ipc://{path}"}}
    models = {"models.mlp": MLP}
    weightd.write_config("".join(table(name, keys) for name, keys in {**tables, **models}.items()))
    manager.systemctl("daemon-reload")
    try:
        manager.systemctl("start", unit)
        weightd.start()
        for address in (weightd.address, f"ipc://{weightd.address}", f"ipc://{path}"):
            manager.run(["weightctl", "--socket", address, "health"])
        assert manager.path(path).stat().st_gid == int(manager.run(["getent", "group", "users"]).split(":")[2])
    finally:
        manager.run(["systemctl", "stop", weightd.service, unit])
        manager.run(["rm", f"{INSTALLED}/{unit}"])
        manager.systemctl("daemon-reload")


def test_mindspore_lite_in_service(weightd: Weightd) -> None:
    if not weightd.manager.path(materials.MINDIR).exists():
        pytest.skip("no working .venv-mslite: `make test` creates it")
    mindir = {"path": materials.MINDIR, "python": weightd.manager.mslite_python, "workers": 2, "required": True}
    weightd.configure({"mlp": mindir})
    weightd.start()
    weightd.ask(materials.MINDIR_QUESTIONS)
    # mincore(2) shows how much of the page store is in memory.
    assert weightd.generation()["copy_bytes"] >= materials.LAYERS * materials.WIDTH**2 * 4 * 0.9
