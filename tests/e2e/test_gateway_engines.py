"""Bit-equal answers of each engine over HTTP and gRPC."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import tritonclient.grpc
import tritonclient.http

from testkit.gatewayprocess import GatewayProcess
from testkit.service import Service

from .support import SampleRequest, assert_same

pytestmark = pytest.mark.e2e

CLIENTS = {"http": tritonclient.http, "grpc": tritonclient.grpc}


@pytest.fixture(scope="module")
def gateway(mlp: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    with Service({"mlp": {"path": mlp, "workers": 2}}) as service:
        service.ready()
        with GatewayProcess(tmp_path_factory.mktemp("gateway"), service.address) as gateway:
            yield gateway


@pytest.mark.parametrize("protocol", CLIENTS)
def test_answers_equal_those_of_engine(
    engine: str, gateway: GatewayProcess, questions: Sequence[SampleRequest], protocol: str
) -> None:
    library: Any = CLIENTS[protocol]
    with library.InferenceServerClient(f"127.0.0.1:{gateway.port(protocol)}") as client:
        metadata = client.get_model_metadata("mlp")
        assert (metadata["platform"] if protocol == "http" else metadata.platform).startswith(engine)
        for question in questions:
            inputs = [library.InferInput(name, list(x.shape), "FP32") for name, x in question.inputs.items()]
            for each, x in zip(inputs, question.inputs.values(), strict=True):
                each.set_data_from_numpy(x)
            answer = client.infer("mlp", inputs)
            assert_same({name: answer.as_numpy(name) for name in question.answer}, question.answer)
