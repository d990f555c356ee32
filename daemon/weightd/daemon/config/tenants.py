"""The tables [tenants.NAME]: who may ask what, and how much of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, cast

from weightd.daemon.config import tables
from weightd.daemon.config.names import of_name
from weightd.daemon.config.tables import Problems, derived
from weightd.protocol import limits
from weightd.protocol.schema import FieldError, Kind, Metadata, integer, label, many, number, one_of, text

# Of the rights: to ask models, to see what concerns others, and to change what the daemon does.
INFER = "infer"
STATUS = "status"
OPERATE = "operate"
RIGHTS = (INFER, STATUS, OPERATE)

# Who is in no other.
DEFAULT = "default"

# Tables of one file.
MAX_TENANTS = 256

# Users, groups, keys and patterns of one.
_MOST_EACH = 256

_MOST_BYTES = 2**62
_MOST_COUNT = 2**31

_PATTERN = text(limits.MAX_NAME_BYTES)


def _account() -> Metadata:
    """A user or a group: its name, or its number as text."""
    names, numbers = text(limits.MAX_NAME_BYTES)["kind"], integer(0, 2**32 - 2)["kind"]

    def check(value: Any) -> str:
        return str(numbers.check(value)) if type(value) is int else cast(str, names.check(value))

    return {"kind": Kind(check, check, check, "name, or number")}


@dataclass(frozen=True)
class TenantConfig:
    """A table [tenants.NAME]."""

    uids: tuple[str, ...] = field(default=(), metadata=many(_account(), _MOST_EACH))
    """Users of this host, by name or number: who has connected to a unix socket, as the kernel says."""

    groups: tuple[str, ...] = field(default=(), metadata=many(_account(), _MOST_EACH))
    """Groups of this host, by name or number: whoever is in one, and is in no tenant's `uids`."""

    keys: tuple[str, ...] = field(default=(), metadata=many(text(limits.MAX_PATH_BYTES), _MOST_EACH))
    """Files with public keys, of clients that connect to a listener with `security = "curve"`; see weightctl keygen."""

    models: tuple[str, ...] = field(default=("*",), metadata=many(_PATTERN, _MOST_EACH))
    """The models that there are for it, by name or by a pattern with * and ?."""

    may: tuple[str, ...] = field(default=(INFER,), metadata=many(one_of(RIGHTS), len(RIGHTS)))
    """What it may do: "infer"; "status", to see what concerns others, too; "operate", to update models and reload."""

    acts_for: tuple[str, ...] = field(default=(), metadata=many(_PATTERN, _MOST_EACH))
    """Tenants for which it may ask, by name or pattern: its requests say for whom they are, as those of a gateway."""

    weight: float = field(default=1.0, metadata=number(1000.0, positive=True))
    """Its share of the seconds of each device, among those who wait for some."""

    max_in_flight: int = field(default=0, metadata=integer(0, _MOST_COUNT))
    """Requests that wait or run. 0: as many as the models take."""

    max_queue: int = field(default=0, metadata=integer(0, _MOST_COUNT))
    """Requests that wait, of all models. 0: as many as the models take."""

    max_queue_bytes: int = field(default=0, metadata=integer(0, _MOST_BYTES))
    """Bytes of their tensors. 0: as many as the models take."""

    max_rate: float = field(default=0.0, metadata=number(1e6))
    """Requests of any kind a second, of which it may save up for one. 0: no bound."""

    max_rows: int = field(default=0, metadata=integer(0, limits.MAX_ROWS))
    """Rows of a request. 0: as many as the model takes."""

    max_shared_bytes: int = field(default=0, metadata=integer(0, _MOST_BYTES))
    """Bytes of memory that it may share with the workers. 0: `max_shm_bytes` of the daemon."""

    max_connections: int = field(default=0, metadata=integer(0, _MOST_COUNT))
    """Connections. 0: as many as the daemon has room for."""

    priority_max: int = field(default=0, metadata=integer(0, limits.MAX_PRIORITY))
    """The first level of priority that it may ask for: 1 goes first. 0: any."""

    user_ids: tuple[int, ...] = field(default=(), metadata=derived(many(integer(0, 2**32 - 1), _MOST_EACH)))
    """What `uids` are."""

    group_ids: tuple[int, ...] = field(default=(), metadata=derived(many(integer(0, 2**32 - 1), _MOST_EACH)))
    """What `groups` are."""

    public_keys: tuple[str, ...] = field(default=(), metadata=derived(many(text(40), _MOST_EACH)))
    """What is in `keys`, in Z85."""


def read_tenants(content: Any, problems: Problems) -> dict[str, TenantConfig]:
    """Return the tenants by name; what is wrong is added to `problems`.

    Raises:
        FieldError: these are no tables, or too many.
    """
    if type(content) is not dict:
        raise FieldError("expected tables [tenants.NAME]")
    given = cast("dict[str, Any]", content)
    if len(given) > MAX_TENANTS:
        raise FieldError(f"expected at most {MAX_TENANTS} tenants, got {len(given)}")
    tenants: dict[str, TenantConfig] = {}
    for name, table in given.items():
        with problems.at(f".{label(name)}"):
            problems.note(of_name("tenant", name))
            tenants[name] = tables.read(TenantConfig, table, problems, section=f"tenants.{name}")
    problems.note(_of_all(tenants))
    return tenants


def _of_all(tenants: Mapping[str, TenantConfig]) -> Iterator[FieldError]:
    """Nobody is two tenants."""
    for key in ("uids", "groups", "keys"):
        owners: dict[str, str] = {}
        for name, tenant in tenants.items():
            for each in getattr(tenant, key):
                if owners.setdefault(each, name) != name:
                    yield FieldError(f"{each} is in tenant {owners[each]} already").at(f".{label(name)}.{key}")
