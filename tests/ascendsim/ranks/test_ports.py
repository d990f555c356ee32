"""Tests of the resources that HCCL uses on a card: a port of its network interface, and memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from ascendsim import Host, driver_state, ranks
from ascendsim.program import Program, ProgramError
from ascendsim.ranks import Slices

from ..support import Start, errors_of
from .support import World, connected

MIB = 1024 * 1024
BUILD = "rank(path, table, 0)"


@pytest.fixture
def first(start: Start, cut: Slices, table: Path) -> Program:
    """Return a process that is rank 0 on card 0."""
    program = start()
    program.do(BUILD, path=cut.paths[0], table=table)
    return program


def build_in_another_process(start: Start, cut: Slices, table: Path) -> str:
    """Start another process on the card; return its error, or an empty string."""
    program = start()
    try:
        program.do(BUILD, path=cut.paths[0], table=table)
    except ProgramError:
        return program.errors()[-1]
    return ""


def test_second_hccl_process_needs_another_port(
    first: Program, start: Start, cut: Slices, table: Path, tmp_path: Path
) -> None:
    """hccl fault_diagnosis/param_link_stage.md documents error EI0019."""
    assert "EI0019" in build_in_another_process(start, cut, table)
    assert (
        build_in_another_process(start, cut, ranks.table(tmp_path / "other.json", [0, 1], ports=[16700, 16700])) == ""
    )
    first.kill()
    assert build_in_another_process(start, cut, table) == ""


@pytest.mark.parametrize(
    "switches", [{"driver_version": "24.1.0"}, {"soc_name": "Ascend910A"}, {"soc_name": "Ascend310P3"}]
)
def test_some_products_allow_one_hccl_process(
    host: Host, start: Start, cut: Slices, tmp_path: Path, switches: Any
) -> None:
    """hccl rank_table_config_a2.md and constraints.md: one HCCL process per card."""
    host.switch(**switches)
    one, two = (ranks.table(tmp_path / f"{port}.json", [0, 1], ports=[port, port]) for port in (16700, 16800))
    start().do(BUILD, path=cut.paths[0], table=one)
    assert "EI0019" in build_in_another_process(start, cut, two)


def test_card_accepts_eight_hccl_processes(start: Start, cut: Slices, tmp_path: Path) -> None:
    for number in range(9):
        port = 17000 + number
        failed = build_in_another_process(
            start, cut, ranks.table(tmp_path / f"{port}.json", [0, 1], ports=[port, port])
        )
        assert ("EI0019" in failed) is (number == 8)


def test_port_may_stay_in_use_for_a_while(first: Program, host: Host, start: Start, cut: Slices, table: Path) -> None:
    host.switch(port_linger=100.0)
    first.kill()
    assert "EI0019" in build_in_another_process(start, cut, table)
    assert host.card_state().used == 0


def test_last_model_frees_port(first: Program, start: Start, cut: Slices, table: Path) -> None:
    first.do("lib.model = None")
    assert build_in_another_process(start, cut, table) == ""


def test_communicator_uses_two_buffers_per_card(world: World, host: Host, cut: Slices, x: Any) -> None:
    """hccl HCCL_BUFFSIZE.md: 200 MB by default in each direction."""
    connected(world, cut, x, HCCL_BUFFSIZE="50")
    for card in (0, 1):
        [buffers] = [each for each in host.card_state(card).allocations if each.kind == driver_state.BUFFERS]
        assert buffers.bytes == 100 * MIB


def test_full_card_fails_first_predict(world: World, host: Host, cut: Slices, x: Any) -> None:
    host.switch(capacity_mib=300)
    first, _ = world()
    assert first.refusal("predict(x)", x=x).text == "predict failed!"
    assert "207001" in first.errors()[-2]
    assert [each.kind for each in host.card_state().allocations] == [driver_state.CONTEXT]


def test_new_group_replaces_ended_one(world: World, host: Host, cut: Slices, x: Any) -> None:
    for program in connected(world, cut, x):
        program.kill()
    assert (host.card_state(0).used, host.card_state(1).used) == (0, 0)
    connected(world, cut, x)


def test_single_card_needs_hccl(program: Program, host: Host, cut: Slices) -> None:
    """ge_device_context.cc:218, :236: the Ascend310 is an exception."""
    host.switch(libhccl=False)
    build = "build(path, provider='ge')"
    assert "dlopen" in errors_of(program, build, path=cut.paths[0])[-1]
    host.switch(soc_name="Ascend310")
    program.do(build)


def test_virtual_card_has_no_hccl(program: Program, host: Host, cut: Slices, table: Path) -> None:
    """Documented in hccl constraints.md."""
    host.switch(vnpu=True)
    assert "virtual instance" in errors_of(program, BUILD, path=cut.paths[0], table=table)[-1]


def test_300i_duo_needs_hccl_before_memory(
    program: Program, start: Start, host: Host, cut: Slices, table: Path, path: Path
) -> None:
    """Documented in hccl constraints.md."""
    host.switch(soc_name="Ascend310P3")
    program.do("build(plain)\nkept = lib.model", plain=path)
    assert "before any memory" in errors_of(program, BUILD, path=cut.paths[0], table=table)[-1]


def test_writes_model_cache_to_working_directory(start: Start, cut: Slices, table: Path, tmp_path: Path) -> None:
    """See ge_graph_executor.cc:553."""
    program = start()
    section = {"rank_table_file": str(table), "provider": "ge", "model_cache_mode": "mem_opt"}
    program.do("os.chdir(where)", where=str(tmp_path))
    program.do("build(path, config={'ascend_context': section})", path=cut.paths[0], section=section)
    assert (tmp_path / "model_build_cache_0").is_dir()
