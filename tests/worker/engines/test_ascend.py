"""Tests of workers and holders on a simulated Ascend card, in real processes that start as the daemon starts them."""

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
    Attach,
    Attached,
    Build,
    Built,
    Hello,
    PredictFailed,
    PredictResult,
    ProcessFailed,
)
from weightd_protocol.messages.worker_common import (
    AllowAttach,
    AttachAllowed,
    DeviceMemory,
    SelfTestCases,
    SharingTraits,
)
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
    """Holder and workers on a host with two simulated cards, as the daemon sees them; "h" is the holder."""

    def __init__(self, daemon: Daemon, host: Host, path: Path) -> None:
        self.daemon = daemon
        self.host = host
        self.path = path

    def begin(
        self, name: str, *more: str, model: Optional[Path] = None, device: str = "ascend:0", **variables: str
    ) -> None:
        variables = {**environment(self.host), **variables}
        self.daemon.start(name, model or self.path, *more, engine="mindspore_lite", device=device, variables=variables)

    def start(self, name: str, *more: str, **options: Any) -> Hello:
        self.begin(name, *more, **options)
        return self.daemon.receive(name, Hello)[0]

    def build(self, *pids: str) -> Built:
        self.daemon.send("h", Build(pids))
        return self.daemon.receive("h", Built)[0]

    def attach(self, name: str, built: Built) -> Attached:
        self.daemon.send(name, Attach(built.handle, built.selftest_cases))
        return self.daemon.receive(name, Attached)[0]

    def pair(self, *more: str, **options: Any) -> Built:
        """Start a holder and the worker "w"; build the model with "w" in the list of processes that may attach."""
        self.start("h", *more, **options)
        return self.build(self.start("w", *more, **options).engine_pid)

    def private(self, model: Path, *more: str) -> Built:
        """Build a model and attach the worker "w" with sharing off."""
        built = self.pair(*OFF, *more, model=model)
        self.attach("w", built)
        return built

    def allow(self, *pids: str) -> str:
        """Have the holder allow more processes to attach; return the error, or an empty string."""
        self.daemon.send("h", AllowAttach(pids))
        return self.daemon.receive("h", AttachAllowed)[0].error

    def refused(self, name: str, order: object, status: int = exit_codes.CANNOT_BUILD) -> str:
        """Return the reason why the child rejects the order; check that the child then exits with this status."""
        self.daemon.send(name, order)
        broken, _ = self.daemon.receive(name, ProcessFailed)
        assert self.daemon.stop(name) == status
        return broken.reason

    def check(self, name: str, x: Any, model: Optional[Path] = None, key: bytes = b"") -> None:
        """Check that the worker "w" answers as the reference model does."""
        self.daemon.ask(name, len(x), x=x)
        answer, right = self.daemon.answer(name, len(x)), models.answer(model or self.path, x, key)
        assert (answer.dtype, answer.tolist()) == (right.dtype, right.tolist())

    def fails(self, name: str, number: int, **inputs: Any) -> PredictFailed:
        """Send a request that fails and return its error message."""
        self.daemon.ask(name, number, **inputs)
        failed, _ = self.daemon.receive(name, PredictFailed)
        assert failed.request == number
        return failed


@pytest.fixture(scope="session")
def nursery() -> Generator[ProgramForkServer, None, None]:
    """Return a fork server that has imported the modules of a child, because imports take most of a child's start."""
    with ProgramForkServer("weightd_worker.__main__", "weightd_worker.device_probe") as nursery:
        yield nursery


@pytest.fixture
def host(tmp_path: Path) -> Host:
    return Host(tmp_path / "host", cards=2)


@pytest.fixture
def card(daemon: Daemon, nursery: ProgramForkServer, host: Host, tmp_path: Path) -> Card:
    daemon.popen, daemon.parent = nursery.popen, nursery.pid
    return Card(daemon, host, models.mlp(tmp_path / "mlp.mindir"))


def options(**values: Any) -> Tuple[str, str]:
    return "--options", json.dumps(values)


def rows(count: int) -> Any:
    return np.random.RandomState(count).standard_normal((count, 64)).astype(np.float32)


# --- life cycle -----------------------------------------------------------------------------------------------


def test_holder_and_workers_share_one_copy(card: Card) -> None:
    hellos = {name: card.start(name) for name in ("h", "w1", "w2")}
    for name, hello in hellos.items():
        # In a container, too, the driver's process id differs from the one that the process sees.
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


