"""Each invariant of the model can fail: the model finds mistakes that were made, and others like them."""

from __future__ import annotations

import struct
from collections.abc import Callable
from typing import Any

import pytest

from weightd.channels.calls import ChannelCalls, ChannelMessage, ClientChannel, LostCalls
from weightd.pending import PendingCall
from weightd_common.channels.messages import HandedOver
from weightd_common.channels.pages import BASE, STAGE, STAGE_IDLE, START, USED
from weightd_daemon.channels.states import ChannelEvent, ChannelState
from weightd_daemon.channels.table import ChannelTable, DirectChannel
from weightd_protocol.messages.channels import ChannelEnded, RequestAdopted
from weightd_worker.channels.pull_scheduler import PulledChannel, PullScheduler
from weightd_worker.channels.row import Row
from weightd_worker.channels.session import ChannelSession

from .device import Device, Source
from .kernel import View
from .test_channel_model import ChannelMachine, play
from .world import Answer, Client, Daemon, Worker, World

_SEEDS = 1500


def machine_with(  # noqa: PLR0917
    session: type[ChannelSession] = ChannelSession,
    scheduler: type[PullScheduler] = PullScheduler,
    table: type[ChannelTable] = ChannelTable,
    calls: type[ChannelCalls] = ChannelCalls,
    daemon: type[Daemon] = Daemon,
    client: type[Client] = Client,
    is_exclusive: bool = False,
) -> type[ChannelMachine]:
    """Return a machine whose processes use other classes."""
    worker_type = type("", (Worker,), {"session_type": session, "scheduler_type": scheduler})
    client_type = type("", (client,), {"calls_type": calls})
    daemon_type = type("", (daemon,), {"table_type": table})
    attributes = {
        "worker_type": worker_type,
        "client_type": client_type,
        "daemon_type": daemon_type,
        "is_exclusive": is_exclusive,
    }
    return type("", (ChannelMachine,), {"world_type": type("", (World,), attributes)})


def assert_found(machine_type: type[ChannelMachine], text: str) -> None:
    def search() -> None:
        for seed in range(_SEEDS):
            play(machine_type, seed)

    with pytest.raises(AssertionError, match=text):
        search()


# --- the three mistakes of the first prototype ----------------------------------------------------------------------


def test_finds_wake_ups_lost_by_exclusive_polling() -> None:
    assert_found(machine_with(is_exclusive=True), "sleeps beside readable channels")


def store_in_halves(self: View, index: int, value: Any, between: Callable[[], None]) -> None:
    """Store a word in two halves, as `struct.pack_into` may do."""
    [word] = struct.unpack("<Q", struct.pack(self._form, value))
    earlier, half = self._words[index], 2**32
    self._stored[index] = earlier, word
    self._words[index] = earlier % half + word // half * half
    between()
    self._words[index] = word


