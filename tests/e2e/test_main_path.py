"""The main path: several processes share one copy of the weights and answer exactly as the engine does."""

from __future__ import annotations

import asyncio
import hashlib
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from testkit import memory
from testkit.service import Service
from testkit.waiting import until
from weightd import AsyncClient, Client
from weightd_daemon.platform import cgroup
from weightd_protocol.messages.status import MemoryLimit
from weightd_protocol.version import VERSION

from .support import (
    LARGE_WEIGHT_BYTES,
    LARGE_WIDTH,
    MLP_WEIGHT_BYTES,
    MLP_WIDTH,
    Arrays,
    BareEngine,
    Load,
    SampleRequest,
    Zoo,
    ask_all,
    assert_same,
    embeddings,
    kill_a_worker,
    mlp_inputs,
    model_status,
    pairs,
    processes,
)

pytestmark = pytest.mark.e2e

WORKERS = {"mlp": 2, "large": 2, "two_inputs": 1, "integers": 1}

# Some outputs exceed 64 KiB, above which the worker passes them to ZeroMQ without a copy; sizes go up and down.
BATCHES = (1, 2, 40, 7, 64, 1, 3, 63)


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


def inputs_of(name: str, engine: str) -> list[Arrays]:
    """Return different inputs of a model."""
    if name == "two_inputs":
        return pairs(BATCHES)
    if name == "integers":
        return embeddings(BATCHES, engine)
    return mlp_inputs(BATCHES)


@pytest.mark.parametrize("name", ["mlp", "two_inputs", "integers"])
def test_workers_answer_bit_equal_to_engine(
    name: str, engine: str, service: Service, client: Client, zoo: Zoo, bare: BareEngine
) -> None:
    questions = bare.questions(zoo.path(name, engine), inputs_of(name, engine))

    def all_have_served() -> bool:
        ask_all(client, name, questions * 4)
        return all(each.served for each in processes(service, name, "worker"))

    until(all_have_served, f"each worker of {name} has served")


def test_concurrent_clients_get_their_own_answers(service: Service, questions: list[SampleRequest]) -> None:
    with Load(service.address, "mlp", questions, clients=4) as load:
        load.wait_for(100)


@pytest.mark.parametrize("over", ["unix", "ipc"])
def test_client_is_shared_by_threads_and_tasks(over: str, service: Service, questions: list[SampleRequest]) -> None:
    address = f"{over}://{service.address}"

    async def ask_in_tasks() -> list[Arrays]:
        async with AsyncClient(address, timeout=60) as client:
            return [*await asyncio.gather(*(client.infer("mlp", each.inputs) for each in questions * 8))]

    with Client(address, timeout=60) as client, ThreadPoolExecutor(4) as pool:
        for done in [pool.submit(ask_all, client, "mlp", questions) for _ in range(8)]:
            done.result()
    for got, question in zip(asyncio.run(ask_in_tasks()), questions * 8, strict=True):
        assert_same(got, question.answer)


def test_later_answers_do_not_overwrite_earlier_ones(client: Client, questions: list[SampleRequest]) -> None:
    outputs = [client.infer("mlp", each.inputs) for each in questions]
    ask_all(client, "mlp", questions * 3)
    for got, question in zip(outputs, questions, strict=True):
        assert_same(got, question.answer)


def test_next_predict_does_not_overwrite_answer_being_sent(
    engine: str, client: Client, zoo: Zoo, bare: BareEngine
) -> None:
    """Sending megabytes takes longer than computing them here, so the worker starts the next predict meanwhile."""
    questions = bare.questions(zoo.path("two_inputs", engine), pairs((200_000,) * 3))
    ask_all(client, "two_inputs", questions * 3)


def test_all_processes_share_weights(service: Service) -> None:
    generation = model_status(service, "mlp").generations[0]
    assert sorted(each.role for each in generation.processes) == ["holder", "worker", "worker"]
    for each in generation.processes:
        assert (each.shared_bytes or 0) >= 0.98 * MLP_WEIGHT_BYTES, each
        assert each.note == ""
    assert (generation.saved_bytes or 0) >= 0.98 * (WORKERS["mlp"] - 1) * MLP_WEIGHT_BYTES


