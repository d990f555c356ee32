"""One worker with its channels: order of the stores, refusals and releases. Runs on Python 3.7."""

from __future__ import annotations

from typing import Any, List, Tuple

import pytest

from weightd_common.channels.messages import AddChannel, AnswerDropped, HandedOver, Released
from weightd_common.channels.pages import (
    ANSWERED,
    BYTE_LIMIT,
    BYTES,
    CURRENT_CHANNEL,
    CURRENT_REQUEST,
    EXPIRES_AT,
    GENERATION,
    LATE,
    OFFSET,
    REQUEST_LIMIT,
    REQUESTS,
    SERIAL,
    SINCE,
    SLOT_ENDING,
    SLOT_OPEN,
    STAGE,
    STAGE_HANDING_OVER,
    STAGE_IDLE,
    STAGE_RUNNING,
    STAGE_TAKEN,
    STAGE_TAKING,
    STATE,
    TENANT,
    USED,
    WEIGHT,
    Layout,
    Page,
    page_over,
)
from weightd_protocol.messages.channels import ENDED, EXPIRED, FOREIGN, ORDERED, OVERDRAWN
from weightd_worker.channels.pull_scheduler import PulledChannel, PullScheduler
from weightd_worker.channels.session import ChannelSession

LAYOUT = Layout(2, 4)
GENERATION_SERIAL = 7


class Recorder:
    """A view that records the words that are stored."""

    def __init__(self, memory: Any, stores: List[Tuple[int, Any]]) -> None:
        self.memory = memory
        self.stores = stores

    def __getitem__(self, index: int) -> Any:
        return self.memory[index]

    def __setitem__(self, index: int, value: Any) -> None:
        self.stores.append((index, value))
        self.memory[index] = value


class PagedWorker:
    """A session with its pages."""

    def __init__(self, layout: Layout = LAYOUT) -> None:
        self.layout = layout
        self.page = page_over(memoryview(bytearray(layout.daemon_page_bytes)))
        self.row = page_over(memoryview(bytearray(layout.row_bytes)))
        self.other = page_over(memoryview(bytearray(layout.row_bytes)))
        self.stores: List[Tuple[int, Any]] = []
        words: Any = Recorder(self.row.words, self.stores)
        reals: Any = Recorder(self.row.reals, self.stores)
        own, rows = Page(words, reals), [self.row, self.other]
        scheduler = PullScheduler(self.page, rows, own, rows)
        self.session = ChannelSession(layout, self.page, own, scheduler, GENERATION_SERIAL)
        for tenant in range(2):
            self.page.reals[layout.tenant(tenant) + WEIGHT] = 1.0

    def open(self, slot: int, serial: int, tenant: int = 0, generation: int = GENERATION_SERIAL) -> List[Released]:
        index, words = self.layout.channel(slot), self.page.words
        words[index + SERIAL], words[index + GENERATION], words[index + TENANT] = serial, generation, tenant
        words[index + REQUEST_LIMIT], words[index + BYTE_LIMIT] = 3, 100
        self.page.reals[index + EXPIRES_AT] = 50.0
        words[index + STATE] = SLOT_OPEN
        return self.session.add(AddChannel(slot, serial))

    def choose(self, now: float = 1.0) -> PulledChannel:
        chosen = self.session.choose([*self.session.channels.values()], now)
        assert chosen is not None
        return chosen


@pytest.fixture
def worker() -> PagedWorker:
    worker = PagedWorker()
    assert worker.open(1, 11) == []
    return worker


def stages(worker: PagedWorker) -> List[int]:
    return [value for index, value in worker.stores if index == STAGE]


def run_request(worker: PagedWorker, seconds: float) -> PulledChannel:
    channel = worker.choose()
    worker.session.on_request(channel, 5, 1, 1.0)
    worker.session.run(2.0)
    worker.session.on_result(channel, seconds)
    worker.session.on_answered(channel, ANSWERED)
    return channel


