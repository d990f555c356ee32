"""Methods of `Client` that observe the daemon or change its models and configuration."""

from __future__ import annotations

import abc
from typing import Optional, TypeVar

from weightd import queries
from weightd.queries import Query
from weightd_protocol.messages.control import LOAD, LoadResponse, ReloadResponse, RolloutResponse, UpdateResponse
from weightd_protocol.messages.events import EventsResponse, LogsResponse

R = TypeVar("R")


class OperatorCalls(abc.ABC):
    """Methods of `Client` that observe the daemon or change its models and configuration."""

    @abc.abstractmethod
    def _query(self, query: Query[R], timeout: Optional[float]) -> R:
        """Send a query and return its response. Repeat it after a transient error if the client has a retry policy."""

    @abc.abstractmethod
    def _query_once(self, query: Query[R], timeout: Optional[float]) -> R:
        """Send a query and return its response, without retries."""

    def events(self, after: int = 0, model: str = "", *, timeout: Optional[float] = None) -> EventsResponse:
        """Return the daemon's events that follow event number `after`, as many as fit into one response.

        To read the next events, call this method again with the field `last` of the response as `after`.

        Args:
            after: number of the last event that the caller has read; 0 for all events that the daemon has kept.
            model: the model whose events are returned; "" for all events.
            timeout: seconds to wait for the daemon's reply.

        Raises:
            RequestError: as `infer`.
        """
        return self._query(queries.events(after, model), timeout)

    def logs(self, model: str, process: str = "", *, lines: int = 100, timeout: Optional[float] = None) -> LogsResponse:
        """Return the last log lines of a model's processes. The caller needs the right to operate the daemon.

        Args:
            model: the model's name.
            process: the name of one process, as `status` lists it; "" for all processes of the model.
            lines: the maximum number of lines for each process.
            timeout: seconds to wait for the daemon's reply.

        Raises:
            RequestError: as `infer`.
        """
        return self._query(queries.logs(model, process, lines), timeout)

    def update(
        self,
        model: str,
        path: str = "",
        *,
        weights: str = "",
        rollback: bool = False,
        timeout: Optional[float] = None,
    ) -> UpdateResponse:
        """Load another model file or other weights beside the serving version, and wait until the new version serves.

        If the update fails, the old version continues to serve. The daemon allows updates only over its Unix socket, to
        its own user, to root, and to tenants with the right to operate the model.

        Args:
            model: the model's name.
            path: absolute path of the new model file on the daemon's host; "" keeps the current model file.
            weights: absolute path of an .npz file whose arrays replace weights of the model; "" replaces no weights.
            rollback: True to return to the version that served before the last update. The current version is
                discarded.
            timeout: seconds until this call raises `DeadlineExceeded`. The update itself continues; `status` shows its
                progress.

        Raises:
            RequestError: as `infer`. `Unavailable` and `FailedPrecondition` give the reason why the old version still
                serves. After `Unavailable` the same update may succeed later.
        """
        return self._query_once(queries.update(model, path, weights, rollback=rollback), timeout)

    def load(
        self, model: str, *, action: str = LOAD, wait: bool = True, timeout: Optional[float] = None
    ) -> LoadResponse:
        """Load a model that is not loaded, and wait until it serves.

        The daemon allows this to its own user, to root, and to tenants with the right to load or operate the model.

        Args:
            model: the model's name.
            action: "load" for a model that is not loaded; "retry" for a model that has failed; "restart" to load the
                model's files again while the current version continues to serve until it is replaced.
            wait: whether to wait until the model serves or has failed.
            timeout: seconds until this call raises `DeadlineExceeded`. The load itself continues; `status` shows its
                progress.

        Raises:
            RequestError: as `infer`. `ResourceExhausted`: no budget has room for the model. `FailedPrecondition` and
                `Unavailable` give the reason why the model has failed.
        """
        return self._query_once(queries.load(model, action, wait=wait), timeout)

    def unload(self, model: str, *, wait: bool = True, timeout: Optional[float] = None) -> LoadResponse:
        """Unload a model once the requests that it has accepted have ended, and wait until its processes have exited.

        The daemon allows this to its own user, to root, and to tenants with the right to load or operate the model.

        Args:
            model: the model's name. If the model loads on demand, its next request loads it again.
            wait: whether to wait until no process of the model runs.
            timeout: seconds until this call raises `DeadlineExceeded`. The unload itself continues.

        Raises:
            RequestError: as `infer`. `FailedPrecondition`: the model's configuration requires that it stays loaded.
        """
        return self._query_once(queries.unload(model, wait=wait), timeout)

    def rollout(
        self, model: str, action: str, version: int = 0, percent: float = 0.0, *, timeout: Optional[float] = None
    ) -> RolloutResponse:
        """Change which versions of a model answer the requests that name no version.

        Allowed for the daemon's user, root and tenants with the right to operate, and only over the daemon's unix
        socket.

        Args:
            model: the model's name, without a version.
            action: "set" sends `percent` percent of the requests to `version`, and divides the remaining requests among
                the other versions in their present proportions; "promote" sends all of them to `version`; "abort"
                returns to the shares in the configuration.
            version: the number of a version; 0 with "abort".
            percent: the percentage for "set", 0 to 100.
            timeout: seconds to wait for the daemon's reply.

        Returns:
            The percentage of the requests that each version answers now.

        Raises:
            RequestError: as `infer`. `InvalidArgument`: the model has no such version. `FailedPrecondition`: the model
                has no versions, no rollout is in progress, or no other version can take the remaining requests.
        """
        return self._query_once(queries.rollout(model, action, version, percent), timeout)

    def reload(self, *, dry_run: bool = False, timeout: Optional[float] = None) -> ReloadResponse:
        """Make the daemon read its configuration file again. New and changed models load after the daemon has replied.

        With `dry_run` the daemon changes nothing; the response lists the changes that a reload would make.

        The daemon allows this only over its Unix socket, to its own user, to root, and to tenants with the right to
        operate all models.

        Raises:
            RequestError: as `infer`. `InvalidArgument` lists the errors in the configuration file; the daemon has then
                changed nothing.
        """
        return self._query(queries.reload(dry_run=dry_run), timeout)
