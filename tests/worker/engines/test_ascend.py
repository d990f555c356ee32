"""A child with an Ascend card, as the daemon starts it: real processes on a simulated card."""

from __future__ import annotations

import ctypes
import dataclasses
import io
import json
import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Callable, Dict, Generator, Optional, Tuple

import numpy as np
import pytest

from ascendsim import Host, environment, models
from ascendsim.program import ProgramForkServer
from weightd_protocol.messages.inference import TensorSignature
from weightd_protocol.messages.worker import (
    AllowAttach,
    Attach,
    AttachAllowed,
    Attached,
    Build,
    Built,
    Hello,
    PredictFailed,
    PredictResult,
    ProcessFailed,
)
from weightd_protocol.messages.worker_common import DeviceMemory, SelfTestCases, SharingTraits
from weightd_worker import exit_codes
from weightd_worker.engines.mindspore_lite.acl import Acl, AclError
from weightd_worker.engines.mindspore_lite.ascend import parse_gears

if TYPE_CHECKING:
    from tests.worker.conftest import Daemon

MIB = 1 << 20
FIXED = SharingTraits(pids_fixed_at_build=True, holder_must_outlive=True, attach_rewrites_weights=True)
FREE = SharingTraits(pids_fixed_at_build=False, holder_must_outlive=False, attach_rewrites_weights=False)
KEY = b"0123456789abcdef"

ONE: SelfTestCases = ({"x": (1, 64)},)
OFF = ("--sharing", "off")


class Card:
    """Children on card 0 of a machine with two, as the daemon's end sees them: "h" is the holder."""

    def __init__(self, daemon: Daemon, host: Host, path: Path) -> None:
        self.daemon = daemon
        self.host = host
        self.path = path

    def begin(
        self, name: str, *more: str, model: Optional[Path] = None, device: str = "ascend:0", **variables: str
    ) -> None:
        """Start a child."""
        variables = {**environment(self.host), **variables}
        self.daemon.start(name, model or self.path, *more, engine="mindspore_lite", device=device, variables=variables)

    def start(self, name: str, *more: str, **options: Any) -> Hello:
        """Start a child and wait for its HELLO."""
        self.begin(name, *more, **options)
        return self.daemon.hear(name, Hello)[0]

    def build(self, *pids: str) -> Built:
        self.daemon.tell("h", Build(pids))
        return self.daemon.hear("h", Built)[0]

    def attach(self, name: str, built: Built) -> Attached:
        self.daemon.tell(name, Attach(built.handle, built.selftest_cases))
        return self.daemon.hear(name, Attached)[0]

    def pair(self, *more: str, **options: Any) -> Built:
        """Start a holder, which builds, and the worker "w" that it lists."""
        self.start("h", *more, **options)
        return self.build(self.start("w", *more, **options).engine_pid)

    def private(self, model: Path, *more: str) -> Built:
        """One worker without a holder beside it: what the daemon would do with sharing off."""
        built = self.pair(*OFF, *more, model=model)
        self.attach("w", built)
        return built

    def allow(self, *pids: str) -> str:
        """Let the holder list more; return why it cannot."""
        self.daemon.tell("h", AllowAttach(pids))
        return self.daemon.hear("h", AttachAllowed)[0].error

    def refused(self, name: str, order: object, status: int = exit_codes.CANNOT_BUILD) -> str:
        """Why the child cannot obey; it must leave then."""
        self.daemon.tell(name, order)
        broken, _ = self.daemon.hear(name, ProcessFailed)
        assert self.daemon.stop(name) == status
        return broken.reason

    def check(self, name: str, x: Any, model: Optional[Path] = None, key: bytes = b"") -> None:
        """The child answers what this model does."""
        self.daemon.ask(name, len(x), x=x)
        answer, right = self.daemon.answer(name, len(x)), models.answer(model or self.path, x, key)
        assert (answer.dtype, answer.tolist()) == (right.dtype, right.tolist())

    def fails(self, name: str, number: int, **inputs: Any) -> PredictFailed:
        """What a request that fails is told."""
        self.daemon.ask(name, number, **inputs)
        failed, _ = self.daemon.hear(name, PredictFailed)
        assert failed.request == number
        return failed


