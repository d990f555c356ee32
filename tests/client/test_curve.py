from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from weightd import Client, InvalidArgument
from weightd.address import read_keys

ADDRESS = "tcp://127.0.0.1:1"


@pytest.fixture
def pair(tmp_path: Path) -> tuple[Path, Path]:
    made = tmp_path / "ann"
    subprocess.run([sys.executable, "-m", "weightctl", "keygen", str(made)], check=True, stdout=subprocess.DEVNULL)
    return Path(f"{made}.key"), Path(f"{made}.pub")


def test_keys_are_those_of_the_files_and_the_secret_one_is_never_shown(pair: tuple[Path, Path]) -> None:
    secret, public = pair
    keys = read_keys(secret, public)
    assert keys is not None
    assert keys.secret_key in secret.read_text()
    assert keys.server_key in public.read_text()
    assert keys.secret_key not in f"{keys} {keys!r}"


def test_without_files_there_are_no_keys() -> None:
    assert read_keys(None, None) is None


def test_one_key_without_the_other_and_the_wrong_file_are_told(pair: tuple[Path, Path]) -> None:
    secret, public = pair
    swapped = public.with_name("swapped.key")
    swapped.write_bytes(public.read_bytes())
    swapped.chmod(0o600)
    for given, text in (
        ((None, public), "key, the client's secret one, is missing"),
        ((secret, None), "server_key, the listener's public one, is missing"),
        ((swapped, public), "expected a secret key, got a public one"),
        ((secret, secret), "expected a public key, got a secret one"),
        ((secret.with_name("none"), public), "none: "),
    ):
        with pytest.raises(InvalidArgument, match=text):
            Client(ADDRESS, key=given[0], server_key=given[1])


def test_a_secret_that_others_may_read_is_not_used(pair: tuple[Path, Path]) -> None:
    secret, public = pair
    secret.chmod(0o640)
    with pytest.raises(InvalidArgument, match="0600"):
        Client(ADDRESS, key=secret, server_key=public)
