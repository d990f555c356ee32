"""The tree of errors, and the codes of the wire."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest

from weightd.protocol import errors
from weightd.protocol.codec import decode, encode
from weightd.protocol.errors import ERRORS, RemoteProtocolError, RequestError, WeightdError, request_error
from weightd.protocol.messages.data import Error
from weightd.protocol.messages.types import TO_CLIENT

# https://grpc.io/docs/guides/status-codes/
GRPC = (
    "OK, CANCELLED, UNKNOWN, INVALID_ARGUMENT, DEADLINE_EXCEEDED, NOT_FOUND, ALREADY_EXISTS, PERMISSION_DENIED, "
    "RESOURCE_EXHAUSTED, FAILED_PRECONDITION, ABORTED, OUT_OF_RANGE, UNIMPLEMENTED, INTERNAL, UNAVAILABLE, DATA_LOSS, "
    "UNAUTHENTICATED"
)

CLASSES = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, Exception)]


def test_each_code_has_one_class_and_each_class_one_code() -> None:
    assert {cls.code: cls for cls in CLASSES if issubclass(cls, RequestError) and cls is not RequestError} == ERRORS
    assert {*ERRORS} == {
        "INVALID_ARGUMENT",
        "NOT_FOUND",
        "DEADLINE_EXCEEDED",
        "RESOURCE_EXHAUSTED",
        "UNAVAILABLE",
        "FAILED_PRECONDITION",
        "PERMISSION_DENIED",
        "UNAUTHENTICATED",
        "CANCELLED",
        "INTERNAL",
    }
    assert {*ERRORS} <= {*GRPC.split(", ")}


@pytest.mark.parametrize("code", ERRORS)
def test_a_class_is_named_after_its_code(code: str) -> None:
    assert ERRORS[code].__name__ == "".join(word.capitalize() for word in code.split("_"))
    assert ERRORS[code].__base__ is RequestError


@pytest.mark.parametrize("cls", CLASSES)
def test_every_error_is_in_the_tree_and_is_drawn_there(cls: type) -> None:
    assert issubclass(cls, WeightdError)
    assert cls.__name__ in (errors.__doc__ or "")


@pytest.mark.parametrize("code", ERRORS)
def test_an_error_crosses_the_wire(code: str) -> None:
    message = decode([encode(Error("7", code, "the cause"))], TO_CLIENT)
    assert isinstance(message, Error)
    error = request_error(message.code, message.error)
    assert type(error) is ERRORS[code]
    assert str(error) == "the cause"
    assert request_error(code, "the cause", retry_after=0.5).retry_after == 0.5


@pytest.mark.parametrize("code", ["", "OK", "internal", "UNKNOWN"])
def test_there_is_no_error_without_a_code(code: str) -> None:
    with pytest.raises(KeyError):
        request_error(code, "the cause")


def test_an_error_can_be_copied() -> None:
    error = RemoteProtocolError("the cause", "7")
    for each in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert (str(each), each.request_id) == ("the cause", "7")
