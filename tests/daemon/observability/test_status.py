from __future__ import annotations

from types import SimpleNamespace
from typing import Any
from unittest import mock

from weightd_daemon.api.zmq_proxies import ProxyInfo
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.engines.ranktable import card_bytes
from weightd_daemon.generations.spec import ModelSource
from weightd_daemon.models.model import ServedModel
from weightd_daemon.models.placement import DeviceBudget
from weightd_daemon.observability.memory import MemoryScan, TtlCache
from weightd_daemon.observability.status import StatusInputs, build_status
from weightd_daemon.platform.memory import MIB, ProcessMemory
from weightd_daemon.processes.events import Snapshot
from weightd_protocol.messages.inference import TensorSignature
from weightd_protocol.messages.status import ProxyStatus
from weightd_protocol.messages.worker import Attached, Built, Hello, SharingTraits
from weightd_protocol.version import VERSION

SHA = "5" * 64
CARD = SharingTraits(pids_fixed_at_build=True, holder_must_outlive=True, attach_rewrites_weights=True)
X = TensorSignature("x", "FP32", (4,))
HOLDER, WORKER, SPARE = "m.1.holder", "m.1.w1", "m.1.w2"
WEIGHTS = 100 * MIB


def test_what_a_model_on_a_card_is_and_takes() -> None:
    config = ModelConfig("/m.mindir", "mindspore_lite", "python3", spares=1, devices=("ascend:0",))
    card = DeviceBudget("ascend:0", 2**36)
    model = ServedModel("m", config, {"ascend:0": card}, mock.MagicMock(), mock.MagicMock())
    model.start(0.0)
    model.on_snapshot_taken(ModelSource("/m.mindir"), Snapshot("/m.mindir", "", SHA, WEIGHTS), 0.0)
    for name in (HOLDER, WORKER, SPARE):
        model.process_events.on_message(name, Hello(name, SHA, {"weightd": VERSION}, CARD), (), 0.0)
    model.process_events.on_message(HOLDER, Built("7", (X,), (X,), ({"x": (4,)},), "canary", WEIGHTS), (), 0.0)
    for name in (WORKER, SPARE):
        model.process_events.on_message(name, Attached("canary", WEIGHTS), (), 0.0)
    processes: dict[str, Any] = {name: SimpleNamespace(pid=pid) for pid, name in enumerate((HOLDER, WORKER, SPARE), 10)}
    survey = MemoryScan("s", (), TtlCache())
    survey.memory_by_pid = {
        1: ProcessMemory(7, 6, 5),
        2: None,
        10: ProcessMemory(1000, 900, 950),
        11: ProcessMemory(100, 90, 95),
    }
    subject = StatusInputs(
        [model],
        [card, DeviceBudget("cpu"), DeviceBudget("cpu:0")],
        processes,
        {},
        3,
        4,
        5,
        [1, 2],
        "a note",
        [ProxyInfo("lan", "tcp://*:1", 2, 3, 4)],
    )
    told = build_status(survey, "running", 1.0, subject)
    assert (told.pss_bytes, told.dropped_responses, told.buffered_bytes, told.max_memory_bytes, told.note) == (
        7,
        3,
        4,
        5,
        "a note",
    )
    assert told.zmq_proxies == (ProxyStatus("lan", "tcp://*:1", 2, 3, 4, None),)
    [generation] = told.models[0].generations
    assert [
        (each.name, each.role, each.pss_bytes, each.private_bytes, each.anonymous_bytes)
        for each in generation.processes
    ] == [
        (HOLDER, "holder", 1000, 900, 950),
        (WORKER, "worker", 100, 90, 95),
        (SPARE, "spare", None, None, None),
    ]
    assert {each.device for each in generation.processes} == {"ascend:0"}
    assert (generation.copy_bytes, generation.saved_bytes) == (WEIGHTS, WEIGHTS)
    [device] = told.devices
    assert (device.name, device.processes, device.weights_bytes) == ("ascend:0", 3, card_bytes(WEIGHTS))
    assert (device.saved_bytes, device.capacity_bytes, device.free_bytes) == (card_bytes(WEIGHTS), 2**36, None)