@pytest.fixture(scope="session")
def nursery() -> Generator[ProgramForkServer, None, None]:
    """Forks processes that have imported what a child imports: that is most of a child's time."""
    with ProgramForkServer("weightd_worker.__main__", "weightd_worker.device_probe") as nursery:
        yield nursery


@pytest.fixture
def host(tmp_path: Path) -> Host:
    """A machine with two cards."""
    return Host(tmp_path / "host", cards=2)


@pytest.fixture
def card(daemon: Daemon, nursery: ProgramForkServer, host: Host, tmp_path: Path) -> Card:
    daemon.popen, daemon.parent = nursery.popen, nursery.pid
    return Card(daemon, host, models.mlp(tmp_path / "mlp.mindir"))


def options(**values: Any) -> Tuple[str, str]:
    return "--options", json.dumps(values)


def rows(count: int) -> Any:
    return np.random.RandomState(count).standard_normal((count, 64)).astype(np.float32)


# --- the whole life -------------------------------------------------------------------------------------------


def test_a_holder_and_its_workers_run_on_one_copy(card: Card) -> None:
    hellos = {name: card.start(name) for name in ("h", "w1", "w2")}
    for name, hello in hellos.items():
        # As in a container, where the driver's number is another one.
        assert hello.engine_pid == str(card.daemon.children[name].pid + 100_000)
        assert hello.sharing_traits == FIXED
        assert hello.versions["mindspore_lite"] == "2.7.0"
    built = card.build(hellos["w1"].engine_pid, hellos["w2"].engine_pid)
    assert int(built.handle) > 2**53
    assert (built.selftest_cases, built.shared_bytes, built.note) == (ONE, 2 * MIB, "")
    assert (built.inputs[0].shape, built.outputs[0].shape) == ((-1, 64), (-1, 64))
    for name in ("w1", "w2"):
        attached = card.attach(name, built)
        assert attached.selftest_digest == built.selftest_digest != ""
        assert (attached.shared_bytes, attached.note) == (2 * MIB, "")
    assert card.host.copies_of_weights(0) == 1
    for size in (1, 5, 2, 2, 64):
        for name in ("w1", "w2"):
            card.check(name, rows(size))
    for name in ("w2", "w1", "h"):
        assert card.daemon.stop(name) == exit_codes.OK
    assert card.host.card_state(0).allocations == ()


def test_what_is_left_of_the_card_is_told_after_each_build(card: Card) -> None:
    built = card.pair(device="ascend:1")
    attached = card.attach("w", built)
    assert built.device
    assert attached.device
    assert built.device.total_bytes == 32 * 1024 * MIB
    assert built.device.free_bytes < (32 * 1024 - 200) * MIB
    assert 200 * MIB < built.device.free_bytes - attached.device.free_bytes < 300 * MIB
    assert (card.host.card_state(0).allocations, card.host.copies_of_weights(1)) == ((), 1)


def test_a_model_without_a_free_dimension(card: Card, tmp_path: Path) -> None:
    fixed = models.mlp(tmp_path / "fixed.mindir", batch=3)
    built = card.pair(model=fixed)
    assert (built.inputs[0].shape, built.selftest_cases) == ((3, 64), ({"x": (3, 64)},))
    assert card.attach("w", built).selftest_digest == built.selftest_digest
    card.check("w", rows(3), fixed)


def test_the_same_model_has_the_same_canary_on_the_cpu(card: Card) -> None:
    """Of this simulator: no card computes the same bits. It shows that the answers are compared."""
    card.start("h", device="cpu")
    on_cpu = card.build()
    assert on_cpu.selftest_cases == ({"x": (1, 64)}, {"x": (2, 64)})
    assert on_cpu.device is None
    card.start("w")
    attached = card.attach("w", dataclasses.replace(on_cpu, handle=""))
    assert attached.selftest_digest == on_cpu.selftest_digest
    assert (attached.shared_bytes, attached.note) == (0, "weights are not shared: the holder has no handle")


# --- who may attach -------------------------------------------------------------------------------------------


