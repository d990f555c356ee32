"""Grants, credits, ends and exits of workers, without the model."""

from __future__ import annotations

from typing import Any

import pytest

from weightd_common.channels.messages import (
    AddChannel,
    Adopted,
    AnswerDropped,
    Ended,
    Granted,
    HandedOver,
    Lost,
    Refilled,
    ReleaseChannel,
    Released,
)
from weightd_common.channels.pages import (
    BASE,
    CURRENT_CHANNEL,
    CURRENT_REQUEST,
    EXPIRES_AT,
    REQUEST_LIMIT,
    REQUESTS,
    SECONDS,
    SINCE,
    SLOT_ENDING,
    SLOT_FREE,
    SLOT_OPEN,
    STAGE,
    STAGE_HANDING_OVER,
    STAGE_RUNNING,
    STAGE_TAKEN,
    STAGE_TAKING,
    START,
    STATE,
    USED,
    Layout,
)
from weightd_daemon.channels.page import DaemonPage
from weightd_daemon.channels.rows import RowReader
from weightd_daemon.channels.states import ChannelEvent, ChannelState
from weightd_daemon.channels.table import (
    ChannelTable,
    CloseDuplicate,
    Notify,
    Order,
    ReadQueue,
    Relay,
    ReplaceWorker,
    ShutDown,
)
from weightd_protocol.messages.channels import ORDERED

from .kernel import new_page

LAYOUT = Layout(2, 2)
NOW = 10.0
GENERATION = 7


class Setting:
    """A table with one worker."""

    def __init__(self) -> None:
        self.page = new_page(LAYOUT.daemon_page_bytes)
        self.row = new_page(LAYOUT.row_bytes)
        self.table = ChannelTable(LAYOUT, DaemonPage(LAYOUT, self.page))
        self.table.add_tenant(1, 1.0, NOW)
        self.table.add_worker("w", GENERATION, RowReader(LAYOUT, self.row, 0.0))

    def grant(self) -> int:
        serial = self.table.grant("c", 1, GENERATION, (3, 30), 50.0, NOW)
        assert serial is not None
        return serial

    def word(self, serial: int, word: int) -> int:
        return self.page.words[LAYOUT.channel(self.slot(serial)) + word]

    def slot(self, serial: int) -> int:
        return self.table.channels[serial].slot

    def set_request(self, channel: int, request: int, stage: int) -> None:
        words = self.row.words
        words[CURRENT_CHANNEL], words[CURRENT_REQUEST], words[STAGE] = channel, request, stage


@pytest.fixture
def setting() -> Setting:
    return Setting()


def test_a_grant_reaches_the_page_the_workers_and_the_client(setting: Setting) -> None:
    serial = setting.grant()
    assert setting.word(serial, STATE) == SLOT_OPEN
    assert setting.table.take_actions() == [
        Order("w", AddChannel(setting.slot(serial), serial)),
        Notify("c", Granted(serial, 3, 30, 50.0)),
    ]
    assert setting.table.take_actions() == []


def test_without_a_free_slot_nothing_is_granted(setting: Setting) -> None:
    setting.grant()
    setting.grant()
    assert setting.table.grant("c", 1, GENERATION, (3, 30), 50.0, NOW) is None


@pytest.mark.parametrize("has_run", [True, False])
def test_a_client_that_does_not_read_loses_its_channel(setting: Setting, has_run: bool) -> None:
    serial = setting.grant()
    setting.table.take_actions()
    setting.table.on_report("w", AnswerDropped(serial, 4, has_run))
    assert setting.table.take_actions() == [
        Notify("c", Lost(serial, 4, has_run)),
        ShutDown(serial),
        Order("w", ReleaseChannel(serial)),
        ReadQueue(serial),
    ]


def test_slots_are_used_again(setting: Setting) -> None:
    for _ in range(3):
        serials = [setting.grant(), setting.grant()]
        for serial in serials:
            setting.table.end(serial, ChannelEvent.CLIENT_GONE)
            setting.table.on_report("w", Released(serial, ORDERED))


