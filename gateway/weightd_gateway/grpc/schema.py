"""Message classes of tables: made when this is imported, in a pool of their own.

No code is generated: that would be bound to the release of protobuf that it was generated for. And the pool of the
process stays empty: two files that describe the same messages cannot be in one.
"""

from __future__ import annotations

from typing import Any

from google.protobuf.descriptor_pb2 import (
    DescriptorProto,
    EnumDescriptorProto,
    FieldDescriptorProto,
    FileDescriptorProto,
)
from google.protobuf.descriptor_pool import DescriptorPool
from google.protobuf.message_factory import GetMessageClass

from weightd_gateway.grpc.schema_tables import DescriptorFile

_SCALARS = {
    "double": FieldDescriptorProto.TYPE_DOUBLE,
    "float": FieldDescriptorProto.TYPE_FLOAT,
    "int64": FieldDescriptorProto.TYPE_INT64,
    "uint64": FieldDescriptorProto.TYPE_UINT64,
    "int32": FieldDescriptorProto.TYPE_INT32,
    "bool": FieldDescriptorProto.TYPE_BOOL,
    "string": FieldDescriptorProto.TYPE_STRING,
    "bytes": FieldDescriptorProto.TYPE_BYTES,
    "uint32": FieldDescriptorProto.TYPE_UINT32,
}


class Messages:
    """The message classes of one table, by their names.

    Attributes:
        file: what the table says, as protobuf has it.
        requests: what each method takes, by its name.
    """

    def __init__(self, table: DescriptorFile) -> None:
        self.file = file_descriptor(table)
        pool = DescriptorPool()
        pool.Add(self.file)
        self._classes: dict[str, Any] = {
            name: GetMessageClass(pool.FindMessageTypeByName(f"{table.package}.{name}")) for name in table.messages
        }
        self.requests: dict[str, Any] = {
            method: self[types.split(" ")[0].rstrip("*")]
            for methods in table.services.values()
            for method, types in methods.items()
        }

    def __getitem__(self, name: str) -> Any:
        return self._classes[name]


def file_descriptor(table: DescriptorFile) -> FileDescriptorProto:
    """Return what a table says, as protobuf has it."""
    file = FileDescriptorProto(name=table.file, package=table.package, syntax="proto3")
    by_name: dict[str, DescriptorProto] = {}
    for name, fields in table.messages.items():
        outer, _, own = name.rpartition(".")
        message = by_name[outer].nested_type.add(name=own) if outer else file.message_type.add(name=own)
        by_name[name] = message
        for each in filter(None, fields.split(", ")):
            _add_field(table, name, message, *each.split(" "))
    for name, values in table.enums.items():
        outer, _, own = name.rpartition(".")
        _add_enum_values(by_name[outer].enum_type.add(name=own) if outer else file.enum_type.add(name=own), values)
    for name, methods in table.services.items():
        service = file.service.add(name=name)
        for method, types in methods.items():
            request, answer = types.split(" ")
            service.method.add(
                name=method,
                input_type=_full_name(table, request.rstrip("*")),
                output_type=_full_name(table, answer.rstrip("*")),
                client_streaming=request.endswith("*"),
                server_streaming=answer.endswith("*"),
            )
    return file


def _add_field(table: DescriptorFile, owner: str, message: DescriptorProto, number: str, name: str, kind: str) -> None:
    kind, _, choice = kind.partition("@")
    field = message.field.add(number=int(number), name=name, label=FieldDescriptorProto.LABEL_OPTIONAL)
    if kind.endswith("*") or kind.startswith("{"):
        field.label = FieldDescriptorProto.LABEL_REPEATED
    if kind.startswith("{"):
        entry = "".join(part.capitalize() for part in name.split("_")) + "Entry"
        pair = message.nested_type.add(name=entry)
        pair.options.map_entry = True
        _add_field(table, "", pair, "1", "key", "string")
        _add_field(table, "", pair, "2", "value", kind.strip("{}"))
        field.type = FieldDescriptorProto.TYPE_MESSAGE
        field.type_name = _full_name(table, f"{owner}.{entry}")
        return
    _set_type(table, field, kind.rstrip("*"))
    if choice:
        choices = [each.name for each in message.oneof_decl]
        if choice not in choices:
            message.oneof_decl.add(name=choice)
            choices.append(choice)
        field.oneof_index = choices.index(choice)


def _set_type(table: DescriptorFile, field: FieldDescriptorProto, kind: str) -> None:
    if kind in _SCALARS:
        field.type = _SCALARS[kind]
        return
    field.type = FieldDescriptorProto.TYPE_ENUM if kind in table.enums else FieldDescriptorProto.TYPE_MESSAGE
    field.type_name = _full_name(table, kind)


def _add_enum_values(enum: EnumDescriptorProto, values: str) -> None:
    for number, name in enumerate(values.split(" ")):
        enum.value.add(name=name, number=number)


def _full_name(table: DescriptorFile, name: str) -> str:
    return f".{table.package}.{name}"
