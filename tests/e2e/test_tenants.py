"""Tenants that are separate users of the host, each in a separate process: permissions, quotas and accounting."""

from __future__ import annotations

import contextlib
import os
import signal
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from testkit import loads, models, users
from testkit.loads import OK
from testkit.service import Service
from testkit.users import ALICE, BOB, CAROL, User
from testkit.waiting import until
from weightd import FailedPrecondition, NotFound, PermissionDenied, ResourceExhausted, Unauthenticated
from weightd_protocol.errors import RemoteProtocolError
from weightd_protocol.messages.accounts import AccountStatus

from .support import ONE_ENGINE, Arrays, ready_workers

pytestmark = [pytest.mark.e2e, ONE_ENGINE]

Tables = Mapping[str, Mapping[str, object]]

ANN: Mapping[str, object] = {"uids": [ALICE], "models": ["slow"]}
BEN: Mapping[str, object] = {"groups": [BOB], "may": ["infer", "status", "operate"]}
TENANTS: Tables = {"ann": ANN, "ben": BEN}

# Inputs of the model "slow", which counts up to the largest value at about a million per second.
SOME: Arrays = {"n": np.array([3, 5], np.int64)}
LONG: Arrays = {"n": np.array([200_000], np.int64)}
LONGER: Arrays = {"n": np.array([600_000], np.int64)}

NONE = AccountStatus("slow", 0, 0, 0, 0.0, 0.0, 0, 0, 0, 0, {})


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    users.need_other_users()
    directory = tmp_path_factory.mktemp("tenants")
    tables = {
        "slow": {"path": models.patient(directory / "slow.onnx"), "workers": 1},
        "fatal": {"path": models.negated(directory / "fatal.onnx"), "workers": 2},
    }
    # Requests take long while the worker is stopped; this must not count against their tenant.
    daemon = {"max_user_connections": 64, "max_user_connection_rate": 64.0, "max_batch_seconds": 60.0}
    with Service(tables, daemon, tenants=TENANTS, gid=users.CLIENTS_GID) as service:
        service.ready()
        yield service


@pytest.fixture(autouse=True)
def tables(service: Service) -> None:
    service.reload(tenants=TENANTS)


@pytest.fixture(scope="module")
def user_processes(service: Service) -> Iterator[Mapping[int, User]]:
    with User(ALICE) as ann, User(BOB) as ben, User(CAROL) as stranger:
        yield {ALICE: ann, BOB: ben, CAROL: stranger}


@pytest.fixture
def ann(service: Service, user_processes: Mapping[int, User]) -> User:
    user_processes[ALICE].connect(service.address)
    return user_processes[ALICE]


@pytest.fixture
def ben(service: Service, user_processes: Mapping[int, User]) -> User:
    user_processes[BOB].connect(service.address)
    return user_processes[BOB]


@pytest.fixture
def open_directory() -> Iterator[Path]:
    """A directory that every user may search, unlike pytest's directories."""
    with tempfile.TemporaryDirectory(prefix="weightd-", dir="/tmp") as directory:
        Path(directory).chmod(0o711)
        yield Path(directory)


def bounded(service: Service, **bounds: object) -> None:
    service.reload(tenants={**TENANTS, "ann": {**ANN, **bounds}})


@contextlib.contextmanager
def stopped_worker(service: Service, user: User) -> Iterator[None]:
    """Stop the worker of "slow" during the block, so that no request ends however long the block takes.

    The worker's last request took so long that the daemon sends it one request at a time.
    """
    user.ask("infer", "slow", LONGER)
    [worker] = ready_workers(service, "slow")
    os.kill(worker.pid, signal.SIGSTOP)
    try:
        yield
    finally:
        os.kill(worker.pid, signal.SIGCONT)


def codes(outcomes: Sequence[str]) -> list[str]:
    return [each.partition(" ")[0] for each in outcomes]


# --- rights ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("address", ["unix://{}", "ipc://{}"])
def test_error_for_user_without_tenant_has_uid(
    service: Service, user_processes: Mapping[int, User], address: str
) -> None:
    user_processes[CAROL].connect(address.format(service.address))
    with pytest.raises(Unauthenticated, match=rf"uid {CAROL} belongs to no tenant: .*\[tenants.NAME\]"):
        user_processes[CAROL].ask("infer", "slow", SOME)


