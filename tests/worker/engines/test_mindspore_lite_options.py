"""Tests of the settings that the engine passes to MindSpore Lite, with a fake library that records them."""

from __future__ import annotations

import os
import re
import sys
import types
from pathlib import Path
from typing import Any, ClassVar, Dict, List

import numpy as np
import pytest

from weightd_protocol.messages.worker_common import DeviceMemory
from weightd_worker.engines import ENGINES
from weightd_worker.engines.engine import (
    SHARING_IS_OFF,
    AttachRefused,
    BuildError,
    BuildSettings,
    Engine,
    EngineMissing,
)
from weightd_worker.engines.mindspore_lite import acl, ascend

Calls = List[Dict[str, Any]]


class Library(types.ModuleType):
    """A fake mindspore_lite 2.7: each build appends its arguments to `calls`; `info` is the result of
    get_model_info."""

    __version__ = "2.7.0"

    def __init__(self) -> None:
        super().__init__("mindspore_lite")
        self.calls: Calls = []
        self.info = {"current_pid": "4711", "shareable_weight_mem_handle": "12345678901234567890"}
        library = self

        class Context:
            def __init__(self) -> None:
                self.target: List[str] = ["cpu"]
                self.cpu = types.SimpleNamespace()
                self.ascend = types.SimpleNamespace()

        class Model:
            def build_from_file(self, path: str, kind: object, context: Context, **more: Any) -> None:
                sides = {"cpu": vars(context.cpu), "ascend": vars(context.ascend)}
                library.calls.append({"target": context.target, **sides, **more})

            def get_inputs(self) -> List[object]:
                return []

            get_outputs = get_inputs

            def get_model_info(self, key: str) -> str:
                return library.info.get(key, "")

        self.Context = Context
        self.Model: Any = Model
        self.ModelType = types.SimpleNamespace(MINDIR=0)


@pytest.fixture
def library(monkeypatch: pytest.MonkeyPatch) -> Library:
    library = Library()
    monkeypatch.setitem(sys.modules, "mindspore_lite", library)
    return library


def make(device: str, *, sharing: bool = True, **options: Any) -> Engine:
    return ENGINES["mindspore_lite"](BuildSettings(3, device, sharing, options))


def build_settings(library: Library, device: str, **options: Any) -> Dict[str, Any]:
    """Build a model without sharing and return the settings that the library received."""
    make(device, sharing=False, **options).build("/m/x.mindir")
    (call,) = library.calls
    return call


# --- options --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("device", "options", "side"),
    [
        # Without options the engine passes only settings that the oldest library supports.
        ("cpu", {}, {"thread_num": 3}),
        ("cpu", {"thread_affinity_mode": 2}, {"thread_num": 3, "thread_affinity_mode": 2}),
        ("cpu", {"thread_affinity_cores": [4, 6]}, {"thread_num": 3, "thread_affinity_core_list": [4, 6]}),
        ("cpu", {"inter_op_parallel": 2}, {"thread_num": 3, "inter_op_parallel_num": 2}),
        ("ascend:5", {}, {"device_id": 5}),
        ("ascend:1", {"provider": "ge"}, {"device_id": 1, "provider": "ge"}),
        ("ascend:1", {"precision_mode": "enforce_fp32"}, {"device_id": 1, "precision_mode": "enforce_fp32"}),
    ],
)
def test_passes_options(device: str, options: Dict[str, Any], side: Dict[str, Any], library: Library) -> None:
    kind = device.partition(":")[0]
    assert build_settings(library, device, **options) == {"target": [kind], "cpu": {}, "ascend": {}, kind: side}


def test_passes_sharing_configuration(library: Library) -> None:
    most = "18446744073709551615"
    make("ascend:0").build("/m", pids=("1", "007", "2147483647"))
    make("ascend:0").build("/m", handle=most)
    assert [call["config_dict"]["ascend_context"] for call in library.calls] == [
        {"shareable_weight_pid_list": "1,7,2147483647"},
        {"shareable_weight_mem_handle": most},
    ]


