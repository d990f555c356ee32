"""Tests of `ModelGroup`: what models of one process share on a card, and the cases in which they silently do not."""

from __future__ import annotations

from pathlib import Path
from typing import Any, List

import numpy as np
import pytest

from ascendsim import Host, driver_state, models
from ascendsim.program import Died, Program

from .support import Start, answers, kinds

MIB = 1024 * 1024

HELPERS = """
def group(*paths, flags=None, **place):
    g = ms.ModelGroup(*([] if flags is None else [flags]))
    g.add_model([str(path) for path in paths])
    g.cal_max_size_of_workspace(ms.ModelType.MINDIR, context(**place))
    return g
WEIGHT, WORKSPACE, BOTH = ms.ModelGroupFlag
"""

AT_ONCE = """
def at_once(*paths, device=0):
    built = []
    for path in paths:
        build(path, device=device)
        built.append(lib.model)
    threads = [threading.Thread(target=each.predict, args=(each.get_inputs(),)) for each in built]
    for each in threads:
        each.start()
    for each in threads:
        each.join()
"""

FAILED = "ModelGroup's cal max size of workspace failed."


@pytest.fixture
def grouped(program: Program) -> Program:
    """Return a program with the function `group` and the flags."""
    program.do(HELPERS)
    return program


@pytest.fixture
def small(tmp_path: Path) -> Path:
    """Return the path of a model of 1 row with a workspace of 10 MiB."""
    return models.mlp(tmp_path / "small.mindir", batch=1, workspace_mib=10)


@pytest.fixture
def large(tmp_path: Path) -> Path:
    return models.mlp(tmp_path / "large.mindir", batch=1, workspace_mib=30, seed=4)


@pytest.fixture
def x() -> Any:
    return np.random.RandomState(1).standard_normal((1, 64)).astype(np.float32)


def workspaces(host: Host, device: int = 0) -> List[int]:
    """Return the size of each workspace on a card in MiB."""
    return [each.bytes // MIB for each in host.card_state(device).allocations if each.kind == driver_state.WORKSPACE]


# --- types ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "kind", "text"),
    [
        ("ms.ModelGroup(1)", "RuntimeError", "Parameter flags should be"),  # python/api/model.py:795
        ("ms.ModelGroup(None)", "RuntimeError", "Parameter flags should be"),
        ("ms.ModelGroup().add_model('a')", "TypeError", "models must be list/tuple"),
        ("ms.ModelGroup().add_model([])", "RuntimeError", "models cannot be empty"),
        ("ms.ModelGroup().add_model(())", "RuntimeError", "models cannot be empty"),
        ("ms.ModelGroup().add_model([1])", "TypeError", "models element"),
        ("ms.ModelGroup().add_model(['a', ms.Model()])", "TypeError", "at index 1"),
        ("ms.ModelGroup(WEIGHT).add_model([ms.Model(), 'a'])", "TypeError", "at index 1"),
        ("ms.ModelGroup().add_model([ms.Model()])", "RuntimeError", "ModelGroup's add model failed."),
        ("ms.ModelGroup(BOTH).add_model([ms.Model()])", "RuntimeError", "ModelGroup's add model failed."),
        ("m = ms.Model()\nms.ModelGroup(WEIGHT).add_model([m, m])", "RuntimeError", "ModelGroup's add model failed."),
        ("ms.ModelGroup().cal_max_size_of_workspace(0, context())", "TypeError", "model_type"),
        ("ms.ModelGroup().cal_max_size_of_workspace(ms.ModelType.MINDIR, None)", "TypeError", "context"),
        ("group(path, provider='ge')", "RuntimeError", FAILED),
        ("group('/nowhere')", "RuntimeError", FAILED),
        ("group(path, target='cpu')", "RuntimeError", FAILED),
    ],
)
def test_rejects_invalid_calls(grouped: Program, code: str, kind: str, text: str) -> None:
    error = grouped.refusal(code)
    assert error.kind == kind
    assert error.text.startswith(text) or text in error.text


@pytest.mark.parametrize(
    "code",
    [
        "ms.ModelGroup().add_model(('a', 'b'))",  # The library does not check that the files exist.
        "ms.ModelGroup(WEIGHT).add_model((ms.Model(), ms.Model()))",
        "ms.ModelGroup(WEIGHT).add_model(['a'])",
        "ms.ModelGroup().cal_max_size_of_workspace(ms.ModelType.MINDIR, context())",  # The group is empty.
        "ms.ModelGroupFlag.SHARE_WEIGHT_WORKSPACE.value",
    ],
)
def test_accepts_valid_calls(grouped: Program, code: str) -> None:
    grouped.do(code)


