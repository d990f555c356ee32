"""MindSpore Lite's own workers, as they are: what only a runner does. What a Model does too: test_mindspore_lite."""

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
    """The library's own runner of two workers, without weightd."""

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
    """What each of them returns or raises, at once."""
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


def test_the_librarys_runner_cannot_be_built_twice_and_does_not_say_so(bare: Any, model: Model) -> None:
    runner = bare("fixed")
    runner.build_from_file(str(model("integers")), mslite.Context())
    assert runner.get_inputs()[0].name == "x"


def cores() -> Set[FrozenSet[int]]:
    """Where the threads of this process may run."""
    return {frozenset(os.sched_getaffinity(int(task.name))) for task in Path("/proc/self/task").iterdir()}


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="there is only one core")
def test_the_librarys_runner_takes_all_cores_and_is_brought_back_to_those_of_its_process(
    bare: Any, fresh: Built
) -> None:
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


def test_the_librarys_runner_runs_shapes_of_a_rank_that_the_model_has_not(bare: Any, fresh: Built) -> None:
    assert bare_predict(bare("fixed"), ones(2, 3, 1))[0].shape == (2, 5)
    engine = fresh("fixed")
    for shape in ((2, 3, 1), (3, 2), (6,)):
        with pytest.raises(InvalidArgument, match=r"^x: expected shape \[2, 3\] without a size of 0, got "):
            engine.predict({"x": ones(*shape)})
    assert engine.predict({"x": ones(2, 3)})["y"].shape == (2, 5)


def test_a_tensor_without_elements_which_kills_the_librarys_process_is_refused(fresh: Built) -> None:
    with pytest.raises(InvalidArgument, match=r"^a: expected shape \[-1, 4\] without a size of 0, got \[0, 4\]$"):
        fresh("two_inputs").predict({"a": ones(0, 4), "b": ones(0, 4)})


def test_after_a_failed_predict_the_librarys_runner_answers_what_was_asked_before(bare: Any, fresh: Built) -> None:
    runner, engine = bare("two_batches"), fresh("two_batches")
    assert bare_predict(runner, ones(2, 4), ones(2, 4))[0].shape == (2, 4)
    with pytest.raises(RuntimeError, match="predict failed!"):
        bare_predict(runner, ones(2, 4), ones(3, 4))
    assert bare_predict(runner, ones(5, 4), ones(5, 4))[0].shape == (2, 4), "that is not what was asked"
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
def test_what_a_runner_cannot_do_is_a_build_error_with_its_cause(
    options: Dict[str, Any], cause: str, model: Model, native_log: Any
) -> None:
    engine = ENGINES["mindspore_lite"](BuildSettings(1, "cpu", options={"parallel_workers": 2, **options}))
    with native_log(), pytest.raises(BuildError, match=cause):
        engine.build(str(model("relu")))


def test_a_runner_takes_no_key_and_none_is_made_for_a_card() -> None:
    for device, option, text in (
        ("cpu", {"dec_key_file": "/k"}, r"^options\.dec_key_file: the library's runner .* does not support keys"),
        ("ascend:0", {}, r"^options\.parallel_workers: expected 1 on a card"),
    ):
        with pytest.raises(BuildError, match=text):
            ENGINES["mindspore_lite"](BuildSettings(1, device, options={"parallel_workers": 2, **option}))


def test_its_answers_to_many_at_once_are_those_of_a_model_bit_for_bit(built: Built, model: Model) -> None:
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


def test_what_its_workers_have_packed_is_shared_too(fresh: Built, tmp_path: Path) -> None:
    engine: Any = fresh("wide")
    x = ones(3, 1024)
    before = engine.predict({"x": x})["y"].tobytes()
    pools = {
        each
        for each in chunks.find_extents(libc(), engine._page_sharing._starts_before)
        if (each[1] - each[0]) % chunks.POOL_BYTES == 0
    }
    # Its own way to memory: without libnuma it has malloc's.
    assert pools or "/libnuma." not in Path("/proc/self/maps").read_text()
    assert engine.sharing.export(str(tmp_path / "store")).shared_bytes >= 2 * x.shape[1] ** 2 * x.itemsize
    assert engine.predict({"x": x})["y"].tobytes() == before


class Watched:
    """A runner that two predicts at once have to meet in, if they are to; and that fails as it is told."""

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


def test_shapes_that_have_not_run_yet_run_alone_and_then_beside_others(fresh: Built) -> None:
    engine = fresh("relu")
    engine.predict({"x": ones(8, 4)})  # the shape that a Model computes first is its largest
    watched = Watched(engine)

    def ask(rows: int) -> Callable[[], Arrays]:
        return lambda: engine.predict({"x": ones(rows, 4)})

    watched.does = lambda _: time.sleep(0.01)
    in_threads(*map(ask, range(1, 7)))
    assert watched.most == 1
    watched.does = lambda _: watched.meet.wait(60)
    answers = in_threads(ask(1), ask(2))
    assert [answer["y"].shape for answer in answers] == [(1, 4), (2, 4)]
    assert watched.most == 2


@pytest.mark.parametrize("told_by_the_log", [False, True])
def test_what_ends_after_another_has_failed_is_doubtful(told_by_the_log: bool, fresh: Built, native_log: Any) -> None:
    """The log tells of a failure before the one who has it can: then it is waited for."""
    with native_log() as log:
        engine = fresh("relu")
        for rows in (2, 1):
            engine.predict({"x": ones(rows, 4)})
        watched, failed = Watched(engine), threading.Event()

        def fail_or_wait(tensors: List[Any]) -> None:
            watched.meet.wait(60)
            if tensors[0].shape[0] == 1:
                with log.open("a") as file:
                    file.write("[ERROR] ME(1,7f,python):2026-01-01-10:00:00.123.456 [x.cc:42] Run] failed\n")
                failed.set()
                if told_by_the_log:
                    # Long after the other one, if that did not wait.
                    time.sleep(0.2)
                raise RuntimeError("predict failed!")
            failed.wait(60)
            if not told_by_the_log:
                time.sleep(0.2)

        watched.does = fail_or_wait
        results = in_threads(*[lambda rows=rows: engine.predict({"x": ones(rows, 4)}) for rows in (1, 2)])
    assert [type(each) for each in results] == [ModelCorrupted, MaybeCorrupted]
