"""A child with an Ascend card, as the daemon starts it: real processes on a simulated card."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Callable, Dict, Generator, Tuple

import numpy as np
import pytest

from ascendsim import Host, environment, models
from ascendsim.program import Nursery
from weightd.protocol.messages.children import (
    Allow,
    Allowed,
    Attach,
    Attached,
    Broken,
    Build,
    Built,
    Cases,
    DeviceMemory,
    Failed,
    Hello,
    Result,
    Traits,
)
from weightd.protocol.messages.data import TensorSignature
from weightd.worker import exits
from weightd.worker.engines.mindspore_lite.acl import Acl, AclError
from weightd.worker.engines.mindspore_lite.gears import recorded

if TYPE_CHECKING:
    from tests.worker.conftest import Daemon

MIB = 1 << 20
FIXED = Traits(pids_fixed_at_build=True, holder_must_outlive=True, attach_rewrites_weights=True)
FREE = Traits(pids_fixed_at_build=False, holder_must_outlive=False, attach_rewrites_weights=False)
KEY = b"0123456789abcdef"

Start = Callable[..., Hello]


@pytest.fixture(scope="session")
def nursery() -> Generator[Nursery, None, None]:
    """Forks processes that have imported what a child imports: that is most of a child's time."""
    with Nursery("weightd.worker.__main__", "weightd.worker.probe") as nursery:
        yield nursery


@pytest.fixture
def daemon(daemon: Daemon, nursery: Nursery) -> Daemon:
    """The daemon's end, whose children are forked."""
    daemon.popen, daemon.parent = nursery.popen, nursery.pid
    return daemon


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """A machine with two cards."""
    return Host(tmp_path / "host", cards=2)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    """A model with a free batch."""
    return models.mlp(tmp_path / "mlp.mindir")


@pytest.fixture
def start(daemon: Daemon, host: Host, path: Path) -> Start:
    """Start a child on card 0 and wait for its HELLO."""

    def start(name: str, *more: str, model: Path = path, device: str = "ascend:0", **variables: str) -> Hello:
        begin(daemon, host, name, *more, model=model, device=device, **variables)
        return daemon.hear(name, Hello)[0]

    return start


def begin(
    daemon: Daemon, host: Host, name: str, *more: str, model: Path, device: str = "ascend:0", **variables: str
) -> None:
    everything = {**environment(host), **variables}
    daemon.start(name, model, *more, engine="mindspore_lite", device=device, variables=everything)


def options(**values: Any) -> Tuple[str, str]:
    return "--options", json.dumps(values)


def build(daemon: Daemon, *pids: str) -> Built:
    daemon.tell("h", Build(pids))
    return daemon.hear("h", Built)[0]


def attach(daemon: Daemon, name: str, built: Built) -> Attached:
    daemon.tell(name, Attach(built.handle, built.canary_cases))
    return daemon.hear(name, Attached)[0]


def refused(daemon: Daemon, name: str, order: object, status: int = exits.CANNOT_BUILD) -> str:
    """Why the child cannot obey; it must leave then."""
    daemon.tell(name, order)
    broken, _ = daemon.hear(name, Broken)
    assert daemon.stop(name) == status
    return broken.cause


ONE: Cases = ({"x": (1, 64)},)


def rows(count: int, width: int = 64) -> Any:
    return np.random.RandomState(count).standard_normal((count, width)).astype(np.float32)


# --- the whole life -------------------------------------------------------------------------------------------


def test_a_holder_and_its_workers_run_on_one_copy(daemon: Daemon, host: Host, start: Start, path: Path) -> None:
    hellos = {name: start(name) for name in ("h", "w1", "w2")}
    for name, hello in hellos.items():
        # As in a container, where the driver's number is another one.
        assert hello.pid == str(daemon.children[name].pid + 100_000)
        assert hello.traits == FIXED
        assert hello.versions["mindspore_lite"] == "2.7.0"
    built = build(daemon, hellos["w1"].pid, hellos["w2"].pid)
    assert int(built.handle) > 2**53
    assert built.canary_cases == ONE
    assert (built.inputs[0].shape, built.outputs[0].shape) == ((-1, 64), (-1, 64))
    assert built.shared_bytes == 2 * MIB
    assert built.note == ""
    for name in ("w1", "w2"):
        attached = attach(daemon, name, built)
        assert attached.canary == built.canary != ""
        assert (attached.shared_bytes, attached.note) == (2 * MIB, "")
    assert host.copies_of_weights(0) == 1
    for size in (1, 5, 2, 2, 64):
        for name in ("w1", "w2"):
            daemon.ask(name, size, x=rows(size))
            assert daemon.answer(name, size).tolist() == models.answer(path, rows(size)).tolist()
    for name in ("w2", "w1", "h"):
        assert daemon.stop(name) == exits.OK
    assert host.ledger(0).allocations == ()


