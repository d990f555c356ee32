"""Authentication: the caller of a connection or token, and the tenant of the daemon for which the caller may ask.

The file with the tokens of callers has a line for each, with the sha256 of the token, a tenant and a name. The tokens
themselves are nowhere: whoever reads the file cannot use it.
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


NO_TENANT = "-"
"""In the place of a tenant: the gateway itself asks."""

_DIGEST = re.compile(r"[0-9a-fA-F]{64}")

# Of a file: hundreds of thousands of tokens.
_MAX_BYTES = 64 * 1024 * 1024


class TokenFileError(Exception):
    """The file cannot be used; the text names file, line and what was expected.

    Attributes:
        problems: each of them.
    """

    def __init__(self, *problems: str) -> None:
        super().__init__("\n".join(problems))
        self.problems = problems


def read_tokens(path: Path) -> dict[bytes, Caller]:
    """Return who the tokens of a file belong to, by the sha256 of each.

    Raises:
        TokenFileError: it cannot be read, or a line of it is wrong.
    """
    try:
        text = read_regular(path, _MAX_BYTES).decode("utf-8-sig")
    except OSError as error:
        raise TokenFileError(f"{path}: {error.strerror}") from None
    except UnicodeDecodeError:
        raise TokenFileError(f"{path}: expected text in UTF-8") from None
    return parse_tokens(text, str(path))


def parse_tokens(text: str, path: str) -> dict[bytes, Caller]:
    """Return what `read_tokens` does, of a text.

    Raises:
        TokenFileError: a line is wrong.
    """
    callers: dict[bytes, Caller] = {}
    problems: list[str] = []
    for number, words in _entries(text):
        problem = _check_entry(words) or ("this token is there already" if bytes.fromhex(words[0]) in callers else "")
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
    """Return who asks for a tenant as a configuration writes it."""
    return Caller(None if tenant == NO_TENANT else tenant, name)


def _entries(text: str) -> Iterator[tuple[int, list[str]]]:
    for number, line in enumerate(text.splitlines(), 1):
        words = line.split()
        if words and not words[0].startswith("#"):
            yield number, words


def _check_entry(words: list[str]) -> str:
    if not 2 <= len(words) <= 3:
        return "expected SHA256 TENANT, and a name if you like"
    if not _DIGEST.fullmatch(words[0]):
        # Not a word of it: somebody may have written the token itself.
        return "expected the sha256 of a token in 64 hexadecimal digits first, as sha256sum prints it"
    for what, word in zip(("tenant", "name"), words[1:], strict=False):
        if len(word.encode()) > limits.MAX_NAME_BYTES or not word.isprintable():
            return f"expected the {what} in at most {limits.MAX_NAME_BYTES} bytes, got {label(word)}"
    return ""
