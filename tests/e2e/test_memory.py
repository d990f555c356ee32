"""Tensors in shared memory of clients, while workers, clients or the daemon exit and while clients overwrite them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from testkit.loads import SharedMemoryPeer
from testkit.managed import ManagedService
from testkit.waiting import until
from weightd import Client, DeadlineExceeded, Unavailable
from weightd_common import memfd
from weightd_protocol.messages.inference import Infer, InferResponse, Parameters, RequestDescription, TensorSpec
from weightd_protocol.messages.regions import InputLocation, OutputLocation, Regions

from .support import MLP_WIDTH, ONE_ENGINE, BareEngine, SampleRequest, assert_same, mlp_inputs, ready_workers

pytestmark = [pytest.mark.e2e, ONE_ENGINE]

WORKERS = 2


@pytest.fixture(scope="module")
def service(mlp: Path) -> Iterator[ManagedService]:
    with ManagedService({"mlp": {"path": mlp, "workers": WORKERS, "required": True}}) as service:
        service.ready()
        yield service


@pytest.fixture(scope="module")
def question(mlp: Path, bare: BareEngine) -> SampleRequest:
    """A request with large tensors."""
    return bare.questions(mlp, mlp_inputs((64,)))[0]


def regions_of(pid: int) -> set[str]:
    """Return the regions of clients that a process has mapped."""
    lines = Path(f"/proc/{pid}/maps").read_text("ascii").splitlines()
    return {line.split()[4] for line in lines if "/memfd:weightd" in line}


def mapped(service: ManagedService) -> set[str]:
    """Return the regions of clients that any worker has mapped."""
    return {region for each in ready_workers(service, "mlp") for region in regions_of(each.pid)}


def ask(client: Client, question: SampleRequest, count: int = 4) -> None:
    for _ in range(count):
        assert_same(client.infer("mlp", question.inputs), question.answer)


def in_arena(client: Client, arrays: Any) -> dict[str, Any]:
    """Copy the arrays into the client's arena."""
    made = {name: client.empty(array.shape, array.dtype) for name, array in arrays.items()}
    for name, array in arrays.items():
        made[name][...] = array
    return made


def test_shares_memory_until_client_disconnects(service: ManagedService, question: SampleRequest) -> None:
    until(lambda: not mapped(service), "no region is mapped")
    with service.client() as client:
        ask(client, question, 20)
        assert mapped(service)
        inputs, out = in_arena(client, question.inputs), in_arena(client, question.answer)
        for _ in range(3):
            for array in out.values():
                array[...] = -1
            outputs = client.infer("mlp", inputs, out=out)
            assert all(outputs[name] is array for name, array in out.items())
            assert_same(out, question.answer)
    with service.client() as client:
        until(lambda: not mapped(service), "the workers unmap the regions")
        ask(client, question)
    with Client(service.zmq_address) as client:
        ask(client, question)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_client_registers_regions_with_next_daemon(
    service: ManagedService, question: SampleRequest, number: signal.Signals
) -> None:
    with service.client() as client:
        inputs, out = in_arena(client, question.inputs), in_arena(client, question.answer)
        ask(client, question)
        pending = [client.submit("mlp", inputs, out=out) for _ in range(20)]
        service.restart(number)
        for each in pending:
            try:
                each.result()
            except Unavailable:
                continue
        kept: list[Any] = []
        for _ in range(6):
            kept.append(client.infer("mlp", question.inputs))
            assert_same(client.infer("mlp", inputs, out=out), question.answer)
        # By now, a worker that started a predict for the previous daemon has finished it.
        for each in kept:
            assert_same(each, question.answer)
        assert mapped(service)


def test_other_worker_reads_region_of_killed_worker(service: ManagedService, question: SampleRequest) -> None:
    service.ready()
    with service.client() as client:
        inputs, out = in_arena(client, question.inputs), in_arena(client, question.answer)
        ask(client, question)
        pending = [client.submit("mlp", question.inputs) for _ in range(20)]
        os.kill(ready_workers(service, "mlp")[0].pid, signal.SIGKILL)
        assert_same(client.infer("mlp", inputs, out=out), question.answer)
        for each in pending:
            assert_same(each.result(), question.answer)
    service.ready()


