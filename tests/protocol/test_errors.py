"""Tests of the exception classes and their error codes."""

from __future__ import annotations

import copy
import inspect
import pickle

import pytest

from weightd_protocol import errors
from weightd_protocol.errors import ERRORS, RemoteProtocolError, RequestError, WeightdError, request_error

# https://grpc.io/docs/guides/status-codes/
GRPC = (
    "OK, CANCELLED, UNKNOWN, INVALID_ARGUMENT, DEADLINE_EXCEEDED, NOT_FOUND, ALREADY_EXISTS, PERMISSION_DENIED, "
    "RESOURCE_EXHAUSTED, FAILED_PRECONDITION, ABORTED, OUT_OF_RANGE, UNIMPLEMENTED, INTERNAL, UNAVAILABLE, DATA_LOSS, "
    "UNAUTHENTICATED"
)

CLASSES = [cls for _, cls in inspect.getmembers(errors, inspect.isclass) if issubclass(cls, Exception)]


def test_docstring_lists_every_error() -> None:
    for cls in CLASSES:
        assert issubclass(cls, WeightdError)
        assert cls.__name__ in (errors.__doc__ or "")


def test_each_code_is_a_grpc_code_with_a_class() -> None:
    named = {cls.__name__: cls for cls in CLASSES if cls.__base__ is RequestError}
    assert {"".join(word.capitalize() for word in code.split("_")): cls for code, cls in ERRORS.items()} == named
    assert {*ERRORS} <= {*GRPC.split(", ")}
    for code, cls in ERRORS.items():
        error = request_error(code, "the cause", retry_after=0.5)
        assert type(error) is cls
        assert (error.code, str(error), error.retry_after) == (code, "the cause", 0.5)


@pytest.mark.parametrize("code", ["", "OK", "internal", "UNKNOWN"])
def test_unknown_code_is_a_key_error(code: str) -> None:
    with pytest.raises(KeyError):
        request_error(code, "the cause")


def test_errors_are_copyable() -> None:
    error = RemoteProtocolError("the cause", "7")
    for each in (copy.copy(error), pickle.loads(pickle.dumps(error))):
        assert (str(each), each.request_id) == ("the cause", "7")