def test_reports_free_card_memory_after_each_build(card: Card) -> None:
    built = card.pair(device="ascend:1")
    attached = card.attach("w", built)
    assert built.device
    assert attached.device
    assert built.device.total_bytes == 32 * 1024 * MIB
    assert built.device.free_bytes < (32 * 1024 - 200) * MIB
    assert 200 * MIB < built.device.free_bytes - attached.device.free_bytes < 300 * MIB
    assert (card.host.card_state(0).allocations, card.host.copies_of_weights(1)) == ((), 1)


def test_model_without_free_dimension(card: Card, tmp_path: Path) -> None:
    fixed = models.mlp(tmp_path / "fixed.mindir", batch=3)
    built = card.pair(model=fixed)
    assert (built.inputs[0].shape, built.selftest_cases) == ((3, 64), ({"x": (3, 64)},))
    assert card.attach("w", built).selftest_digest == built.selftest_digest
    card.check("w", rows(3), fixed)


def test_selftest_digest_matches_cpu(card: Card) -> None:
    """The simulator computes the same bits as the CPU, unlike a card. The test shows that digests are compared."""
    card.start("h", device="cpu")
    on_cpu = card.build()
    assert on_cpu.selftest_cases == ({"x": (1, 64)}, {"x": (2, 64)})
    assert on_cpu.device is None
    card.start("w")
    attached = card.attach("w", dataclasses.replace(on_cpu, handle=""))
    assert attached.selftest_digest == on_cpu.selftest_digest
    assert (attached.shared_bytes, attached.note) == (0, "weights are not shared: the holder has no handle")


# --- permission to attach -------------------------------------------------------------------------------------


def test_rejects_process_that_is_not_listed(card: Card) -> None:
    built = card.pair()
    card.start("stranger")
    cause = card.refused("stranger", Attach(built.handle, built.selftest_cases))
    assert cause.startswith("build_from_file failed! Error is Common error code.: acl rt mem import from shareable ")
    assert card.attach("w", built).selftest_digest == built.selftest_digest


def test_failed_import_never_counts_as_success(card: Card) -> None:
    """After a failed import the library runs the model with id 0 of this process. So a process builds only once."""
    card.host.switch(first_model_id=0)
    card.start("h")
    card.start("w")
    built = card.build("1")
    assert "import from shareable handle failed" in card.refused("w", Attach(built.handle, built.selftest_cases))
    card.start("w2")
    card.attach("w2", dataclasses.replace(built, handle=""))
    cause = card.refused("w2", Attach(built.handle, built.selftest_cases))
    assert cause == "this process has built a model on a card before; only a new process can build another"


def test_holder_allows_later_process(card: Card) -> None:
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
def test_holder_survives_failed_allow(card: Card, switch: Dict[str, Any], error: str) -> None:
    built = card.pair()
    card.host.switch(**switch)
    assert card.allow("123") == error
    assert card.attach("w", built).selftest_digest == built.selftest_digest
    assert card.daemon.stop("h") == exit_codes.OK


@pytest.mark.parametrize("pid", ["0", "-1", "12abc", " 1", "2147483648", "1,2"])
def test_checks_pid_before_library_call(card: Card, pid: str) -> None:
    expected = f"pid: expected a decimal number from 1 to 2147483647, got '{pid}'"
    card.start("h")
    assert card.allow("1") == "this process has exported no weights"
    card.build("1")
    assert card.allow(pid) == expected
    card.start("h2")
    assert card.refused("h2", Build(("1", pid))) == expected
    assert card.host.count("build") == 1


@pytest.mark.parametrize("handle", ["0", "-1", "12abc", "0x10", " 7", "1.5", "18446744073709551616", "/s/store"])
def test_checks_handle_before_library_call(card: Card, handle: str) -> None:
    """The library would treat 0 and 0x10 as no handle, 12abc as 12 and -1 as the largest number."""
    card.start("w")
    expected = f"handle: expected a decimal number from 1 to 18446744073709551615, got '{handle}'"
    assert card.refused("w", Attach(handle, ONE)) == expected
    assert card.host.count("build") == 0


# --- wrong weights and failing cards --------------------------------------------------------------------------


def test_digest_reveals_overwritten_weights(card: Card, tmp_path: Path) -> None:
    other = models.mlp(tmp_path / "other.mindir", seed=1)
    hellos = {"h": card.start("h"), "good": card.start("good"), "bad": card.start("bad", model=other)}
    assert hellos["bad"].sha256 != hellos["good"].sha256 == hellos["h"].sha256
    built = card.build(hellos["good"].engine_pid, hellos["bad"].engine_pid)
    assert card.attach("good", built).selftest_digest == built.selftest_digest
    assert card.attach("bad", built).selftest_digest != built.selftest_digest
    # The simulator does overwrite the shared weights: every process now has the other model's.
    card.check("good", rows(1), other)