def test_stores_of_an_answered_request_keep_their_order(worker: PagedWorker) -> None:
    channel = worker.choose()
    assert worker.session.on_request(channel, 5, 40, 1.0) == ""
    worker.session.run(2.0)
    worker.session.on_result(channel, 0.25)
    worker.session.on_answered(channel, ANSWERED)
    assert stages(worker) == [STAGE_TAKING, STAGE_TAKEN, STAGE_RUNNING, STAGE_IDLE]
    order = [index for index, _ in worker.stores]
    assert order.index(CURRENT_CHANNEL) < order.index(STAGE)
    assert worker.stores.index((SINCE, 2.0)) < worker.stores.index((STAGE, STAGE_RUNNING))
    taken = worker.stores.index((STAGE, STAGE_TAKEN))
    for index in (CURRENT_REQUEST, channel.row_index + REQUESTS, channel.row_index + BYTES):
        assert order.index(index) < taken
    assert order.index(channel.used_index + USED) < worker.stores.index((STAGE, STAGE_RUNNING))
    assert worker.row.reals[channel.used_index + USED] == 0.25


@pytest.mark.parametrize("is_handed_over", [True, False], ids=["handed over", "late"])
def test_a_request_that_does_not_run_has_a_fixed_cost(worker: PagedWorker, is_handed_over: bool) -> None:
    used = LAYOUT.row_tenant(0) + USED
    run_request(worker, 3.0)
    for number in range(1, 4):
        channel = worker.choose()
        worker.session.on_request(channel, 6, 1, 1.0)
        assert worker.row.reals[used] == pytest.approx(3.0 * 2 + 0.0002 * (number - 1))
        if is_handed_over:
            worker.session.hand_over(channel, b"", "quarantined")
            worker.session.on_handed_over(channel)
        else:
            worker.session.on_answered(channel, LATE)
        assert worker.row.reals[used] == pytest.approx(3.0 + 0.0002 * number)
        worker.row.words[channel.row_index + REQUESTS] = 0


def test_reading_no_request_costs_nothing(worker: PagedWorker) -> None:
    channel = run_request(worker, 3.0)
    worker.open(2, 22, tenant=1)
    for _ in range(2):
        worker.session.on_nothing(worker.choose())
    assert worker.row.reals[channel.used_index + USED] == 3.0
    assert worker.row.reals[LAYOUT.row_tenant(1) + USED] == 0.0


def test_the_expected_cost_is_the_mean_of_measured_costs(worker: PagedWorker) -> None:
    charges = []
    for seconds in (1.0, 2.0, 2.0):
        before = worker.row.reals[LAYOUT.row_tenant(0) + USED]
        channel = worker.choose()
        worker.session.on_request(channel, 5, 1, 1.0)
        worker.session.run(2.0)
        charges.append(worker.row.reals[channel.used_index + USED] - before)
        worker.session.on_result(channel, seconds)
        assert worker.row.reals[channel.used_index + USED] - before == seconds
        worker.session.on_answered(channel, ANSWERED)
    assert charges == pytest.approx([0.0, 1.0, 1.2])


@pytest.mark.parametrize("has_run", [True, False])
def test_a_dropped_answer_is_reported(worker: PagedWorker, has_run: bool) -> None:
    channel = worker.choose()
    worker.session.on_request(channel, 5, 1, 1.0)
    if has_run:
        worker.session.run(2.0)
    assert worker.session.drop_answer(channel) == AnswerDropped(11, 5, has_run)


def test_a_refused_request_is_handed_over_and_ends_the_channel(worker: PagedWorker) -> None:
    channel = worker.choose()
    worker.other.words[channel.row_index + REQUESTS] = 3
    assert worker.session.on_request(channel, 5, 40, 1.0) == OVERDRAWN
    assert worker.session.hand_over(channel, b"x", OVERDRAWN) == HandedOver(11, 5, b"x", OVERDRAWN)
    assert worker.session.on_handed_over(channel) == [Released(11, OVERDRAWN)]
    assert stages(worker) == [STAGE_TAKING, STAGE_TAKEN, STAGE_HANDING_OVER, STAGE_IDLE]
    assert worker.session.channels == {}