def test_a_process_that_is_not_on_the_list_is_refused_with_the_true_cause(card: Card) -> None:
    built = card.pair()
    card.start("stranger")
    cause = card.refused("stranger", Attach(built.handle, built.selftest_cases))
    assert cause.startswith("build_from_file failed! Error is Common error code.: acl rt mem import from shareable ")
    assert card.attach("w", built).selftest_digest == built.selftest_digest


def test_a_failed_import_is_never_taken_for_a_success(card: Card) -> None:
    """The library then runs the model of this process whose id is 0: there must be none, so one build is all."""
    card.host.switch(first_model_id=0)
    card.start("h")
    card.start("w")
    built = card.build("1")
    assert "import from shareable handle failed" in card.refused("w", Attach(built.handle, built.selftest_cases))
    card.start("w2")
    card.attach("w2", dataclasses.replace(built, handle=""))
    cause = card.refused("w2", Attach(built.handle, built.selftest_cases))
    assert cause == "this process has built a model on a card before; only a new process can build another"


def test_a_process_that_came_later_is_let_in(card: Card) -> None:
    built = card.pair()
    assert card.allow(*[card.start(name).engine_pid for name in ("w2", "w3")]) == ""
    for name in ("w", "w2", "w3"):
        assert card.attach(name, built).selftest_digest == built.selftest_digest
        card.check(name, rows(2))
    assert card.host.copies_of_weights(0) == 1


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
    card: Card, switch: Dict[str, Any], error: str
) -> None:
    built = card.pair()
    card.host.switch(**switch)
    assert card.allow("123") == error
    assert card.attach("w", built).selftest_digest == built.selftest_digest
    assert card.daemon.stop("h") == exit_codes.OK


@pytest.mark.parametrize("pid", ["0", "-1", "12abc", " 1", "2147483648", "1,2"])
def test_a_pid_that_is_none_reaches_neither_the_library_nor_the_driver(card: Card, pid: str) -> None:
    expected = f"pid: expected a decimal number from 1 to 2147483647, got '{pid}'"
    card.start("h")
    assert card.allow("1") == "this process has exported no weights"
    card.build("1")
    assert card.allow(pid) == expected
    card.start("h2")
    assert card.refused("h2", Build(("1", pid))) == expected
    assert card.host.count("build") == 1


@pytest.mark.parametrize("handle", ["0", "-1", "12abc", "0x10", " 7", "1.5", "18446744073709551616", "/s/store"])
def test_a_handle_that_is_none_never_reaches_the_library(card: Card, handle: str) -> None:
    """It would take 0 and 0x10 for no handle, 12abc for 12 and -1 for the largest."""
    card.start("w")
    expected = f"handle: expected a decimal number from 1 to 18446744073709551615, got '{handle}'"
    assert card.refused("w", Attach(handle, ONE)) == expected
    assert card.host.count("build") == 0


# --- nothing wrong is served ----------------------------------------------------------------------------------


def test_another_model_of_the_same_size_is_seen_and_so_is_what_it_does(card: Card, tmp_path: Path) -> None:
    other = models.mlp(tmp_path / "other.mindir", seed=1)
    hellos = {"h": card.start("h"), "good": card.start("good"), "bad": card.start("bad", model=other)}
    assert hellos["bad"].sha256 != hellos["good"].sha256 == hellos["h"].sha256
    built = card.build(hellos["good"].engine_pid, hellos["bad"].engine_pid)
    assert card.attach("good", built).selftest_digest == built.selftest_digest
    assert card.attach("bad", built).selftest_digest != built.selftest_digest
    card.check("good", rows(1), other)  # the trap is real: the weights of all are other ones now


def test_a_worker_that_computes_wrong_is_seen(card: Card) -> None:
    built = card.pair()
    card.host.fault("predict", "garbage", "importer")
    assert card.attach("w", built).selftest_digest != built.selftest_digest


