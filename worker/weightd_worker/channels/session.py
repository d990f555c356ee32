"""The direct channels of one worker, and the life of the request that it has taken. No I/O, no clock.

The caller does the I/O. For each request it calls the methods of `ChannelSession` in this order::

    choose             returns the channel to read; the caller reads one message from it without waiting
    on_nothing         EAGAIN: another worker was quicker; or ECONNRESET: the client has closed its end
    on_end             the queue has ended, or the message was empty
    on_request         returns "" if the request may run, else why it must not
      hand_over        the request must not run, or the caller refuses to run it: returns the message to the daemon
      on_handed_over   the caller has sent that message, or an error because the daemon cannot take it
      run              the request runs from now on
      on_result        the predict has ended; the caller sends the answer without waiting
      drop_answer      the channel has no space for the answer: returns the message to the daemon
      on_answered      the caller has sent the answer or that message, or the client is gone

A request that is late or invalid does not run: after `on_request`, the caller sends an error and calls `on_answered`.
The caller passes the chosen channel to each of these methods. A method that returns `Released` has forgotten the
channel: the caller closes its descriptor, then sends the message.
"""

from __future__ import annotations

from typing import Any, Dict, List, Optional, Sequence

from weightd_common.channels.messages import AddChannel, AnswerDropped, HandedOver, Released
from weightd_common.channels.pages import GENERATION, RETURNED, SERIAL, TENANT, Layout, Page
from weightd_protocol.messages.channels import ENDED, FOREIGN, ORDERED
from weightd_worker.channels.pull_scheduler import PulledChannel, PullScheduler
from weightd_worker.channels.row import Row


class ChannelSession:
    """The channels that a worker reads, and the request that it has.

    Args:
        layout: the layout of the pages.
        page: the daemon's page.
        own: this worker's row.
        scheduler: chooses among the channels.
        generation: the serial of this worker's generation.

    Attributes:
        channels: the channels that this worker reads, by serial.
    """

    def __init__(self, layout: Layout, page: Page, own: Page, scheduler: PullScheduler, generation: int) -> None:
        self._layout = layout
        self._words = page.words
        self._row = Row(own)
        self._scheduler = scheduler
        self._generation = generation
        self._request = 0
        self._refusal = ""
        self._has_run = False
        self.channels: Dict[int, PulledChannel] = {}

    def set_rows(self, rows: Sequence[Page], peers: Sequence[Page], table: Any = None) -> None:
        """Replace the rows of the device's workers, and of this worker's generation (`PullScheduler.set_rows`)."""
        self._scheduler.set_rows(rows, peers, table)

    def add(self, order: AddChannel) -> List[Released]:
        """Begin to read a channel. Return its release if the page has another channel or generation in the slot."""
        index, words = self._layout.channel(order.slot), self._words
        if words[index + SERIAL] != order.channel or words[index + GENERATION] != self._generation:
            return [Released(order.channel, FOREIGN)]
        self.channels[order.channel] = PulledChannel(self._layout, order.slot, order.channel, words[index + TENANT])
        return []

    def release(self, serial: int, reason: str = ORDERED) -> List[Released]:
        """Forget a channel. Call this only between two requests. Return nothing if the channel is already forgotten."""
        return [Released(serial, reason)] if self.channels.pop(serial, None) else []

    def choose(self, readable: Sequence[PulledChannel], now: float) -> Optional[PulledChannel]:
        """Return the channel to read next; None if no readable channel is usable. Call `take_releases` afterwards.

        Args:
            readable: the channels whose descriptors are readable.
            now: the time of CLOCK_MONOTONIC in seconds.
        """
        chosen = self._scheduler.choose(readable, now)
        if chosen is not None:
            self._row.begin_taking(chosen.serial)
        return chosen

    def take_releases(self) -> List[Released]:
        """Forget the channels that `choose` has found to have ended, and return their releases."""
        stopped = self._scheduler.stopped
        if not stopped:
            return []
        self._scheduler.stopped = []
        return [each for channel, reason in stopped for each in self.release(channel.serial, reason)]

    def on_nothing(self, channel: PulledChannel) -> None:
        """The chosen channel had no message, but has not ended."""
        self._scheduler.cancel(channel)
        self._row.cancel_taking()

    def on_end(self, channel: PulledChannel) -> List[Released]:
        """The chosen channel has ended. Return its release.

        A client can send an empty message, which looks like the end of the queue. The daemon reads the rest.
        """
        self.on_nothing(channel)
        return self.release(channel.serial, ENDED)

    def on_request(self, channel: PulledChannel, request: int, nbytes: int, now: float) -> str:
        """Record the request that the caller has read. Return why it must not run; "" if it may."""
        self._request = request
        self._has_run = False
        self._row.set_taken(channel.row_index, request, nbytes)
        self._scheduler.charge(channel, now)
        self._refusal = self._scheduler.refusal(channel, now)
        return self._refusal

    def hand_over(self, channel: PulledChannel, payload: bytes, reason: str) -> HandedOver:
        """Return the message that hands the taken request, which has not run, to the daemon."""
        self._row.begin_handover()
        return HandedOver(channel.serial, self._request, payload, reason)

    def on_handed_over(self, channel: PulledChannel, outcome: int = RETURNED) -> List[Released]:
        """The caller has sent the whole message: the request belongs to the daemon. Or it has sent an error instead.

        Return the release of the channel if `on_request` refused the request: it would refuse the next one as well.
        """
        self.on_answered(channel, outcome)
        return self.release(channel.serial, self._refusal) if self._refusal else []

    def run(self, now: float) -> None:
        """Record that the taken request may run from now on."""
        self._row.begin_running(now)
        self._has_run = True

    def on_result(self, channel: PulledChannel, seconds: float) -> None:
        """Replace the charged expectation by the measured device seconds of the request."""
        self._scheduler.settle(channel, seconds)
        self._row.add_seconds(channel.row_index, seconds)

    def drop_answer(self, channel: PulledChannel) -> AnswerDropped:
        """Return the message that reports a lost answer: the client does not read, and the channel has no space."""
        return AnswerDropped(channel.serial, self._request, self._has_run)

    def on_answered(self, channel: PulledChannel, outcome: int, answer_bytes: int = 0) -> None:
        """The caller has sent the answer, or the message that `drop_answer` has returned, or the client is gone.

        Args:
            channel: the channel of the request.
            outcome: one of `pages.OUTCOMES`.
            answer_bytes: the size of the answer of a model in bytes.
        """
        if not self._has_run:
            self._scheduler.settle_refused(channel)
        self._row.end_request(channel.row_index, outcome, answer_bytes)
