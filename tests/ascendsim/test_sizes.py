"""Sizes that a model was converted for, datatypes, cards that are hidden, and what comes free late."""

from __future__ import annotations

from pathlib import Path
from typing import Any, Callable

import numpy as np
import pytest

from ascendsim import Host, models
from ascendsim.program import Program

Start = Callable[..., Program]

INFO = "[lib.model.get_model_info(key) for key in ('dynamic_dims', 'input_shape')]"
RESIZE = "lib.model.resize(lib.model.get_inputs(), shapes)"


@pytest.mark.parametrize(("told", "info"), [(False, ["", ""]), (True, ["1;4", "x:-1,64"])])
def test_a_resize_to_a_size_that_is_no_gear_is_refused_and_changes_nothing(
    start: Start, tmp_path: Path, x: Any, told: bool, info: Any
) -> None:
    path = models.mlp(tmp_path / "geared.mindir", gears=(1, 4), told=told)
    program = start()
    program.do("build(path)", path=path)
    assert program.do(INFO) == info
    # Outputs are those of the largest gear before the first resize.
    assert program.do("[lib.model.get_inputs()[0].shape, lib.model.get_outputs()[0].shape]") == [[-1, 64], [4, 64]]
    program.do("predict(x)", x=x[:1])
    for shapes, reason in (([[3, 64]], "Current batch size 3 is invalid"), ([[4, 65]], "Shape Conflict: ")):
        assert program.refusal(RESIZE, shapes=shapes).text == "resize failed! Error is Common error code."
        assert program.errors()[-2].startswith(reason)
        assert program.do("lib.model.get_inputs()[0].shape") == [1, 64]
        assert np.array_equal(program.do("predict(x)", x=x[:1]), models.answer(path, x[:1]))


def test_of_gears_for_the_batch_only_the_first_input_is_looked_at(start: Start, tmp_path: Path) -> None:
    path = models.two_inputs(tmp_path / "two.mindir", gears=(1, 2))
    program = start()
    program.do("build(path)", path=path)
    a, b = np.ones((2, 4), np.float32), np.ones((1, 4), np.float32)
    program.do(RESIZE, shapes=[[2, 4], [1, 4]])
    program.do("t = lib.model.get_inputs()\nt[0].set_data_from_numpy(a)\nt[1].set_data_from_numpy(b)", a=a, b=b)
    answer = program.do("lib.model.predict(t)[0].get_data_to_numpy()")
    assert answer.shape == (2, 4)


def test_bf16_has_no_name_in_python(start: Start, tmp_path: Path) -> None:
    program = start()
    program.do("build(path)", path=models.mlp(tmp_path / "bf16.mindir", dtype="BFLOAT16"))
    assert program.do("[lib.model.get_inputs()[0].dtype, lib.model.get_outputs()[0].dtype]") == [None, None]


@pytest.mark.parametrize(
    ("listed", "seen"), [("1", [1]), ("1,0", [1, 0]), ("", []), ("0,7,1", [0]), ("0,0", [0]), ("x", [])]
)
def test_a_process_sees_the_cards_that_are_listed_in_their_order(
    start: Start, host: Host, path: Path, listed: str, seen: Any
) -> None:
    program = start(ASCEND_RT_VISIBLE_DEVICES=listed)
    for number, card in enumerate(seen):
        before = host.copies_of_weights(card)
        program.do("build(path, device=number)", path=path, number=number)
        assert host.copies_of_weights(card) == before + 1
    if not seen:
        assert program.refusal("build(path, device=0)", path=path).text.startswith("build_from_file failed!")


def test_a_card_that_cannot_export_says_so_in_the_log_only(start: Start, host: Host, path: Path) -> None:
    host.switch(exports=False)
    program = start()
    assert program.refusal("build(path, pids='1')", path=path).text.startswith("build_from_file failed!")
    assert program.errors()[0] == "aclrtMemExportToShareableHandle failed! ret:207000"


def test_what_a_process_had_comes_free_late(start: Start, host: Host, path: Path) -> None:
    host.switch(max_processes=1, release_seconds=0.5)
    first, second = start(), start()
    first.do("build(path)", path=path)
    first.kill()
    assert second.refusal("build(path)", path=path).text.startswith("build_from_file failed!")
    assert second.errors()[0] == "Acl open device 0 failed. ret = 507899"
    late = "import time\nend = time.time() + 30\nwhile True:\n try:\n  build(path)\n  break\n except RuntimeError:\n"
    start().do(late + "  assert time.time() < end\n  time.sleep(0.05)", path=path)