def test_digest_reveals_wrong_results(card: Card) -> None:
    built = card.pair()
    card.host.fault("predict", "garbage", "importer")
    assert card.attach("w", built).selftest_digest != built.selftest_digest


def test_next_holder_continues_selftest_search(
    card: Card,
) -> None:
    """A second build in the same holder would take the memory twice and change the handle."""
    card.host.fault("predict", "fail", "holder", times=2)
    card.start("h")
    pid = card.start("w").engine_pid
    cause = card.refused("h", Build((pid,)))
    assert cause.startswith("the model does not run on the self-test input x [1, 64]: predict failed!")
    card.start("h2")
    card.daemon.send(
        "h2", Build((pid,), failed_cases=tuple({"x": (size, 64)} for size in (1, 2, 4, 8, 16, 32, 48, 64)))
    )
    built, _ = card.daemon.receive("h2", Built)
    assert (built.selftest_cases, built.selftest_digest) == ((), "")
    assert built.selftest_note.startswith("the model runs on none of 9 inputs generated from its signature")
    assert card.attach("w", built).selftest_digest == ""
    card.check("w", rows(1))
    assert (card.host.count("build"), card.host.copies_of_weights(0)) == (3, 1)


def test_failed_selftest_ends_worker(card: Card) -> None:
    built = card.pair()
    card.host.fault("predict", "fail", "importer")
    assert card.refused("w", Attach(built.handle, ONE)).startswith("predict failed!: Execute Model Failed | ")


def test_failed_predict_ends_worker(card: Card) -> None:
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
def test_full_card_is_reported_and_memory_freed(
    card: Card, switch: Dict[str, Any], order: object, cause: str, no_room: bool
) -> None:
    card.host.switch(**switch)
    card.start("w")
    card.daemon.send("w", order)
    broken, _ = card.daemon.receive("w", ProcessFailed)
    assert cause in broken.reason
    assert broken.is_out_of_memory == no_room
    assert card.daemon.stop("w") == exit_codes.CANNOT_BUILD
    assert card.host.card_state(0).allocations == ()


def test_reports_missing_driver_before_build(card: Card) -> None:
    card.host.switch(ascend=False)
    card.begin("h")
    broken, _ = card.daemon.receive("h", ProcessFailed)
    assert broken.reason.startswith(f"{sys.executable}: the library has no pid for this process: ")
    assert "set_env.sh" in broken.reason
    assert broken.reason.endswith(": dlopen libascend_kernel_plugin.so failed")
    assert card.daemon.stop("h") == exit_codes.NO_ENGINE


def test_serves_without_libascendcl(card: Card) -> None:
    card.host.switch(libascendcl=False)
    built = card.pair()
    assert built.device is None
    assert card.attach("w", built).device is None
    assert "WARNING weightd.worker: cannot read the card's memory: libascendcl.so: " in card.daemon.log("h")


# --- models that the library does not share, without an error --------------------------------------------------


@pytest.mark.parametrize("case", ["ge", "bundle", "encrypted", "multi-backend"])
def test_rejects_model_without_exported_weights(case: str, card: Card, tmp_path: Path) -> None:
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


def test_sharing_off_gives_each_process_a_copy(card: Card) -> None:
    for name in ("h", "w"):
        hello = card.start(name, *OFF)
        assert (hello.sharing_traits, hello.engine_pid) == (FREE, str(card.daemon.children[name].pid))
    built = card.build("1", "2")
    assert (built.handle, built.shared_bytes, built.note) == ("", 0, "sharing is off")
    # With sharing off a handle can only belong to another holder.
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


def test_build_without_processes_is_private(card: Card) -> None:
    card.start("h")
    built = card.build()
    assert (built.handle, built.note) == ("", "weights are not shared: the build order lists no process to share with")


# --- sizes that a model was converted for (gears) -------------------------------------------------------------


@pytest.mark.parametrize("has_gear_info", [False, True])
def test_size_without_gear_fails_only_the_request(card: Card, tmp_path: Path, has_gear_info: bool) -> None:
    path = models.mlp(tmp_path / "geared.mindir", gears=(4, 8), has_gear_info=has_gear_info)
    built = card.private(path)
    assert built.gears == (((4,), (8,)) if has_gear_info else ())
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


