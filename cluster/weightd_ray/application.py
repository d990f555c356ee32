"""The Ray Serve application of a model."""

from __future__ import annotations

import dataclasses
import logging
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ray import serve

from weightd_common.modelfiles.files import ModelFileError, digest
from weightd_gateway.http.asgi import AsgiApp, Receive, Scope, Send
from weightd_ray import options as arguments
from weightd_ray.options import Arguments
from weightd_ray.replica import Replica

_log = logging.getLogger("weightd.ray")

# Maximum number of requests that wait at each router of Serve, equal to the default of a model's `max_queue` in the
# daemon. Serve rejects further requests with status 503.
_MAX_QUEUED = 1024

# Seconds between health checks, and timeout of a health check, which sends the daemon two requests. After three failed
# checks, Serve replaces the replica.
_HEALTH_PERIOD_S = 5.0
_HEALTH_TIMEOUT_S = 20.0

# Seconds that Serve lets a replica take to stop: the default timeout of a request, plus the time that the daemon needs
# to stop.
_SHUTDOWN_TIMEOUT_S = 45.0


class _Serving(Replica):
    """A replica with the special methods by which Serve creates the replica, sends it HTTP requests and stops it."""

    # A coroutine is allowed, because Serve's wrapper class declares __init__ as a coroutine, too.
    async def __init__(self, arguments: Arguments) -> None:  # type: ignore[misc]
        super().__init__(arguments)
        await self.start()

    def __serve_build_asgi_app__(self) -> AsgiApp:
        # A plain function instead of a method, because uvicorn takes any other callable for an ASGI 2 application.
        async def app(scope: Scope, receive: Receive, send: Send) -> None:
            await self.asgi(scope, receive, send)

        return app

    async def __del__(self) -> None:
        """Stop the replica; Serve awaits this method after all requests have ended."""
        await self.stop()


_DEPLOYMENT = serve.deployment(
    name="weightd",
    # A second replica on a node would load a second copy of the weights. One daemon can use all cores of the node.
    max_replicas_per_node=1,
    max_queued_requests=_MAX_QUEUED,
    health_check_period_s=_HEALTH_PERIOD_S,
    health_check_timeout_s=_HEALTH_TIMEOUT_S,
    graceful_shutdown_timeout_s=_SHUTDOWN_TIMEOUT_S,
)(serve.ingress()(_Serving))


def build(args: Mapping[str, Any]) -> serve.Application:
    """Return the application for the arguments.

    Raises:
        ArgumentError: arguments are invalid.
    """
    parsed = arguments.parse_arguments(args)
    if not (parsed.sha256 or parsed.address):
        parsed = dataclasses.replace(parsed, sha256=_digest_of(Path(parsed.model)))
    actor_options = {"num_cpus": parsed.cores}
    deployment = _DEPLOYMENT.options(max_ongoing_requests=parsed.max_ongoing_requests, ray_actor_options=actor_options)
    return deployment.bind(parsed)


def _digest_of(path: Path) -> str:
    """Return the digest that the model of each replica must have; "" if the model file is not on this host."""
    try:
        return digest(path)
    except ModelFileError as error:
        _log.warning("%s; cannot check that all replicas have the same model: set its sha256", error)
        return ""
