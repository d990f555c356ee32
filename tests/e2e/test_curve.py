"""CURVE over TCP: a client's key identifies its tenant, and a reload can withdraw keys."""

from __future__ import annotations

import os
import random
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from testkit import loads, models, users
from testkit.loads import OK
from testkit.service import Service
from testkit.users import ALICE, BOB, User
from weightd import Client, InvalidArgument, NotFound, PermissionDenied, RequestError, Unauthenticated

from .support import ONE_ENGINE, Arrays

pytestmark = [pytest.mark.e2e, ONE_ENGINE]

NAMES = ("lan", "ann", "gateway", "eve")

SOME: Arrays = {"a": np.array([3, 5], np.int64)}

LIMIT_S = 10.0

HOSTILE = 6_000

NULL_GREETING = b"\xff\0\0\0\0\0\0\0\1\x7f\3\0NULL" + bytes(48)
CURVE_GREETING = NULL_GREETING.replace(b"NULL\0", b"CURVE")


def weightctl(*arguments: object) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "weightctl", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@pytest.fixture(scope="module")
def keys(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("keys")
    for name in NAMES:
        assert weightctl("keygen", directory / name).returncode == 0
    return directory


def tenants(keys: Path) -> dict[str, dict[str, object]]:
    return {
        "ann": {"keys": [str(keys / "ann.pub")], "models": ["negated"]},
        "ben": {"uids": [BOB], "models": ["other"]},
        "gateway": {"keys": [str(keys / "gateway.pub")], "acts_for": ["ben"], "may": ["infer", "status"]},
    }


@pytest.fixture(scope="module")
def address() -> str:
    with socket.create_server(("127.0.0.1", 0)) as probe:
        return f"tcp://127.0.0.1:{probe.getsockname()[1]}"


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory, keys: Path, address: str) -> Iterator[Service]:
    path = models.negated(tmp_path_factory.mktemp("models") / "negated.onnx")
    tables = {name: {"path": path, "workers": 1} for name in ("negated", "other")}
    lan = {"address": address, "security": "curve", "key": str(keys / "lan.key")}
    gid = users.CLIENTS_GID if os.getuid() == 0 else None
    with Service(tables, tenants=tenants(keys), listeners={"lan": lan}, gid=gid) as service:
        service.ready()
        yield service


def client(address: str, keys: Path, name: str, server: str = "lan", tenant: str | None = None) -> Client:
    key, server_key = keys / f"{name}.key", keys / f"{server}.pub"
    return Client(address, timeout=LIMIT_S, tenant=tenant, key=key, server_key=server_key)


@pytest.mark.usefixtures("service")
def test_key_identifies_tenant(address: str, keys: Path) -> None:
    with client(address, keys, "ann") as ann:
        assert ann.infer("negated", SOME)["y"].tolist() == [-3, -5]
        assert ann.server().models == ("negated",)
        with pytest.raises(NotFound):
            ann.infer("other", SOME)
        with pytest.raises(PermissionDenied):
            ann.reload()
    files = ("--key", keys / "gateway.key", "--server-key", keys / "lan.pub")
    done = weightctl("--socket", address, *files, "status")
    assert done.returncode == 0, done.stderr
    assert "ann: weight 1" in done.stdout


@pytest.mark.usefixtures("service")
def test_rejects_clients_with_unknown_or_missing_key(address: str, keys: Path) -> None:
    for name, server in (("eve", "lan"), ("ann", "eve")):
        with pytest.raises(Unauthenticated, match=f"handshake with {address} failed: no tenant"):
            client(address, keys, name, server)
    with pytest.raises(RequestError):
        Client(address, timeout=1.0)
    with pytest.raises(InvalidArgument, match="both key files of CURVE"):
        Client(address, key=keys / "ann.key")
    with pytest.raises(InvalidArgument, match="expected no keys for unix:///"):
        client("unix:///run/none", keys, "ann")
    done = weightctl("--socket", address, "--key", keys / "eve.key", "--server-key", keys / "lan.pub", "status")
    assert done.returncode != 0
    assert "UNAUTHENTICATED: handshake with " in done.stderr


