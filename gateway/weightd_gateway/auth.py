"""Authentication: maps a client's token, TLS certificate or Unix user to a caller, and the caller to a tenant.

The token file has one line for each token: the token's SHA-256 digest, a tenant and, optionally, a name for the log.
The file does not contain the tokens, so a reader of the file cannot use them.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from weightd_common.safe_open import read_regular
from weightd_protocol import limits
from weightd_protocol.errors import Unauthenticated
from weightd_protocol.schema import label


class Caller(NamedTuple):
    """The identity of an authenticated client.

    Attributes:
        tenant: the tenant whose quotas and models apply; None: the daemon serves the caller's requests under the
            identity with which the gateway itself connects.
        name: the caller's name in logs.
    """

    tenant: str | None
    name: str


_HOW_TO_AUTHENTICATE = (
    "send `authorization: Bearer TOKEN` with a token from the gateway's token file, or connect as a user or with a "
    "certificate from the gateway's configuration"
)


@dataclass(frozen=True)
class Authenticator:
    """Maps credentials to callers.

    Attributes:
        tokens: callers by the SHA-256 digest of their token.
        certificates: callers by the common name of a certificate that TLS has verified.
        users: callers by the uid of the peer of a Unix socket.
        anonymous: the caller of requests that have no token and come from no known certificate or user; None: the
            gateway rejects such requests.
    """

    tokens: Mapping[bytes, Caller]
    certificates: Mapping[str, Caller]
    users: Mapping[int, Caller]
    anonymous: Caller | None = None

    def authenticate(
        self, *, digest: bytes | None = None, common_name: str | None = None, uid: int | None = None
    ) -> Caller:
        """Return the caller for a client's credentials: by its token, else by the certificate, else by the uid.

        Args:
            digest: the digest of the client's token; None without a token.
            common_name: the common name of a certificate that TLS has verified.
            uid: the uid of the peer of a Unix socket.

        Raises:
            Unauthenticated: the token is unknown; or, without a token, certificate and uid are unknown and anonymous
                callers are not allowed.
        """
        caller = None
        if digest is not None:
            # The lookup compares digests instead of tokens, so the duration of the lookup reveals nothing about the
            # valid tokens.
            caller = self.tokens.get(digest)
            if caller is None:
                raise Unauthenticated("unknown token")
        if caller is None and common_name is not None:
            caller = self.certificates.get(common_name)
        if caller is None and uid is not None:
            caller = self.users.get(uid)
        caller = caller or self.anonymous
        if caller is None:
            raise Unauthenticated(f"no known credentials: {_HOW_TO_AUTHENTICATE}")
        return caller


def token_digest(token: str) -> bytes:
    """Return the SHA-256 digest of a token as bytes. A token file contains the digest in hexadecimal."""
    return hashlib.sha256(token.encode("utf-8", "surrogateescape")).digest()


def parse_bearer(authorization: str) -> str:
    """Return the token in the value of an `authorization` header.

    Raises:
        Unauthenticated: the header is not `Bearer TOKEN`.
    """
    scheme, _, token = authorization.strip().partition(" ")
    if scheme.lower() != "bearer" or not token.strip():
        raise Unauthenticated(f"invalid authorization header: {_HOW_TO_AUTHENTICATE}")
    return token.strip()


NO_TENANT = "-"
"""Written in a file instead of a tenant's name if the gateway sends a caller's requests under its own identity."""

_DIGEST = re.compile(r"[0-9a-fA-F]{64}")

# Maximum bytes of a token file; enough for hundreds of thousands of tokens.
_MAX_BYTES = 64 * 1024 * 1024


class TokenFileError(Exception):
    """A token file cannot be used; the text names the file, the line and the expected value.

    Attributes:
        problems: one text for each problem.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def read_tokens(path: Path) -> dict[bytes, Caller]:
    """Read a token file; return the callers by the SHA-256 digest of their token.

    Raises:
        TokenFileError: the file cannot be read, or a line is invalid.
    """
    try:
        text = read_regular(path, _MAX_BYTES).decode("utf-8-sig")
    except OSError as error:
        raise TokenFileError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TokenFileError(f"{path}: expected text in UTF-8") from None
    return parse_tokens(text, str(path))


def parse_tokens(text: str, path: str) -> dict[bytes, Caller]:
    """Parse the text of a token file; return the callers by the digest of their token. Error texts begin with `path`.

    Raises:
        TokenFileError: a line is invalid.
    """
    callers: dict[bytes, Caller] = {}
    problems: list[str] = []
    for number, words in _entries(text):
        problem = _check_entry(words) or ("duplicate token" if bytes.fromhex(words[0]) in callers else "")
        if problem:
            problems.append(f"{path}: line {number}: {problem}")
        else:
            callers[bytes.fromhex(words[0])] = parse_caller(
                words[1], words[2] if len(words) > 2 else f"token {words[0][:8]}"
            )
    if problems:
        raise TokenFileError(*problems)
    return callers


def parse_caller(tenant: str, name: str) -> Caller:
    """Return a caller for a tenant as written in a file: the tenant's name, or "-" for the gateway's own identity."""
    return Caller(None if tenant == NO_TENANT else tenant, name)


def _entries(text: str) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if words and not words[0].startswith("#"):
            yield number, words


def _check_entry(words: list[str]) -> str:
    if not 2 <= len(words) <= 3:
        return "expected SHA256 TENANT [NAME]"
    if not _DIGEST.fullmatch(words[0]):
        # The error text does not quote the invalid word, which may be a token instead of a digest.
        return "expected the sha256 of a token first, in 64 hexadecimal digits as printed by sha256sum"
    for what, word in zip(("tenant", "name"), words[1:], strict=False):
        if len(word.encode()) > limits.MAX_NAME_BYTES or not word.isprintable():
            return f"expected a {what} of at most {limits.MAX_NAME_BYTES} bytes, got {label(word)}"
    return ""
