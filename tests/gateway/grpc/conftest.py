"""A front that all tests of a file may use who leave it as it was."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import tritonclient.grpc as triton

from .served import Served, served


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with served() as running:
        yield running


@pytest.fixture
def client(server: Served) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(server.target) as client:
        yield client
