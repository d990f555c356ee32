"""Tests of the notifications to systemd, over real datagram sockets, and of the sockets that systemd passes."""

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

# Places a pipe at the descriptors that a service manager would pass, and prints which ones ServiceManager inherits,
# for each row of environment variables.
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
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as created:
        created.bind(str(tmp_path / "notify") if request.param == "path" else f"\0weightd-test-{os.getpid()}")
        created.settimeout(20.0)
        yield created


@pytest.fixture
def manager(listener: socket.socket) -> ServiceManager:
    name = listener.getsockname()
    return ServiceManager({"NOTIFY_SOCKET": name if isinstance(name, str) else f"@{name[1:].decode()}"})


def received(listener: socket.socket) -> list[str]:
    return listener.recv(65536).decode().split("\n")


# --- notifications --------------------------------------------------------------------------------------------------


def test_without_service_manager_calls_do_nothing() -> None:
    manager = ServiceManager({})
    assert (manager.is_present, manager.watchdog_s, manager.inherited) == (False, None, {})
    manager.notify("READY=1")
    manager.notify_reloading()
    manager.store_descriptor(SHIM, 0)
    manager.remove_descriptor(SHIM)
    assert not ServiceManager({"NOTIFY_SOCKET": ""}).is_present


def test_sends_one_datagram_per_call(manager: ServiceManager, listener: socket.socket) -> None:
    assert manager.is_present
    manager.notify("READY=1", "STATUS=two models")
    manager.remove_descriptor(SHIM)
    assert received(listener) == ["READY=1", "STATUS=two models"]
    assert received(listener) == ["FDSTOREREMOVE=1", "FDNAME=shim"]


def test_reload_notification_has_start_time(manager: ServiceManager, listener: socket.socket) -> None:
    before = time.monotonic_ns() // 1000
    manager.notify_reloading()
    first, second = received(listener)
    name, _, microseconds = second.partition("=")
    assert (first, name) == ("RELOADING=1", "MONOTONIC_USEC")
    assert before <= int(microseconds) <= time.monotonic_ns() // 1000


def test_stored_descriptor_replaces_previous_one(manager: ServiceManager, listener: socket.socket) -> None:
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


def test_missing_notify_socket_is_ignored(tmp_path: Path) -> None:
    manager = ServiceManager({"NOTIFY_SOCKET": str(tmp_path / "notify")})
    manager.notify("READY=1")
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM) as listener:
        listener.bind(str(tmp_path / "notify"))
    manager.notify("READY=1")
    manager.store_descriptor(SHIM, 0)
    ServiceManager({"NOTIFY_SOCKET": "/x" * 100}).notify("READY=1")