def test_a_holder_whose_canary_fails_leaves_the_next_try_to_another_and_the_last_shares_without_one(
    card: Card,
) -> None:
    """Building again would take the memory twice and change the handle."""
    card.host.fault("predict", "fail", "holder", times=2)
    card.start("h")
    pid = card.start("w").engine_pid
    cause = card.refused("h", Build((pid,)))
    assert cause.startswith("the model does not run on the self-test input x [1, 64]: predict failed!")
    card.start("h2")
    card.daemon.tell(
        "h2", Build((pid,), failed_cases=tuple({"x": (size, 64)} for size in (1, 2, 4, 8, 16, 32, 48, 64)))
    )
    built, _ = card.daemon.hear("h2", Built)
    assert (built.selftest_cases, built.selftest_digest) == ((), "")
    assert built.selftest_note.startswith("the model runs on none of 9 inputs generated from its signature")
    assert card.attach("w", built).selftest_digest == ""
    card.check("w", rows(1))
    assert (card.host.count("build"), card.host.copies_of_weights(0)) == (3, 1)


def test_a_worker_whose_canary_fails_is_broken(card: Card) -> None:
    built = card.pair()
    card.host.fault("predict", "fail", "importer")
    assert card.refused("w", Attach(built.handle, ONE)).startswith("predict failed!: Execute Model Failed | ")


def test_a_request_that_fails_ends_the_worker(card: Card) -> None:
    card.attach("w", card.pair())
    card.host.fault("predict", "fail", times=1)
    failed = card.fails("w", 1, x=rows(1))
    assert (failed.code, failed.is_exiting) == ("INTERNAL", True)
    assert card.daemon.stop("w") == exit_codes.MODEL_CORRUPTED


@pytest.mark.parametrize(
    ("switch", "order", "cause", "no_room"),
    [
        ({"max_processes": 0}, Build(("1",)), "Acl open device 0 failed", True),
        ({"capacity_mib": 210}, Build(("1",)), "Call aclrtMalloc failed, err_code = 207001", True),
        ({"capacity_mib": 201}, Build(("1",)), "aclrtMallocPhysical failed! ret:207001", True),
        ({"vnpu": True}, Attach("7", ONE), "import from shareable handle failed", False),
    ],
)
def test_that_a_card_is_full_is_told_apart_from_what_no_waiting_helps_and_gives_everything_back(
    card: Card, switch: Dict[str, Any], order: object, cause: str, no_room: bool
) -> None:
    card.host.switch(**switch)
    card.start("w")
    card.daemon.tell("w", order)
    broken, _ = card.daemon.hear("w", ProcessFailed)
    assert cause in broken.reason
    assert broken.is_out_of_memory == no_room
    assert card.daemon.stop("w") == exit_codes.CANNOT_BUILD
    assert card.host.card_state(0).allocations == ()


def test_a_machine_without_a_driver_is_told_before_anything_is_built(card: Card) -> None:
    card.host.switch(ascend=False)
    card.begin("h")
    broken, _ = card.daemon.hear("h", ProcessFailed)
    assert broken.reason.startswith(f"{sys.executable}: the library has no pid for this process: ")
    assert "set_env.sh" in broken.reason
    assert broken.reason.endswith(": dlopen libascend_kernel_plugin.so failed")
    assert card.daemon.stop("h") == exit_codes.NO_ENGINE


def test_where_libascendcl_cannot_be_loaded_only_the_memory_is_unknown(card: Card) -> None:
    card.host.switch(libascendcl=False)
    built = card.pair()
    assert built.device is None
    assert card.attach("w", built).device is None
    assert "WARNING weightd.worker: cannot read the card's memory: libascendcl.so: " in card.daemon.log("h")


# --- what the library ignores in silence ----------------------------------------------------------------------


@pytest.mark.parametrize("case", ["ge", "bundle", "encrypted", "multi-backend"])
def test_a_model_that_the_library_does_not_share_is_not_served_as_if_it_were(
    case: str, card: Card, tmp_path: Path
) -> None:
    model = models.mlp(
        tmp_path / "m.mindir", bundle=case == "bundle", key=KEY if case == "encrypted" else b"", exported=case == "ge"
    )
    more = {"ge": options(provider="ge"), "encrypted": options(dec_key_file=key_file(tmp_path))}.get(case, ())
    card.start("h", *more, model=model, ENABLE_MULTI_BACKEND_RUNTIME="on" if case == "multi-backend" else "")
    cause = card.refused("h", Build(("1",)))
    assert cause.startswith("the library has built the model without exporting its weights, got handle ''.")
    for hint in ("ge", "dec_key_file", "variable_weights", "ModelGroup", "2.7", "sharing = 'off'"):
        assert hint in cause