def test_what_is_left_of_the_card_is_told_after_each_build(daemon: Daemon, host: Host, start: Start) -> None:
    start("h", device="ascend:1")
    pid = start("w", device="ascend:1").pid
    built = build(daemon, pid)
    after_build = built.device
    assert after_build is not None
    assert after_build.total_bytes == 32 * 1024 * MIB
    assert after_build.free_bytes < 32 * 1024 * MIB - 200 * MIB
    after_attach = attach(daemon, "w", built).device
    assert after_attach is not None
    assert after_build.free_bytes - 200 * MIB > after_attach.free_bytes > after_build.free_bytes - 300 * MIB
    assert host.ledger(0).allocations == ()
    assert host.copies_of_weights(1) == 1


def test_a_model_without_a_free_dimension_and_one_with_two_inputs(daemon: Daemon, start: Start, tmp_path: Path) -> None:
    fixed = models.mlp(tmp_path / "fixed.mindir", batch=3)
    start("h", model=fixed)
    built = build(daemon, start("w", model=fixed).pid)
    assert (built.inputs[0].shape, built.canary_cases) == ((3, 64), ({"x": (3, 64)},))
    assert attach(daemon, "w", built).canary == built.canary
    daemon.ask("w", 1, x=rows(3))
    assert daemon.answer("w", 1).tolist() == models.answer(fixed, rows(3)).tolist()


def test_the_same_model_has_the_same_canary_on_the_cpu(daemon: Daemon, start: Start) -> None:
    """Of this simulator: no card computes the same bits. It shows that the answers are compared."""
    start("h", device="cpu")
    on_cpu = build(daemon)
    assert on_cpu.canary_cases == ({"x": (1, 64)}, {"x": (2, 64)})
    assert on_cpu.device is None
    start("w")
    daemon.tell("w", Attach("", on_cpu.canary_cases))
    attached, _ = daemon.hear("w", Attached)
    assert attached.canary == on_cpu.canary
    assert (attached.shared_bytes, attached.note) == (0, "weights are not shared: the holder has no handle")


# --- who may attach -------------------------------------------------------------------------------------------


def test_a_process_that_is_not_on_the_list_is_refused_with_the_true_cause(daemon: Daemon, start: Start) -> None:
    start("h")
    listed = start("w1").pid
    start("w2")
    built = build(daemon, listed)
    cause = refused(daemon, "w2", Attach(built.handle, built.canary_cases))
    assert cause.startswith("build_from_file failed! Error is Common error code.: acl rt mem import from shareable ")
    assert attach(daemon, "w1", built).canary == built.canary


def test_a_failed_import_is_never_taken_for_a_success(daemon: Daemon, host: Host, start: Start, path: Path) -> None:
    """The library then runs the model of this process whose id is 0: there must be none, so one build is all."""
    host.switch(first_model_id=0)
    start("h")
    start("w")
    built = build(daemon, "1")
    assert "import from shareable handle failed" in refused(daemon, "w", Attach(built.handle, built.canary_cases))
    start("w2")
    daemon.tell("w2", Attach("", ()))
    daemon.hear("w2", Attached)
    cause = refused(daemon, "w2", Attach(built.handle, built.canary_cases))
    assert cause == "this process has built a model on a card before; only a new process can build another"


def test_a_process_that_came_later_is_let_in(daemon: Daemon, host: Host, start: Start, path: Path) -> None:
    start("h")
    built = build(daemon, start("w1").pid)
    attach(daemon, "w1", built)
    late = [start(name).pid for name in ("w2", "w3")]
    daemon.tell("h", Allow(tuple(late)))
    assert daemon.hear("h", Allowed)[0].error == ""
    for name in ("w2", "w3"):
        assert attach(daemon, name, built).canary == built.canary
        daemon.ask(name, 1, x=rows(2))
        assert daemon.answer(name, 1).tolist() == models.answer(path, rows(2)).tolist()
    assert host.copies_of_weights(0) == 1


NO_LIBRARY = "libascendcl.so: cannot open shared object file: No such file or directory; run set_env.sh of CANN"
NO_CALL = "aclrtMemSetPidToShareableHandle: this version of CANN has no such call; install a later one"
REFUSES = "aclrtMemSetPidToShareableHandle returned 207000: this card, driver or virtual instance does not support it"


@pytest.mark.parametrize(
    ("switch", "error"),
    [
        ({"libascendcl": False}, f"{NO_LIBRARY} in this environment"),
        ({"acl_set_pid": "missing"}, NO_CALL),
        ({"acl_set_pid": "unsupported"}, REFUSES),
    ],
)
def test_where_nobody_can_be_let_in_the_reason_is_told_and_the_holder_goes_on(
    daemon: Daemon, host: Host, start: Start, switch: Dict[str, Any], error: str
) -> None:
    start("h")
    built = build(daemon, start("w").pid)
    host.switch(**switch)
    daemon.tell("h", Allow(("123",)))
    assert daemon.hear("h", Allowed)[0].error == error
    assert attach(daemon, "w", built).canary == built.canary
    assert daemon.stop("h") == exits.OK