def test_full_notify_socket_does_not_block(
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
    # The next notification repeats the unsent fields with their current values.
    manager.notify("WATCHDOG=1")
    assert received(listener) == [f"STATUS={sent - 1} {'x' * 1000}", "READY=1", "WATCHDOG=1"]
    manager.notify()
    with pytest.raises(BlockingIOError):
        received(listener)


# --- watchdog interval ----------------------------------------------------------------------------------------------


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
def test_watchdog_applies_only_to_this_process(given: dict[str, str], watchdog: float | None) -> None:
    assert ServiceManager(given).watchdog_s == watchdog


# --- inherited descriptors ------------------------------------------------------------------------------------------


def test_inherits_descriptors_by_name() -> None:
    names, own = "LISTEN_FDNAMES", {"LISTEN_PID": "own", "LISTEN_FDS": "2"}
    alone: tuple[dict[str, list[int]], list[bool]] = ({}, [True, True])
    table = [
        ({**own, names: "weightd.socket:shim"}, ({CLIENTS: [3], SHIM: [4]}, [False, False])),
        # Descriptors without a known name are client listeners.
        (own, ({CLIENTS: [3, 4]}, [False, False])),
        ({**own, names: ""}, ({CLIENTS: [3, 4]}, [False, False])),
        ({**own, names: "clients"}, ({CLIENTS: [3, 4]}, [False, False])),
        ({**own, names: "unknown:stored"}, ({CLIENTS: [3, 4]}, [False, False])),
        ({**own, "LISTEN_FDS": "1", names: "shim:x"}, ({SHIM: [3]}, [False, True])),
        # The descriptors belong to another process, or none were passed.
        ({"LISTEN_PID": "1", "LISTEN_FDS": "2"}, alone),
        ({"LISTEN_FDS": "2"}, alone),
        ({"LISTEN_PID": "own"}, alone),
        *(({**own, "LISTEN_FDS": count}, alone) for count in ("0", "-1", "two")),
    ]
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
    command = [sys.executable, "-c", _SERVICE, json.dumps([variables for variables, _ in table])]
    lines = subprocess.check_output(command, env=environment, timeout=60).splitlines()
    assert len(lines) == len(table)
    for (variables, (inherited, inheritable)), line in zip(table, lines, strict=True):
        # Child processes do not inherit the variables of the service manager.
        assert (variables, json.loads(line)) == (variables, [inherited, inheritable, []])


def test_listening_socket_is_client_listener_with_any_name() -> None:
    for wrong in (SHIM, CONFIG):
        variables = {"LISTEN_PID": "own", "LISTEN_FDS": "2", "LISTEN_FDNAMES": f"{wrong}:{wrong}"}
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))}
        program = _SERVICE.replace("read, write = os.pipe()", _LISTENS)
        command = [sys.executable, "-c", program, json.dumps([variables])]
        [lines] = subprocess.check_output(command, env=environment, timeout=60).splitlines()
        assert json.loads(lines)[0] == {CLIENTS: [3], wrong: [4]}


EXTEND = "EXTEND_TIMEOUT_USEC=15000000"
LOAD_TIMEOUT_S = 100.0


class FakeModel:
    """Model that is loading until the test calls `serving`."""

    def __init__(self, name: str = "m", *, required: bool = True, device: str = "cpu") -> None:
        self.name = name
        self.config = ModelConfig(path="/m.onnx", required=required, load_timeout=LOAD_TIMEOUT_S)
        self.main_generation = SimpleNamespace(progress="snapshotting", cause="", device=device)
        self.deployments = [SimpleNamespace(main_generation=self.main_generation, serving=None)]
        self.is_serving = self.has_failed = False
        self.readiness = self.loading = self
        self.is_unloaded = False
        self.why_unready = "it loads"

    def unready_reason(self, now: float) -> str:
        return self.why_unready

    def serving(self, workers: int = 2) -> FakeModel:
        self.is_serving, self.why_unready, self.main_generation.progress = True, "", "serving"
        self.deployments[0].serving = SimpleNamespace(
            processes=SimpleNamespace(serving=dict.fromkeys(map(str, range(workers))))
        )
        return self


class NotifierHarness:
    """Notifier with fake models and a fake clock."""

    def __init__(self, *models: FakeModel, watchdog: float | None = None) -> None:
        self.notifier = SystemdNotifier(watchdog)
        self.models = list(models)
        self.now = 1000.0

    @property
    def served_models(self) -> list[ServedModel]:
        return cast("list[ServedModel]", self.models)

    def poll(self, seconds: float = 0.0, note: str = "") -> list[str]:
        self.now += seconds
        return self.notifier.poll(self.served_models, self.now, note)

    def notifications(self, seconds: float = 0.0) -> list[str]:
        """Return the notifications without STATUS."""
        return [each for each in self.poll(seconds) if not each.startswith("STATUS=")]

    def status(self) -> str:
        [status] = [each for each in self.poll() if each.startswith("STATUS=")]
        return status.removeprefix("STATUS=")

    def ready(self) -> bool:
        return self.notifier.is_ready

    def failed(self) -> bool:
        return self.notifier.has_failed(self.served_models)


