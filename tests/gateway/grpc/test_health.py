"""The health protocol, asked by the library that probes are made of."""

from __future__ import annotations

from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from testkit.waiting import until
from weightd_gateway.auth import Authenticator
from weightd_gateway.grpc import health
from weightd_protocol.errors import Unavailable

from .served import LIMIT_S, served

SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
NOBODY = Authenticator({}, {}, {})


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(health, "CACHE_TTL_S", 0.01)


def test_a_probe_hears_whether_all_models_are_ready_whoever_it_is() -> None:
    request = health_pb2.HealthCheckRequest(service="inference.GRPCInferenceService")
    with served(NOBODY) as server, grpc.insecure_channel(server.target) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        assert stub.Check(request, timeout=LIMIT_S).status == SERVING
        assert stub.Check(health_pb2.HealthCheckRequest(), timeout=LIMIT_S).status == SERVING
        server.service.is_ready = Unavailable("nobody")
        until(lambda: stub.Check(request, timeout=LIMIT_S).status == NOT_SERVING, "not serving")


def test_a_service_that_there_is_not_is_not_found() -> None:
    request = health_pb2.HealthCheckRequest(service="other")
    with served(NOBODY) as server, grpc.insecure_channel(server.target) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            stub.Check(request, timeout=LIMIT_S)
        assert refused.value.code() == grpc.StatusCode.NOT_FOUND
        assert next(stub.Watch(request, timeout=LIMIT_S)).status == UNKNOWN


def test_who_watches_hears_each_change_once_and_the_end() -> None:
    with served(NOBODY) as server, grpc.insecure_channel(server.target) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        watch = stub.Watch(health_pb2.HealthCheckRequest(), timeout=LIMIT_S)
        assert next(watch).status == SERVING
        before = server.service.probed
        until(lambda: server.service.probed >= before + 3, "what has not changed is looked at")
        server.service.is_ready = False
        assert next(watch).status == NOT_SERVING
        server.stop(LIMIT_S)
        with pytest.raises(grpc.RpcError) as ended:
            next(watch)
        assert ended.value.code() == grpc.StatusCode.UNAVAILABLE