# --- without sharing ------------------------------------------------------------------------------------------


def test_with_sharing_off_each_has_a_copy_and_nobody_depends_on_another(card: Card) -> None:
    for name in ("h", "w"):
        hello = card.start(name, *OFF)
        assert (hello.sharing_traits, hello.engine_pid) == (FREE, str(card.daemon.children[name].pid))
    built = card.build("1", "2")
    assert (built.handle, built.shared_bytes, built.note) == ("", 0, "sharing is off")
    # A handle would be somebody else's.
    attached = card.attach("w", dataclasses.replace(built, handle="7"))
    assert (attached.selftest_digest, attached.shared_bytes, attached.note) == (
        built.selftest_digest,
        0,
        "sharing is off",
    )
    assert isinstance(attached.device, DeviceMemory)
    kinds = [each.kind for each in card.host.card_state(0).allocations if "weights" in each.kind]
    assert kinds == ["private weights", "private weights"]
    assert card.daemon.stop("h") == exit_codes.OK
    card.check("w", rows(2))


def test_a_build_that_names_nobody_is_a_private_one(card: Card) -> None:
    card.start("h")
    built = card.build()
    assert (built.handle, built.note) == ("", "weights are not shared: the build order lists no process to share with")


# --- sizes that a model was converted for ---------------------------------------------------------------------


@pytest.mark.parametrize("told", [False, True])
def test_a_size_that_is_no_gear_is_the_requests_error_and_the_worker_stays(
    card: Card, tmp_path: Path, told: bool
) -> None:
    path = models.mlp(tmp_path / "geared.mindir", gears=(4, 8), has_gear_info=told)
    built = card.private(path)
    assert built.gears == (((4,), (8,)) if told else ())
    assert built.selftest_cases == ({"x": (4, 64)},)
    assert built.selftest_digest != ""
    for size in (3, 1, 4, 6, 7, 1000):
        if size == 4:
            card.check("w", rows(4), path)
        else:
            failed = card.fails("w", size, x=rows(size))
            assert (failed.code, failed.is_exiting) == ("INVALID_ARGUMENT", False)
            assert f"Current batch size {size} is invalid" in failed.error
    assert card.daemon.stop("w") == exit_codes.OK


def test_answers_that_differ_a_little_are_believed_as_far_as_is_allowed(card: Card) -> None:
    card.host.switch(noise=1e-6)
    card.start("h", "--tolerance", "1e-5")
    built = card.build(*(card.start(name, "--tolerance", "1e-5").engine_pid for name in ("near", "far")))
    assert built.selftest_note == ""
    assert card.attach("near", built).selftest_digest == built.selftest_digest != ""
    card.host.switch(noise=1e-3)
    assert card.attach("far", built).selftest_digest != built.selftest_digest
    card.start("exact")
    card.daemon.tell("exact", Build(()))
    assert "selftest_tolerance is 0: raise it" in card.daemon.hear("exact", Built)[0].selftest_note


def test_batches_that_differ_are_refused_where_a_card_would_take_the_first_for_all(card: Card, tmp_path: Path) -> None:
    path = models.two_inputs(tmp_path / "two.mindir", gears=(1, 2))
    card.private(path)
    a, b = np.ones((2, 4), np.float32), np.ones((1, 4), np.float32)
    failed = card.fails("w", 1, a=a, b=b)
    assert (failed.code, failed.is_exiting) == ("INVALID_ARGUMENT", False)
    assert failed.error == "inputs: expected one batch for all, got {'a': 2, 'b': 1}: the model has gears for it"
    card.daemon.ask("w", 2, a=a, b=a)
    result, frames = card.daemon.hear("w", PredictResult)
    right = {name: array.tobytes() for name, array in models.answers(path, {"a": a, "b": a}).items()}
    assert {each.name: bytes(frame) for each, frame in zip(result.description.outputs, frames)} == right


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
    assert parse_gears(inputs if "y" in shape else inputs[:1], dims, shape) == gears