# --- ready ----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("models", [[], [FakeModel(required=False)]])
def test_ready_at_once_without_required_models(models: list[FakeModel]) -> None:
    harness = NotifierHarness(*models)
    assert harness.notifications()[0] == "READY=1"
    assert harness.ready()
    assert "READY=1" not in harness.notifications(1.0)


def test_ready_after_all_required_models_serve() -> None:
    one, two, other = FakeModel("one"), FakeModel("two"), FakeModel("other", required=False)
    harness = NotifierHarness(one, two, other)
    assert harness.notifications() == [EXTEND]
    one.serving()
    assert harness.notifications(1.0) == [EXTEND]
    assert not harness.ready()
    two.serving()
    assert harness.notifications(1.0)[0] == "READY=1"
    assert harness.ready()
    # The notifier sends READY once; then it no longer extends the timeout.
    for two.is_serving, two.main_generation.progress in ((False, "building"), (True, "serving")):
        assert harness.notifications(1.0) == []


def test_start_timeout_is_extended_during_progress() -> None:
    model = FakeModel()
    harness = NotifierHarness(model)
    for progress in ("snapshotting", "spawned, 0/3 processes up", "building", "attaching 0/2"):
        model.main_generation.progress = progress
        assert harness.notifications(LOAD_TIMEOUT_S) == [EXTEND]
        # Copies and waits for memory may exceed load_timeout.
        assert harness.notifications(LOAD_TIMEOUT_S + 120.0) == [EXTEND]


def test_stuck_start_is_not_extended() -> None:
    ready, stuck, other = FakeModel("ready").serving(), FakeModel("stuck"), FakeModel("other", required=False)
    harness = NotifierHarness(ready, stuck, other)
    assert harness.notifications() == [EXTEND]
    # Serving models need no progress, and models that are not required extend no timeout.
    other.main_generation.progress = "building"
    assert harness.notifications(LOAD_TIMEOUT_S + 120.0) == [EXTEND]
    other.main_generation.progress = "attaching 0/1"
    assert harness.notifications(0.1) == []
    stuck.main_generation.progress = "building"
    assert harness.notifications(1.0) == [EXTEND]


# --- failed ---------------------------------------------------------------------------------------------------------


def test_required_model_that_fails_before_ready_fails_start() -> None:
    required, other = FakeModel("required"), FakeModel("other", required=False)
    harness = NotifierHarness(required, other)
    other.has_failed = True
    assert not harness.failed()
    required.has_failed = True
    assert harness.failed()
    required.has_failed = False
    required.serving()
    harness.poll()
    required.is_serving, required.has_failed = False, True
    assert not harness.failed()


def test_new_model_that_fails_does_not_fail_resumed_daemon() -> None:
    old, new = FakeModel("old"), FakeModel("new")
    harness = NotifierHarness(old, new)
    harness.notifier.on_resumed(["old"])
    old.serving()
    assert "READY=1" not in harness.notifications()
    new.has_failed = True
    assert not harness.failed()
    old.has_failed = True
    assert harness.failed()
    old.has_failed = False
    assert "READY=1" in harness.notifications()


# --- watchdog -------------------------------------------------------------------------------------------------------


def watchdog_times(harness: NotifierHarness, seconds: float) -> list[float]:
    """Poll at each due time for this many seconds; return the times of watchdog notifications."""
    begin = harness.now
    found: list[float] = []
    while harness.now <= begin + seconds:
        if "WATCHDOG=1" in harness.poll():
            found.append(harness.now - begin)
        assert harness.notifier.next_event_at > harness.now
        harness.now = harness.notifier.next_event_at
    return found


@pytest.mark.parametrize("watchdog", [0.3, 1.5, 3.0, 10.0, 30.0, 600.0])
def test_watchdog_is_notified_in_time(watchdog: float) -> None:
    found = watchdog_times(NotifierHarness(FakeModel().serving(), watchdog=watchdog), 10 * watchdog)
    gaps = [after - before for before, after in itertools.pairwise(found)]
    assert found[0] == 0.0
    assert max(gaps) <= watchdog / 3 + 1.0
    assert max(gaps) <= watchdog / 2
    assert min(gaps) >= watchdog / 3 - 1e-6


