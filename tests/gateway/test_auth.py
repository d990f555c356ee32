"""Who is who: what proves most goes first, and nobody is somebody by default."""

from __future__ import annotations

import pytest

from weightd_gateway.auth import Authenticator, Caller, parse_bearer, token_digest
from weightd_protocol.errors import Unauthenticated

TOKEN = Caller("research", "a token")
CERTIFICATE = Caller("sales", "a certificate")
USER = Caller(None, "a user")
ANYBODY = Caller("guests", "anonymous")

KNOWN = Authenticator({token_digest("secret"): TOKEN}, {"shop": CERTIFICATE}, {1000: USER})


def test_a_token_goes_before_a_certificate_and_that_before_a_user() -> None:
    assert KNOWN.authenticate(token="secret", common_name="shop", uid=1000) == TOKEN
    assert KNOWN.authenticate(common_name="shop", uid=1000) == CERTIFICATE
    assert KNOWN.authenticate(uid=1000) == USER


def test_who_is_nobody_is_refused_and_told_how_to_be_somebody() -> None:
    with pytest.raises(Unauthenticated, match="authorization: Bearer"):
        KNOWN.authenticate()
    with pytest.raises(Unauthenticated):
        KNOWN.authenticate(common_name="stranger", uid=0)


def test_a_wrong_token_is_refused_whoever_sends_it() -> None:
    guests = Authenticator(KNOWN.tokens, KNOWN.certificates, KNOWN.users, ANYBODY)
    with pytest.raises(Unauthenticated):
        guests.authenticate(token="guess", common_name="shop", uid=1000)
    assert guests.authenticate() == ANYBODY
    assert guests.authenticate(uid=7) == ANYBODY
    assert guests.authenticate(uid=1000) == USER


@pytest.mark.parametrize("header", ["Bearer secret", "bearer  secret ", "BEARER secret"])
def test_the_token_of_a_header(header: str) -> None:
    assert parse_bearer(header) == "secret"


@pytest.mark.parametrize("header", ["", "secret", "Basic c2VjcmV0", "Bearer", "Bearer  "])
def test_a_header_without_one(header: str) -> None:
    with pytest.raises(Unauthenticated, match="Bearer TOKEN"):
        parse_bearer(header)