def test_late_output_does_not_overwrite_new_arrays(service: ManagedService, question: SampleRequest) -> None:
    service.ready()
    workers = [each.pid for each in ready_workers(service, "mlp")]
    with service.client() as client:
        ask(client, question)
        for pid in workers:
            os.kill(pid, signal.SIGSTOP)
        pending = [client.submit("mlp", question.inputs, timeout=0.2) for _ in range(4)]
        for each in pending:
            with pytest.raises(DeadlineExceeded):
                each.result()
        # These arrays are allocated after the requests have ended, but the workers still hold two of the requests.
        arrays = [client.empty((64, MLP_WIDTH), np.float32) for _ in range(20)]
        for array in arrays:
            array[...] = 7
        for pid in workers:
            os.kill(pid, signal.SIGCONT)
        ask(client, question, 10)
        assert all((array == 7).all() for array in arrays)


def test_overwritten_inputs_affect_only_their_client(service: ManagedService, question: SampleRequest) -> None:
    workers = {each.pid for each in ready_workers(service, "mlp")}
    stop = threading.Event()
    with service.client() as client, service.client() as other:
        inputs, out = in_arena(client, question.inputs), in_arena(client, question.answer)
        ask(client, question)

        def scribble() -> None:
            random = np.random.default_rng(0)
            while not stop.is_set():
                for array in (*inputs.values(), *out.values()):
                    array.view(np.uint8)[...] = random.integers(0, 256, 1, np.uint8)

        scribbler = threading.Thread(target=scribble)
        scribbler.start()
        try:
            for _ in range(10):
                client.infer("mlp", inputs, out=out)
                ask(other, question, 1)
        finally:
            stop.set()
            scribbler.join()
    assert {each.pid for each in ready_workers(service, "mlp")} == workers


KILLED = """
import sys, numpy as np
from weightd import Client
client = Client(sys.argv[1])
x = client.empty((64, int(sys.argv[2])), np.float32)
x[...] = 0
for _ in range(4):
    client.infer("mlp", {"x": x})
pending = [client.submit("mlp", {"x": x}) for _ in range(100)]
print("asked", flush=True)
sys.stdin.read()
"""


def test_frees_regions_of_killed_client(service: ManagedService, question: SampleRequest) -> None:
    service.ready()
    with service.client() as client:
        ask(client, question)
        before = len(list(Path(f"/proc/{service.pid}/fd").iterdir()))
        own = mapped(service)
        command = [sys.executable, "-c", KILLED, service.address, str(MLP_WIDTH)]
        with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True) as killed:
            assert killed.stdout is not None
            assert killed.stdout.readline() == "asked\n"
            killed.kill()
        ask(client, question)
        until(
            lambda: len(list(Path(f"/proc/{service.pid}/fd").iterdir())) <= before, "the daemon closes the descriptors"
        )
        until(lambda: mapped(service) <= own, "the workers unmap the regions")
        ask(client, question)


def test_workers_allocate_no_pages_of_sparse_regions(service: ManagedService, question: SampleRequest) -> None:
    service.ready()
    nbytes = question.inputs["x"].nbytes
    (answer,) = question.answer.values()
    descriptor = memfd.create(nbytes + answer.nbytes)
    try:
        with SharedMemoryPeer(f"{service.address}.unix") as peer:
            region = peer.register(descriptor)
            places = Regions((InputLocation(0, region, 0),), (OutputLocation(0, region, nbytes, answer.nbytes),))
            description = RequestDescription("mlp", (TensorSpec("x", "FP32", question.inputs["x"].shape),))
            for number in range(2 * WORKERS):
                response = peer.ask(Infer(str(number), description, Parameters(regions=places)))
                assert isinstance(response, InferResponse), response
                assert response.shared_outputs is None
        assert os.fstat(descriptor).st_blocks == 0
    finally:
        os.close(descriptor)