def test_events_do_not_cause_more_watchdog_notifications() -> None:
    harness = NotifierHarness(FakeModel().serving(), watchdog=30.0)
    assert ["WATCHDOG=1" in harness.poll(0.5) for _ in range(40)].count(True) == 2


def test_suspension_of_daemon_triggers_watchdog_notification() -> None:
    """The daemon's clock stops while the daemon is stopped; the clock of the service manager does not."""
    harness = NotifierHarness(FakeModel().serving(), watchdog=30.0)
    assert "WATCHDOG=1" in harness.notifications()
    assert harness.notifications(1.0) == []
    harness.notifier.on_suspended(9.0)
    assert harness.notifications() == ["WATCHDOG=1"]
    assert harness.notifications() == []


def test_unready_required_model_stops_watchdog() -> None:
    one, two, other = (FakeModel(name, required=name != "other").serving() for name in ("one", "two", "other"))
    harness = NotifierHarness(one, two, other, FakeModel("loads"), watchdog=3.0)
    assert watchdog_times(harness, 30.0) == []
    harness.models.pop()
    assert watchdog_times(harness, 3.0)
    other.why_unready = "no worker"
    assert watchdog_times(harness, 3.0)
    two.why_unready = "no worker has answered for 31 s"
    assert watchdog_times(harness, 30.0) == []
    two.why_unready = ""
    assert watchdog_times(harness, 3.0)[0] == 0.0


def test_model_added_by_reload_counts_after_it_served() -> None:
    harness = NotifierHarness(FakeModel("there").serving(), watchdog=3.0)
    harness.poll()
    added = FakeModel("added")
    harness.models.append(added)
    added.main_generation.progress = "building"
    assert watchdog_times(harness, 10 * LOAD_TIMEOUT_S)[-1] > 9 * LOAD_TIMEOUT_S
    added.has_failed = True
    assert watchdog_times(harness, 10.0)
    added.has_failed = False
    added.serving()
    assert watchdog_times(harness, 10.0)
    added.why_unready = "no worker has answered for 31 s"
    assert watchdog_times(harness, 10.0) == []
    # A later model of the same name is a new model.
    harness.models.remove(added)
    assert watchdog_times(harness, 10.0)
    harness.models.append(FakeModel("added"))
    assert watchdog_times(harness, 10.0)


def test_reload_of_model_keeps_watchdog_during_progress() -> None:
    model = FakeModel().serving()
    harness = NotifierHarness(model, watchdog=3.0)
    harness.poll()
    model.is_serving, model.why_unready, model.main_generation.progress = False, "it loads", "building"
    assert watchdog_times(harness, 2 * LOAD_TIMEOUT_S)[-1] > LOAD_TIMEOUT_S
    assert watchdog_times(harness, 10.0 * LOAD_TIMEOUT_S)[-1:] == pytest.approx([20.0], abs=3.0)
    model.main_generation.progress = "attaching 1/2"
    assert watchdog_times(harness, 10.0)
    model.has_failed = True
    assert watchdog_times(harness, 10.0) == []


def test_worker_replacement_keeps_watchdog_during_backoff() -> None:
    model = FakeModel()
    harness = NotifierHarness(model.serving(2), watchdog=3.0)
    harness.poll()
    model.serving(0).why_unready = "all workers have exited and are being replaced"
    for _ in range(20):
        for model.main_generation.progress in ("serving 0/2, backing off", "attaching 0/2"):
            assert watchdog_times(harness, 30.0)[-1] > 27.0
    # Without progress the notifications stop, because every step has a time limit.
    assert watchdog_times(harness, 10.0 * LOAD_TIMEOUT_S)[-1] < LOAD_TIMEOUT_S + 120.0
    model.serving(1).why_unready = "no worker has answered for 31 s"
    assert watchdog_times(harness, 10.0) == []


