"""A cluster of one node: requests over HTTP and by handles, errors, and the end of replicas."""

from __future__ import annotations

import hashlib
import http.client
import json
import os
import pickle
import signal
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import ray
from numpy.typing import NDArray
from ray import serve
from ray.exceptions import RayActorError

from testkit import census, models
from testkit.census import families
from testkit.memory import rollup
from testkit.raynodes import Nodes
from testkit.service import Service
from testkit.waiting import until
from weightd_protocol.errors import DeadlineExceeded, InvalidArgument, RequestError, Unavailable

from .http_clients import SampleRequests, ask, inference, output

TRACE = f"00-{'ab' * 16}-{'cd' * 8}-01"

pytestmark = pytest.mark.timeout(180)


@pytest.fixture(scope="module")
def app(one: Nodes, zoo: Path) -> Iterator[Nodes]:
    """The node with the model a.onnx at /m."""
    one.run(one.application("m", {"model": str(zoo / "a.onnx"), "workers": 2}))
    yield one
    one.delete("m")


def test_http_requests(app: Nodes, questions: SampleRequests) -> None:
    reply = ask(app.http, "/m/v2/models/a/infer", questions.bodies[0], traceparent=TRACE)
    assert reply.status == 200
    assert questions.model_of(0, output(reply.body)) == "a"
    assert reply.headers["traceparent"] == TRACE
    assert ask(app.http, "/m/v2/models/a/ready").body == b'{"name":"a","ready":true}'
    assert ask(app.http, "/m/v2/health/ready").status == 200
    # A replica ignores credentials; a proxy in front of Serve may check them.
    assert ask(app.http, "/m/v2/models/a", Authorization="Bearer x").status == 200


@pytest.mark.parametrize(
    ("path", "body", "status", "text"),
    [
        ("/m/v2/models/b", None, 404, b"b"),
        ("/m/nothing", None, 404, b"no such path: /nothing"),
        ("/m/v2/models/a/infer", b"{}", 400, b"inputs"),
        ("/m/v2/models/a/infer", b"x" * (65 * 2**20), 413, b"max_body_bytes"),
        ("/m/v2/repository/models/a/load", b"", 403, b"model_control"),
    ],
)
def test_http_errors_come_from_gateway(app: Nodes, path: str, body: bytes | None, status: int, text: bytes) -> None:
    reply = ask(app.http, path, body)
    assert (reply.status, reply.is_ours) == (status, True)
    assert text in reply.body


def test_handle_accepts_arrays_and_object_references(app: Nodes, questions: SampleRequests) -> None:
    handle = serve.get_app_handle("m")
    x = questions.inputs[1]
    for given in (x, ray.put(x)):
        y = handle.infer.remote({"x": given}, outputs=["y"]).result()["y"]
        assert questions.model_of(1, y) == "a"
    assert handle.metadata.remote().result()["name"] == "a"


def test_handle_raises_weightd_errors(app: Nodes, questions: SampleRequests) -> None:
    handle = serve.get_app_handle("m")
    with pytest.raises(InvalidArgument, match="z is not an input"):
        handle.infer.remote({"z": questions.inputs[0]}).result()
    with pytest.raises(InvalidArgument, match="timeout") as found:
        handle.infer.remote({"x": questions.inputs[0]}, timeout=-1).result()
    assert found.value.code == "INVALID_ARGUMENT"


@pytest.mark.parametrize("error", [Unavailable("x", retry_after=1.5), DeadlineExceeded("y")])
def test_errors_keep_fields_across_processes(app: Nodes, error: RequestError) -> None:
    del app

    @ray.remote
    def fails() -> None:
        raise error

    with pytest.raises(type(error)) as found:
        ray.get(fails.remote())
    assert (found.value.code, found.value.retry_after) == (error.code, error.retry_after)
    again = pickle.loads(pickle.dumps(error))
    assert (str(again), again.retry_after) == (str(error), error.retry_after)