@pytest.mark.parametrize("pid", ["0", "-1", "12abc", " 1", "2147483648", "1,2"])
def test_a_pid_that_is_none_reaches_neither_the_library_nor_the_driver(
    daemon: Daemon, host: Host, start: Start, pid: str
) -> None:
    expected = f"pid: expected a decimal number from 1 to 2147483647, got '{pid}'"
    start("h")
    build(daemon, "1")
    daemon.tell("h", Allow((pid,)))
    assert daemon.hear("h", Allowed)[0].error == expected
    start("h2")
    assert refused(daemon, "h2", Build(("1", pid))) == expected
    assert host.count("build") == 1


def test_who_has_exported_nothing_lets_nobody_in(daemon: Daemon, start: Start) -> None:
    start("h")
    daemon.tell("h", Allow(("1",)))
    assert daemon.hear("h", Allowed)[0].error == "this process has exported no weights"


@pytest.mark.parametrize("handle", ["0", "-1", "12abc", "0x10", " 7", "1.5", "18446744073709551616", "/s/store"])
def test_a_handle_that_is_none_never_reaches_the_library(daemon: Daemon, host: Host, start: Start, handle: str) -> None:
    """It would take 0 and 0x10 for no handle, 12abc for 12 and -1 for the largest."""
    start("w")
    expected = f"handle: expected a decimal number from 1 to 18446744073709551615, got '{handle}'"
    assert refused(daemon, "w", Attach(handle, ONE)) == expected
    assert host.count("build") == 0


# --- nothing wrong is served ----------------------------------------------------------------------------------


def test_another_model_of_the_same_size_is_seen_and_so_is_what_it_does(
    daemon: Daemon, start: Start, path: Path, tmp_path: Path
) -> None:
    other = models.mlp(tmp_path / "other.mindir", seed=1)
    hellos = {"h": start("h"), "good": start("good"), "bad": start("bad", model=other)}
    assert hellos["bad"].sha256 != hellos["good"].sha256 == hellos["h"].sha256
    built = build(daemon, hellos["good"].pid, hellos["bad"].pid)
    assert attach(daemon, "good", built).canary == built.canary
    assert attach(daemon, "bad", built).canary != built.canary
    # The trap is real: the weights of all are other ones now.
    daemon.ask("good", 1, x=rows(1))
    assert daemon.answer("good", 1).tolist() == models.answer(other, rows(1)).tolist()


def test_flipped_bytes_in_a_workers_file_are_seen(daemon: Daemon, start: Start, path: Path, tmp_path: Path) -> None:
    content = bytearray(path.read_bytes())
    for i in range(2, 64 * 4, 4):
        content[-i] ^= 0x40  # one weight alone may only change what relu hides
    flipped = tmp_path / "flipped.mindir"
    flipped.write_bytes(content)
    start("h")
    built = build(daemon, start("w", model=flipped).pid)
    assert attach(daemon, "w", built).canary != built.canary


def test_a_worker_that_computes_wrong_is_seen(daemon: Daemon, host: Host, start: Start) -> None:
    start("h")
    built = build(daemon, start("w").pid)
    host.fault("predict", "garbage", "importer")
    assert attach(daemon, "w", built).canary != built.canary


def test_a_holder_whose_canary_fails_leaves_the_next_try_to_another_and_the_last_shares_without_one(
    daemon: Daemon, host: Host, start: Start, path: Path
) -> None:
    """Building again would take the memory twice and change the handle."""
    host.fault("predict", "fail", "holder", times=2)
    start("h")
    pid = start("w").pid
    assert refused(daemon, "h", Build((pid,))).startswith("it does not run on the canary, x [1, 64]: predict failed!")
    start("h2")
    daemon.tell("h2", Build((pid,), unfit=tuple({"x": (size, 64)} for size in (1, 2, 4, 8, 16, 32, 48, 64))))
    built, _ = daemon.hear("h2", Built)
    assert (built.canary_cases, built.canary) == ((), "")
    assert built.canary_note.startswith("the model runs on none of 9 inputs made from its signature")
    assert attach(daemon, "w", built).canary == ""
    daemon.ask("w", 1, x=rows(1))
    assert daemon.answer("w", 1).tolist() == models.answer(path, rows(1)).tolist()
    assert (host.count("build"), host.copies_of_weights(0)) == (3, 1)


def test_a_worker_whose_canary_fails_is_broken(daemon: Daemon, host: Host, start: Start) -> None:
    start("h")
    built = build(daemon, start("w").pid)
    host.fault("predict", "fail", "importer")
    assert refused(daemon, "w", Attach(built.handle, ONE)).startswith("predict failed!: Execute Model Failed | ")