def test_a_request_that_the_caller_refuses_leaves_the_channel(worker: PagedWorker) -> None:
    channel = worker.choose()
    assert worker.session.on_request(channel, 5, 40, 1.0) == ""
    worker.session.hand_over(channel, b"x", "quarantined")
    assert worker.session.on_handed_over(channel) == []
    assert [*worker.session.channels] == [11]


@pytest.mark.parametrize(
    ("word", "value", "reason"),
    [(STATE, SLOT_ENDING, ORDERED), (SERIAL, 12, FOREIGN), (REQUEST_LIMIT, 0, OVERDRAWN), (BYTE_LIMIT, 39, OVERDRAWN)],
)
def test_a_change_after_the_choice_stops_the_request(worker: PagedWorker, word: int, value: int, reason: str) -> None:
    channel = worker.choose()
    worker.page.words[channel.index + word] = value
    assert worker.session.on_request(channel, 5, 40, 1.0) == reason


@pytest.mark.parametrize(("word", "value", "reason"), [(STATE, SLOT_ENDING, ORDERED), (SERIAL, 12, FOREIGN)])
def test_a_channel_that_has_ended_is_released_once(worker: PagedWorker, word: int, value: int, reason: str) -> None:
    [channel] = worker.session.channels.values()
    worker.page.words[channel.index + word] = value
    assert worker.session.choose([channel], 1.0) is None
    assert worker.stores == []
    assert worker.session.take_releases() == [Released(11, reason)]
    assert worker.session.take_releases() == []
    assert worker.session.release(11) == []


def test_an_expired_channel_is_released_and_the_next_one_chosen(worker: PagedWorker) -> None:
    worker.open(2, 22)
    worker.page.reals[LAYOUT.channel(2) + EXPIRES_AT] = 60.0
    channel = worker.choose(50.0)
    assert channel.serial == 22
    assert worker.session.take_releases() == [Released(11, EXPIRED)]


def test_many_channels_that_end_are_released_in_two_passes() -> None:
    count = 3000
    worker = PagedWorker(Layout(2, count + 1))
    for slot in range(count):
        worker.open(slot, slot + 1)
        worker.page.words[worker.layout.channel(slot) + STATE] = SLOT_ENDING
    worker.open(count, count + 1, tenant=1)
    worker.page.reals[worker.layout.tenant(1) + OFFSET] = 5.0
    assert worker.choose().serial == count + 1
    assert worker.session.take_releases() == [Released(slot + 1, ORDERED) for slot in range(count)]
    assert worker.session._scheduler.stopped == []


def test_the_end_of_a_queue_releases_the_channel(worker: PagedWorker) -> None:
    channel = worker.choose()
    assert worker.session.on_end(channel) == [Released(11, ENDED)]
    assert stages(worker) == [STAGE_TAKING, STAGE_IDLE]


def test_an_empty_queue_leaves_the_channel(worker: PagedWorker) -> None:
    worker.session.on_nothing(worker.choose())
    assert stages(worker) == [STAGE_TAKING, STAGE_IDLE]
    assert [*worker.session.channels] == [11]


@pytest.mark.parametrize(("serial", "generation"), [(33, GENERATION_SERIAL + 1), (34, GENERATION_SERIAL)])
def test_a_channel_of_another_generation_or_serial_is_not_read(
    worker: PagedWorker, serial: int, generation: int
) -> None:
    worker.open(3, 33, generation=generation)
    worker.session.channels.pop(33, None)
    assert worker.session.add(AddChannel(3, serial)) == [Released(serial, FOREIGN)]
    assert [*worker.session.channels] == [11]


def test_channels_of_one_tenant_take_turns(worker: PagedWorker) -> None:
    worker.open(2, 22)
    worker.open(3, 33)
    serials = []
    for _ in range(6):
        channel = worker.choose()
        serials.append(channel.serial)
        worker.session.on_nothing(channel)
    assert sorted(serials[:3]) == [11, 22, 33]
    assert serials[3:] == serials[:3]
