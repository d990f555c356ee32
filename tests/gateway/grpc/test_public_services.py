"""Tests of health checks and reflection with the client libraries that probes and tools use."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_health.v1 import health_pb2, health_pb2_grpc
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from testkit.waiting import until
from weightd_gateway.auth import Authenticator
from weightd_gateway.grpc import public_services
from weightd_gateway.grpc.handlers import MAX_SMALL_MESSAGE_BYTES
from weightd_protocol.errors import Unavailable

from .served import LIMIT_S, connected, served

NAMES = [
    "grpc.health.v1.Health",
    "grpc.reflection.v1.ServerReflection",
    "grpc.reflection.v1alpha.ServerReflection",
    "inference.GRPCInferenceService",
]


@pytest.fixture(scope="module")
def channel() -> Iterator[Any]:
    with served(Authenticator({}, {}, {})) as server, connected(server.target) as channel:
        yield channel


def test_lists_and_describes_services(channel: Any) -> None:
    database = ProtoReflectionDescriptorDatabase(channel)
    assert sorted(database.get_services()) == NAMES
    pool = DescriptorPool(database)
    service = pool.FindServiceByName("inference.GRPCInferenceService")
    assert service.methods_by_name["ModelInfer"].input_type.full_name == "inference.ModelInferRequest"


def test_descriptors_suffice_for_a_call(channel: Any) -> None:
    pool = DescriptorPool(ProtoReflectionDescriptorDatabase(channel))
    method = pool.FindMethodByName("inference.GRPCInferenceService.ServerMetadata")
    request, answer = GetMessageClass(method.input_type), GetMessageClass(method.output_type)
    ask = channel.unary_unary(
        "/grpc.health.v1.Health/Check", request_serializer=request.SerializeToString, response_deserializer=bytes
    )
    assert ask(request(), timeout=LIMIT_S) == b"\x08\x01"
    assert answer.DESCRIPTOR.fields_by_name["extensions"].number == 3


@pytest.mark.parametrize("version", ["v1", "v1alpha"])
@pytest.mark.parametrize(
    ("asked", "found"),
    [
        ({"file_by_filename": "weightd/inference.proto"}, "weightd/inference.proto"),
        ({"file_containing_symbol": "inference.ModelMetadataResponse.TensorMetadata"}, "weightd/inference.proto"),
        ({"file_containing_symbol": "inference.GRPCInferenceService.ModelInfer"}, "weightd/inference.proto"),
        ({"file_containing_symbol": "inference.DataType"}, "weightd/inference.proto"),
        ({"file_containing_symbol": "grpc.health.v1.HealthCheckResponse.ServingStatus"}, "weightd/health.proto"),
        ({"file_containing_symbol": "inference.Other"}, None),
        ({"file_by_filename": "/etc/passwd"}, None),
        ({"file_containing_extension": {"containing_type": "inference.ModelConfig", "extension_number": 1}}, None),
        ({"all_extension_numbers_of_type": "inference.Other"}, None),
        ({}, None),
    ],
)
def test_answers_each_reflection_request(channel: Any, version: str, asked: dict[str, Any], found: str) -> None:
    stream = channel.stream_stream(f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo")
    request = reflection_pb2.ServerReflectionRequest(host="h", **asked)
    (content,) = stream(iter([request.SerializeToString()]), timeout=LIMIT_S)
    answer = reflection_pb2.ServerReflectionResponse.FromString(content)
    assert (answer.valid_host, answer.original_request) == ("h", request)
    files = [FileDescriptorProto.FromString(each) for each in answer.file_descriptor_response.file_descriptor_proto]
    assert [each.name for each in files] == ([found] if found else [])
    assert bool(answer.error_response.error_code) == (not found)


def test_limits_reflection_requests(channel: Any) -> None:
    stream = channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
    request = reflection_pb2.ServerReflectionRequest(host="h" * MAX_SMALL_MESSAGE_BYTES)
    with pytest.raises(grpc.RpcError, match="RESOURCE_EXHAUSTED"):
        next(stream(iter([request.SerializeToString()]), timeout=LIMIT_S))


def test_has_no_extensions(channel: Any) -> None:
    stream = channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
    request = reflection_pb2.ServerReflectionRequest(all_extension_numbers_of_type="inference.ModelConfig")
    (content,) = stream(iter([request.SerializeToString()]), timeout=LIMIT_S)
    answer = reflection_pb2.ServerReflectionResponse.FromString(content).all_extension_numbers_response
    assert (answer.base_type_name, [*answer.extension_number]) == ("inference.ModelConfig", [])


SERVING, NOT_SERVING = health_pb2.HealthCheckResponse.SERVING, health_pb2.HealthCheckResponse.NOT_SERVING
UNKNOWN = health_pb2.HealthCheckResponse.SERVICE_UNKNOWN
NOBODY = Authenticator({}, {}, {})


@pytest.fixture
def short_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(public_services, "CACHE_TTL_S", 0.01)


def test_health_check_needs_no_credentials(short_cache: None) -> None:
    request = health_pb2.HealthCheckRequest(service="inference.GRPCInferenceService")
    with served(NOBODY) as server, grpc.insecure_channel(server.target) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        assert stub.Check(request, timeout=LIMIT_S).status == SERVING
        assert stub.Check(health_pb2.HealthCheckRequest(), timeout=LIMIT_S).status == SERVING
        server.service.is_ready = Unavailable("nobody")
        until(lambda: stub.Check(request, timeout=LIMIT_S).status == NOT_SERVING, "not serving")


def test_unknown_service_is_not_found(short_cache: None) -> None:
    request = health_pb2.HealthCheckRequest(service="other")
    with served(NOBODY) as server, grpc.insecure_channel(server.target) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        with pytest.raises(grpc.RpcError) as refused:
            stub.Check(request, timeout=LIMIT_S)
        assert refused.value.code() == grpc.StatusCode.NOT_FOUND
        assert next(stub.Watch(request, timeout=LIMIT_S)).status == UNKNOWN


def test_watch_reports_each_change_once(short_cache: None) -> None:
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


def test_cancelled_watch_does_not_affect_others(short_cache: None) -> None:
    with served(NOBODY) as server, grpc.insecure_channel(server.target) as channel:
        stub: Any = health_pb2_grpc.HealthStub(channel)
        first, second = (stub.Watch(health_pb2.HealthCheckRequest(), timeout=LIMIT_S) for _ in range(2))
        assert [next(first).status, next(second).status] == [SERVING, SERVING]
        first.cancel()
        server.service.is_ready = False
        assert next(second).status == NOT_SERVING
