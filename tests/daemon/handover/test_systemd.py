"""The service manager's protocol, over real datagram sockets, and in a process of its own where descriptors pass."""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from weightd_common.service_manager import CLIENTS, ServiceManager
from weightd_daemon.config.load import Config, parse
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.config_file import CONFIG
from weightd_daemon.handover import state
from weightd_daemon.handover.shim_launcher import SHIM
from weightd_daemon.handover.systemd import ManagedService, SystemdNotifier, listen
from weightd_daemon.models.model import ServedModel
from weightd_daemon.platform.directories import PathInUse
from weightd_daemon.platform.listen import listen_addresses, listen_on
from weightd_daemon.shutdown import Shutdown, ShutdownEvent

# Puts a pipe where a service manager puts descriptors, and tells what becomes of it, for each row of variables.
_SERVICE = """
import json, os, sys
from weightd_common.service_manager import ServiceManager
read, write = os.pipe()
free = os.dup2(read, 100), os.dup2(write, 101)
for row in json.loads(sys.argv[1]):
    os.dup2(free[0], 3), os.dup2(free[1], 4)
    os.environ.update({**row, "WATCHDOG_USEC": "1", "WATCHDOG_PID": "1", "NOTIFY_SOCKET": "/notify"})
    if os.environ.get("LISTEN_PID") == "own":
        os.environ["LISTEN_PID"] = str(os.getpid())
    inherited = ServiceManager(os.environ, ('shim', 'config')).inherited
    left = [name for name in os.environ if name.startswith(("LISTEN_", "WATCHDOG_", "NOTIFY_"))]
    print(json.dumps([inherited, [os.get_inheritable(each) for each in (3, 4)], left]))
"""

_LISTENS = """
import socket
one, other = socket.socket(socket.AF_UNIX), socket.socketpair()[0].detach()
one.bind("")
one.listen()
read, write = one.fileno(), other
"""


@pytest.fixture(params=["path", "abstract"])
def listener(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as made:
        made.bind(str(tmp_path / "notify") if request.param == "path" else f"\0weightd-test-{os.getpid()}")
        made.settimeout(20.0)
        yield made


@pytest.fixture
def manager(listener: socket.socket) -> ServiceManager:
    name = listener.getsockname()
    return ServiceManager({"NOTIFY_SOCKET": name if isinstance(name, str) else f"@{name[1:].decode()}"})


def received(listener: socket.socket) -> list[str]:
    return listener.recv(65536).decode().split("\n")


# --- telling --------------------------------------------------------------------------------------------------------


def test_where_nobody_is_nothing_happens() -> None:
    manager = ServiceManager({})
    assert (manager.is_present, manager.watchdog_s, manager.inherited) == (False, None, {})
    manager.notify("READY=1")
    manager.notify_reloading()
    manager.store_descriptor(SHIM, 0)
    manager.remove_descriptor(SHIM)
    assert not ServiceManager({"NOTIFY_SOCKET": ""}).is_present


def test_each_time_it_is_told_in_one_datagram(manager: ServiceManager, listener: socket.socket) -> None:
    assert manager.is_present
    manager.notify("READY=1", "STATUS=two models")
    manager.remove_descriptor(SHIM)
    assert received(listener) == ["READY=1", "STATUS=two models"]
    assert received(listener) == ["FDSTOREREMOVE=1", "FDNAME=shim"]


def test_a_reload_tells_when_it_began(manager: ServiceManager, listener: socket.socket) -> None:
    before = time.monotonic_ns() // 1000
    manager.notify_reloading()
    first, second = received(listener)
    name, _, microseconds = second.partition("=")
    assert (first, name) == ("RELOADING=1", "MONOTONIC_USEC")
    assert before <= int(microseconds) <= time.monotonic_ns() // 1000


def test_a_descriptor_is_kept_in_place_of_any_other_of_its_name(
    manager: ServiceManager, listener: socket.socket
) -> None:
    ours, theirs = socket.socketpair()
    with ours, theirs:
        manager.store_descriptor(SHIM, ours.fileno())
        assert received(listener) == ["FDSTOREREMOVE=1", "FDNAME=shim"]
        message, descriptors, _, _ = socket.recv_fds(listener, 65536, 4)
        assert message.decode().split("\n") == ["FDSTORE=1", "FDNAME=shim"]
        [descriptor] = descriptors
        assert os.path.sameopenfile(descriptor, ours.fileno())
        os.close(descriptor)
        os.fstat(ours.fileno())


def test_a_socket_that_is_gone_is_no_concern(tmp_path: Path) -> None:
    manager = ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "notify")})
    manager.notify("READY=1")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
    manager.notify("READY=1")
    manager.store_descriptor(SHIM, 0)
    ServiceManager({"NOTIFY_SOCKET": "/x" * 100}).notify("READY=1")


