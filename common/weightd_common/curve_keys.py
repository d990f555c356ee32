"""CURVE key files: NAME.key with a secret key, NAME.pub with a public key.

A key file is a text file with comment lines that begin with "# " and one line with the kind of the key and the key. The
key is in Z85: 40 characters for 32 bytes. Because the kind is checked, a program rejects a file with a secret key where
it expects a public key, so that users do not publish a secret key by mistake.
"""

from __future__ import annotations

import os
import stat
from pathlib import Path

from weightd_protocol.errors import WeightdError

PUBLIC = "weightd-public-key"
SECRET = "weightd-secret-key"  # noqa: S105 - the kind of the key

KEY_CHARACTERS = 40

_NAMES = {PUBLIC: "public", SECRET: "secret"}

# Maximum size of a key file in bytes. A real key file is much smaller.
_MAX_BYTES = 4096

_Z85 = "0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ.-:+=^!/*?&<>()[]{}@%$#"

_GROUP_AND_OTHER_MODE = stat.S_IRWXG | stat.S_IRWXO


class KeyFileError(WeightdError):
    """A file has no valid key, or is not safe to use. The text names the file and never contains its content."""


def is_key(text: str) -> bool:
    """Return whether `text` is the Z85 encoding of 32 bytes."""
    if len(text) != KEY_CHARACTERS or any(each not in _Z85 for each in text):
        return False
    return all(_decode_group(text[start : start + 5]) < 2**32 for start in range(0, KEY_CHARACTERS, 5))


def _decode_group(group: str) -> int:
    number = 0
    for each in group:
        number = 85 * number + _Z85.index(each)
    return number


def format_key_file(kind: str, key: str, *comments: str) -> str:
    """Return the content of a key file. `kind` is PUBLIC or SECRET."""
    return "".join([*(f"# {comment}\n" for comment in comments), f"{kind} {key}\n"])


def read_public(path: Path) -> str:
    """Return the public key in the key file at `path`.

    Raises:
        KeyFileError: the file has no public key.
    """
    return _read_key_file(path, PUBLIC)


def read_secret(path: Path) -> str:
    """Return the secret key in the key file at `path`.

    The file's owner must be the current user or root, and no other user may have access to the file.

    Raises:
        KeyFileError: the file has no secret key, or other users have access.
    """
    return _read_key_file(path, SECRET)


def _read_key_file(path: Path, kind: str) -> str:
    try:
        # O_NONBLOCK: if the path leads to a pipe, open() does not wait for a writer.
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            status = os.fstat(descriptor)
            if not stat.S_ISREG(status.st_mode):
                raise KeyFileError(f"{path}: expected a file")
            content = os.read(descriptor, _MAX_BYTES)
        finally:
            os.close(descriptor)
    except (OSError, ValueError) as error:
        raise KeyFileError(f"{path}: {getattr(error, 'strerror', None) or error}") from None
    if kind == SECRET:
        _check_secrecy(path, status)
    return _parse_key(path, kind, content)


def _check_secrecy(path: Path, status: os.stat_result) -> None:
    if status.st_mode & _GROUP_AND_OTHER_MODE:
        mode = f"expected mode 0600 or 0400, got 0{stat.S_IMODE(status.st_mode):o}: others may have read the key"
        raise KeyFileError(f"{path}: {mode}; make a new one with weightctl keygen, or chmod 0600 it")
    # Root may use the key file of any user, for example to run `weightd check` on a user's configuration.
    if os.geteuid() != 0 and status.st_uid not in (0, os.geteuid()):
        owner = (
            f"expected a file of root or of user {os.geteuid()}, which reads the key, got one of user {status.st_uid}"
        )
        raise KeyFileError(f"{path}: {owner}; chown it")


def _parse_key(path: Path, kind: str, content: bytes) -> str:
    # The error texts contain no part of the file, because the file may contain a secret.
    lines = [line.split() for line in content.decode("ascii", "replace").splitlines() if line[:2] != "# "]
    words = [each for each in lines if each]
    form = f"expected a line {kind} KEY with a KEY of {KEY_CHARACTERS} Z85 characters, as weightctl keygen writes it"
    if len(words) != 1 or len(words[0]) != 2 or words[0][0] not in _NAMES:
        raise KeyFileError(f"{path}: {form}")
    actual_kind, key = words[0]
    if actual_kind != kind:
        suffix = ".pub" if kind == PUBLIC else ".key"
        text = (
            f"expected a {_NAMES[kind]} key, got a {_NAMES[actual_kind]} one; weightctl keygen writes the other to"
            f" {suffix}"
        )
        raise KeyFileError(f"{path}: {text}")
    if not is_key(key):
        raise KeyFileError(f"{path}: {form}")
    return key
