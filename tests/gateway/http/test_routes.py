"""Tests of the mapping from HTTP paths to operations."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from weightd_gateway.http.routes import Operation, parse_route
from weightd_protocol.errors import NotFound


@pytest.mark.parametrize(
    ("method", "path", "verb", "name"),
    [
        ("GET", "/v2", Operation.SERVER, ""),
        ("GET", "/v2/", Operation.SERVER, ""),
        ("GET", "/v2/health/live", Operation.LIVE, ""),
        ("GET", "/v2/health/ready", Operation.READY, ""),
        ("GET", "/v2/models/m", Operation.MODEL, "m"),
        ("GET", "/v2/models/m/versions/1", Operation.MODEL, "m@1"),
        ("GET", "/v2/models/m/ready", Operation.MODEL_READY, "m"),
        ("GET", "/v2/models/m/versions/1/ready", Operation.MODEL_READY, "m@1"),
        ("GET", "/v2/models/m/config", Operation.CONFIG, "m"),
        ("GET", "/v2/models/stats", Operation.STATISTICS, ""),
        ("GET", "/v2/models/m/stats", Operation.STATISTICS, "m"),
        ("GET", "/v2/models/m/versions/1/stats", Operation.STATISTICS, "m@1"),
        ("POST", "/v2/models/m/infer", Operation.INFER, "m"),
        ("POST", "/v2/models/m/versions/1/infer", Operation.INFER, "m@1"),
        ("POST", "/v2/models/stats/infer", Operation.INFER, "stats"),
        ("POST", "/v2/models/a%20b%2Fc/infer", Operation.INFER, "a b/c"),
        ("POST", "/v2/repository/index", Operation.INDEX, ""),
        ("POST", "/v2/repository/models/m/load", Operation.LOAD, "m"),
        ("POST", "/v2/repository/models/m/unload", Operation.UNLOAD, "m"),
        ("GET", "/v2/systemsharedmemory/status", Operation.REGIONS, ""),
        ("GET", "/v2/systemsharedmemory/region/r/status", Operation.REGIONS, "r"),
        ("POST", "/v2/systemsharedmemory/region/r/register", Operation.REGISTER, "r"),
        ("POST", "/v2/systemsharedmemory/region/r/unregister", Operation.UNREGISTER, "r"),
        ("POST", "/v2/systemsharedmemory/unregister", Operation.UNREGISTER, ""),
        ("GET", "/v2/cudasharedmemory/status", Operation.CUDA_REGIONS, ""),
        ("POST", "/v2/cudasharedmemory/region/r/register", Operation.CUDA_REGISTER, "r"),
        ("GET", "/v2/trace/setting", Operation.TRACE, ""),
        ("POST", "/v2/models/m/trace/setting", Operation.CHANGE_SETTING, "m"),
        ("GET", "/v2/logging", Operation.LOGGING, ""),
        ("GET", "/metrics", Operation.METRICS, ""),
    ],
)
def test_each_path_has_its_operation(method: str, path: str, verb: Operation, name: str) -> None:
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
def test_unknown_path_is_not_found(path: str) -> None:
    with pytest.raises(NotFound, match="no such path: /"):
        parse_route(path)


@given(st.text(max_size=60))
def test_parses_or_rejects_any_path(path: str) -> None:
    for each in (path, f"/v2/models/{path}", f"/v2/{path}"):
        try:
            assert parse_route(each).methods
        except NotFound:
            continue