def test_a_socket_that_is_full_keeps_nobody(
    manager: ServiceManager, listener: socket.socket, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("weightd_common.service_manager.SEND_TIMEOUT_S", 0.05)
    sent = 1000
    for number in range(sent):
        manager.notify(f"STATUS={number} {'x' * 1000}")
    manager.notify("READY=1")
    manager.store_descriptor(SHIM, listener.fileno())
    assert "does not hold shim; the next daemon cannot take it over" in caplog.text
    listener.setblocking(False)
    count = 0
    with contextlib.suppress(BlockingIOError):
        while received(listener):
            count += 1
    assert 0 < count < sent
    # What it could not be told is told with the next notification, as it is by then.
    manager.notify("WATCHDOG=1")
    assert received(listener) == [f"STATUS={sent - 1} {'x' * 1000}", "READY=1", "WATCHDOG=1"]
    manager.notify()
    with pytest.raises(BlockingIOError):
        received(listener)


# --- what it wants --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("given", "watchdog"),
    [
        ({"WATCHDOG_USEC": "30000000"}, 30.0),
        ({"WATCHDOG_USEC": "1500000", "WATCHDOG_PID": str(os.getpid())}, 1.5),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": "1"}, None),
        ({"WATCHDOG_USEC": "30000000", "WATCHDOG_PID": ""}, None),
        ({"WATCHDOG_USEC": "0"}, None),
        ({"WATCHDOG_USEC": "-1"}, None),
        ({"WATCHDOG_USEC": "soon"}, None),
        ({}, None),
    ],
)
def test_a_sign_of_life_is_expected_of_this_process_alone(given: dict[str, str], watchdog: float | None) -> None:
    assert ServiceManager(given).watchdog_s == watchdog


# --- what it passes -------------------------------------------------------------------------------------------------