def test_a_request_that_fails_ends_the_worker(daemon: Daemon, host: Host, start: Start) -> None:
    start("h")
    built = build(daemon, start("w").pid)
    attach(daemon, "w", built)
    host.fault("predict", "fail", times=1)
    daemon.ask("w", 1, x=rows(1))
    daemon.ask("w", 2, x=rows(1))
    failed, _ = daemon.hear("w", Failed)
    assert (failed.request, failed.code, failed.leaving) == (1, "INTERNAL", True)
    assert daemon.stop("w") == exits.SPOILT


@pytest.mark.parametrize(
    ("switch", "no_room"),
    [
        ({"max_processes": 0}, True),
        ({"capacity_mib": 210}, True),
        ({"capacity_mib": 201}, True),
        ({"vnpu": True}, False),
    ],
)
def test_that_a_card_is_full_is_told_apart_from_what_no_waiting_helps(
    daemon: Daemon, host: Host, start: Start, switch: Dict[str, Any], no_room: bool
) -> None:
    host.switch(**switch)
    start("w")
    daemon.tell("w", Attach("7", ONE) if "vnpu" in switch else Build(("1",)))
    assert daemon.hear("w", Broken)[0].no_room == no_room


def test_a_build_that_fails_gives_everything_back_when_the_process_leaves(
    daemon: Daemon, host: Host, start: Start
) -> None:
    host.switch(capacity_mib=210)
    start("h")
    cause = refused(daemon, "h", Build(("1",)))
    assert "Call aclrtMalloc failed, err_code = 207001" in cause
    assert host.ledger(0).allocations == ()


def test_a_card_that_is_not_there_is_not_taken_for_card_0(daemon: Daemon, host: Host, start: Start) -> None:
    start("h", device="ascend:2")
    cause = refused(daemon, "h", Build(("1",)))
    assert cause == "device: there is no card 2; this process sees 2, counted from 0"
    assert host.count("build") == 0


def test_a_machine_without_a_driver_is_told_before_anything_is_built(daemon: Daemon, host: Host, path: Path) -> None:
    host.switch(ascend=False)
    begin(daemon, host, "h", model=path)
    broken, _ = daemon.hear("h", Broken)
    assert broken.cause.startswith(f"{sys.executable}: the library has no number for this process: ")
    assert "set_env.sh" in broken.cause
    assert broken.cause.endswith(": dlopen libascend_kernel_plugin.so failed")
    assert daemon.stop("h") == exits.NO_ENGINE


def test_where_libascendcl_cannot_be_loaded_only_the_memory_is_unknown(
    daemon: Daemon, host: Host, start: Start
) -> None:
    host.switch(libascendcl=False)
    start("h")
    built = build(daemon, start("w").pid)
    assert built.device is None
    assert attach(daemon, "w", built).device is None
    assert "WARNING weightd.worker: the card's memory is not known: libascendcl.so: " in daemon.log("h")


# --- what the library ignores in silence ----------------------------------------------------------------------


@pytest.mark.parametrize("case", ["ge", "bundle", "encrypted", "multi-backend"])
def test_a_model_that_the_library_does_not_share_is_not_served_as_if_it_were(
    case: str, daemon: Daemon, host: Host, start: Start, tmp_path: Path
) -> None:
    key = key_file(tmp_path)
    cases: Dict[str, Dict[str, Any]] = {
        "ge": {"more": options(provider="ge")},
        "bundle": {"model": models.mlp(tmp_path / "bundle.mindir", bundle=True)},
        "encrypted": {
            "model": models.mlp(tmp_path / "locked.mindir", key=KEY),
            "more": options(dec_key_file=str(key)),
        },
        "multi-backend": {"ENABLE_MULTI_BACKEND_RUNTIME": "on"},
    }
    arguments = cases[case]
    start("h", *arguments.pop("more", ()), **arguments)
    cause = refused(daemon, "h", Build(("1",)))
    assert cause.startswith("the library has built the model without exporting its weights, got handle ''.")
    for hint in ("ge", "dec_key_file", "variable_weights", "ModelGroup", "2.7", "sharing = 'off'"):
        assert hint in cause


# --- without sharing ------------------------------------------------------------------------------------------


def test_with_sharing_off_each_has_a_copy_and_nobody_depends_on_another(
    daemon: Daemon, host: Host, start: Start, path: Path
) -> None:
    for name in ("h", "w"):
        hello = start(name, "--sharing", "off")
        assert hello.traits == FREE
        assert hello.pid == str(daemon.children[name].pid)
    built = build(daemon, "1", "2")
    assert (built.handle, built.shared_bytes, built.note) == ("", 0, "sharing is off")
    # A handle would be somebody else's.
    attached = attach(daemon, "w", dataclasses.replace(built, handle="7"))
    assert (attached.canary, attached.shared_bytes, attached.note) == (built.canary, 0, "sharing is off")
    assert isinstance(attached.device, DeviceMemory)
    kinds = [each.kind for each in host.ledger(0).allocations if "weights" in each.kind]
    assert kinds == ["private weights", "private weights"]
    assert daemon.stop("h") == exits.OK
    daemon.ask("w", 1, x=rows(2))
    assert daemon.answer("w", 1).tolist() == models.answer(path, rows(2)).tolist()


