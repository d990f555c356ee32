"""Tests that answers of MindSpore Lite do not depend on the shapes that a process has computed before."""

from __future__ import annotations

import errno
import fcntl
import subprocess
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any, Callable, Dict, List, Sequence, Tuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testkit import freshanswers
from testkit.examples import examples
from weightd_protocol.errors import InvalidArgument
from weightd_protocol.messages.worker import Attach, Attached, Build, Built, Hello, PredictFailed, ProcessFailed
from weightd_worker import pagesharing
from weightd_worker.engines import ENGINES
from weightd_worker.engines.engine import BuildSettings, Engine, ModelCorrupted, SharedWeights
from weightd_worker.engines.mindspore_lite.cpu import InputShapes, covers, grow_shapes
from weightd_worker.selftest import selftest
from weightd_worker.selftest.selftest import AnswerVerifier

if TYPE_CHECKING:
    from tests.worker.conftest import Daemon

Model = Callable[[str], Path]
Answers = List[Any]
Shapes = Dict[str, Sequence[int]]

FORMS = st.lists(st.lists(st.integers(1, 40), min_size=1, max_size=3).map(tuple), min_size=1, max_size=3).map(tuple)

BATCHES = (1, 2, 3, 5, 8, 16, 33, 64)
IMAGES = ((1, 16, 16), (1, 24, 48), (2, 32, 32), (1, 64, 64), (1, 48, 24))


def lstm(batch: int) -> Shapes:
    return {"x": (5, batch, 8), "h": (1, batch, 32)}


def image(batch: int, height: int, width: int) -> Shapes:
    return {"x": (batch, 3, height, width)}


def values(shapes: Shapes) -> Dict[str, Any]:
    """Return inputs of these shapes; the values are the same each time."""
    random = np.random.RandomState(sum(sum(shape) for shape in shapes.values()))
    return {name: random.uniform(-1, 1, shapes[name]).astype(np.float32) for name in sorted(shapes)}


CASES: Dict[str, List[Shapes]] = {
    "lstm": [lstm(batch) for batch in BATCHES],
    "image": [image(*sizes) for sizes in IMAGES],
    "wide": [{"x": (rows, 1024)} for rows in BATCHES],
}


# --- growth of the first shape --------------------------------------------------------------------------------


@given(FORMS, FORMS)
def test_grown_shape_covers_request_and_is_bounded(first: InputShapes, form: InputShapes) -> None:
    declared = [(-1,) * len(shape) for shape in form]
    after = grow_shapes(first, form, declared)
    assert covers(after, form)
    sizes = [sum(int(np.prod(shape)) for shape in each) for each in (first, form, after)]
    assert sizes[2] <= 4 * max(sizes[:2])


@given(st.integers(1, 1000), st.integers(1, 1000))
def test_slow_growth_causes_few_builds(now: int, further: int) -> None:
    first: InputShapes = ((now, 4),)
    builds = 0
    for rows in range(1, now + further):
        if not covers(first, ((rows, 4),)):
            first, builds = grow_shapes(first, ((rows, 4),), [(-1, 4)]), builds + 1
    assert builds <= 11


@pytest.mark.parametrize(
    ("first", "form", "expected"),
    [
        (((1, 64, 32),), ((1, 32, 64),), ((1, 64, 64),)),
        (((1, 4096),), ((4096, 1),), ((4096, 1),)),  # Together they would have 4,096 times the elements.
        (((2, 3), (7,)), ((5, 4), (7,)), ((8, 4), (7,))),  # Only the rows are rounded up.
    ],
)
def test_grown_shape_covers_both_unless_too_large(first: InputShapes, form: InputShapes, expected: InputShapes) -> None:
    declared = [tuple(-1 if dim != 7 else 7 for dim in shape) for shape in form]
    assert grow_shapes(first, form, declared) == expected


# --- the engine -----------------------------------------------------------------------------------------------

mslite: Any = pytest.importorskip("mindspore_lite", reason=".venv-mslite runs these")