# --- datatypes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "datatype"),
    [("FLOAT16", "FP16"), ("INT8", "INT8"), ("INT32", "INT32"), ("INT64", "INT64"), ("UINT8", "UINT8")],
)
def test_other_datatypes_are_served_as_the_card_has_them(card: Card, tmp_path: Path, dtype: str, datatype: str) -> None:
    path = models.mlp(tmp_path / "other.mindir", dtype=dtype)
    built = card.private(path)
    assert (built.inputs[0].datatype, built.outputs[0].datatype, built.selftest_digest != "") == (
        datatype,
        datatype,
        True,
    )
    card.check("w", np.abs(rows(3) * 4).astype(dtype.lower()), path)


def test_bf16_is_refused_by_name(card: Card, tmp_path: Path) -> None:
    """The library's Python interface says None of it, and hands it out as if it were float16."""
    card.start("h", model=models.mlp(tmp_path / "bf16.mindir", dtype="BFLOAT16"))
    expected = "x: the datatype is not supported; the library's Python interface does not report it (BF16, for example)"
    assert card.refused("h", Build(("1",))) == expected


# --- cards ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "variables", "cause"),
    [
        ("ascend:2", {}, "there is no card 2; this process sees 2, counted from 0"),
        (
            "ascend:1",
            {"ASCEND_RT_VISIBLE_DEVICES": "1"},
            "there is no card 1; this process sees 1, counted from 0 among those of ASCEND_RT_VISIBLE_DEVICES=1",
        ),
    ],
)
def test_a_card_that_is_not_there_is_not_taken_for_card_0(card: Card, device: str, variables: Any, cause: str) -> None:
    card.start("h", device=device, **variables)
    assert card.refused("h", Build(("1",))) == f"device: {cause}"
    assert card.host.count("build") == 0


def test_a_process_counts_the_cards_that_it_sees(card: Card) -> None:
    """A number is that of the list, as the driver counts: a model is never put on a card that is not listed."""
    built = card.pair(ASCEND_RT_VISIBLE_DEVICES="1")
    assert card.attach("w", built).selftest_digest == built.selftest_digest
    assert (card.host.copies_of_weights(1), card.host.card_state(0).allocations) == (1, ())


def test_a_card_that_cannot_export_is_told_with_what_to_do(card: Card) -> None:
    card.host.switch(exports=False, soc_name="Ascend310P3")
    card.start("h")
    cause = card.refused("h", Build(("1",)))
    assert "aclrtMemExportToShareableHandle failed! ret:207000" in cause
    hint = "; Ascend310P3 cannot share memory between processes: set sharing = 'off' (310P and vNPU are known for it)"
    assert cause.endswith(hint)
    card.private(card.path)


# --- what the library leaves to its caller --------------------------------------------------------------------

_TWO_ANSWERS = """
from weightd_worker.engines import ENGINES
from weightd_worker.engines.engine import BuildSettings
engine = ENGINES["mindspore_lite"](BuildSettings(1, "ascend:0", False))
engine.build(path)
names = [[each.name for each in tensors] for tensors in engine.signature]
names, engine.predict({"b": b, "a": a}), engine.predict({"b": a, "a": b})
"""


def test_inputs_go_by_name_names_lose_their_padding_and_outputs_stay_as_they_are(
    nursery: ProgramForkServer, host: Host, tmp_path: Path
) -> None:
    """The library binds inputs by position, pads names, and overwrites its outputs in the next predict."""
    path = models.two_inputs(tmp_path / "two.mindir", padding="  ")
    a, b = np.full((1, 4), 5, np.float32), np.full((1, 4), 2, np.float32)
    names, first, second = nursery.start(host).do(_TWO_ANSWERS, path=str(path), a=a, b=b)
    assert names == [["a", "b"], ["sum", "difference"]]
    for answer, inputs in ((first, {"a": a, "b": b}), (second, {"a": b, "b": a})):
        np.testing.assert_equal(answer, models.answers(path, inputs))


# --- encrypted models -----------------------------------------------------------------------------------------


def key_file(directory: Path, key: bytes = KEY, mode: int = 0o600) -> str:
    path = directory / "key"
    path.write_bytes(key)
    path.chmod(mode)
    return str(path)


