"""The calls of a client that observe and change the daemon."""

from __future__ import annotations

import abc
from typing import Optional, TypeVar

from weightd import queries
from weightd.queries import Query
from weightd_protocol.messages.control import LOAD, LoadResponse, ReloadResponse, UpdateResponse
from weightd_protocol.messages.events import EventsResponse, LogsResponse

R = TypeVar("R")


class OperatorCalls(abc.ABC):
    """The calls of a client that observe and change the daemon."""

    @abc.abstractmethod
    def _query(self, query: Query[R], timeout: Optional[float]) -> R:
        """Send a query, again after a failure if that is safe, and return its response."""

    @abc.abstractmethod
    def _query_once(self, query: Query[R], timeout: Optional[float]) -> R:
        """Send a query once and return its response."""

    def events(self, after: int = 0, model: str = "", *, timeout: Optional[float] = None) -> EventsResponse:
        """Return the events with a number greater than `after`, as many as fit into one response.

        To read the next ones, pass the response's `last` as `after`.

        Args:
            after: number of the last known event; 0 for all events that the daemon has kept.
            model: only events of this model; "" for all events.
            timeout: seconds to wait for the daemon's reply.

        Raises:
            RequestError: as `infer`.
        """
        return self._query(queries.events(after, model), timeout)

    def logs(self, model: str, process: str = "", *, lines: int = 100, timeout: Optional[float] = None) -> LogsResponse:
        """Return the last log lines of a model's processes. The caller needs the right to operate the daemon.

        Args:
            model: the model's name.
            process: the name of one process as in `status`; "" for all.
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

        If the update fails, the old version continues to serve. Allowed for the daemon's user, root and tenants with
        the right to operate, and only over the daemon's unix socket.

        Args:
            model: the model's name.
            path: absolute path of the new model file on the daemon's host; "" keeps the current one.
            weights: absolute path of an .npz file with arrays that replace weights of the model; "" for none.
            rollback: return to the version that served before the last update. The current version is discarded.
            timeout: seconds to wait before `DeadlineExceeded` is raised. The update itself continues, see `status`.

        Raises:
            RequestError: as `infer`. `Unavailable` and `FailedPrecondition` give the reason why the old version still
                serves; after `Unavailable` the same update may succeed later.
        """
        return self._query_once(queries.update(model, path, weights, rollback=rollback), timeout)

    def load(
        self, model: str, *, action: str = LOAD, wait: bool = True, timeout: Optional[float] = None
    ) -> LoadResponse:
        """Load a model that is not loaded, and wait until it serves.

        Allowed for the daemon's user, root and tenants with the right to load or operate.

        Args:
            model: the model's name.
            action: "load"; "retry" for a model that has failed; "restart" to load the files again and replace the
                serving version, which serves until then.
            wait: whether to wait until the model serves or has failed.
            timeout: seconds to wait before `DeadlineExceeded` is raised. The load itself continues, see `status`.

        Raises:
            RequestError: as `infer`. `ResourceExhausted`: no budget has room for the model. `FailedPrecondition` and
                `Unavailable` give the reason why the model has failed.
        """
        return self._query_once(queries.load(model, action, wait=wait), timeout)

    def unload(self, model: str, *, wait: bool = True, timeout: Optional[float] = None) -> LoadResponse:
        """Unload a model after its accepted requests, and wait until its processes have ended.

        Allowed for the daemon's user, root and tenants with the right to load or operate.

        Args:
            model: the model's name. A model that loads on demand is loaded again by its next request.
            wait: whether to wait until no process of the model is left.
            timeout: seconds to wait before `DeadlineExceeded` is raised. The unload itself continues.

        Raises:
            RequestError: as `infer`. `FailedPrecondition`: the model must stay loaded.
        """
        return self._query_once(queries.unload(model, wait=wait), timeout)

    def reload(self, *, dry_run: bool = False, timeout: Optional[float] = None) -> ReloadResponse:
        """Make the daemon read its configuration file again. New and changed models load after the reply.

        With `dry_run` nothing changes; the response has the changes that a reload would make.

        Allowed for the daemon's user, root and tenants with the right to operate all models, and only over the daemon's
        unix socket.

        Raises:
            RequestError: as `infer`. `InvalidArgument` lists the errors in the file; in this case nothing has changed.
        """
        return self._query(queries.reload(dry_run=dry_run), timeout)