@pytest.mark.parametrize("address", ["unix://{}", "ipc://{}"])
def test_tenant_sees_only_its_models(service: Service, user_processes: Mapping[int, User], address: str) -> None:
    ann, ben = user_processes[ALICE], user_processes[BOB]
    for each in (ann, ben):
        each.connect(address.format(service.address))
        assert each.ask("infer", "slow", SOME)["y"].tolist() == [3, 5]
    assert ann.ask("server").models == ("slow",)
    assert [each.name for each in ann.ask("status").models] == ["slow"]
    assert [each.name for each in ann.ask("status").tenants] == ["ann"]
    for method, arguments in (("infer", (SOME,)), ("metadata", ()), ("ready", ())):
        texts: list[str] = []
        for name in ("fatal", "fetal"):
            with pytest.raises(NotFound) as caught:
                ann.ask(method, name, *arguments)
            texts.append(str(caught.value).replace(name, ""))
        assert texts[0] == texts[1]
    assert ben.ask("server").models == ("slow", "fatal")
    assert {"ann", "ben"} <= {each.name for each in ben.ask("status").tenants}


def test_permissions_to_operate_and_infer(service: Service, ann: User, ben: User) -> None:
    with pytest.raises(PermissionDenied, match='a tenant that may "operate"'):
        ann.ask("reload")
    assert ben.ask("reload").changed == ()
    service.reload(tenants={**TENANTS, "ann": {**ANN, "may": ["status"]}})
    message = 'tenant ann may not send inference requests: "infer" is not in its `may`'
    with pytest.raises(PermissionDenied, match=message):
        ann.ask("infer", "slow", SOME)
    assert len(ann.ask("status").tenants) > 1


def test_reload_withdraws_permissions_at_once(service: Service, ann: User, ben: User) -> None:
    with stopped_worker(service, ann):
        ann.begin(loads.hold, "slow", [LONG] * 3)
        ann.wait_for_report()
        service.reload(tenants={"ben": BEN})
    running, *waiting = ann.end()
    assert running == OK
    assert codes(waiting) == ["PERMISSION_DENIED"] * 2
    with pytest.raises(Unauthenticated):
        ann.ask("infer", "slow", SOME)
    assert ben.ask("infer", "slow", SOME)["y"].tolist() == [3, 5]
    service.reload(tenants=TENANTS)
    assert ann.ask("infer", "slow", SOME)["y"].tolist() == [3, 5]


# --- quotas ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("bound", "most", "asked", "refused"),
    [
        ("max_in_flight", 2, ([LONG] * 4, loads.NOTHING), 2),
        ("max_queue", 1, ([LONG] * 4, loads.NOTHING), 2),
        ("max_queue_bytes", 8, ([LONG] * 4, loads.NOTHING), 2),
        ("max_rows", 1, ([SOME], loads.NOTHING), 1),
        ("priority_max", 2, ([LONG], {"priority": 1}), 1),
    ],
)
@pytest.mark.usefixtures("ann", "ben")
def test_quota_rejects_only_requests_of_its_tenant(
    service: Service, user_processes: Mapping[int, User], bound: str, most: int, asked: tuple[Any, Any], refused: int
) -> None:
    ann, ben = user_processes[ALICE], user_processes[BOB]
    bounded(service, **{bound: most})
    with stopped_worker(service, ann):
        ann.begin(loads.hold, "slow", *asked)
        ann.wait_for_report()
    outcomes = ann.end()
    assert codes(outcomes) == [OK] * (len(outcomes) - refused) + ["RESOURCE_EXHAUSTED"] * refused
    assert all(f"{bound} of this tenant is {most}" in each for each in outcomes[-refused:])
    assert codes(ben.do(loads.at_once, "slow", [SOME] * 4)) == [OK] * 4


def test_rate_limit_counts_all_messages(service: Service, ann: User, ben: User) -> None:
    bounded(service, max_rate=3)
    for method in ("server", "status", "server"):
        ann.ask(method)
    with pytest.raises(ResourceExhausted, match="max_rate of this tenant is 3") as caught:
        ann.ask("status")
    assert caught.value.retry_after is not None
    assert 0 < caught.value.retry_after <= 1 / 3
    for _ in range(20):
        ben.ask("server")


