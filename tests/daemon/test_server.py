from __future__ import annotations

import os
import socket
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from weightd_daemon.config.daemon import DaemonConfig
from weightd_daemon.config.load import Config
from weightd_daemon.handover import state
from weightd_daemon.handover.config_file import ConfigFile
from weightd_daemon.handover.config_reader import read_file
from weightd_daemon.handover.systemd import ServiceManager
from weightd_daemon.models.placement import DeviceBudget
from weightd_daemon.models.registry import ConfigDiff
from weightd_daemon.observability.memory import MemorySampler
from weightd_daemon.processes.files import GenerationFiles
from weightd_daemon.scheduling.signature import MetadataRequest
from weightd_daemon.server import Server
from weightd_daemon.tenants.tenant import DEFAULT_TENANT, Viewer
from weightd_protocol.errors import InvalidArgument, RequestError, ResourceExhausted, Unavailable
from weightd_protocol.messages.events import Events, Logs, LogsResponse
from weightd_protocol.messages.status import StatusResponse


def begun(path: Path) -> Any:
    file = ConfigFile(path, ServiceManager({}))
    return Server(file.load_initial(), file)


def reload(server: Any, now: float) -> ConfigDiff:
    """Put in force what the file says, without a process that reads it."""
    change: ConfigDiff = server._apply_config(read_file(server._file.path, server._file.listen_addresses), now)
    return change


def test_a_reload_that_is_refused_changes_no_device(tmp_path: Path) -> None:
    path = tmp_path / "weightd.toml"

    def written(mib: int, workers: int) -> Path:
        path.write_text(
            f'[devices."ascend:0"]\nmemory_mib = {mib}\n'
            "[models.m]\n"
            f'path = "/models/m.mindir"\npython = "python3"\ndevices = ["ascend:0"]\nworkers = {workers}\n'
        )
        return path

    written(1000, 1)
    server = begun(path)
    device = server._devices["ascend:0"] = DeviceBudget("ascend:0")
    device.capacity_bytes = 1000 * 2**20
    server._model_registry.models["m"] = SimpleNamespace(
        is_updating=True, successor=None, config=server._config.models["m"]
    )
    written(2000, 2)
    with pytest.raises(Unavailable):
        reload(server, 0.0)
    assert device.capacity_bytes == 1000 * 2**20


def test_where_clients_connect_is_changed_by_a_restart_alone(tmp_path: Path) -> None:
    path = tmp_path / "weightd.toml"
    model = '[models.m]\npath = "/models/m.onnx"\npython = "python3"\n'
    path.write_text('[listeners.one]\naddress = "ipc:///run/one"\n' + model)
    server = begun(path)
    path.write_text('[listeners.two]\naddress = "ipc:///run/one"\n' + model)
    with pytest.raises(RequestError) as caught:
        reload(server, 0.0)
    assert str(caught.value).splitlines() == [
        f"{path}: listeners.one.address: expected 'ipc:///run/one' as before, got None: restart",
        f"{path}: listeners.two.address: expected None as before, got 'ipc:///run/one': restart",
    ]


def test_a_card_has_what_it_has_said_where_the_configuration_says_no_more(tmp_path: Path) -> None:
    path = tmp_path / "weightd.toml"
    model = '[models.m]\npath = "/models/m.mindir"\npython = "python3"\ndevices = ["ascend:0"]\n'
    path.write_text(f'[devices."ascend:0"]\nmemory_mib = 1000\n{model}')
    server = begun(path)
    config = server._config.models["m"]
    server._model_registry.models["m"] = SimpleNamespace(
        is_updating=False, successor=None, config=config, may_retry=False
    )
    server._process_supervisor = SimpleNamespace(fork_servers=SimpleNamespace(reconcile=list))
    reload(server, 0.0)
    device = server._devices["ascend:0"]
    assert device.capacity_bytes == 1000 * 2**20
    device.reported_bytes = 7
    reload(server, 0.0)
    assert device.capacity_bytes == 1000 * 2**20
    path.write_text(model)
    reload(server, 0.0)
    assert device.capacity_bytes == 7


@pytest.fixture
def notified(tmp_path: Path) -> Iterator[socket.socket]:
    with socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM | socket.SOCK_NONBLOCK) as made:
        made.bind(str(tmp_path / "notify"))
        yield made


@pytest.fixture
def managed(notified: socket.socket, tmp_path: Path) -> Any:
    """A server that a service manager has started, with nothing behind it."""
    config = Config(DaemonConfig(f"ipc://{tmp_path}/s", str(tmp_path / "run"), str(tmp_path / "cache")), {})
    server: Any = Server(config, manager=ServiceManager({"NOTIFY_SOCKET": notified.getsockname()}))
    server._process_supervisor = SimpleNamespace(take_changed=lambda: False)
    return server


