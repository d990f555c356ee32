"""Many inputs through a model: in order, a bounded number at a time, and nothing is left under way."""

from __future__ import annotations

import asyncio
from typing import Any, AsyncIterator, Callable, Coroutine, Iterator, List, Sequence, TypeVar

import numpy as np
import pytest

from testkit.fakedaemon import LIMIT_S, FakeDaemon, echo, taking
from weightd import AsyncClient, Client, Internal, InvalidArgument, Retry
from weightd.model import MAX_IN_FLIGHT
from weightd_protocol.codec import encode
from weightd_protocol.messages.inference import Cancel, Error, Infer
from weightd_protocol.messages.types import ClientMessage

T = TypeVar("T")


def run(test: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(test, LIMIT_S))


def number(value: float) -> Any:
    return {"x": np.array([value], np.float32)}


class Backwards:
    """Answers so many requests at a time, the last one first."""

    def __init__(self, together: int) -> None:
        self._together = together
        self._held: List[List[Any]] = []

    def __call__(self, message: ClientMessage, tensors: Sequence[bytes]) -> Any:
        self._held += echo(message, tensors)
        if len(self._held) < self._together:
            return []
        answers, self._held = self._held[::-1], []
        return answers


class Stuck:
    """Answers until so many have come, then holds them; when there are `held` of these, the first one is answered.

    Attributes:
        ids: of all requests.
        cancelled: of those that were taken back.
    """

    def __init__(self, answered: int, held: int, code: str = "") -> None:
        self._answered = answered
        self._held = held
        self._code = code
        self._first: List[List[Any]] = []
        self.ids: List[str] = []
        self.cancelled: List[str] = []

    def __call__(self, message: ClientMessage, tensors: Sequence[bytes]) -> Any:
        if isinstance(message, Cancel):
            self.cancelled.append(message.id)
            return []
        self.ids.append(message.id)
        if len(self.ids) <= self._answered:
            return echo(message, tensors)
        if len(self.ids) == self._answered + 1:
            self._first = (
                [encode(Error(message.id, self._code, "unlucky"))] if self._code else [*echo(message, tensors)]
            )
        return self._first if len(self.ids) == self._answered + self._held else []

    def until_taken_back(self, daemon: FakeDaemon) -> None:
        """Wait until all that were not answered are taken back; nothing else is."""
        for _ in range(len(self.ids) + self._held - 1):
            daemon.next()
        assert sorted(self.cancelled) == sorted(self.ids[self._answered + 1 :])
        assert len(self.cancelled) == self._held - 1


class Taken:
    """Inputs, and how many of them were taken."""

    def __init__(self, count: int) -> None:
        self._count = count
        self.taken = 0

    def __iter__(self) -> Iterator[Any]:
        for each in range(self._count):
            self.taken += 1
            yield number(each)

    async def __aiter__(self) -> AsyncIterator[Any]:
        for each in self:
            await asyncio.sleep(0)
            yield each


# --- for threads ----------------------------------------------------------------------------------------------------


def test_outputs_come_in_order_and_so_many_are_under_way(client: Client, daemon: FakeDaemon) -> None:
    # It answers nothing before all eight are there.
    daemon.handle = Backwards(8)
    inputs = Taken(80)
    taken: List[int] = []
    for index, outputs in enumerate(client.map("m", inputs, in_flight=8)):
        assert outputs["x"].tolist() == [index]
        taken.append(inputs.taken - index)
    assert len(taken) == 80
    assert max(taken) == 8


def test_no_inputs_are_no_outputs(client: Client) -> None:
    assert [*client.map("m", [])] == []


def test_rows_of_an_array_are_inputs(client: Client, daemon: FakeDaemon) -> None:
    daemon.handle = taking(x="FP32")
    rows = np.arange(6, dtype=np.float32).reshape(3, 2)
    assert np.array_equal([outputs["x"] for outputs in client.map("m", rows)], rows)


