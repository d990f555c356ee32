"""The gRPC gateway with a real daemon: third-party clients get the same answers as the native client."""

from __future__ import annotations

import asyncio
import re
import socket
import subprocess
import sys
import uuid
from collections.abc import AsyncIterator, Iterator
from contextlib import ExitStack, closing, suppress
from pathlib import Path
from queue import SimpleQueue
from typing import Any

import grpc
import numpy as np
import pytest
import tritonclient.grpc as triton
import tritonclient.utils.shared_memory as shm
from numpy.typing import NDArray
from tritonclient.grpc import aio
from tritonclient.utils import InferenceServerException

from testkit import models
from testkit.gatewayprocess import GatewayProcess
from testkit.service import Service
from testkit.waiting import until
from weightd_gateway.tensors import DTYPES

from .support import ONE_ENGINE, assert_same, model_status

pytestmark = [pytest.mark.e2e, ONE_ENGINE]

LIMIT_S = 60.0

# Loop counts for the model "patient": no time, and at least one second.
QUICK, LONG = 3, 1_500_000


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    directory = tmp_path_factory.mktemp("models")
    tables = {
        "types": {"path": models.datatypes(directory / "types.onnx"), "workers": 1},
        "tiny": {"path": models.tiny(directory / "tiny.onnx"), "workers": 1},
        "patient": {"path": models.patient(directory / "patient.onnx"), "workers": 1},
    }
    with Service(tables) as service:
        service.ready()
        yield service


