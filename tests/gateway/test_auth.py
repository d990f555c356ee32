"""Tests of authentication: the strongest credentials win, and there is no anonymous access by default."""

from __future__ import annotations

import hashlib
import os
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightd_gateway.auth import (
    Authenticator,
    Caller,
    TokenFileError,
    parse_bearer,
    parse_tokens,
    read_tokens,
    token_digest,
)
from weightd_protocol.errors import Unauthenticated

TOKEN = Caller("research", "a token")
CERTIFICATE = Caller("sales", "a certificate")
USER = Caller(None, "a user")
ANYBODY = Caller("guests", "anonymous")

KNOWN = Authenticator({token_digest("secret"): TOKEN}, {"shop": CERTIFICATE}, {1000: USER})


def test_order_of_credentials() -> None:
    assert KNOWN.authenticate(digest=token_digest("secret"), common_name="shop", uid=1000) == TOKEN
    assert KNOWN.authenticate(common_name="shop", uid=1000) == CERTIFICATE
    assert KNOWN.authenticate(uid=1000) == USER


def test_rejects_unknown_caller_with_a_hint() -> None:
    with pytest.raises(Unauthenticated, match="authorization: Bearer"):
        KNOWN.authenticate()
    with pytest.raises(Unauthenticated):
        KNOWN.authenticate(common_name="stranger", uid=0)


def test_rejects_wrong_token_despite_other_credentials() -> None:
    guests = Authenticator(KNOWN.tokens, KNOWN.certificates, KNOWN.users, ANYBODY)
    with pytest.raises(Unauthenticated):
        guests.authenticate(digest=token_digest("guess"), common_name="shop", uid=1000)
    assert guests.authenticate() == ANYBODY
    assert guests.authenticate(uid=7) == ANYBODY
    assert guests.authenticate(uid=1000) == USER


@pytest.mark.parametrize("header", ["Bearer secret", "bearer  secret ", "BEARER secret"])
def test_parses_bearer_header(header: str) -> None:
    assert parse_bearer(header) == "secret"


@pytest.mark.parametrize("header", ["", "secret", "Basic c2VjcmV0", "Bearer", "Bearer  "])
def test_rejects_header_without_token(header: str) -> None:
    with pytest.raises(Unauthenticated, match="Bearer TOKEN"):
        parse_bearer(header)


ONE = hashlib.sha256(b"one").hexdigest()
TWO = hashlib.sha256(b"two").hexdigest()


def test_reads_callers(tmp_path: Path) -> None:
    path = tmp_path / "tokens"
    path.write_text(f"# of the shop\n\n{ONE} research alice\n  {TWO.upper()}  -\n", "utf-8")
    assert read_tokens(path) == {
        bytes.fromhex(ONE): Caller("research", "alice"),
        bytes.fromhex(TWO): Caller(None, f"token {TWO[:8].upper()}"),
    }


@pytest.mark.parametrize(
    ("line", "problem"),
    [
        (ONE, "expected SHA256 TENANT"),
        (f"{ONE} research alice bob", "expected SHA256 TENANT"),
        (f"{ONE[1:]} research", "expected the sha256 of a token first, in 64 hexadecimal digits"),
        (f"{ONE} {'x' * 257}", "expected a tenant of at most 256 bytes"),
        (f"{ONE} research a\x07b", "expected a name of at most 256 bytes"),
    ],
)
def test_error_has_line_number(line: str, problem: str) -> None:
    with pytest.raises(TokenFileError, match=f"^tokens: line 2: {problem}"):
        parse_tokens(f"{TWO} research\n{line}\n", "tokens")


def test_rejects_duplicate_token() -> None:
    with pytest.raises(TokenFileError, match="line 2: duplicate token"):
        parse_tokens(f"{ONE} research\n{ONE.upper()} sales\n", "tokens")


def test_reports_all_errors() -> None:
    with pytest.raises(TokenFileError) as caught:
        parse_tokens(f"x\n{ONE} research\ny\n", "tokens")
    assert len(caught.value.problems) == 2


def test_error_does_not_contain_token() -> None:
    with pytest.raises(TokenFileError) as caught:
        parse_tokens("my-secret-token research\n", "tokens")
    assert "secret" not in str(caught.value)


def test_unreadable_file(tmp_path: Path) -> None:
    with pytest.raises(TokenFileError, match="No such file"):
        read_tokens(tmp_path / "none")
    os.mkfifo(tmp_path / "pipe")
    with pytest.raises(TokenFileError, match="expected a regular file"):
        read_tokens(tmp_path / "pipe")
    with (tmp_path / "huge").open("wb") as file:
        file.truncate(2**40)
    with pytest.raises(TokenFileError, match="expected a file of at most 67,108,864 bytes"):
        read_tokens(tmp_path / "huge")
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    with pytest.raises(TokenFileError, match="expected text in UTF-8"):
        read_tokens(tmp_path / "bytes")


@given(st.text(max_size=300))
def test_parses_or_rejects_any_text(text: str) -> None:
    try:
        callers = parse_tokens(text, "tokens")
    except TokenFileError:
        return
    assert all(len(each) == 32 for each in callers)
