"""Traps of MindSpore Lite's parallel runner. `test_mindspore_lite` covers the traps that it shares with a Model."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any, Callable, Dict, FrozenSet, List, Set

import numpy as np
import pytest

from weightd_protocol.errors import InvalidArgument
from weightd_worker.engines import ENGINES
from weightd_worker.engines.engine import Arrays, BuildError, BuildSettings, Engine, MaybeCorrupted, ModelCorrupted
from weightd_worker.pagesharing import chunks
from weightd_worker.pagesharing.libc import libc

mslite: Any = pytest.importorskip("mindspore_lite", reason=".venv-mslite runs these")

Built = Callable[[str], Engine]
Model = Callable[[str], Path]


@pytest.fixture(scope="session")
def kind() -> str:
    return "parallel"


@pytest.fixture
def bare(model: Model) -> Callable[[str], Any]:
    """Return a function that builds a runner of two workers with the library alone."""

    def build(name: str) -> Any:
        context = mslite.Context()
        context.target = ["cpu"]
        context.cpu.thread_num = 1
        context.parallel.workers_num = 2
        runner = mslite.ModelParallelRunner()
        runner.build_from_file(str(model(name)), context)
        return runner

    return build


def bare_predict(runner: Any, *arrays: Any) -> List[Any]:
    tensors: List[Any] = []
    for of, array in zip(runner.get_inputs(), arrays):
        tensor = mslite.Tensor()
        tensor.name, tensor.dtype, tensor.shape = of.name, of.dtype, list(array.shape)
        tensor.set_data_from_numpy(array)
        tensors.append(tensor)
    return [each.get_data_to_numpy() for each in runner.predict(tensors)]


def ones(*shape: int) -> Any:
    return np.ones(shape, np.float32)


def in_threads(*calls: Callable[[], Any]) -> List[Any]:
    """Run the calls at the same time; return the result or exception of each."""
    results: List[Any] = [None] * len(calls)

    def run(index: int) -> None:
        try:
            results[index] = calls[index]()
        except Exception as error:  # noqa: BLE001 - it is the result
            results[index] = error

    threads = [threading.Thread(target=run, args=(index,)) for index in range(len(calls))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    return results


def test_library_runner_ignores_second_build(bare: Any, model: Model) -> None:
    runner = bare("fixed")
    runner.build_from_file(str(model("integers")), mslite.Context())
    assert runner.get_inputs()[0].name == "x"


def cores() -> Set[FrozenSet[int]]:
    """Return the CPU affinities of the threads of this process."""
    return {frozenset(os.sched_getaffinity(int(task.name))) for task in Path("/proc/self/task").iterdir()}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is only one core")
def test_restores_affinity_of_runner_threads(bare: Any, fresh: Built) -> None:
    before = os.sched_getaffinity(0)
    own = frozenset([max(before)])
    try:
        os.sched_setaffinity(0, own)
        bare("fixed")
        assert os.sched_getaffinity(0) > own
        os.sched_setaffinity(0, own)
        fresh("fixed").predict({"x": ones(2, 3)})
        assert cores() == {own}
    finally:
        for task in Path("/proc/self/task").iterdir():
            os.sched_setaffinity(int(task.name), before)


def test_rejects_wrong_rank_that_library_accepts(bare: Any, fresh: Built) -> None:
    assert bare_predict(bare("fixed"), ones(2, 3, 1))[0].shape == (2, 5)
    engine = fresh("fixed")
    for shape in ((2, 3, 1), (3, 2), (6,)):
        with pytest.raises(InvalidArgument, match=r"^x: expected shape \[2, 3\] without a size of 0, got "):
            engine.predict({"x": ones(*shape)})
    assert engine.predict({"x": ones(2, 3)})["y"].shape == (2, 5)


def test_rejects_empty_tensor_that_crashes_library(fresh: Built) -> None:
    with pytest.raises(InvalidArgument, match=r"^a: expected shape \[-1, 4\] without a size of 0, got \[0, 4\]$"):
        fresh("two_inputs").predict({"a": ones(0, 4), "b": ones(0, 4)})


def test_library_repeats_old_answer_after_failure(bare: Any, fresh: Built) -> None:
    runner, engine = bare("two_batches"), fresh("two_batches")
    assert bare_predict(runner, ones(2, 4), ones(2, 4))[0].shape == (2, 4)
    with pytest.raises(RuntimeError, match="predict failed!"):
        bare_predict(runner, ones(2, 4), ones(3, 4))
    assert bare_predict(runner, ones(5, 4), ones(5, 4))[0].shape == (2, 4), "the answer belongs to the request before"
    engine.predict({"a": ones(2, 4), "b": ones(2, 4)})
    with pytest.raises(ModelCorrupted):
        engine.predict({"a": ones(2, 4), "b": ones(3, 4)})
    with pytest.raises(MaybeCorrupted):
        engine.predict({"a": ones(5, 4), "b": ones(5, 4)})


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        pytest.param(
            {"parallel_workers": 64},
            "user set worker num: 64 ?is invalid",
            marks=pytest.mark.skipif((os.cpu_count() or 1) > 12, reason="five for each core are taken"),
        ),
        ({"thread_affinity_cores": [0]}, "user set core list size"),
        ({"thread_affinity_mode": 2}, "not support bind MID_CPU"),
    ],
)
def test_unsupported_options_are_build_errors(
    options: Dict[str, Any], cause: str, model: Model, native_log: Any
) -> None:
    engine = ENGINES["mindspore_lite"](BuildSettings(1, "cpu", options={"parallel_workers": 2, **options}))
    with native_log(), pytest.raises(BuildError, match=cause):
        engine.build(str(model("relu")))


def test_rejects_key_and_card() -> None:
    for device, option, text in (
        ("cpu", {"dec_key_file": "/k"}, r"^options\.dec_key_file: the library's runner .* does not support keys"),
        ("ascend:0", {}, r"^options\.parallel_workers: expected 1 on a card"),
    ):
        with pytest.raises(BuildError, match=text):
            ENGINES["mindspore_lite"](BuildSettings(1, device, options={"parallel_workers": 2, **option}))


def test_parallel_answers_equal_those_of_a_model(built: Built, model: Model) -> None:
    engine, alone = built("wide"), ENGINES["mindspore_lite"](BuildSettings(1, "cpu"))
    assert (engine.concurrency, alone.concurrency) == (2, 1)
    alone.build(str(model("wide")))
    assert engine.signature == alone.signature

    def asked(seed: int) -> List[Any]:
        rng = np.random.RandomState(seed)
        return [rng.randn(rng.randint(1, 9), 1024).astype(np.float32) for _ in range(40)]

    answers = in_threads(*[lambda seed=seed: [engine.predict({"x": x})["y"] for x in asked(seed)] for seed in range(4)])
    for seed, answer in enumerate(answers):
        assert [y.tobytes() for y in answer] == [alone.predict({"x": x})["y"].tobytes() for x in asked(seed)]


def test_shares_packed_weights(fresh: Built, tmp_path: Path) -> None:
    engine: Any = fresh("wide")
    x = ones(3, 1024)
    before = engine.predict({"x": x})["y"].tobytes()
    pools = {
        each
        for each in chunks.find_extents(libc(), engine._page_sharing._starts_before)
        if (each[1] - each[0]) % chunks.POOL_BYTES == 0
    }
    # The runner has its own allocator; without libnuma it uses malloc.
    assert pools or "/libnuma." not in Path("/proc/self/maps").read_text()
    assert engine.sharing.export(str(tmp_path / "store")).shared_bytes >= 2 * x.shape[1] ** 2 * x.itemsize
    assert engine.predict({"x": x})["y"].tobytes() == before


class ObservedRunner:
    """A runner that makes two predicts wait for each other if told to, and that fails on demand."""

    def __init__(self, engine: Any) -> None:
        self._predict = engine._model.predict
        self.running = self.most = 0
        self.meet = threading.Barrier(2)
        self.does: Callable[[Any], object] = lambda tensors: None
        engine._model = self

    def predict(self, tensors: List[Any]) -> Any:
        self.running += 1
        self.most = max(self.most, self.running)
        try:
            self.does(tensors)
            return self._predict(tensors)
        finally:
            self.running -= 1


def test_runs_new_shapes_alone(fresh: Built) -> None:
    engine = fresh("relu")
    engine.predict({"x": ones(8, 4)})  # The first shape of a Model is its largest.
    watched = ObservedRunner(engine)

    def ask(rows: int) -> Callable[[], Arrays]:
        return lambda: engine.predict({"x": ones(rows, 4)})

    watched.does = lambda _: time.sleep(0.01)
    in_threads(*map(ask, range(1, 7)))
    assert watched.most == 1
    watched.does = lambda _: watched.meet.wait(60)
    answers = in_threads(ask(1), ask(2))
    assert [answer["y"].shape for answer in answers] == [(1, 4), (2, 4)]
    assert watched.most == 2


@pytest.mark.parametrize("failure_is_logged", [False, True])
def test_predicts_ending_after_a_failure_are_doubtful(failure_is_logged: bool, fresh: Built, native_log: Any) -> None:
    """The log shows a failure before the failed call returns; the engine then waits for that call."""
    with native_log() as log:
        engine = fresh("relu")
        for rows in (2, 1):
            engine.predict({"x": ones(rows, 4)})
        watched, failed = ObservedRunner(engine), threading.Event()

        def fail_or_wait(tensors: List[Any]) -> None:
            watched.meet.wait(60)
            if tensors[0].shape[0] == 1:
                with log.open("a") as file:
                    file.write("[ERROR] ME(1,7f,python):2026-01-01-10:00:00.123.456 [x.cc:42] Run] failed\n")
                failed.set()
                if failure_is_logged:
                    # This is long after the end of the other predict, unless that one waits.
                    time.sleep(0.2)
                raise RuntimeError("predict failed!")
            failed.wait(60)
            if not failure_is_logged:
                time.sleep(0.2)

        watched.does = fail_or_wait
        results = in_threads(*[lambda rows=rows: engine.predict({"x": ones(rows, 4)}) for rows in (1, 2)])
    assert [type(each) for each in results] == [ModelCorrupted, MaybeCorrupted]