def test_accepts_answers_within_tolerance(card: Card) -> None:
    card.host.switch(noise=1e-6)
    card.start("h", "--tolerance", "1e-5")
    built = card.build(*(card.start(name, "--tolerance", "1e-5").engine_pid for name in ("near", "far")))
    assert built.selftest_note == ""
    assert card.attach("near", built).selftest_digest == built.selftest_digest != ""
    card.host.switch(noise=1e-3)
    assert card.attach("far", built).selftest_digest != built.selftest_digest
    card.start("exact")
    card.daemon.send("exact", Build(()))
    assert "selftest_tolerance is 0: raise it" in card.daemon.receive("exact", Built)[0].selftest_note


def test_rejects_inputs_of_different_batches(card: Card, tmp_path: Path) -> None:
    path = models.two_inputs(tmp_path / "two.mindir", gears=(1, 2))
    card.private(path)
    a, b = np.ones((2, 4), np.float32), np.ones((1, 4), np.float32)
    failed = card.fails("w", 1, a=a, b=b)
    assert (failed.code, failed.is_exiting) == ("INVALID_ARGUMENT", False)
    assert failed.error == "inputs: expected one batch for all, got {'a': 2, 'b': 1}: the model has gears for it"
    card.daemon.ask("w", 2, a=a, b=a)
    result, frames = card.daemon.receive("w", PredictResult)
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
def test_parses_gears_recorded_by_converter(dims: str, shape: str, gears: Tuple[Tuple[int, ...], ...]) -> None:
    inputs = [TensorSignature("x", "FP32", (-1, 64)), TensorSignature("y", "FP32", (-1, 4))]
    assert parse_gears(inputs if "y" in shape else inputs[:1], dims, shape) == gears


# --- datatypes ------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("dtype", "datatype"),
    [("FLOAT16", "FP16"), ("INT8", "INT8"), ("INT32", "INT32"), ("INT64", "INT64"), ("UINT8", "UINT8")],
)
def test_serves_other_datatypes(card: Card, tmp_path: Path, dtype: str, datatype: str) -> None:
    path = models.mlp(tmp_path / "other.mindir", dtype=dtype)
    built = card.private(path)
    assert (built.inputs[0].datatype, built.outputs[0].datatype, built.selftest_digest != "") == (
        datatype,
        datatype,
        True,
    )
    card.check("w", np.abs(rows(3) * 4).astype(dtype.lower()), path)


def test_rejects_bf16(card: Card, tmp_path: Path) -> None:
    """The library's Python interface reports no datatype for bfloat16 and returns its bytes as float16."""
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
def test_missing_card_does_not_mean_card_0(card: Card, device: str, variables: Any, cause: str) -> None:
    card.start("h", device=device, **variables)
    assert card.refused("h", Build(("1",))) == f"device: {cause}"
    assert card.host.count("build") == 0


def test_counts_only_visible_cards(card: Card) -> None:
    """Card numbers are positions in the list of visible cards, as in the driver; no other card is used."""
    built = card.pair(ASCEND_RT_VISIBLE_DEVICES="1")
    assert card.attach("w", built).selftest_digest == built.selftest_digest
    assert (card.host.copies_of_weights(1), card.host.card_state(0).allocations) == (1, ())


def test_hint_for_card_that_cannot_export(card: Card) -> None:
    card.host.switch(exports=False, soc_name="Ascend310P3")
    card.start("h")
    cause = card.refused("h", Build(("1",)))
    assert "aclrtMemExportToShareableHandle failed! ret:207000" in cause
    hint = "; Ascend310P3 cannot share memory between processes: set sharing = 'off' (310P and vNPU are known for it)"
    assert cause.endswith(hint)
    card.private(card.path)


# --- duties that the library leaves to its caller ---------------------------------------------------------------

_TWO_ANSWERS = """
from weightd_worker.engines import ENGINES
from weightd_worker.engines.engine import BuildSettings
engine = ENGINES["mindspore_lite"](BuildSettings(1, "ascend:0", False))
engine.build(path)
names = [[each.name for each in tensors] for tensors in engine.signature]
names, engine.predict({"b": b, "a": a}), engine.predict({"b": a, "a": b})
"""


def test_binds_inputs_by_name_and_copies_outputs(nursery: ProgramForkServer, host: Host, tmp_path: Path) -> None:
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


def test_serves_encrypted_model_without_logging_key(card: Card, tmp_path: Path) -> None:
    locked = models.mlp(tmp_path / "locked.mindir", key=KEY)
    card.private(locked, *options(dec_key_file=key_file(tmp_path, mode=0o400)))
    card.check("w", rows(2), locked, KEY)
    assert KEY.decode() not in card.daemon.log("w")


