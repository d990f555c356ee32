"""Which path is what."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightd.gateway.rest.routes import Verb, parse_route
from weightd.protocol.errors import NotFound


@pytest.mark.parametrize(
    ("method", "path", "verb", "name"),
    [
        ("GET", "/v2", Verb.SERVER, ""),
        ("GET", "/v2/", Verb.SERVER, ""),
        ("GET", "/v2/health/live", Verb.LIVE, ""),
        ("GET", "/v2/health/ready", Verb.READY, ""),
        ("GET", "/v2/models/m", Verb.MODEL, "m"),
        ("GET", "/v2/models/m/versions/1", Verb.MODEL, "m"),
        ("GET", "/v2/models/m/ready", Verb.MODEL_READY, "m"),
        ("GET", "/v2/models/m/versions/1/ready", Verb.MODEL_READY, "m"),
        ("GET", "/v2/models/m/config", Verb.CONFIG, "m"),
        ("GET", "/v2/models/stats", Verb.STATISTICS, ""),
        ("GET", "/v2/models/m/stats", Verb.STATISTICS, "m"),
        ("GET", "/v2/models/m/versions/1/stats", Verb.STATISTICS, "m"),
        ("POST", "/v2/models/m/infer", Verb.INFER, "m"),
        ("POST", "/v2/models/m/versions/1/infer", Verb.INFER, "m"),
        ("POST", "/v2/models/stats/infer", Verb.INFER, "stats"),
        ("POST", "/v2/models/a%20b%2Fc/infer", Verb.INFER, "a b/c"),
        ("POST", "/v2/repository/index", Verb.INDEX, ""),
        ("POST", "/v2/repository/models/m/load", Verb.LOAD, "m"),
        ("POST", "/v2/repository/models/m/unload", Verb.LOAD, "m"),
        ("GET", "/v2/systemsharedmemory/status", Verb.REGIONS, ""),
        ("GET", "/v2/systemsharedmemory/region/r/status", Verb.REGIONS, "r"),
        ("POST", "/v2/systemsharedmemory/region/r/register", Verb.REGISTER, "r"),
        ("POST", "/v2/systemsharedmemory/region/r/unregister", Verb.UNREGISTER, "r"),
        ("POST", "/v2/systemsharedmemory/unregister", Verb.UNREGISTER, ""),
        ("GET", "/v2/cudasharedmemory/status", Verb.CUDA_REGIONS, ""),
        ("POST", "/v2/cudasharedmemory/region/r/register", Verb.CUDA_REGISTER, "r"),
        ("GET", "/v2/trace/setting", Verb.TRACE, ""),
        ("POST", "/v2/models/m/trace/setting", Verb.CHANGE_SETTING, "m"),
        ("GET", "/v2/logging", Verb.LOGGING, ""),
        ("GET", "/metrics", Verb.METRICS, ""),
    ],
)
def test_each_path_has_its_verb(method: str, path: str, verb: Verb, name: str) -> None:
    methods, found = parse_route(path)
    assert (methods[method], found) == (verb, name)


@pytest.mark.parametrize(
    "path",
    [
        "/v1",
        "/v2/models",
        "/v2/models//infer",
        "/v2/models/a/b/infer",
        "/v2/models/m/versions",
        "/v2/models/m/versions/1/versions/1",
        "/v2/systemsharedmemory/region//register",
        "/v2/repository/models/m/reload",
        "/metrics/x",
    ],
)
def test_where_there_is_nothing(path: str) -> None:
    with pytest.raises(NotFound, match="there is nothing at"):
        parse_route(path)


def test_there_is_one_version() -> None:
    with pytest.raises(NotFound, match="no version 2 of model m: each has version 1 alone"):
        parse_route("/v2/models/m/versions/2/infer")


@given(st.text(max_size=60))
def test_any_path_is_something_or_nothing(path: str) -> None:
    for each in (path, f"/v2/models/{path}", f"/v2/{path}"):
        try:
            assert parse_route(each).methods
        except NotFound:
            continue
