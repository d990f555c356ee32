"""Who the users, groups and keys of a tenant's table are: looked up when the file is read, and not again."""

from __future__ import annotations

import dataclasses
import grp
import pwd
from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TypeVar

from weightd_common.curve_keys import KeyFileError, read_public
from weightd_common.toml_schema import ErrorCollector
from weightd_protocol.schema import FieldError, describe_value, label

T = TypeVar("T")

# Whom the kernel cannot name: users and groups that a namespace hides (/proc/sys/kernel/overflowuid).
OVERFLOW_ID = 65534

# The one after it means none.
_MAX_ID = 2**32 - 2


@dataclasses.dataclass(frozen=True)
class Identities:
    """Who they are, in the order of the file, each once, with how the file spells it."""

    users: Mapping[int, str]
    groups: Mapping[int, str]
    keys: Mapping[str, str]


def look_up(
    uids: Iterable[str], groups: Iterable[str], keys: Iterable[str], base: Path, problems: ErrorCollector
) -> Identities:
    """Return who these are; who is nobody is added to `problems`. `base`: the directory of the configuration."""
    return Identities(
        _look_up_all(uids, find_user_id, "uids", problems),
        _look_up_all(groups, find_group_id, "groups", problems),
        _look_up_all(keys, lambda key: read_public_key(base / key), "keys", problems),
    )


def find_user_id(user: str) -> int:
    """Return the number of a user.

    Raises:
        FieldError: there is none, or it is nobody's.
    """
    return _find_account_id("user", user, lambda name: pwd.getpwnam(name).pw_uid)


def find_group_id(group: str) -> int:
    """Return the number of a group.

    Raises:
        FieldError: there is none, or it is nobody's.
    """
    return _find_account_id("group", group, lambda name: grp.getgrnam(name).gr_gid)


def read_public_key(path: Path) -> str:
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


def _find_account_id(kind: str, account: str, look_up_id: Callable[[str], int]) -> int:
    if account.isascii() and account.isdigit():
        number = int(account)
    else:
        try:
            number = look_up_id(account)
        except (KeyError, ValueError, OSError):
            raise FieldError(
                f"expected a {kind} of this host, by name or number, got {describe_value(account)}"
            ) from None
    if number > _MAX_ID:
        raise FieldError(f"expected the number of a {kind}, 0 to {_MAX_ID}, got {describe_value(account)}")
    if number == OVERFLOW_ID:
        text = f"{OVERFLOW_ID} stands for each {kind} that the kernel cannot name, as those that a namespace hides"
        raise FieldError(f"expected another {kind}, got {describe_value(account)}: {text}")
    return number


def find_duplicates(identities_by_tenant: Mapping[str, Mapping[T, str]]) -> Iterator[tuple[str, FieldError]]:
    """Yield each tenant that has somebody of an earlier one, with what to say.

    `identities_by_tenant`: who the tenants have.
    """
    tenant_by_identity: dict[T, str] = {}
    for name, each in identities_by_tenant.items():
        for who, spelling in each.items():
            other = tenant_by_identity.setdefault(who, name)
            if other != name:
                before = identities_by_tenant[other][who]
                same = "" if before == spelling else f", as {describe_value(before)}"
                yield name, FieldError(f"{describe_value(spelling)} is in tenant {label(other)} already{same}")


def _look_up_all(
    names: Iterable[str], look_up_one: Callable[[str], T], key: str, problems: ErrorCollector
) -> dict[T, str]:
    found: dict[T, str] = {}
    errors: list[FieldError] = []
    for index, each in enumerate(names):
        try:
            found.setdefault(look_up_one(each), each)
        except FieldError as error:
            errors.append(error.at(f"[{index}]").at(f".{key}"))
    problems.add(errors)
    return found
