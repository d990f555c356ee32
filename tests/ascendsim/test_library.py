"""The Python API of 2.7.0: its types, its failures without a reason, and what it ignores without a word."""

from __future__ import annotations

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any, Callable, List

import numpy as np
import pytest

from ascendsim import Host, environment, ledger, models
from ascendsim.program import Program, config

Start = Callable[..., Program]

BUILD = "lib.model = ms.Model()\nlib.model.build_from_file(path, ms.ModelType.MINDIR, context(), config_dict=config)"
BUILD_FAILED = "build_from_file failed! Error is Common error code."
HANDLE = "lib.model.get_model_info('shareable_weight_mem_handle')"


def build(program: Program, path: Path, config: Any) -> Any:
    return program.do(BUILD, path=str(path), config=config)


def kinds(host: Host) -> List[str]:
    return [each.kind for each in host.ledger().allocations]


# --- Logs and versions ------------------------------------------------------------------------------------------


def test_a_process_finds_it_by_its_environment(host: Host, path: Path) -> None:
    code = "import mindspore_lite as ms; print(ms.__version__, ms.Model(), ms.Context())"
    command = [sys.executable, "-c", code]
    done = subprocess.run(command, env={**os.environ, **environment(host)}, stdout=subprocess.PIPE, check=True)
    assert done.stdout.decode() == "2.7.0 model_path: . target: ['cpu'].\n"


def test_what_was_on_the_python_path_stays_there(host: Host, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/somewhere")
    parts = environment(host)["PYTHONPATH"].split(os.pathsep)
    assert (Path(parts[0]) / "mindspore_lite").is_dir()
    assert parts[-1] == "/somewhere"


def test_the_log_is_what_the_engine_reads(start: Start, path: Path) -> None:
    module: Any = importlib.import_module("weightd.worker.engines.mindspore_lite.model")
    pattern: Any = module._GLOG_ERROR
    program = start()
    program.refusal("build(path, pids='x')", path=path)
    lines = [line for line in program.log().splitlines() if line.startswith("[ERROR]")]
    assert re.match(
        r"\[ERROR\] ME\(\d+,\w+,python\):\d{4}-\d\d-\d\d-\d\d:\d\d:\d\d\.\d{3}\.\d{3} \[mindspore-lite/", lines[0]
    )
    assert [pattern.match(line).group("text") for line in lines] == program.errors()


def test_the_log_may_be_silent(host: Host, tmp_path: Path) -> None:
    code = "import mindspore_lite as ms; ms.Model().get_model_info('x'); ms.Model().resize([], [])"
    for level, lines in (("2", 2), ("3", 1), ("4", 0)):
        variables = {**os.environ, **environment(host), "GLOG_v": level}
        done = subprocess.run([sys.executable, "-c", code], env=variables, stderr=subprocess.PIPE, check=False)
        assert done.stderr.decode().count("ME(") == lines


def test_a_build_gives_the_root_logger_a_handler(start: Start, path: Path) -> None:
    program = start()
    assert program.do("import logging\nlen(logging.root.handlers)") == 0
    program.do("build(path)", path=path)
    assert program.do("len(logging.root.handlers)") == 1
    assert "Ascend custom operator path not found" in program.log()


# --- Types ------------------------------------------------------------------------------------------------------


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
        ("ms.Context().gpu.rank_id = 1", "AttributeError"),
        ("ms.Context().ascend.device_id = '0'", "TypeError"),
        ("ms.Context().ascend.device_id = -1", "ValueError"),
        ("ms.Context().ascend.precision_mode = 'preferred_fp16'", "ValueError"),
        ("ms.Context().ascend.provider = None", "TypeError"),
        ("ms.Context().ascend.rank_id = -1", "ValueError"),
        ("ms.Context().parallel.workers_num = -1", "ValueError"),
        ("ms.Context().parallel.config_info = {'a': 1}", "TypeError"),
        ("ms.Context().parallel.config_path = '/nowhere'", "ValueError"),
        ("ms.Context().parallel.device_ids = [-1]", "ValueError"),
        ("ms.Context().group_info_file = 1", "TypeError"),
        ("ms.Model().build_from_file(b'm', ms.ModelType.MINDIR)", "TypeError"),
        ("ms.Model().build_from_file('m', 0)", "TypeError"),
        ("ms.Model().build_from_file('m', ms.ModelType.MINDIR, {})", "TypeError"),
        ("ms.Model().build_from_file('m', ms.ModelType.MINDIR, None, 1)", "TypeError"),
        ("ms.Model().build_from_file('/nowhere', ms.ModelType.MINDIR)", "RuntimeError"),
        ("ms.Model().get_model_info(1)", "TypeError"),
        ("ms.Model().predict('x')", "TypeError"),
        ("ms.Model().predict([1])", "RuntimeError"),
        ("ms.Model().predict([])", "RuntimeError"),
        ("ms.Model().resize([], ())", "TypeError"),
        ("ms.Model().resize([], [(1,)])", "TypeError"),
        ("ms.Model().resize([], [[1.0]])", "TypeError"),
        ("ms.Model().resize([], [[1]])", "ValueError"),
        ("ms.Model().update_weights({})", "TypeError"),
        ("ms.Model().update_weights([{}])", "TypeError"),
        ("ms.Model().update_weights([[1]])", "TypeError"),
        ("ms.Tensor(1)", "TypeError"),
        ("ms.Tensor().name = 1", "TypeError"),
        ("ms.Tensor().shape = 1", "TypeError"),
        ("ms.Tensor().dtype = 'float32'", "TypeError"),
        ("ms.ModelGroup(1)", "TypeError"),
        ("ms.ModelGroup().add_model([ms.Model()])", "RuntimeError"),
    ],
)
def test_the_wrong_type_or_value(any_program: Program, code: str, kind: str) -> None:
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
        "ms.DataType.FLOAT32.value == 43 and ms.Format.NCHW.value == 0 and ms.ModelType.MINDIR_LITE.value == 4",
        "ms.ModelGroupFlag.SHARE_WEIGHT_WORKSPACE.value == 3",
        "ms.Model().get_inputs() == [] and ms.Model().get_outputs() == []",
        "ms.Tensor(np.ones((2, 3), np.int32)).dtype is ms.DataType.INT32",
    ],
)
def test_what_is_taken(any_program: Program, code: str) -> None:
    assert any_program.do(code) is True


