"""Reload of the configuration: applied and rejected changes, and replies to the requests."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest

from weightd_common.service_manager import ServiceManager
from weightd_common.terminal import Terminal
from weightd_daemon.config_file import ConfigFile, read_file
from weightd_daemon.config_in_force import ConfigInForce, TenantServices, update_devices
from weightd_daemon.counters import CounterRegistry, DaemonCounters
from weightd_daemon.models.placement import DeviceBudget
from weightd_daemon.models.registry import ConfigDiff, ModelRegistry
from weightd_daemon.platform import event_loop
from weightd_daemon.platform.event_loop import EventLoop
from weightd_daemon.reload import Reloader
from weightd_daemon.scheduling.fair_share import FairClocks
from weightd_daemon.shutdown import Shutdown, ShutdownEvent
from weightd_daemon.tenants.reporting import UsageReporter
from weightd_daemon.tenants.tenant import TenantResolver
from weightd_daemon.tenants.usage import UsageTable
from weightd_protocol.errors import InvalidArgument, RequestError, ResourceExhausted, Unavailable

MODEL = '[models.m]\npath = "/models/m.onnx"\npython = "python3"\n'


LOADED = SimpleNamespace(is_unloaded=False, may_retry=False)


class ReloadHarness:
    """A configuration file, the configuration in force, and a reader played by the test; `registry` may be a mock."""

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
            config, self.devices, self.registry, mock.MagicMock(), services, mock.MagicMock(),
            lookup=mock.Mock(), counters=self.counters, on_applied=mock.Mock(),
        )  # fmt: skip
        self.reader, self.shutdown, self.service = mock.Mock(), Shutdown(), mock.Mock()
        self.loop = EventLoop()
        self.reloader = Reloader(
            self.file, self.reader, self.in_force, self.loop, self.daemon_counters,
            shutdown=self.shutdown, service=self.service,
            terminal=Terminal(),
        )  # fmt: skip

    def reload(self) -> ConfigDiff:
        """Reload the file in this process and return the difference."""
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
        path, addresses, on_result, text = self.reader.start.call_args.args
        on_result(read_file(path, addresses, text))


def test_rejected_reload_changes_no_device(tmp_path: Path) -> None:
    path = tmp_path / "weightd.toml"

    def written(mib: int, workers: int) -> Path:
        path.write_text(
            f'[devices."ascend:0"]\nmemory_mib = {mib}\n'
            "[models.m]\n"
            f'path = "/models/m.mindir"\npython = "python3"\ndevices = ["ascend:0"]\nworkers = {workers}\n'
        )
        return path

    written(1000, 1)
    harness = ReloadHarness(path)
    device = harness.devices["ascend:0"]
    harness.registry.models["m"] = SimpleNamespace(
        is_updating=True, successor=None, config=harness.in_force.config.models["m"]
    )
    written(2000, 2)
    with pytest.raises(Unavailable):
        harness.reload()
    assert device.capacity_bytes == 1000 * 2**20


def test_listener_addresses_change_only_at_a_restart(tmp_path: Path) -> None:
    path = tmp_path / "weightd.toml"
    model = MODEL
    path.write_text('[listeners.one]\naddress = "ipc:///run/one"\n' + model)
    harness = ReloadHarness(path)
    path.write_text('[listeners.two]\naddress = "ipc:///run/one"\n' + model)
    with pytest.raises(RequestError) as caught:
        harness.reload()
    assert str(caught.value).splitlines() == [
        f"{path}: listeners.one.address: expected 'ipc:///run/one' as before, got None; restart weightd",
        f"{path}: listeners.two.address: expected None as before, got 'ipc:///run/one'; restart weightd",
    ]


def test_card_without_configured_memory_uses_the_reported(tmp_path: Path) -> None:
    path = tmp_path / "weightd.toml"
    model = '[models.m]\npath = "/models/m.mindir"\npython = "python3"\ndevices = ["ascend:0"]\n'
    path.write_text(f'[devices."ascend:0"]\nmemory_mib = 1000\n{model}')
    harness = ReloadHarness(path)
    config = harness.in_force.config.models["m"]
    harness.registry.models["m"] = SimpleNamespace(is_updating=False, successor=None, config=config, loading=LOADED)
    harness.reload()
    device = harness.devices["ascend:0"]
    assert device.capacity_bytes == 1000 * 2**20
    device.reported_bytes = 7
    harness.reload()
    assert device.capacity_bytes == 1000 * 2**20
    path.write_text(model)
    harness.reload()
    assert device.capacity_bytes == 7


def test_reload_applies_tenants_and_accounting(tmp_path: Path) -> None:
    path = tmp_path / "weightd.toml"
    path.write_text(MODEL)
    harness = ReloadHarness(path, mock.MagicMock(models={"m": mock.Mock(loading=LOADED)}))
    path.write_text(
        f"[daemon]\naccounting_interval = 5\nmax_batch_seconds = 0.02\n[tenants.ann]\nuids = [1, 1001]\n{MODEL}"
    )
    now = event_loop.now()
    harness.reload()
    assert [tenant.name for tenant in harness.tenants] == ["ann"]
    [(admitted,)] = [call.args for call in harness.on_tenants_changed.call_args_list]
    assert (admitted["default"].keys, [each.tenant for each in admitted["default"].tenants]) == ((), ["ann"])
    due = sorted(timer.due_at - now for timer in harness.usage_reporter.timers)
    assert due == [pytest.approx(5.0, abs=1.0), pytest.approx(10.0, abs=1.0)]
    assert harness.fair_clocks.max_batch_s == 0.02
    ann = harness.tenants.get("ann")
    assert ann is not None
    for broken in ('uids = ["no such user"]', 'keys = ["none.pub"]', 'models = ["[a]"]'):
        path.write_text(f"[tenants.ann]\n{broken}\n{MODEL}")
        with pytest.raises(RequestError):
            harness.reload()
        assert harness.tenants.get("ann") is ann
        assert ann.config.user_ids == (1, 1001)


def test_counts_reloads_and_drops_counters_of_removed_models(tmp_path: Path) -> None:
    path = tmp_path / "weightd.toml"
    path.write_text(MODEL)
    harness = ReloadHarness(path, mock.MagicMock(models={"n": mock.Mock(loading=LOADED)}))
    kept = harness.counters.counters_of("n")
    kept.restarts = harness.counters.counters_of("m").restarts = 1
    path.write_text(MODEL.replace("models.m", "models.n"))
    harness.reload()
    path.write_text("[models")
    with pytest.raises(InvalidArgument):
        harness.reload()
    assert (harness.daemon_counters.reloads, harness.daemon_counters.refused_reloads) == (1, 1)
    assert [each.model for each in harness.counters.records()] == ["n"]
    assert harness.counters.counters_of("n") is kept


def test_waiting_reloads_share_one_read(tmp_path: Path) -> None:
    path = tmp_path / "weightd.toml"
    path.write_text(MODEL)
    harness = ReloadHarness(path, mock.MagicMock(models={"m": mock.Mock(loading=LOADED)}))
    harness.registry.compare.return_value = ConfigDiff((), (), ())
    results: list[tuple[str, Any]] = []

    def request(name: str) -> None:
        harness.reloader.request(lambda outcome: results.append((name, outcome)))
        harness.loop.run_once(0.0)

    for name in ("1", "2"):
        harness.reloader.request(lambda outcome, name=name: results.append((name, outcome)))  # type: ignore[misc]
    harness.loop.run_once(0.0)
    request("3")
    assert (harness.reader.start.call_count, results) == (1, [])
    harness.answer()
    assert [name for name, _ in results] == ["1", "2"]
    assert harness.reader.start.call_count == 2
    path.write_text("[models")
    harness.answer()
    assert (results[-1][0], type(results[-1][1])) == ("3", InvalidArgument)
    assert harness.reader.start.call_count == 2
    # A process that cannot start is reported as the result.
    harness.reader.start.side_effect = OSError(11, "Resource temporarily unavailable")
    request("4")
    assert "cannot start the process" in str(results[-1][1])
    harness.reader.start.side_effect = None
    request("5")
    for _ in range(16):
        harness.reloader.request(mock.Mock())
    with pytest.raises(ResourceExhausted):
        harness.reloader.request(mock.Mock())
    harness.shutdown.handle(ShutdownEvent.STOP)
    with pytest.raises(Unavailable, match="is stopping"):
        harness.reloader.request(mock.Mock())
    harness.answer()
    assert (results[-1][0], type(results[-1][1])) == ("5", Unavailable)


def test_reload_by_sighup_notifies_the_service_manager(tmp_path: Path) -> None:
    path = tmp_path / "weightd.toml"
    path.write_text(MODEL)
    harness = ReloadHarness(path, mock.MagicMock(models={"m": mock.Mock(loading=LOADED)}))
    harness.service.begin_reload.return_value = False
    harness.reloader.on_hangup()
    harness.loop.run_once(0.0)
    harness.answer()
    harness.service.end_reload.assert_not_called()
    harness.service.begin_reload.return_value = True
    harness.reloader.on_hangup()
    harness.service.end_reload.assert_not_called()
    harness.loop.run_once(0.0)
    harness.answer()
    harness.service.end_reload.assert_called_once_with()
    harness.shutdown.handle(ShutdownEvent.STOP)
    harness.reloader.on_hangup()
    assert harness.service.end_reload.call_count == 2


def test_checks_files_of_models_to_be_loaded(tmp_path: Path) -> None:
    path, missing, existing = tmp_path / "weightd.toml", tmp_path / "none.onnx", tmp_path / "there.mindir"
    existing.write_bytes(b"a model")
    old = f'[models.old]\npath = "{missing}"\npython = "python3"\n'
    path.write_text(old)
    harness = ReloadHarness(path)
    config = harness.in_force.config.models["old"]
    harness.registry.models["old"] = SimpleNamespace(is_updating=False, successor=None, config=config, loading=LOADED)
    # A loaded model is served from its snapshot, so its file is not needed.
    assert not any(harness.reload())
    (tmp_path / "d.onnx").mkdir()
    os.mkfifo(tmp_path / "pipe.npz")
    model = f'path = "{existing}"\n'
    invalid = {
        'path = "none.onnx"\n': "path: {0}/none.onnx: No such file or directory",
        'path = "d.onnx"\n': "path: {0}/d.onnx: expected a file, got a directory",
        model + 'python = "./python"\n': "python: {0}/python: cannot be run: expected an executable file",
        model + 'selftest = "none.npz"\n': "selftest: {0}/none.npz: No such file or directory",
        model + 'selftest = "pipe.npz"\n': "selftest: {0}/pipe.npz: expected a regular file",
        model + 'mindspore_lite.config_file = "none"\n': "mindspore_lite.config_file: {0}/none: No such file",
    }
    for table, problem in invalid.items():
        python = "" if "python" in table else 'python = "python3"\n'
        path.write_text(f"{old}[models.new]\n{python}{table}")
        with pytest.raises(InvalidArgument) as caught:
            harness.reload()
        assert str(caught.value).startswith(f"{path}: models.new.{problem.format(tmp_path)}")
        assert (list(harness.registry.models), harness.file.note) == (["old"], f"not reloaded: {caught.value}")
    path.write_text(f'[models.old]\npath = "{missing}"\npython = "python3"\nworkers = 2\n')
    with pytest.raises(InvalidArgument, match=r"models\.old\.path"):
        harness.reload()


# --- the model repository -------------------------------------------------------------------------------------------


class RepositoryHarness(ReloadHarness):
    """A reloader whose repository changes when the test says so."""

    def __init__(self, directory: Path, rest: str = "") -> None:
        (directory / "models/a/1").mkdir(parents=True)
        path = directory / "weightd.toml"
        path.write_text(f'[repository]\npath = "models"\nsettle = 0.0\n{rest}')
        registry = mock.MagicMock(models={})
        registry.compare.side_effect = lambda models: ConfigDiff(tuple(models), (), (), ())
        super().__init__(path, registry)
        self.loop.add_timer(self.reloader.repository_timer)

    def change(self) -> None:
        """Report a change of the repository."""
        self.reloader.repository_timer.set(0.0)
        self.loop.run_once(0.0)
        self.loop.run_once(0.0)

    def read_text(self) -> str | None:
        """Return the text that the current read is to use; None for the file."""
        text: str | None = self.reader.start.call_args.args[-1]
        return text


@pytest.fixture
def repository(tmp_path: Path) -> Iterator[RepositoryHarness]:
    with mock.patch("weightd_daemon.reload.RepositoryWatcher"):
        yield RepositoryHarness(tmp_path)


def test_repository_is_read_with_the_text_in_force(repository: RepositoryHarness) -> None:
    in_force = repository.path.read_text()
    repository.path.write_text(in_force + "[daemon]\nmax_model_bytes = 1\n")
    results: list[Any] = []
    repository.reloader.request(results.append, is_dry_run=True)
    repository.change()
    # The dry run comes first, alone: its file must not get into force.
    assert repository.read_text() is None
    repository.answer()
    assert len(results) == 1
    repository.loop.run_once(0.0)
    assert repository.read_text() == in_force
    (repository.path.parent / "models/a/1/model.onnx").touch()
    repository.answer()
    assert repository.in_force.config.daemon.max_model_bytes == 0
    assert list(repository.in_force.config.models) == ["a@1"]
    assert repository.daemon_counters.reloads == 0


def test_refused_change_of_repository_is_tried_again(
    repository: RepositoryHarness, caplog: pytest.LogCaptureFixture
) -> None:
    repository.registry.compare.side_effect = Unavailable("a@1 is being updated")
    repository.change()
    repository.answer()
    assert "repository: the changes are not in force: a@1 is being updated" in caplog.text
    assert 0.0 < repository.reloader.repository_timer.due_at < float("inf")


def test_other_models_do_not_stop_changes_of_repository(tmp_path: Path) -> None:
    with mock.patch("weightd_daemon.reload.RepositoryWatcher"):
        harness = RepositoryHarness(tmp_path, MODEL)
        unloaded = SimpleNamespace(is_unloaded=True, may_retry=False)
        harness.registry.models["m"] = mock.Mock(loading=unloaded)
        harness.registry.compare.side_effect = lambda models: ConfigDiff(("a@1",), (), (), ("m",))
        (tmp_path / "models/a/1/model.onnx").touch()
        harness.change()
        harness.answer()
        assert list(harness.in_force.config.models) == ["m", "a@1"]
        with pytest.raises(InvalidArgument, match=r"models\.m\.path"):
            harness.reload()


def test_notes_of_file_and_repository_are_separate(repository: RepositoryHarness) -> None:
    repository.file.note = "not reloaded"
    (repository.path.parent / "models/a/config.toml").write_text("=")
    (repository.path.parent / "models/a/1/model.onnx").touch()
    repository.change()
    repository.answer()
    assert repository.file.note == "not reloaded"
    assert "config.toml: not TOML" in repository.file.repository_note