@pytest.fixture(scope="session")
def fresh_answers(model: Model, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Answers]:
    """Return a function that computes each case of a model in a process that computes nothing else."""
    known: Dict[str, Answers] = {}

    def answers(name: str) -> Answers:
        if name not in known:
            inputs = [*map(values, CASES[name])]
            found = freshanswers.answers(model(name), inputs, tmp_path_factory.mktemp(name), sys.executable)
            known[name] = [each["y"] for each in found if each is not None]
            assert len(known[name]) == len(inputs)
        return known[name]

    return answers


def make(model: Path, kind: str, **options: Any) -> Engine:
    engine = ENGINES["mindspore_lite"](
        BuildSettings(1, "cpu", options={**options, **({"parallel_workers": 2} if kind == "parallel" else {})})
    )
    engine.build(str(model))
    return engine


def compare(engine: Engine, name: str, order: Sequence[int], expected: Answers) -> None:
    for number in order:
        shapes = CASES[name][number]
        found = engine.predict(values(shapes))["y"]
        assert found.tobytes() == expected[number].tobytes(), f"{shapes} in {order}"


def test_library_fails_after_a_smaller_shape(
    model: Model, fresh_answers: Callable[[str], Answers], tmp_path: Path
) -> None:
    """This is why the engine never lets a Model compute a larger shape than its first one."""
    script = (
        "import sys, numpy as np, mindspore_lite as lite\n"
        "context = lite.Context(); context.target = ['cpu']; context.cpu.thread_num = 1\n"
        "model = lite.Model(); model.build_from_file(sys.argv[1], lite.ModelType.MINDIR, context)\n"
        "for path in sys.argv[2:]:\n"
        "    arrays = np.load(path)\n"
        "    model.resize(model.get_inputs(), [list(arrays[each.name].shape) for each in model.get_inputs()])\n"
        "    inputs = model.get_inputs()\n"
        "    for each in inputs: each.set_data_from_numpy(arrays[each.name])\n"
        "    answer = [each for each in model.predict(inputs) if each.name == 'y'][0].get_data_to_numpy().copy()\n"
        "sys.stdout.write(answer.tobytes().hex()); sys.stdout.flush()\n"
    )
    order = [0, 2, 4, 5]
    for number in order:
        np.savez(str(tmp_path / f"{number}.npz"), **values(CASES["lstm"][number]))
    command = [sys.executable, "-c", script, str(model("lstm")), *(str(tmp_path / f"{each}.npz") for each in order)]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode < 0 or done.stdout != fresh_answers("lstm")[5].tobytes().hex(), done.stderr


@pytest.mark.parametrize(("name", "by_shape"), [("lstm", False), ("wide", False), ("image", True), ("lstm", True)])
def test_answers_do_not_depend_on_order_of_shapes(
    name: str, by_shape: bool, kind: str, model: Model, fresh_answers: Callable[[str], Answers]
) -> None:
    expected = fresh_answers(name)

    @settings(max_examples=examples(10))
    @given(st.lists(st.sampled_from(range(len(expected))), min_size=2, max_size=8))
    def check(order: List[int]) -> None:
        engine = make(model(name), kind)
        engine.should_rebuild_per_shape = by_shape
        compare(engine, name, order, expected)

    check()


def test_covered_shape_causes_no_build(model: Model, kind: str) -> None:
    engine: Any = make(model("lstm"), kind)
    engine.predict(values(lstm(33)))
    built = engine._model
    for batch in (1, 33, 16):
        engine.predict(values(lstm(batch)))
    assert (engine._model is built, engine.was_rebuilt_larger) == (True, False)
    engine.predict(values(lstm(34)))
    assert (engine._model is built, engine.was_rebuilt_larger) == (False, True)


