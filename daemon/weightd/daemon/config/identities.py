"""Who the users, groups and keys of a tenant's table are: looked up when the file is read, and not again."""

from __future__ import annotations

import dataclasses
import grp
import pwd
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from weightd.protocol.schema import FieldError, got, label
from weightd.shared.keys import KeyFileError, read_public
from weightd.shared.tables import Problems

T = TypeVar("T")

# Whom the kernel cannot name: users and groups that a namespace hides (/proc/sys/kernel/overflowuid).
OVERFLOW_ID = 65534

# The one after it means none.
_LAST_ID = 2**32 - 2


@dataclasses.dataclass(frozen=True)
class Identities:
    """Who they are, in the order of the file, each once, with how the file spells it."""

    users: Mapping[int, str]
    groups: Mapping[int, str]
    keys: Mapping[str, str]


def look_up(
    uids: Iterable[str], groups: Iterable[str], keys: Iterable[str], base: Path, problems: Problems
) -> Identities:
    """Return who these are; who is nobody is added to `problems`. `base`: the directory of the configuration."""
    return Identities(
        _each(uids, user_id, "uids", problems),
        _each(groups, group_id, "groups", problems),
        _each(keys, lambda key: public_key(base / key), "keys", problems),
    )


def user_id(user: str) -> int:
    """Return the number of a user.

    Raises:
        FieldError: there is none, or it is nobody's.
    """
    return _number("user", user, lambda name: pwd.getpwnam(name).pw_uid)


def group_id(group: str) -> int:
    """Return the number of a group.

    Raises:
        FieldError: there is none, or it is nobody's.
    """
    return _number("group", group, lambda name: grp.getgrnam(name).gr_gid)


def public_key(path: Path) -> str:
    """Return the key in a file, in Z85.

    Raises:
        FieldError: there is none.
    """
    try:
        return read_public(path)
    except KeyFileError as error:
        text = str(error)
        # The path is the file's.
        raise FieldError(text if text.isprintable() else ascii(text)[1:-1]) from None


def _number(what: str, account: str, find: Callable[[str], int]) -> int:
    if account.isascii() and account.isdigit():
        number = int(account)
    else:
        try:
            number = find(account)
        except (KeyError, ValueError, OSError):
            raise FieldError(f"expected a {what} of this host, by name or number, got {got(account)}") from None
    if number > _LAST_ID:
        raise FieldError(f"expected the number of a {what}, 0 to {_LAST_ID}, got {got(account)}")
    if number == OVERFLOW_ID:
        text = f"{OVERFLOW_ID} stands for each {what} that the kernel cannot name, as those that a namespace hides"
        raise FieldError(f"expected another {what}, got {got(account)}: {text}")
    return number


def twice(owners: Mapping[str, Mapping[T, str]]) -> Iterator[tuple[str, FieldError]]:
    """Yield each tenant that has somebody of an earlier one, with what to say; `owners`: who the tenants have."""
    names: dict[T, str] = {}
    for name, each in owners.items():
        for who, spelling in each.items():
            other = names.setdefault(who, name)
            if other != name:
                before = owners[other][who]
                same = "" if before == spelling else f", as {got(before)}"
                yield name, FieldError(f"{got(spelling)} is in tenant {label(other)} already{same}")


def _each(given: Iterable[str], find: Callable[[str], T], key: str, problems: Problems) -> dict[T, str]:
    found: dict[T, str] = {}
    errors: list[FieldError] = []
    for index, each in enumerate(given):
        try:
            found.setdefault(find(each), each)
        except FieldError as error:
            errors.append(error.at(f"[{index}]").at(f".{key}"))
    problems.note(errors)
    return found
