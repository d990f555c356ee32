"""Operations of operators over a connection: model updates, reloads of the configuration, and logs of processes.

Each change is written to the audit log when it ends or is refused.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any

from weightd_daemon.api.authorization import Authorizer
from weightd_daemon.api.responses import ClientResponses
from weightd_daemon.api.status import StatusReporter
from weightd_daemon.models.registry import ConfigDiff, ModelRegistry
from weightd_daemon.platform import audit, event_loop
from weightd_daemon.transport.connection import ClientConnection
from weightd_protocol.errors import InvalidArgument, PermissionDenied, RequestError, Unauthenticated, Unavailable
from weightd_protocol.messages.control import Reload, ReloadResponse, Update, UpdateResponse
from weightd_protocol.messages.events import Logs
from weightd_protocol.messages.inference import Infer
from weightd_protocol.messages.types import FROM_CLIENT

_MESSAGE_TYPES = {kind: name for name, kind in FROM_CLIENT.items()}


RequestReload = Callable[[Callable[[ConfigDiff | RequestError], None]], None]
"""Starts a reload of the configuration and calls its argument at the end; raises a RequestError if it cannot start."""


class AdminApi:
    """Handles the messages of operators. Each handler raises a `RequestError` if it refuses the message.

    Args:
        registry: the models.
        authorizer: checks that a client is an operator.
        reporter: reads logs.
        request_reload: see `RequestReload`.
        responses: sends replies.
    """

    def __init__(
        self,
        registry: ModelRegistry,
        authorizer: Authorizer,
        reporter: StatusReporter,
        request_reload: RequestReload,
        responses: ClientResponses,
    ) -> None:
        self._registry = registry
        self._authorizer = authorizer
        self._reporter = reporter
        self._request_reload = request_reload
        self._responses = responses
        self._unsaved_responses: list[tuple[bytes, UpdateResponse]] = []
        self._audit_refusals = audit.RefusalLog()
        # Operations in progress, by client and message id.
        self._pending_operations: dict[tuple[bytes, str], audit.AuditEntry] = {}

    # --- messages -----------------------------------------------------------------------------------------------

    def on_update(self, connection: ClientConnection, message: Update, frames: Sequence[Any], now: float) -> None:
        """Start the update of a model, or the rollback to its previous version."""
        self._authorizer.check_operator(connection, "update a model")
        if message.rollback == bool(message.path or message.weights):
            raise InvalidArgument("expected a path, weights, or rollback alone")
        for path in (message.path, message.weights):
            if path and (not Path(path).is_absolute() or "\0" in path):
                raise InvalidArgument(f"expected an absolute path on the daemon's host, got {path!r}")
        model = self._registry.find(message.model_name, self._authorizer.resolve_viewer(connection).tenant)
        if self._registry.is_closed:
            raise Unavailable("weightd is stopping")
        grant = self._authorizer.file_grant(connection)
        paths = {"path": message.path, "weights": message.weights}
        with self._audit_operation(connection, message):
            model.update(connection.key, message.id, now, **paths, rollback=message.rollback, grant=grant)

    def on_reload(self, connection: ClientConnection, message: Reload, frames: Sequence[Any], now: float) -> None:
        """Start a reload of the configuration."""
        self._authorizer.check_reload(connection)
        with self._audit_operation(connection, message):
            self._request_reload(functools.partial(self._on_reloaded, connection.key, message.id))

    def on_logs(self, connection: ClientConnection, message: Logs, frames: Sequence[Any], now: float) -> None:
        """Start to read the logs of a model's processes."""
        self._authorizer.check_operator(connection, "read logs")
        self._registry.find(message.model_name, self._authorizer.resolve_viewer(connection).tenant)
        self._reporter.report_logs(connection.key, message)

    def audit_refusal(self, connection: ClientConnection, message: Any, error: RequestError, now: float) -> None:
        """Write the refusal of a message to the audit log, if it is a change or lacks a permission."""
        if isinstance(error, (PermissionDenied, Unauthenticated)) or isinstance(message, (Update, Reload)):
            self._audit_refusals.write(_audit_entry(connection, message), audit.REFUSED, str(error), now)

    def audit_unknown_client(self, connection: ClientConnection, message_type: str, now: float) -> None:
        """Write the refusal of a message from a client without a tenant to the audit log."""
        kind = message_type if message_type in FROM_CLIENT else "unknown"
        entry = audit.AuditEntry(kind, connection.identity.audit_name)
        self._audit_refusals.write(entry, audit.REFUSED, str(connection.rejection), now)

    # --- replies ------------------------------------------------------------------------------------------------

    def reply_updated(self, client: bytes, response: UpdateResponse) -> None:
        """Queue the reply to a completed update until the update is recorded on disk."""
        self._on_operation_end(client, response.id)
        self._unsaved_responses.append((client, response))

    def send_saved_responses(self) -> None:
        """Send the replies that waited until their updates were recorded."""
        while self._unsaved_responses:
            self._responses.reply(*self._unsaved_responses.pop(0))

    def reply_failed(self, client: bytes, request_id: str, error: RequestError) -> None:
        """Send the error of a failed update or reload."""
        self._on_operation_end(client, request_id, error)
        self._responses.reply_error(client, request_id, error)

    # --- private ------------------------------------------------------------------------------------------------

    def _on_reloaded(self, client: bytes, request_id: str, outcome: ConfigDiff | RequestError) -> None:
        """Reply that the new configuration is in force, or why not."""
        if isinstance(outcome, RequestError):
            self.reply_failed(client, request_id, outcome)
        else:
            self._on_operation_end(client, request_id)
            self._responses.reply(client, ReloadResponse(request_id, *outcome))

    @contextlib.contextmanager
    def _audit_operation(self, connection: ClientConnection, message: Update | Reload) -> Generator[None, None, None]:
        """Register an operation that starts in the block for the audit log, unless the block refuses it.

        Raises:
            InvalidArgument: the client has an operation with this id in progress.
        """
        key = connection.key, message.id
        if key in self._pending_operations:
            raise InvalidArgument(f"id: expected an id that no running update or reload has, got {message.id!r}")
        self._pending_operations[key] = _audit_entry(connection, message)
        try:
            yield
        except RequestError:
            self._pending_operations.pop(key, None)
            raise

    def _on_operation_end(self, client: bytes, request_id: str, error: RequestError | None = None) -> None:
        entry = self._pending_operations.pop((client, request_id), None)
        if entry is None:
            return
        if error is None:
            audit.write(entry, audit.OK)
        else:
            self._audit_refusals.write(entry, audit.FAILED, str(error), event_loop.now())


def _audit_entry(connection: ClientConnection, message: Any) -> audit.AuditEntry:
    """Return the audit log entry for a message."""
    tenant = "" if connection.tenant is None else connection.tenant.name
    if isinstance(message, Update):
        action = "rollback" if message.rollback else "update"
        return audit.AuditEntry(
            action, connection.identity.audit_name, tenant, message.model_name, message.path, message.weights
        )
    name = message.description.model_name if isinstance(message, Infer) else getattr(message, "model_name", "")
    return audit.AuditEntry(_MESSAGE_TYPES[message.__class__], connection.identity.audit_name, tenant, name)