@pytest.fixture(scope="module")
def gateway(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    tables: dict[str, dict[str, object]] = {
        "gateway": {"http": [], "shared_memory": True, "max_body_bytes": 8 * 1024 * 1024}
    }
    with GatewayProcess(tmp_path_factory.mktemp("gateway"), service.address, tables) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def address(gateway: GatewayProcess) -> str:
    return f"127.0.0.1:{gateway.port('grpc')}"


@pytest.fixture
def client(address: str) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(address) as client:
        yield client


def tensor(name: str, array: NDArray[Any], datatype: str = "FP32") -> triton.InferInput:
    return triton.InferInput(name, [*array.shape], datatype).set_data_from_numpy(array)


def of_each_datatype(rows: int) -> dict[str, NDArray[Any]]:
    """Return random bits of each datatype, including NaN payloads and negative zeros; BOOL is 0 or 1."""
    random = np.random.default_rng(3)
    arrays: dict[str, NDArray[Any]] = {}
    for name, dtype in DTYPES.items():
        content = random.integers(0, 2 if name == "BOOL" else 256, rows * 2 * dtype.itemsize, np.uint8)
        arrays[name] = np.ndarray((rows, 2), dtype, content.tobytes())
    return arrays


X = np.random.default_rng(1).standard_normal((2, 64), dtype=np.float32)


# --- requests and answers -------------------------------------------------------------------------------------------


# With 20,000 rows, some inputs are large enough for the memory that gateway and workers share, others are not.
@pytest.mark.parametrize("rows", [1, 20_000])
def test_all_datatypes_equal_answers_of_native_client(
    service: Service, client: triton.InferenceServerClient, rows: int
) -> None:
    arrays = of_each_datatype(rows)
    with service.client() as native:
        expected = native.infer("types", arrays)
    result = client.infer("types", [tensor(name, array, name) for name, array in arrays.items()])
    assert [each.name for each in result.get_response().outputs] == [*expected]
    assert_same({name: result.as_numpy(name) for name in expected}, expected)


def test_metadata_and_statistics_of_model(client: triton.InferenceServerClient) -> None:
    client.infer("tiny", [tensor("x", X)])
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("tiny")
    assert client.is_model_ready("tiny", "1")
    assert client.get_server_metadata().name == "weightd"
    metadata, config = client.get_model_metadata("tiny"), client.get_model_config("tiny").config
    assert [(each.name, each.datatype, [*each.shape]) for each in metadata.inputs] == [("x", "FP32", [-1, 64])]
    assert [(each.name, [*each.dims]) for each in config.output] == [("y", [-1, 64])]
    assert {each.name for each in client.get_model_repository_index().models} == {"types", "tiny", "patient"}

    def is_counted() -> bool:
        (statistics,) = client.get_inference_statistics("tiny").model_stats
        success = statistics.inference_stats.success
        return bool(success.count and success.ns and statistics.inference_count and statistics.execution_count)

    until(is_counted, "the request is counted")
    assert len(client.get_inference_statistics().model_stats) == 3


def test_errors_have_code_and_text(client: triton.InferenceServerClient) -> None:
    for model, inputs, code, text in (
        ("other", [tensor("x", X)], "NOT_FOUND", "other"),
        ("tiny", [tensor("z", X)], "INVALID_ARGUMENT", "z"),
        ("tiny", [tensor("x", X.astype("f8"), "FP64")], "INVALID_ARGUMENT", "FP64"),
        ("tiny", [tensor("x", X[:, :63])], "INVALID_ARGUMENT", "63"),
    ):
        with pytest.raises(InferenceServerException, match=text) as refused:
            client.infer(model, inputs)
        assert refused.value.status() == f"StatusCode.{code}"


def test_rejects_oversized_message_and_keeps_connection(client: triton.InferenceServerClient) -> None:
    large = np.zeros((40_000, 64), np.float32)
    with pytest.raises(InferenceServerException) as refused:
        client.infer("tiny", [tensor("x", large)])
    assert refused.value.status() == "StatusCode.RESOURCE_EXHAUSTED"
    assert client.infer("tiny", [tensor("x", X)]).as_numpy("y").shape == X.shape


def test_limits_size_of_decompressed_message(gateway: GatewayProcess, address: str) -> None:
    def most_bytes() -> int:
        (line,) = re.findall(r"VmHWM:\s+(\d+) kB", Path(f"/proc/{gateway.pid}/status").read_text())
        return int(line) * 1024

    before = most_bytes()
    for compression in (grpc.Compression.Gzip, grpc.Compression.Deflate):
        with grpc.insecure_channel(address) as opened:
            channel: Any = opened
            infer = channel.unary_unary("/inference.GRPCInferenceService/ModelInfer")
            with pytest.raises(grpc.RpcError) as refused:
                infer(bytes(96 * 1024 * 1024), compression=compression, timeout=LIMIT_S)
        assert refused.value.code() == grpc.StatusCode.RESOURCE_EXHAUSTED
    assert most_bytes() < before + 48 * 1024 * 1024


def test_concurrent_requests_get_their_own_answers(service: Service, client: triton.InferenceServerClient) -> None:
    questions = [np.full((rows, 64), rows, np.float32) for rows in range(1, 65)]
    with service.client() as native:
        expected = [native.infer("tiny", {"x": each})["y"] for each in questions]
    answers: SimpleQueue[tuple[str, NDArray[Any]]] = SimpleQueue()
    for index, each in enumerate(questions):
        client.async_infer(
            "tiny",
            [tensor("x", each)],
            lambda result, error: answers.put((result.get_response().id, result.as_numpy("y"))),
            request_id=str(index),
        )
    for _ in questions:
        number, got = answers.get(timeout=LIMIT_S)
        np.testing.assert_array_equal(got, expected[int(number)])


async def _ask_all(address: str) -> None:
    async with aio.InferenceServerClient(address) as client:
        assert await client.is_server_ready()
        assert (await client.get_model_metadata("tiny")).name == "tiny"
        single = (await client.infer("tiny", [tensor("x", X)])).as_numpy("y")

        async def requests() -> AsyncIterator[dict[str, Any]]:
            for number in range(3):
                yield {"model_name": "tiny", "inputs": [tensor("x", X)], "request_id": str(number)}

        got = [each async for each in client.stream_infer(requests())]
        assert [result.get_response().id for result, _ in got] == ["0", "1", "2"]
        for result, error in got:
            assert error is None
            np.testing.assert_array_equal(result.as_numpy("y"), single)


def test_asyncio_client(address: str) -> None:
    asyncio.run(_ask_all(address))


# --- shared memory, as perf_analyzer uses it ------------------------------------------------------------------------


@pytest.fixture
def region() -> Iterator[Any]:
    key = f"weightd-test-{uuid.uuid4().hex}"
    handle = shm.create_shared_memory_region(key, key, 2 * X.nbytes)
    yield handle
    shm.destroy_shared_memory_region(handle)


def test_shared_memory_as_perf_analyzer_uses_it(
    service: Service, client: triton.InferenceServerClient, region: Any
) -> None:
    name = region._triton_shm_name
    client.get_server_metadata()
    client.get_model_metadata("tiny")
    client.get_model_config("tiny")
    client.unregister_system_shared_memory()
    client.unregister_cuda_shared_memory()
    client.register_system_shared_memory("r", name, 2 * X.nbytes)
    assert client.get_system_shared_memory_status().regions["r"].byte_size == 2 * X.nbytes
    shm.set_shared_memory_region(region, [X])
    given = triton.InferInput("x", [*X.shape], "FP32").set_shared_memory("r", X.nbytes)
    wanted = triton.InferRequestedOutput("y")
    wanted.set_shared_memory("r", X.nbytes, X.nbytes)
    client.get_inference_statistics()
    result = client.infer("tiny", [given], outputs=[wanted])
    client.get_inference_statistics()
    with service.client() as native:
        expected = native.infer("tiny", {"x": X})["y"]
    np.testing.assert_array_equal(shm.get_contents_as_numpy(region, np.float32, [2, 64], X.nbytes), expected)
    assert result.get_output("y").parameters["shared_memory_byte_size"].int64_param == X.nbytes
    wanted.set_shared_memory("r", X.nbytes - 1, 0)
    with pytest.raises(InferenceServerException, match="shared_memory_byte_size"):
        client.infer("tiny", [given], outputs=[wanted])
    client.unregister_system_shared_memory("r")
    with pytest.raises(InferenceServerException) as refused:
        client.infer("tiny", [given])
    assert refused.value.status() == "StatusCode.NOT_FOUND"


# --- deadlines and cancellation -------------------------------------------------------------------------------------


def counting(to: int) -> list[triton.InferInput]:
    return [tensor("n", np.array([to]), "INT64")]


def test_grpc_deadlines(client: triton.InferenceServerClient) -> None:
    with pytest.raises(InferenceServerException) as late:
        client.infer("patient", counting(LONG), client_timeout=0.2)
    assert late.value.status() == "StatusCode.DEADLINE_EXCEEDED"
    with pytest.raises(InferenceServerException) as late:
        client.infer("patient", counting(QUICK), timeout=1000)
    assert late.value.status() == "StatusCode.DEADLINE_EXCEEDED"


def test_cancelled_calls_leave_the_queue(service: Service, client: triton.InferenceServerClient) -> None:
    calls = [client.async_infer("patient", counting(LONG), lambda result, error: None) for _ in range(200)]
    until(lambda: model_status(service, "patient").queued > 100, "requests are queued")
    for each in calls:
        each.cancel()
    until(lambda: model_status(service, "patient").queued == 0, "the queue is empty")
    np.testing.assert_array_equal(client.infer("patient", counting(QUICK)).as_numpy("y"), [QUICK])


# --- other clients --------------------------------------------------------------------------------------------------

# In a separate process, because its protobuf messages have the same names as those in Triton's client.
_OPEN_INFERENCE = """
import sys
import grpc
from open_inference.grpc.protocol import *
from open_inference.grpc.service import GRPCInferenceServiceStub

with grpc.insecure_channel(sys.argv[1]) as channel:
    stub = GRPCInferenceServiceStub(channel)
    assert stub.ServerLive(ServerLiveRequest()).live
    assert stub.ServerReady(ServerReadyRequest()).ready
    assert stub.ModelReady(ModelReadyRequest(name="tiny")).ready
    assert stub.ServerMetadata(ServerMetadataRequest()).name == "weightd"
    assert stub.ModelMetadata(ModelMetadataRequest(name="tiny")).inputs[0].datatype == "FP32"
    request = ModelInferRequest(model_name="patient", id="7")
    request.inputs.add(name="n", datatype="INT64", shape=[2]).contents.int64_contents.extend([3, 2])
    answer = stub.ModelInfer(request)
    assert (answer.id, answer.outputs[0].shape, answer.raw_output_contents) == (
        "7", [2], [b"\\3" + bytes(7) + b"\\2" + bytes(7)]
    ), answer
"""


def test_client_with_typed_contents(address: str) -> None:
    subprocess.run([sys.executable, "-c", _OPEN_INFERENCE, address], check=True, timeout=LIMIT_S)


def test_garbage_and_thousand_idle_connections_are_harmless(
    gateway: GatewayProcess, address: str, client: triton.InferenceServerClient
) -> None:
    host, _, port = address.rpartition(":")
    before = gateway.log
    with ExitStack() as stack:
        idle = [stack.enter_context(socket.create_connection((host, int(port)), LIMIT_S)) for _ in range(1000)]
        for content in (b"GET / HTTP/1.1\r\n\r\n", bytes(1000), b"\xff" * 100_000, b"\x16\x03\x01\x02\0\1"):
            # The peer closes the connection within a frame or after it.
            with closing(socket.create_connection((host, int(port)), LIMIT_S)) as stranger, suppress(OSError):
                stranger.sendall(content)
                stranger.shutdown(socket.SHUT_WR)
                while stranger.recv(65536):
                    pass
        with triton.InferenceServerClient(address) as another:
            assert another.infer("tiny", [tensor("x", X)]).as_numpy("y").shape == X.shape
        assert len(idle) == 1000
    assert client.infer("tiny", [tensor("x", X)]).as_numpy("y").shape == X.shape
    assert gateway.log == before, "invalid connections are not logged"
