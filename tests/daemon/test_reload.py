"""A reload: what it changes, what it does not, and whom it tells."""

from __future__ import annotations

import os
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from weightd_common.service_manager import ServiceManager
from weightd_common.terminal import Terminal
from weightd_daemon.config_file import ConfigFile, read_file
from weightd_daemon.counters import CounterRegistry, DaemonCounters
from weightd_daemon.models.placement import DeviceBudget
from weightd_daemon.models.registry import ConfigDiff, ModelRegistry
from weightd_daemon.platform import event_loop
from weightd_daemon.platform.event_loop import EventLoop
from weightd_daemon.reload import ConfigInForce, Reloader, TenantServices, update_devices
from weightd_daemon.scheduling.fair_share import FairClocks
from weightd_daemon.shutdown import Shutdown, ShutdownEvent
from weightd_daemon.tenants.reporting import UsageReporter
from weightd_daemon.tenants.tenant import TenantResolver
from weightd_daemon.tenants.usage import UsageTable
from weightd_protocol.errors import InvalidArgument, RequestError, ResourceExhausted, Unavailable

MODEL = '[models.m]\npath = "/models/m.onnx"\npython = "python3"\n'


class Reloads:
    """A configuration file, what is in force of it, and a reader that the test plays; `registry` may be faked."""

    def __init__(self, path: Path, registry: Any = None) -> None:
        self.path = path
        self.file = ConfigFile(path, ServiceManager({}))
        config = self.file.load_initial()
        self.registry: Any = registry or ModelRegistry(mock.Mock())
        self.devices: dict[str, DeviceBudget] = {}
        update_devices(self.devices, config)
        self.tenants, self.fair_clocks = TenantResolver(config.tenants), FairClocks()
        self.usage_reporter = UsageReporter(self.tenants, UsageTable(), lambda: self.registry.models)
        self.on_tenants_changed = mock.Mock()
        services = TenantServices(
            self.tenants, mock.Mock(), self.usage_reporter, self.fair_clocks, self.on_tenants_changed
        )
        self.counters, self.daemon_counters = CounterRegistry(), DaemonCounters(lambda: 0)
        self.in_force = ConfigInForce(
            config, self.devices, self.registry, mock.MagicMock(), services,
            counters=self.counters, on_applied=mock.Mock(),
        )  # fmt: skip
        self.reader, self.shutdown, self.service = mock.Mock(), Shutdown(), mock.Mock()
        self.loop = EventLoop()
        self.reloader = Reloader(
            self.file, self.reader, self.in_force, self.loop, self.daemon_counters,
            shutdown=self.shutdown, service=self.service,
            terminal=Terminal(),
        )  # fmt: skip

    def reload(self) -> ConfigDiff:
        """Put in force what the file says, without a process that reads it; return what has changed."""
        outcomes: list[Any] = []
        self.reloader.request(outcomes.append)
        self.loop.run_once(0.0)
        self.answer()
        [outcome] = outcomes
        if isinstance(outcome, RequestError):
            raise outcome
        diff: ConfigDiff = outcome
        return diff

    def answer(self) -> None:
        """Play the process that reads the file."""
        path, addresses, on_result = self.reader.start.call_args.args
        on_result(read_file(path, addresses))


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
    scene = Reloads(path)
    device = scene.devices["ascend:0"]
    scene.registry.models["m"] = SimpleNamespace(
        is_updating=True, successor=None, config=scene.in_force.config.models["m"]
    )
    written(2000, 2)
    with pytest.raises(Unavailable):
        scene.reload()
    assert device.capacity_bytes == 1000 * 2**20


def test_where_clients_connect_is_changed_by_a_restart_alone(tmp_path: Path) -> None:
    path = tmp_path / "weightd.toml"
    model = MODEL
    path.write_text('[listeners.one]\naddress = "ipc:///run/one"\n' + model)
    scene = Reloads(path)
    path.write_text('[listeners.two]\naddress = "ipc:///run/one"\n' + model)
    with pytest.raises(RequestError) as caught:
        scene.reload()
    assert str(caught.value).splitlines() == [
        f"{path}: listeners.one.address: expected 'ipc:///run/one' as before, got None; restart weightd",
        f"{path}: listeners.two.address: expected None as before, got 'ipc:///run/one'; restart weightd",
    ]


def test_a_card_has_what_it_has_said_where_the_configuration_says_no_more(tmp_path: Path) -> None:
    path = tmp_path / "weightd.toml"
    model = '[models.m]\npath = "/models/m.mindir"\npython = "python3"\ndevices = ["ascend:0"]\n'
    path.write_text(f'[devices."ascend:0"]\nmemory_mib = 1000\n{model}')
    scene = Reloads(path)
    config = scene.in_force.config.models["m"]
    scene.registry.models["m"] = SimpleNamespace(is_updating=False, successor=None, config=config, may_retry=False)
    scene.reload()
    device = scene.devices["ascend:0"]
    assert device.capacity_bytes == 1000 * 2**20
    device.reported_bytes = 7
    scene.reload()
    assert device.capacity_bytes == 1000 * 2**20
    path.write_text(model)
    scene.reload()
    assert device.capacity_bytes == 7


