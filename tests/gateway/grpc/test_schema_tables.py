"""Every message, number, name and type is that of the clients that others have written."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from tritonclient.grpc import model_config_pb2, service_pb2

from weightd_gateway.grpc import schema_tables
from weightd_gateway.grpc.schema import Messages, file_descriptor
from weightd_gateway.grpc.schema_tables import DescriptorFile

# A name, its number, its type, whether it is repeated, and among which it is chosen.
Fields = dict[str, tuple[int, int, str, int, str]]


def fields_of(message: DescriptorProto, package: str) -> Fields:
    def choice(field: FieldDescriptorProto) -> str:
        return message.oneof_decl[field.oneof_index].name if field.HasField("oneof_index") else ""

    return {
        each.name: (each.number, each.type, each.type_name.removeprefix(f".{package}"), each.label, choice(each))
        for each in message.field
    }


def messages_of(file: FileDescriptorProto) -> dict[str, Fields]:
    found: dict[str, Fields] = {}

    def add(messages: Iterable[DescriptorProto], within: str) -> None:
        for each in messages:
            name = f"{within}{each.name}" + (" (map)" if each.options.map_entry else "")
            found[name] = fields_of(each, file.package)
            add(each.nested_type, f"{within}{each.name}.")

    add(file.message_type, "")
    return found


def enums_of(file: FileDescriptorProto) -> dict[str, dict[str, int]]:
    within = [(f"{each.name}.", each.enum_type) for each in file.message_type]
    return {
        f"{outer}{enum.name}": {value.name: value.number for value in enum.value}
        for outer, enums in [("", file.enum_type), *within]
        for enum in enums
    }


def methods_of(file: FileDescriptorProto) -> dict[str, tuple[str, str, bool, bool]]:
    return {
        f"{file.package}.{service.name}.{method.name}": (
            method.input_type,
            method.output_type,
            method.client_streaming,
            method.server_streaming,
        )
        for service in file.service
        for method in service.method
    }


def theirs(*modules: Any) -> FileDescriptorProto:
    """Return what is described by modules that others have generated, as if it were one file."""
    whole = FileDescriptorProto()
    for each in modules:
        part = FileDescriptorProto()
        each.DESCRIPTOR.CopyToProto(part)
        whole.MergeFrom(part)
    return whole


TRITON = theirs(service_pb2, model_config_pb2)

WITNESSES = [
    pytest.param(schema_tables.INFERENCE, TRITON, id="inference"),
    pytest.param(schema_tables.HEALTH, theirs(health_pb2), id="health"),
    pytest.param(schema_tables.REFLECTION_V1ALPHA, theirs(reflection_pb2), id="reflection"),
]


@pytest.mark.parametrize(("table", "witness"), WITNESSES)
def test_each_field_is_what_others_have(table: DescriptorFile, witness: FileDescriptorProto) -> None:
    known = messages_of(witness)
    for name, fields in messages_of(file_descriptor(table)).items():
        assert fields == {field: known[name].get(field) for field in fields}, name


@pytest.mark.parametrize(("table", "witness"), WITNESSES)
def test_each_value_of_an_enum_is_what_others_have(table: DescriptorFile, witness: FileDescriptorProto) -> None:
    known = enums_of(witness)
    for name, values in enums_of(file_descriptor(table)).items():
        assert values == known[name], name


def test_what_is_in_front_of_the_configuration_is_there_in_full() -> None:
    own = messages_of(file_descriptor(schema_tables.INFERENCE))
    for name, fields in messages_of(theirs(service_pb2)).items():
        assert own[name] == fields, name


def test_each_method_of_inference_is_there() -> None:
    assert methods_of(file_descriptor(schema_tables.INFERENCE)) == methods_of(TRITON)


@pytest.mark.parametrize(
    ("table", "module"),
    [(schema_tables.HEALTH, health_pb2), (schema_tables.REFLECTION_V1ALPHA, reflection_pb2)],
    ids=["health", "reflection"],
)
def test_the_methods_asked_by_tools_are_there(table: DescriptorFile, module: Any) -> None:
    known = methods_of(theirs(module))
    own = methods_of(file_descriptor(table))
    assert own == {name: known[name] for name in own}
    assert own


def test_the_newer_reflection_differs_in_nothing_but_its_name() -> None:
    new, old = file_descriptor(schema_tables.REFLECTION), file_descriptor(schema_tables.REFLECTION_V1ALPHA)
    assert messages_of(new) == messages_of(old)
    assert [*methods_of(new)] == ["grpc.reflection.v1.ServerReflection.ServerReflectionInfo"]


def test_bytes_of_the_one_are_messages_of_the_other() -> None:
    ours = Messages(schema_tables.INFERENCE)["ModelInferRequest"](
        model_name="digits", id="7", raw_input_contents=[b"\0\1"]
    )
    ours.inputs.add(name="x", datatype="FP32", shape=[1, -1])
    ours.parameters["timeout"].int64_param = 5
    read = service_pb2.ModelInferRequest.FromString(ours.SerializeToString())
    assert (read.model_name, read.inputs[0].shape, read.parameters["timeout"].int64_param) == ("digits", [1, -1], 5)
    assert read.SerializeToString(deterministic=True) == ours.SerializeToString(deterministic=True)
