"""The options of MindSpore Lite: what the configuration takes, what it refuses, and what a worker is told."""

from __future__ import annotations

import dataclasses
import json
import os
from pathlib import Path
from typing import Any

import pytest

from weightd.daemon.engines.mindspore_lite import MindSporeLiteOptions
from weightd.protocol.schema import FieldError, decode, describe
from weightd.worker.engines.mindspore_lite.options import Options

CARDS = ["ascend:0", "ascend:1"]
ALL: dict[str, Any] = {
    "provider": "ge",
    "precision_mode": "preferred_optimal",
    "thread_affinity_mode": 2,
    "thread_affinity_cores": [0, 3],
    "inter_op_parallel": 2,
    "config_file": "/c/lite.ini",
    "rank_table_file": "/c/ranks.json",
    "dec_key_file": "/c/key",
    "dec_mode": "SM4-CBC",
    "variable_weights": True,
}


def options(**values: Any) -> MindSporeLiteOptions:
    return decode(MindSporeLiteOptions, values)


def refusal(call: Any, *arguments: Any) -> str:
    """The one thing that is wrong."""
    try:
        [error] = call(*arguments)
    except FieldError as raised:
        error = raised
    return str(error)


def test_a_worker_takes_what_the_daemon_has() -> None:
    assert describe(MindSporeLiteOptions) == describe(Options)
    told = Options.of(json.loads(options(**ALL).json()))
    assert dataclasses.asdict(told) == dataclasses.asdict(options(**ALL))
    assert all(getattr(told, key) != getattr(Options(), key) for key in ALL), "each is tried with another value"


def test_only_what_was_given_is_told() -> None:
    assert options().json() == "{}"
    assert options(thread_affinity_cores=[4], dec_mode="AES-GCM").json() == '{"thread_affinity_cores": [4]}'


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
def test_a_value_that_is_none_is_refused_by_its_key(values: dict[str, Any], text: str) -> None:
    assert refusal(decode, MindSporeLiteOptions, values).startswith(text)


def test_paths_are_relative_to_the_configuration() -> None:
    given = options(config_file="lite.ini", rank_table_file="/abs/ranks.json", dec_key_file="../key")
    done = given.complete(Path("/etc/weightd"))
    assert (done.config_file, done.rank_table_file) == ("/etc/weightd/lite.ini", "/abs/ranks.json")
    assert done.dec_key_file == "/etc/weightd/../key"
    assert options().complete(Path("/etc")) == options()


@pytest.mark.parametrize(
    ("values", "devices", "sharing"),
    [
        ({}, ["cpu"], "on"),
        ({}, CARDS, "on"),
        ({"thread_affinity_cores": [1], "inter_op_parallel": 2, "dec_key_file": "/k"}, ["cpu"], "on"),
        ({"thread_affinity_mode": 1, "config_file": "/c"}, ["cpu"], "off"),
        ({"precision_mode": "enforce_fp32", "config_file": "/c"}, CARDS, "on"),
        ({"provider": "ge", "rank_table_file": "/r"}, CARDS, "off"),
        ({"variable_weights": True, "dec_key_file": "/k", "dec_mode": "AES-CBC"}, CARDS, "off"),
        ({"dec_key_file": "/k"}, CARDS, "auto"),
    ],
)
def test_what_goes_together(values: dict[str, Any], devices: list[str], sharing: str) -> None:
    assert list(options(**values).problems(devices, sharing)) == []


NO_CPU = "it has no effect on the cpu, only on a card"
NO_CARD = "it has no effect on a card, only on the cpu"
OFF = 'set sharing = "off"'