def test_finds_stores_that_are_not_atomic(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(View, "store", store_in_halves)
    assert_found(ChannelMachine, "was never stored")


class AddingScheduler(PullScheduler):
    """Adds the lag of a returning tenant to the sum of all bases: two workers may add it twice."""

    def virtual_time(self, channel: PulledChannel) -> float:
        rows = self._row_reals
        return sum(row[channel.used_index + USED] + row[channel.used_index + BASE] for row in rows)

    def _charge(self, channel: PulledChannel, time: float, now: float, is_alone: bool) -> None:
        index = channel.used_index
        floor = max(row[START] for row in self._peer_reals) - 2 * self._costs.get(channel.tenant, 0.0)
        base = self._own[index + BASE]
        super()._charge(channel, time, now, is_alone)
        self._own[index + BASE] = base + max(0.0, floor - time)


def lowest_share(scheduler: type[PullScheduler]) -> float:
    """Return the lowest share that a returning tenant gets if other workers act between its stores."""
    shares = []
    for seed in range(60):
        device = Device([1, 1], [0, 0], [Source(0, 64), Source(1, 64, begin=0.5)], scheduler, seed)
        device.run(1.2)
        shares.append(device.shares(0.5, 1.2)[1])
    return min(shares)


def test_finds_a_tenant_that_two_workers_raise_twice() -> None:
    assert lowest_share(PullScheduler) > 0.48
    assert lowest_share(AddingScheduler) < 0.4


# --- ownership of a taken request -----------------------------------------------------------------------------------


class ForgettingSession(ChannelSession):
    """Records the end of a request before the daemon has the request."""

    def hand_over(self, channel: PulledChannel, payload: bytes, reason: str) -> HandedOver:
        handed = super().hand_over(channel, payload, reason)
        self._row._words[STAGE] = STAGE_IDLE
        return handed


def test_finds_a_hand_over_that_is_lost() -> None:
    assert_found(machine_with(session=ForgettingSession), "has no end")


class ForgettingDaemon(Daemon):
    """Does not read the last messages of a worker that has exited."""

    def reap(self, worker: Worker) -> None:
        worker.reports.clear()
        super().reap(worker)


def test_finds_last_messages_that_are_not_read() -> None:
    assert_found(machine_with(daemon=ForgettingDaemon), "has no end")


class CredulousCalls(ChannelCalls):
    """Believes that a request is lost although the daemon has adopted it."""

    def on_message(self, message: ChannelMessage) -> None:
        if not isinstance(message, RequestAdopted):
            super().on_message(message)


def test_finds_an_adopted_request_that_is_sent_again() -> None:
    assert_found(machine_with(calls=CredulousCalls), "is sent again although the daemon has it")


class LateRow(Row):
    """Records that a request may have run only after it has run."""

    def begin_running(self, now: float) -> None:
        pass


class LateSession(ChannelSession):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._row = LateRow(arguments[2])


def test_finds_a_stage_that_is_stored_too_late() -> None:
    assert_found(machine_with(session=LateSession), "has run, and the daemon reports that it has not")


class HastyCalls(ChannelCalls):
    """Sends requests again at the end of a channel, before the daemon has reported it."""

    def on_end(self, channel: ClientChannel) -> list[PendingCall]:
        self.on_message(ChannelEnded(channel.id))
        return super().on_end(channel)


def test_finds_a_request_that_is_sent_again_too_early() -> None:
    assert_found(machine_with(calls=HastyCalls), "was not reported lost|although the daemon has it")


class ImpatientCalls(ChannelCalls):
    """Applies a notice before the channel has been read."""

    def on_message(self, message: ChannelMessage) -> None:
        super().on_message(message)
        self._early = super().apply_notices()

    def apply_notices(self) -> LostCalls:
        return self._early


def test_finds_a_notice_that_overtakes_answers() -> None:
    assert_found(machine_with(calls=ImpatientCalls), "is sent again although it was answered")


class AcceptingClient(Client):
    """Takes every answer of a worker, also after the daemon has the request."""

    def on_answer(self, answer: Answer, channel: ClientChannel | None) -> None:
        super().on_answer(answer, channel)
        if channel is not None and self.world.outcomes[self.name, answer.request]:
            self.world.settle(self.name, answer.request, answer.outcome)


def test_finds_a_second_end_of_a_call() -> None:
    assert_found(machine_with(client=AcceptingClient), "ends twice")


class GloomyClient(Client):
    """Fails requests that the daemon has reported as lost."""

    def send_again(self, calls: list[PendingCall]) -> None:
        for call in calls:
            del self.tracked[call.id]
        self.fail(calls)


def test_finds_a_failed_call_that_could_be_repeated() -> None:
    assert_found(machine_with(client=GloomyClient), "fails beside a daemon")


class ForgetfulCalls(ChannelCalls):
    """Takes a channel of an earlier connection for one of the present connection."""

    def on_disconnected(self) -> list[PendingCall]:
        return []


def test_finds_calls_on_a_channel_that_no_daemon_reports() -> None:
    assert_found(machine_with(calls=ForgetfulCalls), "has no end")


# --- credits, ends, accounts ----------------------------------------------------------------------------------------


class GenerousScheduler(PullScheduler):
    """Does not compare a taken request with the limits."""

    def refusal(self, channel: PulledChannel, now: float) -> str:
        return self._end_reason(channel, now)


def test_finds_a_request_beyond_the_credits() -> None:
    assert_found(machine_with(scheduler=GenerousScheduler), "had credits for|beyond its credits")


class EagerTable(ChannelTable):
    """Confirms the end of a channel while workers hold it."""

    def _check_released(self, serial: int, channel: DirectChannel) -> None:
        if channel.machine.state is not ChannelState.OPEN:
            self.end(serial, ChannelEvent.RELEASED)


def test_finds_an_answer_after_the_confirmed_end() -> None:
    assert_found(machine_with(table=EagerTable), "after the end of the channel was confirmed")


class CountlessRow(Row):
    """Does not count the end of a request that it has handed over."""

    def end_request(self, index: int, outcome: int, answer_bytes: int) -> None:
        self._words[STAGE] = STAGE_IDLE


class CountlessSession(ChannelSession):
    def __init__(self, *arguments: Any) -> None:
        super().__init__(*arguments)
        self._row = CountlessRow(arguments[2])


def test_finds_accounts_that_do_not_balance() -> None:
    assert_found(machine_with(session=CountlessSession), "accounts")
