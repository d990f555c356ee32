"""Routing of HTTP paths to operations. Pure: no I/O."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import unquote

from weightd_gateway.page.files import FILES
from weightd_protocol.errors import NotFound
from weightd_protocol.model_names import join_version
from weightd_protocol.schema import label


class Operation(enum.Enum):
    """The operations of the HTTP API."""

    # The hash function of `Enum` is written in Python.
    __hash__ = object.__hash__

    LIVE = enum.auto()
    READY = enum.auto()
    SERVER = enum.auto()
    MODEL = enum.auto()
    MODEL_READY = enum.auto()
    CONFIG = enum.auto()
    STATISTICS = enum.auto()
    INFER = enum.auto()
    INDEX = enum.auto()
    LOAD = enum.auto()
    UNLOAD = enum.auto()
    REGIONS = enum.auto()
    REGISTER = enum.auto()
    UNREGISTER = enum.auto()
    CUDA_REGIONS = enum.auto()
    CUDA_REGISTER = enum.auto()
    CUDA_UNREGISTER = enum.auto()
    TRACE = enum.auto()
    LOGGING = enum.auto()
    CHANGE_SETTING = enum.auto()
    METRICS = enum.auto()
    PAGE = enum.auto()
    STATUS_JSON = enum.auto()


class Route(NamedTuple):
    """A path's operations by HTTP method, and the name of the model, region or file in the path; "" without a name."""

    methods: Mapping[str, Operation]
    name: str = ""


def parse_route(path: str) -> Route:
    """Return the route of a path. The path must be percent-encoded and have no query.

    Raises:
        NotFound: no route has this path.
    """
    segments = path.strip("/").split("/")
    if "%" in path:
        segments = [unquote(each) for each in segments]
    match segments:
        case ["v2", "models", name, *rest]:
            return _model_route(name, rest)
        case ["v2", *rest]:
            return _server_route(rest)
        case ["metrics"]:
            return Route({"GET": Operation.METRICS})
        case ["status.json"]:
            return Route({"GET": Operation.STATUS_JSON})
        case [file] if f"/{file}" in FILES:
            return Route({"GET": Operation.PAGE}, f"/{file}")
        case _:
            raise _not_found(segments)


_SERVER_ROUTES: Mapping[tuple[str, ...], Mapping[str, Operation]] = {
    (): {"GET": Operation.SERVER},
    ("health", "live"): {"GET": Operation.LIVE},
    ("health", "ready"): {"GET": Operation.READY},
    ("repository", "index"): {"POST": Operation.INDEX},
    ("trace", "setting"): {"GET": Operation.TRACE, "POST": Operation.CHANGE_SETTING},
    ("logging",): {"GET": Operation.LOGGING, "POST": Operation.CHANGE_SETTING},
    ("systemsharedmemory", "status"): {"GET": Operation.REGIONS},
    ("systemsharedmemory", "unregister"): {"POST": Operation.UNREGISTER},
    ("cudasharedmemory", "status"): {"GET": Operation.CUDA_REGIONS},
    ("cudasharedmemory", "unregister"): {"POST": Operation.CUDA_UNREGISTER},
}

_MODEL_ROUTES: Mapping[tuple[str, ...], Mapping[str, Operation]] = {
    (): {"GET": Operation.MODEL},
    ("ready",): {"GET": Operation.MODEL_READY},
    ("config",): {"GET": Operation.CONFIG},
    ("stats",): {"GET": Operation.STATISTICS},
    ("infer",): {"POST": Operation.INFER},
    ("trace", "setting"): {"GET": Operation.TRACE, "POST": Operation.CHANGE_SETTING},
}

_REGION_ROUTES: Mapping[tuple[str, str], Mapping[str, Operation]] = {
    ("systemsharedmemory", "status"): {"GET": Operation.REGIONS},
    ("systemsharedmemory", "register"): {"POST": Operation.REGISTER},
    ("systemsharedmemory", "unregister"): {"POST": Operation.UNREGISTER},
    ("cudasharedmemory", "status"): {"GET": Operation.CUDA_REGIONS},
    ("cudasharedmemory", "register"): {"POST": Operation.CUDA_REGISTER},
    ("cudasharedmemory", "unregister"): {"POST": Operation.CUDA_UNREGISTER},
}


def _server_route(rest: list[str]) -> Route:
    methods = _SERVER_ROUTES.get(tuple(rest))
    if methods is not None:
        return Route(methods)
    match rest:
        case ["repository", "models", name, "load"]:
            return Route({"POST": Operation.LOAD}, name)
        case ["repository", "models", name, "unload"]:
            return Route({"POST": Operation.UNLOAD}, name)
        case [kind, "region", name, act] if name and (kind, act) in _REGION_ROUTES:
            return Route(_REGION_ROUTES[kind, act], name)
        case _:
            raise _not_found(["v2", *rest])


def _model_route(name: str, rest: list[str]) -> Route:
    # As in Triton, /v2/models/stats returns statistics of all models, so a model named "stats" has no path for its
    # metadata.
    if name == "stats" and not rest:
        return Route({"GET": Operation.STATISTICS})
    if rest[:1] == ["versions"] and len(rest) > 1:
        name, rest = join_version(name, rest[1]) if name else "", rest[2:]
    methods = _MODEL_ROUTES.get(tuple(rest))
    if methods is None or not name:
        raise _not_found(["v2", "models", name, *rest])
    return Route(methods, name)


def _not_found(segments: list[str]) -> NotFound:
    return NotFound(f"no such path: /{label('/'.join(segments))}")
