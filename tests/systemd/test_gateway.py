"""weightd-gateway.service: socket activation, callers identified by uid, access control, reload and stop."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Iterator

import pytest

from testkit.waiting import until

from .manager import Manager
from .service import CLIENT_UID, STRANGER_UID, Weightd

pytestmark = [pytest.mark.e2e, pytest.mark.long]

SERVICE = "weightd-gateway.service"
SOCKET = "weightd-gateway.socket"
UNIX = "/run/weightd-gateway/http.sock"
CONFIG = "/etc/weightd/gateway.toml"
USERS = f"[gateway]\n[users]\n{CLIENT_UID} = '-'\n"

# Sends an HTTP request over TCP or a Unix socket, and prints status and content of the answer.
_ASK = """
import http.client, json, socket, sys
class Unix(http.client.HTTPConnection):
    def connect(self):
        self.sock = socket.socket(socket.AF_UNIX)
        self.sock.connect(sys.argv[2])
connection = (Unix if sys.argv[2] else http.client.HTTPConnection)("127.0.0.1:8000", timeout=60)
connection.request("GET", sys.argv[1])
response = connection.getresponse()
print(json.dumps([response.status, json.loads(response.read())]))
"""


@pytest.fixture
def gateway(weightd: Weightd) -> Iterator[Manager]:
    """The gateway's sockets are open; one user of this host may send requests over the Unix socket."""
    manager = weightd.manager
    manager.write(CONFIG, USERS)
    manager.systemctl("start", SOCKET)
    yield manager
    manager.try_run(["systemctl", "stop", SERVICE, SOCKET])
    manager.try_run(["systemctl", "reset-failed", SERVICE, SOCKET])


def ask(weightd: Weightd, path: str, unix: str = "", uid: int = CLIENT_UID) -> tuple[int, dict[str, object]]:
    command = [weightd.manager.python, "-c", _ASK, path, unix]
    process = weightd.manager.popen(command, uid, uid, [weightd.clients_gid] if uid == CLIENT_UID else [])
    out, err = process.communicate(timeout=90)
    assert process.returncode == 0, f"{err}\n{weightd.manager.journal(SERVICE)}"
    status, content = json.loads(out)
    return status, content


def test_connection_starts_gateway_and_identifies_user(weightd: Weightd, gateway: Manager) -> None:
    weightd.start()
    assert ask(weightd, "/v2", UNIX) == (200, {**ask(weightd, "/v2", UNIX)[1], "name": "weightd"})
    assert ask(weightd, "/v2")[0] == 401
    assert ask(weightd, "/v2/health/ready") == (200, {"ready": True})
    assert gateway.show(SERVICE, "ActiveState") == "active"
    # The gateway connects to weightd as user weightd-gateway.
    pid = int(gateway.show(SERVICE, "MainPID"))
    assert gateway.run(["ps", "-o", "user:20=", "-p", str(pid)]).strip() == "weightd-gateway"


def test_other_users_may_not_connect_to_gateway(weightd: Weightd, gateway: Manager) -> None:
    command = [gateway.python, "-c", f"import socket; socket.socket(socket.AF_UNIX).connect({UNIX!r})"]
    done = gateway.try_run(command, STRANGER_UID, STRANGER_UID)
    assert "PermissionError" in done.stderr


def test_reload_of_users_and_clean_stop(weightd: Weightd, gateway: Manager) -> None:
    weightd.start()
    assert ask(weightd, "/v2", UNIX)[0] == 200
    gateway.write(CONFIG, "[gateway]\n[users]\n0 = '-'\n")
    gateway.systemctl("reload", SERVICE)
    until(lambda: ask(weightd, "/v2", UNIX)[0] == 401, "the gateway rejects the user")
    # The gateway keeps running while weightd is stopped, and serves with the next daemon.
    weightd.stop()
    gateway.write(CONFIG, USERS)
    gateway.systemctl("reload", SERVICE)
    until(lambda: ask(weightd, "/v2/health/ready", UNIX)[0] in (503, 200), "the gateway answers")
    gateway.systemctl("stop", SERVICE)
    shown = gateway.shows(SERVICE, "Result", "ExecMainStatus", "NRestarts")
    assert shown == {"Result": "success", "ExecMainStatus": "0", "NRestarts": "0"}


def test_invalid_gateway_file_is_not_retried(weightd: Weightd, gateway: Manager) -> None:
    gateway.write(CONFIG, "[gateway]\nhtpp = []\n")
    done: subprocess.CompletedProcess[str] = gateway.try_run(["systemctl", "start", SERVICE])
    assert done.returncode != 0
    shown = gateway.shows(SERVICE, "ExecMainStatus", "NRestarts")
    assert shown == {"ExecMainStatus": "78", "NRestarts": "0"}
    assert "gateway.htpp: unknown key; did you mean http?" in gateway.journal(SERVICE)
