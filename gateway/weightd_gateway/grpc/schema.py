"""Protobuf message classes of the gateway's gRPC services, from a descriptor set compiled from `proto/*.proto`.

The classes are created at run time, because generated code would require the protobuf release for which it was
generated. The messages are in a separate descriptor pool: protobuf's default pool may already contain the same messages
from another client library in this process, and would reject a second file with them.
"""

from __future__ import annotations

from importlib import resources
from typing import Any

from google.protobuf.descriptor_pb2 import FileDescriptorSet
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass
from grpc_reflection.v1alpha import reflection_pb2

_DESCRIPTORS = FileDescriptorSet.FromString(
    resources.files("weightd_gateway.grpc").joinpath("proto", "descriptors.binpb").read_bytes()
)


def _new_pool() -> Any:
    pool: Any = DescriptorPool()
    for file in _DESCRIPTORS.file:
        pool.AddSerializedFile(file.SerializeToString())
    # Reflection v1alpha has the same messages as v1, in another package.
    pool.AddSerializedFile(reflection_pb2.DESCRIPTOR.serialized_pb)
    return pool


POOL = _new_pool()


class Messages:
    """The message classes of one protobuf package, by name.

    Attributes:
        requests: the request class of each method of the package's services, by the method's name.
    """

    def __init__(self, package: str) -> None:
        self._package = package
        self._classes: dict[str, Any] = {}
        self.requests: dict[str, Any] = {
            method.name: GetMessageClass(POOL.FindMessageTypeByName(method.input_type[1:]))
            for file in _DESCRIPTORS.file
            if file.package == package
            for service in file.service
            for method in service.method
        }

    def __getitem__(self, name: str) -> Any:
        found = self._classes.get(name)
        if found is None:
            found = self._classes[name] = GetMessageClass(POOL.FindMessageTypeByName(f"{self._package}.{name}"))
        return found


INFERENCE_SERVICE = "inference.GRPCInferenceService"
HEALTH_SERVICE = "grpc.health.v1.Health"
REFLECTION_SERVICE = "grpc.reflection.v1.ServerReflection"
REFLECTION_V1ALPHA_SERVICE = "grpc.reflection.v1alpha.ServerReflection"

INFERENCE = Messages("inference")
HEALTH = Messages("grpc.health.v1")
STATUS = Messages("google.rpc")