def test_a_daemon_that_drains_gives_no_more_signs_of_life(managed: Any) -> None:
    managed._notify_timer.set(1.0)
    managed._notify_timer.fire(1.0)
    assert managed._notify_timer.due_at == 2.0
    managed._stop(2.0)
    managed._notify_timer.fire(2.0)
    assert (managed._notify_timer.due_at, managed._drain_timer.due_at) == (
        float("inf"),
        2.0 + managed._config.daemon.drain_timeout,
    )


def test_an_update_is_told_once_the_next_daemon_would_know_of_it(managed: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    done: list[str] = []

    def write(*_: object) -> None:
        done.append("recorded")

    managed._process_supervisor = SimpleNamespace(take_changed=lambda: True)
    managed._request_router = SimpleNamespace(admin=SimpleNamespace(send_saved_responses=lambda: done.append("told")))
    managed._shim_launcher = SimpleNamespace(handover_path=None)
    monkeypatch.setattr(state, "write", write)
    managed._reconcile()
    assert done == ["recorded", "told"]


def test_a_hangup_says_nothing_before_the_start_is_over(managed: Any, notified: socket.socket) -> None:
    managed._file = mock.Mock()
    managed._request_reload = mock.Mock(side_effect=InvalidArgument("wrong"))
    managed._on_hangup(1.0)
    with pytest.raises(BlockingIOError):
        notified.recv(4096)
    managed._systemd_notifier.is_ready = True
    managed._on_hangup(1.0)
    assert notified.recv(4096).startswith(b"RELOADING=1")
    assert notified.recv(4096) == b"READY=1"


def test_who_asks_for_what_is_costly_too_often_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "weightd.toml"
    path.write_text('[models.m]\npath = "/models/m.onnx"\npython = "python3"\n')
    server = begun(path)
    refused: list[tuple[bytes, str, str]] = []

    def reply_error(client: bytes, request_id: str, error: RequestError) -> None:
        refused.append((client, request_id, error.code))

    server._process_supervisor, server._zmq_proxies = SimpleNamespace(processes={}), SimpleNamespace(pids=[])
    server._request_router = SimpleNamespace(responses=SimpleNamespace(reply_error=reply_error))
    viewer = Viewer(DEFAULT_TENANT, can_see_all=True)
    for number in range(6):
        server.report_status(MetadataRequest(b"greedy", str(number), "a"), viewer)
    server.report_metrics(MetadataRequest(b"greedy", "6", "a"), viewer)
    server.report_events(MetadataRequest(b"greedy", "7", "a"), Events("7"))
    for ask in (server.report_status, server.report_metrics):
        with pytest.raises(
            ResourceExhausted, match=r"8 status, metrics and events requests of this user are waiting already"
        ):
            ask(MetadataRequest(b"greedy", "8", "a"), viewer)
    with pytest.raises(ResourceExhausted):
        server.report_events(MetadataRequest(b"greedy", "8", "a"), Events("8"))
    for number in range(8):
        server.report_status(MetadataRequest(b"%d" % number, "0", str(number)), viewer)
    assert refused == []
    server.report_status(MetadataRequest(b"modest", "0", "b"), viewer)
    assert refused == [(b"greedy", "7", "RESOURCE_EXHAUSTED")]


def test_logs_are_read_a_file_a_turn_and_few_are_asked_for_at_once(tmp_path: Path) -> None:
    path = tmp_path / "weightd.toml"
    path.write_text('[models.m]\npath = "/models/m.onnx"\npython = "python3"\n')
    server = begun(path)
    (tmp_path / "m.1").mkdir()
    for name in ("holder", "w1"):
        (tmp_path / "m.1" / f"m.1.{name}.log").write_text(name)
    told: list[tuple[bytes, LogsResponse]] = []

    def reply_logs(client: bytes, response: LogsResponse) -> None:
        told.append((client, response))

    server._request_router = SimpleNamespace(responses=SimpleNamespace(reply=reply_logs))
    server._process_supervisor = SimpleNamespace(
        storage=SimpleNamespace(files={"m.1": GenerationFiles(tmp_path / "m.1")})
    )
    generations = [SimpleNamespace(label=f"m.{number}", number=number) for number in (1, 2)]
    server._model_registry.models["m"] = SimpleNamespace(generations=generations)
    for number in range(4):
        server.report_logs(b"c", Logs(str(number), "m"))
    with pytest.raises(ResourceExhausted):
        server.report_logs(b"c", Logs("4", "m"))
    server._read_next_log()
    assert told == []
    for _ in range(7):
        server._read_next_log()
    assert [(client, each.id, len(each.logs)) for client, each in told] == [(b"c", str(each), 2) for each in range(4)]
    assert server._log_readers == []


def test_for_who_may_not_see_others_nothing_is_measured(tmp_path: Path) -> None:
    path = tmp_path / "weightd.toml"
    path.write_text('[tenants.ann]\nuids = [1]\n[models.m]\npath = "/models/m.onnx"\npython = "python3"\n')
    server = begun(path)
    told: list[tuple[bytes, StatusResponse]] = []

    def reply_status(client: bytes, response: StatusResponse) -> None:
        told.append((client, response))

    server._request_router = SimpleNamespace(responses=SimpleNamespace(reply=reply_status))
    ann = server._tenant_resolver.get("ann")
    server.report_status(MetadataRequest(b"c", "7", "tenant ann"), Viewer(ann, can_see_all=False))
    assert told == []
    server._reports.step()
    [(client, response)] = told
    assert (client, response.id, response.state, response.pid) == (b"c", "7", "running", 0)
    assert [each.name for each in response.tenants] == ["ann"]


def test_a_reload_puts_tenants_and_their_accounting_in_force(tmp_path: Path) -> None:
    path = tmp_path / "weightd.toml"
    model = '[models.m]\npath = "/models/m.onnx"\npython = "python3"\n'
    path.write_text(model)
    server = begun(path)
    server._model_registry, server._process_supervisor, server._request_router = (
        mock.MagicMock(models=["m"]),
        mock.MagicMock(),
        mock.Mock(),
    )
    server._zmq_proxies = mock.Mock()
    path.write_text(
        f"[daemon]\naccounting_interval = 5\nmax_batch_seconds = 0.02\n[tenants.ann]\nuids = [1, 1001]\n{model}"
    )
    reload(server, 0.0)
    assert [tenant.name for tenant in server._tenant_resolver] == ["ann"]
    server._request_router.on_tenants_changed.assert_called_once_with()
    [(admitted,)] = [call.args for call in server._zmq_proxies.update_auth.call_args_list]
    assert (admitted["default"].keys, [each.tenant for each in admitted["default"].tenants]) == ((), ["ann"])
    assert sorted(timer.due_at for timer in server._usage_reporter.timers) == [5.0, 10.0]
    assert server._shared_scheduling.clocks.max_batch_s == 0.02
    ann = server._tenant_resolver.get("ann")
    for broken in ('uids = ["no such user"]', 'keys = ["none.pub"]', 'models = ["[a]"]'):
        path.write_text(f"[tenants.ann]\n{broken}\n{model}")
        with pytest.raises(RequestError):
            reload(server, 1.0)
        assert server._tenant_resolver.get("ann") is ann
        assert ann.config.user_ids == (1, 1001)


def test_reloads_are_counted_by_how_they_end_and_meters_go_with_their_models(tmp_path: Path) -> None:
    path = tmp_path / "weightd.toml"
    model = '[models.%s]\npath = "/models/m.onnx"\npython = "python3"\n'
    path.write_text(model % "m")
    server = begun(path)
    server._model_registry, server._process_supervisor, server._request_router = (
        mock.MagicMock(models=["n"]),
        mock.MagicMock(),
        mock.Mock(),
    )
    server._zmq_proxies = mock.Mock()
    meter = server._counter_registry.counters_of("n")
    server._counter_registry.counters_of("m")
    outcomes: list[Any] = []
    for text in (model % "n", "[models"):
        path.write_text(text)
        server._active_reloads = [outcomes.append]
        server._on_config_read(read_file(path))
    assert [isinstance(each, RequestError) for each in outcomes] == [False, True]
    assert (server._daemon_counters.reloads, server._daemon_counters.refused_reloads) == (1, 1)
    assert [each.model for each in server._counter_registry.records()] == ["n"]
    assert server._counter_registry.counters_of("n") is meter


def test_a_file_is_read_once_for_all_reloads_that_wait_and_again_for_those_that_come_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "weightd.toml"
    path.write_text('[models.m]\npath = "/models/m.onnx"\npython = "python3"\n')
    server = begun(path)
    server._model_registry, server._process_supervisor, server._request_router = (
        mock.MagicMock(models=["m"]),
        mock.MagicMock(),
        mock.Mock(),
    )
    server._zmq_proxies = mock.Mock()
    server._model_registry.compare.return_value = ConfigDiff((), (), ())
    server._config_reader = mock.Mock()
    for number in ("1", "2"):
        server.reload(b"client", number)
    for _ in range(2):
        server._start_config_read()
    server.reload(b"client", "3")
    server._start_config_read()
    [((_, _, tell), _)] = server._config_reader.start.call_args_list
    tell(read_file(path))
    told = server._request_router.admin.reply_reloaded
    assert [call.args[1].id for call in told.call_args_list] == ["1", "2"]
    assert server._config_reader.start.call_count == 2
    path.write_text("[models")
    tell(read_file(path))
    assert [call.args[1] for call in server._request_router.admin.reply_failed.call_args_list] == ["3"]
    server._start_config_read()
    assert server._config_reader.start.call_count == 2
    # A process that cannot be started is an answer, too.
    server._config_reader.start.side_effect = OSError(11, "Resource temporarily unavailable")
    server.reload(b"client", "4")
    server._start_config_read()
    assert "cannot start the process" in str(server._request_router.admin.reply_failed.call_args.args[2])
    for each in range(16):
        server.reload(b"client", f"more {each}")
    with pytest.raises(ResourceExhausted):
        server.reload(b"client", "one more")


def test_a_reload_looks_for_the_files_of_the_models_that_it_would_load(tmp_path: Path) -> None:
    path, none, there = tmp_path / "weightd.toml", tmp_path / "none.onnx", tmp_path / "there.mindir"
    there.write_bytes(b"a model")
    old = f'[models.old]\npath = "{none}"\npython = "python3"\n'
    path.write_text(old)
    server = begun(path)
    config = server._config.models["old"]
    server._model_registry.models["old"] = SimpleNamespace(
        is_updating=False, successor=None, config=config, may_retry=False
    )
    server._process_supervisor = SimpleNamespace(fork_servers=SimpleNamespace(reconcile=list))
    # What is loaded already is served from a copy.
    assert not any(reload(server, 0.0))
    (tmp_path / "d.onnx").mkdir()
    os.mkfifo(tmp_path / "pipe.npz")
    model = f'path = "{there}"\n'
    wrong = {
        'path = "none.onnx"\n': "path: {0}/none.onnx: No such file or directory",
        'path = "d.onnx"\n': "path: {0}/d.onnx: expected a file, got a directory",
        model + 'python = "./python"\n': "python: {0}/python: cannot be run: expected an executable file",
        model + 'selftest = "none.npz"\n': "selftest: {0}/none.npz: No such file or directory",
        model + 'selftest = "pipe.npz"\n': "selftest: {0}/pipe.npz: expected a regular file",
        model + 'mindspore_lite.config_file = "none"\n': "mindspore_lite.config_file: {0}/none: No such file",
    }
    for table, problem in wrong.items():
        python = "" if "python" in table else 'python = "python3"\n'
        path.write_text(f"{old}[models.new]\n{python}{table}")
        with pytest.raises(InvalidArgument) as caught:
            reload(server, 0.0)
        assert str(caught.value).startswith(f"{path}: models.new.{problem.format(tmp_path)}")
        assert (list(server._model_registry.models), server._file.note) == (["old"], f"not reloaded: {caught.value}")
    path.write_text(f'[models.old]\npath = "{none}"\npython = "python3"\nworkers = 2\n')
    with pytest.raises(InvalidArgument, match=r"models\.old\.path"):
        reload(server, 0.0)


def test_only_for_who_sees_all_is_memory_measured(tmp_path: Path) -> None:
    path = tmp_path / "weightd.toml"
    path.write_text('[tenants.ann]\nuids = [1]\n[models.m]\npath = "/models/m.onnx"\npython = "python3"\n')
    server = begun(path)
    server._process_supervisor, server._zmq_proxies = (
        SimpleNamespace(processes={}, storage=SimpleNamespace(files={})),
        SimpleNamespace(pids=[]),
    )
    server._request_router = SimpleNamespace(
        memory_budget=SimpleNamespace(used_bytes=1, max_bytes=2), dropped_responses=3
    )
    begun_to: list[object] = []
    server._memory_sampler = MemorySampler(begun_to.append)
    ann = server._tenant_resolver.get("ann")
    own = server.metrics("7", Viewer(ann, can_see_all=False))
    assert ([each.name for each in own.tenants], own.dropped_responses, begun_to) == (["ann"], 0, [])
    told = server.metrics("8", Viewer(ann, can_see_all=True))
    assert ([each.name for each in told.tenants], told.dropped_responses, len(begun_to)) == (
        ["ann", "(operators)"],
        3,
        1,
    )
    assert (told.id, told.state, told.buffered_bytes, told.max_memory_bytes) == ("8", "running", 1, 2)
