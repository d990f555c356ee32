"""Direct channels: requests go to the workers without the daemon, under the guarantees of the daemon's own path."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray

from testkit import models
from testkit.service import Service
from testkit.waiting import until
from weightd_protocol.messages.channels import ChannelEnded, RequestAdopted, RequestLost
from weightd_protocol.messages.inference import Error

from .channel_client import ChannelClient
from .support import ONE_ENGINE, ready_workers

pytestmark = [pytest.mark.e2e, ONE_ENGINE]

# The model counts to this number for about a second.
SLOW = 600_000
ENDLESS = 10**12

TENANTS = {"research": {"uids": [os.getuid()], "may": ["infer", "status"]}}


def ints(*values: int) -> NDArray[Any]:
    return np.array(values, np.int64)


@pytest.fixture
def service(tmp_path: Path) -> Iterator[Service]:
    path = models.patient(tmp_path / "patient.onnx")
    tables = {"patient": {"path": path, "workers": 1, "predict_timeout": 5.0}}
    with Service(tables, tenants=TENANTS, verbose=True) as service:
        service.ready()
        yield service


def worker_pid(service: Service) -> int:
    [worker] = ready_workers(service, "patient")
    return worker.pid


def is_busy(pid: int) -> bool:
    """Return whether a process computes now."""
    return Path(f"/proc/{pid}/stat").read_text("utf-8").rpartition(")")[2].split()[0] == "R"


def test_worker_answers_while_daemon_is_stopped(service: Service) -> None:
    with ChannelClient(service.address, "patient", n=ints(1)) as client:
        os.kill(service.pid, signal.SIGSTOP)
        try:
            names = [client.send(n=ints(number)) for number in range(20)]
            assert [client.output(each) for each in names] == [[number] for number in range(20)]
        finally:
            os.kill(service.pid, signal.SIGCONT)


def test_unknown_description_is_answered_by_the_daemon(service: Service) -> None:
    with ChannelClient(service.address, "patient", n=ints(1)) as client:
        name = client.send(n=ints(3, 4))
        assert client.output(name) == [3, 4]
        assert client.wait_for(RequestAdopted).id == name


def test_killed_worker_loses_only_its_request(service: Service) -> None:
    with ChannelClient(service.address, "patient", n=ints(1)) as client:
        first, *others = [client.send(n=ints(number)) for number in (SLOW, 2, 3, 4)]
        until(lambda: client.has_answer(first) or is_busy(worker_pid(service)), "the first one runs")
        os.kill(worker_pid(service), signal.SIGKILL)
        assert client.wait_for(RequestLost).id == first
        assert [client.output(each) for each in others] == [[2], [3], [4]]
        client.wait_for(ChannelEnded)
        assert client.output(client.relay(n=ints(5))) == [5]


def test_hung_request_ends_in_an_error(service: Service) -> None:
    with ChannelClient(service.address, "patient", n=ints(1)) as client:
        answer = client.answer(client.send(n=ints(ENDLESS)))
        assert isinstance(answer, Error)
        assert (answer.code, "longer than predict_timeout" in answer.error) == ("DEADLINE_EXCEEDED", True)
        # From now on, the daemon checks each request, and blames the client for this one.
        assert client.wait_for(ChannelEnded)
        assert client.output(client.relay(n=ints(5))) == [5]
        refused = client.refused_channel()
        assert (refused.code, "crashed or hung" in refused.error) == ("FAILED_PRECONDITION", True)


def test_request_behind_a_hung_one_runs_on_the_next_worker(service: Service) -> None:
    with (
        ChannelClient(service.address, "patient", n=ints(1)) as hostile,
        ChannelClient(service.address, "patient", n=ints(1)) as client,
    ):
        hung = hostile.send(n=ints(ENDLESS))
        until(lambda: is_busy(worker_pid(service)), "the first one runs")
        assert client.output(client.relay(n=ints(5))) == [5]
        answer = hostile.answer(hung)
        assert isinstance(answer, Error)
        assert answer.code == "DEADLINE_EXCEEDED"


def test_update_answers_queued_requests(service: Service, tmp_path: Path) -> None:
    with ChannelClient(service.address, "patient", n=ints(1)) as client, service.client() as operator:
        names = [client.send(n=ints(number)) for number in (SLOW, 2, 3)]
        operator.update("patient", path=str(tmp_path / "patient.onnx"))
        assert [client.output(each) for each in names] == [[SLOW], [2], [3]]
        client.wait_for(ChannelEnded)
        with pytest.raises(BrokenPipeError):
            client.send(n=ints(1))


def test_unload_answers_queued_requests(service: Service) -> None:
    with ChannelClient(service.address, "patient", n=ints(1)) as client, service.client() as operator:
        names = [client.send(n=ints(number)) for number in (SLOW, 2, 3)]
        operator.unload("patient")
        assert [client.output(each) for each in names] == [[SLOW], [2], [3]]
        with pytest.raises(BrokenPipeError):
            client.send(n=ints(1))
        refused = client.refused_channel()
        assert refused.code == "FAILED_PRECONDITION"


def test_disconnect_closes_all_descriptors(service: Service) -> None:
    def descriptors() -> tuple[int, ...]:
        return tuple(len(os.listdir(f"/proc/{pid}/fd")) for pid in (service.pid, worker_pid(service)))  # noqa: PTH208

    with ChannelClient(service.address, "patient", n=ints(1)):
        pass
    until(lambda: not is_busy(worker_pid(service)), "the worker is idle")
    before = descriptors()
    for _ in range(5):
        with ChannelClient(service.address, "patient", n=ints(1)) as client:
            assert client.output(client.send(n=ints(7))) == [7]
    until(lambda: descriptors() == before, "all descriptors are closed")


def test_usage_counts_requests_of_channels(service: Service) -> None:
    def served() -> int:
        return sum(account.served for tenant in service.status().tenants for account in tenant.accounts)

    with ChannelClient(service.address, "patient", n=ints(1)) as client:
        before = served()
        for number in range(30):
            assert client.output(client.send(n=ints(number))) == [number]
        until(lambda: served() == before + 30, "the requests are counted")


def test_stop_answers_queued_requests(service: Service) -> None:
    with ChannelClient(service.address, "patient", n=ints(1)) as client:
        names = [client.send(n=ints(number)) for number in (SLOW, 2, 3)]
        os.kill(service.pid, signal.SIGTERM)
        assert [client.output(each) for each in names] == [[SLOW], [2], [3]]