def test_a_reload_puts_tenants_and_their_accounting_in_force(tmp_path: Path) -> None:
    path = tmp_path / "weightd.toml"
    path.write_text(MODEL)
    scene = Reloads(path, mock.MagicMock(models=["m"]))
    path.write_text(
        f"[daemon]\naccounting_interval = 5\nmax_batch_seconds = 0.02\n[tenants.ann]\nuids = [1, 1001]\n{MODEL}"
    )
    now = event_loop.now()
    scene.reload()
    assert [tenant.name for tenant in scene.tenants] == ["ann"]
    [(admitted,)] = [call.args for call in scene.on_tenants_changed.call_args_list]
    assert (admitted["default"].keys, [each.tenant for each in admitted["default"].tenants]) == ((), ["ann"])
    due = sorted(timer.due_at - now for timer in scene.usage_reporter.timers)
    assert due == [pytest.approx(5.0, abs=1.0), pytest.approx(10.0, abs=1.0)]
    assert scene.fair_clocks.max_batch_s == 0.02
    ann = scene.tenants.get("ann")
    assert ann is not None
    for broken in ('uids = ["no such user"]', 'keys = ["none.pub"]', 'models = ["[a]"]'):
        path.write_text(f"[tenants.ann]\n{broken}\n{MODEL}")
        with pytest.raises(RequestError):
            scene.reload()
        assert scene.tenants.get("ann") is ann
        assert ann.config.user_ids == (1, 1001)


def test_reloads_are_counted_by_how_they_end_and_counters_go_with_their_models(tmp_path: Path) -> None:
    path = tmp_path / "weightd.toml"
    path.write_text(MODEL)
    scene = Reloads(path, mock.MagicMock(models=["n"]))
    kept = scene.counters.counters_of("n")
    scene.counters.counters_of("m")
    path.write_text(MODEL.replace("models.m", "models.n"))
    scene.reload()
    path.write_text("[models")
    with pytest.raises(InvalidArgument):
        scene.reload()
    assert (scene.daemon_counters.reloads, scene.daemon_counters.refused_reloads) == (1, 1)
    assert [each.model for each in scene.counters.records()] == ["n"]
    assert scene.counters.counters_of("n") is kept


def test_a_file_is_read_once_for_all_reloads_that_wait_and_again_for_those_that_come_meanwhile(tmp_path: Path) -> None:
    path = tmp_path / "weightd.toml"
    path.write_text(MODEL)
    scene = Reloads(path, mock.MagicMock(models=["m"]))
    scene.registry.compare.return_value = ConfigDiff((), (), ())
    told: list[tuple[str, Any]] = []

    def request(name: str) -> None:
        scene.reloader.request(lambda outcome: told.append((name, outcome)))
        scene.loop.run_once(0.0)

    for name in ("1", "2"):
        scene.reloader.request(lambda outcome, name=name: told.append((name, outcome)))  # type: ignore[misc]
    scene.loop.run_once(0.0)
    request("3")
    assert (scene.reader.start.call_count, told) == (1, [])
    scene.answer()
    assert [name for name, _ in told] == ["1", "2"]
    assert scene.reader.start.call_count == 2
    path.write_text("[models")
    scene.answer()
    assert (told[-1][0], type(told[-1][1])) == ("3", InvalidArgument)
    assert scene.reader.start.call_count == 2
    # A process that cannot be started is an answer, too.
    scene.reader.start.side_effect = OSError(11, "Resource temporarily unavailable")
    request("4")
    assert "cannot start the process" in str(told[-1][1])
    scene.reader.start.side_effect = None
    request("5")
    for _ in range(16):
        scene.reloader.request(mock.Mock())
    with pytest.raises(ResourceExhausted):
        scene.reloader.request(mock.Mock())
    scene.shutdown.handle(ShutdownEvent.STOP)
    with pytest.raises(Unavailable, match="is stopping"):
        scene.reloader.request(mock.Mock())
    scene.answer()
    assert (told[-1][0], type(told[-1][1])) == ("5", Unavailable)


def test_a_reload_by_hangup_tells_the_service_manager_when_it_has_ended(tmp_path: Path) -> None:
    path = tmp_path / "weightd.toml"
    path.write_text(MODEL)
    scene = Reloads(path, mock.MagicMock(models=["m"]))
    scene.service.begin_reload.return_value = False
    scene.reloader.on_hangup()
    scene.loop.run_once(0.0)
    scene.answer()
    scene.service.end_reload.assert_not_called()
    scene.service.begin_reload.return_value = True
    scene.reloader.on_hangup()
    scene.service.end_reload.assert_not_called()
    scene.loop.run_once(0.0)
    scene.answer()
    scene.service.end_reload.assert_called_once_with()
    scene.shutdown.handle(ShutdownEvent.STOP)
    scene.reloader.on_hangup()
    assert scene.service.end_reload.call_count == 2


def test_a_reload_looks_for_the_files_of_the_models_that_it_would_load(tmp_path: Path) -> None:
    path, none, there = tmp_path / "weightd.toml", tmp_path / "none.onnx", tmp_path / "there.mindir"
    there.write_bytes(b"a model")
    old = f'[models.old]\npath = "{none}"\npython = "python3"\n'
    path.write_text(old)
    scene = Reloads(path)
    config = scene.in_force.config.models["old"]
    scene.registry.models["old"] = SimpleNamespace(is_updating=False, successor=None, config=config, may_retry=False)
    # What is loaded already is served from a copy.
    assert not any(scene.reload())
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
            scene.reload()
        assert str(caught.value).startswith(f"{path}: models.new.{problem.format(tmp_path)}")
        assert (list(scene.registry.models), scene.file.note) == (["old"], f"not reloaded: {caught.value}")
    path.write_text(f'[models.old]\npath = "{none}"\npython = "python3"\nworkers = 2\n')
    with pytest.raises(InvalidArgument, match=r"models\.old\.path"):
        scene.reload()
