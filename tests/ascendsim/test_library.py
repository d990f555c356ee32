"""Tests of the simulated Python API of 2.7.0: its types, its failures without a reason, and the arguments that it
ignores."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from ascendsim import Host, environment, modelfile, models
from ascendsim.program import Program

from .support import ATTACH, Start, answers, errors_of, kinds, share

CONFIGURED = "lib.model = ms.Model()\nlib.model.build_from_file(str(path), ms.ModelType.MINDIR, context(), '', config)"
HANDLE = "lib.model.get_model_info('shareable_weight_mem_handle')"
KEY = b"0123456789abcdef"


@pytest.fixture(scope="module")
def any_program(nursery: Any, tmp_path_factory: pytest.TempPathFactory) -> Program:
    program: Program = nursery.start(Host(tmp_path_factory.mktemp("any") / "host"))
    return program


# --- processes and logs -----------------------------------------------------------------------------------------


def test_environment_selects_simulator(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    command = [
        sys.executable,
        "-c",
        "import sys, mindspore_lite as ms; print(ms.__version__, '/somewhere' in sys.path)",
    ]
    done = subprocess.run(command, env={**os.environ, **environment(host)}, stdout=subprocess.PIPE, check=True)
    assert done.stdout.decode() == "2.7.0 True\n"


def test_build_adds_handler_to_root_logger(program: Program) -> None:
    assert program.do("import logging\nlen(logging.root.handlers)") == 0
    program.do("build(path)")
    assert program.do("len(logging.root.handlers)") == 1
    assert "Ascend custom operator path not found" in program.log()


# --- types ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("code", "kind"),
    [
        ("ms.Context().target = 'ascend'", "TypeError"),
        ("ms.Context().target = ['npu']", "ValueError"),
        ("ms.Context().target = [1]", "TypeError"),
        ("ms.Context().cpu.thread_num = -1", "ValueError"),
        ("ms.Context().cpu.thread_num = '1'", "TypeError"),
        ("ms.Context().cpu.precision_mode = 'fp8'", "ValueError"),
        ("ms.Context().cpu.thread_affinity_core_list = 1", "TypeError"),
        ("ms.Context().cpu.thread_affinity_core_list = ['1']", "TypeError"),
        ("ms.Context().ascend.device_id = '0'", "TypeError"),
        ("ms.Context().ascend.device_id = -1", "ValueError"),
        ("ms.Context().ascend.precision_mode = 'preferred_fp16'", "ValueError"),
        ("ms.Context().ascend.provider = None", "TypeError"),
        ("ms.Context().ascend.rank_id = -1", "ValueError"),
        ("ms.Context().gpu.rank_id = 1", "AttributeError"),
        ("ms.Context().gpu.group_size = 2", "AttributeError"),
        ("ms.Model().build_from_file(b'm', ms.ModelType.MINDIR)", "TypeError"),
        ("ms.Model().build_from_file('m', 0)", "TypeError"),
        ("ms.Model().build_from_file('m', ms.ModelType.MINDIR, {})", "TypeError"),
        ("ms.Model().build_from_file('m', ms.ModelType.MINDIR, None, 1)", "TypeError"),
        ("ms.Model().build_from_file('/nowhere', ms.ModelType.MINDIR)", "RuntimeError"),
        ("ms.Model().get_model_info(1)", "TypeError"),
        ("ms.Model().predict('x')", "TypeError"),
        ("ms.Model().predict([1])", "TypeError"),
        ("ms.Model().predict([ms.Tensor(np.ones(3))])", "RuntimeError"),
        ("ms.Model().predict([])", "RuntimeError"),
        ("ms.Model().resize([], ())", "TypeError"),
        ("ms.Model().resize([], [(1,)])", "TypeError"),
        ("ms.Model().resize([], [[1.0]])", "TypeError"),
        ("ms.Model().resize([], [[1]])", "ValueError"),
        ("ms.Model().update_weights({})", "TypeError"),
        ("ms.Model().update_weights([{}])", "TypeError"),
        ("ms.Model().update_weights([[1]])", "TypeError"),
        ("ms.Tensor(1)", "TypeError"),
        ("ms.Tensor(np.ones(1, complex))", "TypeError"),
        ("ms.Tensor(np.ones(1)).name = 1", "TypeError"),
    ],
)
def test_rejects_wrong_types_and_values(any_program: Program, code: str, kind: str) -> None:
    assert any_program.refusal(code).kind == kind


@pytest.mark.parametrize(
    "code",
    [
        "c = ms.Context()\nc.target = []\nc.target == ['cpu']",
        "c = ms.Context()\nc.target = ['Ascend']\nc.target == ['Ascend']",
        "c = ms.Context()\nc.cpu.thread_affinity_mode = -1\nc.cpu.thread_affinity_mode == -1",
        "c = ms.Context()\nc.cpu.thread_num = True\nc.cpu.thread_num == 1",
        "c = ms.Context()\nc.ascend.devise_id = 1\nc.ascend.device_id == 0",
        "c = ms.Context()\nc.ascend.provider = 'what'\nc.ascend.provider == 'what'",
        "c = ms.Context()\n(c.gpu.rank_id, c.gpu.group_size, c.gpu.device_id) == (0, 1, 0)",
        "ms.Model().get_inputs() == [] and ms.Model().get_outputs() == []",
        "ms.Tensor(np.ones((2, 3), np.int32)).dtype is ms.DataType.INT32",
    ],
)
def test_accepts_valid_arguments(any_program: Program, code: str) -> None:
    assert any_program.do(code) is True


# --- pids and handles -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "wrong",
    [
        [1],
        {1: {}},
        {"ascend_context": 1},
        {"ascend_context": {1: "1"}},
        {"ascend_context": {"shareable_weight_pid_list": 1}},
        {"ascend_context": {"shareable_weight_mem_handle": 5}},
    ],
)
def test_checks_every_level_of_configuration(any_program: Program, path: Path, wrong: Any) -> None:
    assert any_program.refusal(CONFIGURED, path=path, config=wrong).kind == "TypeError"


@pytest.mark.parametrize(
    "config",
    [
        # This is the spelling in the release notes.
        {"ascend_context": {"pids": "1", "shared_mem_handle": "2"}, "other": {"a": "b"}},
        {"ascend_context": {"shareable_weight_pid_list": "", "shareable_weight_mem_handle": ""}},
        *({"ascend_context": {"shareable_weight_mem_handle": handle}} for handle in ("0", "0x55", "00", " +0")),
    ],
)
def test_configurations_that_silently_load_privately(program: Program, host: Host, config: Any) -> None:
    program.do(CONFIGURED, config=config)
    assert (program.do(HANDLE), kinds(host)) == ("", ["private weights"])


@pytest.mark.parametrize("target", ["cpu", "ascend"])
def test_rejects_pids_with_handle_even_on_cpu(program: Program, target: str) -> None:
    errors = errors_of(program, "build(path, pids='1', handle='2', target=target)", target=target)
    assert errors == ["You can only set pids or sharable_handle, but not set both of them!"]


@pytest.mark.parametrize(
    ("pids", "listed"),
    [
        ("1", [1]),
        ("1,2", [1, 2]),
        ("1, 2", [1, 2]),
        ("1,2,", [1, 2]),
        ("007", [7]),
        ("2147483647", [2**31 - 1]),
        ("0,5", [5]),
    ],
)
def test_accepts_pid_lists(program: Program, host: Host, pids: str, listed: Any) -> None:
    assert program.do("build(path, pids=pids)", pids=pids) != ""
    assert host.card_state().weights.whitelist == listed


@pytest.mark.parametrize("pids", [" 1", "1 ,2", ",", "-1", "1;2", "1,,2", "x", "2147483648", "1\n", "0"])
def test_rejected_pid_lists_leak_memory(program: Program, host: Host, pids: str) -> None:
    errors_of(program, "build(path, pids=pids)", pids=pids)
    assert kinds(host) == ["weights"]


@pytest.mark.parametrize(
    ("handle", "error"),
    [
        *((each, "Catch exception: stoull") for each in ("abc", "-", "99999999999999999999")),
        *((each, "acl rt mem import from shareable handle failed!") for each in ("12abc", "-1", " 12")),
    ],
)
def test_rejects_invalid_and_unknown_handles(program: Program, handle: str, error: str) -> None:
    assert errors_of(program, ATTACH, handle=handle)[0].startswith(error)


def test_ignores_text_behind_handle(start: Start) -> None:
    _, (worker,), handle = share(start, attached=0)
    worker.do(ATTACH, handle=handle + "abc")


def test_dict_takes_precedence_over_config_file(start: Start, host: Host, tmp_path: Path) -> None:
    file = tmp_path / "config.ini"
    file.write_text("garbage\n[ascend_context]\nshareable_weight_pid_list=41\n", encoding="ascii")
    for card, (pids, listed) in enumerate((("", [41]), ("42", [42]))):
        build = "build(path, options={'config_path': file}, pids=pids, device=card)"
        start().do(build, file=str(file), pids=pids, card=card)
        assert host.card_state(card).weights.whitelist == listed
    error = start().refusal("build(path, options={'config_path': '/nowhere'})")
    assert error.text == "build_from_file failed, config_path does not exist!"


# --- models without a handle ------------------------------------------------------------------------------------


def test_unknown_model_info_is_empty(program: Program) -> None:
    keys = ("user_info", "input_shape", "dynamic_dims", "shareable_weight_mem_handle", "x")
    assert program.do("m = ms.Model()\n[m.get_model_info(key) for key in keys]", keys=keys) == [""] * 5
    assert program.log().count("[WARNING]") == 1


def test_first_target_decides(program: Program, host: Host) -> None:
    program.do("c = ms.Context()\nc.target = ['cpu', 'ascend']\nm = ms.Model()")
    program.do("m.build_from_file(str(path), ms.ModelType.MINDIR, c)")
    assert host.card_state().used == 0
    errors_of(program, "build(path, target='gpu')")
    errors_of(program, "ms.Model().build_from_file(str(path), ms.ModelType.MINDIR_LITE, context())")


def test_encrypted_model_can_attach_but_not_export(
    start: Start, host: Host, path: Path, tmp_path: Path, x: Any
) -> None:
    locked = {"path": models.mlp(tmp_path / "locked.mindir", key=KEY), "key": {"dec_key": KEY}}
    assert start().do("build(path, pids='1', options=key, device=1)", **locked) == ""
    assert kinds(host, 1) == ["weights"]
    _, (worker,), handle = share(start, attached=0)
    worker.do("build(path, handle=handle, options=key)", **locked, handle=handle)
    assert answers(worker, path, x)
    for wrong, kind in (("abc", "ValueError"), ("99999999999999999999", "IndexError")):
        assert start().refusal("build(path, handle=handle, options=key)", **locked, handle=wrong).kind == kind


# --- model files ------------------------------------------------------------------------------------------------


def test_models_are_reproducible_matrix_products(tmp_path: Path, x: Any) -> None:
    path, again, other = (models.mlp(tmp_path / f"{i}.mindir", layers=1, seed=seed) for i, seed in enumerate((5, 5, 6)))
    assert path.read_bytes() == again.read_bytes() != other.read_bytes()
    weights = np.frombuffer(modelfile.read(path).weights, np.float32).reshape(64, 64)
    np.testing.assert_allclose(models.answer(path, x), np.maximum(x @ weights, 0), rtol=1e-4, atol=1e-5)


def test_rejects_damaged_file(program: Program, path: Path) -> None:
    data = path.read_bytes()
    for damaged in (b"", data[:-1], data + b"x", data[: len(data) // 2], b"text"):
        path.write_bytes(damaged)
        assert errors_of(program)[-1].startswith("Load model failed")
