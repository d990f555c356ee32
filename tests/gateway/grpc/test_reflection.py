"""Reflection: what tools without a `.proto` file ask, by the library that has it; and those of the newer version."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import grpc
import pytest
from google.protobuf.descriptor_pb2 import FileDescriptorProto
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha import reflection_pb2
from grpc_reflection.v1alpha.proto_reflection_descriptor_database import ProtoReflectionDescriptorDatabase

from weightd_gateway.auth import Authenticator
from weightd_gateway.grpc.handlers import MAX_SMALL_MESSAGE_BYTES

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


def test_services_are_listed_and_described(channel: Any) -> None:
    database = ProtoReflectionDescriptorDatabase(channel)
    assert sorted(database.get_services()) == NAMES
    pool = DescriptorPool(database)
    service = pool.FindServiceByName("inference.GRPCInferenceService")
    assert service.methods_by_name["ModelInfer"].input_type.full_name == "inference.ModelInferRequest"


def test_what_is_described_is_enough_to_ask(channel: Any) -> None:
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
def test_each_question_is_answered(channel: Any, version: str, asked: dict[str, Any], found: str) -> None:
    stream = channel.stream_stream(f"/grpc.reflection.{version}.ServerReflection/ServerReflectionInfo")
    request = reflection_pb2.ServerReflectionRequest(host="h", **asked)
    (content,) = stream(iter([request.SerializeToString()]), timeout=LIMIT_S)
    answer = reflection_pb2.ServerReflectionResponse.FromString(content)
    assert (answer.valid_host, answer.original_request) == ("h", request)
    files = [FileDescriptorProto.FromString(each) for each in answer.file_descriptor_response.file_descriptor_proto]
    assert [each.name for each in files] == ([found] if found else [])
    assert bool(answer.error_response.error_code) == (not found)


def test_a_question_is_short(channel: Any) -> None:
    stream = channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
    request = reflection_pb2.ServerReflectionRequest(host="h" * MAX_SMALL_MESSAGE_BYTES)
    with pytest.raises(grpc.RpcError, match="RESOURCE_EXHAUSTED"):
        next(stream(iter([request.SerializeToString()]), timeout=LIMIT_S))


def test_nothing_has_extensions(channel: Any) -> None:
    stream = channel.stream_stream("/grpc.reflection.v1.ServerReflection/ServerReflectionInfo")
    request = reflection_pb2.ServerReflectionRequest(all_extension_numbers_of_type="inference.ModelConfig")
    (content,) = stream(iter([request.SerializeToString()]), timeout=LIMIT_S)
    answer = reflection_pb2.ServerReflectionResponse.FromString(content).all_extension_numbers_response
    assert (answer.base_type_name, [*answer.extension_number]) == ("inference.ModelConfig", [])