def test_an_output_that_is_there_is_not_kept_back_for_inputs_to_come(client: Client) -> None:
    given: List[int] = []

    def inputs() -> Iterator[Any]:
        for each in range(2000):
            if given:
                return
            yield number(each)

    given.extend(1 for _ in client.map("m", inputs(), in_flight=MAX_IN_FLIGHT))
    assert len(given) < MAX_IN_FLIGHT


def test_a_failure_ends_it_and_takes_the_others_back(client: Client, daemon: FakeDaemon) -> None:
    daemon.handle = stuck = Stuck(13, 4, "INTERNAL")
    outputs: List[float] = []
    with pytest.raises(Internal, match="unlucky"):
        outputs.extend(each["x"][0] for each in client.map("m", (number(each) for each in range(100)), in_flight=4))
    assert outputs == [*range(13)]
    stuck.until_taken_back(daemon)


def test_what_is_under_way_when_it_is_closed_is_taken_back(client: Client, daemon: FakeDaemon) -> None:
    daemon.handle = stuck = Stuck(0, 3)
    flow = client.map("m", (number(each) for each in range(100)), in_flight=3)
    next(flow)
    flow.close()
    stuck.until_taken_back(daemon)
    with pytest.raises(StopIteration):
        next(flow)


def test_a_failure_of_the_inputs_is_the_users_and_takes_back_what_is_under_way(
    client: Client, daemon: FakeDaemon
) -> None:
    daemon.handle = stuck = Stuck(0, 4)

    def inputs() -> Iterator[Any]:
        for each in range(3):
            yield number(each)
        raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        next(client.map("m", inputs()))
    for _ in range(6):
        daemon.next()
    assert stuck.cancelled == stuck.ids


@pytest.mark.parametrize("in_flight", [0, -1, MAX_IN_FLIGHT + 1, 2.0, True])
def test_bounds_are_told_at_once(client: Client, daemon: FakeDaemon, in_flight: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"^in_flight: expected an integer from 1 to {MAX_IN_FLIGHT}, got"):
        client.map("m", [], in_flight=in_flight)
    with pytest.raises(InvalidArgument, match=r"^in_flight"):
        AsyncClient(daemon.address).map("m", [], in_flight=in_flight)


@pytest.mark.parametrize("inputs", [{"x": [1]}, "x", 7, None])
def test_what_is_no_row_of_inputs_is_refused(client: Client, inputs: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"^inputs: expected one after another, as in \[array, array\], got "):
        client.map("m", inputs)


# --- for asyncio ----------------------------------------------------------------------------------------------------


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    return await asyncio.get_running_loop().run_in_executor(None, function, *args)


async def collect(flow: AsyncIterator[Any], outputs: List[float]) -> None:
    async for each in flow:
        outputs.append(each["x"][0])  # noqa: PERF401 - what came before a failure counts


@pytest.mark.parametrize("waits", [False, True])
def test_outputs_come_in_order_for_asyncio(daemon: FakeDaemon, *, waits: bool) -> None:
    async def test() -> None:
        daemon.handle = Backwards(8)
        inputs = Taken(80)
        source: Any = inputs.__aiter__() if waits else inputs.__iter__()
        async with AsyncClient(daemon.address) as client:
            index = 0
            async for outputs in client.map("m", source, in_flight=8):
                assert outputs["x"].tolist() == [index]
                index += 1
                assert inputs.taken - index <= 8
            assert index == 80

    run(test())


def test_an_input_may_depend_on_the_output_before(daemon: FakeDaemon) -> None:
    async def test() -> None:
        answered: asyncio.Queue[float] = asyncio.Queue()

        async def inputs() -> AsyncIterator[Any]:
            for _ in range(5):
                yield number(await answered.get())

        async with AsyncClient(daemon.address) as client:
            answered.put_nowait(1.0)
            values: List[float] = []
            async for outputs in client.map("m", inputs()):
                values.append(float(outputs["x"][0]))
                answered.put_nowait(2.0 * values[-1])
            assert values == [1, 2, 4, 8, 16]

    run(test())


