"""Audit log of loads, unloads, updates, reloads and refused operations, each with the user who requested it.

Each entry is one event of the logger `weightd.audit`: ``audit KEY=VALUE ...``, where each value is a JSON string in
ASCII, so that names from clients cannot forge entries. In systemd's journal, each value is also a field of the entry
(`AUDIT_ACTION=`, ...).
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
"""`AuditEntry.user` of a change that comes from the configuration file, not from a client."""

DAEMON = "weightd"
"""`AuditEntry.user` of a load or unload that the daemon decides by itself."""

# Minimum number of seconds between two entries about refused operations of one user. Clients can repeat refused
# operations at will, and would otherwise push all other events out of the daemon's event log.
_REFUSAL_INTERVAL_S = 10.0

_MAX_DETAIL_BYTES = 512


class AuditEntry(NamedTuple):
    """An operation and the user who requested it.

    Attributes:
        action: "load", "unload", "retry", "restart", "update", "rollback", "reload" or "dry_run" (of a reload); for a
            refused operation, the type of the message.
        user: "uid 1001", "key Z85", "host ADDRESS", "this host" (a local client whose user the kernel does not report),
            "operator" or "weightd".
        tenant: the tenant of the user; "" for none.
        model: the name of the model, as the client wrote it; "" for none.
        path: the path of the model file that an update names; "" for none.
        weights: the path of the weights file that an update names; "" for none.
    """

    action: str
    user: str
    tenant: str = ""
    model: str = ""
    path: str = ""
    weights: str = ""


def write(entry: AuditEntry, result: str, detail: str = "", **extra_fields: str) -> None:
    """Write an entry with the result of its operation. Fields with an empty value are omitted."""
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
    # Add the field MODEL, in which all other journal entries of the daemon name their model, too.
    journal.update({"MODEL": entry.model} if entry.model else {})
    _log.log(level, "audit %s", text, extra=fields_extra(journal))


class RefusalLog:
    """Rate-limited audit log for entries that clients can cause at will; counts the suppressed entries of each user."""

    def __init__(self) -> None:
        self._rate_limited_log = RateLimitedLog(_REFUSAL_INTERVAL_S)

    def write(self, entry: AuditEntry, result: str, detail: str, now: float) -> None:
        """Write the entry, or count it as suppressed. All hosts and all users without a tenant share one limit."""
        has_own_limit = entry.tenant and not entry.user.startswith("host ")
        suppressed = self._rate_limited_log.record(
            f"{result} {entry.user} of {entry.tenant}" if has_own_limit else "", now
        )
        if suppressed is not None:
            write(entry, result, detail, suppressed=str(suppressed) if suppressed else "")
