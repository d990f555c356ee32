"""Calls over a direct channel and over the connection to the daemon: each ends once. Runs on Python 3.7."""

from __future__ import annotations

from typing import Dict, List, Optional
from weakref import ref

import pytest

from weightd.channels.calls import ChannelCalls, ClientChannel, Notice
from weightd.channels.requests import MAX_OPEN_CHANNELS, ChannelRequests
from weightd.pending import PendingCall
from weightd_protocol import limits
from weightd_protocol.messages.channels import (
    ChannelEnded,
    ChannelExtended,
    ChannelOpened,
    OpenChannel,
    RequestAdopted,
    RequestLost,
)
from weightd_protocol.messages.inference import InferResponse

_PACKET = bytes(10)


class Clock:
    """A clock that stands still."""

    now = 0.0

    def __call__(self) -> float:
        return self.now


class Calls(ChannelCalls):
    """The calls of a test, whose owners keep them."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.sent: Dict[str, PendingCall] = {}
        ids = iter(map(str, range(100, 200)))
        super().__init__({}, ChannelRequests(lambda: next(ids), None, self.clock))
        self.on_connected(can_open=True)

    def answer(self, model: str = "m", count: int = 1, description: bytes = b"d") -> None:
        """The daemon answers requests."""
        for _ in range(count):
            self.on_relayed_answer(model, description)

    def open(self, model: str = "m", max_requests: int = 3, max_bytes: int = 100) -> ClientChannel:
        """Get a channel on which requests with the description `d` may be sent."""
        self.answer(model, 3)
        [request] = self.requests.take_messages()
        channel = self.add(ChannelOpened(request.id, max_requests, max_bytes, 50_000_000), "end")
        assert channel is not None
        self.answer(model)
        return channel

    def send(self, channel: Optional[ClientChannel], *names: str) -> None:
        """Send requests on a channel, or to the daemon."""
        for name in names:
            call = self.sent[name] = PendingCall(name, InferResponse)
            self.tracked[name] = ref(call)
            if channel is not None:
                assert self.begin_sending(channel, call, _PACKET, 0.0)

    def notice(self, *notices: Notice) -> List[str]:
        """Apply notices; return the calls to send again."""
        for each in notices:
            self.on_message(each)
        return [call.id for call in self.apply_notices().calls]

    def ids_on(self, channel: ClientChannel) -> List[str]:
        """Return the calls that are on a channel."""
        return [name for name, call in self.sent.items() if call.channel is channel]


@pytest.fixture
def calls() -> Calls:
    return Calls()


# --- opening ---------------------------------------------------------------------------------------------------------


def test_asks_once_for_a_channel_after_three_answers(calls: Calls) -> None:
    calls.answer(count=2)
    assert calls.requests.ask_at > 0
    calls.answer(count=5)
    assert calls.requests.ask_at < 0
    assert calls.requests.take_messages() == [OpenChannel("100", "m")]
    calls.answer(count=5)
    assert calls.requests.take_messages() == []


def test_counts_the_answers_of_each_model(calls: Calls) -> None:
    calls.answer("a", 2)
    calls.answer("b", 2)
    assert calls.requests.take_messages() == []


def test_a_refused_channel_is_requested_again_after_a_pause(calls: Calls) -> None:
    calls.answer(count=3)
    [request] = calls.requests.take_messages()
    calls.clock.now = 3.0
    assert calls.requests.on_refused(request.id)
    assert not calls.requests.on_refused(request.id)
    calls.answer(count=3)
    assert calls.requests.ask_at == 8.0
    calls.clock.now = 7.9
    assert calls.requests.take_messages() == []
    calls.clock.now = 8.0
    assert [each.model_name for each in calls.requests.take_messages()] == ["m"]


def test_an_ended_channel_is_requested_again_after_a_pause(calls: Calls) -> None:
    channel = calls.open()
    calls.clock.now = 3.0
    calls.notice(ChannelEnded(channel.id))
    assert calls.usable == {}
    assert channel.id not in calls.channels
    calls.answer(count=3)
    assert calls.requests.ask_at == 8.0


def test_a_client_has_a_limited_number_of_channels(calls: Calls) -> None:
    channels = [calls.open(f"m{number}") for number in range(MAX_OPEN_CHANNELS)]
    calls.answer("last", 9)
    assert calls.requests.take_messages() == []
    calls.notice(ChannelEnded(channels[0].id))
    assert [each.model_name for each in calls.requests.take_messages()] == ["last"]


def test_requests_for_channels_count_as_channels(calls: Calls) -> None:
    for number in range(MAX_OPEN_CHANNELS + 1):
        calls.answer(f"m{number}", 3)
    assert len(calls.requests.take_messages()) == MAX_OPEN_CHANNELS


def test_counts_the_answers_of_a_limited_number_of_models(calls: Calls, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weightd.channels.requests._MAX_COUNTED_MODELS", 3)
    channel = calls.open("a")
    calls.answer("b", 3)
    for number in range(9):
        calls.answer(f"m{number}")
    assert len(calls.requests._models) <= 3  # pyright: ignore[reportPrivateUsage]
    assert calls.usable == {b"d": channel}
    assert [each.model_name for each in calls.requests.take_messages()] == ["b"]


def test_an_unwanted_channel_is_not_taken(calls: Calls) -> None:
    assert calls.add(ChannelOpened("7", 1, 1, 1), "end") is None


def test_without_descriptors_no_channel_is_requested(calls: Calls) -> None:
    calls.on_connected(can_open=False)
    calls.answer(count=9)
    assert calls.requests.take_messages() == []


# --- sending ---------------------------------------------------------------------------------------------------------


def test_the_first_request_of_a_description_goes_to_the_daemon(calls: Calls) -> None:
    channel = calls.open()
    assert calls.usable == {b"d": channel}
    calls.answer(description=b"e")
    assert calls.usable == {b"d": channel, b"e": channel}


def test_a_channel_has_a_limited_number_of_descriptions(calls: Calls) -> None:
    calls.open()
    for number in range(2 * limits.MAX_CHANNEL_DESCRIPTIONS):
        calls.answer(description=b"%d" % number)
    assert len(calls.usable) == limits.MAX_CHANNEL_DESCRIPTIONS


def test_a_description_whose_requests_do_not_run_leaves_the_channel(calls: Calls) -> None:
    channel = calls.open(max_requests=9)
    calls.answer(description=b"e")
    calls.send(channel, "1", "2", "3")
    for call in calls.sent.values():
        call.description_frame = b"d"
    for name in ("1", "2"):
        calls.notice(RequestAdopted(name, channel.id))
    calls.answer(description=b"d")
    assert calls.usable == {b"d": channel, b"e": channel}
    calls.notice(RequestAdopted("3", channel.id))
    calls.answer(description=b"d")
    assert calls.usable == {b"e": channel}


def test_adoptions_count_although_the_answers_have_arrived(calls: Calls) -> None:
    channel = calls.open(max_requests=9)
    calls.send(channel, "1", "2", "3")
    for name, call in calls.sent.items():
        call.description_frame = b"d"
        calls.on_message(RequestAdopted(name, channel.id))
        call.succeed(None)
        del calls.tracked[name]
    assert calls.apply_notices().calls == []
    calls.answer(description=b"d")
    assert calls.usable == {}


def accepts(calls: Calls, channel: ClientChannel, nbytes: int, now: float = 0.0) -> bool:
    """Return whether a channel accepts a request; do not send it."""
    call = PendingCall("1", InferResponse)
    is_accepted = calls.begin_sending(channel, call, bytes(nbytes), now)
    assert calls.on_not_sent(channel, call) == is_accepted
    return is_accepted


@pytest.mark.parametrize(
    ("nbytes", "now", "is_accepted"),
    [(100, 0.0, True), (101, 0.0, False), (1, 49.96, False), (1, 49.94, True), (2**17 + 1, 0.0, False)],
)
def test_bytes_and_expiry_limit_a_channel(calls: Calls, nbytes: int, now: float, is_accepted: bool) -> None:
    max_bytes = 100 if nbytes < 1000 else 2**20
    assert accepts(calls, calls.open(max_bytes=max_bytes), nbytes, now) == is_accepted


def test_sent_requests_and_bytes_count(calls: Calls) -> None:
    channel = calls.open()
    calls.send(channel, "1", "2")
    assert accepts(calls, channel, 80)
    assert not accepts(calls, channel, 81)
    calls.send(channel, "3")
    assert not accepts(calls, channel, 1)
    calls.on_message(ChannelExtended("7", 9, 900, 60_000_000))
    assert not accepts(calls, channel, 1)
    calls.on_message(ChannelExtended(channel.id, 4, 200, 60_000_000))
    assert accepts(calls, channel, 1, 59.0)


def test_a_request_that_was_not_sent_does_not_count(calls: Calls) -> None:
    channel = calls.open()
    calls.send(channel, "1")
    assert calls.on_not_sent(channel, calls.sent["1"])
    assert (channel.sent_requests, channel.sent_bytes, calls.ids_on(channel)) == (0, 0, [])


def test_a_call_that_has_ended_keeps_no_packet(calls: Calls) -> None:
    calls.send(calls.open(), "1")
    call = calls.sent["1"]
    call.succeed(None)
    assert (call.packet, call.channel) == (None, None)


def test_a_request_that_was_sent_again_is_not_sent_a_third_time(calls: Calls) -> None:
    channel = calls.open()
    calls.send(channel, "1")
    assert calls.notice(ChannelEnded(channel.id)) == ["1"]
    assert not calls.on_not_sent(channel, calls.sent["1"])


def test_a_revoked_channel_accepts_no_description(calls: Calls) -> None:
    channel = calls.open()
    calls.stop_sending(channel)
    calls.answer()
    assert calls.usable == {}


# --- notices ---------------------------------------------------------------------------------------------------------


def test_an_adopted_request_is_not_sent_again(calls: Calls) -> None:
    channel = calls.open()
    calls.send(channel, "1")
    assert calls.notice(RequestAdopted("1", channel.id), RequestLost("1", channel.id)) == []
    assert calls.ids_on(channel) == []
    assert calls.sent["1"].packet is None


def test_a_lost_request_is_sent_again_once(calls: Calls) -> None:
    channel = calls.open()
    calls.send(channel, "1", "2")
    lost = RequestLost("1", channel.id)
    assert calls.notice(lost, lost) == ["1"]
    assert calls.ids_on(channel) == ["2"]
    assert calls.sent["1"].packet == _PACKET


def test_a_notice_about_another_channel_has_no_effect(calls: Calls) -> None:
    first, second = calls.open("a"), calls.open("b")
    calls.send(first, "1")
    assert calls.notice(RequestLost("1", second.id), RequestLost("1", "7"), ChannelEnded("7")) == []
    assert calls.ids_on(first) == ["1"]


def test_an_answered_request_is_not_sent_again(calls: Calls) -> None:
    channel = calls.open()
    calls.send(channel, "1", "2", "3")
    calls.on_message(RequestLost("1", channel.id))
    calls.on_message(ChannelEnded(channel.id))
    del calls.tracked["1"], calls.tracked["2"]
    assert [each.id for each in calls.apply_notices().calls] == ["3"]


def test_the_end_of_a_channel_is_for_its_calls_only(calls: Calls) -> None:
    first, second = calls.open("a"), calls.open("b")
    calls.send(first, "1")
    calls.send(second, "2")
    calls.send(None, "3")
    assert calls.on_end(first) == []
    assert calls.notice(ChannelEnded(first.id)) == ["1"]
    assert calls.ids_on(second) == ["2"]


# --- the connection --------------------------------------------------------------------------------------------------


def test_calls_on_a_channel_outlive_the_daemon(calls: Calls) -> None:
    channel = calls.open()
    calls.send(channel, "1")
    assert calls.on_disconnected() == []
    assert calls.usable == {b"d": channel}
    assert [each.id for each in calls.on_end(channel)] == ["1"]
    assert (calls.usable, calls.channels, calls.tracked) == ({}, {}, {})


def test_a_channel_that_has_ended_fails_with_the_connection(calls: Calls) -> None:
    channel = calls.open()
    calls.send(channel, "1")
    assert calls.on_end(channel) == []
    assert [each.id for each in calls.on_disconnected()] == ["1"]
    assert calls.on_disconnected() == []


def test_a_new_connection_does_not_use_earlier_channels(calls: Calls) -> None:
    owing, idle = calls.open("a"), calls.open("b")
    calls.send(owing, "1")
    calls.on_disconnected()
    calls.on_connected(can_open=True)
    assert calls.usable == {}
    assert calls.take_unused() == [idle]
    assert calls.take_unused() == []
    assert [*calls.channels.values()] == [owing]
    channel = calls.open("a")
    assert calls.usable == {b"d": channel}


def test_a_lost_connection_forgets_what_was_wanted(calls: Calls) -> None:
    calls.answer("a", 3)
    calls.requests.take_messages()
    calls.answer("b", 3)
    calls.on_message(ChannelOpened("100", 1, 1, 1))
    calls.on_connected(can_open=True)
    assert calls.requests.take_messages() == []
    assert calls.requests.take_opened() == []
    assert not calls.requests.is_pending
    assert calls.add(ChannelOpened("100", 1, 1, 1), "end") is None
