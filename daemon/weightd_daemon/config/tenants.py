"""The tables [tenants.NAME]: the users, groups and keys of each tenant, and the tenant's rights and limits.

Users, groups and key files are looked up when the configuration file is read, and again at each reload.
"""

from __future__ import annotations

import dataclasses
import fnmatch
import grp
import os
import pwd
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar, cast

from weightd_common import toml_schema
from weightd_common.curve_keys import KeyFileError, read_public
from weightd_common.peer_credentials import OVERFLOW_ID
from weightd_common.toml_schema import ErrorCollector, check_name, derived, user_path
from weightd_protocol import limits
from weightd_protocol.schema import (
    FieldError,
    FieldType,
    Metadata,
    describe_value,
    integer,
    label,
    list_of,
    number,
    one_of,
    text,
)

# Values of `may`. INFER: send requests to models. STATUS: see data of other tenants. LOAD: load and unload models.
# OPERATE: update models and reload the configuration.
INFER = "infer"
STATUS = "status"
LOAD = "load"
OPERATE = "operate"
RIGHTS = (INFER, STATUS, LOAD, OPERATE)

# The pattern that matches all models.
ALL_MODELS = "*"

# Name of the tenant of all clients that are in no other tenant.
DEFAULT_TENANT_NAME = "default"

# Maximum number of entries in each list of a tenant: users, groups, keys, patterns.
_MAX_ENTRIES = 256
_MAX_BYTES = 2**62
_MAX_COUNT = 2**31

# Maximum of `weight`. With `MIN_WEIGHT`, the maximum limits the ratio between two tenants' weights, so that the
# scheduler can compare seconds divided by weights.
_MAX_WEIGHT = 1000.0
MIN_WEIGHT = 1 / _MAX_WEIGHT
_NAME_PATTERN = re.compile(r"[A-Za-z0-9_.*?-]+")
_WILDCARDS = re.compile(r"[*?]")


def _account_metadata() -> Metadata:
    """Return the metadata of a key that holds the name or number of a user or group; a number is stored as text."""
    names, numbers = text(limits.MAX_NAME_BYTES)["field_type"], integer(0, 2**32 - 2)["field_type"]

    def check(value: Any) -> str:
        return str(numbers.check(value)) if type(value) is int else cast(str, names.check(value))

    return {"field_type": FieldType(check, check, check, "name, or number")}


def _pattern_metadata() -> Metadata:
    """Return the metadata of a key that holds a name, or a pattern: * matches any characters, ? one character."""
    names = text(limits.MAX_NAME_BYTES)["field_type"]

    def check(value: Any) -> str:
        checked: str = names.check(value)
        if not _NAME_PATTERN.fullmatch(checked):
            expected = "a name, or a pattern of ASCII letters, digits, '_', '.', '-', '*' and '?'"
            raise FieldError(f"expected {expected}, got {describe_value(checked)}")
        return checked

    return {"field_type": FieldType(check, check, check, "name, or pattern with * and ?")}