def test_skips_shape_that_cannot_be_first(
    model: Model, monkeypatch: pytest.MonkeyPatch, fresh_answers: Callable[[str], Answers]
) -> None:
    engine: Any = make(model("lstm"), "alone")
    compute, asked = engine._compute, []

    def refuse(inputs: Any) -> Any:
        asked.append(inputs["x"].shape[1])
        if inputs["x"].shape[1] == 50:
            raise ModelCorrupted("it does not run")
        return compute(inputs)

    monkeypatch.setattr(engine, "_compute", refuse)
    monkeypatch.setattr("weightd_worker.engines.mindspore_lite.cpu.grow_shapes", lambda *_: ((5, 50, 8), (1, 50, 32)))
    compare(engine, "lstm", [0, 5], fresh_answers("lstm"))
    assert asked == [1, 16, 50, 16]


def test_wait_for_build_lock_is_bounded(
    model: Model, monkeypatch: pytest.MonkeyPatch, fresh_answers: Callable[[str], Answers]
) -> None:
    monkeypatch.setattr("weightd_worker.engines.mindspore_lite.cpu._LOCK_TIMEOUT_S", 0.05)
    engine = make(model("lstm"), "alone")
    with model("lstm").open("rb") as held:
        fcntl.flock(held, fcntl.LOCK_EX)
        compare(engine, "lstm", [0, 5], fresh_answers("lstm"))


def test_rebuilds_without_file_locks(
    model: Model, monkeypatch: pytest.MonkeyPatch, fresh_answers: Callable[[str], Answers]
) -> None:
    def flock(*_: Any) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    compare(make(model("lstm"), "alone"), "lstm", [0, 5], fresh_answers("lstm"))