@pytest.mark.parametrize(
    ("attack", "arguments", "says"),
    [
        (loads.reconnect, (), f"new connection of uid {CAROL} refused"),
        (loads.pass_unclosable, (), "expected a memfd, got a descriptor of something else"),
        (loads.hoard, ("slow", 400), f"new connection of uid {CAROL} refused"),
    ],
    ids=["connections", "descriptors", "unread answers"],
)
def test_attack_on_unix_socket_harms_no_tenant(
    service: Service, user_processes: Mapping[int, User], ben: User, attack: Any, arguments: Sequence[Any], says: str
) -> None:
    stranger = user_processes[CAROL]
    stranger.begin(attack, f"{service.address}.unix", *arguments)
    stranger.wait_for_report()
    ben.connect(f"unix://{service.address}", timeout=30.0)
    asked = ben.do(loads.ask, "slow", [SOME], [{"y": SOME["n"]}], 0.5, 20)
    ended = stranger.end()
    assert asked.outcomes == {OK: sum(asked.outcomes.values())}
    assert sum(ended.values()) > 50
    # The daemon logs one line per user and kind every ten seconds.
    until(lambda: says in service.log, "the log has the rejection")


def test_excess_connection_is_closed_with_error(service: Service, ann: User, ben: User) -> None:
    before = other_refusals(ben, "ann").get("max_connections", 0)
    bounded(service, max_connections=1)
    assert ann.ask("infer", "slow", SOME)["y"].tolist() == [3, 5]
    with pytest.raises(RemoteProtocolError, match="closed this connection: max_connections of this tenant is 1"):
        ann.do(loads.with_another, "slow", SOME)
    assert ben.do(loads.with_another, "slow", SOME) == [3, 5]
    # After the rejection over the Unix socket, the client may have tried ZeroMQ as well.
    assert other_refusals(ben, "ann")["max_connections"] > before


def test_answers_without_shared_memory_beyond_quota(service: Service, ann: User, ben: User) -> None:
    bounded(service, max_shared_bytes=100_000)
    large: Arrays = {"n": np.ones(50_000, np.int64)}
    refused = {name: other_refusals(ben, name).get("max_shared_bytes", 0) for name in ("ann", "ben")}
    for each in (ann, ben):
        assert each.ask("infer", "slow", large)["y"].sum() == 50_000
    after = {name: other_refusals(ben, name).get("max_shared_bytes", 0) for name in ("ann", "ben")}
    assert after["ann"] > refused["ann"]
    assert after["ben"] == refused["ben"]


# --- accounts -------------------------------------------------------------------------------------------------------


def other_refusals(user: User, name: str) -> Mapping[str, int]:
    """Return the rejected messages of a tenant that are not requests to a model, as the status shows them to a user."""
    [tenant] = [each for each in user.ask("status").tenants if each.name == name]
    return next((each for each in tenant.accounts if not each.model), NONE).failed


def account(user: User, name: str) -> AccountStatus:
    """Return the account of a tenant for the model "slow", as the status shows it to a user."""
    [tenant] = [each for each in user.ask("status").tenants if each.name == name]
    return next((each for each in tenant.accounts if each.model == "slow"), NONE)


def test_accounts_count_requests_and_rejections(service: Service, ann: User, ben: User) -> None:
    bounded(service, max_rows=1)
    before = {name: account(ben, name) for name in ("ann", "ben")}
    assert codes(ann.do(loads.at_once, "slow", [LONG, SOME, SOME], loads.NOTHING)).count(OK) == 1
    assert codes(ben.do(loads.at_once, "slow", [SOME] * 4)) == [OK] * 4
    after = {name: account(ben, name) for name in ("ann", "ben")}
    assert {name: each.requests - before[name].requests for name, each in after.items()} == {"ann": 3, "ben": 4}
    assert {name: each.served - before[name].served for name, each in after.items()} == {"ann": 1, "ben": 4}
    assert after["ann"].failed["max_rows"] - before["ann"].failed.get("max_rows", 0) == 2
    assert after["ann"].slot_seconds > before["ann"].slot_seconds
    assert after["ben"].bytes_in - before["ben"].bytes_in == 4 * SOME["n"].nbytes
    assert account(ann, "ann") == after["ann"]