@pytest.mark.parametrize("device", ["cpu", "ascend:0"])
def test_passes_config_file(device: str, library: Library, tmp_path: Path) -> None:
    file = tmp_path / "lite.ini"
    file.write_text("[ascend_context]\nmodel_cache_mode=mem_opt\n# shareable_weight_pid_list=1\n")
    assert build_settings(library, device, config_file=str(file))["config_path"] == str(file)


@pytest.mark.parametrize("line", ["shareable_weight_pid_list=1,2", "  shareable_weight_mem_handle = 7"])
def test_rejects_config_file_with_sharing_keys(line: str, library: Library, tmp_path: Path) -> None:
    file = tmp_path / "lite.ini"
    file.write_text(f"[ascend_context]\nplugin_custom_ops=All\n{line}\n")
    key = line.partition("=")[0].strip()
    with pytest.raises(BuildError, match=rf"^options\.config_file: .*lite.ini: {key} is set by weightd; remove it"):
        make("ascend:0", config_file=str(file)).build("/m", handle="7")
    assert library.calls == []


def test_error_names_missing_file(library: Library, tmp_path: Path) -> None:
    for option in ("config_file", "dec_key_file"):
        given: Any = {option: str(tmp_path / "gone")}
        engine = make("cpu", **given)
        with pytest.raises(BuildError, match=rf"^options\.{option}: .*gone: No such file or directory$"):
            engine.build("/m")


# --- the key --------------------------------------------------------------------------------------------------


@pytest.fixture
def key(tmp_path: Path) -> Path:
    file = tmp_path / "key"
    file.write_bytes(b"0123\0\n9")
    file.chmod(0o600)
    return file


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_key_is_the_whole_file(mode: int, library: Library, key: Path) -> None:
    key.chmod(mode)
    call = build_settings(library, "ascend:0", dec_key_file=str(key), dec_mode="SM4-CBC")
    assert (call["dec_key"], call["dec_mode"]) == (b"0123\0\n9", "SM4-CBC")


def refusal_of(key: Path, library: Library) -> str:
    with pytest.raises(BuildError, match=r"^options\.dec_key_file: ") as info:
        make("cpu", dec_key_file=str(key)).build("/m")
    assert library.calls == []
    return str(info.value)


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o604, 0o700, 0o200, 0o4600])
def test_rejects_key_readable_by_others(mode: int, library: Library, key: Path) -> None:
    key.chmod(mode)
    assert re.search("expected mode 0600 or 0400|Permission denied", refusal_of(key, library))


def test_rejects_invalid_key_file(library: Library, key: Path, tmp_path: Path) -> None:
    for content in (b"", bytes(5000)):
        key.write_bytes(content)
        assert "expected a key of 1 to " in refusal_of(key, library)
    assert "Is a directory" in refusal_of(tmp_path, library)
    os.mkfifo(str(tmp_path / "pipe"), 0o600)
    assert "expected a regular file" in refusal_of(tmp_path / "pipe", library)
    key.write_bytes(b"0123456789abcdef")
    (tmp_path / "link").symlink_to(key)
    assert "symbolic links" in refusal_of(tmp_path / "link", library)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_rejects_key_of_another_user(library: Library, key: Path) -> None:
    os.chown(str(key), 12345, -1)
    assert "expected a file of this user or root" in refusal_of(key, library)


# --- versions and numbers -------------------------------------------------------------------------------------


def test_library_without_sharing_serves_private_weights(library: Library) -> None:
    del library.Model.get_model_info
    library.__version__ = "2.0.0"
    with pytest.raises(EngineMissing, match=r"^mindspore_lite 2\.0\.0 shares no weights .*install 2\.7 or later, or"):
        make("ascend:0")
    alone = make("ascend:0", sharing=False)
    assert alone.sharing.current_pid() == str(os.getpid())
    alone.build("/m", pids=("1",))
    assert "config_dict" not in library.calls[0]
    assert alone.sharing.export("/s") == SHARING_IS_OFF


