from __future__ import annotations

import json
import os
import stat
from pathlib import Path
from unittest import mock

import pytest
import zmq

from weightctl import exit_codes
from weightd_common.curve_keys import read_public, read_secret

from .conftest import Ctl

pytestmark = pytest.mark.skipif(not zmq.has("curve"), reason="this ZeroMQ has no CURVE")


@pytest.fixture(autouse=True)
def _there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def mode(name: str) -> int:
    return stat.S_IMODE(Path(name).stat().st_mode)


def test_keys_are_a_pair_and_secret_key_is_private(alone: Ctl) -> None:
    before = os.umask(0)
    try:
        ran = alone("keygen", "server", "alice")
    finally:
        os.umask(before)
    assert (ran.status, ran.err) == (exit_codes.OK, "")
    for name in ("server", "alice"):
        secret, public = read_secret(Path(f"{name}.key")), read_public(Path(f"{name}.pub"))
        assert zmq.curve_public(secret.encode()).decode() == public
        assert (mode(f"{name}.key"), mode(f"{name}.pub")) == (0o600, 0o644)
        assert f"{name}.pub: public key, {public};" in ran.out
        assert secret not in ran.out
    assert read_public(Path("server.pub")) != read_public(Path("alice.pub"))


def test_public_key_is_readable_with_any_umask(alone: Ctl) -> None:
    before = os.umask(0o777)
    try:
        alone("keygen")
    finally:
        os.umask(before)
    assert (mode("weightd.key"), mode("weightd.pub")) == (0o600, 0o644)


@pytest.mark.parametrize("there", ["a.key", "a.pub"])
def test_overwrites_no_file_and_leaves_no_half_pair(alone: Ctl, there: str) -> None:
    for make in (lambda: Path(there).write_text("mine"), lambda: Path(there).symlink_to("b")):
        make()
        ran = alone("keygen", "a")
        assert (ran.status, ran.out) == (exit_codes.CANNOT_WRITE, "")
        assert ran.err == f"INTERNAL: {there}: File exists\n"
        assert [*Path().iterdir()] == [Path(there)]
        Path(there).unlink()


def test_json(alone: Ctl) -> None:
    [made] = json.loads(alone("--json", "keygen", "a").out)["keys"]
    assert made == {"name": "a", "secret": "a.key", "public": "a.pub", "public_key": read_public(Path("a.pub"))}


@pytest.mark.parametrize("name", ["none/a", "a\0b"])
def test_unwritable_directory(alone: Ctl, name: str) -> None:
    assert alone("keygen", name).status == exit_codes.CANNOT_WRITE


def test_writes_nothing_without_curve(alone: Ctl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "has", mock.Mock(return_value=False))
    ran = alone("keygen")
    assert ran == (
        exit_codes.UNAVAILABLE,
        "",
        "UNAVAILABLE: this libzmq was built without CURVE; install a pyzmq wheel, which includes CURVE\n",
    )
    assert [*Path().iterdir()] == []
