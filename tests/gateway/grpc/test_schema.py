"""Tests that the committed descriptors match the `.proto` files and the clients of other projects."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
from google.protobuf.descriptor_pb2 import DescriptorProto, FieldDescriptorProto, FileDescriptorProto, FileDescriptorSet
from grpc_health.v1 import health_pb2
from grpc_reflection.v1alpha import reflection_pb2
from tools import descriptors
from tritonclient.grpc import model_config_pb2, service_pb2

from weightd_gateway.grpc.schema import INFERENCE, POOL

# Name, number, type, label and oneof of a field.
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
    """Return the messages of another project's generated modules as if they came from one file."""
    whole = FileDescriptorProto()
    for each in modules:
        part = FileDescriptorProto()
        each.DESCRIPTOR.CopyToProto(part)
        whole.MergeFrom(part)
    return whole


def ours(name: str) -> FileDescriptorProto:
    file = FileDescriptorProto()
    POOL.FindFileByName(f"weightd/{name}.proto").CopyToProto(file)
    return file


TRITON = theirs(service_pb2, model_config_pb2)

WITNESSES = [
    pytest.param("inference", TRITON, id="inference"),
    pytest.param("health", theirs(health_pb2), id="health"),
    pytest.param("reflection", theirs(reflection_pb2), id="reflection"),
]


def test_descriptors_match_proto_files(tmp_path: Path) -> None:
    descriptors.compile_protos(tmp_path / "set")
    compiled, committed = (
        FileDescriptorSet.FromString(path.read_bytes()) for path in (tmp_path / "set", descriptors.TARGET)
    )
    assert compiled == committed, "run `python -m tools.descriptors` and commit the result"


@pytest.mark.parametrize(("name", "witness"), WITNESSES)
def test_fields_and_enums_match_other_projects(name: str, witness: FileDescriptorProto) -> None:
    known, own = messages_of(witness), messages_of(ours(name))
    for message, fields in own.items():
        assert fields == {field: known[message].get(field) for field in fields}, message
    values = enums_of(witness)
    assert enums_of(ours(name)) == {each: values[each] for each in enums_of(ours(name))}


def test_service_messages_are_complete() -> None:
    own = messages_of(ours("inference"))
    for name, fields in messages_of(theirs(service_pb2)).items():
        assert own[name] == fields, name


@pytest.mark.parametrize(("name", "witness"), WITNESSES)
def test_methods_match_other_projects(name: str, witness: FileDescriptorProto) -> None:
    known = {each.replace("v1alpha", "v1"): types for each, types in methods_of(witness).items()}
    own = methods_of(ours(name))
    assert {each: tuple(map(str, types)) for each, types in own.items()} == {
        each: tuple(str(part).replace("v1alpha", "v1") for part in types)
        for each, types in known.items()
        if each in own or name != "health"
    }


def test_other_projects_read_our_messages() -> None:
    ours = INFERENCE["ModelInferRequest"](model_name="digits", id="7", raw_input_contents=[b"\0\1"])
    ours.inputs.add(name="x", datatype="FP32", shape=[1, -1])
    ours.parameters["timeout"].int64_param = 5
    read = service_pb2.ModelInferRequest.FromString(ours.SerializeToString())
    assert (read.model_name, read.inputs[0].shape, read.parameters["timeout"].int64_param) == ("digits", [1, -1], 5)
    assert read.SerializeToString(deterministic=True) == ours.SerializeToString(deterministic=True)