@pytest.mark.parametrize(
    ("values", "devices", "text"),
    [
        ({"provider": "ge"}, ["cpu"], f"provider: {NO_CPU}"),
        ({"precision_mode": "enforce_fp16"}, ["cpu"], f"precision_mode: {NO_CPU}"),
        ({"rank_table_file": "/r"}, ["cpu"], f"rank_table_file: {NO_CPU}"),
        ({"variable_weights": True}, ["cpu"], f"variable_weights: {NO_CPU}"),
        ({"thread_affinity_mode": 1}, CARDS, f"thread_affinity_mode: {NO_CARD}"),
        ({"thread_affinity_cores": [0]}, CARDS, f"thread_affinity_cores: {NO_CARD}"),
        ({"inter_op_parallel": 1}, CARDS, f"inter_op_parallel: {NO_CARD}"),
        (
            {"thread_affinity_mode": 1, "thread_affinity_cores": [0]},
            ["cpu"],
            "thread_affinity_mode: it has no effect beside thread_affinity_cores",
        ),
        ({"rank_table_file": "/r"}, CARDS, 'rank_table_file: only the provider "ge" reads it'),
        ({"dec_mode": "AES-CBC"}, CARDS, "dec_mode: it has no effect without dec_key_file"),
        (
            {"provider": "ge"},
            CARDS,
            f'provider: weights cannot be shared with the provider "ge": it exports none; {OFF}',
        ),
        (
            {"dec_key_file": "/k"},
            CARDS,
            f"dec_key_file: the weights of an encrypted model cannot be shared: the library exports none; {OFF}",
        ),
        (
            {"variable_weights": True},
            CARDS,
            f"variable_weights: weights that can be changed cannot be shared: the library exports none; {OFF}",
        ),
    ],
)
def test_what_would_have_no_effect_is_refused(values: dict[str, Any], devices: list[str], text: str) -> None:
    told = refusal(options(**values).problems, devices, "on")
    assert told == text


# --- files ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("mode", [0o600, 0o400])
def test_files_as_they_have_to_be(mode: int, tmp_path: Path) -> None:
    for name in ("lite.ini", "ranks.json", "key"):
        (tmp_path / name).write_text("[ascend_context]\n# shareable_weight_pid_list=1\nx=shareable_weight_pid_list\n")
    (tmp_path / "key").chmod(mode)
    (tmp_path / "link").symlink_to("lite.ini")
    files = options(config_file="link", rank_table_file="ranks.json", dec_key_file="key").complete(tmp_path)
    assert list(files.file_problems()) == list(options().file_problems()) == []


@pytest.mark.parametrize("key", ["config_file", "rank_table_file", "dec_key_file"])
def test_a_file_that_is_not_there_or_none(key: str, tmp_path: Path) -> None:
    gone = tmp_path / "gone"
    assert refusal(options(**{key: str(gone)}).file_problems) == (f"{key}: {gone}: No such file or directory")
    assert refusal(options(**{key: str(tmp_path)}).file_problems) == (f"{key}: {tmp_path}: expected a regular file")


@pytest.mark.parametrize("line", ["shareable_weight_pid_list=1", " shareable_weight_mem_handle =7"])
def test_a_configuration_that_decides_who_shares(line: str, tmp_path: Path) -> None:
    file = tmp_path / "lite.ini"
    file.write_text(f"[ascend_context]\n{line}\n")
    name = line.partition("=")[0].strip()
    assert refusal(options(config_file=str(file)).file_problems) == (
        f"config_file: {file}: {name} is set by weightd; remove it from the file"
    )


@pytest.mark.parametrize("mode", [0o644, 0o640, 0o700, 0o4600])
def test_a_key_that_others_may_read(mode: int, tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.write_bytes(b"0123456789abcdef")
    file.chmod(mode)
    told = refusal(options(dec_key_file=str(file)).file_problems)
    assert told == f"dec_key_file: {file}: expected mode 0600 or 0400, got {mode:04o}"


def test_a_key_that_is_empty_a_link_or_a_strangers(tmp_path: Path) -> None:
    file = tmp_path / "key"
    file.touch(0o600)
    assert refusal(options(dec_key_file=str(file)).file_problems).endswith(": the file is empty")
    file.write_bytes(b"0123456789abcdef")
    link = tmp_path / "link"
    link.symlink_to(file)
    assert refusal(options(dec_key_file=str(link)).file_problems).endswith(": expected a regular file")
    if os.geteuid() == 0:
        os.chown(file, 12345, -1)
        assert "expected a file of this user or root, got one of uid 12345" in refusal(
            options(dec_key_file=str(file)).file_problems
        )