def test_runner_shares_pages_only_on_demand(model: Model, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """During a rebuild other threads receive requests and free answers."""
    engine: Any = make(model("wide"), "parallel")
    engine.predict(values({"x": (1, 1024)}))
    assert engine.sharing.export(str(tmp_path / "store")).handle
    joined: List[str] = []

    def attach(_: object, store: str) -> SharedWeights:
        joined.append(store)
        return SharedWeights(store, 0, "")

    monkeypatch.setattr("weightd_worker.engines.cpu.PageSharing.attach", attach)
    block_bytes = pagesharing.mmap_threshold_bytes()
    engine.predict(values({"x": (2, 1024)}))
    assert (joined, engine.has_unshared_weights, pagesharing.mmap_threshold_bytes()) == ([], True, block_bytes)


def test_max_shape_limits_requests(model: Model, kind: str) -> None:
    engine = make(model("lstm"), kind, max_shape={"x": [5, 16, 8], "h": [1, 16, 32]})
    engine.predict(values(lstm(16)))
    expected = r'^input "x": expected a shape of at most \[5, 16, 8\], .* mindspore_lite.max_shape .* got \[5, 17, 8\]$'
    with pytest.raises(InvalidArgument, match=expected):
        engine.predict(values(lstm(17)))
    engine.predict(values(lstm(16)))


def test_rebuilds_per_shape_if_growth_changes_answers(
    model: Model, kind: str, fresh_answers: Callable[[str], Answers]
) -> None:
    engine = make(model("image"), kind)
    known = selftest.run(engine, ({"x": (1, 3, 16, 16)},))
    proof = AnswerVerifier(engine, known)
    for number in (0, 3, 1, 4, 2, 0):
        inputs = values(CASES["image"][number])
        found = proof.verify(inputs, engine.predict(inputs))["y"]
        assert found.tobytes() == fresh_answers("image")[number].tobytes()
    assert engine.should_rebuild_per_shape


# --- processes ------------------------------------------------------------------------------------------------


def serve(daemon: Daemon, model: Path, rows: int = 1, options: str = "{}") -> Tuple[Built, Attached]:
    """Start a holder "h" and attach a worker "w" to its weights."""
    for name in ("h", "w"):
        daemon.start(name, model, "--options", options)
        daemon.receive(name, Hello)
    daemon.send("h", Build((), max_rows=rows))
    built, _ = daemon.receive("h", Built)
    daemon.send(
        "w",
        Attach(
            built.handle,
            built.selftest_cases,
            rows,
            row_support=built.row_support,
            rebuilds_per_shape=built.rebuilds_per_shape,
            first_shapes=built.first_shapes,
        ),
    )
    attached, _ = daemon.receive("w", Attached)
    assert attached.selftest_digest == built.selftest_digest != ""
    return built, attached


@pytest.mark.parametrize(("name", "by_shape"), [("lstm", False), ("image", True), ("wide", False)])
def test_worker_answers_like_a_fresh_process(
    name: str, by_shape: bool, daemon: Daemon, model: Model, fresh_answers: Callable[[str], Answers]
) -> None:
    built, _ = serve(daemon, model(name), rows=8)
    assert built.rebuilds_per_shape == by_shape
    assert ("depend on earlier shapes" in built.note) == by_shape
    order = np.random.RandomState(7).randint(0, len(CASES[name]), 20)
    for request, number in enumerate(order):
        daemon.ask("w", request, **values(CASES[name][number]))
        _, frames = daemon.receive_result("w")
        assert frames[0] == fresh_answers(name)[number].tobytes()


@pytest.mark.parametrize("options", ["{}", '{"max_shape": {"x": [4, 3, 64, 64]}}'])
def test_compares_single_selftest_with_smaller_shape(options: str, daemon: Daemon, model: Model) -> None:
    daemon.start("h", model("image"), "--options", options, "--sharer-count", "1")
    daemon.receive("h", Hello)
    daemon.send("h", Build((), search_selftest=False, selftest_cases=({"x": (1, 3, 64, 64)},)))
    built, _ = daemon.receive("h", Built)
    assert built.rebuilds_per_shape
    assert "weights are not shared" in built.note
    assert "rebuilt at each change of shape" in built.note


@pytest.mark.parametrize("workers", [1, 2])
def test_shares_weights_again_after_growth(workers: int, daemon: Daemon, model: Model) -> None:
    _, attached = serve(daemon, model("wide"), options=f'{{"parallel_workers": {workers}}}')
    maps = Path(f"/proc/{daemon.children['w'].pid}/smaps")

    def shared_bytes() -> int:
        lines, found = maps.read_text().splitlines(), 0
        for number, line in enumerate(lines):
            if line.endswith("/store"):
                found += int(lines[number + 1].split()[1]) * 1024
        return found

    before = shared_bytes()
    daemon.ask("w", 1, **values({"x": (64, 1024)}))
    daemon.answer("w", 1)
    daemon.ask("w", 2, **values({"x": (64, 1024)}))
    daemon.answer("w", 2)
    assert before >= attached.shared_bytes > 0
    assert shared_bytes() >= before - 64 * 1024


def test_invalid_max_shape_fails_build(daemon: Daemon, model: Model) -> None:
    expected = {
        '{"max_shape": {"y": [2, 1024]}}': "options.max_shape: expected inputs x, got y",
        '{"max_shape": {"x": [2, 1000]}}': "options.max_shape.x: expected a shape like [-1, 1024], got [2, 1000]",
    }
    for number, (options, cause) in enumerate(expected.items()):
        name = f"h{number}"
        daemon.start(name, model("wide"), "--options", options)
        daemon.receive(name, Hello)
        daemon.send(name, Build(()))
        broken, _ = daemon.receive(name, ProcessFailed)
        assert broken.reason == cause


def test_request_beyond_max_shape_keeps_worker(daemon: Daemon, model: Model) -> None:
    serve(daemon, model("wide"), options='{"max_shape": {"x": [4, 1024]}}')
    daemon.ask("w", 1, **values({"x": (5, 1024)}))
    failed, _ = daemon.receive("w", PredictFailed)
    assert (failed.code, failed.is_exiting) == ("INVALID_ARGUMENT", False)
    daemon.ask("w", 2, **values({"x": (4, 1024)}))
    assert daemon.answer("w", 2).shape == (4, 1024)
