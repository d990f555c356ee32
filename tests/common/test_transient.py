"""Tests of which failures count as transient."""

from __future__ import annotations

import errno
import os
from typing import Optional

import pytest

from weightd_common.transient import is_transient, mentions_transient
from weightd_protocol.errors import WeightdError


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (errno.ENOENT, True),
        (errno.ENOSPC, True),
        (errno.EMFILE, True),
        (errno.ENFILE, True),
        (errno.EAGAIN, True),
        (errno.ENOMEM, True),
        (errno.ESTALE, True),
        (errno.EACCES, False),
        (errno.EISDIR, False),
        (errno.EINVAL, False),
    ],
)
def test_errno_determines_transience(number: int, expected: bool) -> None:
    error = OSError(number, os.strerror(number))
    assert is_transient(error) is expected
    assert mentions_transient(f"OSError: [Errno {number}] {error.strerror}: '/x'") is expected


def test_transience_follows_the_cause() -> None:
    caught: Optional[BaseException] = None
    try:
        try:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory")
        except OSError:
            raise WeightdError("cannot load the model") from None
    except WeightdError as error:
        caught = error
    assert is_transient(caught)
    assert not is_transient(WeightdError("not a model"))
    assert not is_transient(None)


def test_lack_of_memory_and_threads_is_transient() -> None:
    assert is_transient(MemoryError())
    assert mentions_transient("RuntimeError: can't start new thread")
    assert mentions_transient("terminate called after throwing an instance of 'std::bad_alloc'")
    assert not mentions_transient("Segmentation fault")
