"""Tests of rank groups: real processes that compute together, and the effects of ranks out of step."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ascendsim import Host, driver_state, ranks
from ascendsim.program import Program, ProgramError
from ascendsim.ranks import Slices

from ..support import Start, errors_of
from .support import CONNECT_S, EXEC, EXEC_S, World, assert_right, connected, predict, shorten_timeouts

# --- in step ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("count", [2, 4])
def test_right_answers_need_all_ranks_in_any_batch(world: World, tmp_path: Path, x: Any, count: int) -> None:
    cut = ranks.mlp(tmp_path / "slices", ranks=count)
    table = ranks.table(tmp_path / "table.json", range(count))
    programs = connected(world, cut, x, table=table)
    for rows in (1, 64, 4):
        assert_right(programs, cut, np.arange(rows * 16, dtype=np.float32).reshape(rows, 16))
    assert not any(map(np.array_equal, cut.answers(x * 2), cut.answers(x)))


@pytest.mark.parametrize("count", [1, 2, 4, 8])
def test_every_split_answers_like_the_whole_network(tmp_path: Path, count: int) -> None:
    x = np.random.RandomState(2).randint(-3, 4, (5, 16)).astype(np.float32)
    cut = ranks.mlp(tmp_path / "slices", ranks=count, layers=2)
    assert all(np.array_equal(each, ranks.whole(x, layers=2)) for each in cut.answers(x))


def test_build_is_local_and_uses_no_memory(world: World, host: Host, x: Any, cut: Slices) -> None:
    """hcom_plugin.cc:207 and hcom.cc:70 check locally; ge_graph_executor.cc:1352 loads in the first predict."""
    programs = world()
    assert [each.kind for each in host.card_state().allocations] == [driver_state.CONTEXT]
    assert_right(programs, cut, x)
    kinds = {driver_state.CONTEXT, driver_state.PRIVATE_WEIGHTS, driver_state.WORKSPACE, driver_state.BUFFERS}
    assert {each.kind for each in host.card_state().allocations} == kinds


def test_two_groups_are_independent(world: World, start: Start, tmp_path: Path, cut: Slices, x: Any) -> None:
    first = connected(world, cut, x)
    table = ranks.table(tmp_path / "other.json", [2, 3])
    second = [start(**EXEC) for _ in range(2)]
    for rank, program in enumerate(second):
        program.do("rank(p, t, r, device=r + 2)", p=cut.paths[rank], t=table, r=rank)
    for group in (second, first):
        assert_right(group, cut, x)


def test_models_of_a_rank_share_weights_and_buffers(
    start: Start, host: Host, table: Path, tmp_path: Path, x: Any
) -> None:
    """A prompt and a decode model in one ModelGroup (docs runtime_cpp.md:646)."""
    cuts = [ranks.mlp(tmp_path / str(batch), batch=batch, size_mib=64) for batch in (1, 3)]
    pair = "ms.ModelGroup(ms.ModelGroupFlag.SHARE_WEIGHT).add_model(both)\nfor each, path in zip(both, paths):"
    build = (
        "    each.build_from_file(path, ms.ModelType.MINDIR, context(provider='ge', rank=r, device=r), '', sections)"
    )
    sections = {"ascend_context": {"rank_table_file": str(table)}, "ge_session_options": {"ge.externalWeight": "1"}}
    programs = [start(**EXEC) for _ in range(2)]
    for rank, program in enumerate(programs):
        paths = [str(cut.paths[rank]) for cut in cuts]
        program.do(f"both = ms.Model(), ms.Model()\n{pair}\n{build}", r=rank, paths=paths, sections=sections)
    for number, cut in enumerate(cuts):
        for program in programs:
            program.do(f"lib.model = both[{number}]")
        assert_right(programs, cut, x[: (1, 3)[number]])
    kinds = [each.kind for each in host.card_state().allocations]
    assert (host.copies_of_weights(), kinds.count(driver_state.BUFFERS)) == (1, 1)


# --- out of step: wrong numbers without an error ----------------------------------------------------------------


def test_different_requests_give_equal_wrong_numbers(world: World, cut: Slices, x: Any) -> None:
    """hccl HCCL_DFS_CONFIG.md: there are no checks in graph mode."""
    programs = connected(world, cut, x)
    first, second = predict(programs, x, x + 1)
    assert np.array_equal(first, second)
    assert not np.array_equal(first, cut.answers(x)[0])
    assert not np.array_equal(first, cut.answers(x + 1)[0])


def test_duplicate_slice_gives_equal_wrong_numbers(world: World, cut: Slices, x: Any) -> None:
    """Equal digests of the ranks' answers therefore prove nothing."""
    first, second = predict(world(cut._replace(paths=[cut.paths[0]] * 2)), x)
    assert np.array_equal(first, second)
    assert not np.array_equal(first, cut.answers(x)[0])