@dataclass(frozen=True)
class TenantConfig:
    """A table [tenants.NAME]."""

    uids: tuple[str, ...] = field(default=(), metadata=list_of(_account_metadata(), _MAX_ENTRIES))
    """Users of this host, which the kernel reports for a Unix socket."""

    groups: tuple[str, ...] = field(default=(), metadata=list_of(_account_metadata(), _MAX_ENTRIES))
    """Groups of this host. A tenant's `uids` take precedence."""

    keys: tuple[str, ...] = field(default=(), metadata=list_of(user_path(limits.MAX_PATH_BYTES), _MAX_ENTRIES))
    """Files with the public keys, from `weightctl keygen`, of clients that connect to a listener with `security =
    "curve"`."""

    models: tuple[str, ...] = field(default=(ALL_MODELS,), metadata=list_of(_pattern_metadata(), _MAX_ENTRIES))
    """Models that the tenant can see and use."""

    may: tuple[str, ...] = field(default=(INFER,), metadata=list_of(one_of(RIGHTS), len(RIGHTS)))
    """Rights. "infer": send requests to its models. "status": also see data of other tenants. "load": load and unload
    its models. "operate": also update its models and, if `models` is ["*"], reload the configuration, through the
    daemon's Unix socket. Root and the daemon's user have all rights."""

    model_dirs: tuple[str, ...] = field(default=(), metadata=list_of(user_path(limits.MAX_PATH_BYTES), _MAX_ENTRIES))
    """Directories from which the tenant may update its models, even with files that its user cannot read. Elsewhere the
    user must be able to read the files."""

    acts_for: tuple[str, ...] = field(default=(), metadata=list_of(_pattern_metadata(), _MAX_ENTRIES))
    """Tenants on whose behalf this tenant, such as the gateway, may send requests. Each request names its tenant."""

    weight: float = field(default=1.0, metadata=number(_MAX_WEIGHT, positive=True))
    """Share of the time of each device, at least 0.001: weight 2 gets twice the time of weight 1 while both tenants
    have queued requests."""

    max_in_flight: int = field(default=0, metadata=integer(0, _MAX_COUNT))
    """Maximum requests that are queued or running. 0: limited only by the models."""

    max_queue: int = field(default=0, metadata=integer(0, _MAX_COUNT))
    """Maximum queued requests over all models. 0: limited only by the models."""

    max_queue_bytes: int = field(default=0, metadata=integer(0, _MAX_BYTES))
    """Maximum tensor bytes of the queued requests. 0: limited only by the models."""

    max_rate: float = field(default=0.0, metadata=number(1e6))
    """Maximum requests of any kind per second, metadata and status included; after a pause, a burst of one second's
    requests. 0: no limit."""

    max_rows: int = field(default=0, metadata=integer(0, limits.MAX_ROWS))
    """Maximum rows of one request. 0: limited only by the model."""

    max_shared_bytes: int = field(default=0, metadata=integer(0, _MAX_BYTES))
    """Maximum bytes of shared memory that the tenant may register. 0: `max_shm_bytes` of [daemon]."""

    max_model_bytes: int = field(default=0, metadata=integer(0, _MAX_BYTES))
    """Maximum bytes of the models that are loaded for this tenant: those with `load = "on_demand"` or "manual" whose
    load a request or command of the tenant has caused. 0: no limit."""

    max_connections: int = field(default=0, metadata=integer(0, _MAX_COUNT))
    """Maximum connections of the tenant. 0: limited only by the daemon."""

    priority_max: int = field(default=0, metadata=integer(0, limits.MAX_PRIORITY))
    """Highest priority that the tenant may request; 1 is the highest of all. 0: any priority."""

    user_ids: tuple[int, ...] = field(default=(), metadata=derived(list_of(integer(0, 2**32 - 1), _MAX_ENTRIES)))
    """The user ids of `uids`."""

    group_ids: tuple[int, ...] = field(default=(), metadata=derived(list_of(integer(0, 2**32 - 1), _MAX_ENTRIES)))
    """The group ids of `groups`."""

    public_keys: tuple[str, ...] = field(default=(), metadata=derived(list_of(text(40), _MAX_ENTRIES)))
    """The public keys in the files `keys`, in Z85."""

    model_directories: tuple[str, ...] = field(
        default=(), metadata=derived(list_of(text(limits.MAX_PATH_BYTES), _MAX_ENTRIES))
    )
    """`model_dirs` as absolute paths."""

    def absolute_model_dirs(self, base: Path) -> tuple[str, ...]:
        """Return `model_dirs` as absolute paths."""
        return tuple(os.path.normpath(base.absolute() / each) for each in self.model_dirs)

    def look_up_identities(self, base: Path, problems: ErrorCollector) -> Identities:
        """Return the tenant's user ids, group ids and public keys; errors are added to `problems`."""
        return look_up(self.uids, self.groups, self.keys, base, problems)


def read_tenants(content: Any, base: Path, problems: ErrorCollector) -> dict[str, TenantConfig]:
    """Return the tenants by name, with their identities looked up; errors are added to `problems`.

    Args:
        content: the parsed TOML.
        base: the directory of the file, to which paths are relative.
        problems: as in `toml_schema.read_table`.

    Raises:
        FieldError: `content` is not a table with tables [tenants.NAME], or has too many tables.
    """
    if type(content) is not dict:
        raise FieldError("expected tables [tenants.NAME]")
    tenant_tables = cast("dict[str, Any]", content)
    if len(tenant_tables) > limits.MAX_TENANTS:
        raise FieldError(f"expected at most {limits.MAX_TENANTS} tenants, got {len(tenant_tables)}")
    tenants: dict[str, TenantConfig] = {}
    found_identities: dict[str, Identities] = {}
    for name, table in tenant_tables.items():
        with problems.at(f".{label(name)}"):
            problems.add(check_name("tenant", name))
            tenant = toml_schema.read_table(TenantConfig, table, problems, section=f"tenants.{name}")
            problems.add(_check_tenant(tenant, tenant_tables))
            who = found_identities[name] = tenant.look_up_identities(base, problems)
            tenants[name] = dataclasses.replace(
                tenant,
                user_ids=tuple(who.users),
                group_ids=tuple(who.groups),
                public_keys=tuple(who.keys),
                model_directories=tenant.absolute_model_dirs(base),
            )
    problems.add(_check_all_tenants(found_identities))
    return tenants


def _check_tenant(tenant: TenantConfig, tenant_names: Collection[str]) -> Iterator[FieldError]:
    if tenant.weight < MIN_WEIGHT:
        yield FieldError(f"expected at least {MIN_WEIGHT:g}, got {tenant.weight:g}").at(".weight")
    for index, each in enumerate(tenant.acts_for):
        if is_exact_name(each) and each not in tenant_names:
            yield (
                FieldError(f"expected the name of a table [tenants.NAME], got {describe_value(each)}")
                .at(f"[{index}]")
                .at(".acts_for")
            )


