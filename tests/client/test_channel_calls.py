"""Calls over a direct channel and over the connection to the daemon: each ends once. Runs on Python 3.7."""

from __future__ import annotations

import itertools
from typing import List

import pytest

from weightd.channel_calls import (
    CALL_TRANSITIONS,
    PENDING,
    Action,
    CallEvent,
    CallState,
    ChannelCalls,
    ClientChannel,
    Fail,
    SendToDaemon,
)
from weightd_common.channels.messages import Adopted, Ended, Granted, Lost, Notice, Refilled


@pytest.fixture
def calls() -> ChannelCalls:
    calls = ChannelCalls()
    calls.on_notice(Granted(7, 3, 100, 50.0))
    return calls


def channel_of(calls: ChannelCalls) -> ClientChannel:
    channel = calls.usable_channel(1, 0.0)
    assert channel is not None
    return channel


def send(calls: ChannelCalls, *requests: int) -> ClientChannel:
    channel = channel_of(calls)
    for request in requests:
        calls.on_sent(channel, request, 10)
    return channel


def notice(calls: ChannelCalls, *notices: Notice) -> List[Action]:
    for each in notices:
        calls.on_notice(each)
    return calls.on_channel_read()


@pytest.mark.parametrize(
    ("nbytes", "now", "is_usable"), [(100, 0.0, True), (101, 0.0, False), (1, 49.96, False), (1, 49.94, True)]
)
def test_bytes_and_expiry_limit_the_channel(calls: ChannelCalls, nbytes: int, now: float, is_usable: bool) -> None:
    assert (calls.usable_channel(nbytes, now) is not None) == is_usable


def test_requests_beyond_the_credits_go_to_the_daemon(calls: ChannelCalls) -> None:
    send(calls, 1, 2, 3)
    assert calls.usable_channel(1, 0.0) is None
    notice(calls, Refilled(6, 9, 900, 60.0))
    assert calls.usable_channel(1, 0.0) is None
    notice(calls, Refilled(7, 4, 200, 60.0))
    send(calls, 4)
    assert calls.usable_channel(1, 0.0) is None


def test_sent_bytes_count(calls: ChannelCalls) -> None:
    calls.on_sent(channel_of(calls), 1, 95)
    assert calls.usable_channel(5, 0.0) is not None
    assert calls.usable_channel(6, 0.0) is None


def test_an_ended_channel_takes_no_requests_and_leaves_no_state(calls: ChannelCalls) -> None:
    assert calls.on_channel_end(7) == []
    assert calls.usable_channel(1, 0.0) is None
    for serial in (8, 9):
        notice(calls, Granted(serial, 3, 100, 50.0))
        notice(calls, Ended(serial, may_have_run=False))
        assert calls.usable_channel(1, 0.0) is None
        assert calls.on_channel_end(serial) == []
    notice(calls, Ended(7, may_have_run=False))
    assert (calls._reported, calls._read_to_end, calls._sent_on, calls.states) == (set(), set(), {}, {})


def test_a_lost_daemon_leaves_no_state(calls: ChannelCalls) -> None:
    calls.on_channel_end(7)
    calls.on_daemon_lost()
    assert (calls._reported, calls._read_to_end) == (set(), set())


def test_without_a_channel_requests_go_to_the_daemon() -> None:
    assert ChannelCalls().usable_channel(1, 0.0) is None


def test_a_revoked_channel_takes_no_more_requests_but_answers(calls: ChannelCalls) -> None:
    channel = send(calls, 1)
    calls.on_unwritable(channel)
    assert calls.usable_channel(1, 0.0) is None
    assert calls.on_answer(1, is_from_daemon=False)
    assert calls.states == {}


@pytest.mark.parametrize("is_from_daemon", [True, False])
def test_a_second_answer_is_dropped(calls: ChannelCalls, is_from_daemon: bool) -> None:
    send(calls, 1)
    assert calls.on_answer(1, is_from_daemon=is_from_daemon)
    assert not calls.on_answer(1, is_from_daemon=False)
    assert not calls.on_answer(1, is_from_daemon=True)


def test_an_adopted_request_is_answered_by_the_daemon_only(calls: ChannelCalls) -> None:
    send(calls, 1)
    assert notice(calls, Adopted(7, 1), Lost(7, 1, may_have_run=False)) == []
    assert not calls.on_answer(1, is_from_daemon=False)
    assert calls.on_answer(1, is_from_daemon=True)


def test_a_lost_request_that_has_not_run_is_sent_once_more(calls: ChannelCalls) -> None:
    send(calls, 1, 2)
    lost = Lost(7, 1, may_have_run=False)
    assert notice(calls, lost, lost) == [SendToDaemon(1)]
    assert calls.states == {1: CallState.RELAYED, 2: CallState.QUEUED}


def test_a_lost_request_that_may_have_run_fails(calls: ChannelCalls) -> None:
    send(calls, 1)
    assert notice(calls, Lost(7, 1, may_have_run=True)) == [Fail(1)]
    assert not calls.on_answer(1, is_from_daemon=False)


def test_an_answer_that_was_sent_before_a_notice_counts(calls: ChannelCalls) -> None:
    send(calls, 1, 2)
    calls.on_notice(Lost(7, 1, may_have_run=True))
    calls.on_notice(Ended(7, may_have_run=False))
    assert calls.on_answer(1, is_from_daemon=False)
    assert calls.on_channel_read() == [SendToDaemon(2)]


@pytest.mark.parametrize(("may_have_run", "action"), [(True, Fail(1)), (False, SendToDaemon(1))])
def test_the_end_of_a_channel_ends_its_calls(calls: ChannelCalls, may_have_run: bool, action: Action) -> None:
    send(calls, 1)
    calls.on_notice(Granted(8, 3, 100, 50.0))
    send(calls, 2)
    assert calls.on_channel_end(7) == []
    assert notice(calls, Ended(7, may_have_run)) == [action]
    assert calls.states[2] is CallState.QUEUED
    assert channel_of(calls).serial == 8


def test_calls_on_a_channel_outlive_the_daemon(calls: ChannelCalls) -> None:
    send(calls, 1, 2)
    calls.on_sent_to_daemon(3)
    assert calls.on_daemon_lost() == [Fail(3)]
    assert channel_of(calls).serial == 7
    assert calls.on_answer(1, is_from_daemon=False)
    assert calls.on_channel_end(7) == [Fail(2)]
    assert calls.usable_channel(1, 0.0) is None


def test_a_channel_read_to_its_end_fails_when_the_daemon_is_lost(calls: ChannelCalls) -> None:
    send(calls, 1)
    assert calls.on_channel_end(7) == []
    assert calls.on_daemon_lost() == [Fail(1)]
    assert calls.on_daemon_lost() == []


def test_an_answer_after_the_timeout_is_dropped(calls: ChannelCalls) -> None:
    send(calls, 1)
    assert calls.on_timeout(1) == [Fail(1)]
    assert calls.on_timeout(1) == []
    assert not calls.on_answer(1, is_from_daemon=False)
    assert notice(calls, Lost(7, 1, may_have_run=False), Ended(7, may_have_run=False)) == []


def test_the_table_ends_each_call_once() -> None:
    for state, event in itertools.product(CallState, CallEvent):
        assert ((state, event) in CALL_TRANSITIONS) <= (state in PENDING)
    assert {CALL_TRANSITIONS[state, CallEvent.TIME_OUT] for state in PENDING} == {CallState.FAILED}
    assert (CallState.RELAYED, CallEvent.NOT_RUN) not in CALL_TRANSITIONS