# --- workspaces -------------------------------------------------------------------------------------------------


def test_models_share_the_largest_workspace(grouped: Program, host: Host, small: Path, large: Path, x: Any) -> None:
    grouped.do("group(large, small)\nbuild(small)\nfirst = lib.model\nbuild(large)", small=small, large=large)
    assert workspaces(host) == [30]
    assert kinds(host) == ["private weights"] * 2
    assert answers(grouped, large, x)
    grouped.do("lib.model = first")
    assert answers(grouped, small, x)


def test_separate_workspaces_without_a_group(grouped: Program, host: Host, small: Path, large: Path) -> None:
    grouped.do("build(small)\nfirst = lib.model\nbuild(large)", small=small, large=large)
    assert workspaces(host) == [10, 30]


def test_adding_without_calculation_has_no_effect(grouped: Program, host: Host, small: Path, large: Path) -> None:
    """model_group_impl.cc:97: a path counts only after the calculation."""
    grouped.do("g = ms.ModelGroup()\ng.add_model([str(small), str(large)])", small=small, large=large)
    grouped.do("build(small)\nfirst = lib.model\nbuild(large)")
    assert workspaces(host) == [10, 30]


def test_calculation_builds_each_model_and_uses_no_memory(
    grouped: Program, host: Host, small: Path, large: Path
) -> None:
    grouped.do("group(small, large)", small=small, large=large)
    assert (host.count("build"), host.card_state().used) == (2, 0)


def test_paths_are_compared_as_strings(grouped: Program, host: Host, small: Path) -> None:
    """Another path to the same file is another model."""
    grouped.do("group(small)\nbuild(other)", small=small, other=f"{small.parent}/./{small.name}")
    assert workspaces(host) == [10]
    grouped.do("kept = lib.model\nbuild(small)")
    assert workspaces(host) == [10, 10]


def test_build_needs_calculation_on_its_card(grouped: Program, host: Host, small: Path) -> None:
    """See acl_mem_manager.cc:97."""
    grouped.do("group(small)", small=small)
    assert grouped.refusal("build(small, device=1)").kind == "RuntimeError"
    assert "Get work mem failed!" in grouped.log()


def test_no_calculation_after_a_build(grouped: Program, host: Host, small: Path, large: Path) -> None:
    """See acl_mem_manager.cc:62; the failure clears the existing groups."""
    grouped.do("group(small)\nbuild(small)", small=small)
    for _ in range(2):
        assert grouped.refusal("group(large)", large=large).text == FAILED
        assert "Device 0 has alloc memory!" in grouped.errors()[-2]
        grouped.do("lib.model = None")
    assert host.card_state().used == 0
    grouped.do("group(large, device=1)")


def test_failed_build_clears_all_groups(grouped: Program, host: Host, small: Path, large: Path) -> None:
    """See ModelManager::ClearModel."""
    grouped.do("group(small, large)", small=small, large=large)
    assert grouped.refusal("group('/nowhere')").text == FAILED
    grouped.do("build(small)\nfirst = lib.model\nbuild(large)")
    assert workspaces(host) == [10, 30]


def test_dynamic_model_shares_no_workspace(grouped: Program, host: Host, path: Path, small: Path) -> None:
    """model_process.cc:635, :657: the OM reports work_size 0."""
    host.switch(workspace_mib=20)
    grouped.do("group(path, small)\nbuild(path)\nfirst = lib.model\nbuild(small)", path=path, small=small)
    assert workspaces(host) == [20, 10]
    assert "Dynamic input model not support share workspace" in grouped.log()


def test_rejects_bundles_and_exported_models(grouped: Program, tmp_path: Path) -> None:
    """See model_process.cc:776."""
    bundle = models.mlp(tmp_path / "bundle.mindir", bundle=True)
    assert grouped.refusal("group(bundle)", bundle=bundle).text == FAILED
    assert "Update weight model don't support mem share!" in grouped.log()
    assert grouped.refusal("group(e)", e=models.mlp(tmp_path / "e.mindir", exported=True)).text == FAILED


