"""Who asks: what a connection proves of its caller, and for which tenant of the daemon that one may ask."""

from __future__ import annotations

import hashlib
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from weightd_protocol.errors import Unauthenticated


class Caller(NamedTuple):
    """Who asks.

    Attributes:
        tenant: for whom the daemon is asked; None: for the gateway itself.
        name: for logs.
    """

    tenant: str | None
    name: str


_HOW_TO_AUTHENTICATE = (
    "send `authorization: Bearer TOKEN` with a token that the gateway knows, or come as a user, or with a certificate, "
    "that its configuration names"
)


@dataclass(frozen=True)
class Authenticator:
    """Who is who.

    Attributes:
        tokens: by the sha256 of the token.
        certificates: by the common name of a certificate that TLS has verified.
        users: by the number of the user at the other end of a unix socket.
        anonymous: who proves nothing; None: nobody.
    """

    tokens: Mapping[bytes, Caller]
    certificates: Mapping[str, Caller]
    users: Mapping[int, Caller]
    anonymous: Caller | None = None

    def authenticate(
        self, *, token: str | None = None, common_name: str | None = None, uid: int | None = None
    ) -> Caller:
        """Return who has proven this; a token goes before a certificate, and that before a user.

        Raises:
            Unauthenticated: nobody.
        """
        caller = None
        if token is not None:
            # No other time tells anything of a token than that of its digest.
            caller = self.tokens.get(token_digest(token))
            if caller is None:
                raise Unauthenticated("the token is none of the gateway's")
        if caller is None and common_name is not None:
            caller = self.certificates.get(common_name)
        if caller is None and uid is not None:
            caller = self.users.get(uid)
        caller = caller or self.anonymous
        if caller is None:
            raise Unauthenticated(f"the caller is not known: {_HOW_TO_AUTHENTICATE}")
        return caller


def token_digest(token: str) -> bytes:
    """Return what a file with tokens has of one."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def parse_bearer(authorization: str) -> str:
    """Return the token of a header `authorization`.

    Raises:
        Unauthenticated: it has none.
    """
    scheme, _, token = authorization.strip().partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise Unauthenticated(f"expected another authorization: {_HOW_TO_AUTHENTICATE}")
    return token.strip()