# --- status ---------------------------------------------------------------------------------------------------------


def test_status_is_one_line_and_sent_on_change() -> None:
    one, two = FakeModel("one"), FakeModel("two", device="ascend:0", required=False)
    two.main_generation.progress, two.main_generation.cause = "failed", "no such\nfile"
    harness = NotifierHarness(one, two)
    harness.poll()
    assert harness.notifier.next_event_at == harness.now + 1.0
    harness = NotifierHarness(one, two)
    # All users of the host can read the status, so it contains neither model names nor paths.
    assert harness.status() == "1 model is snapshotting; 1 model is failed on ascend:0; serving 0 models from 0 workers"
    assert not any(each.startswith("STATUS=") for each in harness.poll(1.0))
    [status] = [each for each in harness.poll(note="/etc/c: not TOML\nas before") if each.startswith("STATUS=")]
    assert status.startswith(
        "STATUS=the configuration file is not in force, see weightctl status; 1 model is snapshotting;"
    )
    assert harness.status()
    one.serving(3)
    assert harness.status() == "1 model is failed on ascend:0; serving 1 models from 3 workers"
    two.serving(1)
    assert harness.status() == "serving 2 models from 4 workers"
    assert not any(each.startswith("STATUS=") for each in harness.poll(1.0))


def test_status_includes_load_progress() -> None:
    model = FakeModel(device="ascend:0")
    model.main_generation.progress, model.main_generation.cause = "building", "the last one failed"
    poll = NotifierHarness(model).notifier.poll(
        cast("list[ServedModel]", [model]), 0.0, load_progress=lambda _: "43 %, about 20 s left"
    )
    status = "STATUS=1 model is building on ascend:0, 43 %, about 20 s left; "
    assert [each for each in poll if each.startswith(status)]


def test_status_is_short_and_plain_text() -> None:
    models = [FakeModel(f"model{number}", device=f"ascend:{number}") for number in range(100)]
    for number, model in enumerate(models):
        model.main_generation.progress = "bad\0 \x1b[31m\udcff" + "é" * number
    harness = NotifierHarness(*models, watchdog=3.0)
    message = "\n".join(harness.poll()).encode()
    [status] = [each for each in message.split(b"\n") if each.startswith(b"STATUS=")]
    assert 1000 < len(status) <= 1024 + len("STATUS=")
    assert status.decode().endswith("...")
    assert b"\0" not in message
    assert b"\x1b" not in message


MODELS = {"m": {"path": "/m.onnx"}}


def config(directory: Path, passed: list[int], *names: str) -> Config:
    """Return a configuration with a listener for each name, and with the passed sockets."""
    tables = {name: {"address": f"ipc://{directory}/{name}"} for name in names}
    daemon = {"runtime_dir": str(directory), "cache_dir": str(directory)}
    return parse({"daemon": daemon, "listeners": tables, "models": MODELS}, directory, listen_addresses(passed))


def passed(*where: Path) -> list[int]:
    """Return descriptors of listening sockets."""
    descriptors: list[int] = []
    for each in where:
        with socket.socket(socket.AF_UNIX) as created:
            created.bind(str(each))
            created.listen()
            descriptors.append(os.dup(created.fileno()))
    return descriptors


def names(directory: Path) -> set[str]:
    return {each.name for each in directory.iterdir()}


def test_opens_and_removes_sockets_without_service_manager(tmp_path: Path) -> None:
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