def test_wrong_key_is_a_build_error(card: Card, tmp_path: Path) -> None:
    locked = models.mlp(tmp_path / "locked.mindir", key=KEY)
    card.start("w", *OFF, *options(dec_key_file=key_file(tmp_path, b"x" * 16)), model=locked)
    assert "Decrypt failed!" in card.refused("w", Attach("", ONE))


# --- replaced weights -----------------------------------------------------------------------------------------


CHANGEABLE = (*OFF, *options(variable_weights=True))


def test_replaces_weights_from_file(card: Card, tmp_path: Path) -> None:
    bundle = models.mlp(tmp_path / "bundle.mindir", bundle=True)
    wanted = models.mlp(tmp_path / "wanted.mindir", seed=7)
    weights = models.weights(wanted)
    # The library itself does not accept arrays in this memory order.
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
def test_invalid_weights_are_a_build_error(
    content: Optional[bytes], more: Tuple[str, ...], cause: str, card: Card, tmp_path: Path
) -> None:
    file = tmp_path / "weights.npz"
    if content is not None:
        file.write_bytes(content)
    card.start("w", *more, "--weights", str(file), model=models.mlp(tmp_path / "bundle.mindir", bundle=True))
    error = card.refused("w", Attach("", ONE))
    assert error.startswith(cause if cause.startswith(("the weights", "update")) else f"{file}: {cause}")


def test_weights_for_a_plain_model_are_a_build_error(card: Card, tmp_path: Path) -> None:
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
def test_invalid_options_name_their_key(text: str, cause: str, card: Card) -> None:
    card.begin("h", "--options", text)
    broken, _ = card.daemon.receive("h", ProcessFailed)
    assert broken.reason.startswith(cause)
    assert card.daemon.stop("h") == exit_codes.CANNOT_BUILD


# --- the probe ------------------------------------------------------------------------------------------------


Ask = Callable[[str], Tuple[int, Dict[str, Any]]]


@pytest.fixture
def probe(nursery: ProgramForkServer, host: Host, tmp_path: Path) -> Ask:
    """Return a function that probes a device and returns the exit status and the report."""

    def probe(device: str) -> Tuple[int, Dict[str, Any]]:
        log = tmp_path / "probe.log"
        command = [sys.executable, "-m", "weightd_worker.device_probe", "--device", device]
        status = nursery.popen(command, log, environment(host)).wait()
        report: Dict[str, Any] = json.loads(log.read_text().splitlines()[-1])
        return status, report

    return probe


def test_probe_describes_card(probe: Ask, host: Host) -> None:
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
def test_probe_reports_error(device: str, switch: Dict[str, Any], error: str, host: Host, probe: Ask) -> None:
    host.switch(**switch)
    status, report = probe(device)
    assert status == exit_codes.NO_ENGINE
    assert list(report) == ["error"]
    assert report["error"].startswith(error)


def test_probe_reports_missing_library(host: Host, tmp_path: Path) -> None:
    (tmp_path / "mindspore_lite.py").write_text("raise ImportError('libmindspore-lite.so: not found')")
    path = os.pathsep.join([str(tmp_path), *filter(None, sys.path)])
    command = [sys.executable, "-m", "weightd_worker.device_probe", "--device", "ascend:0"]
    done = subprocess.run(command, env={**os.environ, "PYTHONPATH": path}, stdout=subprocess.PIPE, check=False)
    assert done.returncode == exit_codes.NO_ENGINE
    assert json.loads(done.stdout) == {"error": "ImportError: libmindspore-lite.so: not found"}


_ACL_CALLS = """
from weightd_worker.engines.mindspore_lite.acl import Acl
acl = Acl()
acl.initialize()
acl.initialize()
"""


def test_acl_calls(nursery: ProgramForkServer, host: Host) -> None:
    program = nursery.start(host)
    facts = program.do(f"{_ACL_CALLS}\nacl.bare_pid(), acl.device_count(), acl.soc_name()")
    assert facts == (program.pid + 100_000, 2, "Ascend910B3")
    refusal = program.refusal("acl.memory()")
    assert (refusal.kind, refusal.text) == ("AclError", "aclrtGetMemInfo returned 107002: no card is set")


def test_card_without_name_is_an_error(monkeypatch: pytest.MonkeyPatch) -> None:
    def load(_: str) -> SimpleNamespace:
        return SimpleNamespace(aclrtGetSocName=lambda: None)

    monkeypatch.setattr(ctypes, "CDLL", load)
    with pytest.raises(AclError, match="the library reports no name for this card"):
        Acl().soc_name()
