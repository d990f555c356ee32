"""The corpus of the fuzzer on each change, without the fuzzer; and that a defect would be noticed."""

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
from weightd.daemon.config import load as product_config
from weightd.daemon.config.model import ModelConfig
from weightd.daemon.config.tables import Problems
from weightd.protocol import codec
from weightd.protocol.repeats import Repeats
from weightd.worker.pagesharing import store as product_store
from weightd.worker.pagesharing.store import OpenStore

FILES = sorted(path for path in seeds.CORPUS.glob("*/*") if path.is_file())


@pytest.mark.parametrize("file", FILES, ids=lambda file: f"{file.parent.name}/{file.name}")
def test_an_input_finds_nothing(file: Path) -> None:
    targets.load(file.parent.name).one_input(file.read_bytes())


@pytest.mark.parametrize("name", targets.NAMES)
def test_a_target_has_a_corpus(name: str) -> None:
    assert any(file.parent.name == name for file in FILES)
    assert all(len(file.read_bytes()) <= targets.load(name).max_bytes for file in FILES if file.parent.name == name)


@pytest.mark.parametrize("name", targets.NAMES)
@pytest.mark.parametrize("data", [b"", b"\0", b"\xff", b"\xff" * 100, bytes(100), bytes(range(256))])
def test_every_input_can_be_run(name: str, data: bytes) -> None:
    targets.load(name).one_input(data)


def test_every_message_of_the_wire_is_among_the_seeds() -> None:
    """Where one is missing: `python tests/fuzz/seeds.py`."""
    accepted: set[tuple[int, object]] = set()
    for file in FILES:
        if file.parent.name == "decoder":
            frames, table = decoder.read(file.read_bytes())
            outcome: object = decoder.decoded(frames, table)
            accepted.add((TABLES.index(table), type(outcome)))
    expected = {(number, cls) for number, table in enumerate(TABLES) for cls in table.values()}
    assert expected <= accepted
    assert any(cls is Refusal for _, cls in accepted)


def test_configurations_among_the_seeds_are_accepted() -> None:
    for name in ("smallest", "cpu", "cards"):
        product_config.load(seeds.CORPUS / "config" / name)


# --- defects ---------------------------------------------------------------------------------------------------------


def finds(target: str) -> type[BaseException] | None:
    """The first thing that the corpus of a target finds."""
    for file in FILES:
        if file.parent.name == target:
            try:
                targets.load(target).one_input(file.read_bytes())
            except Exception as error:  # noqa: BLE001 - an undeclared one is a finding as well
                return type(error)
    return None


def test_an_undeclared_error_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(*_: object) -> Any:
        raise KeyError

    with monkeypatch.context() as patch:
        patch.setattr(codec, "_unpack_header", broken)
        assert finds("decoder") is KeyError
        assert finds("repeats") is KeyError
    with monkeypatch.context() as patch:
        patch.setattr(product_store, "decode_header", broken)
        assert finds("store") is KeyError
    with monkeypatch.context() as patch:
        patch.setattr(product_config, "complete_model", broken)
        assert finds("config") is KeyError
    assert {finds(name) for name in targets.NAMES} == {None}


def test_a_decoder_that_does_not_measure_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def careless(tensors: object, frames: object) -> None:
        pass

    monkeypatch.setattr(codec, "_check_tensor_frames", careless)
    with pytest.raises(AssertionError):
        targets.load("decoder").one_input(seeds.seeds()["decoder/lengths"].replace(b"\x08\0\0\0", b"\x07\0\0\0", 1))


def test_a_message_that_is_not_what_was_sent_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(self: Repeats, header: bytes, start: int, end: int) -> Any:
        return "7" if end - start == 2 else 7

    monkeypatch.setattr(Repeats, "_unpack", forgetful)
    assert finds("repeats") is AssertionError


def test_an_index_that_is_not_the_file_s_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    honest = OpenStore.hashes

    def short(self: OpenStore) -> Any:
        return honest(self)[1:]

    monkeypatch.setattr(OpenStore, "hashes", short)
    assert finds("store") is AssertionError


def test_a_store_that_stays_open_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def forgetful(self: OpenStore) -> None:
        pass

    monkeypatch.setattr(OpenStore, "close", forgetful)
    assert finds("store") is AssertionError


def test_a_configuration_beyond_its_bounds_is_a_finding(monkeypatch: pytest.MonkeyPatch) -> None:
    def incomplete(name: str, config: ModelConfig, base: Path, problems: Problems) -> ModelConfig:
        return config

    monkeypatch.setattr(product_config, "complete_model", incomplete)
    assert finds("config") is AssertionError


# --- the command -----------------------------------------------------------------------------------------------------


def test_inputs_are_run_again_without_a_fuzzer(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    file = tmp_path / "crash-1"
    file.write_bytes(seeds.seeds()["decoder/status"])
    run.main(["decoder", str(file)])
    monkeypatch.setattr(codec, "_message", None)
    with pytest.raises(TypeError):
        run.main(["decoder", str(file)])


def test_without_a_fuzzer_it_says_how_to_get_one(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def none(name: str) -> None:
        pass

    monkeypatch.setattr(importlib.util, "find_spec", none)
    with pytest.raises(SystemExit):
        run.main(["decoder"])
    assert "make fuzz" in capsys.readouterr().err
