from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest
import zmq
from hypothesis import given
from hypothesis import strategies as st
from zmq.utils import z85

from weightd_common.curve_keys import PUBLIC, SECRET, KeyFileError, format_key_file, is_key, read_public, read_secret

KEY = "rq:rM>}U?@Lns47E1%kR.o@n%FcmmsL/@{H8]yf7"
FORM = "KEY with a KEY of 40 Z85 characters, as weightctl keygen writes it"


@pytest.fixture
def file(tmp_path: Path) -> Path:
    path = tmp_path / "a.key"
    path.touch(0o600)
    return path


def refusal(read: Any, path: Path) -> str:
    """Return why a file is rejected, without the file name at the beginning."""
    with pytest.raises(KeyFileError) as caught:
        read(path)
    text = str(caught.value)
    assert text.startswith(f"{path}: ")
    assert KEY not in text
    return text[len(f"{path}: ") :]


@given(st.binary(min_size=32, max_size=32))
def test_any_32_bytes_in_z85_are_a_key(content: bytes) -> None:
    assert is_key(z85.encode(content).decode("ascii"))


@pytest.mark.parametrize("text", ["", KEY[:-1], f"{KEY}a", KEY.replace("r", " "), "#" * 40, KEY.replace("r", "ä")])
def test_rejects_invalid_key(text: str) -> None:
    assert not is_key(text)


def test_reads_written_key(file: Path) -> None:
    for kind, read in ((PUBLIC, read_public), (SECRET, read_secret)):
        file.write_text(format_key_file(kind, KEY, "of alice", "second comment line"))
        assert read(file) == KEY
    file.write_text(f"\n# old\n  {PUBLIC}\t{KEY}  \r\n\n")
    assert read_public(file) == KEY


@pytest.mark.skipif(not zmq.has("curve"), reason="this ZeroMQ has no CURVE")
def test_accepts_keys_of_zeromq() -> None:
    assert all(is_key(each.decode("ascii")) for each in zmq.curve_keypair())


@pytest.mark.parametrize(
    "content",
    [b"", b"# nothing\n", KEY.encode(), f"{PUBLIC} {KEY}\n{PUBLIC} {KEY}\n".encode(), f"{PUBLIC} {KEY[1:]}".encode(),
     f"other-key {KEY}".encode(), f"{PUBLIC} {KEY} x".encode(), b"\xff\x00" * 50, b"\n" * 5000 + KEY.encode()],
)  # fmt: skip
def test_rejects_file_without_key(file: Path, content: bytes) -> None:
    file.write_bytes(content)
    assert refusal(read_public, file) == f"expected a line {PUBLIC} {FORM}"


def test_distinguishes_secret_and_public_keys(file: Path) -> None:
    file.write_text(format_key_file(SECRET, KEY))
    text = "expected a public key, got a secret one; weightctl keygen writes the other to .pub"
    assert refusal(read_public, file) == text
    file.write_text(format_key_file(PUBLIC, KEY))
    assert refusal(read_secret, file).startswith("expected a secret key, got a public one; ")


def test_unreadable_files(tmp_path: Path) -> None:
    assert refusal(read_public, tmp_path / "none") == "No such file or directory"
    assert refusal(read_public, tmp_path) == "expected a file"
    assert refusal(read_public, tmp_path / "a\0b") == "embedded null byte"
    os.mkfifo(str(tmp_path / "pipe"))
    assert refusal(read_secret, tmp_path / "pipe") == "expected a file"


def test_secret_key_must_be_private(file: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file.write_text(format_key_file(SECRET, KEY))
    for mode in (0o600, 0o400):
        file.chmod(mode)
        assert read_secret(file) == KEY
    for mode in (0o640, 0o604, 0o610, 0o602):
        file.chmod(mode)
        reason = refusal(read_secret, file)
        assert reason.startswith(f"expected mode 0600 or 0400, got 0{mode:o}: ")
        assert reason.endswith("chmod 0600 it")
    file.chmod(0o600)
    if os.geteuid() == 0:
        os.chown(str(file), 4711, -1)
        assert read_secret(file) == KEY  # Root may read any file.
        monkeypatch.setattr(os, "geteuid", lambda: 4712)
        text = "expected a file of root or of user 4712, which reads the key, got one of user 4711; chown it"
        assert refusal(read_secret, file) == text