def test_what_was_passed_is_told_by_its_name_and_what_was_not_is_left_alone() -> None:
    names, own = "LISTEN_FDNAMES", {"LISTEN_PID": "own", "LISTEN_FDS": "2"}
    alone: tuple[dict[str, list[int]], list[bool]] = ({}, [True, True])
    table = [
        ({**own, names: "weightd.socket:shim"}, ({CLIENTS: [3], SHIM: [4]}, [False, False])),
        # What has no known name is for clients.
        (own, ({CLIENTS: [3, 4]}, [False, False])),
        ({**own, names: ""}, ({CLIENTS: [3, 4]}, [False, False])),
        ({**own, names: "clients"}, ({CLIENTS: [3, 4]}, [False, False])),
        ({**own, names: "unknown:stored"}, ({CLIENTS: [3, 4]}, [False, False])),
        ({**own, "LISTEN_FDS": "1", names: "shim:x"}, ({SHIM: [3]}, [False, True])),
        # Passed to another process, or not at all.
        ({"LISTEN_PID": "1", "LISTEN_FDS": "2"}, alone),
        ({"LISTEN_FDS": "2"}, alone),
        ({"LISTEN_PID": "own"}, alone),
        *(({**own, "LISTEN_FDS": count}, alone) for count in ("0", "-1", "two")),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", _SERVICE, json.dumps([variables for variables, _ in table])]
    said = subprocess.check_output(command, env=environment, timeout=60).splitlines()
    assert len(said) == len(table)
    for (variables, (inherited, inheritable)), line in zip(table, said, strict=True):
        # Children do not see what concerns the daemon.
        assert (variables, json.loads(line)) == (variables, [inherited, inheritable, []])


def test_where_somebody_listens_is_for_clients_whatever_its_name() -> None:
    for wrong in (SHIM, CONFIG):
        variables = {"LISTEN_PID": "own", "LISTEN_FDS": "2", "LISTEN_FDNAMES": f"{wrong}:{wrong}"}
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        program = _SERVICE.replace("read, write = os.pipe()", _LISTENS)
        command = [sys.executable, "-c", program, json.dumps([variables])]
        [said] = subprocess.check_output(command, env=environment, timeout=60).splitlines()
        assert json.loads(said)[0] == {CLIENTS: [3], wrong: [4]}


EXTEND = "EXTEND_TIMEOUT_USEC=15000000"
LOAD_TIMEOUT_S = 100.0


class FakeModel:
    """Loads, until a test says that it serves."""

    def __init__(self, name: str = "m", *, required: bool = True, device: str = "cpu") -> None:
        self.name = name
        self.config = ModelConfig(path="/m.onnx", required=required, load_timeout=LOAD_TIMEOUT_S)
        self.main_generation = SimpleNamespace(progress="snapshotting", cause="", device=device)
        self.deployments = [SimpleNamespace(main_generation=self.main_generation, serving=None)]
        self.is_serving = self.has_failed = False
        self.readiness = self
        self.why_unready = "it loads"

    def unready_reason(self, now: float) -> str:
        return self.why_unready

    def serving(self, workers: int = 2) -> FakeModel:
        self.is_serving, self.why_unready, self.main_generation.progress = True, "", "serving"
        self.deployments[0].serving = SimpleNamespace(
            processes=SimpleNamespace(serving=dict.fromkeys(map(str, range(workers))))
        )
        return self


class Stage:
    """A notifier, and what it looks at."""

    def __init__(self, *models: FakeModel, watchdog: float | None = None) -> None:
        self.herald = SystemdNotifier(watchdog)
        self.models = list(models)
        self.now = 1000.0

    @property
    def seen(self) -> list[ServedModel]:
        return cast("list[ServedModel]", self.models)

    def look(self, seconds: float = 0.0, note: str = "") -> list[str]:
        self.now += seconds
        return self.herald.poll(self.seen, self.now, note)

    def told(self, seconds: float = 0.0) -> list[str]:
        """Without the status."""
        return [each for each in self.look(seconds) if not each.startswith("STATUS=")]

    def status(self) -> str:
        [status] = [each for each in self.look() if each.startswith("STATUS=")]
        return status.removeprefix("STATUS=")

    def ready(self) -> bool:
        return self.herald.is_ready

    def failed(self) -> bool:
        return self.herald.has_failed(self.seen)


# --- ready ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("models", [[], [FakeModel(required=False)]])
def test_it_is_ready_at_once_where_nothing_is_required(models: list[FakeModel]) -> None:
    stage = Stage(*models)
    assert stage.told()[0] == "READY=1"
    assert stage.ready()
    assert "READY=1" not in stage.told(1.0)


def test_it_is_ready_once_every_required_model_serves() -> None:
    one, two, other = FakeModel("one"), FakeModel("two"), FakeModel("other", required=False)
    stage = Stage(one, two, other)
    assert stage.told() == [EXTEND]
    one.serving()
    assert stage.told(1.0) == [EXTEND]
    assert not stage.ready()
    two.serving()
    assert stage.told(1.0)[0] == "READY=1"
    assert stage.ready()
    # It is told once, and then there is nothing to extend.
    for two.is_serving, two.main_generation.progress in ((False, "building"), (True, "serving")):
        assert stage.told(1.0) == []


def test_a_start_may_take_longer_while_it_goes_on() -> None:
    model = FakeModel()
    stage = Stage(model)
    for progress in ("snapshotting", "spawned, 0/3 processes up", "building", "attaching 0/2"):
        model.main_generation.progress = progress
        assert stage.told(LOAD_TIMEOUT_S) == [EXTEND]
        # What copies or waits for memory is not bounded by load_timeout alone.
        assert stage.told(LOAD_TIMEOUT_S + 120.0) == [EXTEND]


def test_a_start_that_is_stuck_gets_no_more_time() -> None:
    ready, stuck, other = FakeModel("ready").serving(), FakeModel("stuck"), FakeModel("other", required=False)
    stage = Stage(ready, stuck, other)
    assert stage.told() == [EXTEND]
    # Who serves need not go on, and who is not required gets no time.
    other.main_generation.progress = "building"
    assert stage.told(LOAD_TIMEOUT_S + 120.0) == [EXTEND]
    other.main_generation.progress = "attaching 0/1"
    assert stage.told(0.1) == []
    stuck.main_generation.progress = "building"
    assert stage.told(1.0) == [EXTEND]


# --- failed ---------------------------------------------------------------------------------------------------------


def test_it_has_failed_if_a_required_model_fails_before_it_is_ready() -> None:
    required, other = FakeModel("required"), FakeModel("other", required=False)
    stage = Stage(required, other)
    other.has_failed = True
    assert not stage.failed()
    required.has_failed = True
    assert stage.failed()
    required.has_failed = False
    required.serving()
    stage.look()
    required.is_serving, required.has_failed = False, True
    assert not stage.failed()


def test_what_is_new_beside_what_goes_on_and_fails_does_not_end_it() -> None:
    old, new = FakeModel("old"), FakeModel("new")
    stage = Stage(old, new)
    stage.herald.on_resumed(["old"])
    old.serving()
    assert "READY=1" not in stage.told()
    new.has_failed = True
    assert not stage.failed()
    old.has_failed = True
    assert stage.failed()
    old.has_failed = False
    assert "READY=1" in stage.told()


# --- signs of life --------------------------------------------------------------------------------------------------


def signs(stage: Stage, seconds: float) -> list[float]:
    """Look whenever something is due, for so long; return when there was a sign of life."""
    begin = stage.now
    found: list[float] = []
    while stage.now <= begin + seconds:
        if "WATCHDOG=1" in stage.look():
            found.append(stage.now - begin)
        assert stage.herald.next_event_at > stage.now
        stage.now = stage.herald.next_event_at
    return found


@pytest.mark.parametrize("watchdog", [0.3, 1.5, 3.0, 10.0, 30.0, 600.0])
def test_signs_of_life_come_well_within_the_time(watchdog: float) -> None:
    found = signs(Stage(FakeModel().serving(), watchdog=watchdog), 10 * watchdog)
    gaps = [after - before for before, after in itertools.pairwise(found)]
    assert found[0] == 0.0
    assert max(gaps) <= watchdog / 3 + 1.0
    assert max(gaps) <= watchdog / 2
    assert min(gaps) >= watchdog / 3 - 1e-6


def test_signs_of_life_do_not_come_more_often_because_something_happens() -> None:
    stage = Stage(FakeModel().serving(), watchdog=30.0)
    assert ["WATCHDOG=1" in stage.look(0.5) for _ in range(40)].count(True) == 2


def test_a_sign_of_life_does_not_wait_because_the_daemon_was_stopped() -> None:
    """The clock of the daemon stood still then, the manager's did not."""
    stage = Stage(FakeModel().serving(), watchdog=30.0)
    assert "WATCHDOG=1" in stage.told()
    assert stage.told(1.0) == []
    stage.herald.on_suspended(9.0)
    assert stage.told() == ["WATCHDOG=1"]
    assert stage.told() == []


def test_without_a_required_model_that_is_ready_there_is_none() -> None:
    one, two, other = (FakeModel(name, required=name != "other").serving() for name in ("one", "two", "other"))
    stage = Stage(one, two, other, FakeModel("loads"), watchdog=3.0)
    assert signs(stage, 30.0) == []
    stage.models.pop()
    assert signs(stage, 3.0)
    other.why_unready = "nobody there"
    assert signs(stage, 3.0)
    two.why_unready = "no worker has answered for 31 s"
    assert signs(stage, 30.0) == []
    two.why_unready = ""
    assert signs(stage, 3.0)[0] == 0.0


def test_what_a_reload_adds_is_not_missed_before_it_has_served() -> None:
    stage = Stage(FakeModel("there").serving(), watchdog=3.0)
    stage.look()
    added = FakeModel("added")
    stage.models.append(added)
    added.main_generation.progress = "building"
    assert signs(stage, 10 * LOAD_TIMEOUT_S)[-1] > 9 * LOAD_TIMEOUT_S
    added.has_failed = True
    assert signs(stage, 10.0)
    added.has_failed = False
    added.serving()
    assert signs(stage, 10.0)
    added.why_unready = "no worker has answered for 31 s"
    assert signs(stage, 10.0) == []
    # Whoever comes under its name is another one.
    stage.models.remove(added)
    assert signs(stage, 10.0)
    stage.models.append(FakeModel("added"))
    assert signs(stage, 10.0)


def test_a_model_that_is_loaded_again_is_a_sign_of_life_as_long_as_that_goes_on() -> None:
    model = FakeModel().serving()
    stage = Stage(model, watchdog=3.0)
    stage.look()
    model.is_serving, model.why_unready, model.main_generation.progress = False, "it loads", "building"
    assert signs(stage, 2 * LOAD_TIMEOUT_S)[-1] > LOAD_TIMEOUT_S
    assert signs(stage, 10.0 * LOAD_TIMEOUT_S)[-1:] == pytest.approx([20.0], abs=3.0)
    model.main_generation.progress = "attaching 1/2"
    assert signs(stage, 10.0)
    model.has_failed = True
    assert signs(stage, 10.0) == []


def test_workers_that_are_replaced_are_a_sign_of_life_however_long_the_pauses_are() -> None:
    model = FakeModel()
    stage = Stage(model.serving(2), watchdog=3.0)
    stage.look()
    model.serving(0).why_unready = "all workers have exited and are being replaced"
    for _ in range(20):
        for model.main_generation.progress in ("serving 0/2, backing off", "attaching 0/2"):
            assert signs(stage, 30.0)[-1] > 27.0
    # Stuck: nothing that is bounded takes so long.
    assert signs(stage, 10.0 * LOAD_TIMEOUT_S)[-1] < LOAD_TIMEOUT_S + 120.0
    model.serving(1).why_unready = "no worker has answered for 31 s"
    assert signs(stage, 10.0) == []


# --- status ---------------------------------------------------------------------------------------------------------


def test_the_status_is_one_line_told_when_it_changes() -> None:
    one, two = FakeModel("one"), FakeModel("two", device="ascend:0", required=False)
    two.main_generation.progress, two.main_generation.cause = "failed", "no such\nfile"
    stage = Stage(one, two)
    stage.look()
    assert stage.herald.next_event_at == stage.now + 1.0
    stage = Stage(one, two)
    # Every user of the host may read it: it names no model, and no path.
    assert stage.status() == "1 model is snapshotting; 1 model is failed on ascend:0; serving 0 models from 0 workers"
    assert not any(each.startswith("STATUS=") for each in stage.look(1.0))
    [status] = [each for each in stage.look(note="/etc/c: not TOML\nas before") if each.startswith("STATUS=")]
    assert status.startswith(
        "STATUS=the configuration file is not in force, see weightctl status; 1 model is snapshotting;"
    )
    assert stage.status()
    one.serving(3)
    assert stage.status() == "1 model is failed on ascend:0; serving 1 models from 3 workers"
    two.serving(1)
    assert stage.status() == "serving 2 models from 4 workers"
    assert not any(each.startswith("STATUS=") for each in stage.look(1.0))


def test_the_status_says_how_far_who_loads_is_and_how_long_it_still_takes() -> None:
    model = FakeModel(device="ascend:0")
    model.main_generation.progress, model.main_generation.cause = "building", "the last one failed"
    look = Stage(model).herald.poll(
        cast("list[ServedModel]", [model]), 0.0, load_progress=lambda _: "43 %, about 20 s left"
    )
    status = "STATUS=1 model is building on ascend:0, 43 %, about 20 s left; "
    assert [each for each in look if each.startswith(status)]


def test_a_status_is_short_enough_to_be_heard_and_plain_text() -> None:
    models = [FakeModel(f"model{number}", device=f"ascend:{number}") for number in range(100)]
    for number, model in enumerate(models):
        model.main_generation.progress = "bad\0 \x1b[31m\udcff" + "é" * number
    stage = Stage(*models, watchdog=3.0)
    message = "\n".join(stage.look()).encode()
    [status] = [each for each in message.split(b"\n") if each.startswith(b"STATUS=")]
    assert 1000 < len(status) <= 1024 + len("STATUS=")
    assert status.decode().endswith("...")
    assert b"\0" not in message
    assert b"\x1b" not in message


MODELS = {"m": {"path": "/m.onnx"}}


def config(directory: Path, passed: list[int], *names: str) -> Config:
    """One with a listener of each name, and with the sockets of a service manager."""
    tables = {name: {"address": f"ipc://{directory}/{name}"} for name in names}
    daemon = {"runtime_dir": str(directory), "cache_dir": str(directory)}
    return parse({"daemon": daemon, "listeners": tables, "models": MODELS}, directory, listen_addresses(passed))


def passed(*where: Path) -> list[int]:
    """Descriptors of sockets that listen already."""
    descriptors: list[int] = []
    for each in where:
        with socket.socket(socket.AF_UNIX) as made:
            made.bind(str(each))
            made.listen()
            descriptors.append(os.dup(made.fileno()))
    return descriptors


def names(directory: Path) -> set[str]:
    return {each.name for each in directory.iterdir()}


def test_without_a_service_manager_all_is_opened_and_nothing_is_left(tmp_path: Path) -> None:
    with listen(config(tmp_path, []), []) as found:
        assert names(tmp_path) == {"weightd.sock", "weightd.sock.unix"}
        assert found.addresses == [f"unix://{tmp_path}/weightd.sock.unix", f"ipc://{tmp_path}/weightd.sock"]
        assert [*found.zmq_listeners] == ["default"]
    assert names(tmp_path) == set()
    with listen(config(tmp_path, [], "a", "b"), []) as found:
        assert names(tmp_path) == {"weightd.sock.unix", "a", "b"}
        assert {name: each.getsockname() for name, each in found.zmq_listeners.items()} == {
            "a": f"{tmp_path}/a",
            "b": f"{tmp_path}/b",
        }


def test_what_was_passed_is_taken_and_what_was_not_is_opened(tmp_path: Path) -> None:
    given = passed(tmp_path / "b", tmp_path / "w.unix")
    with listen(config(tmp_path, given, "a", "b"), given) as found:
        assert [each.fileno() for each in found.unix_listeners] == [given[1]]
        assert found.zmq_listeners["b"].fileno() == given[0]
        assert not any(each.getblocking() for each in (*found.unix_listeners, *found.zmq_listeners.values()))
        assert names(tmp_path) == {"a", "b", "w.unix"}
    assert names(tmp_path) == {"b", "w.unix"}
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(given[0])


def test_units_that_pass_no_unix_socket_can_do_without_one(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = passed(tmp_path / "weightd.sock")
    with listen(config(tmp_path, given), given) as found:
        assert [each.getsockname() for each in found.unix_listeners] == [f"{tmp_path}/weightd.sock.unix"]
    assert not caplog.records
    given = passed(tmp_path / "other.sock")
    with listen_on(f"unix://{tmp_path}/other.sock.unix"), listen(config(tmp_path, given), given) as found:
        assert (found.unix_listeners, found.addresses) == ([], [f"ipc://{tmp_path}/other.sock"])
    assert "must use ZeroMQ, which is slower: " in caplog.text


def test_without_units_the_unix_socket_is_needed(tmp_path: Path) -> None:
    with (
        listen_on(f"unix://{tmp_path}/weightd.sock.unix"),
        pytest.raises(PathInUse, match="another program listens there"),
        listen(config(tmp_path, []), []),
    ):
        pass
    assert names(tmp_path) == set()


# --- a daemon under a service manager -------------------------------------------------------------------------------


class Managed:
    """A daemon without models, and what it does for its manager, in order."""

    def __init__(self, manager: ServiceManager, monkeypatch: pytest.MonkeyPatch) -> None:
        self.done: list[str] = []
        self.has_changed = False
        self.shutdown = Shutdown()
        monkeypatch.setattr(state, "write", lambda *_: self.done.append("written"))
        parts: Any = SimpleNamespace(
            shim=SimpleNamespace(handover_path=None),
            registry=SimpleNamespace(models={}, records=list, all_models=list),
            supervisor=SimpleNamespace(take_changed=lambda: self.has_changed),
            load_monitor=SimpleNamespace(update=lambda *_: None),
        )
        self.service = ManagedService(
            manager, parts.shim, parts.registry, parts.supervisor, {}, load_monitor=parts.load_monitor,
            shutdown=self.shutdown, config_note=lambda: "", on_failed=lambda _: self.done.append("failed"),
        )  # fmt: skip


@pytest.fixture
def managed(manager: ServiceManager, monkeypatch: pytest.MonkeyPatch) -> Managed:
    return Managed(manager, monkeypatch)


def test_what_has_changed_is_written_for_the_next_daemon_before_anybody_is_told(
    managed: Managed, listener: socket.socket
) -> None:
    listener.setblocking(False)
    managed.service.on_change(1.0)
    assert managed.done == []
    managed.has_changed = True
    managed.service.on_change(1.0)
    assert (managed.done, received(listener)[0]) == (["written"], "READY=1")
    managed.service.timer.fire(2.0)
    assert managed.done == ["written", "written"]


def test_a_daemon_that_drains_gives_no_more_signs_of_life(managed: Managed, listener: socket.socket) -> None:
    managed.service.start([])
    managed.service.timer.fire(1.0)
    assert received(listener)[0] == "READY=1"
    assert managed.service.timer.due_at == 2.0
    managed.shutdown.handle(ShutdownEvent.STOP)
    managed.service.timer.fire(2.0)
    assert managed.service.timer.due_at == float("inf")
    assert not managed.service.begin_reload()


def test_a_reload_is_told_once_the_start_is_over(managed: Managed, listener: socket.socket) -> None:
    assert not managed.service.begin_reload()
    managed.service.start([])
    managed.service.timer.fire(1.0)
    received(listener)
    assert managed.service.begin_reload()
    assert received(listener)[0] == "RELOADING=1"
    managed.service.end_reload()
    assert received(listener) == ["READY=1"]
