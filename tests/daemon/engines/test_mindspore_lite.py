"""Tests of the MindSpore Lite options: validation in the configuration, and transfer to the worker."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from weightd_daemon.engines.mindspore_lite import MindSporeLiteOptions
from weightd_protocol.schema import FieldError, decode, describe_fields
from weightd_worker.engines.mindspore_lite.model import Options

CARDS = ["ascend:0", "ascend:1"]
ALL: dict[str, Any] = {
    "provider": "ge",
    "precision_mode": "preferred_optimal",
    "thread_affinity_mode": 2,
    "thread_affinity_cores": [0, 3],
    "inter_op_parallel": 2,
    "parallel_workers": 4,
    "max_shape": {"x": [16, 3, 224, 224]},
    "config_file": "/c/lite.ini",
    "dec_key_file": "/c/key",
    "dec_mode": "SM4-CBC",
    "variable_weights": True,
}


def options(**values: Any) -> MindSporeLiteOptions:
    return decode(MindSporeLiteOptions, values)


def refusal(call: Any, *arguments: Any) -> str:
    """Return the text of the only error."""
    try:
        [error] = call(*arguments)
    except FieldError as raised:
        error = raised
    return str(error)


def test_worker_parses_all_options_of_daemon() -> None:
    assert describe_fields(MindSporeLiteOptions) == describe_fields(Options)
    parsed = Options.from_mapping(json.loads(options(**ALL).to_json()))
    assert dataclasses.asdict(parsed) == dataclasses.asdict(options(**ALL))
    assert all(getattr(parsed, key) != getattr(Options(), key) for key in ALL), (
        "an option has its default value in this test"
    )


def test_json_contains_only_options_with_values() -> None:
    assert options().to_json() == "{}"
    assert options(thread_affinity_cores=[4], dec_mode="AES-GCM").to_json() == '{"thread_affinity_cores": [4]}'


@pytest.mark.parametrize(
    ("values", "text"),
    [
        ({"provider": "acl"}, 'provider: expected one of "", ge'),
        ({"precision_mode": "fp16"}, "precision_mode: expected one of "),
        ({"thread_affinity_mode": 3}, "thread_affinity_mode: expected integer, 0 to 2"),
        ({"thread_affinity_cores": [0, -1]}, "thread_affinity_cores[1]: expected integer"),
        ({"variable_weights": 1}, "variable_weights: expected boolean"),
        ({"dec_key": "secret"}, "dec_key: unknown field"),
        ({"config_file": "a\0b"}, "config_file: expected text without a NUL character, got 'a\\x00b'"),
        ({"dec_key_file": "~/key"}, "dec_key_file: expected a path without ~"),
    ],
)
def test_rejects_invalid_value_with_key(values: dict[str, Any], text: str) -> None:
    assert refusal(decode, MindSporeLiteOptions, values).startswith(text)


def test_resolves_paths_relative_to_configuration() -> None:
    given = options(config_file="lite.ini", dec_key_file="../key")
    done = given.resolve_paths(Path("/etc/weightd"))
    assert (done.config_file, done.dec_key_file) == ("/etc/weightd/lite.ini", "/etc/weightd/../key")
    assert options(config_file="/abs/lite.ini").resolve_paths(Path("/etc")).config_file == "/abs/lite.ini"
    assert options().resolve_paths(Path("/etc")) == options()


@pytest.mark.parametrize(
    ("values", "devices", "sharing"),
    [
        ({}, ["cpu"], "on"),
        ({}, CARDS, "on"),
        ({"thread_affinity_cores": [1], "inter_op_parallel": 2, "dec_key_file": "/k"}, ["cpu"], "on"),
        ({"thread_affinity_mode": 1, "config_file": "/c"}, ["cpu"], "off"),
        ({"precision_mode": "enforce_fp32", "config_file": "/c"}, CARDS, "on"),
        ({"provider": "ge"}, CARDS, "off"),
        ({"variable_weights": True, "dec_key_file": "/k", "dec_mode": "AES-CBC"}, CARDS, "off"),
        ({"dec_key_file": "/k"}, CARDS, "auto"),
    ],
)
def test_accepts_compatible_options(values: dict[str, Any], devices: list[str], sharing: str) -> None:
    assert list(options(**values).problems(devices, sharing)) == []


AFFINITY = {"thread_affinity_mode": 1, "thread_affinity_cores": [0]}
OFF = 'set sharing = "off"'
NO_CPU = "has no effect on the CPU, only on a card"
NO_CARD = "has no effect on a card, only on the CPU"
TWO = {"parallel_workers": 2}
OWN = "expected 1 on a card, where each parallel worker would load its own weights"
SLOW = "parallel workers are not bound to the slow cores; set 0 or 1"
NOT_SHARED = {
    "provider": ({"provider": "ge"}, 'weights cannot be shared with the provider "ge"'),
    "dec_key_file": ({"dec_key_file": "/k"}, "the weights of an encrypted model cannot be shared"),
    "variable_weights": ({"variable_weights": True}, "variable weights cannot be shared"),
}


@pytest.mark.parametrize(
    ("values", "devices", "key", "text"),
    [
        ({"provider": "ge"}, ["cpu"], "provider", NO_CPU),
        ({"precision_mode": "enforce_fp16"}, ["cpu"], "precision_mode", NO_CPU),
        ({"variable_weights": True}, ["cpu"], "variable_weights", NO_CPU),
        ({"thread_affinity_mode": 1}, CARDS, "thread_affinity_mode", NO_CARD),
        ({"thread_affinity_cores": [0]}, CARDS, "thread_affinity_cores", NO_CARD),
        ({"inter_op_parallel": 1}, CARDS, "inter_op_parallel", NO_CARD),
        ({"max_shape": {"x": [4]}}, CARDS, "max_shape", NO_CARD),
        ({"parallel_workers": 2}, CARDS, "parallel_workers", OWN),
        (
            {**TWO, "dec_key_file": "/k"},
            ["cpu"],
            "dec_key_file",
            "parallel workers cannot use a key; set parallel_workers = 1",
        ),
        ({**TWO, "thread_affinity_mode": 2}, ["cpu"], "thread_affinity_mode", SLOW),
        (AFFINITY, ["cpu"], "thread_affinity_mode", "has no effect beside thread_affinity_cores"),
        ({"dec_mode": "AES-CBC"}, CARDS, "dec_mode", "has no effect without dec_key_file"),
        *(
            (
                values,
                CARDS,
                key,
                f"{text}: {'the provider' if key == 'provider' else 'MindSpore Lite'} does not export them; {OFF}",
            )
            for key, (values, text) in NOT_SHARED.items()
        ),
    ],
)
def test_rejects_options_without_effect(values: dict[str, Any], devices: list[str], key: str, text: str) -> None:
    assert refusal(options(**values).problems, devices, "on") == f"{key}: {text}"


# --- files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_accepts_valid_files(mode: int, tmp_path: Path) -> None:
    for name in ("lite.ini", "key"):
        (tmp_path / name).write_text("[ascend_context]\n# shareable_weight_pid_list=1\nx=shareable_weight_pid_list\n")
    (tmp_path / "key").chmod(mode)
    (tmp_path / "link").symlink_to("lite.ini")
    files = options(config_file="link", dec_key_file="key").resolve_paths(tmp_path)
    assert list(files.file_problems()) == list(options().file_problems()) == []


@pytest.mark.parametrize("key", ["config_file", "dec_key_file"])
def test_missing_or_irregular_file_is_reported(key: str, tmp_path: Path) -> None:
    for path, text in ((tmp_path / "gone", "No such file or directory"), (tmp_path, "expected a regular file")):
        assert refusal(options(**{key: str(path)}).file_problems) == f"{key}: {path}: {text}"


@pytest.mark.parametrize("line", ["shareable_weight_pid_list=1", " shareable_weight_mem_handle =7"])
def test_config_file_cannot_set_sharing_keys(line: str, tmp_path: Path) -> None:
    file = tmp_path / "lite.ini"
    file.write_text(f"[ascend_context]\n{line}\n")
    text = f"{line.partition('=')[0].strip()} is set by weightd; remove it from the file"
    assert refusal(options(config_file=str(file)).file_problems) == f"config_file: {file}: {text}"


@pytest.mark.parametrize(
    ("section", "line", "text"),
    [
        (
            "ascend_context",
            "provider = ge",
            "provider = ge selects the graph engine, which weightd has to know; set *",
        ),
        (
            " ascend_context ",
            " provider=ge ",
            "provider = ge selects the graph engine, which weightd has to know; set *",
        ),
        (
            "ascend_context",
            "rank_table_file=/r.json",
            "rank_table_file makes the process a rank; remove it from the file, and use [models.NAME*",
        ),
    ],
)
def test_config_file_cannot_set_provider_or_rank_table(section: str, line: str, text: str, tmp_path: Path) -> None:
    file = tmp_path / "lite.ini"
    file.write_text(f"# of the library's own\n[{section}]\nprecision_mode=enforce_fp16\n{line}\n")
    problem = refusal(options(config_file=str(file)).file_problems)
    assert problem.startswith(f"config_file: {file}: {text.rstrip('*')}")


@pytest.mark.parametrize(
    ("content", "provider"),
    [
        ("[ascend_context]\nprovider=ge\n", "ge"),
        ("[ascend_context]\n# provider=ge\nprovider=\n", ""),
        ("[gpu_context]\nprovider=ge\nrank_table_file=/r\n", ""),
    ],
)
def test_config_file_may_repeat_provider(content: str, provider: str, tmp_path: Path) -> None:
    file = tmp_path / "lite.ini"
    file.write_text(content)
    assert list(options(config_file=str(file), provider=provider).file_problems()) == []


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o700, 0o4600])
def test_key_file_must_be_private(mode: int, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(b"0123456789abcdef")
    file.chmod(mode)
    problem = refusal(options(dec_key_file=str(file)).file_problems)
    assert problem == f"dec_key_file: {file}: expected mode 0600 or 0400, got {mode:04o}"


def test_rejects_empty_linked_or_foreign_key_file(tmp_path: Path) -> None:
    file, link = tmp_path / "key", tmp_path / "link"
    link.symlink_to(file)
    file.touch(0o600)

    def problem(path: Path) -> str:
        return refusal(options(dec_key_file=str(path)).file_problems)

    assert problem(file).endswith(": the file is empty")
    file.write_bytes(b"0123456789abcdef")
    assert problem(link).endswith(": expected a regular file")
    if os.geteuid() == 0:
        os.chown(file, 12345, -1)
        assert "expected a file of this user or root, got one of uid 12345" in problem(file)
