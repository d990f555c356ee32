"""Messages about direct channels, as values: between the daemon and its clients, and between the daemon and workers.

A channel is named by its serial, a number that no daemon uses twice. A request is named by a number that its client
chooses and does not use twice on one channel.
"""

from __future__ import annotations

from typing import NamedTuple, Union


class Granted(NamedTuple):
    """daemon → client, with the client's end of the channel: the client may send requests.

    The limits count all requests and bytes that the client sends on this channel, from its beginning. `expires_at` is a
    time of CLOCK_MONOTONIC in seconds.
    """

    channel: int
    request_limit: int
    byte_limit: int
    expires_at: float


class Refilled(NamedTuple):
    """daemon → client: the channel has new limits and a new expiry."""

    channel: int
    request_limit: int
    byte_limit: int
    expires_at: float


class Adopted(NamedTuple):
    """daemon → client: the daemon has received a request of the channel, and answers it on the client's connection."""

    channel: int
    request: int


class Lost(NamedTuple):
    """daemon → client: no answer to this request follows.

    The worker that took it has exited or could not send the answer.
    """

    channel: int
    request: int
    may_have_run: bool


class Ended(NamedTuple):
    """daemon → client: no process holds the other end of the channel, so no answer follows.

    `may_have_run` says whether requests without an answer, and without a message about them, may have run.
    """

    channel: int
    may_have_run: bool


Notice = Union[Granted, Refilled, Adopted, Lost, Ended]


class AddChannel(NamedTuple):
    """daemon → worker, with the workers' end of the channel: the worker reads requests from it."""

    slot: int
    channel: int


class ReleaseChannel(NamedTuple):
    """daemon → worker: the worker closes its descriptor of the channel."""

    channel: int


class Released(NamedTuple):
    """worker → daemon: the worker has closed its descriptor of the channel and sends no answer on it."""

    channel: int
    reason: str


class HandedOver(NamedTuple):
    """worker → daemon: a request that the worker has taken, has not run and must not run."""

    channel: int
    request: int
    payload: bytes
    reason: str


class AnswerDropped(NamedTuple):
    """worker → daemon: the channel had no space for the answer to a request, because the client does not read."""

    channel: int
    request: int
    has_run: bool


WorkerReport = Union[Released, HandedOver, AnswerDropped]