@pytest.fixture(scope="module")
def any_program(nursery: Any, tmp_path_factory: pytest.TempPathFactory) -> Program:
    program: Program = nursery.start(Host(tmp_path_factory.mktemp("any") / "host"))
    return program


# --- config_dict ------------------------------------------------------------------------------------------------


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
def test_every_level_is_checked(any_program: Program, path: Path, wrong: Any) -> None:
    assert any_program.refusal(BUILD, path=str(path), config=wrong).kind == "TypeError"


def test_unknown_names_are_ignored(start: Start, host: Host, path: Path) -> None:
    program = start()
    # The names of the release notes.
    build(program, path, {**config(pids="1", shared_mem_handle="2"), "other": {"a": "b"}})
    assert program.do(HANDLE) == ""
    assert "private weights" in kinds(host)


@pytest.mark.parametrize("target", ["cpu", "ascend"])
def test_both_keys_are_refused_even_on_the_cpu(start: Start, path: Path, target: str) -> None:
    program = start()
    error = program.refusal("build(path, pids='1', handle='2', target=target)", path=path, target=target)
    assert error.text == BUILD_FAILED
    assert program.errors() == ["You can only set pids or sharable_handle, but not set both of them!"]


def test_an_empty_value_is_none(start: Start, host: Host, path: Path) -> None:
    program = start()
    build(program, path, config(shareable_weight_pid_list="", shareable_weight_mem_handle=""))
    assert program.do(HANDLE) == ""
    assert "private weights" in kinds(host)


@pytest.mark.parametrize("pids", ["1", "1,2", "1, 2", "1,2,", "007", "2147483647"])
def test_lists_of_pids_that_are_taken(start: Start, path: Path, pids: str) -> None:
    assert start().do("build(path, pids=pids)", path=path, pids=pids) != ""