def test_a_build_that_names_nobody_is_a_private_one(daemon: Daemon, host: Host, start: Start) -> None:
    start("h")
    built = build(daemon)
    assert (built.handle, built.note) == ("", "weights are not shared: the build named no process to share with")


# --- sizes that a model was converted for ---------------------------------------------------------------------


def served(daemon: Daemon, start: Start, model: Path) -> Built:
    """One worker without a holder beside it: what the daemon would do with sharing off."""
    start("h", "--sharing", "off", model=model)
    built = build(daemon)
    start("w", "--sharing", "off", model=model)
    attach(daemon, "w", built)
    return built


@pytest.mark.parametrize("told", [False, True])
def test_a_size_that_is_no_gear_is_the_requests_error_and_the_worker_stays(
    daemon: Daemon, start: Start, tmp_path: Path, told: bool
) -> None:
    path = models.mlp(tmp_path / "geared.mindir", gears=(1, 4), told=told)
    built = served(daemon, start, path)
    assert built.gears == (((1,), (4,)) if told else ())
    for number, size in enumerate((3, 5, 2, 4, 6, 7, 1000)):
        daemon.ask("w", number, x=rows(size))
        if size == 4:
            assert daemon.answer("w", number).tolist() == models.answer(path, rows(4)).tolist()
        else:
            failed, _ = daemon.hear("w", Failed)
            assert (failed.request, failed.code, failed.leaving) == (number, "INVALID_ARGUMENT", False)
            assert f"Current batch size {size} is invalid" in failed.error
    assert daemon.stop("w") == exits.OK


@pytest.mark.parametrize("told", [False, True])
def test_a_model_whose_gears_lack_1_has_a_canary(daemon: Daemon, start: Start, tmp_path: Path, told: bool) -> None:
    built = served(daemon, start, models.mlp(tmp_path / "geared.mindir", gears=(4, 8), told=told))
    assert (built.canary_cases, built.canary != "") == (({"x": (4, 64)},), True)


def test_answers_that_differ_a_little_are_believed_as_far_as_is_allowed(
    daemon: Daemon, host: Host, start: Start
) -> None:
    host.switch(noise=1e-6)
    start("h", "--tolerance", "1e-5")
    built = build(daemon, *(start(name, "--tolerance", "1e-5").pid for name in ("near", "far")))
    assert built.canary_note == ""
    assert attach(daemon, "near", built).canary == built.canary != ""
    host.switch(noise=1e-3)
    assert attach(daemon, "far", built).canary != built.canary
    start("exact")
    daemon.tell("exact", Build(()))
    assert "canary_tolerance is 0: allow more" in daemon.hear("exact", Built)[0].canary_note


def test_batches_that_differ_are_refused_where_a_card_would_take_the_first_for_all(
    daemon: Daemon, start: Start, tmp_path: Path
) -> None:
    path = models.two_inputs(tmp_path / "two.mindir", gears=(1, 2))
    served(daemon, start, path)
    a, b = np.ones((2, 4), np.float32), np.ones((1, 4), np.float32)
    daemon.ask("w", 1, a=a, b=b)
    failed, _ = daemon.hear("w", Failed)
    assert (failed.code, failed.leaving) == ("INVALID_ARGUMENT", False)
    assert failed.error == "inputs: expected one batch for all, got {'a': 2, 'b': 1}: the model has gears for it"
    daemon.ask("w", 2, a=a, b=a)
    result, frames = daemon.hear("w", Result)
    right = models.answers(path, {"a": a, "b": a})
    assert {each.name: bytes(frame) for each, frame in zip(result.outputs, frames)} == {
        name: array.tobytes() for name, array in right.items()
    }


@pytest.mark.parametrize(
    ("dims", "shape", "gears"),
    [
        ("1;8", "x:-1,64", ((1,), (8,))),
        ('"1; 8"', '"x:-1,64"', ((1,), (8,))),
        ("1,1;8,9", "x:-1,64;y:-1,4", ((1, 1), (8, 9))),
        ("1,2;8,9", "y:-1,4;x:-1,64", ((2, 1), (9, 8))),
        ("", "x:-1,64", ()),
        ("1;8", "", ()),
        ("1,1", "x:-1,64", ()),
        ("1~8", "x:-1,64", ()),
        ("0", "x:-1,64", ()),
        ("1;", "z:-1,64", ()),
        (";".join(["1"] * 129), "x:-1,64", ()),
    ],
)
def test_gears_are_read_where_the_converter_has_recorded_those_of_these_inputs(
    dims: str, shape: str, gears: Tuple[Tuple[int, ...], ...]
) -> None:
    inputs = [TensorSignature("x", "FP32", (-1, 64)), TensorSignature("y", "FP32", (-1, 4))]
    assert recorded(inputs if "y" in shape else inputs[:1], dims, shape) == gears