def test_unequal_batches_use_stale_buffer_contents(world: World, cut: Slices, x: Any) -> None:
    smaller, larger = predict(world(), x[2:], x)
    assert (smaller.shape, larger.shape) == ((1, 16), (3, 16))
    assert not np.array_equal(smaller, cut.answers(x[2:])[0])
    assert np.abs(larger[1:]).max() > 1e30
    assert not np.array_equal(larger, cut.answers(x)[0])


def test_skipped_request_shifts_all_answers(world: World, host: Host, cut: Slices, x: Any) -> None:
    programs = connected(world, cut, x)
    host.fault("predict", "skip", rank=1, times=1)
    programs[0].begin("predict(x)", x=x)
    assert programs[1].do("predict(x)").shape == (3, 16)  # It returns at once.
    for number in (2, 3):
        programs[1].begin("predict(x)", x=x * number)
        assert not np.array_equal(programs[0].result(), cut.answers(x * (number - 1))[0])
        if number == 3:
            shorten_timeouts(host)
        programs[0].begin("predict(x)", x=x * number)
    with pytest.raises(ProgramError, match="predict failed!"):
        programs[0].result()
    assert "EI0002" in programs[0].errors()[-2]


def test_predict_after_timeout_uses_stale_numbers(world: World, host: Host, cut: Slices, x: Any) -> None:
    programs = connected(world, cut, x)
    shorten_timeouts(host)
    assert programs[0].refusal("predict(x)").text == "predict failed!"
    answer = programs[1].refusal("predict(x * 2)")  # The second AllReduce has no data.
    assert answer.text == "predict failed!"
    assert not np.array_equal(predict(programs, x)[0], cut.answers(x)[0])


# --- missing ranks ----------------------------------------------------------------------------------------------


def test_missing_rank_times_out_first_predict(world: World, host: Host, x: Any) -> None:
    """hccl HCCL_CONNECT_TIMEOUT.md: EI0006 after 120 s and 20 s; the rank cannot join later."""
    programs = world()
    shorten_timeouts(host)
    begin = time.monotonic()
    assert programs[0].refusal("predict(x)", x=x).text == "predict failed!"
    assert time.monotonic() - begin >= CONNECT_S
    assert "EI0006" in programs[0].errors()[-2]
    assert predict(programs, x) == ["predict failed!"] * 2


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_dead_or_hung_rank_causes_execution_timeout(world: World, host: Host, cut: Slices, x: Any, number: int) -> None:
    """hccl HCCL_EXEC_TIMEOUT.md, task_exec_stage.md; heartbeat.h:37: LOST is only a log line and ends no wait."""
    programs = connected(world, cut, x)
    shorten_timeouts(host)
    os.kill(programs[1].pid, number)
    begin = time.monotonic()
    assert programs[0].refusal("predict(x)").text == "predict failed!"
    assert time.monotonic() - begin >= EXEC_S
    assert "EI0002" in programs[0].errors()[-2]
    assert "ranks [1] may be stuck" in programs[0].log()
    while number == signal.SIGKILL and "rank 1 is LOST" not in programs[0].log():
        assert not programs[0].has_answered(0.01)
    assert ("rank 1 is LOST" in programs[0].log()) is (number == signal.SIGKILL)


@pytest.mark.parametrize(("action", "at"), [("crash", "start"), ("hang", "start"), ("crash", "sent")])
def test_rank_dies_during_predict(world: World, host: Host, cut: Slices, x: Any, action: str, at: str) -> None:
    programs = connected(world, cut, x)
    shorten_timeouts(host)
    host.fault("predict", action, rank=1, at=at)
    programs[1].begin("predict(x)", x=x)
    assert programs[0].refusal("predict(x)").text == "predict failed!"


def test_garbage_of_one_rank_reaches_all(world: World, host: Host, cut: Slices, x: Any) -> None:
    programs = connected(world, cut, x)
    host.fault("predict", "garbage", rank=1, times=1)
    wrong = predict(programs, x)
    assert not np.array_equal(wrong[0], cut.answers(x)[0])
    assert_right(programs, cut, x)


