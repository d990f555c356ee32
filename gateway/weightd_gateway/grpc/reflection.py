"""What services and messages there are, for `grpcurl` and its like: the reflection protocol of gRPC.

It says what the documents say, so whoever reaches the port may ask.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import grpc
from google.protobuf.descriptor_pb2 import DescriptorProto, FileDescriptorProto

from weightd_gateway.grpc.field_limits import checked_parser
from weightd_gateway.grpc.handlers import (
    Context,
    Handler,
    RpcHandlers,
    check_length,
    parse_message,
    receive_deadline,
    report_errors,
)
from weightd_gateway.grpc.schema import Messages
from weightd_gateway.grpc.streams import WaitingCalls

# Between two questions of a tool. Who asks no more leaves his place to others, who have no more of a right to it.
REQUEST_TIMEOUT_S = 10.0

NAME = "grpc.reflection.v1.ServerReflection"
V1ALPHA_NAME = "grpc.reflection.v1alpha.ServerReflection"

_INVALID_ARGUMENT = 3
_NOT_FOUND = 5


class Reflection:
    """Answers questions about files.

    Args:
        files: what there is to be told.
        protocol: the messages of the reflection protocol, in one of its versions.
        streams: those who ask are among them.
    """

    def __init__(self, files: Iterable[Messages], protocol: Messages, streams: WaitingCalls) -> None:
        self._parse = checked_parser(protocol["ServerReflectionRequest"])
        self._response = protocol["ServerReflectionResponse"]
        self._streams = streams
        self._by_name: dict[str, bytes] = {}
        self._by_symbol: dict[str, bytes] = {}
        self._messages: set[str] = set()
        self._services: list[str] = []
        for each in files:
            self._add_file(each.file)

    def handlers(self, calls: RpcHandlers) -> dict[str, Handler]:
        """Return what gRPC wants for each method."""

        async def info(messages: object, context: Context) -> None:
            with self._streams.admit(calls.anonymous_caller(context)):
                while (message := await self._receive(context)) is not grpc.aio.EOF:
                    check_length(message)
                    await context.write(self.answer(parse_message(message, self._parse)).SerializeToString())

        return {"ServerReflectionInfo": grpc.stream_stream_rpc_method_handler(report_errors(info))}

    async def _receive(self, context: Context) -> Any:
        with receive_deadline(REQUEST_TIMEOUT_S):
            return await self._streams.wait(context.read)

    def answer(self, request: Any) -> Any:
        """Return the answer to one `ServerReflectionRequest`."""
        response = self._response(valid_host=request.host, original_request=request)
        kind = request.WhichOneof("message_request")
        if kind == "list_services":
            for name in self._services:
                response.list_services_response.service.add(name=name)
        elif kind == "file_by_filename":
            self._set_file(response, self._by_name.get(request.file_by_filename))
        elif kind == "file_containing_symbol":
            self._set_file(response, self._by_symbol.get(request.file_containing_symbol))
        elif kind == "all_extension_numbers_of_type" and request.all_extension_numbers_of_type in self._messages:
            response.all_extension_numbers_response.base_type_name = request.all_extension_numbers_of_type
        elif kind is None:
            response.error_response.error_code = _INVALID_ARGUMENT
            response.error_response.error_message = "the request asks nothing"
        else:
            self._set_file(response, None)
        return response

    def _set_file(self, response: Any, content: bytes | None) -> None:
        if content is None:
            response.error_response.error_code = _NOT_FOUND
            response.error_response.error_message = "there is no such thing here"
        else:
            response.file_descriptor_response.file_descriptor_proto.append(content)

    def _add_file(self, file: FileDescriptorProto) -> None:
        content = file.SerializeToString()
        self._by_name[file.name] = content
        for message in file.message_type:
            self._add_message(message, file.package, content)
        for enum in file.enum_type:
            self._by_symbol[f"{file.package}.{enum.name}"] = content
        for service in file.service:
            name = f"{file.package}.{service.name}"
            self._services.append(name)
            self._by_symbol[name] = content
            self._by_symbol.update({f"{name}.{method.name}": content for method in service.method})

    def _add_message(self, message: DescriptorProto, scope: str, content: bytes) -> None:
        name = f"{scope}.{message.name}"
        self._messages.add(name)
        self._by_symbol[name] = content
        for nested in message.nested_type:
            self._add_message(nested, name, content)
        for enum in message.enum_type:
            self._by_symbol[f"{name}.{enum.name}"] = content
