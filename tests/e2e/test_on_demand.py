"""Models that load on demand or by command: loads, unloads, budgets, failures, rights and restarts."""

from __future__ import annotations

import contextlib
import http.client
import os
import resource
import shutil
import signal
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tritonclient.grpc as triton
from tritonclient.utils import InferenceServerException

from ascendsim import Host, environment
from ascendsim import models as simulated
from testkit import models, users
from testkit.gatewayprocess import GatewayProcess
from testkit.managed import ManagedService
from testkit.service import Service
from testkit.users import ALICE, BOB, User
from testkit.waiting import until
from weightd import FailedPrecondition, NotFound, PermissionDenied, ResourceExhausted, Unavailable
from weightd_protocol.messages.status import ModelStatus

from .ascend.support import WIDTH
from .ascend.support import questions as simulated_questions
from .support import (
    MLP_WEIGHT_BYTES,
    ONE_ENGINE,
    BareEngine,
    DaemonPaths,
    Load,
    SampleRequest,
    Watched,
    Zoo,
    ask_all,
    assert_same,
    mlp_inputs,
    model_status,
)
from .test_scarcity import disk

pytestmark = [pytest.mark.e2e, ONE_ENGINE]

MIB = 1024 * 1024
NAMES = ("a", "b", "c")

# Longer than any test: a model with it is never idle for long enough.
LONG_S = 600.0


class Files:
    """Three small models with different answers."""

    def __init__(self, directory: Path, bare: BareEngine) -> None:
        self.paths = {name: models.tiny(directory / f"{name}.onnx", seed) for seed, name in enumerate(NAMES)}
        inputs = mlp_inputs((1, 3, 2), 64)
        self.questions = {name: bare.questions(path, inputs) for name, path in self.paths.items()}


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory, bare: BareEngine) -> Files:
    return Files(tmp_path_factory.mktemp("models"), bare)


def on_demand(path: Path, **more: object) -> dict[str, object]:
    return {"path": path, "load": "on_demand", "idle_unload": LONG_S, **more}


def pids(service: Service, name: str) -> set[int]:
    return {each.pid for one in model_status(service, name).generations for each in one.processes}


def state(service: Service, name: str) -> str:
    return model_status(service, name).state


def wait_until_serving(service: Service, name: str) -> None:
    until(lambda: state(service, name) == "serving", f"{name} serves")


def wait_for_long_delay(service: Service, name: str) -> None:
    until(lambda: (model_status(service, name).retry_s or 0.0) > 1.5, "the next attempt is far away")


def wait_for_exits(watched: Watched) -> None:
    until(lambda: not watched.survivors(), "the processes exit")


def weightctl(address: str, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "weightctl", "--socket", address, *arguments]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


# --- loads and unloads ----------------------------------------------------------------------------------------------


def test_first_requests_load_the_model_and_idleness_unloads_it(files: Files) -> None:
    with Service({"a": on_demand(files.paths["a"], idle_unload=0.5)}) as service, service.client() as client:
        status = model_status(service, "a")
        assert (status.state, status.load, status.reserved_bytes) == ("unloaded", "on_demand", 0)
        assert not pids(service, "a")
        # Nothing that the engine needs is in memory.
        assert not service.status().fork_servers
        with Load(service.address, "a", files.questions["a"], clients=3) as load:
            load.wait_for(30)
            assert {each.origin for each in service.processes()} == {"forked"}
            running = pids(service, "a")
            assert running
            # Requests keep the model loaded.
            load.wait_for(200)
            assert pids(service, "a") == running
        with Watched(pids(service, "a")) as watched:
            until(lambda: state(service, "a") == "unloaded", "the idle model is unloaded")
            wait_for_exits(watched)
        assert not pids(service, "a")
        ask_all(client, "a", files.questions["a"])