def test_an_encrypted_model_is_served_and_its_key_is_in_no_log(card: Card, tmp_path: Path) -> None:
    locked = models.mlp(tmp_path / "locked.mindir", key=KEY)
    card.private(locked, *options(dec_key_file=key_file(tmp_path, mode=0o400)))
    card.check("w", rows(2), locked, KEY)
    assert KEY.decode() not in card.daemon.log("w")


def test_a_wrong_key_is_a_build_error(card: Card, tmp_path: Path) -> None:
    locked = models.mlp(tmp_path / "locked.mindir", key=KEY)
    card.start("w", *OFF, *options(dec_key_file=key_file(tmp_path, b"x" * 16)), model=locked)
    assert "Decrypt failed!" in card.refused("w", Attach("", ONE))


# --- changed weights ------------------------------------------------------------------------------------------


CHANGEABLE = (*OFF, *options(variable_weights=True))


def test_weights_of_a_file_take_the_place_of_the_models(card: Card, tmp_path: Path) -> None:
    bundle = models.mlp(tmp_path / "bundle.mindir", bundle=True)
    wanted = models.mlp(tmp_path / "wanted.mindir", seed=7)
    weights = models.weights(wanted)
    # In an order that the library does not take by itself.
    np.savez(str(tmp_path / "weights.npz"), w0=np.asfortranarray(weights["w0"]), w1=weights["w1"].astype(">f4"))
    built = card.pair(*CHANGEABLE, "--weights", str(tmp_path / "weights.npz"), model=bundle)
    card.start("plain", *CHANGEABLE, model=bundle)
    assert card.attach("plain", built).selftest_digest != built.selftest_digest
    assert card.attach("w", built).selftest_digest == built.selftest_digest
    card.check("w", rows(3), wanted)


def npz(**arrays: Any) -> bytes:
    file = io.BytesIO()
    np.savez(file, **arrays)
    return file.getvalue()


def npy() -> bytes:
    file = io.BytesIO()
    np.save(file, np.zeros(3))
    return file.getvalue()


GOOD = npz(w0=np.zeros((64, 64), np.float32))


@pytest.mark.parametrize(
    ("content", "more", "cause"),
    [
        (GOOD, OFF, "the weights of this model cannot be changed: the option variable_weights"),
        (npz(v=np.zeros((64, 64), np.float32)), CHANGEABLE, "update weight failed! Error is Common error code."),
        (
            b"this is no archive\n",
            CHANGEABLE,
            "expected an .npz of plain arrays: the file is of another kind or damaged",
        ),
        (b"", CHANGEABLE, "expected an .npz of plain arrays: "),
        (npy(), CHANGEABLE, "expected an .npz of plain arrays: "),
        (
            npz(w0=np.array([{"an": "object"}])),
            CHANGEABLE,
            "expected an .npz of plain arrays: the file contains Python objects",
        ),
        (GOOD[:-40], CHANGEABLE, "expected an .npz of plain arrays: "),
        (npz(), CHANGEABLE, "expected at least one array, got none"),
        (None, CHANGEABLE, "No such file or directory"),
    ],
    ids=["not variable", "other names", "text", "empty", "npy", "pickle", "truncated", "no arrays", "missing"],
)
def test_weights_that_cannot_be_taken_are_a_build_error(
    content: Optional[bytes], more: Tuple[str, ...], cause: str, card: Card, tmp_path: Path
) -> None:
    file = tmp_path / "weights.npz"
    if content is not None:
        file.write_bytes(content)
    card.start("w", *more, "--weights", str(file), model=models.mlp(tmp_path / "bundle.mindir", bundle=True))
    told = card.refused("w", Attach("", ONE))
    assert told.startswith(cause if cause.startswith(("the weights", "update")) else f"{file}: {cause}")