def test_all_inputs_are_taken_in_one_task(daemon: FakeDaemon) -> None:
    async def test() -> None:
        tasks: List[Any] = []

        async def inputs() -> AsyncIterator[Any]:
            for each in range(5):
                tasks.append(asyncio.current_task())
                await asyncio.sleep(0)
                yield number(each)

        async with AsyncClient(daemon.address) as client:
            assert len([each async for each in client.map("m", inputs(), in_flight=2)]) == 5
        assert len({id(each) for each in tasks}) == 1

    run(test())


def test_a_failure_for_asyncio_leaves_no_task_and_nothing_under_way(daemon: FakeDaemon) -> None:
    async def test() -> None:
        daemon.handle = stuck = Stuck(13, 4, "INTERNAL")
        outputs: List[float] = []
        tasks = asyncio.all_tasks()
        async with AsyncClient(daemon.address) as client:
            flow = client.map("m", (number(each) for each in range(100)), in_flight=4)
            with pytest.raises(Internal, match="unlucky"):
                await collect(flow, outputs)
            assert asyncio.all_tasks() == tasks
            assert outputs == [*range(13)]
            await in_thread(stuck.until_taken_back, daemon)

    run(test())


def test_inputs_for_asyncio_that_fail_do_so_in_their_turn(daemon: FakeDaemon) -> None:
    async def test() -> None:
        async def inputs() -> AsyncIterator[Any]:
            yield number(0)
            yield number(1)
            raise ZeroDivisionError

        outputs: List[float] = []
        tasks = asyncio.all_tasks()
        async with AsyncClient(daemon.address) as client:
            with pytest.raises(ZeroDivisionError):
                await collect(client.map("m", inputs()), outputs)
            assert outputs == [0, 1]
            assert asyncio.all_tasks() == tasks

    run(test())


@pytest.mark.parametrize("how", ["aclose", "cancel"])
def test_who_leaves_takes_back_what_is_under_way(daemon: FakeDaemon, how: str) -> None:
    async def test() -> None:
        daemon.handle = stuck = Stuck(0, 3) if how == "aclose" else Stuck(1, 4)
        tasks = asyncio.all_tasks()
        async with AsyncClient(daemon.address) as client:
            flow = client.map("m", (number(each) for each in range(100)), in_flight=3)
            await flow.__anext__()
            if how == "aclose":
                await flow.aclose()
            else:
                waiting = asyncio.ensure_future(flow.__anext__())
                await in_thread(lambda: [daemon.next() for _ in range(4)])
                waiting.cancel()
                with pytest.raises(asyncio.CancelledError):
                    await waiting
            assert asyncio.all_tasks() == tasks
            if how == "aclose":
                await in_thread(stuck.until_taken_back, daemon)
            else:
                await in_thread(lambda: [daemon.next() for _ in range(3)])
                assert sorted(stuck.cancelled) == sorted(stuck.ids[1:])

    run(test())


def test_a_policy_holds_for_each_of_them(daemon: FakeDaemon) -> None:
    refused: List[str] = []

    def sometimes(message: ClientMessage, tensors: Sequence[bytes]) -> Any:
        if isinstance(message, Infer) and len(refused) < 3:
            refused.append(message.id)
            return [encode(Error(message.id, "UNAVAILABLE", "not now"))]
        return echo(message, tensors)

    async def test() -> None:
        daemon.handle = sometimes
        async with AsyncClient(daemon.address, retry=Retry(attempts=4, pause=0.001)) as client:
            answers = [each["x"][0] async for each in client.map("m", [number(each) for each in range(5)])]
            assert answers == [*range(5)]
            assert len(refused) == 3

    run(test())
