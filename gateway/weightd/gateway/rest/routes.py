"""Which path is what: pure."""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import NamedTuple
from urllib.parse import unquote

from weightd.gateway.model_view import VERSION
from weightd.gateway.page.files import FILES
from weightd.protocol.errors import NotFound
from weightd.protocol.schema import label


class Verb(enum.Enum):
    """What is asked."""

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
    """A path: by method what is asked there, and of which model, region or file; "" of all."""

    methods: Mapping[str, Verb]
    name: str = ""


def parse_route(path: str) -> Route:
    """Return what a path is, which is as it was sent, without a query.

    Raises:
        NotFound: nothing.
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
            return Route({"GET": Verb.METRICS})
        case ["status.json"]:
            return Route({"GET": Verb.STATUS_JSON})
        case [file] if f"/{file}" in FILES:
            return Route({"GET": Verb.PAGE}, f"/{file}")
        case _:
            raise _not_found(segments)


_SERVER_ROUTES: Mapping[tuple[str, ...], Mapping[str, Verb]] = {
    (): {"GET": Verb.SERVER},
    ("health", "live"): {"GET": Verb.LIVE},
    ("health", "ready"): {"GET": Verb.READY},
    ("repository", "index"): {"POST": Verb.INDEX},
    ("trace", "setting"): {"GET": Verb.TRACE, "POST": Verb.CHANGE_SETTING},
    ("logging",): {"GET": Verb.LOGGING, "POST": Verb.CHANGE_SETTING},
    ("systemsharedmemory", "status"): {"GET": Verb.REGIONS},
    ("systemsharedmemory", "unregister"): {"POST": Verb.UNREGISTER},
    ("cudasharedmemory", "status"): {"GET": Verb.CUDA_REGIONS},
    ("cudasharedmemory", "unregister"): {"POST": Verb.CUDA_UNREGISTER},
}

_MODEL_ROUTES: Mapping[tuple[str, ...], Mapping[str, Verb]] = {
    (): {"GET": Verb.MODEL},
    ("ready",): {"GET": Verb.MODEL_READY},
    ("config",): {"GET": Verb.CONFIG},
    ("stats",): {"GET": Verb.STATISTICS},
    ("infer",): {"POST": Verb.INFER},
    ("trace", "setting"): {"GET": Verb.TRACE, "POST": Verb.CHANGE_SETTING},
}

_REGION_ROUTES: Mapping[tuple[str, str], Mapping[str, Verb]] = {
    ("systemsharedmemory", "status"): {"GET": Verb.REGIONS},
    ("systemsharedmemory", "register"): {"POST": Verb.REGISTER},
    ("systemsharedmemory", "unregister"): {"POST": Verb.UNREGISTER},
    ("cudasharedmemory", "status"): {"GET": Verb.CUDA_REGIONS},
    ("cudasharedmemory", "register"): {"POST": Verb.CUDA_REGISTER},
    ("cudasharedmemory", "unregister"): {"POST": Verb.CUDA_UNREGISTER},
}


def _server_route(rest: list[str]) -> Route:
    methods = _SERVER_ROUTES.get(tuple(rest))
    if methods is not None:
        return Route(methods)
    match rest:
        case ["repository", "models", name, "load" | "unload"]:
            return Route({"POST": Verb.LOAD}, name)
        case [kind, "region", name, act] if name and (kind, act) in _REGION_ROUTES:
            return Route(_REGION_ROUTES[kind, act], name)
        case _:
            raise _not_found(["v2", *rest])


def _model_route(name: str, rest: list[str]) -> Route:
    # As Triton has it: no model can be asked about by this name.
    if name == "stats" and not rest:
        return Route({"GET": Verb.STATISTICS})
    if rest[:1] == ["versions"] and len(rest) > 1:
        if rest[1] != VERSION:
            raise NotFound(f"no version {label(rest[1])} of model {label(name)}: each has version {VERSION} alone")
        rest = rest[2:]
    methods = _MODEL_ROUTES.get(tuple(rest))
    if methods is None or not name:
        raise _not_found(["v2", "models", name, *rest])
    return Route(methods, name)


def _not_found(segments: list[str]) -> NotFound:
    return NotFound(f"there is nothing at /{label('/'.join(segments))}")
