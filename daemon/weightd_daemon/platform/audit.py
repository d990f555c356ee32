"""The audit log: who has loaded, updated or reloaded what, and which right was refused to whom.

Each entry is one event of the logger `weightd.audit`: ``audit KEY=VALUE ...``, where each value is a JSON string in
ASCII, whatever a client has put into a name. In the journal the values are fields, too (`AUDIT_ACTION=`, ...).
"""

from __future__ import annotations

import json
import logging
from typing import NamedTuple

from weightd_common.rate_limits import RateLimitedLog
from weightd_daemon.platform.log_setup import fields_extra
from weightd_protocol.codec import clip

_log = logging.getLogger("weightd.audit")

OK = "ok"
FAILED = "failed"
REFUSED = "refused"

OPERATOR = "operator"
"""The user of what the configuration file orders, not a client."""

# Of what may be repeated at will each user of a tenant has an entry so often. The daemon keeps 2,000 events.
_REFUSAL_INTERVAL_S = 10.0

_MAX_DETAIL_BYTES = 512


class AuditEntry(NamedTuple):
    """Who does what.

    Attributes:
        action: "load", "update", "rollback" or "reload"; of a refused right, the type of the message.
        user: "uid 1001", "key Z85", "host ADDRESS", "this host" (a local client whose user the kernel does not tell) or
            "operator".
        tenant: of the user; "" for none.
        model: that it is about, as it was named; "" for none.
        path: of a model file, "" for none.
        weights: of a file of weights, "" for none.
    """

    action: str
    user: str
    tenant: str = ""
    model: str = ""
    path: str = ""
    weights: str = ""


def write(entry: AuditEntry, result: str, detail: str = "", **extra_fields: str) -> None:
    """Write an entry, with how it has ended; fields that are "" are left out."""
    level = logging.INFO if result == OK else logging.WARNING
    if not _log.isEnabledFor(level):
        return
    fields = {
        "action": entry.action,
        "result": result,
        **entry._asdict(),
        **extra_fields,
        "detail": clip(detail, _MAX_DETAIL_BYTES),
    }
    fields = {name: value for name, value in fields.items() if value}
    text = " ".join(f"{name}={json.dumps(value)}" for name, value in fields.items())
    journal = {f"AUDIT_{name.upper()}": value for name, value in fields.items()}
    # As of all other events.
    journal.update({"MODEL": entry.model} if entry.model else {})
    _log.log(level, "audit %s", text, extra=fields_extra(journal))


class RefusalLog:
    """Writes what clients may bring about at will: at once, then for each user seldom, with how many are suppressed."""

    def __init__(self) -> None:
        self._rate_limited_log = RateLimitedLog(_REFUSAL_INTERVAL_S)

    def write(self, entry: AuditEntry, result: str, detail: str, now: float) -> None:
        """Write the entry, or count it. Users of no tenant count as one, and so do hosts: there may be many."""
        has_own_limit = entry.tenant and not entry.user.startswith("host ")
        suppressed = self._rate_limited_log.record(
            f"{result} {entry.user} of {entry.tenant}" if has_own_limit else "", now
        )
        if suppressed is not None:
            write(entry, result, detail, suppressed=str(suppressed) if suppressed else "")
