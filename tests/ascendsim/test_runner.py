"""Tests of `ModelParallelRunner`: several models behind one queue, and the settings that it loses."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ascendsim import Host, driver_state, models
from ascendsim.program import Program

from .support import answers, kinds

HELPERS = """
import threading
def runner(path, workers=2, target='cpu', **parallel):
    where = context(target=target)
    where.parallel.workers_num = workers
    for name, value in parallel.items():
        setattr(where.parallel, name, value)
    made = ms.ModelParallelRunner()
    made.build_from_file(str(path), where)
    return made
def ask(array, outputs=None):
    tensor = ms.Tensor()
    tensor.dtype, tensor.shape = ms.DataType.FLOAT32, list(array.shape)
    tensor.set_data_from_numpy(array)
    return r.predict([tensor], outputs)[0].get_data_to_numpy()
def kept(array):
    tensor = ms.Tensor(array)
    return [tensor]
"""


@pytest.fixture
def running(program: Program, path: Path) -> Program:
    """Return a program with a runner `r` of two workers."""
    program.do(f"{HELPERS}\nr = runner(path)\nNone")
    return program


@pytest.fixture
def on_card(program: Program, path: Path) -> Program:
    """Return a program with a runner of two workers on card 0."""
    program.do(f"{HELPERS}\nr = runner(path, target='ascend')\nNone")
    return program


def test_runs_any_batch_from_many_threads(running: Program, path: Path, x: Any) -> None:
    running.do("first = ask(x)")
    threads = (
        "results = {}\nts = [threading.Thread(target=lambda n=n: results.update({n: ask(x * n)})) for n in range(8)]"
    )
    running.do(f"{threads}\n[t.start() for t in ts]\n[t.join() for t in ts]\nNone")
    for number, each in running.do("results").items():
        assert np.array_equal(each, models.answer(path, x * np.float32(number)))
    assert answers(running, path, x[:1], "ask(x[:1])")
    assert answers(running, path, x, "first")  # No other predict has overwritten the answer.


def test_second_build_has_no_effect(running: Program, path: Path, tmp_path: Path, x: Any) -> None:
    """See model_parallel_runner_impl.cc:28."""
    junk = tmp_path / "junk.mindir"
    junk.write_bytes(b"junk")
    assert running.do("r.build_from_file(junk)\nstr(r)", junk=str(junk)) == f"model_path: {junk}."
    assert answers(running, path, x, "ask(x)")


def test_cores_limit_workers(running: Program) -> None:
    """At most 5 workers per core; 0 means one per core."""
    running.do("cores = os.cpu_count()\nrunner(path, 5 * cores)\nrunner(path, 0)\nNone")
    assert running.refusal("runner(path, 5 * cores + 1)").kind == "RuntimeError"


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("runner('/nowhere')", "RuntimeError"),
        ("runner(1.5)", "RuntimeError"),
        ("ms.ModelParallelRunner().build_from_file(1)", "TypeError"),
        ("ms.ModelParallelRunner().build_from_file(str(path), 1)", "TypeError"),
        ("ms.ModelParallelRunner().predict([])", "RuntimeError"),
        ("r.predict('x')", "TypeError"),
        ("r.predict([x])", "TypeError"),
        ("r.predict(r.get_inputs(), ())", "TypeError"),
        ("runner(path, -1)", "ValueError"),
        ("runner(path, '1')", "TypeError"),
        ("runner(path, config_path='/nowhere')", "ValueError"),
        ("runner(path, config_info={'a': 1})", "TypeError"),
        ("runner(path, config_info={'a': {'b': 1}})", "TypeError"),
        ("runner(path, device_ids=['0'])", "TypeError"),
        ("runner(path, target='gpu')", "RuntimeError"),
    ],
)
def test_rejects_invalid_arguments(running: Program, code: str, kind: str) -> None:
    assert running.refusal(code).kind == kind


def test_no_inputs_before_build(running: Program) -> None:
    assert running.do("ms.ModelParallelRunner().get_inputs()") == []


def test_first_predict_runs_on_all_workers(on_card: Program, host: Host, path: Path, x: Any) -> None:
    """See model_pool.cc:1080."""
    assert answers(on_card, path, x, "ask(x)")
    assert host.count("predict") == 2
    on_card.do("ask(x)")
    assert host.count("predict") == 3


def test_each_worker_on_a_card_has_a_copy(on_card: Program, host: Host) -> None:
    """See model_impl.cc:729."""
    assert kinds(host) == [driver_state.PRIVATE_WEIGHTS] * 2
    on_card.do("runner(path, 3, 'ascend', device_ids=[1, 0])\nr = None")
    assert host.card_state().used == 0


def test_workers_use_devices_in_turn(on_card: Program, host: Host) -> None:
    on_card.do("r = None\nr = runner(path, 3, 'ascend', device_ids=[1, 0])\nNone")
    assert (host.copies_of_weights(0), host.copies_of_weights(1)) == (1, 2)


def test_card_rejects_exported_model(running: Program, tmp_path: Path) -> None:
    exported = models.mlp(tmp_path / "exported.mindir", exported=True)
    config = {"ascend_context": {"provider": "ge"}}
    assert running.refusal("runner(e, 1, 'ascend', config_info=c)", e=exported, c=config).kind == "RuntimeError"
    assert running.errors()[-1] == "not supported on Ascend, due to the func_graph is unoptimized!"


def test_context_passes_only_device_and_provider(running: Program, host: Host, tmp_path: Path) -> None:
    """CopyContext, model_pool.cc:442: rank_id is lost, and ModelGroup does not affect a runner's models."""
    path = models.mlp(tmp_path / "fixed.mindir", batch=1)
    group = "g = ms.ModelGroup()\ng.add_model([str(path)])\ng.cal_max_size_of_workspace(ms.ModelType.MINDIR, context())"
    running.do(f"{group}\nq = runner(path, 2, 'ascend')\nNone", path=path)
    assert [each.kind for each in host.card_state().allocations].count(driver_state.WORKSPACE) == 2