def _check_all_tenants(identities_by_tenant: Mapping[str, Identities]) -> Iterator[FieldError]:
    """Check that no identity is in two tenants, and that there are not more keys than a ZeroMQ proxy accepts."""
    if (count := sum(len(each.keys) for each in identities_by_tenant.values())) > limits.MAX_KEYS:
        yield FieldError(f"expected at most {limits.MAX_KEYS} keys in all tenants together, got {count}")
    for name, error in find_duplicates({name: each.users for name, each in identities_by_tenant.items()}):
        yield error.at(".uids").at(f".{label(name)}")
    for name, error in find_duplicates({name: each.groups for name, each in identities_by_tenant.items()}):
        yield error.at(".groups").at(f".{label(name)}")
    for name, error in find_duplicates({name: each.keys for name, each in identities_by_tenant.items()}):
        yield error.at(".keys").at(f".{label(name)}")


def is_exact_name(pattern: str) -> bool:
    """Return whether a pattern has no wildcards, and so matches only one name."""
    return not _WILDCARDS.search(pattern)


def find_warnings(tenants: Mapping[str, TenantConfig], models: Collection[str]) -> Iterator[str]:
    """Yield warnings about settings that are valid, but probably a mistake; each text names the key."""
    for name, tenant in tenants.items():
        where = f"tenants.{label(name)}"
        for each in tenant.models:
            if is_exact_name(each) and each not in models:
                yield f"{where}.models: there is no model {each!r}"
        if tenant.model_dirs and OPERATE not in tenant.may:
            yield f'{where}.model_dirs: has no effect without "{OPERATE}" in `may`'
        if not tenant.may:
            yield f"{where}.may: empty: the tenant has no rights"
        if name != DEFAULT_TENANT_NAME and not (
            tenant.uids or tenant.groups or tenant.keys or _is_acted_for(name, tenants)
        ):
            reason = "it has neither uids nor groups nor keys, and no tenant acts for it"
            yield f"{where}: no client belongs to this tenant: {reason}"


def _is_acted_for(name: str, tenants: Mapping[str, TenantConfig]) -> bool:
    return any(fnmatch.fnmatchcase(name, each) for other in tenants.values() for each in other.acts_for)


T = TypeVar("T")


# Maximum user or group id. The next number, 2**32 - 1, means "no id" to the kernel.
_MAX_ID = 2**32 - 2


@dataclasses.dataclass(frozen=True)
class Identities:
    """The user ids, group ids and public keys of a tenant without duplicates, each with its spelling in the file."""

    users: Mapping[int, str]
    groups: Mapping[int, str]
    keys: Mapping[str, str]


def look_up(
    uids: Iterable[str], groups: Iterable[str], keys: Iterable[str], base: Path, problems: ErrorCollector
) -> Identities:
    """Look up users, groups and key files, whose paths are relative to `base`; errors are added to `problems`."""
    return Identities(
        _look_up_all(uids, find_user_id, "uids", problems),
        _look_up_all(groups, find_group_id, "groups", problems),
        _look_up_all(keys, lambda key: read_public_key(base / key), "keys", problems),
    )


def find_user_id(user: str) -> int:
    """Return the user id of a user.

    Raises:
        FieldError: the user does not exist, or the id is reserved.
    """
    return _find_account_id("user", user, lambda name: pwd.getpwnam(name).pw_uid)


def find_group_id(group: str) -> int:
    """Return the group id of a group.

    Raises:
        FieldError: the group does not exist, or the id is reserved.
    """
    return _find_account_id("group", group, lambda name: grp.getgrnam(name).gr_gid)


def read_public_key(path: Path) -> str:
    """Return the public key in a file, in Z85.

    Raises:
        FieldError: the file has no valid key.
    """
    try:
        return read_public(path)
    except KeyFileError as error:
        text = str(error)
        # The error text contains the path of the file, which may have unprintable characters.
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
        text = f"the kernel uses {OVERFLOW_ID} for every {kind} that it cannot map into this namespace"
        raise FieldError(f"expected another {kind}, got {describe_value(account)}: {text}")
    return number


def find_duplicates(identities_by_tenant: Mapping[str, Mapping[T, str]]) -> Iterator[tuple[str, FieldError]]:
    """Yield the tenant's name and an error for each identity that an earlier tenant already has.

    Args:
        identities_by_tenant: for each tenant, the identities of one kind and their spelling in the file.
    """
    tenant_by_identity: dict[T, str] = {}
    for name, each in identities_by_tenant.items():
        for who, spelling in each.items():
            other = tenant_by_identity.setdefault(who, name)
            if other != name:
                before = identities_by_tenant[other][who]
                same = "" if before == spelling else f", as {describe_value(before)}"
                yield name, FieldError(f"{describe_value(spelling)} is already in tenant {label(other)}{same}")


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
