"""Several versions of a model side by side: over the client, weightctl and the gateway, and across a restart."""

from __future__ import annotations

import contextlib
import signal
from collections import Counter
from pathlib import Path
from typing import Any, cast

import pytest
import tritonclient.grpc as grpc_client
import tritonclient.http as http_client

from testkit import models
from testkit.gatewayprocess import GatewayProcess
from testkit.managed import ManagedService
from testkit.service import Service
from testkit.waiting import until
from weightd import NotFound, Unavailable
from weightd_protocol.messages.control import PROMOTE

from .support import ONE_ENGINE, BareEngine, SampleRequest, ask_all, assert_same, mlp_inputs
from .test_on_demand import weightctl

pytestmark = [pytest.mark.e2e, ONE_ENGINE]


class Versions:
    """Three versions of a model with different answers, the third of which is broken."""

    def __init__(self, directory: Path, bare: BareEngine) -> None:
        self.paths = {number: models.tiny(directory / f"{number}.onnx", number) for number in (1, 2)}
        inputs = mlp_inputs((1,), 64)
        self.questions = {number: bare.questions(path, inputs) for number, path in self.paths.items()}
        self.paths[3] = directory / "3.onnx"
        self.paths[3].write_bytes(b"not a model")

    def table(self, *numbers: int, **more: object) -> dict[str, object]:
        return {**{f"versions.{number}": self.paths[number] for number in numbers}, **more}

    def question(self, number: int) -> SampleRequest:
        return self.questions[number][0]


@pytest.fixture(scope="module")
def versions(tmp_path_factory: pytest.TempPathFactory, bare: BareEngine) -> Versions:
    return Versions(tmp_path_factory.mktemp("versions"), bare)


def test_requests_name_a_version_or_get_the_newest(versions: Versions) -> None:
    models_by_name: dict[str, dict[str, object]] = {"m": versions.table(1, 2), "plain": {"path": versions.paths[1]}}
    with Service(models_by_name) as service, service.client() as client:
        for number in (1, 2):
            ask_all(client, f"m@{number}", versions.questions[number])
        ask_all(client, "m", versions.questions[2])
        # Without a name of the input, the client asks for the signature of the model first.
        answer = client.infer("m", versions.question(2).inputs["x"])
        assert cast(Any, answer).model == "m@2"
        assert client.metadata("m").name == "m@2"
        ask_all(client, "plain@1", versions.questions[1])
        with pytest.raises(NotFound, match="no version '3' of model 'm'; there are: 1, 2"):
            client.infer("m@3", versions.question(1).inputs)
        client.unload("m@2")
        ask_all(client, "m", versions.questions[1])


def test_broken_version_gets_no_requests(versions: Versions) -> None:
    with Service({"m": versions.table(2, 3)}) as service, service.client() as client:
        until(lambda: "failed" in {each.state for each in client.status().models}, "version 3 fails")
        ask_all(client, "m", versions.questions[2])
        with pytest.raises(Unavailable, match="m@3 failed"):
            client.infer("m@3", versions.question(2).inputs)


def test_rollout_splits_requests_and_outlives_the_daemon(versions: Versions) -> None:
    inputs = versions.question(1).inputs
    with ManagedService({"m": versions.table(1, 2, traffic={"1": 1})}) as service:
        with service.client() as client:
            ask_all(client, "m", versions.questions[1])
            done = weightctl(service.address, "rollout", "m", "2", "--percent", "40")
            assert (done.returncode, done.stdout) == (0, "m@1: 60 %\nm@2: 40 %\n"), done.stderr
            shares = Counter(cast(Any, client.infer("m", inputs)).model for _ in range(300))
            assert 60 < shares["m@2"] < 180
            assert shares["m@1"] + shares["m@2"] == 300
        service.restart(signal.SIGTERM)
        with service.client() as client:
            [found] = client.status().version_sets
            assert ([each.percent for each in found.shares], found.is_rollout) == ([60.0, 40.0], True)
            client.rollout("m", PROMOTE, 2)
            ask_all(client, "m", versions.questions[2])
            assert weightctl(service.address, "rollout", "m", "--abort").returncode == 0
            ask_all(client, "m", versions.questions[1])


def test_gateway_serves_versions(versions: Versions, tmp_path: Path) -> None:
    inputs, answer = versions.question(1)
    with (
        Service({"m": versions.table(1, 2)}) as service,
        GatewayProcess(tmp_path, service.address) as gateway,
        contextlib.closing(cast(Any, http_client).InferenceServerClient(f"127.0.0.1:{gateway.port('http')}")) as http,
        contextlib.closing(cast(Any, grpc_client).InferenceServerClient(f"127.0.0.1:{gateway.port('grpc')}")) as grpc,
    ):
        for client, module in ((http, http_client), (grpc, grpc_client)):
            ask = cast(Any, module).InferInput("x", [1, 64], "FP32")
            ask.set_data_from_numpy(inputs["x"])
            named: Any = client.infer("m", [ask], model_version="1")
            assert_same({"y": named.as_numpy("y")}, answer)
            newest: Any = client.infer("m", [ask])
            assert_same({"y": newest.as_numpy("y")}, versions.question(2).answer)
            assert client.is_model_ready("m", "2")
            with pytest.raises(Exception, match="no version '7' of model 'm'; there are: 1, 2"):
                client.infer("m", [ask], model_version="7")
        assert http.get_model_metadata("m")["versions"] == ["1", "2"]
        assert [*grpc.get_model_metadata("m", "1").versions] == ["1", "2"]
        assert (named.get_response().model_version, newest.get_response().model_version) == ("1", "2")
        index = http.get_model_repository_index()
        assert [(each["name"], each["version"]) for each in index] == [("m", "1"), ("m", "2")]
        counts = {
            each["version"]: each["inference_count"] for each in http.get_inference_statistics("m")["model_stats"]
        }
        assert counts == {"1": 2, "2": 2}