def test_uses_passed_sockets_and_opens_others(tmp_path: Path) -> None:
    given = passed(tmp_path / "b", tmp_path / "w.unix")
    with listen(config(tmp_path, given, "a", "b"), given) as found:
        assert [each.fileno() for each in found.unix_listeners] == [given[1]]
        assert found.zmq_listeners["b"].fileno() == given[0]
        assert not any(each.getblocking() for each in (*found.unix_listeners, *found.zmq_listeners.values()))
        assert names(tmp_path) == {"a", "b", "w.unix"}
    assert names(tmp_path) == {"b", "w.unix"}
    with pytest.raises(OSError, match="Bad file descriptor"):
        os.fstat(given[0])


def test_passed_sockets_make_unix_socket_optional(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    given = passed(tmp_path / "weightd.sock")
    with listen(config(tmp_path, given), given) as found:
        assert [each.getsockname() for each in found.unix_listeners] == [f"{tmp_path}/weightd.sock.unix"]
    assert not caplog.records
    given = passed(tmp_path / "other.sock")
    with listen_on(f"unix://{tmp_path}/other.sock.unix"), listen(config(tmp_path, given), given) as found:
        assert (found.unix_listeners, found.addresses) == ([], [f"ipc://{tmp_path}/other.sock"])
    assert "must use ZeroMQ, which is slower: " in caplog.text


def test_unix_socket_is_required_without_passed_sockets(tmp_path: Path) -> None:
    with (
        listen_on(f"unix://{tmp_path}/weightd.sock.unix"),
        pytest.raises(PathInUse, match="another program listens on this path"),
        listen(config(tmp_path, []), []),
    ):
        pass
    assert names(tmp_path) == set()


# --- a daemon under a service manager -------------------------------------------------------------------------------


class ServiceHarness:
    """Service of a daemon without models; records its writes of the handover file and its failures."""

    def __init__(self, manager: ServiceManager, monkeypatch: pytest.MonkeyPatch) -> None:
        self.calls: list[str] = []
        self.has_changed = False
        self.shutdown = Shutdown()
        monkeypatch.setattr(state, "write", lambda *_: self.calls.append("written"))
        parts: Any = SimpleNamespace(
            shim=SimpleNamespace(handover_path=None),
            registry=SimpleNamespace(models={}, records=list, all_models=list),
            supervisor=SimpleNamespace(take_changed=lambda: self.has_changed),
            load_monitor=SimpleNamespace(update=lambda *_: None),
        )
        self.service = ManagedService(
            manager, parts.shim, parts.registry, parts.supervisor, {}, rollout_records=list,
            load_monitor=parts.load_monitor, shutdown=self.shutdown, config_note=lambda: "",
            on_failed=lambda _: self.calls.append("failed"),
        )  # fmt: skip


@pytest.fixture
def harness(manager: ServiceManager, monkeypatch: pytest.MonkeyPatch) -> ServiceHarness:
    return ServiceHarness(manager, monkeypatch)


def test_state_is_written_before_notification(harness: ServiceHarness, listener: socket.socket) -> None:
    listener.setblocking(False)
    harness.service.on_change(1.0)
    assert harness.calls == []
    harness.has_changed = True
    harness.service.on_change(1.0)
    assert (harness.calls, received(listener)[0]) == (["written"], "READY=1")
    harness.service.timer.fire(2.0)
    assert harness.calls == ["written", "written"]


def test_draining_daemon_stops_watchdog(harness: ServiceHarness, listener: socket.socket) -> None:
    harness.service.start([])
    harness.service.timer.fire(1.0)
    assert received(listener)[0] == "READY=1"
    assert harness.service.timer.due_at == 2.0
    harness.shutdown.handle(ShutdownEvent.STOP)
    harness.service.timer.fire(2.0)
    assert harness.service.timer.due_at == float("inf")
    assert not harness.service.begin_reload()


def test_reload_is_notified_after_start(harness: ServiceHarness, listener: socket.socket) -> None:
    assert not harness.service.begin_reload()
    harness.service.start([])
    harness.service.timer.fire(1.0)
    received(listener)
    assert harness.service.begin_reload()
    assert received(listener)[0] == "RELOADING=1"
    harness.service.end_reload()
    assert received(listener) == ["READY=1"]