# --- datatypes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "datatype"),
    [("FLOAT16", "FP16"), ("INT8", "INT8"), ("INT32", "INT32"), ("INT64", "INT64"), ("UINT8", "UINT8")],
)
def test_other_datatypes_are_served_as_the_card_has_them(
    daemon: Daemon, start: Start, tmp_path: Path, dtype: str, datatype: str
) -> None:
    path = models.mlp(tmp_path / "other.mindir", dtype=dtype)
    built = served(daemon, start, path)
    assert (built.inputs[0].datatype, built.outputs[0].datatype, built.canary != "") == (datatype, datatype, True)
    x = np.abs(rows(3) * 4).astype(dtype.lower())
    daemon.ask("w", 1, x=x)
    assert daemon.answer("w", 1).tobytes() == models.answer(path, x).tobytes()


def test_bf16_is_refused_by_name(daemon: Daemon, start: Start, tmp_path: Path) -> None:
    """The library's Python interface says None of it, and hands it out as if it were float16."""
    start("h", model=models.mlp(tmp_path / "bf16.mindir", dtype="BFLOAT16"))
    cause = refused(daemon, "h", Build(("1",)))
    assert cause == (
        "x: its type, which the library's Python interface cannot tell (as of BF16), has no datatype on the wire"
    )


# --- cards ----------------------------------------------------------------------------------------------------


def test_a_process_counts_the_cards_that_it_sees(daemon: Daemon, host: Host, start: Start) -> None:
    """A number is that of the list, as the driver counts: a model is never put on a card that is not listed."""
    start("h", ASCEND_RT_VISIBLE_DEVICES="1")
    built = build(daemon, start("w", ASCEND_RT_VISIBLE_DEVICES="1").pid)
    assert attach(daemon, "w", built).canary == built.canary
    assert (host.copies_of_weights(1), host.ledger(0).allocations) == (1, ())
    start("other", device="ascend:1", ASCEND_RT_VISIBLE_DEVICES="1")
    cause = refused(daemon, "other", Build(("1",)))
    assert cause == (
        "device: there is no card 1; this process sees 1, counted from 0 among those of ASCEND_RT_VISIBLE_DEVICES=1"
    )


def test_a_card_that_cannot_export_is_told_with_what_to_do(daemon: Daemon, host: Host, start: Start) -> None:
    host.switch(exports=False, soc_name="Ascend310P3")
    start("h")
    cause = refused(daemon, "h", Build(("1",)))
    assert "aclrtMemExportToShareableHandle failed! ret:207000" in cause
    assert cause.endswith(
        "; Ascend310P3 cannot share memory between processes: set sharing = 'off' (310P and vNPU are known for it)"
    )
    start("p", "--sharing", "off")
    daemon.tell("p", Build(()))
    daemon.hear("p", Built)


# --- what the library leaves to its caller --------------------------------------------------------------------

_TWO_ANSWERS = """
from weightd.worker.engines import ENGINES
from weightd.worker.engines.engine import Settings
engine = ENGINES["mindspore_lite"](Settings(1, "ascend:0", False))
engine.build(path)
names = [[each.name for each in tensors] for tensors in engine.signature]
names, engine.predict({"b": b, "a": a}), engine.predict({"b": a, "a": b})
"""


def test_inputs_go_by_name_names_lose_their_padding_and_outputs_stay_as_they_are(
    nursery: Nursery, host: Host, tmp_path: Path
) -> None:
    """The library binds inputs by position, pads names, and overwrites its outputs in the next predict."""
    path = models.two_inputs(tmp_path / "two.mindir", padding="  ")
    a, b = np.full((1, 4), 5, np.float32), np.full((1, 4), 2, np.float32)
    names, first, second = nursery.start(host).do(_TWO_ANSWERS, path=str(path), a=a, b=b)
    assert names == [["a", "b"], ["sum", "difference"]]
    for answer, inputs in ((first, {"a": a, "b": b}), (second, {"a": b, "b": a})):
        expected = models.answers(path, inputs)
        assert {name: array.tolist() for name, array in answer.items()} == {
            name: array.tolist() for name, array in expected.items()
        }


# --- encrypted models -----------------------------------------------------------------------------------------


def key_file(directory: Path, key: bytes = KEY, mode: int = 0o600) -> Path:
    path = directory / "key"
    path.write_bytes(key)
    path.chmod(mode)
    return path