@pytest.mark.parametrize("pids", [" 1", "1 ,2", ",", "-1", "1;2", "1,,2", "x", "2147483648", "1\n"])
def test_lists_of_pids_that_are_refused_and_leak(start: Start, host: Host, path: Path, pids: str) -> None:
    assert start().refusal("build(path, pids=pids)", path=path, pids=pids).text == BUILD_FAILED
    assert "weights" in kinds(host)


def test_pid_0_is_skipped_but_not_alone(start: Start, host: Host, path: Path) -> None:
    start().do("build(path, pids='0,5')", path=path)
    (weights,) = [each for each in host.ledger().allocations if each.kind == ledger.WEIGHTS]
    assert weights.whitelist == (5,)
    program = start()
    assert program.refusal("build(path, pids='0')", path=path).text == BUILD_FAILED
    assert program.errors()[0].startswith("Set pid to shareable_handle failed! ret:")


@pytest.mark.parametrize("handle", ["0", "0x55", "00", " +0"])
def test_a_handle_of_0_is_a_private_load(start: Start, host: Host, path: Path, handle: str) -> None:
    start().do("build(path, handle=handle)", path=path, handle=handle)
    assert "private weights" in kinds(host)


@pytest.mark.parametrize("handle", ["abc", "-", "99999999999999999999"])
def test_a_handle_that_is_no_number(start: Start, path: Path, handle: str) -> None:
    program = start()
    assert program.refusal("build(path, handle=handle)", path=path, handle=handle).text == BUILD_FAILED
    assert "stoull" in program.errors()[-1]


@pytest.mark.parametrize("handle", ["12abc", "-1", " 12"])
def test_a_handle_that_is_another_number(start: Start, path: Path, handle: str) -> None:
    program = start()
    assert program.refusal("build(path, handle=handle)", path=path, handle=handle).text == BUILD_FAILED
    assert program.errors()[0].startswith("acl rt mem import from shareable handle failed!")


def test_what_follows_the_number_is_ignored(start: Start, path: Path) -> None:
    holder, worker = start(), start()
    handle = holder.do("build(path, pids=pids)", path=path, pids=str(worker.do("pid()")))
    worker.do("build(path, handle=handle)", path=path, handle=handle + "abc")


def test_there_are_limits(any_program: Program, path: Path) -> None:
    for wrong in ({str(i): {"a": "b"} for i in range(101)}, {"s": {str(i): "v" for i in range(1001)}}):
        error = any_program.refusal(BUILD, path=str(path), config=wrong)
        assert error.text == "update configuration failed! Error is Common error code.."
    for right in ({str(i): {"a": "b"} for i in range(100)}, {"s": {str(i): "v" for i in range(1000)}}):
        build(any_program, path, right)


def test_a_config_file_says_the_same_and_the_dict_wins(start: Start, host: Host, path: Path, tmp_path: Path) -> None:
    file = tmp_path / "config.ini"
    file.write_text("garbage\n[ascend_context]\nshareable_weight_pid_list=41\n", encoding="ascii")
    build = "build(path, options={'config_path': file}, pids=pids)"
    start().do(build, path=path, file=str(file), pids="")
    assert {pid for each in host.ledger().allocations for pid in each.whitelist} == {41}
    start().do(build, path=path, file=str(file), pids="42")
    assert {pid for each in host.ledger().allocations for pid in each.whitelist} == {41, 42}
    error = start().refusal(build, path=path, file="/nowhere", pids="")
    assert error.text == "build_from_file failed, config_path does not exist!"


# --- Where there is no handle -----------------------------------------------------------------------------------


def test_off_ascend_there_is_no_pid(start: Start, host: Host, path: Path) -> None:
    host.switch(ascend=False)
    program = start()
    assert program.do("ms.Model().get_model_info('current_pid')") == ""
    assert program.refusal("build(path)", path=path).text == BUILD_FAILED
    program.do("build(path, target='cpu')", path=path)


def test_other_model_info(start: Start, path: Path) -> None:
    program = start()
    assert program.do(f"lib.model = ms.Model()\n{HANDLE}") == ""
    assert (
        program.do("[lib.model.get_model_info(k) for k in ('user_info', 'input_shape', 'dynamic_dims', 'x')]")
        == [""] * 4
    )
    assert program.log().count("[WARNING]") == 1