def test_contexts_are_not_shared(grouped: Program, small: Path, large: Path) -> None:
    """docs runtime_cpp.md: N models have N + 1 contexts."""
    grouped.do("c = context()\ng = ms.ModelGroup()\ng.add_model([str(small)])", small=small)
    grouped.do("g.cal_max_size_of_workspace(ms.ModelType.MINDIR, c)")
    again = "ms.Model().build_from_file(str(small), ms.ModelType.MINDIR, c)"
    assert grouped.refusal(again).kind == "RuntimeError"
    grouped.do("d = context()\nms.Model().build_from_file(str(small), ms.ModelType.MINDIR, d)")
    assert grouped.refusal(again.replace("c)", "d)")).kind == "RuntimeError"


def test_calculation_holds_the_gil(grouped: Program, host: Host, small: Path) -> None:
    """See model_pybind.cc:334; a build releases the GIL."""
    host.fault("build", "slow", seconds=0.2)
    tick = "def tick():\n    while not done:\n        ticks.append(time.monotonic())\n        time.sleep(.001)\n"
    grouped.do(f"import threading, time\n{tick}done, ticks = [], []\nthreading.Thread(target=tick).start()")
    longest = "max(b - a for a, b in zip(ticks, ticks[1:]))"
    grouped.do("time.sleep(.02)\nticks.clear()")
    assert grouped.do(f"build(small)\ntime.sleep(.02)\n{longest}", small=small) < 0.19
    grouped.do("ticks.clear()\ntime.sleep(.02)")
    assert grouped.do(f"group(small, device=1)\ntime.sleep(.02)\ndone.append(1)\n{longest}") > 0.19


@pytest.mark.parametrize(("flags", "running"), [("WORKSPACE", 1), ("BOTH", 1), ("WEIGHT", 2)])
def test_models_with_shared_workspace_run_alternately(
    grouped: Program, host: Host, small: Path, large: Path, flags: str, running: int
) -> None:
    """See model_process.cc:1501; SHARE_WEIGHT alone takes no lock."""
    grouped.do(f"import threading\n{AT_ONCE}\ngroup(small, large, flags={flags})", small=small, large=large)
    host.fault("predict", "hang")
    grouped.begin("at_once(small, large)")
    while host.count("predict") < running:
        assert not grouped.has_answered(0.01)
    assert not grouped.has_answered(0.1)
    assert host.count("predict") == running


# --- weights ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("flags", "expected"), [("WEIGHT", (1, 2)), ("BOTH", (1, 1)), ("WORKSPACE", (2, 1))])
def test_models_of_one_path_share_weights(
    grouped: Program, host: Host, small: Path, x: Any, flags: str, expected: Any
) -> None:
    grouped.do(f"group(small, flags={flags})\nbuild(small)\nfirst = lib.model\nbuild(small)", small=small)
    assert (host.copies_of_weights(), len(workspaces(host))) == expected
    assert answers(grouped, small, x)


def test_groups_with_the_same_path_merge_flags(grouped: Program, host: Host, small: Path) -> None:
    grouped.do("group(small, flags=WEIGHT)\ngroup(small)\nbuild(small)\nfirst = lib.model\nbuild(small)", small=small)
    assert (host.copies_of_weights(), len(workspaces(host))) == (1, 1)


def test_two_files_never_share_weights(grouped: Program, host: Host, small: Path, tmp_path: Path) -> None:
    same = tmp_path / "same.mindir"
    same.write_bytes(small.read_bytes())
    grouped.do("group(a, b, flags=BOTH)\nbuild(a)\nfirst = lib.model\nbuild(b)", a=small, b=same)
    assert host.copies_of_weights() == 2


def test_changed_file_affects_all_models_of_its_path(grouped: Program, small: Path, large: Path, x: Any) -> None:
    grouped.do("group(path, flags=WEIGHT)\nbuild(path)\nfirst = lib.model", path=small)
    small.write_bytes(large.read_bytes())
    grouped.do("build(path)\nlib.model = first")
    assert answers(grouped, large, x)


def test_group_silently_disables_process_sharing(grouped: Program, host: Host, small: Path) -> None:
    """model_process.cc:828 looks at the group first."""
    host.fault("build", "crash", who="holder", at="loaded")
    assert grouped.do("group(small)\nbuild(small, pids='1')", small=small) == ""
    assert kinds(host) == ["private weights"]