def test_a_worker_gets_the_open_channels_of_its_generation(setting: Setting) -> None:
    first, second = setting.grant(), setting.grant()
    setting.table.end(second, ChannelEvent.REVOKE)
    setting.table.take_actions()
    setting.table.add_worker("x", GENERATION, RowReader(LAYOUT, new_page(LAYOUT.row_bytes), 0.0))
    setting.table.add_worker("y", GENERATION + 1, RowReader(LAYOUT, new_page(LAYOUT.row_bytes), 0.0))
    assert setting.table.take_actions() == [Order("x", AddChannel(setting.slot(first), first))]


def test_limits_of_a_reused_slot_begin_at_its_counts(setting: Setting) -> None:
    serial = setting.grant()
    slot = setting.slot(serial)
    setting.row.words[LAYOUT.row_channel(slot) + REQUESTS] = 2
    setting.table.end(serial, ChannelEvent.CLIENT_GONE)
    setting.table.on_report("w", Released(serial, ORDERED))
    assert setting.page.words[LAYOUT.channel(slot) + STATE] == SLOT_FREE
    other = setting.grant()
    assert setting.slot(other) == slot
    assert setting.word(other, REQUEST_LIMIT) == 5


def test_a_refill_raises_limits_and_expiry(setting: Setting) -> None:
    serial = setting.grant()
    setting.table.take_actions()
    setting.table.refill(serial, 2, 20, 60.0, NOW)
    assert setting.word(serial, REQUEST_LIMIT) == 5
    assert setting.page.reals[LAYOUT.channel(setting.slot(serial)) + EXPIRES_AT] == 60.0
    assert setting.table.take_actions() == [Notify("c", Refilled(serial, 5, 50, 60.0))]


def test_an_expired_channel_is_not_refilled(setting: Setting) -> None:
    serial = setting.grant()
    setting.table.refill(serial, 2, 20, 60.0, 50.0)
    assert setting.table.channels[serial].machine.state is ChannelState.RECLAIMED


def test_a_channel_that_ends_is_not_refilled(setting: Setting) -> None:
    serial = setting.grant()
    setting.table.end(serial, ChannelEvent.REVOKE)
    setting.table.take_actions()
    setting.table.refill(serial, 2, 20, 60.0, NOW)
    setting.table.refill(serial + 1, 2, 20, 60.0, NOW)
    assert setting.table.take_actions() == []
    assert setting.word(serial, REQUEST_LIMIT) == 3


@pytest.mark.parametrize("event", [ChannelEvent.REVOKE, ChannelEvent.END_GENERATION])
def test_a_channel_without_workers_is_read_at_once(setting: Setting, event: ChannelEvent) -> None:
    setting.table.on_worker_exit("w", NOW)
    serial = setting.grant()
    setting.table.end(serial, event)
    assert setting.table.channels[serial].machine.state is ChannelState.DRAINED
    assert setting.table.take_actions()[-1] == ReadQueue(serial)


def test_only_expired_channels_expire(setting: Setting) -> None:
    first, second = setting.grant(), setting.grant()
    setting.table.refill(second, 0, 0, 60.0, NOW)
    setting.table.expire(50.0)
    states = [setting.table.channels[each].machine.state for each in (first, second)]
    assert states == [ChannelState.RECLAIMED, ChannelState.OPEN]


def test_a_revoked_channel_is_drained_before_it_closes(setting: Setting) -> None:
    serial, table = setting.grant(), setting.table
    table.take_actions()
    table.end_generation(GENERATION + 1, ChannelEvent.REVOKE)
    assert table.take_actions() == []
    table.end_generation(GENERATION, ChannelEvent.REVOKE)
    table.end(serial, ChannelEvent.REVOKE)
    assert table.take_actions() == [ShutDown(serial)]
    assert setting.word(serial, STATE) == SLOT_OPEN
    table.on_report("w", Released(serial, ORDERED))
    assert table.take_actions() == [ReadQueue(serial)]
    table.on_queued(serial, 4, b"x")
    assert table.channels
    table.on_queue_end(serial)
    assert table.take_actions() == [
        Notify("c", Adopted(serial, 4)),
        Relay("c", serial, 4, b"x"),
        Notify("c", Ended(serial, may_have_run=False)),
        CloseDuplicate(serial),
    ]
    assert not table.channels


