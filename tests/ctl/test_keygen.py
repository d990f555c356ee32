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


def test_the_keys_are_a_pair_and_the_secret_one_is_nobody_elses(alone: Ctl) -> None:
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


def test_a_public_key_may_be_read_whatever_the_umask(alone: Ctl) -> None:
    before = os.umask(0o777)
    try:
        alone("keygen")
    finally:
        os.umask(before)
    assert (mode("weightd.key"), mode("weightd.pub")) == (0o600, 0o644)


@pytest.mark.parametrize("there", ["a.key", "a.pub"])
def test_no_file_is_overwritten_and_no_half_of_a_pair_is_left(alone: Ctl, there: str) -> None:
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
def test_where_nothing_can_be_written(alone: Ctl, name: str) -> None:
    assert alone("keygen", name).status == exit_codes.CANNOT_WRITE


def test_without_curve_nothing_is_written(alone: Ctl, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(zmq, "has", mock.Mock(return_value=False))
    ran = alone("keygen")
    assert ran == (
        exit_codes.UNAVAILABLE,
        "",
        "UNAVAILABLE: this libzmq was built without CURVE; install a pyzmq wheel, which includes CURVE\n",
    )
    assert [*Path().iterdir()] == []
