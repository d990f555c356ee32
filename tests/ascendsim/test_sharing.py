"""Weights that several processes share, and every way in which the vendor's library gets that wrong."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable, List, Tuple

import numpy as np
import pytest

from ascendsim import Host, ledger, models
from ascendsim.program import Program

Start = Callable[..., Program]

MIB = 1024 * 1024
LAST_LINE = "Pre init model resource failed."
KEEP_RUNNING = "please Keep the main process running, otherwise the shared memory will become invalid!"
BUILD_FAILED = "build_from_file failed! Error is Common error code."


def share(start: Start, path: Path, workers: int = 1) -> Tuple[Program, List[Program], str]:
    """A holder, workers that have attached, and the handle."""
    holder, others = start(), [start() for _ in range(workers)]
    pids = ",".join(str(other.do("pid()")) for other in others)
    handle: str = holder.do("build(path, pids=pids)", path=path, pids=pids)
    for other in others:
        assert other.do("build(path, handle=handle)", path=path, handle=handle) == ""
    return holder, others, handle


def assert_refused(program: Program, path: Path, handle: str, cause: str = KEEP_RUNNING) -> None:
    """The attach fails without a reason; the log ends with a wrong one and has the right one before."""
    error = program.refusal("build(path, handle=handle)", path=path, handle=handle)
    assert (error.kind, error.text) == ("RuntimeError", BUILD_FAILED)
    assert program.errors()[-1] == LAST_LINE
    assert any(cause in text for text in program.errors()[:-1])


# --- Shared memory, and who pays for it ------------------------------------------------------------------------


def test_processes_share_one_copy(start: Start, host: Host, path: Path, x: Any) -> None:
    holder, workers, handle = share(start, path, workers=2)
    assert int(handle) > 2**53
    for program in (holder, *workers):
        assert np.array_equal(program.do("predict(x)", x=x), models.answer(path, x))
    assert host.copies_of_weights() == 1
    assert host.copies_of_weights(1) == 0
    card = host.ledger()
    (weights,) = [each for each in card.allocations if each.kind == ledger.WEIGHTS]
    pids = [worker.do("pid()") for worker in workers]
    assert weights.owner == holder.do("pid()")
    assert list(weights.importers) == pids
    assert list(weights.whitelist) == sorted(pids)
    assert weights.handle == handle
    assert set(card.processes) == {weights.owner, *pids}


@pytest.mark.parametrize(("mib", "granules"), [(0, 1), (1, 1), (2, 2), (3, 2), (64, 33)])
def test_shared_weights_take_one_granule_more(
    start: Start, host: Host, tmp_path: Path, mib: int, granules: int
) -> None:
    path = models.mlp(tmp_path / "m.mindir", size_mib=mib)
    start().do("build(path, pids='1')", path=path)
    (weights,) = [each for each in host.ledger().allocations if each.kind == ledger.WEIGHTS]
    assert weights.bytes == granules * 2 * MIB


def test_every_process_pays_for_workspace_and_context(start: Start, host: Host, tmp_path: Path) -> None:
    host.switch(workspace_mib=30, context_mib=100, capacity_mib=1000)
    share(start, models.mlp(tmp_path / "m.mindir", size_mib=101), workers=2)
    card = host.ledger()
    assert card.capacity == 1000 * MIB
    assert card.used == (102 + 3 * 130) * MIB
    assert card.free == card.capacity - card.used


def test_processes_that_do_not_share_have_a_copy_each(start: Start, host: Host, path: Path) -> None:
    for _ in range(3):
        start().do("build(path)", path=path)
    assert host.copies_of_weights() == 3
    assert {each.kind for each in host.ledger().allocations} == {"private weights", "workspace", "context"}


@pytest.mark.parametrize("end", ["kill", "wait"])
def test_a_process_that_ends_leaves_nothing(start: Start, host: Host, path: Path, end: str) -> None:
    program = start()
    program.do("build(path, pids='1')", path=path)
    assert host.copies_of_weights() == 1
    getattr(program, end)()
    assert host.ledger().used == 0
    assert host.ledger().processes == ()


def test_letting_go_of_a_model_gives_its_memory_back(start: Start, host: Host, path: Path) -> None:
    holder, (worker,), handle = share(start, path)
    worker.do("lib.model = None")
    (weights,) = [each for each in host.ledger().allocations if each.kind == ledger.WEIGHTS]
    assert weights.importers == ()
    assert host.ledger().processes == (weights.owner,)
    worker.do("build(path, handle=handle)", path=path, handle=handle)  # and once more
    worker.do("lib.model = None")
    holder.do("lib.model = None")
    assert host.ledger().used == 0


# --- Who may import ---------------------------------------------------------------------------------------------


def test_the_driver_has_its_own_pids(start: Start, host: Host) -> None:
    host.switch(pid_offset=4000)
    program = start()
    assert program.do("ms.Model().get_model_info('current_pid')") == str(program.pid + 4000)


def test_a_process_that_is_not_listed_is_refused(start: Start, host: Host, path: Path) -> None:
    _, _, handle = share(start, path)
    stranger = start()
    assert_refused(stranger, path, handle)
    assert f"pid {stranger.do('pid()')} is not on the list" in host.driver_log()[-1]
    assert host.copies_of_weights() == 1


def test_the_pid_inside_of_the_container_is_not_enough(start: Start, path: Path) -> None:
    holder, worker = start(), start()
    handle = holder.do("build(path, pids=pids)", path=path, pids=str(worker.pid))
    assert_refused(worker, path, handle)


def test_a_pid_listed_before_its_process_started_is_refused(start: Start, host: Host, path: Path) -> None:
    holder = start()
    handle = holder.do("build(path, pids='424242')", path=path)
    assert_refused(start(pid=424242), path, handle)
    assert "Time check fail" in host.driver_log()[-1]


def test_pids_are_fixed_at_the_build(start: Start, path: Path) -> None:
    holder, _, handle = share(start, path)
    late = start()
    error = holder.refusal("lib.model.build_from_file(path, ms.ModelType.MINDIR)", path=str(path))
    assert error.text == BUILD_FAILED
    assert_refused(late, path, handle)


def test_a_pid_leaves_the_list_with_a_process_that_had_imported(start: Start, host: Host, path: Path) -> None:
    holder, first, second = start(), start(pid=7001), start(pid=7002)
    handle = holder.do("build(path, pids='7001,7002')", path=path)
    first.do("build(path, handle=handle)", path=path, handle=handle)
    first.kill()
    second.kill()  # it never imported
    (weights,) = [each for each in host.ledger().allocations if each.kind == ledger.WEIGHTS]
    assert weights.whitelist == (7002,)


def test_an_importer_imports_once_and_the_holder_never(start: Start, host: Host, path: Path) -> None:
    holder, (worker,), handle = share(start, path)
    again = "old = lib.model\nbuild(path, handle=handle)"
    assert worker.refusal(again, path=path, handle=handle).text == BUILD_FAILED
    assert "Can not import multi times" in host.driver_log()[-1]
    assert holder.refusal(again, path=path, handle=handle).text == BUILD_FAILED
    assert "exporter" in host.driver_log()[-1]
    host.switch(import_twice=True)
    worker.do(again, path=path, handle=handle)


def test_another_card_and_a_virtual_card_are_refused(start: Start, host: Host, path: Path) -> None:
    holder, worker, other = start(), start(), start()
    pids = f"{worker.do('pid()')},{other.do('pid()')}"
    handle = holder.do("build(path, pids=pids)", path=path, pids=pids)
    error = other.refusal("build(path, handle=handle, device=1)", path=path, handle=handle)
    assert error.text == BUILD_FAILED
    assert "card 0" in host.driver_log()[-1]
    host.switch(vnpu=True)
    assert_refused(worker, path, handle)


def test_a_card_that_is_not_there_is_card_0(start: Start, host: Host, path: Path) -> None:
    program = start()
    program.do("build(path, device=9)", path=path)
    assert host.copies_of_weights(0) == 1
    assert "[WARNING]" in program.log()


# --- What a failed build leaves behind --------------------------------------------------------------------------


def test_a_failed_build_keeps_its_memory_until_the_process_ends(start: Start, host: Host, path: Path) -> None:
    program = start()
    error = program.refusal("build(path, pids=' 1')", path=path)
    assert error.text == BUILD_FAILED
    assert program.errors() == ["ConvertStringToIntVector failed!", "Main process failed!"]
    program.do("lib.model = None")
    (weights,) = [each for each in host.ledger().allocations if each.kind == ledger.WEIGHTS]
    assert weights.handle  # it was exported before anybody looked at the pids
    program.refusal("build(path, pids=' 1')", path=path)
    assert host.copies_of_weights() == 2
    program.kill()
    assert host.ledger().used == 0


def test_a_failed_build_spoils_the_model_object(start: Start, path: Path) -> None:
    program = start()
    program.refusal("build(path, pids='x')", path=path)
    build = "lib.model.build_from_file(path, ms.ModelType.MINDIR, context())"
    assert program.refusal(build, path=str(path)).text == BUILD_FAILED
    assert program.errors()[-1] == "Model has been called Build"
    program.do("build(path)", path=path)


def test_a_failed_attach_may_look_like_a_success(start: Start, host: Host, path: Path, x: Any, tmp_path: Path) -> None:
    host.switch(first_model_id=0)
    other = models.mlp(tmp_path / "other.mindir", seed=9)
    holder, worker = start(), start()
    handle = holder.do("build(path, pids='1')", path=path)
    worker.do("build(path)\nfirst = lib.model", path=other)
    assert worker.do("build(path, handle=handle)", path=path, handle=handle) == ""  # it is not listed
    assert np.array_equal(worker.do("predict(x)", x=x), models.answer(other, x))


# --- Every attach writes ----------------------------------------------------------------------------------------


def test_another_file_of_the_same_size_changes_all_answers(start: Start, path: Path, x: Any, tmp_path: Path) -> None:
    other = models.mlp(tmp_path / "other.mindir", seed=9)
    holder, worker = start(), start()
    handle = holder.do("build(path, pids=pids)", path=path, pids=str(worker.do("pid()")))
    assert np.array_equal(holder.do("predict(x)", x=x), models.answer(path, x))
    worker.do("build(path, handle=handle)", path=other, handle=handle)
    assert np.array_equal(worker.do("predict(x)", x=x), models.answer(other, x))
    assert np.array_equal(holder.do("predict(x)", x=x), models.answer(other, x))


def test_a_larger_file_is_refused_and_a_smaller_one_only_if_asked(
    start: Start, host: Host, path: Path, tmp_path: Path
) -> None:
    larger = models.mlp(tmp_path / "larger.mindir", size_mib=2)
    holder, worker = start(), start()
    pids = str(worker.do("pid()"))
    handle = holder.do("build(path, pids=pids)", path=path, pids=pids)
    assert_refused(worker, larger, handle, "aclrtmapmem failed! weight size:4194304")
    for exactly in (False, True):
        host.switch(map_exactly=exactly)
        holder, worker = start(), start()
        handle = holder.do("build(path, pids=pids)", path=larger, pids=str(worker.do("pid()")))
        if exactly:
            assert_refused(worker, path, handle, "aclrtmapmem failed! weight size:2097152")
        else:
            worker.do("build(path, handle=handle)", path=path, handle=handle)


# --- The holder dies --------------------------------------------------------------------------------------------


def test_counted_memory_outlives_its_holder(start: Start, host: Host, path: Path, x: Any) -> None:
    stranger = start()
    holder, (worker, late), handle = _holder_of_two(start, path)
    holder.kill()
    assert np.array_equal(worker.do("predict(x)", x=x), models.answer(path, x))
    (weights,) = [each for each in host.ledger().allocations if each.kind == ledger.WEIGHTS]
    assert weights.orphaned
    late.do("build(path, handle=handle)", path=path, handle=handle)  # it was listed in time
    assert worker.do("set_pids(handle, 1)", handle=handle) != 0  # nobody can list more
    worker.kill()
    assert np.array_equal(late.do("predict(x)", x=x), models.answer(path, x))
    late.kill()
    assert host.copies_of_weights() == 0
    assert_refused(stranger, path, handle)
    assert "Share handle doesn't exist" in host.driver_log()[-1]


def test_without_orphan_import_a_listed_process_comes_too_late(start: Start, host: Host, path: Path) -> None:
    host.switch(orphan_import=False)
    holder, (_, late), handle = _holder_of_two(start, path)
    holder.kill()
    assert_refused(late, path, handle)


def test_strict_memory_dies_with_its_holder(start: Start, host: Host, path: Path, x: Any) -> None:
    host.switch(lifetime="strict")
    holder, (worker, late), handle = _holder_of_two(start, path)
    holder.kill()
    error = worker.refusal("predict(x)", x=x)
    assert (error.kind, error.text) == ("RuntimeError", "predict failed!")
    assert_refused(late, path, handle)
    assert not any(each.valid for each in host.ledger().allocations if each.kind == ledger.WEIGHTS)


def test_strict_memory_may_hold_something_else_then(start: Start, host: Host, path: Path, x: Any) -> None:
    host.switch(lifetime="strict", after_death="garbage")
    holder, (worker, _), _ = _holder_of_two(start, path)
    assert np.array_equal(worker.do("predict(x)", x=x), models.answer(path, x))
    holder.kill()
    assert not np.array_equal(worker.do("predict(x)", x=x), models.answer(path, x))


def _holder_of_two(start: Start, path: Path) -> Tuple[Program, Tuple[Program, Program], str]:
    """A holder that lists two workers, of which the first attaches."""
    holder, first, second = start(), start(), start()
    pids = f"{first.do('pid()')},{second.do('pid()')}"
    handle: str = holder.do("build(path, pids=pids)", path=path, pids=pids)
    first.do("build(path, handle=handle)", path=path, handle=handle)
    return holder, (first, second), handle