@pytest.fixture(scope="module")
def slow(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return models.patient(tmp_path_factory.mktemp("slow") / "slow.onnx")


def test_unload_answers_accepted_requests_and_ends_processes(slow: Path) -> None:
    with Service({"slow": {"path": slow, "load": "manual"}}) as service, service.client() as client:
        with pytest.raises(FailedPrecondition, match="weightctl load slow"):
            client.infer("slow", {"n": np.array([1], np.int64)})
        assert not pids(service, "slow")
        assert client.load("slow").state == "serving"
        with Watched(pids(service, "slow")) as watched, service.client() as other:
            [worker] = [each.pid for each in service.processes() if each.role == "worker"]
            os.kill(worker, signal.SIGSTOP)
            accepted = [client.submit("slow", {"n": np.array([value], np.int64)}) for value in (5, 7)]
            until(
                lambda: model_status(service, "slow").generations[-1].processes[-1].in_flight,
                "the requests are accepted",
            )
            assert client.unload("slow", wait=False).state
            with pytest.raises(Unavailable, match="being unloaded"):
                other.infer("slow", {"n": np.array([1], np.int64)})
            os.kill(worker, signal.SIGCONT)
            assert [each.result()["y"].tolist() for each in accepted] == [[5], [7]]
            until(lambda: state(service, "slow") == "unloaded", "the model is unloaded")
            wait_for_exits(watched)
        with pytest.raises(FailedPrecondition, match="weightctl load slow"):
            client.infer("slow", {"n": np.array([1], np.int64)})
        done = weightctl(service.address, "load", "slow", "--wait")
        assert (done.returncode, done.stdout) == (0, "slow: serving\n")
        assert client.infer("slow", {"n": np.array([9], np.int64)})["y"].tolist() == [9]


# --- budgets --------------------------------------------------------------------------------------------------------


def test_least_recently_used_model_makes_room(files: Files) -> None:
    tables = {name: on_demand(path) for name, path in files.paths.items()}
    roomy = 1024 * MIB
    with Service(tables, {"max_model_bytes": roomy, "min_resident": 0.0}) as service, service.client() as client:

        def ask(name: str) -> None:
            ask_all(client, name, files.questions[name])
            status = client.status()
            assert 0 < status.model_bytes <= status.max_model_bytes
            assert status.model_bytes == sum(each.reserved_bytes for each in status.models)

        ask("a")
        estimate = model_status(service, "a").reserved_bytes
        ask("b")
        ask("c")

        def measured() -> list[int]:
            needs = [model_status(service, name).reserved_bytes for name in NAMES]
            return needs if all(each != estimate for each in needs) else []

        needs = until(measured, "the models are measured")
        budget = sum(needs) - min(needs) // 2  # for any two of the three models
        text = service.config.read_text("utf-8")
        service.config.write_text(text.replace(f"max_model_bytes = {roomy}", f"max_model_bytes = {budget}"), "utf-8")
        client.reload()
        until(lambda: state(service, "a") == "unloaded", "the least recently used model is unloaded")
        assert client.status().max_model_bytes == budget
        ask("b")
        ask("a")
        assert {name: state(service, name) for name in NAMES} == {"a": "serving", "b": "serving", "c": "unloaded"}
        for name in ("c", "b", "a"):
            ask(name)
        assert service.log.count("its memory is needed for") >= 3


def test_cache_keeps_snapshots_of_recent_models(files: Files) -> None:
    size = files.paths["a"].stat().st_size
    tables = {name: on_demand(files.paths[name]) for name in NAMES}
    with Service(tables, {"cache_bytes": 2 * size + 100}) as service, service.client() as client:
        for name in NAMES:
            ask_all(client, name, files.questions[name])
        # The snapshots of loaded models stay, even above the limit.
        assert len(snapshots(service)) == len(NAMES)
        # Commands would remove the snapshots, so the models become idle.
        service.reload({name: {**table, "idle_unload": 0.1} for name, table in tables.items()})
        until(lambda: {state(service, name) for name in NAMES} == {"unloaded"}, "all models are idle")
        until(lambda: snapshots(service) == {"b", "c"}, "the snapshot of the model used first is gone")
        ask_all(client, "a", files.questions["a"])


def snapshots(service: Service) -> set[str]:
    return {each.name.partition(".")[0] for each in service.cache.rglob("*.snapshot") if each.is_dir()}


def test_model_that_never_fits_is_refused_with_need_and_budget(files: Files, zoo: Zoo) -> None:
    tables = {"a": on_demand(files.paths["a"]), "large": on_demand(zoo.path("large", "onnxruntime"))}
    with Service(tables, {"max_model_bytes": 40 * MIB}) as service, service.client() as client:
        with pytest.raises(FailedPrecondition, match=r"large needs \d+ MiB, but max_model_bytes is 40 MiB"):
            client.infer("large", {"x": np.zeros((1, 1024), np.float32)})
        ask_all(client, "a", files.questions["a"])
        assert not pids(service, "large")


# --- failures -------------------------------------------------------------------------------------------------------


def failed(service: Service, name: str) -> ModelStatus:
    """Wait until the model has failed, and return its status."""
    until(lambda: state(service, name) == "failed", f"{name} fails")
    return model_status(service, name)


WAYS = ("itself", "retry", "load", "reload")


@pytest.mark.parametrize(("size", "cause"), [(0.0, "No such file"), (0.5, "truncated")])
def test_serves_once_the_file_is_complete(files: Files, tmp_path: Path, size: float, cause: str) -> None:
    content = files.paths["a"].read_bytes()
    paths = {name: tmp_path / f"{name}.onnx" for name in WAYS}
    for path in paths.values():
        path.write_bytes(content)
    with Service({name: on_demand(path) for name, path in paths.items()}) as service, service.client() as client:
        for name, path in paths.items():
            if size:
                path.write_bytes(content[: int(size * len(content))])
            else:
                path.unlink()
            with pytest.raises(Unavailable, match=cause):
                client.infer(name, files.questions["a"][0].inputs)
            status = failed(service, name)
            assert cause in status.generations[-1].reason
            assert status.attempts >= 1
            assert status.retry_s is not None
        for name, path in paths.items():
            # The next attempt is far enough away for the command to be first.
            wait_for_long_delay(service, name)
            path.write_bytes(content)
            if name == "reload":
                assert client.reload().changed == ()
            elif name != "itself":
                assert client.load(name, action=name).state == "serving"
            wait_until_serving(service, name)
            ask_all(client, name, files.questions["a"])
            assert model_status(service, name).attempts == 0


def test_file_that_is_no_model_waits_for_a_retry(files: Files, tmp_path: Path) -> None:
    path = tmp_path / "a.onnx"
    # Valid protobuf for the daemon, but not a model for the engine.
    path.write_bytes(b"\x08\x08")
    os.utime(path, (1e9, 1e9))
    with Service({"a": on_demand(path)}) as service, service.client() as client:
        with pytest.raises(FailedPrecondition):
            client.infer("a", files.questions["a"][0].inputs)
        assert failed(service, "a").retry_s is None
        assert weightctl(service.address, "retry", "a", "--wait").returncode == 1
        shutil.copyfile(files.paths["a"], path)
        assert state(service, "a") == "failed"
        assert client.load("a", action="retry").state == "serving"
        ask_all(client, "a", files.questions["a"])


@pytest.mark.skipif(os.getuid() != 0, reason="only root can mount")
def test_serves_once_the_disk_has_space(mlp: Path, questions: list[SampleRequest], place: DaemonPaths) -> None:
    mib = MLP_WEIGHT_BYTES // MIB + 1
    with disk(place, mib - 2), place.serve({"mlp": on_demand(mlp)}) as daemon, daemon.client(place.address) as client:
        with pytest.raises(Unavailable, match="No space left on device"):
            client.infer("mlp", questions[0].inputs)
        [status] = client.status().models
        assert status.attempts >= 1
        assert status.retry_s is not None
        subprocess.run(["mount", "-o", f"remount,size={4 * mib}m", str(place.cache)], check=True)
        until(lambda: client.status().models[0].state == "serving", "the model serves")
        ask_all(client, "mlp", questions)


@pytest.mark.skipif(os.getuid() != 0, reason="only root can change limits of other processes")
def test_serves_once_the_daemon_has_descriptors(files: Files) -> None:
    with Service({"a": on_demand(files.paths["a"])}) as service, service.client() as client:
        client.status()
        limits = resource.prlimit(service.pid, resource.RLIMIT_NOFILE)
        used = max(int(each.name) for each in Path(f"/proc/{service.pid}/fd").iterdir()) + 1
        resource.prlimit(service.pid, resource.RLIMIT_NOFILE, (used, limits[1]))
        with pytest.raises(Unavailable, match="Too many open files"):
            client.infer("a", files.questions["a"][0].inputs)
        [status] = client.status().models
        assert status.attempts >= 1
        assert "Too many open files" in status.generations[-1].reason
        resource.prlimit(service.pid, resource.RLIMIT_NOFILE, limits)
        wait_until_serving(service, "a")
        ask_all(client, "a", files.questions["a"])


# --- tenants --------------------------------------------------------------------------------------------------------


def test_tenant_loads_only_its_models_and_within_its_budget(files: Files) -> None:
    users.need_other_users()
    tables = {name: {"path": path, "load": "manual"} for name, path in files.paths.items()}
    tenants: dict[str, dict[str, object]] = {
        "ann": {"uids": [ALICE], "models": ["a", "b"], "may": ["infer", "load"], "max_model_bytes": 1 * MIB},
        "ben": {"uids": [BOB], "models": ["a"]},
    }
    with (
        Service(tables, tenants=tenants, gid=users.CLIENTS_GID) as service,
        User(ALICE) as ann,
        User(BOB) as ben,
    ):
        for user in (ann, ben):
            user.connect(service.address)
        for method in ("load", "unload"):
            with pytest.raises(PermissionDenied):
                ben.ask(method, "a")
            with pytest.raises((PermissionDenied, NotFound)):
                ann.ask(method, "c")
        with pytest.raises(ResourceExhausted, match="max_model_bytes"):
            ann.ask("load", "a")
        assert not pids(service, "a")
        service.reload(tenants={**tenants, "ann": {**tenants["ann"], "max_model_bytes": 1024 * MIB}})
        assert ann.ask("load", "a").state == "serving"
        status = model_status(service, "a")
        assert (status.owner, status.reserved_bytes > 0) == ("ann", True)
        question = files.questions["a"][0]
        assert_same(ben.ask("infer", "a", question.inputs), question.answer)
        assert ann.ask("unload", "a").state == "unloaded"
        assert not pids(service, "a")
        assert state(service, "c") == "unloaded"


# --- restarts and reloads -------------------------------------------------------------------------------------------


def test_daemon_killed_during_a_load_answers_later_requests(files: Files, mlp: Path) -> None:
    tables = {"a": on_demand(files.paths["a"]), "b": on_demand(files.paths["b"]), "mlp": on_demand(mlp)}
    budget = 1024 * MIB
    with ManagedService(tables, {"max_model_bytes": budget}) as service:
        with service.client() as client:
            ask_all(client, "a", files.questions["a"])
            kept = pids(service, "a")
            pending = client.submit("b", files.questions["b"][0].inputs)
            until(lambda: "b.1: " in service.log, "the model loads")
            os.kill(service.pid, signal.SIGKILL)
            service.wait()
            service.start_again()
            with contextlib.suppress(Unavailable):
                assert_same(pending.result(), files.questions["b"][0].answer)
        with service.client() as client:
            assert state(service, "a") == "serving"
            assert pids(service, "a") == kept
            reserved = {each.name: each.reserved_bytes for each in client.status().models}
            assert reserved["a"]
            ask_all(client, "b", files.questions["b"])
            ask_all(client, "a", files.questions["a"])
            status = client.status()
            assert sum(each.reserved_bytes for each in status.models) == status.model_bytes <= budget
            for name in ("a", "b"):
                with Watched(pids(service, name)) as watched:
                    client.unload(name)
                    wait_for_exits(watched)
            assert client.status().model_bytes == 0
            assert not service.processes()


@pytest.mark.long
def test_reload_of_models_on_demand(files: Files, tmp_path: Path) -> None:
    tables = {"a": on_demand(files.paths["a"]), "b": on_demand(files.paths["b"])}
    with Service(tables) as service, service.client() as client:
        ask_all(client, "a", files.questions["a"])
        before = pids(service, "a")
        text = service.config.read_text("utf-8")
        service.config.write_text(text.replace("idle_unload = 600.0", "idle_unload = 600.0\nthreads = 2"), "utf-8")
        done = weightctl(service.address, "reload", "--dry-run")
        assert done.returncode == 0, done
        assert "a" in done.stdout
        assert "b" in done.stdout
        assert pids(service, "a") == before
        with Load(service.address, "a", files.questions["a"]) as load:
            load.wait_for(20)
            done = weightctl(service.address, "reload", "--wait")
            assert done.returncode == 0, done
            until(lambda: pids(service, "a") and not pids(service, "a") & before, "the changed model serves")
            load.wait_for(20)
        # An unloaded model changes without a load.
        assert state(service, "b") == "unloaded"
        assert not pids(service, "b")
        ask_all(client, "b", files.questions["b"])
        bad = tmp_path / "bad.onnx"
        bad.write_bytes(b"\x08\x08")
        os.utime(bad, (1e9, 1e9))
        changed = service.config.read_text("utf-8").replace(str(files.paths["a"]), str(bad))
        service.config.write_text(changed, "utf-8")
        done = weightctl(service.address, "reload", "--wait")
        assert done.returncode == 1, done
        ask_all(client, "a", files.questions["a"])


# --- the gateway ----------------------------------------------------------------------------------------------------


def post(gateway: GatewayProcess, path: str) -> tuple[int, str]:
    connection = http.client.HTTPConnection("127.0.0.1", gateway.port("http"), timeout=30)
    with contextlib.closing(connection):
        connection.request("POST", path, b"{}")
        response = connection.getresponse()
        return response.status, response.read().decode()


@pytest.mark.long
def test_gateway_loads_and_unloads_if_model_control_is_on(files: Files, tmp_path: Path) -> None:
    with Service({"a": {"path": files.paths["a"], "load": "manual"}}) as service:
        repository = "/v2/repository/models/a"
        with (
            GatewayProcess(tmp_path, service.address) as gateway,
            contextlib.closing(triton.InferenceServerClient(f"127.0.0.1:{gateway.port('grpc')}")) as client,
        ):
            code, text = post(gateway, f"{repository}/load")
            assert (code, "model_control" in text) == (403, True)
            for call in (client.load_model, client.unload_model):
                with pytest.raises(InferenceServerException, match="model_control"):
                    call("a")
            assert state(service, "a") == "unloaded"
        with (
            GatewayProcess(tmp_path, service.address, {"gateway": {"model_control": True}}) as gateway,
            contextlib.closing(triton.InferenceServerClient(f"127.0.0.1:{gateway.port('grpc')}")) as client,
        ):
            assert post(gateway, f"{repository}/load")[0] == 200
            assert state(service, "a") == "serving"
            assert post(gateway, f"{repository}/unload")[0] == 200
            assert state(service, "a") == "unloaded"
            client.load_model("a")
            assert client.is_model_ready("a")
            client.unload_model("a")
            assert not client.is_model_ready("a")
            assert not pids(service, "a")


# --- other engines --------------------------------------------------------------------------------------------------


@pytest.mark.engines("mindspore_lite")
def test_mindspore_lite_model_loads_on_demand(mlp: Path, questions: list[SampleRequest]) -> None:
    with Service({"mlp": on_demand(mlp)}) as service, service.client() as client:
        assert not pids(service, "mlp")
        ask_all(client, "mlp", questions)
        with Watched(pids(service, "mlp")) as watched:
            assert client.unload("mlp").state == "unloaded"
            wait_for_exits(watched)
        ask_all(client, "mlp", questions)


@pytest.mark.long
def test_models_take_turns_on_a_card_with_room_for_one(tmp_path: Path) -> None:
    host = Host(tmp_path / "host", cards=1)
    paths = {name: simulated.mlp(tmp_path / f"{name}.mindir", width=WIDTH, seed=seed) for seed, name in enumerate("ab")}
    card = {"python": sys.executable, "devices": ["ascend:0"], "process_mib": 300}
    tables = {name: on_demand(path, **card) for name, path in paths.items()}
    with Service(tables, {"min_resident": 0.0}, env=environment(host)) as probe, probe.client() as client:
        ask_all(client, "a", simulated_questions(paths["a"]))
        mib = model_status(probe, "a").reserved_bytes // MIB
    devices = {"ascend:0": {"memory_mib": mib * 3 // 2}}
    with (
        Service(tables, {"min_resident": 0.0}, devices=devices, env=environment(host)) as service,
        service.client() as client,
    ):
        for name, other in (("a", "b"), ("b", "a"), ("a", "b")):
            ask_all(client, name, simulated_questions(paths[name]))
            assert not pids(service, other)
            assert state(service, other) == "unloaded"