def test_waits_for_slow_rank(world: World, host: Host, cut: Slices, x: Any) -> None:
    programs = connected(world, cut, x)
    host.fault("predict", "slow", rank=0, seconds=0.05)
    assert_right(programs, cut, x)


def test_failed_rank_blocks_the_others(world: World, host: Host, cut: Slices, x: Any) -> None:
    programs = connected(world, cut, x)
    shorten_timeouts(host)
    host.fault("predict", "fail", rank=1, times=1)
    assert predict(programs, x) == ["predict failed!"] * 2
    assert "EI0002" in programs[0].errors()[-2]


def test_table_mismatch_appears_at_first_predict(world: World, host: Host, cut: Slices, x: Any) -> None:
    """param_check.cc:106 compares a CRC of the parsed table: EI0005."""
    host.fault("build", "table", rank=1)
    programs = world()
    assert predict(programs, x) == ["predict failed!"] * 2
    for program in programs:
        assert "EI0005" in program.errors()[-2]


def test_predict_after_sync_timeout_blocks_forever(world: World, host: Host, x: Any, cut: Slices) -> None:
    """ge davinci_model.cc:5659: the model's run loop has ended."""
    programs = connected(world, cut, x, config={"ge_session_options": {"stream_sync_timeout": "67000"}})
    shorten_timeouts(host)
    assert programs[0].refusal("predict(x)").text == "predict failed!"
    assert "stream sync timeout" in programs[0].errors()[-2]
    programs[0].begin("predict(x)")
    assert not programs[0].has_answered(2 * EXEC_S)


def test_waiting_predict_blocks_signals_but_not_the_gil(world: World, cut: Slices, x: Any) -> None:
    """ge_graph_executor.cc:1514 waits for a future without a time-out."""
    programs = connected(world, cut, x, HCCL_EXEC_TIMEOUT="0")
    programs[0].do("import signal, threading, time\nsignal.signal(signal.SIGTERM, lambda *_: os.write(2, b'handled'))")
    programs[0].do(
        "def tick():\n    while 'y' not in globals():\n        ticks.append(1)\n        time.sleep(.001)\nticks = []"
    )
    programs[0].begin("threading.Thread(target=tick, daemon=True).start()\ny = predict(x)\nlen(ticks)", x=x)
    assert not programs[0].has_answered(0.1)
    os.kill(programs[0].pid, signal.SIGTERM)
    assert not programs[0].has_answered(0.1)
    assert "handled" not in programs[0].log()
    programs[1].do("predict(x)", x=x)
    assert programs[0].result() > 20
    assert "handled" in programs[0].log()


# --- no rank table ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("section", [{}, {"rank_table_file": ""}, {"rank_table_path": "/t.json"}])
def test_missing_table_fails_first_predict(program: Program, cut: Slices, x: Any, section: Any) -> None:
    """ge_device_context.cc:246 builds an ordinary model; hcom_ops_kernel_info_store.cc:358 reports EI0004."""
    program.do("build(path, provider='ge', config={'ascend_context': section})", path=cut.paths[0], section=section)
    assert program.refusal("predict(x)", x=x).text == "predict failed!"
    assert "EI0004: No valid communicator found" in program.errors()[-2]


def test_options_of_first_model_apply(start: Start, host: Host, cut: Slices, table: Path, x: Any) -> None:
    """ge_device_context.cc:156 logs "GE Context has been initialized, skip"."""
    program = start()
    program.do("build(path, provider='ge')\nfirst = lib.model", path=cut.paths[0])
    program.do("rank(path, table, 1)", path=cut.paths[1], table=table)
    assert "has been initialized, skip" in program.log()
    assert program.refusal("predict(x)", x=x).text == "predict failed!"
    assert "EI0004" in program.errors()[-2]
    assert host.card_state(1).used == 0


def test_process_initializes_hccl_once(start: Start, cut: Slices, table: Path) -> None:
    """hcom.cc:82 reports "multiple initialization is not supported"."""
    program = start()
    program.do("rank(path, table, 0)\nlib.model = None", path=cut.paths[0], table=table)
    assert "multiple initialization" in errors_of(program, "rank(path, table, 0)")[-1]


def test_cpu_rejects_slice(program: Program, cut: Slices) -> None:
    """Version 2.0.0 reported "construct model failed"."""
    assert errors_of(program, "build(path, target='cpu')", path=cut.paths[0]) == ["construct model failed"]