# --- fault isolation ------------------------------------------------------------------------------------------------


def test_crashing_requests_harm_no_other_tenant(service: Service, ann: User, ben: User) -> None:
    bounded(service, models=["*"])
    inputs = [{"a": np.array([2, 3, number], np.int64)} for number in range(4)]
    answers = [{"y": -each["a"]} for each in inputs]
    ann.begin(loads.poison, "fatal", [{"a": np.array([-(2**63)], np.int64)}], 4)
    ann.wait_for_report()
    asked = ben.do(loads.ask, "fatal", inputs, answers, 1.0)
    ann.end()
    assert asked.outcomes.keys() == {OK}
    assert asked.outcomes[OK] >= 3


def test_long_requests_leave_worker_to_other_tenant(user_processes: Mapping[int, User], tmp_path: Path) -> None:
    ann, ben = user_processes[ALICE], user_processes[BOB]
    tables = {"slow": {"path": models.patient(tmp_path / "slow.onnx"), "workers": 2}}
    with Service(tables, tenants=TENANTS, gid=users.CLIENTS_GID) as service:
        service.ready()
        ann.connect(f"ipc://{service.address}")
        ben.connect(f"unix://{service.address}")
        one, second = {"n": np.array([1], np.int64)}, {"n": np.array([1_000_000], np.int64)}
        ben.ask("infer", "slow", one)
        ann.begin(loads.keep, "slow", [second], 4)
        # One of these requests has run; four are queued or running.
        ann.wait_for_report()
        took = ben.do(loads.time_of, "slow", one, 10)
        ann.end()
    # Without a worker reserved for ben, some of these requests would take more than a second.
    assert sum(took) < 0.5, took


# --- files ----------------------------------------------------------------------------------------------------------

# Keep this test last: after a pause without requests of other tenants, a worker gets requests ahead of time, which
# would change the counts in the quota tests.


def test_update_checks_access_to_model_file(service: Service, ben: User, open_directory: Path) -> None:
    private, given = open_directory / "private", open_directory / "given"
    for each in (private, given):
        each.mkdir()
        models.negated(each / "m.onnx").chmod(0o600)
    for path in (private / "m.onnx", given / "m.onnx"):
        with pytest.raises(
            FailedPrecondition, match=rf"m\.onnx: uid {BOB}, which names the file .* may not read m\.onnx"
        ):
            ben.ask("update", "fatal", str(path))
    # The error does not reveal whether files exist in another user's directory.
    private.chmod(0o700)
    texts: list[str] = []
    for name in ("m.onnx", "none.onnx"):
        with pytest.raises(FailedPrecondition) as caught:
            ben.ask("update", "fatal", str(private / name))
        texts.append(str(caught.value).replace(name, ""))
    assert texts[0] == texts[1]
    service.reload(tenants={**TENANTS, "ben": {**BEN, "model_dirs": [str(given)]}})
    assert ben.ask("update", "fatal", str(given / "m.onnx")).path == str(given / "m.onnx")
    with pytest.raises(FailedPrecondition, match="may not enter private"):
        ben.ask("update", "fatal", str(private / "m.onnx"))
    readable = models.negated(open_directory / "readable.onnx")
    readable.chmod(0o644)
    assert ben.ask("update", "fatal", str(readable)).path == str(readable)
    assert ben.ask("update", "fatal", rollback=True).path == str(given / "m.onnx")
    # Users who may see events see the entry of the audit log.
    text = "\n".join(each.text for each in ben.ask("events").events if each.text.startswith("audit "))
    who = f'user="uid {BOB}" tenant="ben" model="fatal"'
    assert f'audit action="update" result="failed" {who} path="{private}/m.onnx" detail="not updated: ' in text
    assert f'audit action="load" result="ok" user="uid {BOB}" model="fatal" path="{given}/m.onnx" sha256="' in text
    assert f'audit action="update" result="ok" {who} path="{given}/m.onnx"' in text
    assert f'audit action="rollback" result="ok" {who}' in text
    assert 'audit action="reload" result="ok" user="uid 0" tenant="(operators)"' in text
