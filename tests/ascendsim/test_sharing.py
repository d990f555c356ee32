"""Tests of weights shared between processes, and of the library's defects in sharing."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ascendsim import Host, models
from ascendsim.program import Program

from .support import ATTACH, Start, answers, assert_refused, errors_of, kinds, share

MIB = 1024 * 1024

# --- shared memory and its costs --------------------------------------------------------------------------------


@pytest.mark.parametrize(("mib", "granules"), [(0, 1), (1, 1), (2, 2), (3, 2), (64, 33)])
def test_shared_weights_use_one_more_granule(
    program: Program, host: Host, tmp_path: Path, mib: int, granules: int
) -> None:
    program.do("build(path, pids='1')", path=models.mlp(tmp_path / "m.mindir", size_mib=mib))
    assert host.card_state().weights.bytes == granules * 2 * MIB


def test_every_process_has_workspace_and_context(start: Start, host: Host) -> None:
    host.switch(workspace_mib=30, context_mib=100, capacity_mib=1000)
    share(start, workers=2, attached=2)
    assert (host.card_state().capacity, host.card_state().used) == (1000 * MIB, (2 + 3 * 130) * MIB)
    for _ in range(2):
        start().do("build(path)")
    assert kinds(host) == ["weights", "private weights", "private weights"]


@pytest.mark.parametrize("end", ["kill", "wait"])
def test_ended_process_leaves_nothing(program: Program, host: Host, end: str) -> None:
    program.do("build(path, pids='1')")
    assert kinds(host) == ["weights"]
    getattr(program, end)()
    assert (host.card_state().used, host.card_state().processes) == (0, ())


def test_deleting_model_frees_memory(start: Start, host: Host) -> None:
    holder, (worker,), handle = share(start)
    worker.do("lib.model = None")
    assert host.card_state().weights.importers == []
    assert host.card_state().processes == (holder.do("pid()"),)
    worker.do(ATTACH, handle=handle)  # The worker can attach again.
    worker.do("lib.model = None")
    holder.do("lib.model = None")
    assert host.card_state().used == 0


# --- permission to import ---------------------------------------------------------------------------------------


def test_list_needs_pids_of_the_driver(start: Start, host: Host) -> None:
    host.switch(pid_offset=4000)
    holder, worker = start(), start()
    assert worker.do("ms.Model().get_model_info('current_pid')") == str(worker.pid + 4000)
    assert_refused(worker, holder.do("build(path, pids=pids)", pids=str(worker.pid)))
    assert f"pid {worker.pid + 4000} is not on the list" in host.driver_log()[-1]
    assert kinds(host) == ["weights"]


def test_pids_are_fixed_at_the_build(start: Start) -> None:
    holder, _, handle = share(start)
    errors = errors_of(holder, "lib.model.build_from_file(str(path), ms.ModelType.MINDIR)")
    assert errors == ["Model has been called Build"]
    assert_refused(start(), handle)


def test_exit_removes_imported_pid_from_list(start: Start, host: Host) -> None:
    holder, first, second = start(), start(pid=7001), start(pid=7002)
    first.do(ATTACH, handle=holder.do("build(path, pids='7001,7002')"))
    first.kill()
    second.kill()  # This process never imported.
    assert host.card_state().weights.whitelist == [7002]


def test_importer_imports_once_and_holder_never(start: Start, host: Host) -> None:
    holder, (worker,), handle = share(start)
    for program, reason in ((worker, "Can not import multi times"), (holder, "exporter")):
        errors_of(program, f"old = lib.model\n{ATTACH}", handle=handle)
        assert reason in host.driver_log()[-1]


def test_rejects_other_and_virtual_cards(start: Start, host: Host) -> None:
    _, (worker, other), handle = share(start, workers=2, attached=0)
    errors_of(other, "build(path, handle=handle, device=1)", handle=handle)
    assert "card 0" in host.driver_log()[-1]
    host.switch(vnpu=True)
    assert_refused(worker, handle)


def test_missing_card_means_card_0(program: Program, host: Host) -> None:
    program.do("build(path, device=9)")
    assert kinds(host) == ["private weights"]
    assert "[WARNING]" in program.log()


@pytest.mark.parametrize(
    ("listed", "seen"), [("1", [1]), ("1,0", [1, 0]), ("", []), ("0,7,1", [0]), ("0,0", [0]), ("x", [])]
)
def test_visible_cards_keep_listed_order(start: Start, host: Host, listed: str, seen: Any) -> None:
    program = start(ASCEND_RT_VISIBLE_DEVICES=listed)
    for number, card in enumerate(seen):
        before = host.copies_of_weights(card)
        program.do("build(path, device=number)", number=number)
        assert host.copies_of_weights(card) == before + 1
    if not seen:
        errors_of(program)


# --- failed builds ----------------------------------------------------------------------------------------------


def test_failed_build_keeps_memory_until_exit(program: Program, host: Host) -> None:
    failed = ["ConvertStringToIntVector failed!", "Main process failed!"]
    assert errors_of(program, "build(path, pids=' 1')") == failed
    program.do("lib.model = None")
    assert host.card_state().weights.handle  # The library exports the weights before it parses the pids.
    assert errors_of(program, "build(path, pids=' 1')") == failed
    assert kinds(host) == ["weights", "weights"]
    program.kill()
    assert host.card_state().used == 0


def test_failed_build_makes_model_unusable(program: Program) -> None:
    errors_of(program, "build(path, pids='x')")
    again = "lib.model.build_from_file(str(path), ms.ModelType.MINDIR, context())"
    assert errors_of(program, again) == ["Model has been called Build"]
    program.do("build(path)")


def test_failed_attach_may_look_like_success(start: Start, host: Host, x: Any, other: Path) -> None:
    host.switch(first_model_id=0)
    holder, worker = start(), start()
    handle = holder.do("build(path, pids='1')")
    worker.do("build(other)\nfirst = lib.model", other=other)
    assert worker.do(ATTACH, handle=handle) == ""  # The process is not listed.
    assert answers(worker, other, x)


# --- every attach writes ----------------------------------------------------------------------------------------


def test_rejects_only_larger_files(start: Start, tmp_path: Path) -> None:
    larger = models.mlp(tmp_path / "larger.mindir", size_mib=2)
    _, (worker,), handle = share(start, attached=0)
    assert_refused(worker, handle, "aclrtmapmem failed! weight size:4194304", path=larger)
    worker = start()
    handle = start().do("build(larger, pids=pids)", larger=larger, pids=str(worker.do("pid()")))
    worker.do(ATTACH, handle=handle)


# --- exit of the holder -----------------------------------------------------------------------------------------


def test_reference_counted_memory_outlives_holder(start: Start, host: Host, path: Path, x: Any) -> None:
    stranger = start()
    holder, (worker, late), handle = share(start, workers=2)
    holder.kill()
    assert answers(worker, path, x)
    assert not host.card_state().weights.owned
    late.do(ATTACH, handle=handle)  # It was listed in time.
    assert worker.do("set_pids(handle, 1)") != 0  # No other process can list more.
    worker.kill()
    assert answers(late, path, x)
    late.kill()
    assert host.card_state().used == 0
    assert_refused(stranger, handle)
    assert "Share handle doesn't exist" in host.driver_log()[-1]


def test_strict_memory_ends_with_holder(start: Start, host: Host, path: Path, x: Any) -> None:
    host.switch(lifetime="strict", after_death="garbage")
    holder, (worker, late), handle = share(start, workers=2)
    assert answers(worker, path, x)
    holder.kill()
    assert not answers(worker, path, x)
    host.switch(after_death="error")
    assert worker.refusal("predict(x)").text == "predict failed!"
    assert_refused(late, handle)
    assert not host.card_state().weights.valid
