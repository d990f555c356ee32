"""Handlers of administrative messages: load, unload, update, reload of the configuration, logs of processes.

Each change is written to the audit log when it has ended or has been refused.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from weightd_daemon.api.authorization import Authorizer
from weightd_daemon.api.model_lookup import ModelLookup
from weightd_daemon.api.responses import ClientResponses
from weightd_daemon.api.status import StatusReporter
from weightd_daemon.channels.service import ChannelService
from weightd_daemon.models.lifecycle import ModelLifecycle
from weightd_daemon.models.registry import ConfigDiff
from weightd_daemon.platform import audit, event_loop
from weightd_daemon.transport.connection import ClientConnection
from weightd_protocol.errors import (
    FailedPrecondition,
    InvalidArgument,
    PermissionDenied,
    RequestError,
    Unauthenticated,
    Unavailable,
)
from weightd_protocol.messages.control import (
    ABORT,
    RESTART,
    RETRY,
    Load,
    LoadResponse,
    Reload,
    ReloadResponse,
    Rollout,
    RolloutResponse,
    Unload,
    Update,
    UpdateResponse,
)
from weightd_protocol.messages.events import Logs
from weightd_protocol.messages.inference import Infer
from weightd_protocol.messages.types import FROM_CLIENT
from weightd_protocol.model_names import join_version

_MESSAGE_TYPES = {kind: name for name, kind in FROM_CLIENT.items()}


RequestReload = Callable[[Callable[[ConfigDiff | RequestError], None], bool], None]
"""Type of a function that starts a reload of the configuration, or a dry run of one if the second argument is True.
When the reload has ended, it calls the first argument with the result. It raises a RequestError if no reload can start.
"""


class DaemonControl(NamedTuple):
    """The operations on the whole daemon that clients can request.

    Attributes:
        status: reports the state of the daemon and reads logs.
        request_reload: starts a reload of the configuration, see `RequestReload`.
        unmap: called with the numbers of closed shared memory regions; makes the workers unmap these regions.
        lifecycle: loads and unloads models.
        on_rollout: called after the shares of a model's versions have changed.
        channels: the direct channels.
    """

    status: StatusReporter
    request_reload: RequestReload
    unmap: Callable[[Sequence[int]], object]
    lifecycle: ModelLifecycle
    on_rollout: Callable[[], object]
    channels: ChannelService


class AdminApi:
    """Handlers of administrative messages. Each handler raises a `RequestError` if it refuses the message.

    Args:
        lookup: finds the models that clients name.
        authorizer: checks that a client is an operator.
        daemon: the operations on the whole daemon.
        responses: sends replies.
    """

    def __init__(
        self, lookup: ModelLookup, authorizer: Authorizer, daemon: DaemonControl, responses: ClientResponses
    ) -> None:
        self._lookup = lookup
        self._registry = lookup.registry
        self._authorizer = authorizer
        self._reporter = daemon.status
        self._request_reload = daemon.request_reload
        self._lifecycle = daemon.lifecycle
        self._on_rollout = daemon.on_rollout
        self._responses = responses
        self._unsaved_responses: list[tuple[bytes, UpdateResponse | LoadResponse]] = []
        self._audit_refusals = audit.RefusalLog()
        # By client and message id: the audit log entries of the operations in progress.
        self._pending_operations: dict[tuple[bytes, str], audit.AuditEntry] = {}
        # Client and message id of the restarts in progress whose clients do not wait for the end.
        self._answered_operations: set[tuple[bytes, str]] = set()

    # --- messages -----------------------------------------------------------------------------------------------

    def on_update(self, connection: ClientConnection, message: Update, frames: Sequence[Any], now: float) -> None:
        """Start the update of a model, or the rollback to its previous version."""
        self._authorizer.check_operator(connection, "update a model")
        if message.rollback == bool(message.path or message.weights):
            raise InvalidArgument("expected a path, weights, or rollback alone")
        for path in (message.path, message.weights):
            if path and (not Path(path).is_absolute() or "\0" in path):
                raise InvalidArgument(f"expected an absolute path on the daemon's host, got {path!r}")
        model = self._lookup.find(message.model_name, self._authorizer.resolve_viewer(connection).tenant)
        if self._registry.is_closed:
            raise Unavailable("weightd is stopping")
        grant = self._authorizer.file_grant(connection)
        paths = {"path": message.path, "weights": message.weights}
        with self._audit_operation(connection, message):
            model.update(connection.key, message.id, now, **paths, rollback=message.rollback, grant=grant)

    def on_load(self, connection: ClientConnection, message: Load, frames: Sequence[Any], now: float) -> None:
        """Start to load a model, to load a failed model again (`RETRY`), or to restart a model (`RESTART`)."""
        tenant = self._authorizer.authorize_load(connection, message.tenant, now)
        model = self._lookup.find(message.model_name, tenant)
        if self._registry.is_closed:
            raise Unavailable("weightd is stopping")
        if message.action == RETRY and not (model.loading.may_retry or model.loading.is_retrying):
            raise FailedPrecondition(f"{model.name} has not failed: it is {model.readiness.state_name}")
        with self._audit_operation(connection, message):
            if message.action == RESTART and not (model.loading.is_unloaded or model.loading.may_retry):
                self._authorizer.check_operator(connection, "restart a model")
                grant, weights = self._authorizer.file_grant(connection), model.versions.current.weights
                model.update(connection.key, message.id, now, path="", weights=weights, rollback=False, grant=grant)
                if message.wait:
                    return
                self._answered_operations.add((connection.key, message.id))
            else:
                is_operator = connection.identity.credential.is_operator and message.tenant is None
                owner = "" if is_operator else tenant.name
                self._lifecycle.load(model, owner, self._completion(connection, message, model.name))
        if not message.wait:
            self._responses.reply(connection.key, LoadResponse(message.id, model.name, model.readiness.state_name))

    def on_unload(self, connection: ClientConnection, message: Unload, frames: Sequence[Any], now: float) -> None:
        """Start to unload a model. Its accepted requests end first."""
        tenant = self._authorizer.authorize_load(connection, message.tenant, now)
        model = self._lookup.find(message.model_name, tenant)
        if self._registry.is_closed:
            raise Unavailable("weightd is stopping")
        with self._audit_operation(connection, message):
            self._lifecycle.unload(model, self._completion(connection, message, model.name))
        if not message.wait:
            self._responses.reply(connection.key, LoadResponse(message.id, model.name, model.readiness.state_name))

    def on_rollout(self, connection: ClientConnection, message: Rollout, frames: Sequence[Any], now: float) -> None:
        """Change which versions of a model answer the requests that name no version."""
        self._authorizer.check_operator(connection, "roll out a version")
        self._lookup.find(message.model_name, self._authorizer.resolve_viewer(connection).tenant)
        if message.action == ABORT and (message.version or message.percent):
            raise InvalidArgument("expected neither version nor percent with abort")
        self._lookup.roll_out(message)
        self._on_rollout()
        audit.write(_audit_entry(connection, message), audit.OK)
        shares = self._lookup.version_shares(message.model_name)
        self._responses.reply(connection.key, RolloutResponse(message.id, message.model_name, shares))

    def on_reload(self, connection: ClientConnection, message: Reload, frames: Sequence[Any], now: float) -> None:
        """Start a reload of the configuration, or a dry run of a reload."""
        self._authorizer.check_reload(connection)
        with self._audit_operation(connection, message):
            self._request_reload(functools.partial(self._on_reloaded, connection.key, message.id), message.dry_run)

    def on_logs(self, connection: ClientConnection, message: Logs, frames: Sequence[Any], now: float) -> None:
        """Start to read the logs of a model's processes; the reply with the logs is sent later."""
        self._authorizer.check_operator(connection, "read logs")
        self._lookup.find(message.model_name, self._authorizer.resolve_viewer(connection).tenant)
        self._reporter.report_logs(connection.key, message)

    def audit_refusal(self, connection: ClientConnection, message: Any, error: RequestError, now: float) -> None:
        """Write a refused message to the audit log, if it requests a change or its client lacks a permission."""
        if isinstance(error, (PermissionDenied, Unauthenticated)) or isinstance(
            message, (Load, Unload, Update, Rollout, Reload)
        ):
            self._audit_refusals.write(_audit_entry(connection, message), audit.REFUSED, str(error), now)

    def audit_unknown_client(self, connection: ClientConnection, message_type: str, now: float) -> None:
        """Write to the audit log that a message was refused because its client belongs to no tenant."""
        kind = message_type if message_type in FROM_CLIENT else "unknown"
        entry = audit.AuditEntry(kind, connection.identity.audit_name)
        self._audit_refusals.write(entry, audit.REFUSED, str(connection.rejection), now)

    # --- replies ------------------------------------------------------------------------------------------------

    def reply_updated(self, client: bytes, response: UpdateResponse) -> None:
        """Queue the reply to a completed update or restart, to be sent after the hand-over file records the update."""
        entry = self._on_operation_end(client, response.id)
        if self._is_answered(client, response.id):
            return
        is_restart = entry is not None and entry.action == RESTART
        self._unsaved_responses.append(
            (client, LoadResponse(response.id, response.model_name, "serving") if is_restart else response)
        )

    def send_saved_responses(self) -> None:
        """Send the replies that `reply_updated` has queued, because their updates have been recorded."""
        while self._unsaved_responses:
            self._responses.reply(*self._unsaved_responses.pop(0))

    def reply_failed(self, client: bytes, request_id: str, error: RequestError) -> None:
        """Write a failed operation to the audit log, and send the error to the client."""
        self._on_operation_end(client, request_id, error)
        if self._is_answered(client, request_id):
            return
        self._responses.reply_error(client, request_id, error)

    # --- private ------------------------------------------------------------------------------------------------

    def _completion(
        self, connection: ClientConnection, message: Load | Unload, name: str
    ) -> Callable[[RequestError | None], object]:
        """Return a function to call at the end of a load or unload. It replies if the client waits for the end."""
        client = connection.key

        def on_done(error: RequestError | None) -> None:
            if error is not None and message.wait:
                self.reply_failed(client, message.id, error)
                return
            self._on_operation_end(client, message.id, error)
            if error is None and message.wait:
                model = self._registry.models.get(name)
                state = "unloaded" if model is None else model.readiness.state_name
                self._responses.reply(client, LoadResponse(message.id, name, state))

        return on_done

    def _on_reloaded(self, client: bytes, request_id: str, outcome: ConfigDiff | RequestError) -> None:
        """Send the changes of a completed reload, or the error of a failed one."""
        if isinstance(outcome, RequestError):
            self.reply_failed(client, request_id, outcome)
        else:
            self._on_operation_end(client, request_id)
            self._responses.reply(client, ReloadResponse(request_id, *outcome))

    @contextlib.contextmanager
    def _audit_operation(
        self, connection: ClientConnection, message: Load | Unload | Update | Reload
    ) -> Generator[None, None, None]:
        """Register for the audit log the operation that the `with` block starts; forget it if the block refuses it.

        Raises:
            InvalidArgument: an operation of the client with this message id is in progress.
        """
        key = connection.key, message.id
        if key in self._pending_operations:
            raise InvalidArgument(f"id: expected an id that no running operation has, got {message.id!r}")
        self._pending_operations[key] = _audit_entry(connection, message)
        try:
            yield
        except RequestError:
            self._pending_operations.pop(key, None)
            raise

    def _is_answered(self, client: bytes, request_id: str) -> bool:
        """Return whether an ended operation needs no reply, because the client got one at its start."""
        is_answered = (client, request_id) in self._answered_operations
        self._answered_operations.discard((client, request_id))
        return is_answered

    def _on_operation_end(
        self, client: bytes, request_id: str, error: RequestError | None = None
    ) -> audit.AuditEntry | None:
        entry = self._pending_operations.pop((client, request_id), None)
        if entry is None:
            return None
        if error is None:
            audit.write(entry, audit.OK)
        else:
            self._audit_refusals.write(entry, audit.FAILED, str(error), event_loop.now())
        return entry


def _audit_entry(connection: ClientConnection, message: Any) -> audit.AuditEntry:
    """Return the audit log entry for a message."""
    tenant = "" if connection.tenant is None else connection.tenant.name
    if isinstance(message, Update):
        action = "rollback" if message.rollback else "update"
        return audit.AuditEntry(
            action, connection.identity.audit_name, tenant, message.model_name, message.path, message.weights
        )
    if isinstance(message, Reload) and message.dry_run:
        return audit.AuditEntry("dry_run", connection.identity.audit_name, tenant)
    if isinstance(message, Rollout):
        version = join_version(message.model_name, str(message.version or ""))
        return audit.AuditEntry("rollout", connection.identity.audit_name, tenant, version)
    if isinstance(message, Load):
        return audit.AuditEntry(message.action, connection.identity.audit_name, tenant, message.model_name)
    name = message.description.model_name if isinstance(message, Infer) else getattr(message, "model_name", "")
    return audit.AuditEntry(_MESSAGE_TYPES[message.__class__], connection.identity.audit_name, tenant, name)