def test_last_model_frees_memory_except_other_weights(grouped: Program, host: Host, small: Path, large: Path) -> None:
    """See model_infer.cc:140 and acl_mem_manager.cc:223."""
    grouped.do("group(small, large, flags=BOTH)", small=small, large=large)
    grouped.do("build(small)\nfirst = lib.model\nbuild(large)")
    grouped.do("first = None")
    assert (workspaces(host), host.copies_of_weights()) == ([30], 2)
    grouped.do("lib.model = None")
    assert (workspaces(host), host.copies_of_weights()) == ([], 1)
    grouped.kill()
    assert host.card_state().used == 0


# --- graph engine -----------------------------------------------------------------------------------------------

GE = """
def pair(first, second, options=({}, {}), order='add'):
    g, a, b = ms.ModelGroup(ms.ModelGroupFlag.SHARE_WEIGHT), ms.Model(), ms.Model()
    if order == 'add':
        g.add_model([a, b])
    for model, path, section in zip((a, b), (first, second), options):
        where = context(provider='ge')
        model.build_from_file(str(path), ms.ModelType.MINDIR, where, config_dict={'ge_session_options': section})
    if order != 'add':
        g.add_model([a, b])
    answers = []
    for lib.model in (a, b):
        answers.append(predict(x))
    lib.models = a, b
    return answers
EXTERNAL = {'ge.externalWeight': '1'}
"""


@pytest.fixture
def graphs(tmp_path: Path) -> List[Path]:
    """Return exported models: for single rows and for any number with equal parameters, and a third with other
    parameters of the same names."""
    path = tmp_path
    return [
        models.mlp(path / "one.mindir", batch=1, exported=True, size_mib=64),
        models.mlp(path / "any.mindir", exported=True, size_mib=64),
        models.mlp(path / "other.mindir", seed=3, exported=True, size_mib=64),
    ]


def weight_mib(host: Host) -> int:
    return sum(each.bytes for each in host.card_state().allocations if each.kind == driver_state.PRIVATE_WEIGHTS) // MIB


@pytest.mark.parametrize(
    ("call", "mib"),
    [
        ("pair(a, b, (EXTERNAL, EXTERNAL))", 64),
        ("pair(a, b)", 128),  # Without the option, constants are not shared.
        ("pair(a, b, (EXTERNAL, EXTERNAL), order='late')", 128),
    ],
)
def test_graphs_share_parameters_by_name(
    program: Program, host: Host, graphs: List[Path], x: Any, call: str, mib: int
) -> None:
    """See ge_graph_executor.cc:705, :889."""
    values: Any = {"a": graphs[0], "b": graphs[1], "x": x}
    assert all(np.array_equal(each, models.answer(graphs[0], x)) for each in program.do(f"{GE}\n{call}", **values))
    assert weight_mib(host) == mib
    program.do("lib.models = lib.model = None")
    assert host.card_state().used == 0


def test_first_loaded_graph_determines_values(program: Program, graphs: List[Path], x: Any) -> None:
    call = "pair(a, b, (EXTERNAL, EXTERNAL))"
    first, second = program.do(f"{GE}\n{call}", a=graphs[0], b=graphs[2], x=x)
    assert np.array_equal(first, second)
    assert not np.array_equal(second, models.answer(graphs[2], x))


def test_parameter_of_another_size_is_an_error(program: Program, graphs: List[Path], tmp_path: Path, x: Any) -> None:
    wide = models.mlp(tmp_path / "wide.mindir", width=32, exported=True)
    fitting = GE.replace("predict(x)", "predict(x[:, :lib.model.get_inputs()[0].shape[1]])")
    call = f"{fitting}\npair(a, b, (EXTERNAL, EXTERNAL))"
    assert program.refusal(call, a=graphs[0], b=wide, x=x).text == "predict failed!"
    assert "w0 is there with another size" in program.errors()[-2]


def test_group_needs_equal_session_options(program: Program, graphs: List[Path], x: Any) -> None:
    """See ge_graph_executor.cc:2001."""
    error = program.refusal(f"{GE}\npair(a, b, (EXTERNAL, {{}}))", a=graphs[0], b=graphs[1], x=x)
    assert error.kind == "RuntimeError"
    assert "session options" in program.errors()[-1]


def test_crash_during_calculation(grouped: Program, host: Host, small: Path, start: Start) -> None:
    host.fault("build", "crash", who="group")
    start().do("build(small)", small=small)
    with pytest.raises(Died):
        grouped.do("group(small)", small=small)