@pytest.mark.usefixtures("service")
def test_gateway_acts_only_for_its_tenants(address: str, keys: Path) -> None:
    with client(address, keys, "gateway", tenant="ben") as gateway:
        assert gateway.infer("other", SOME)["y"].tolist() == [-3, -5]
        # The gateway sees no more than the tenant for which it acts.
        with pytest.raises(NotFound):
            gateway.infer("negated", SOME)
        accounts = {each.name: each.accounts for each in gateway.status().tenants}
        assert {each.model: each.served for each in accounts["ben"] if each.served} == {"other": 1}
    texts: set[str] = set()
    for name in ("ann", "none"):
        with client(address, keys, "gateway", tenant=name) as gateway, pytest.raises(PermissionDenied) as caught:
            gateway.infer("negated", SOME)
        texts.add(str(caught.value).replace(name, "NAME"))
    assert len(texts) == 1


def test_rejects_next_message_of_key_withdrawn_by_reload(service: Service, address: str, keys: Path) -> None:
    with client(address, keys, "ann") as ann:
        ann.infer("negated", SOME)
        tables = tenants(keys)
        tables["ann"]["keys"] = [str(keys / "eve.pub")]
        service.reload(tenants=tables)
        with pytest.raises(Unauthenticated, match="belongs to no tenant"):
            ann.infer("negated", SOME)
    with pytest.raises(Unauthenticated):
        client(address, keys, "ann")
    with client(address, keys, "eve") as eve:
        assert eve.infer("negated", SOME)["y"].tolist() == [-3, -5]
    service.reload(tenants=tenants(keys))


def test_keyless_connections_harm_no_other_listener(service: Service, address: str, keys: Path) -> None:
    users.need_other_users()
    rng = random.Random(16)
    curve = CURVE_GREETING + b"\x04\xc8\x05HELLO\1\0" + rng.randbytes(193)
    says = (b"", b"\xff", CURVE_GREETING, curve, NULL_GREETING, rng.randbytes(4096), b"GET / HTTP/1.1\r\n\r\n")
    _, host, port = address.replace("//", "").split(":")
    question = ("other", [{"a": np.array([number], np.int64)} for number in range(100)])
    answers = [{"y": np.array([-number], np.int64)} for number in range(100)]
    with User(BOB) as ben, User(ALICE) as eve:
        ben.connect(service.address)
        served, refused = counts_of_ben(service)
        ben.begin(loads.ask_until_stopped, *question, answers)
        ben.wait_for_report()
        eve.begin(loads.hold_connections, [(host, int(port))], HOSTILE, says)
        eve.wait_for_report()
        asked = ben.end()
        assert asked.outcomes.keys() == {OK}
        assert counts_of_ben(service) == (served + asked.outcomes[OK], refused)
        opened = eve.end()
        assert opened["connected"] > HOSTILE // 2, opened
    with client(address, keys, "ann") as ann:
        assert ann.infer("negated", SOME)["y"].tolist() == [-3, -5]


def counts_of_ben(service: Service) -> tuple[int, int]:
    """Return the numbers of served and failed requests of the tenant "ben"."""
    (ben,) = (each for each in service.status().tenants if each.name == "ben")
    return sum(each.served for each in ben.accounts), sum(sum(each.failed.values()) for each in ben.accounts)


def test_secret_keys_are_not_in_log_or_process_arguments(service: Service, keys: Path) -> None:
    secrets = [(keys / f"{name}.key").read_text().split()[-1] for name in NAMES]
    shown = service.log
    for pid in service.pids():
        shown += Path(f"/proc/{pid}/cmdline").read_text() + Path(f"/proc/{pid}/environ").read_text()
    assert not [each for each in secrets if each in shown]
