"""Who asks in HTTP, and whether the request is meant for this host at all."""

from __future__ import annotations

import re
from collections.abc import Collection
from typing import cast

from aiohttp import hdrs

from weightd_gateway.auth import Authenticator, Caller, parse_bearer
from weightd_gateway.http.request import HttpRequest, RequestConnection
from weightd_gateway.tracing import TRACEPARENT, valid_traceparent
from weightd_protocol.errors import PermissionDenied, Unauthenticated
from weightd_protocol.schema import label

ANY_HOST = "*"

_PORT = re.compile(r":[0-9]*$")


def caller_of(request: HttpRequest, authenticator: Authenticator) -> Caller:
    """Return who asks.

    Raises:
        Unauthenticated: nobody whom the gateway knows.
    """
    connection = cast(RequestConnection, request.protocol)
    authorization = request.headers.getall(hdrs.AUTHORIZATION, ())
    if len(authorization) > 1:
        raise Unauthenticated("expected one authorization")
    return authenticator.authenticate(
        token=parse_bearer(authorization[0]) if authorization else None,
        common_name=connection.common_name,
        uid=connection.uid,
    )


def check_host(request: HttpRequest, hosts: Collection[str]) -> None:
    """See to it that a request is for this host: a page in a browser can have a name of its own point here.

    Raises:
        PermissionDenied: it is for another one.
    """
    host = _PORT.sub("", request.headers.get(hdrs.HOST, "")).lower()
    if host in hosts or ANY_HOST in hosts or cast(RequestConnection, request.protocol).uid is not None:
        return
    raise PermissionDenied(f"expected a host that is among `hosts` of the gateway's configuration, got {label(host)}")


def traceparent_of(request: HttpRequest) -> str:
    """Return the traceparent of a request, "" where it has none that is one."""
    return valid_traceparent(request.headers.get(TRACEPARENT, ""))