def test_an_encrypted_model_is_served_and_its_key_is_in_no_log(daemon: Daemon, start: Start, tmp_path: Path) -> None:
    locked = models.mlp(tmp_path / "locked.mindir", key=KEY)
    start("w", "--sharing", "off", *options(dec_key_file=str(key_file(tmp_path, mode=0o400))), model=locked)
    daemon.tell("w", Attach("", ONE))
    daemon.hear("w", Attached)
    daemon.ask("w", 1, x=rows(2))
    assert daemon.answer("w", 1).tolist() == models.answer(locked, rows(2), KEY).tolist()
    assert KEY.decode() not in daemon.log("w")


def test_a_wrong_key_is_a_build_error(daemon: Daemon, start: Start, tmp_path: Path) -> None:
    locked = models.mlp(tmp_path / "locked.mindir", key=KEY)
    start("w", "--sharing", "off", *options(dec_key_file=str(key_file(tmp_path, b"x" * 16))), model=locked)
    assert "Decrypt failed!" in refused(daemon, "w", Attach("", ONE))


# --- changed weights ------------------------------------------------------------------------------------------


CHANGEABLE = ("--sharing", "off", *options(variable_weights=True))


def test_weights_of_a_file_take_the_place_of_the_models(daemon: Daemon, start: Start, tmp_path: Path) -> None:
    bundle = models.mlp(tmp_path / "bundle.mindir", bundle=True)
    wanted = models.mlp(tmp_path / "wanted.mindir", seed=7)
    weights = np.frombuffer(wanted.read_bytes()[-2 * 64 * 64 * 4 :], np.float32).reshape(2, 64, 64)
    # In an order that the library does not take by itself.
    np.savez(str(tmp_path / "weights.npz"), w0=np.asfortranarray(weights[0]), w1=weights[1].astype(">f4"))
    update = (*CHANGEABLE, "--weights", str(tmp_path / "weights.npz"))
    start("h", *update, model=bundle)
    built = build(daemon)
    start("plain", *CHANGEABLE, model=bundle)
    assert attach(daemon, "plain", built).canary != built.canary
    start("w", *update, model=bundle)
    assert attach(daemon, "w", built).canary == built.canary
    daemon.ask("w", 1, x=rows(3))
    assert daemon.answer("w", 1).tolist() == models.answer(wanted, rows(3)).tolist()


@pytest.mark.parametrize(
    ("case", "more", "cause"),
    [
        ("good", ("--sharing", "off"), "the weights of this model cannot be changed: the option variable_weights"),
        ("not a bundle", CHANGEABLE, "update weight failed! Error is Common error code."),
        ("other names", CHANGEABLE, "update weight failed! Error is Common error code."),
        ("text", CHANGEABLE, "weights.npz: expected an .npz of plain arrays: it is another kind of file, or damaged"),
        ("empty file", CHANGEABLE, "weights.npz: expected an .npz of plain arrays: "),
        ("npy", CHANGEABLE, "weights.npz: expected an .npz of plain arrays: "),
        ("pickle", CHANGEABLE, "weights.npz: expected an .npz of plain arrays: it holds Python objects"),
        ("truncated", CHANGEABLE, "weights.npz: expected an .npz of plain arrays: "),
        ("no arrays", CHANGEABLE, "weights.npz: there is no array in it"),
        ("missing", CHANGEABLE, "weights.npz: No such file or directory"),
        ("directory", CHANGEABLE, "weights.npz: Is a directory"),
    ],
)
def test_weights_that_cannot_be_taken_are_a_build_error(
    case: str, more: Tuple[str, ...], cause: str, daemon: Daemon, start: Start, tmp_path: Path
) -> None:
    bundle = models.mlp(tmp_path / "bundle.mindir", bundle=case != "not a bundle")
    file = tmp_path / "weights.npz"
    write_weights(file, case)
    start("w", *more, "--weights", str(file), model=bundle)
    told = refused(daemon, "w", Attach("", ONE))
    assert cause in told
    assert told.startswith(str(file)) == ("weights.npz" in cause)


def write_weights(file: Path, case: str) -> None:
    if case == "missing":
        return
    if case == "directory":
        file.mkdir()
        return
    arrays: Dict[str, Any] = {"w0": np.zeros((64, 64), np.float32)}
    if case == "other names":
        arrays = {"v": arrays["w0"]}
    elif case == "pickle":
        arrays = {"w0": np.array([{"an": "object"}])}
    elif case == "no arrays":
        arrays = {}
    np.savez(str(file), **arrays)
    contents: Dict[str, Callable[[], bytes]] = {
        "text": lambda: b"this is no archive\n" * 9,
        "empty file": lambda: b"",
        "npy": functools.partial(npy, file.with_suffix(".npy")),
        "truncated": lambda: file.read_bytes()[:-40],
    }
    if case in contents:
        file.write_bytes(contents[case]())