@pytest.mark.parametrize("where", [{"target": "cpu"}, {"provider": "ge"}])
def test_elsewhere_the_keys_are_ignored(start: Start, host: Host, path: Path, where: Any) -> None:
    program = start()
    assert program.do("build(path, pids='1', **where)", path=path, where=where) == ""
    assert "weights" not in kinds(host)
    assert host.copies_of_weights() == ("provider" in where)


def test_only_the_first_target_decides(start: Start, host: Host, path: Path) -> None:
    program = start()
    program.do("c = ms.Context()\nc.target = ['cpu', 'ascend']\nm = ms.Model()")
    program.do("m.build_from_file(path, ms.ModelType.MINDIR, c)", path=str(path))
    assert host.ledger().used == 0
    assert program.refusal("build(path, target='gpu')", path=path).text == BUILD_FAILED


def test_a_bundle_model_is_loaded_privately(start: Start, host: Host, tmp_path: Path) -> None:
    program = start()
    assert program.do("build(path, pids='1')", path=models.mlp(tmp_path / "b.mindir", bundle=True)) == ""
    assert "private weights" in kinds(host)


def test_a_model_group_switches_sharing_off(start: Start, host: Host, path: Path, tmp_path: Path) -> None:
    program = start()
    program.do("g = ms.ModelGroup()\ng.add_model([path])", path=str(path))
    program.do("g.cal_max_size_of_workspace(ms.ModelType.MINDIR, context())")
    assert program.do("build(path, pids='1')", path=path) == ""
    assert kinds(host) == ["context", "private weights", "workspace"]
    program.do("g.add_model([path])", path=str(models.mlp(tmp_path / "b.mindir", bundle=True)))
    assert program.refusal("build(path)", path=tmp_path / "b.mindir").text == BUILD_FAILED
    assert program.errors() == ["Update weight model don't support mem share!"]


def test_an_encrypted_model_can_attach_but_not_hold(
    start: Start, host: Host, path: Path, tmp_path: Path, x: Any
) -> None:
    locked = models.mlp(tmp_path / "locked.mindir", key=b"0123456789abcdef")
    key = {"dec_key": b"0123456789abcdef"}
    holder, worker = start(), start()
    pids = str(worker.do("pid()"))
    assert holder.do("build(path, pids=pids, options=key)", path=locked, pids=pids, key=key) == ""
    assert "weights" in kinds(host)
    handle = holder.do("build(path, pids=pids)", path=path, pids=pids)
    worker.do("build(path, handle=handle, options=key)", path=locked, handle=handle, key=key)
    assert np.array_equal(worker.do("predict(x)", x=x), models.answer(path, x))
    stranger = start()
    for wrong, kind in (("abc", "ValueError"), ("99999999999999999999", "IndexError")):
        refusal = stranger.refusal("build(path, handle=handle, options=key)", path=locked, handle=wrong, key=key)
        assert (refusal.kind, refusal.text) == (kind, "stoull")


@pytest.mark.parametrize(
    ("options", "kind"),
    [
        ({"dec_key": "text"}, "TypeError"),
        ({"dec_key": b"wrong"}, "RuntimeError"),
        ({"dec_key": b"0123456789abcdef", "dec_mode": ""}, "ValueError"),
        ({"dec_key": b"0123456789abcdef", "dec_mode": "ROT13"}, "RuntimeError"),
        ({"dec_key": b""}, "RuntimeError"),  # a plain load of a file that is not plain
    ],
)
def test_decryption_that_fails(start: Start, tmp_path: Path, options: Any, kind: str) -> None:
    locked = models.mlp(tmp_path / "locked.mindir", key=b"0123456789abcdef")
    assert start().refusal("build(path, options=options)", path=locked, options=options).kind == kind


def test_ascend_takes_only_what_was_converted_for_it(start: Start, tmp_path: Path) -> None:
    program = start()
    assert program.refusal("build(path)", path=models.mlp(tmp_path / "m.mindir", om=False)).text == BUILD_FAILED
    code = "ms.Model().build_from_file(path, ms.ModelType.MINDIR_LITE, context())"
    assert program.refusal(code, path=str(models.mlp(tmp_path / "n.mindir"))).text == BUILD_FAILED