@pytest.mark.parametrize("pid", ["", "-1", "12 ", "x"])
def test_process_without_driver_pid_cannot_share(pid: str, library: Library) -> None:
    library.info["current_pid"] = pid
    with pytest.raises(EngineMissing, match=r"^the library has no pid for this process"):
        make("ascend:0")
    assert make("ascend:0", sharing=False).sharing.current_pid() == str(os.getpid())


@pytest.mark.parametrize("handle", ["", "0", "-1", "7x", "0x7", " 7", "18446744073709551616"])
def test_invalid_handle_is_an_error(handle: str, library: Library) -> None:
    library.info["shareable_weight_mem_handle"] = handle
    engine = make("ascend:0")
    engine.build("/m", pids=("1",))
    with pytest.raises(BuildError, match=r"without exporting its weights, got handle '"):
        engine.sharing.export("/s")
    with pytest.raises(AttachRefused, match="this process has exported no weights"):
        engine.sharing.allow(["1"])


@pytest.mark.parametrize(
    ("files", "mib"),
    [
        ({"x.mindir": 1}, 2),
        ({"x.mindir": 2 << 20}, 4),  # The library adds one block even to an exact multiple.
        ({"x_graph.mindir": 100, "x_variables/data_0": 5 << 20}, 6),
        ({}, 2),
    ],
)
def test_estimates_shared_bytes_with_library_rounding(
    files: Dict[str, int], mib: int, library: Library, tmp_path: Path
) -> None:
    (tmp_path / "x_variables").mkdir()
    for name, size in files.items():
        (tmp_path / name).write_bytes(bytes(size))
    engine = make("ascend:0")
    engine.build(str(tmp_path / next(iter(files), "gone.mindir")), pids=("1",))
    assert engine.sharing.export("/s").shared_bytes == mib << 20


# --- the driver's interface -----------------------------------------------------------------------------------


def test_process_builds_only_once(library: Library) -> None:
    engine = make("ascend:0")
    assert not engine.can_rebuild
    engine.build("/m", pids=("1",))
    with pytest.raises(BuildError, match="this process has built a model on a card before"):
        engine.build("/m", pids=("1",))


class FakeAcl:
    """A fake libascendcl with one card."""

    done: ClassVar[List[str]]

    def device_count(self) -> int:
        return 1

    def set_device(self, device: int) -> None:
        self.done.append(f"set_device {device}")

    def allow(self, handle: int, pids: List[int]) -> None:
        self.done.append(f"allow {handle} {pids}")

    def memory(self) -> DeviceMemory:
        return DeviceMemory(10, 4)


def test_rejects_missing_card_and_selects_card(library: Library, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(FakeAcl, "done", [], raising=False)
    for module in (ascend, ascend):
        monkeypatch.setattr(module, "Acl", FakeAcl)
    with pytest.raises(BuildError, match="device: there is no card 1; this process sees 1, counted from 0"):
        make("ascend:1").build("/m")
    engine = make("ascend:0")
    engine.build("/m", pids=("1",))
    handle = engine.sharing.export("/s").handle
    engine.sharing.allow(["2", "3"])
    assert FakeAcl.done == ["set_device 0", f"allow {handle} [2, 3]"]
    assert engine.memory() == DeviceMemory(10, 4)


def test_rejects_weight_updates_that_crash_the_library(library: Library) -> None:
    engine = make("ascend:0", sharing=False, variable_weights=True)
    engine.build("/m")
    with pytest.raises(BuildError, match="the file contains no weights"):
        engine.update_weights({})
    with pytest.raises(BuildError, match="variable_weights is not set"):
        make("ascend:0").update_weights({"w": np.zeros(1)})


def test_acl_error_has_call_code_and_hint() -> None:
    error = acl.AclError("aclrtX", 107002, "no card is set")
    assert (error.call, error.code, error.hint) == ("aclrtX", 107002, "no card is set")
    assert str(error) == "aclrtX returned 107002: no card is set"
    assert str(acl.AclError("aclrtX", 9, "")) == "aclrtX returned 9"
    assert str(acl.AclError("aclrtX", None, "missing")) == "aclrtX: missing"