def test_worker_needs_less_memory_than_plain_process(
    engine: str, service: Service, client: Client, zoo: Zoo, bare: BareEngine
) -> None:
    path = zoo.path("large", engine)
    ask_all(client, "large", bare.questions(path, mlp_inputs((1, 2), LARGE_WIDTH)) * 10)
    workers = [each.pid for each in processes(service, "large", "worker")]
    largest = max(map(memory.pss, workers))
    # Three processes share one copy, so each saves two thirds of it.
    assert memory.pss(bare.process(path).pid) - largest > 0.6 * LARGE_WEIGHT_BYTES

    def reported() -> dict[int, int]:
        return {each.pid: each.pss_bytes or 0 for each in processes(service, "large", "worker")}

    assert set(reported()) == set(workers)
    # The status may show values that are a second old.
    until(lambda: max(reported().values()) == pytest.approx(largest, rel=0.1), "the status shows the memory")


def test_oom_scores_protect_daemon(service: Service) -> None:
    def score(pid: int) -> int:
        return int(Path(f"/proc/{pid}/oom_score_adj").read_text("ascii"))

    own = score(service.pid)
    assert own == score(os.getpid())
    above = {"holder": 200, "worker": 400}
    for each in service.processes():
        assert score(each.pid) == min(own + above[each.role], 1000), each


def test_metadata_describes_inputs_and_outputs(engine: str, client: Client) -> None:
    ids = "INT64" if engine == "onnxruntime" else "INT32"
    expected = {
        "mlp": ([("x", "FP32", (-1, MLP_WIDTH))], [("y", "FP32", (-1, MLP_WIDTH))]),
        "two_inputs": (
            [("a", "FP32", (-1, 4)), ("b", "FP32", (-1, 4))],
            [("difference", "FP32", (-1, 4)), ("sum", "FP32", (-1, 4))],
        ),
        "integers": ([("ids", ids, (-1, 3))], [("vectors", "FP32", (-1, 3, 4))]),
    }
    for name, (inputs, outputs) in expected.items():
        metadata = client.metadata(name)
        assert (metadata.name, metadata.platform) == (name, engine)
        assert sorted((each.name, each.datatype, each.shape) for each in metadata.inputs) == inputs
        assert sorted((each.name, each.datatype, each.shape) for each in metadata.outputs) == outputs


def limits(memory: MemoryLimit | None) -> tuple[int | None, int | None] | None:
    return None if memory is None else (memory.limit_bytes, memory.high_bytes)


def test_status_matches_observed_state(
    engine: str, service: Service, client: Client, mlp: Path, questions: list[SampleRequest]
) -> None:
    before = model_status(service, "mlp")
    ask_all(client, "mlp", questions)
    status = client.status()
    after = next(each for each in status.models if each.name == "mlp")
    [generation] = after.generations
    assert (status.version, status.pid, status.state) == (VERSION, service.pid, "running")
    assert sorted(model.name for model in status.models) == sorted(WORKERS)
    assert (after.engine, after.path, after.state, after.queued, after.failed) == (engine, str(mlp), "serving", 0, 0)
    assert after.served == before.served + len(questions)
    assert sum(each.served for each in generation.processes) == after.served
    assert 0 < (after.p50_us or 0) <= (after.p99_us or 0)
    assert generation.sha256 == hashlib.sha256(mlp.read_bytes()).hexdigest()
    assert (generation.state, generation.reason) == ("serving", "")
    # The daemon runs in the same control group as the test.
    assert limits(status.memory) == limits(cgroup.memory())
    for each in generation.processes:
        # Every user of the host may read the command line, so it must not name a model.
        command = Path(f"/proc/{each.pid}/cmdline").read_bytes()
        assert f"\0--role\0{each.role}\0".encode() in command
        assert not any(name in command for name in (b"mlp", each.name.encode(), bytes(service.cache)))


def test_requeues_requests_of_killed_worker(service: Service, questions: list[SampleRequest]) -> None:
    with Load(service.address, "mlp", questions, in_flight=6) as load:
        load.wait_for(50)
        kill_a_worker(service, load)
