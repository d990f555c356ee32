"""Tests of the fuzzer's corpus without the fuzzer, and of the targets: they must detect injected defects."""

from __future__ import annotations

import importlib.util
from pathlib import Path
from typing import Any

import pytest

import run
import seeds
import targets
from targets import decoder
from targets.decoder import TABLES, Refusal
from weightd_daemon.config import load as product_config
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.zmq_proxy.zmtp import ZmtpConnection
from weightd_protocol import codec
from weightd_protocol.framing import FrameReader, Message
from weightd_protocol.messages.inference import RequestDescription
from weightd_worker.channels import requests
from weightd_worker.channels.requests import RequestReader
from weightd_worker.pagesharing import store as product_store
from weightd_worker.pagesharing.store import OpenStore

FILES = sorted(path for path in seeds.CORPUS.glob("*/*") if path.is_file())


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_input_has_no_finding(file: Path) -> None:
    targets.load(file.parent.name).one_input(file.read_bytes())


@pytest.mark.parametrize("name", targets.NAMES)
def test_target_has_a_corpus_and_accepts_any_bytes(name: str) -> None:
    target = targets.load(name)
    sizes = [file.stat().st_size for file in FILES if file.parent.name == name]
    assert 0 < max(sizes) <= target.max_bytes
    for data in (b"", b"\0", b"\xff", b"\xff" * 100, bytes(100), bytes(range(256))):
        target.one_input(data)


def test_seeds_include_every_message() -> None:
    """`python tests/fuzz/seeds.py` adds a missing one."""
    accepted: set[tuple[int, object]] = set()
    for file in FILES:
        if file.parent.name == "decoder":
            frames, table = decoder.read(file.read_bytes())
            outcome: object = decoder.decoded(frames, table)
            accepted.add((TABLES.index(table), type(outcome)))
    expected = {(number, cls) for number, table in enumerate(TABLES) for cls in table.values()}
    assert expected <= accepted
    assert any(cls is Refusal for _, cls in accepted)


def test_seed_configurations_are_valid() -> None:
    for name in ("smallest", "cpu", "cards"):
        product_config.load(seeds.CORPUS / "config" / name)


# --- defects ---------------------------------------------------------------------------------------------------------


def finds(target: str) -> type[BaseException] | None:
    """Return the type of the first finding in the corpus of a target."""
    for file in FILES:
        if file.parent.name == target:
            try:
                targets.load(target).one_input(file.read_bytes())
            except Exception as error:  # noqa: BLE001 - an undeclared one is a finding as well
                return type(error)
    return None


def broken(*_: object) -> Any:
    raise KeyError


def nothing(*_: object) -> None:
    pass


def anything(*_: object) -> bool:
    return True


def one(*_: object) -> int:
    return 1


def short(self: OpenStore) -> Any:
    return HONEST_HASHES(self)[1:]


def skipping(self: FrameReader, data: bytes, position: int, messages: list[Message]) -> int:
    return HONEST_FILL(self, b"?" + data[1:], position, messages)


def incomplete(config: ModelConfig, *_: object) -> ModelConfig:
    return config


HONEST_FILL = FrameReader._fill_frames  # pyright: ignore[reportPrivateUsage]
HONEST_HASHES = OpenStore.read_hashes

DEFECTS = [
    ("framing", FrameReader, "_next_frame", broken, KeyError),
    ("framing", FrameReader, "_fill_frames", skipping, AssertionError),
    ("zmtp", ZmtpConnection, "_on_frame", broken, KeyError),
    ("zmtp", ZmtpConnection, "_check_frame_header", anything, AssertionError),
    ("decoder", codec, "_unpack", broken, KeyError),
    ("channel", requests, "_split_envelope", broken, KeyError),
    ("channel", requests, "number_of", one, AssertionError),
    ("channel", RequestReader, "_is_allowed", anything, AssertionError),
    ("store", product_store, "decode_header", broken, KeyError),
    ("config", product_config, "complete_model", broken, KeyError),
    # A changed message, an index that differs from the file's, an open store, and exceeded limits.
    ("store", OpenStore, "read_hashes", short, AssertionError),
    ("store", OpenStore, "close", nothing, AssertionError),
    ("config", product_config, "complete_model", incomplete, AssertionError),
]


@pytest.mark.parametrize(("target", "where", "name", "defect", "error"), DEFECTS)
def test_detects_defect(
    monkeypatch: pytest.MonkeyPatch, target: str, where: Any, name: str, *, defect: Any, error: type[BaseException]
) -> None:
    assert finds(target) is None
    monkeypatch.setattr(where, name, defect)
    assert finds(target) is error


def test_detects_decoder_that_does_not_check_lengths(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(RequestDescription, "sizes", (16, 0, 7), raising=False)
    with pytest.raises(AssertionError):
        targets.load("decoder").one_input(seeds.seeds()["decoder/lengths"].replace(b"\x08\0\0\0", b"\x07\0\0\0", 1))


# --- the command -----------------------------------------------------------------------------------------------------


def test_runs_inputs_without_fuzzer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "crash-1"
    file.write_bytes(seeds.seeds()["decoder/status"])
    run.main(["decoder", str(file)])
    monkeypatch.setattr(codec, "_decode_message", None)
    with pytest.raises(TypeError):
        run.main(["decoder", str(file)])


def test_hint_without_fuzzer(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    monkeypatch.setattr(importlib.util, "find_spec", nothing)
    with pytest.raises(SystemExit):
        run.main(["decoder"])
    assert "make fuzz" in capsys.readouterr().err