def test_weights_of_a_model_that_is_no_bundle_are_a_build_error(card: Card, tmp_path: Path) -> None:
    (tmp_path / "weights.npz").write_bytes(GOOD)
    card.start("w", *CHANGEABLE, "--weights", str(tmp_path / "weights.npz"))
    assert card.refused("w", Attach("", ONE)).startswith("update weight failed! Error is Common error code.")


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
def test_options_that_are_none_are_told_with_their_key(text: str, cause: str, card: Card) -> None:
    card.begin("h", "--options", text)
    broken, _ = card.daemon.hear("h", ProcessFailed)
    assert broken.reason.startswith(cause)
    assert card.daemon.stop("h") == exit_codes.CANNOT_BUILD


# --- the probe ------------------------------------------------------------------------------------------------


Ask = Callable[[str], Tuple[int, Dict[str, Any]]]


@pytest.fixture
def probe(nursery: ProgramForkServer, host: Host, tmp_path: Path) -> Ask:
    """Probe a device; give the exit status and what is told."""

    def probe(device: str) -> Tuple[int, Dict[str, Any]]:
        log = tmp_path / "probe.log"
        command = [sys.executable, "-m", "weightd_worker.device_probe", "--device", device]
        status = nursery.popen(command, log, environment(host)).wait()
        report: Dict[str, Any] = json.loads(log.read_text().splitlines()[-1])
        return status, report

    return probe


def test_a_card_tells_what_it_is(probe: Ask, host: Host) -> None:
    host.switch(soc_name="Ascend910C", context_mib=100)
    total = 32 * 1024 * MIB
    expected = {"total_bytes": total, "free_bytes": total - 100 * MIB, "soc": "Ascend910C", "devices": 2}
    assert probe("ascend:1") == (exit_codes.OK, expected)
    assert host.card_state(1).allocations == ()


@pytest.mark.parametrize(
    ("device", "switch", "error"),
    [
        ("ascend:2", {}, "device: there is no card 2; this process sees 2, counted from 0"),
        ("cpu", {}, "device: expected ascend:N, got 'cpu'"),
        ("npu:0", {}, "device: expected cpu, cpu:N or ascend:N, got 'npu:0'"),
        ("ascend:0", {"ascend": False}, "aclrtGetDeviceCount returned 507899: the driver rejected the call; "),
        ("ascend:0", {"libascendcl": False}, "libascendcl.so: cannot open shared object file: "),
        ("ascend:0", {"capacity_mib": 50}, "aclrtSetDevice returned 207001: the card has no memory left"),
        ("ascend:0", {"max_processes": 0}, "aclrtSetDevice returned 507899: the driver rejected the call; "),
    ],
)
def test_a_card_that_cannot_be_asked_is_an_error(
    device: str, switch: Dict[str, Any], error: str, host: Host, probe: Ask
) -> None:
    host.switch(**switch)
    status, report = probe(device)
    assert status == exit_codes.NO_ENGINE
    assert list(report) == ["error"]
    assert report["error"].startswith(error)


def test_without_the_library_the_probe_says_so(host: Host, tmp_path: Path) -> None:
    (tmp_path / "mindspore_lite.py").write_text("raise ImportError('libmindspore-lite.so: not found')")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    command = [sys.executable, "-m", "weightd_worker.device_probe", "--device", "ascend:0"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, check=False)
    assert done.returncode == exit_codes.NO_ENGINE
    assert json.loads(done.stdout) == {"error": "ImportError: libmindspore-lite.so: not found"}


_BENEATH = """
from weightd_worker.engines.mindspore_lite.acl import Acl
acl = Acl()
acl.initialize()
acl.initialize()
"""


def test_the_layer_beneath(nursery: ProgramForkServer, host: Host) -> None:
    program = nursery.start(host)
    facts = program.do(f"{_BENEATH}\nacl.bare_pid(), acl.device_count(), acl.soc_name()")
    assert facts == (program.pid + 100_000, 2, "Ascend910B3")
    refusal = program.refusal("acl.memory()")
    assert (refusal.kind, refusal.text) == ("AclError", "aclrtGetMemInfo returned 107002: no card is set")


def test_a_card_without_a_name_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(_: str) -> SimpleNamespace:
        return SimpleNamespace(aclrtGetSocName=lambda: None)

    monkeypatch.setattr(ctypes, "CDLL", load)
    with pytest.raises(AclError, match="the library reports no name for this card"):
        Acl().soc_name()