def test_large_arrays_use_no_private_memory(one: Nodes, tmp_path: Path) -> None:
    model = models.tiny(tmp_path / "wide.onnx")
    one.run(one.application("wide", {"model": str(model)}))
    x = np.random.default_rng(1).standard_normal((60_000, 64)).astype(np.float32)
    handle = serve.get_app_handle("wide")
    direct = handle.infer.remote({"x": x}).result()["y"]
    (replica,) = one.replicas("wide")
    before = rollup(replica)["Anonymous"]
    kept = handle.infer.remote({"x": ray.put(x)}).result()["y"]
    assert np.array_equal(direct, kept)
    # Neither input nor output was copied into the replica's private memory.
    assert rollup(replica)["Anonymous"] - before < x.nbytes / 2
    few = handle.infer.remote({"x": x[:1]}).result()["y"]
    assert np.allclose(direct[:1], few, rtol=1e-5)
    one.delete("wide")


@pytest.fixture(scope="module")
def slow(one: Nodes, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    """A model at /slow with one worker; the input SLOW takes it a second or more."""
    model = models.mlp(tmp_path_factory.mktemp("slow") / "slow.onnx", layers=4, width=1024)
    one.run(one.application("slow", {"model": str(model), "selftest": "off"}))
    yield one
    one.delete("slow")


SLOW = np.zeros((6_000, 1024), np.float32)


def binary(x: NDArray[Any]) -> tuple[bytes, Mapping[str, str]]:
    """Return body and headers of a request for one input, x, in binary form after the JSON."""
    asked = {"name": "x", "datatype": "FP32", "shape": x.shape, "parameters": {"binary_data_size": x.nbytes}}
    header = json.dumps({"inputs": [asked]}).encode()
    return header + x.tobytes(), {"Inference-Header-Content-Length": str(len(header))}


def requests_in_daemon(nodes: Nodes) -> int:
    """Return the number of requests that the daemon of the slow model is running or has queued."""
    lines = ask(nodes.http, "/slow/metrics").body.decode().splitlines()
    families = ("weightd_requests_running{", "weightd_requests_queued{")
    return sum(int(float(each.rpartition(" ")[2])) for each in lines if each.startswith(families))


def cancelled(nodes: Nodes) -> list[str]:
    """Return the daemon's metrics of cancelled requests."""
    lines = ask(nodes.http, "/slow/metrics").body.decode().splitlines()
    return [each for each in lines if "CANCELLED" in each]


def test_timeout_of_handle_request(slow: Nodes) -> None:
    handle = serve.get_app_handle("slow")
    with pytest.raises(DeadlineExceeded):
        handle.infer.remote({"x": SLOW}, timeout=0.05).result()


def test_cancelled_handle_request_leaves_daemon(slow: Nodes) -> None:
    before = cancelled(slow)
    handle = serve.get_app_handle("slow")
    first = handle.infer.remote({"x": SLOW})
    second = handle.infer.remote({"x": SLOW})
    time.sleep(0.3)
    second.cancel()
    first.result()
    until(lambda: cancelled(slow) != before, "the daemon cancels the request")


def test_http_disconnect_cancels_request(slow: Nodes) -> None:
    before = cancelled(slow)
    body, header = binary(SLOW)
    connection = http.client.HTTPConnection("127.0.0.1", slow.http, timeout=60)
    connection.request("POST", "/slow/v2/models/slow/infer", body, header)
    time.sleep(0.5)
    connection.close()
    until(lambda: cancelled(slow) != before, "the daemon cancels the request")


def test_restarts_killed_daemon_in_its_replica(app: Nodes, questions: SampleRequests) -> None:
    (supervisor,) = app.supervisors("m")
    pid = daemon_of(supervisor)
    os.kill(pid, signal.SIGKILL)
    until(lambda: not Path(f"/proc/{pid}").exists(), "the daemon exits")
    seen: set[int] = set()

    def answers() -> bool:
        seen.add(ask(app.http, "/m/v2/models/a/infer", questions.bodies[2]).status)
        return 200 in seen

    until(answers, "the next daemon answers", 60)
    assert seen <= {200, 503}
    assert app.supervisors("m") == [supervisor]


def test_replica_rejects_model_with_wrong_sha256(one: Nodes, zoo: Path) -> None:
    other = "ab" * 32
    found = hashlib.sha256((zoo / "a.onnx").read_bytes()).hexdigest()
    wrong = one.application("wrong", {"model": str(zoo / "a.onnx"), "sha256": other}, max_constructor_retry_count=1)
    one.deploy(wrong)

    def message() -> str:
        deployment = serve.status().applications["wrong"].deployments.get("weightd")
        return deployment.message if deployment is not None and other in deployment.message else ""

    text = until(message, "Serve reports the error", 60)
    assert found in text
    one.delete("wrong")


def test_serve_reports_invalid_arguments(one: Nodes) -> None:
    one.deploy(one.application("wrong", {"model": "/none.onnx", "workers": 0}))
    text = until(lambda: serve.status().applications["wrong"].message, "Serve reports the error", 60)
    assert "workers: expected integer, 1 to 1024, got int 0" in text
    one.delete("wrong")


def test_replica_uses_service_of_host(one: Nodes, zoo: Path, questions: SampleRequests) -> None:
    with Service({"a": {"path": zoo / "a.onnx", "workers": 1}}) as service:
        one.run(one.application("host", {"address": service.address, "name": "a"}))
        reply = ask(one.http, "/host/v2/models/a/infer", questions.bodies[3])
        assert questions.model_of(3, output(reply.body)) == "a"
        one.delete("host")
        assert Path(f"/proc/{service.pid}").exists()


def test_killed_replica_leaves_no_files_or_processes(app: Nodes, questions: SampleRequests) -> None:
    (supervisor,) = app.supervisors("m")
    directory = work_dir_of(app, supervisor)
    (replica,) = app.replicas("m")
    os.kill(replica, signal.SIGKILL)
    until(lambda: not directory.exists(), "its files are deleted")
    until(lambda: supervisor not in app.pids("weightd_ray.daemon_supervisor"), "its supervisor exits")
    until(
        lambda: ask(app.http, "/m/v2/models/a/infer", questions.bodies[4]).status == 200, "another replica serves", 60
    )


def test_requests_of_dying_replica_fail_with_retryable_errors(slow: Nodes) -> None:
    one = SLOW[:1]
    handle = serve.get_app_handle("slow")
    with ThreadPoolExecutor(1) as pool:
        # A stopped worker keeps both requests in the daemon.
        os.kill(worker_of(slow.supervisors("slow")[0]), signal.SIGSTOP)
        by_handle = handle.infer.remote({"x": one})
        by_http = pool.submit(ask, slow.http, "/slow/v2/models/slow/infer", inference(one))
        until(lambda: requests_in_daemon(slow) == 2, "both requests are in the daemon")
        os.kill(slow.replicas("slow")[0], signal.SIGKILL)
        with pytest.raises(RayActorError):
            by_handle.result()
        reply = by_http.result()
    # The text comes from Serve, not from weightd: see docs/ray.md.
    assert (reply.status, reply.is_ours) == (500, False)


def test_timeout_of_serve_cancels_request(slow: Nodes) -> None:
    until(lambda: ask(slow.http, "/slow/v2/models/slow/ready").status == 200, "another replica serves", 60)
    body, header = binary(SLOW)
    before = cancelled(slow)
    # Long enough for the request to reach the daemon on a busy machine.
    header = {**header, "X-Request-Timeout-Seconds": "5.0"}
    os.kill(worker_of(slow.supervisors("slow")[0]), signal.SIGSTOP)
    connection = http.client.HTTPConnection("127.0.0.1", slow.http, timeout=60)
    connection.request("POST", "/slow/v2/models/slow/infer", body, header)
    assert connection.getresponse().status == 408
    connection.close()
    until(lambda: cancelled(slow) != before, "the daemon cancels the request")


def worker_of(supervisor: int) -> int:
    (pid,) = (each for each in families([supervisor]) if census.log(each).endswith(".w1.log"))
    return pid


def daemon_of(supervisor: int) -> int:
    (pid,) = Path(f"/proc/{supervisor}/task/{supervisor}/children").read_text().split()
    return int(pid)


def work_dir_of(nodes: Nodes, supervisor: int) -> Path:
    command = Path(f"/proc/{daemon_of(supervisor)}/cmdline").read_bytes().decode()
    (work_dir,) = (each for each in (nodes.base / "work").iterdir() if str(each) in command)
    return work_dir
