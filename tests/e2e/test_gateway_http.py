"""The HTTP gateway with a real daemon and engine, used by third-party clients."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import http.client
import json
import os
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, cast

import httpx
import numpy as np
import pytest
import tritonclient.http as triton
import tritonclient.http.aio as triton_aio
from numpy.typing import NDArray
from open_inference.openapi.client import OpenInferenceClient
from open_inference.openapi.types import InferenceRequest
from tritonclient.utils import InferenceServerException, shared_memory

from testkit import models
from testkit.gatewayprocess import GatewayProcess
from testkit.service import Service
from testkit.waiting import until
from weightd import InvalidArgument
from weightd_gateway.tensors import DTYPES

from .support import ONE_ENGINE

pytestmark = [pytest.mark.e2e, ONE_ENGINE]

Arrays = dict[str, NDArray[Any]]

# A request to the model "slow" that runs for a while.
LONG = {"inputs": [{"name": "n", "datatype": "INT64", "shape": [1], "data": [1_000_000]}]}


@pytest.fixture(scope="module")
def service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Service]:
    directory = tmp_path_factory.mktemp("gateway")
    tables: dict[str, dict[str, object]] = {
        "tiny": {"path": models.tiny(directory / "tiny.onnx")},
        "types": {"path": models.datatypes(directory / "types.onnx")},
        "slow": {"path": models.patient(directory / "slow.onnx")},
        "scalar": {"path": models.with_scalar(directory / "scalar.onnx"), "batching": {"max_rows": 8}},
    }
    with Service(tables) as service:
        service.ready()
        yield service


@pytest.fixture(scope="module")
def gateway(service: Service, tmp_path_factory: pytest.TempPathFactory) -> Iterator[GatewayProcess]:
    tables = {"gateway": {"shared_memory": True}}
    with GatewayProcess(tmp_path_factory.mktemp("g"), service.address, tables) as gateway:
        yield gateway


@pytest.fixture(scope="module")
def address(gateway: GatewayProcess) -> str:
    return f"127.0.0.1:{gateway.port('http')}"


@pytest.fixture
def client(address: str) -> Iterator[triton.InferenceServerClient]:
    with triton.InferenceServerClient(address) as client:
        yield client


def every_datatype(rows: int) -> Arrays:
    """Return random bits of each datatype; BOOL is 0 or 1."""
    random = np.random.default_rng(rows)
    arrays: Arrays = {}
    for name, dtype in DTYPES.items():
        bits = np.frombuffer(random.bytes(rows * 2 * dtype.itemsize), dtype).reshape(rows, 2)
        arrays[name] = bits.view(np.uint8).__and__(1).view(np.bool_) if name == "BOOL" else bits
    return arrays


def asked(arrays: Mapping[str, NDArray[Any]], *, binary: bool = True, kind: Any = triton) -> list[Any]:
    inputs = [kind.InferInput(name, list(array.shape), _datatype(array)) for name, array in arrays.items()]
    for each, array in zip(inputs, arrays.values(), strict=True):
        each.set_data_from_numpy(array, binary_data=binary)
    return inputs


def _datatype(array: NDArray[Any]) -> str:
    return next(name for name, dtype in DTYPES.items() if dtype == array.dtype)


def assert_the_same_bits(result: Any, expected: Mapping[str, NDArray[Any]]) -> None:
    for name, array in expected.items():
        got = result.as_numpy(name)
        assert (got.dtype, got.shape, got.tobytes()) == (array.dtype, array.shape, array.tobytes()), name


@pytest.mark.parametrize("compression", [None, "gzip", "deflate"])
@pytest.mark.parametrize("rows", [1, 5000])
def test_answers_equal_those_of_native_client(
    service: Service, client: triton.InferenceServerClient, rows: int, compression: str | None
) -> None:
    arrays = every_datatype(rows)
    result = client.infer(
        "types",
        asked(arrays),
        request_compression_algorithm=compression,
        response_compression_algorithm=compression,
        request_id="7",
    )
    with service.client() as native:
        assert_the_same_bits(result, native.infer("types", arrays))
    assert result.get_response()["id"] == "7"


def test_scalar_equals_array_of_one_element(service: Service, client: triton.InferenceServerClient) -> None:
    x = np.arange(4, dtype=np.float32).reshape(2, 2)
    exact: Arrays = {"x": x, "rate": np.array(16000), "offset": np.array([0.5], np.float32)}
    loose: Arrays = {"x": x, "rate": np.array([16000]), "offset": np.array(0.5, np.float32)}
    with service.client() as native:
        [expected] = native.infer("scalar", exact).values()
        assert expected.tolist() == (x * 16000 + 0.5).tolist()
        pending = [native.submit("scalar", each) for each in [exact, loose] * 8]
        assert {each.result()["y"].tobytes() for each in pending} == {expected.tobytes()}
        assert native.infer("scalar", {"x": x, "rate": [[16000]], "offset": 0.5})["y"].tobytes() == expected.tobytes()
        for name, wrong in [("rate", np.zeros(2, np.int64)), ("rate", np.zeros((1, 0), np.int64)), ("x", np.zeros(()))]:
            with pytest.raises(InvalidArgument, match=f"^input {name}: expected shape "):
                native.infer("scalar", {**exact, name: wrong.astype(exact[name].dtype)})
    for binary in (True, False):
        assert_the_same_bits(client.infer("scalar", asked(loose, binary=binary)), {"y": expected})


def test_answers_are_bit_equal_in_json(client: triton.InferenceServerClient) -> None:
    arrays = {name: array for name, array in every_datatype(3).items() if name != "FP16"}
    for name in ("FP32", "FP64"):
        arrays[name] = np.random.default_rng(1).standard_normal((3, 2)).astype(DTYPES[name])
    half = np.ones((3, 2), np.float16)
    names = [f"{name}_same" for name in arrays]
    outputs = [triton.InferRequestedOutput(name, binary_data=False) for name in names]
    inputs = asked(arrays, binary=False) + asked({"FP16": half})
    result = client.infer("types", inputs, outputs=outputs)
    assert_the_same_bits(result, {f"{name}_same": array for name, array in arrays.items()})
    assert [each["name"] for each in result.get_response()["outputs"]] == names


def test_every_method_of_tritonclient(client: triton.InferenceServerClient) -> None:
    assert client.is_server_live()
    assert client.is_server_ready()
    assert client.is_model_ready("tiny")
    assert client.is_model_ready("tiny", "1")
    assert not client.is_model_ready("none")
    metadata = client.get_server_metadata()
    assert metadata["name"] == "weightd"
    assert "system_shared_memory" in metadata["extensions"]
    tiny = client.get_model_metadata("tiny")
    assert tiny["inputs"] == [{"name": "x", "datatype": "FP32", "shape": [-1, 64]}]
    config = client.get_model_config("tiny", "1")
    assert config["input"][0]["dims"] == [-1, 64]
    assert {each["name"] for each in client.get_model_repository_index()} == {"tiny", "types", "slow", "scalar"}
    assert client.get_trace_settings()["trace_level"] == ["OFF"]
    assert client.get_log_settings()["log_error"] is True
    for forbidden in (client.load_model, client.unload_model):
        with pytest.raises(InferenceServerException) as caught:
            forbidden("tiny")
        assert caught.value.status() == "403"
    for refused in (
        lambda: client.update_log_settings({"log_info": False}),
        lambda: client.update_trace_settings("tiny", {"trace_level": ["TIMESTAMPS"]}),
        lambda: client.register_cuda_shared_memory("c", b"handle", 0, 1),
    ):
        with pytest.raises(InferenceServerException) as caught:
            refused()
        assert caught.value.status() == "400"
    client.unregister_cuda_shared_memory()
    assert client.get_cuda_shared_memory_status() == []


def test_requests_of_perf_analyzer(client: triton.InferenceServerClient) -> None:
    assert isinstance(client.get_server_metadata()["extensions"], list)
    config = client.get_model_config("tiny")
    assert config["max_batch_size"] == 0
    assert config["model_transaction_policy"]["decoupled"] is False
    assert not {"sequence_batching", "ensemble_scheduling"} & {*config}

    def count() -> tuple[int, int]:
        time.sleep(1.1)  # statistics may be a second old
        [tiny] = [each for each in client.get_inference_statistics()["model_stats"] if each["name"] == "tiny"]
        stats = tiny["inference_stats"]
        return stats["success"]["count"], stats["compute_infer"]["ns"]

    before, busy = count()
    for _ in range(5):
        client.infer("tiny", asked({"x": np.ones((1, 64), np.float32)}))
    after, busier = count()
    assert after == before + 5
    assert busier > busy


def test_errors_of_daemon_as_http_status(client: triton.InferenceServerClient) -> None:
    ones = np.ones((1, 64), np.float32)
    more: dict[str, Any]
    for model, arrays, more, status, text in (
        ("none", {"x": ones}, {}, "404", "no model 'none'"),
        ("tiny", {"y": ones}, {}, "400", "x"),
        ("tiny", {"x": ones.astype(np.float64)}, {}, "400", "FP32"),
        ("tiny", {"x": ones, "y": ones}, {}, "400", "y"),
        ("tiny", {"x": ones}, {"outputs": [triton.InferRequestedOutput("z")]}, "400", "z"),
        ("tiny", {"x": ones}, {"model_version": "2"}, "404", "version"),
        ("slow", {"n": np.array([300_000])}, {"timeout": 20_000}, "504", ""),
    ):
        with pytest.raises(InferenceServerException) as caught:
            client.infer(model, asked(arrays), **more)
        assert caught.value.status() == status
        assert text in caught.value.message()
    # The connection stays usable after rejected requests.
    client.infer("tiny", asked({"x": ones}))


def test_concurrent_requests_by_greenlets_and_asyncio(address: str) -> None:
    arrays = [np.full((1, 64), each, np.float32) for each in range(20)]
    with triton.InferenceServerClient(address, concurrency=4) as client:
        expected = [client.infer("tiny", asked({"x": each})).as_numpy("y") for each in arrays]
        pending = [client.async_infer("tiny", asked({"x": each})) for each in arrays]
        for each, right in zip(pending, expected, strict=True):
            assert_the_same_bits(each.get_result(), {"y": right})

    async def at_once() -> list[Any]:
        async with triton_aio.InferenceServerClient(address) as client:
            assert await client.is_server_ready()
            assert await client.get_model_metadata("tiny")
            assert await client.get_model_config("tiny")
            assert await client.get_inference_statistics("tiny")
            assert await client.get_model_repository_index()
            questions = [client.infer("tiny", asked({"x": each}, kind=triton_aio)) for each in arrays]
            return await asyncio.gather(*questions)

    for result, right in zip(asyncio.run(at_once()), expected, strict=True):
        assert_the_same_bits(result, {"y": right})


def test_tensors_in_shared_memory(client: triton.InferenceServerClient) -> None:
    array = np.random.default_rng(3).standard_normal((300, 64)).astype(np.float32)
    expected = client.infer("tiny", asked({"x": array})).as_numpy("y")
    client.unregister_system_shared_memory()
    key = f"/weightd-test-{os.getpid()}"
    handle = shared_memory.create_shared_memory_region("in", key, 2 * array.nbytes)
    try:
        shared_memory.set_shared_memory_region(handle, [array])
        client.register_system_shared_memory("region", key, 2 * array.nbytes)
        assert [each["name"] for each in client.get_system_shared_memory_status()] == ["region"]
        x = triton.InferInput("x", list(array.shape), "FP32")
        x.set_shared_memory("region", array.nbytes)
        y = triton.InferRequestedOutput("y")
        y.set_shared_memory("region", array.nbytes, offset=array.nbytes)
        result = client.infer("tiny", [x], outputs=[y])
        assert result.get_output("y")["parameters"]["shared_memory_byte_size"] == array.nbytes
        got = shared_memory.get_contents_as_numpy(handle, np.float32, list(array.shape), offset=array.nbytes)
        assert got.tobytes() == expected.tobytes()
        client.unregister_system_shared_memory("region")
        with pytest.raises(InferenceServerException, match="no region region"):
            client.infer("tiny", [x], outputs=[y])
    finally:
        shared_memory.destroy_shared_memory_region(handle)


def test_client_generated_from_openapi_description(service: Service, address: str) -> None:
    with httpx.Client() as connection:
        client = OpenInferenceClient(base_url=f"http://{address}", httpx_client=connection)
        client.check_server_liveness()
        client.check_server_readiness()
        client.check_model_readiness("tiny")
        assert client.read_server_metadata().name == "weightd"
        inputs = client.read_model_metadata("tiny").inputs
        assert inputs
        assert inputs[0].shape == [-1, 64]
        array = np.random.default_rng(4).standard_normal((2, 64)).astype(np.float32)
        values = array.ravel().tolist()
        question = cast(Any, InferenceRequest).parse_obj(
            {"inputs": [{"name": "x", "datatype": "FP32", "shape": [2, 64], "data": values}]}
        )
        answer = client.model_infer("tiny", request=question)
        with service.client() as native:
            expected = native.infer("tiny", {"x": array})["y"]
        got = json.loads(answer.json())["outputs"][0]["data"]
        assert np.array(got, np.float32).tobytes() == expected.tobytes()


def test_request_as_kserve_client_sends_it(service: Service, address: str) -> None:
    array = np.random.default_rng(5).standard_normal((2, 64)).astype(np.float32)
    described = {"name": "x", "shape": [2, 64], "datatype": "FP32", "parameters": {"binary_data_size": array.nbytes}}
    header = json.dumps({"id": "a-b", "model_name": "tiny", "inputs": [described]}).encode()
    with service.client() as native:
        expected = native.infer("tiny", {"x": array})["y"]
    connection = http.client.HTTPConnection(address)
    connection.request(
        "POST", "/v2/models/tiny/infer", header + array.tobytes(), {"inference-header-content-length": str(len(header))}
    )
    answer = json.loads(connection.getresponse().read())
    connection.close()
    assert (answer["id"], answer["model_name"]) == ("a-b", "tiny")
    assert np.array(answer["outputs"][0]["data"], np.float32).tobytes() == expected.tobytes()


@pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")
def test_curl(address: str) -> None:
    question = json.dumps({"inputs": [{"name": "n", "datatype": "INT64", "shape": [2], "data": [3, 1]}]})
    command = ["curl", "--silent", "--fail", "--data", question, f"http://{address}/v2/models/slow/infer"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
    assert json.loads(done.stdout)["outputs"][0]["data"] == [3, 1]


def test_metrics_and_page(address: str) -> None:
    for path, expected in (("/metrics", b"# TYPE weightd_"), ("/", b"<!doctype html>"), ("/status.json", b"{")):
        connection = http.client.HTTPConnection(address)
        connection.request("GET", path)
        response = connection.getresponse()
        assert (response.status, response.read().lower().find(expected.lower()) >= 0) == (200, True)
        connection.close()


def test_disconnect_cancels_running_request(service: Service, address: str) -> None:
    def cancelled() -> int:
        with service.client() as native:
            accounts = [account for tenant in native.metrics().tenants for account in tenant.accounts]
        return sum(account.failed.get("CANCELLED", 0) for account in accounts if account.model == "slow")

    before = cancelled()
    body = json.dumps(LONG).encode()
    host, port = address.split(":")
    with socket.create_connection((host, int(port))) as connection:
        lines = f"POST /v2/models/slow/infer HTTP/1.1\r\nHost: {host}\r\nContent-Length: {len(body)}\r\n\r\n"
        connection.sendall(lines.encode() + body)

        def runs() -> bool:
            with service.client() as native:
                return any(model.running for model in native.metrics().models if model.name == "slow")

        until(runs, "the predict runs")
    until(lambda: cancelled() == before + 1, "the daemon counts a cancelled request")


# --- the process ----------------------------------------------------------------------------------------------------


def test_restart_of_daemon_under_load(tmp_path: Path) -> None:
    tables = {"tiny": {"path": models.tiny(tmp_path / "tiny.onnx")}}
    array = np.ones((1, 64), np.float32)
    statuses: list[str] = []
    stopped = threading.Event()
    with Service(tables) as service, GatewayProcess(tmp_path, service.address) as gateway:
        service.ready()
        address = f"127.0.0.1:{gateway.port('http')}"

        def load() -> None:
            with triton.InferenceServerClient(address) as client:
                while not stopped.is_set():
                    try:
                        client.infer("tiny", asked({"x": array}))
                        statuses.append("200")
                    except InferenceServerException as error:
                        statuses.append(str(error.status()))
                    time.sleep(0.01)

        thread = threading.Thread(target=load)
        thread.start()
        try:
            until(lambda: "200" in statuses, "a request is answered")
            service.kill()
            until(lambda: "503" in statuses, "a request fails with status 503")
            service.start_again()
            begun = len(statuses)
            until(lambda: "200" in statuses[begun:], "a request is answered again")
        finally:
            stopped.set()
            thread.join()
    assert {*statuses} == {"200", "503"}


def token(secret: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret}"}


def test_tokens_identify_tenants_until_withdrawn(tmp_path: Path) -> None:
    digests = [hashlib.sha256(each).hexdigest() for each in (b"ann", b"ben", b"eve")]
    tokens = tmp_path / "tokens"
    tokens.write_text("".join(f"{each} {name}\n" for each, name in zip(digests, ("ann", "ben", "eve"), strict=True)))
    tables = {name: {"path": models.tiny(tmp_path / f"{name}.onnx")} for name in ("seen", "hidden")}
    tenants: dict[str, dict[str, object]] = {
        "gateway": {"uids": [str(os.geteuid())], "acts_for": ["ann", "ben"]},
        "ann": {"models": ["seen"]},
        "ben": {"max_rate": 1000},
        "eve": {},
    }
    settings = {"gateway": {"anonymous": "", "tokens": str(tokens)}}
    x = {"x": np.ones((1, 64), np.float32)}
    with Service(tables, tenants=tenants) as service, GatewayProcess(tmp_path, service.address, settings) as gateway:
        service.ready()
        with triton.InferenceServerClient(f"127.0.0.1:{gateway.port('http')}") as client:

            def status(what: Any) -> str:
                with pytest.raises(InferenceServerException) as caught:
                    what()
                return str(caught.value.status())

            assert status(lambda: client.infer("seen", asked(x))) == "401"
            client.infer("seen", asked(x), headers=token("ann"))
            client.infer("hidden", asked(x), headers=token("ben"))
            for ask in (
                lambda: client.infer("hidden", asked(x), headers=token("ann")),
                lambda: client.get_model_metadata("hidden", headers=token("ann")),
                lambda: client.get_inference_statistics("hidden", headers=token("ann")),
            ):
                assert status(ask) == "404"
            index = client.get_model_repository_index(headers=token("ann"))
            assert [each["name"] for each in index] == ["seen"]
            # eve has a token, but the gateway's tenant does not act for eve.
            assert status(lambda: client.infer("seen", asked(x), headers=token("eve"))) == "403"
            tokens.write_text(f"{digests[1]} ben\n")
            os.kill(gateway.pid, signal.SIGHUP)
            until(lambda: "configuration reloaded; 1 access tokens" in gateway.log, "the gateway has the new tokens")
            assert status(lambda: client.infer("seen", asked(x), headers=token("ann"))) == "401"
            client.infer("seen", asked(x), headers=token("ben"))
            tokens.write_text("nonsense\n")
            os.kill(gateway.pid, signal.SIGHUP)
            until(lambda: "reload failed, configuration unchanged" in gateway.log, "the gateway logs the error")
            client.infer("seen", asked(x), headers=token("ben"))


def test_finishes_running_requests_before_exit(service: Service, tmp_path: Path) -> None:
    body = json.dumps(LONG).encode()
    with GatewayProcess(tmp_path, service.address) as gateway:
        port = gateway.port("http")
        connection = http.client.HTTPConnection("127.0.0.1", port)
        connection.request("POST", "/v2/models/slow/infer", body)

        def runs() -> bool:
            with service.client() as native:
                return any(model.running for model in native.metrics().models if model.name == "slow")

        until(runs, "the predict runs")
        os.kill(gateway.pid, signal.SIGTERM)
        assert connection.getresponse().status == 200
        connection.close()
        with contextlib.suppress(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port)).close()
        # The gateway got SIGTERM above.
        assert gateway.wait() == 0


def test_gateway_command_rejects_invalid_configuration(tmp_path: Path) -> None:
    config = tmp_path / "gateway.toml"
    config.write_text("[gateway]\nhtpp = []\n")
    command = [sys.executable, "-m", "weightd_daemon", "gateway", str(config)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stdout) == (78, "")
    assert done.stderr == f"weightd gateway: {config}: gateway.htpp: unknown key; did you mean http?\n"
