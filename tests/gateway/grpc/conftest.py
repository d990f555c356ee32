"""Fixture: a gRPC server that the tests of a file share if they do not change it."""

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