def test_an_empty_revoked_channel_is_taken_from_the_workers(setting: Setting) -> None:
    serial = setting.grant()
    setting.table.end(serial, ChannelEvent.REVOKE)
    setting.table.take_actions()
    setting.table.on_queue_end(serial)
    assert setting.word(serial, STATE) == SLOT_ENDING
    assert setting.table.take_actions() == [Order("w", ReleaseChannel(serial)), ReadQueue(serial)]


@pytest.mark.parametrize(
    ("stage", "notices"),
    [
        (STAGE_TAKEN, [Lost(1, 4, may_have_run=False)]),
        (STAGE_HANDING_OVER, [Lost(1, 4, may_have_run=False)]),
        (STAGE_RUNNING, [Lost(1, 4, may_have_run=True)]),
    ],
)
def test_the_row_of_an_exited_worker_tells_about_its_request(setting: Setting, stage: int, notices: list[Any]) -> None:
    serial = setting.grant()
    setting.table.take_actions()
    setting.set_request(serial, 4, stage)
    setting.table.on_worker_exit("w", NOW)
    assert setting.table.take_actions() == [Notify("c", each) for each in notices]
    assert setting.row.words[STAGE] == 0


def test_an_unknown_taken_request_ends_its_channel(setting: Setting) -> None:
    serial = setting.grant()
    setting.set_request(serial, 4, STAGE_TAKING)
    setting.table.take_actions()
    setting.table.on_worker_exit("w", NOW)
    setting.table.on_queue_end(serial)
    assert setting.table.take_actions() == [
        ShutDown(serial),
        ReadQueue(serial),
        Notify("c", Ended(serial, may_have_run=False)),
        CloseDuplicate(serial),
    ]


def test_an_implausible_row_ends_all_channels_of_its_worker(setting: Setting) -> None:
    serial = setting.grant()
    setting.set_request(serial, 4, 99)
    setting.table.on_worker_exit("w", NOW)
    setting.table.on_queue_end(serial)
    assert Notify("c", Ended(serial, may_have_run=True)) in setting.table.take_actions()


def test_the_request_in_an_implausible_row_is_not_believed(setting: Setting) -> None:
    serial = setting.grant()
    setting.set_request(serial, 4, STAGE_TAKEN)
    setting.row.reals[START] = float("inf")
    setting.table.take_actions()
    setting.table.on_worker_exit("w", NOW)
    assert setting.table.take_actions() == [ShutDown(serial), ReadQueue(serial)]


def test_reports_about_channels_of_others_are_ignored(setting: Setting) -> None:
    serial = setting.grant()
    setting.table.take_actions()
    setting.table.on_report("x", HandedOver(serial, 4, b"", ORDERED))
    setting.table.on_report("w", Released(serial + 1, ORDERED))
    assert setting.table.take_actions() == []


@pytest.mark.parametrize(
    "index",
    [
        START,
        SINCE,
        LAYOUT.row_tenant(1) + USED,
        LAYOUT.row_tenant(1) + BASE,
        LAYOUT.row_channel(1) + SECONDS,
    ],
)
def test_a_worker_with_an_implausible_row_is_replaced(setting: Setting, index: int) -> None:
    serial = setting.grant()
    assert setting.slot(serial) == 1
    setting.table.take_actions()
    setting.set_request(serial, 4, STAGE_RUNNING)
    setting.table.inspect_rows({"w": range(LAYOUT.channel_slots)}, NOW)
    assert setting.table.take_actions() == []
    setting.row.reals[index] = float("nan")
    setting.table.inspect_rows({"w": range(LAYOUT.channel_slots)}, NOW)
    assert setting.table.take_actions() == [ReplaceWorker("w")]
    setting.table.on_worker_exit("w", NOW)
    assert setting.table.rows.readers[0].is_plausible
