"""The main job: several processes answer real requests from one copy of the weights, and answer as the engine does."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from testkit import memory
from testkit.plain import PlainProcess
from testkit.service import Service
from testkit.waiting import until
from weightd.client import Client
from weightd.daemon.host import cgroup
from weightd.protocol.messages.status import MemoryLimit
from weightd.protocol.version import VERSION

from .support import (
    LARGE_WEIGHT_BYTES,
    LARGE_WIDTH,
    MLP_WEIGHT_BYTES,
    Arrays,
    Bare,
    Load,
    Zoo,
    ask_all,
    assert_same,
    embeddings,
    mlp_inputs,
    model_status,
    pairs,
    processes,
    ready_workers,
    wrapped_interpreter,
)

pytestmark = pytest.mark.e2e

WORKERS = {"mlp": 3, "two_inputs": 2, "integers": 2, "fixed": 2}

# Some outputs are large enough that the worker hands them to ZeroMQ without a copy (64 KiB).
BATCHES = (1, 2, 40, 7, 64, 1, 3, 48)


@pytest.fixture(scope="module")
def service(engine: str, zoo: Zoo) -> Iterator[Service]:
    tables = {name: {"path": zoo.path(name, engine), "workers": count} for name, count in WORKERS.items()}
    with Service(tables) as service:
        service.ready()
        yield service


@pytest.fixture
def client(service: Service) -> Iterator[Client]:
    with service.client() as client:
        yield client


def limits(memory: MemoryLimit | None) -> tuple[int | None, int | None] | None:
    return None if memory is None else (memory.limit_bytes, memory.high_bytes)


def inputs_of(name: str, engine: str) -> list[Arrays]:
    """Different inputs of a model."""
    random = np.random.default_rng(3)
    if name == "mlp":
        return mlp_inputs(BATCHES)
    if name == "two_inputs":
        return pairs(BATCHES)
    if name == "integers":
        return embeddings(BATCHES, engine)
    return [{"x": random.standard_normal((2, 3), dtype=np.float32)} for _ in BATCHES]


@pytest.mark.parametrize("name", WORKERS)
def test_every_worker_answers_as_the_engine_does_bit_for_bit(
    name: str, engine: str, service: Service, client: Client, zoo: Zoo, bare: Bare
) -> None:
    questions = bare.questions(zoo.path(name, engine), inputs_of(name, engine))

    def all_have_served() -> bool:
        ask_all(client, name, questions * 8)
        return all(each.served for each in processes(service, name, "worker"))

    until(all_have_served, f"each worker of {name} has served")


def test_batch_sizes_may_go_up_and_down(engine: str, client: Client, zoo: Zoo, bare: Bare) -> None:
    sizes = (1, 2, 3, 5, 8, 13, 64, 63, 2, 1, 64, 1, 8, 8, 1)
    for question in bare.questions(zoo.path("mlp", engine), mlp_inputs(sizes)):
        assert_same(client.infer("mlp", question.inputs), question.answer)


def test_clients_in_threads_get_their_own_answers(engine: str, service: Service, zoo: Zoo, bare: Bare) -> None:
    questions = bare.questions(zoo.path("mlp", engine), mlp_inputs(BATCHES))
    with Load(service.address, "mlp", questions, clients=4) as load:
        load.wait_for(400)


@pytest.mark.parametrize("batch", [2, 64])
def test_an_answer_is_not_overwritten_by_later_ones(
    batch: int, engine: str, client: Client, zoo: Zoo, bare: Bare
) -> None:
    first, *later = bare.questions(zoo.path("mlp", engine), mlp_inputs((batch,) * 8))
    outputs = client.infer("mlp", first.inputs)
    ask_all(client, "mlp", later * 3)
    assert_same(outputs, first.answer)


def test_large_answers_on_their_way_are_not_overwritten_by_the_next_predict(
    engine: str, client: Client, zoo: Zoo, bare: Bare
) -> None:
    """Megabytes take longer to send than to compute here, so that a worker has the next request meanwhile."""
    questions = bare.questions(zoo.path("two_inputs", engine), pairs((200_000,) * 3))
    ask_all(client, "two_inputs", questions * 5)


def strided(array: NDArray[Any]) -> NDArray[Any]:
    wide = np.full((array.shape[0] * 2, array.shape[1] * 3), 9, array.dtype)
    wide[::2, ::3] = array
    return wide[::2, ::3]


def big_endian(array: NDArray[Any]) -> NDArray[Any]:
    return array.astype(array.dtype.newbyteorder(">"))


def big_endian_fortran(array: NDArray[Any]) -> NDArray[Any]:
    return np.asfortranarray(big_endian(array))


@pytest.mark.parametrize("layout", [big_endian_fortran, strided])
@pytest.mark.parametrize("batch", [3, 64])
def test_how_an_input_lies_in_memory_changes_nothing(
    layout: Callable[[NDArray[Any]], NDArray[Any]], batch: int, engine: str, client: Client, zoo: Zoo, bare: Bare
) -> None:
    [question] = bare.questions(zoo.path("mlp", engine), mlp_inputs((batch,)))
    array = layout(question.inputs["x"])
    np.testing.assert_array_equal(array, question.inputs["x"])
    assert_same(client.infer("mlp", {"x": array}), question.answer)
    np.testing.assert_array_equal(array, question.inputs["x"])


def test_inputs_are_bound_by_name_in_whatever_order_they_come(
    engine: str, client: Client, zoo: Zoo, bare: Bare
) -> None:
    [question] = bare.questions(zoo.path("two_inputs", engine), pairs((3,)))
    a, b = question.inputs["a"], question.inputs["b"]
    np.testing.assert_array_equal(question.answer["difference"], a - b)
    for inputs in ({"a": a, "b": b}, {"b": b, "a": a}):
        assert_same(client.infer("two_inputs", inputs), question.answer)


def test_every_worker_shares_the_weights(service: Service) -> None:
    generation = model_status(service, "mlp").generations[0]
    assert len(generation.processes) == 1 + WORKERS["mlp"]
    for each in generation.processes:
        assert each.shared_bytes is not None
        assert each.shared_bytes >= 0.98 * MLP_WEIGHT_BYTES, each
        assert each.note == ""
    assert generation.saved_bytes is not None
    assert generation.saved_bytes >= 0.98 * (WORKERS["mlp"] - 1) * MLP_WEIGHT_BYTES


def test_the_daemon_is_the_last_to_go_when_memory_runs_out(service: Service) -> None:
    def score(pid: int) -> int:
        return int(Path(f"/proc/{pid}/oom_score_adj").read_text("ascii"))

    own = score(service.pid)
    assert own == score(os.getpid())
    above = {"holder": 200, "worker": 400}
    for each in service.processes():
        assert score(each.pid) == min(own + above[each.role], 1000), each


def test_a_worker_needs_far_less_memory_than_a_plain_process(engine: str, zoo: Zoo, bare: Bare) -> None:
    path = zoo.path("large", engine)
    questions = bare.questions(path, mlp_inputs((1, 2), LARGE_WIDTH))
    tables = {"large": {"path": path, "workers": 3}}
    with Service(tables) as service, service.client() as client, PlainProcess(path, engine) as plain:
        status = service.ready()
        ask_all(client, "large", questions * 10)
        plain.infer(questions[0].inputs)
        workers = [each.pid for each in status.models[0].generations[0].processes if each.role == "worker"]
        largest = max(map(memory.pss, workers))
        # Four processes share one copy, so each of them is spared three quarters of it.
        assert memory.pss(plain.pid) - largest > 0.7 * LARGE_WEIGHT_BYTES

        def told() -> dict[int, int]:
            return {each.pid: each.pss_bytes or 0 for each in processes(service, "large", "worker")}

        assert set(told()) == set(workers)
        # What the status tells may be a second old.
        until(lambda: max(told().values()) == pytest.approx(largest, rel=0.1), "the status tells it")


def test_metadata_says_what_a_model_takes_and_gives(engine: str, client: Client) -> None:
    ids = "INT64" if engine == "onnxruntime" else "INT32"
    expected = {
        "mlp": ([("x", "FP32", (-1, 512))], [("y", "FP32", (-1, 512))]),
        "two_inputs": (
            [("a", "FP32", (-1, 4)), ("b", "FP32", (-1, 4))],
            [("difference", "FP32", (-1, 4)), ("sum", "FP32", (-1, 4))],
        ),
        "integers": ([("ids", ids, (-1, 3))], [("vectors", "FP32", (-1, 3, 4))]),
        "fixed": ([("x", "FP32", (2, 3))], [("y", "FP32", (2, 5))]),
    }
    for name, (inputs, outputs) in expected.items():
        metadata = client.metadata(name)
        assert (metadata.name, metadata.platform) == (name, engine)
        assert sorted((each.name, each.datatype, each.shape) for each in metadata.inputs) == inputs
        assert sorted((each.name, each.datatype, each.shape) for each in metadata.outputs) == outputs


def test_status_tells_the_truth(engine: str, service: Service, client: Client, zoo: Zoo, bare: Bare) -> None:
    path = zoo.path("mlp", engine)
    before = model_status(service, "mlp")
    ask_all(client, "mlp", bare.questions(path, mlp_inputs((1, 2))) * 5)
    status = client.status()
    after = next(each for each in status.models if each.name == "mlp")
    [generation] = after.generations
    assert (status.version, status.pid, status.state) == (VERSION, service.pid, "running")
    assert sorted(model.name for model in status.models) == sorted(WORKERS)
    assert (after.engine, after.path, after.state, after.queued, after.failed) == (engine, str(path), "serving", 0, 0)
    assert after.served == before.served + 10
    assert sum(each.served for each in generation.processes) == after.served
    assert 0 < (after.p50_us or 0) <= (after.p99_us or 0)
    assert generation.sha256 == hashlib.sha256(path.read_bytes()).hexdigest()
    assert (generation.state, generation.cause) == ("serving", "")
    # The daemon is in the test's own control group.
    assert limits(status.memory) == limits(cgroup.memory())
    roles = sorted(each.role for each in generation.processes)
    assert roles == ["holder", *["worker"] * WORKERS["mlp"]]
    for each in generation.processes:
        command = Path(f"/proc/{each.pid}/cmdline").read_bytes()
        assert each.name.encode() in command.split(b"\0")


def test_the_log_shows_progress_while_a_model_loads(service: Service) -> None:
    lines = [line.split("mlp.1: ", 1)[1] for line in service.log.splitlines() if "mlp.1: " in line]
    told = [line for line in lines if not line.startswith("spawned")]
    assert lines[1].startswith("spawned, 0/4")
    assert told == ["pinning", "building", "attaching 0/3", "attaching 1/3", "attaching 2/3", "serving"]


def test_serving_begins_with_the_first_ready_worker(engine: str, zoo: Zoo, bare: Bare, tmp_path: Path) -> None:
    path = zoo.path("mlp", engine)
    hold = tmp_path / "hold"
    hold.touch()
    script = f'case "$*" in *".w2 "*|*".w3 "*) while [ -e "{hold}" ]; do sleep 0.02; done;; esac'
    python = wrapped_interpreter(tmp_path / "python", engine, script)
    try:
        with Service({"mlp": {"path": path, "workers": 3, "python": python}}) as service, service.client() as client:
            ask_all(client, "mlp", bare.questions(path, mlp_inputs((1, 2))))
            assert model_status(service, "mlp").state == "serving"
            assert len(ready_workers(service, "mlp")) == 1
            assert model_status(service, "mlp").generations[0].progress == "attaching 1/3"
            hold.unlink()
            service.ready()
            assert len(ready_workers(service, "mlp")) == 3
    finally:
        hold.unlink(missing_ok=True)
