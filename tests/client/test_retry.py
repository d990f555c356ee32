"""Tests of retries: which errors cause one, after which pause, and in which calls; without a policy there are no
retries."""

from __future__ import annotations

import re
import threading
import time
from pathlib import Path
from typing import Any, Dict, Iterator, List, Sequence

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from testkit.fakedaemon import LIMIT_S, FakeDaemon, echo
from weightd import Client, ClientClosed, InvalidArgument, ResourceExhausted, Retry, Unavailable
from weightd.retry import MAX_ATTEMPTS, Attempts
from weightd_protocol.codec import encode
from weightd_protocol.errors import ERRORS
from weightd_protocol.messages.inference import Error, Infer
from weightd_protocol.messages.types import ClientMessage

X = np.arange(6, dtype=np.float32)

SOON = Retry(attempts=4, pause=0.001)

WIRE = (Path(__file__).parents[2] / "docs" / "protocol.md").read_text("utf-8")


class Clock:
    """A clock that advances on demand."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def attempts_of(retry: Retry, seconds: float = 1000.0, chance: float = 1.0) -> Attempts:
    return Attempts(retry, seconds, clock=Clock(), random_fraction=lambda: chance)


# --- errors and pauses ----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("code", sorted(ERRORS))
def test_retries_errors_documented_as_later(code: str) -> None:
    [documented] = re.findall(
        rf"^\| `{code}` \| [^|]* \| ([^|]*) \|", WIRE.partition("## Error codes")[2], re.MULTILINE
    )
    pause = attempts_of(Retry()).pause_after(ERRORS[code]("why"))
    assert (pause is not None) == documented.startswith("later")


def test_pauses_grow_to_a_limit() -> None:
    attempts = attempts_of(Retry(attempts=6, pause=1.0, max_pause=5.0))
    assert [attempts.pause_after(Unavailable()) for _ in range(7)] == [1.0, 2.0, 4.0, 5.0, 5.0, None, None]


@given(st.floats(0, 1), st.floats(0, 10) | st.none())
def test_pauses_are_random_above_the_daemons_minimum(chance: float, after: Any) -> None:
    pause = attempts_of(Retry(pause=1.0), chance=chance).pause_after(ResourceExhausted(retry_after=after))
    assert pause == pytest.approx((after or 0.0) + 0.5 + chance / 2)


def test_no_pause_beyond_the_deadline() -> None:
    clock = Clock()
    attempts = Attempts(Retry(pause=1.0), 3.0, clock=clock, random_fraction=lambda: 1.0)
    assert attempts.remaining_s() == 3.0
    assert attempts.pause_after(ResourceExhausted(retry_after=2.0)) is None
    attempts = Attempts(Retry(pause=1.0), 3.0, clock=clock, random_fraction=lambda: 1.0)
    assert attempts.pause_after(Unavailable()) == 1.0
    clock.now += 2.5
    assert attempts.remaining_s() == 0.5
    assert attempts.pause_after(Unavailable()) is None
    clock.now += 1.0
    assert attempts.remaining_s() > 0


@pytest.mark.parametrize(
    ("wrong", "named"),
    [
        ({"attempts": 0}, "attempts"),
        ({"attempts": MAX_ATTEMPTS + 1}, "attempts"),
        ({"attempts": 2.0}, "attempts"),
        ({"pause": 0}, "pause"),
        ({"pause": float("nan")}, "pause"),
        ({"max_pause": 61}, "max_pause"),
    ],
)
def test_rejects_policy_out_of_range(wrong: Dict[str, Any], named: str) -> None:
    with pytest.raises(InvalidArgument, match=f"^{named}: expected"):
        Retry(**wrong)


# --- calls with retries ---------------------------------------------------------------------------------------------


class Failing:
    """A daemon that answers the first messages of each type with an error and echoes the others."""

    def __init__(self, times: int, code: str = "UNAVAILABLE") -> None:
        self._times = times
        self._code = code
        self.seen: List[str] = []

    def __call__(self, message: ClientMessage, tensors: Sequence[bytes]) -> Sequence[List[Any]]:
        kind = type(message).__name__
        self.seen.append(kind)
        if self.seen.count(kind) <= self._times:
            return [encode(Error(message.id, self._code, "not now", 1000))]
        return echo(message, tensors)


@pytest.fixture
def patient(daemon: FakeDaemon) -> Iterator[Client]:
    with Client(daemon.address, timeout=LIMIT_S, retry=SOON) as client:
        yield client


def test_no_retries_without_a_policy(client: Client, daemon: FakeDaemon) -> None:
    daemon.handle = failing = Failing(1)
    with pytest.raises(Unavailable):
        client.infer("m", {"x": X})
    with pytest.raises(Unavailable):
        client.server()
    assert failing.seen == ["Infer", "ServerMetadata"]


@pytest.mark.parametrize("code", ["UNAVAILABLE", "RESOURCE_EXHAUSTED"])
def test_retries_temporary_errors(patient: Client, daemon: FakeDaemon, code: str) -> None:
    daemon.handle = failing = Failing(3, code)
    assert np.array_equal(patient.infer("m", {"x": X})["x"], X)
    assert patient.server().version == "9.9"
    assert patient.metadata("m").name == "m"
    assert failing.seen == ["Infer"] * 4 + ["ServerMetadata"] * 4 + ["ModelMetadata"] * 4


def test_last_attempt_raises_its_error(patient: Client, daemon: FakeDaemon) -> None:
    daemon.handle = failing = Failing(100)
    with pytest.raises(Unavailable, match="not now"):
        patient.infer("m", {"x": X})
    assert len(failing.seen) == SOON.attempts


@pytest.mark.parametrize("code", ["INTERNAL", "DEADLINE_EXCEEDED"])
def test_does_not_retry_permanent_errors(patient: Client, daemon: FakeDaemon, code: str) -> None:
    daemon.handle = failing = Failing(1, code)
    with pytest.raises(ERRORS[code]):
        patient.infer("m", {"x": X})
    assert failing.seen == ["Infer"]


def test_does_not_retry_updates(patient: Client, daemon: FakeDaemon) -> None:
    daemon.handle = failing = Failing(1)
    with pytest.raises(Unavailable):
        patient.update("m", rollback=True)
    assert failing.seen == ["Update"]


def test_does_not_retry_submit_or_out(patient: Client, daemon: FakeDaemon) -> None:
    daemon.handle = Failing(1)
    with pytest.raises(Unavailable):
        patient.submit("m", {"x": X}).result()
    daemon.handle = Failing(1)
    with pytest.raises(Unavailable):
        patient.infer("m", {"x": X}, out={"x": np.empty_like(X)})


def test_map_retries_and_keeps_order(patient: Client, daemon: FakeDaemon) -> None:
    daemon.handle = failing = Failing(2)
    assert [outputs["x"][0] for outputs in patient.map("m", [{"x": X + each} for each in range(5)])] == [*range(5)]
    assert len(failing.seen) == 7


def test_retries_until_daemon_is_back(daemon: FakeDaemon) -> None:
    with Client(daemon.address, timeout=LIMIT_S, retry=Retry(attempts=10, pause=0.1, max_pause=0.5)) as client:
        assert client.infer("m", {"x": X})
        daemon.stop()
        again: List[FakeDaemon] = []
        starting = threading.Timer(0.3, lambda: again.append(FakeDaemon(daemon.address)))
        starting.start()
        assert client.infer("m", {"x": X})
        starting.join()
        # The constructor retries, too.
        again[0].stop()
        starting = threading.Timer(0.3, lambda: again.append(FakeDaemon(daemon.address)))
        starting.start()
        with Client(daemon.address, retry=Retry(attempts=10, pause=0.1, max_pause=0.5)) as another:
            assert another.server().version == "9.9"
        starting.join()
        again[1].stop()


def test_timeout_covers_all_attempts(daemon: FakeDaemon) -> None:
    timeouts: List[int] = []

    def handle(message: ClientMessage, _: Sequence[bytes]) -> Sequence[List[Any]]:
        assert isinstance(message, Infer)
        timeouts.append(message.parameters.timeout_us or 0)
        return [encode(Error(message.id, "UNAVAILABLE", "not now"))]

    daemon.handle = handle
    with Client(daemon.address, retry=Retry(attempts=3, pause=0.1)) as client, pytest.raises(Unavailable):
        client.infer("m", {"x": X}, timeout=20.0)
    assert timeouts[0] <= 20_000_000
    assert timeouts[1] <= timeouts[0] - 50_000
    assert timeouts[2] <= timeouts[1] - 100_000


def test_close_ends_a_pause(daemon: FakeDaemon) -> None:
    daemon.handle = failing = Failing(100)
    client = Client(daemon.address, timeout=3000, retry=Retry(pause=60, max_pause=60))
    ended: List[BaseException] = []

    def ask() -> None:
        try:
            client.server()
        except ClientClosed as error:
            ended.append(error)

    thread = threading.Thread(target=ask)
    thread.start()
    deadline = time.monotonic() + LIMIT_S
    while not failing.seen:
        assert time.monotonic() < deadline
        time.sleep(0.001)
    client.close()
    thread.join(LIMIT_S / 2)
    assert len(ended) == 1
