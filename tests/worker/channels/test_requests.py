"""Bounds of the memory that a worker uses for requests and answers on channels. Runs on Python 3.7."""

from __future__ import annotations

from typing import Any, List

import numpy as np
import pytest

from testkit.channels import DESCRIPTION, Client, Device, Worker, digest_of, request
from weightd_common.channels.pages import DEVICE_LAYOUT, USED
from weightd_protocol.codec import decode
from weightd_protocol.description_cache import DescriptionCache
from weightd_protocol.framing import FrameReader
from weightd_protocol.messages.channels import AddChannel, ReleaseChannel, SetChannelRows
from weightd_protocol.messages.inference import InferResponse, Parameters, ResponseDescription, TensorSpec
from weightd_protocol.messages.types import TO_CLIENT
from weightd_worker.channels import answers, requests
from weightd_worker.channels.answers import AnswerWriter
from weightd_worker.channels.requests import RequestReader, new_decoder


def test_known_requests_are_limited(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(requests, "_MAX_KNOWN", 3)
    reader: Any = RequestReader(new_decoder(DescriptionCache()))
    reader.allow(digest_of(DESCRIPTION))
    for timeout_us in range(1, 9):
        for _ in range(2):
            found = reader.read(request(7, parameters=Parameters(timeout_us)))
            assert (found.number, found.description) == (7, DESCRIPTION)
    assert len(reader._known) == 3


def test_answers_differ_in_id_and_outputs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(answers, "_MAX_FORMS", 3)
    writer: Any = AnswerWriter()
    descriptions = [ResponseDescription("m", (TensorSpec("y", "INT8", (size,)),)) for size in range(1, 5)]
    for _ in range(2):
        for size, description in enumerate(descriptions, 1):
            for request_id in ("7", "8", "123456789012"):
                packet = writer.result(request_id, description, [bytes([size] * size)])
                [message] = FrameReader().receive(packet)
                assert decode(message.frames, TO_CLIENT) == InferResponse(request_id, description)
                assert message.frames[2] == bytes([size] * size)
    assert len(writer._forms) == 3


def test_many_rows_have_the_same_sums_as_few(device: Device) -> None:
    few, many = Worker(device, 0, 2), Worker(device, 1, 40)
    client = device.open()
    times: List[float] = []
    for row in range(2):
        device.row(row).reals[DEVICE_LAYOUT.row_tenant(0) + USED] = 1.5 + row
        device.row(row).reals[DEVICE_LAYOUT.row_tenant(0) + USED + 1] = 7.0 - row
    for worker in (few, many):
        worker.add(client)
        session: Any = vars(worker.channels)["_session"]
        times.append(session._scheduler.virtual_time(session.channels[client.serial]))
    assert times == [11.0, 11.0]
    # A worker that has crashed may have written anything.
    device.row(1).reals[DEVICE_LAYOUT.row_tenant(0) + USED] = np.inf
    device.row(1).reals[DEVICE_LAYOUT.row_tenant(0) + USED + 1] = np.inf
    for worker in (few, many):
        session = vars(worker.channels)["_session"]
        assert session._scheduler.virtual_time(session.channels[client.serial]) == 8.5
        worker.channels.close()


def test_closed_channels_take_no_further_ones(device: Device, worker: Worker, client: Client) -> None:
    worker.channels.close()
    worker.channels.on_order(SetChannelRows(3, 0, 2, (0, 1)))
    device.open(1, 22)
    worker.connection.descriptors.append(device.ends.pop(22).detach())
    worker.channels.on_order(AddChannel(1, 22))
    worker.channels.on_order(ReleaseChannel(22))
    assert (worker.sent, worker.connection.watched) == ([], set())
    # The worker has closed the only descriptor of its end.
    assert device.clients[1].recv(1) == b""