def npy(file: Path) -> bytes:
    np.save(str(file), np.zeros(3))
    return file.read_bytes()


# --- arguments ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("text", "cause"),
    [
        ("", "options: not JSON: "),
        ("{", "options: not JSON: "),
        ("[" * 100_000, "options: not JSON: "),
        ("[]", "options: expected a JSON object, got list"),
        ("null", "options: expected a JSON object, got NoneType"),
        ('{"provider": "ge", "provider": ""}', "options.provider: given twice"),
        ('{"provider": "acl"}', "options.provider: expected one of "),
        ('{"colour": 1}', "options.colour: unknown field"),
        ('{"thread_affinity_cores": [1, "2"]}', "options.thread_affinity_cores[1]: expected integer"),
        ('{"thread_affinity_mode": true}', "options.thread_affinity_mode: expected integer"),
    ],
)
def test_options_that_are_none_are_told_with_their_key(
    text: str, cause: str, daemon: Daemon, host: Host, path: Path
) -> None:
    begin(daemon, host, "h", "--options", text, model=path)
    broken, _ = daemon.hear("h", Broken)
    assert broken.cause.startswith(cause)
    assert daemon.stop("h") == exits.CANNOT_BUILD


# --- the probe ------------------------------------------------------------------------------------------------


Ask = Callable[[str], Tuple[int, Dict[str, Any]]]


@pytest.fixture
def probe(nursery: Nursery, host: Host, tmp_path: Path) -> Ask:
    """Probe a device; give the exit status and what is told."""

    def probe(device: str) -> Tuple[int, Dict[str, Any]]:
        log = tmp_path / "probe.log"
        command = [sys.executable, "-m", "weightd.worker.probe", "--device", device]
        status = nursery.popen(command, log, environment(host)).wait()
        report: Dict[str, Any] = json.loads(log.read_text().splitlines()[-1])
        return status, report

    return probe


def test_a_card_tells_what_it_is(probe: Ask, host: Host) -> None:
    host.switch(soc_name="Ascend910C", context_mib=100)
    total = 32 * 1024 * MIB
    expected = {"total_bytes": total, "free_bytes": total - 100 * MIB, "soc": "Ascend910C", "devices": 2}
    assert probe("ascend:1") == (exits.OK, expected)
    assert host.ledger(1).allocations == ()


@pytest.mark.parametrize(
    ("device", "switch", "error"),
    [
        ("ascend:2", {}, "device: there is no card 2; this process sees 2, counted from 0"),
        ("cpu", {}, "device: expected ascend:N, got 'cpu'"),
        ("npu:0", {}, "device: expected cpu or ascend:N, got 'npu:0'"),
        ("ascend:0", {"ascend": False}, "aclrtGetDeviceCount returned 507899: the driver refuses; "),
        ("ascend:0", {"libascendcl": False}, "libascendcl.so: cannot open shared object file: "),
        ("ascend:0", {"capacity_mib": 50}, "aclrtSetDevice returned 207001: the card has no memory left"),
        ("ascend:0", {"max_processes": 0}, "aclrtSetDevice returned 507899: the driver refuses; "),
    ],
)
def test_a_card_that_cannot_be_asked_is_an_error(
    device: str, switch: Dict[str, Any], error: str, host: Host, probe: Ask
) -> None:
    host.switch(**switch)
    status, report = probe(device)
    assert status == exits.NO_ENGINE
    assert list(report) == ["error"]
    assert report["error"].startswith(error)


def test_without_the_library_the_probe_says_so(host: Host, tmp_path: Path) -> None:
    (tmp_path / "mindspore_lite.py").write_text("raise ImportError('libmindspore-lite.so: not found')")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    command = [sys.executable, "-m", "weightd.worker.probe", "--device", "ascend:0"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, check=False)
    assert done.returncode == exits.NO_ENGINE
    assert json.loads(done.stdout) == {"error": "ImportError: libmindspore-lite.so: not found"}


_BENEATH = """
from weightd.worker.engines.mindspore_lite.acl import Acl
acl = Acl()
acl.initialize()
acl.initialize()
"""


def test_the_layer_beneath(nursery: Nursery, host: Host) -> None:
    program = nursery.start(host)
    facts = program.do(f"{_BENEATH}\nacl.bare_pid(), acl.device_count(), acl.soc_name()")
    assert facts == (program.pid + 100_000, 2, "Ascend910B3")
    refusal = program.refusal("acl.memory()")
    assert (refusal.kind, refusal.text) == ("AclError", "aclrtGetMemInfo returned 107002: no card is set")


def test_a_card_without_a_name_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(_: str) -> SimpleNamespace:
        return SimpleNamespace(aclrtGetSocName=lambda: None)

    monkeypatch.setattr(ctypes, "CDLL", load)
    with pytest.raises(AclError, match="it knows no name for this card"):
        Acl().soc_name()