def test_pid_list_makes_every_worker_a_holder(running: Program, host: Host) -> None:
    config = {"ascend_context": {"shareable_weight_pid_list": "1"}}
    running.do("q = runner(path, 2, 'ascend', config_info=c)\nNone", c=config)
    assert kinds(host) == [driver_state.WEIGHTS] * 2


def test_process_imports_handle_once(program: Program, running: Program, host: Host, start: Any) -> None:
    """A runner of two workers therefore cannot attach (v2)."""
    handle = start().do("build(path, pids=pids)", pids=str(program.do("pid()")))
    config = {"ascend_context": {"shareable_weight_mem_handle": handle}}
    assert running.refusal("runner(path, 2, 'ascend', config_info=c)", c=config).kind == "RuntimeError"
    assert "Can not import multi times" in host.driver_log()[-1]


def test_failures_of_all_workers_hide_the_next(on_card: Program, host: Host, path: Path, x: Any) -> None:
    """model_pool.cc:1125, model_worker.cc:94: with `outputs` the old data is returned as the answer."""
    on_card.do("ask(x)")
    host.fault("predict", "fail", times=2)
    for _ in range(2):
        assert on_card.refusal("ask(x)").text == "predict failed!"
    assert answers(on_card, path, x, "ask(x)")  # The request goes through the queue, and the answer is right.
    host.fault("predict", "fail", times=2)
    assert on_card.refusal("ask(x)").text == "predict failed!"
    assert not np.any(on_card.do("ask(x, kept(np.zeros((3, 64), np.float32)))"))


def test_reports_failure_outside_the_queue(on_card: Program, host: Host, path: Path, x: Any) -> None:
    on_card.do("ask(x)")
    assert answers(on_card, path, x, "ask(x, kept(np.zeros((3, 64), np.float32)))")
    host.fault("predict", "fail", times=1)
    assert on_card.refusal("ask(x, kept(np.zeros((3, 64), np.float32)))").text == "predict failed!"


def test_wrong_shape_makes_worker_repeat_old_answer(running: Program, x: Any) -> None:
    """The corruption is the same as in a Model (2.0.0 returned 1 row for a request of 4)."""
    running.do("ask(x)")
    for _ in range(2):
        assert running.refusal("ask(np.ones((3, 65), np.float32))").text == "predict failed!"
    assert running.do("ask(np.ones((5, 64), np.float32)).shape") == (3, 64)


def test_tensor_with_data_keeps_its_shape(running: Program) -> None:
    assert running.do("t = ms.Tensor()\nt.shape = [2]\nt.shape") == [2]
    assert running.do("t = ms.Tensor(np.ones(3))\nt.shape = [4]\nt.shape") == [3]
    assert running.errors()[-1] == "The tensor holds data."


def test_full_queue_denies_service(on_card: Program, host: Host, x: Any) -> None:
    """model_pool.cc:39, :1137: kLiteServiceDeny at 1000 requests."""
    on_card.do("import ascendsim.library.runner as library\nlibrary._MAX_QUEUE = 1\nask(x)")
    host.fault("predict", "hang")
    on_card.do("ts = [threading.Thread(target=ask, args=(x,), daemon=True) for _ in range(3)]\nfor t in ts: t.start()")
    # Two workers run, and one request waits for a worker.
    while host.count("predict") < 4 or not on_card.do("r._pool._queued"):
        assert not on_card.has_answered(0.01)
    assert on_card.refusal("ask(x)").text == "predict failed!"
    assert "queue reaches the limit" in on_card.errors()[-1]
