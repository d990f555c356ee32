"""Tests of model objects, and of inputs that need the model's metadata."""

from __future__ import annotations

import asyncio
import select
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, AsyncIterator, Callable, Coroutine, Iterator, List, Sequence, TypeVar

import numpy as np
import pytest

from testkit.fakedaemon import LIMIT_S, FakeDaemon, echo, taking
from weightd import AsyncClient, Client, DeadlineExceeded, Internal, InvalidArgument, NotFound, Retry
from weightd.model import MAX_IN_FLIGHT
from weightd_protocol.codec import encode
from weightd_protocol.messages.control import ModelMetadata
from weightd_protocol.messages.inference import Cancel, Error, Infer
from weightd_protocol.messages.types import ClientMessage

X = np.arange(6, dtype=np.float32)

T = TypeVar("T")


def run(test: Coroutine[Any, Any, T]) -> T:
    return asyncio.run(asyncio.wait_for(test, LIMIT_S))


def until_lost(client: Client) -> None:
    """Wait until the client has noticed the loss; libzmq reports it a moment later, and requests in between fail."""
    if client.transport == "zmq":
        select.select([client._session.connection.descriptors[1]], [], [], LIMIT_S)  # pyright: ignore[reportPrivateUsage]


def asked(daemon: FakeDaemon) -> List[str]:
    """Return the types of the received messages in order."""
    return [type(daemon.seen.get_nowait()[0]).__name__ for _ in range(daemon.seen.qsize())]


# --- inputs without names, or without a datatype --------------------------------------------------------------------


def test_single_array_is_the_only_input(client: Client, daemon: FakeDaemon) -> None:
    daemon.handle = taking(image="FP64")
    outputs = client.infer("m", X)
    # The model has another datatype; only the daemon rejects that.
    assert outputs["image"].dtype == np.float32
    assert np.array_equal(outputs["image"], X)
    assert client.submit("m", X).result()["image"].shape == (6,)
    assert asked(daemon) == ["ModelMetadata", "Infer", "Infer"]


def test_lists_get_datatype_of_model(client: Client, daemon: FakeDaemon) -> None:
    daemon.handle = taking(ids="INT16", scale="FP16")
    outputs = client.infer("m", {"ids": [[1, 2]], "scale": 0.1})
    assert outputs["ids"].dtype == np.int16
    assert outputs["ids"].tolist() == [[1, 2]]
    assert outputs["scale"] == np.float16(0.1)
    with pytest.raises(InvalidArgument, match=r"^input ids\[0\]: expected an integer from -32768 to 32767, got int 4"):
        client.submit("m", {"ids": [40000], "scale": 0.1})


def test_named_arrays_need_no_metadata(client: Client, daemon: FakeDaemon) -> None:
    client.infer("m", {"x": X})
    client.submit("m", {"x": X}).result()
    assert asked(daemon) == ["Infer", "Infer"]


def test_new_connection_requests_metadata_again(client: Client, daemon: FakeDaemon) -> None:
    daemon.handle = taking(x="INT8")
    assert client.infer("m", [1])["x"].dtype == np.int8
    daemon.stop()
    again = FakeDaemon(daemon.address, taking(x="INT32"))
    until_lost(client)
    assert client.infer("m", [1])["x"].dtype == np.int32
    again.stop()


def test_rejected_request_refreshes_metadata(client: Client, daemon: FakeDaemon) -> None:
    def refuses_int8(message: ClientMessage, tensors: Sequence[bytes]) -> Any:
        if isinstance(message, Infer) and message.description.inputs[0].datatype == "INT8":
            return [encode(Error(message.id, "INVALID_ARGUMENT", "x: expected INT32, got INT8"))]
        return taking(x="INT32")(message, tensors)

    daemon.handle = taking(x="INT8")
    assert client.infer("m", [1])["x"].dtype == np.int8
    daemon.handle = refuses_int8
    with pytest.raises(InvalidArgument, match="expected INT32"):
        client.infer("m", [1])
    assert client.infer("m", [1])["x"].dtype == np.int32
    # An input that does not fit the cached metadata is rejected only after a refresh.
    daemon.handle = taking(x="INT64")
    assert client.infer("m", [2**40])["x"].dtype == np.int64


def test_failed_metadata_request_is_the_error(client: Client, daemon: FakeDaemon) -> None:
    daemon.handle = lambda message, _: [encode(Error(message.id, "NOT_FOUND", "no such model"))]
    with pytest.raises(NotFound, match="no such model") as caught:
        client.infer("m", [1.0])
    # The internal exception does not appear as context.
    assert caught.value.__context__ is None
    daemon.handle = lambda message, _: []
    with pytest.raises(DeadlineExceeded):
        client.infer("m", [1.0], timeout=0.05)


def test_threads_share_one_metadata_request(client: Client, daemon: FakeDaemon) -> None:
    answer = taking(x="INT8")
    questions: List[ClientMessage] = []
    first = threading.Event()

    def slow(message: ClientMessage, tensors: Sequence[bytes]) -> Any:
        if isinstance(message, ModelMetadata):
            questions.append(message)
            first.set()
            return []
        return answer(message, tensors)

    daemon.handle = slow
    with ThreadPoolExecutor(4) as pool:
        asking = pool.submit(client.infer, "m", [1])
        assert first.wait(LIMIT_S)
        others = [pool.submit(client.infer, "m", [number]) for number in range(3)]
        while len(client._transport._election._waiters) < 3:  # pyright: ignore[reportPrivateUsage]
            threading.Event().wait(0.001)
        for frames in answer(questions[0], ()):
            daemon.send(*frames)
        assert asking.result(LIMIT_S)["x"].tolist() == [1]
        assert [each.result(LIMIT_S)["x"].tolist() for each in others] == [[0], [1], [2]]
    assert len(questions) == 1


def test_tasks_share_one_metadata_request(daemon: FakeDaemon) -> None:
    async def test() -> None:
        daemon.handle = taking(x="INT8")
        async with AsyncClient(daemon.address) as client:
            answers = await asyncio.gather(*(client.infer("m", [number]) for number in range(20)))
            assert [each["x"].tolist() for each in answers] == [[number] for number in range(20)]
            assert asked(daemon).count("ModelMetadata") == 1
            # If the task that sent the request is cancelled, the others still get the answer.
            daemon.handle = lambda message, _: []
            first = asyncio.ensure_future(client.infer("other", [1]))
            await asyncio.sleep(0)
            second = asyncio.ensure_future(client.infer("other", [2]))
            question, _ = await asyncio.get_running_loop().run_in_executor(None, daemon.next)
            while isinstance(question, Infer):
                question, _ = await asyncio.get_running_loop().run_in_executor(None, daemon.next)
            first.cancel()
            daemon.handle = echo
            for frames in taking(x="INT8")(question, ()):
                daemon.send(*frames)
            assert (await second)["x"].tolist() == [2]

    run(test())


# --- models as functions --------------------------------------------------------------------------------------------


def test_calls_model_with_array_or_names(client: Client, daemon: FakeDaemon) -> None:
    daemon.handle = taking(x="FP32")
    model = client.model("m")
    assert model.name == "m"
    # A single output is returned without its name.
    assert np.array_equal(model(X), X)
    assert np.array_equal(model(x=X), X)
    assert np.array_equal(model({"x": X}), X)
    assert model([0.5]).tolist() == [0.5]
    assert np.array_equal(model.submit(X).result(), X)
    assert model.metadata().platform == "echo"
    assert [each[0] for each in model.map(X + each for each in range(3))] == [0, 1, 2]
    # Two outputs are returned by name.
    daemon.handle = taking(a="FP32", b="FP32")
    assert {*model(a=X, b=[1.0])} == {"a", "b"}
    assert {*model.submit(a=X, b=X).result()} == {"a", "b"}


def test_rejects_several_unnamed_inputs(client: Client, daemon: FakeDaemon) -> None:
    call: Any = client.model("m")
    for arguments, names in (((X, X), {}), ((X,), {"y": X})):
        with pytest.raises(InvalidArgument, match=r"^inputs: expected inputs by name, as in model\(x=array\), or one"):
            call(*arguments, **names)
    assert asked(daemon) == []


def test_model_options_apply_to_each_request(client: Client, daemon: FakeDaemon) -> None:
    model = client.model("m", outputs=["x"], timeout=7.0, priority=2)
    model(x=X)
    model.submit(x=X).result()
    [*_] = model.map([{"x": X}])
    for _ in range(3):
        message, _tensors = daemon.next()
        assert isinstance(message, Infer)
        assert message.description.outputs == ("x",)
        assert (message.parameters.timeout_us, message.parameters.priority) == (7_000_000, 2)


def test_async_model(daemon: FakeDaemon) -> None:
    async def test() -> None:
        daemon.handle = taking(x="FP32")
        async with AsyncClient(daemon.address) as client:
            model = client.model("m", timeout=7.0)
            assert np.array_equal(await model(X), X)
            assert np.array_equal(await model(x=X), X)
            assert (await model.metadata()).platform == "echo"
            assert [each[0] async for each in model.map(X + each for each in range(3))] == [0, 1, 2]

    run(test())


def number(value: float) -> Any:
    return {"x": np.array([value], np.float32)}


class Backwards:
    """A daemon that answers requests in groups of this size, in reverse order."""

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
    """A daemon that answers a number of requests and then holds them; with `held` requests it answers the first one.

    Attributes:
        ids: the ids of all requests.
        cancelled: the ids of the cancelled requests.
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

    def wait_until_cancelled(self, daemon: FakeDaemon) -> None:
        """Wait until exactly the unanswered requests have been cancelled."""
        for _ in range(len(self.ids) + self._held - 1):
            daemon.next()
        assert sorted(self.cancelled) == sorted(self.ids[self._answered + 1 :])
        assert len(self.cancelled) == self._held - 1


class CountedInputs:
    """An iterable of inputs that counts how many have been consumed."""

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


def test_map_keeps_order_and_limits_requests(client: Client, daemon: FakeDaemon) -> None:
    # The daemon answers nothing before it has all eight requests.
    daemon.handle = Backwards(8)
    inputs = CountedInputs(80)
    taken: List[int] = []
    for index, outputs in enumerate(client.map("m", inputs, in_flight=8)):
        assert outputs["x"].tolist() == [index]
        taken.append(inputs.taken - index)
    assert len(taken) == 80
    assert max(taken) == 8


def test_map_without_inputs(client: Client) -> None:
    assert [*client.map("m", [])] == []


def test_maps_rows_of_an_array(client: Client, daemon: FakeDaemon) -> None:
    daemon.handle = taking(x="FP32")
    rows = np.arange(6, dtype=np.float32).reshape(3, 2)
    assert np.array_equal([outputs["x"] for outputs in client.map("m", rows)], rows)


def test_map_yields_output_before_next_input(client: Client) -> None:
    given: List[int] = []

    def inputs() -> Iterator[Any]:
        for each in range(2000):
            if given:
                return
            yield number(each)

    given.extend(1 for _ in client.map("m", inputs(), in_flight=MAX_IN_FLIGHT))
    assert len(given) < MAX_IN_FLIGHT


def test_failure_cancels_other_requests(client: Client, daemon: FakeDaemon) -> None:
    daemon.handle = stuck = Stuck(13, 4, "INTERNAL")
    outputs: List[float] = []
    with pytest.raises(Internal, match="unlucky"):
        outputs.extend(each["x"][0] for each in client.map("m", (number(each) for each in range(100)), in_flight=4))
    assert outputs == [*range(13)]
    stuck.wait_until_cancelled(daemon)


def test_close_cancels_requests_of_map(client: Client, daemon: FakeDaemon) -> None:
    daemon.handle = stuck = Stuck(0, 3)
    flow = client.map("m", (number(each) for each in range(100)), in_flight=3)
    next(flow)
    flow.close()
    stuck.wait_until_cancelled(daemon)
    with pytest.raises(StopIteration):
        next(flow)


def test_exception_of_inputs_cancels_requests(client: Client, daemon: FakeDaemon) -> None:
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
def test_rejects_wrong_in_flight_at_once(client: Client, daemon: FakeDaemon, in_flight: Any) -> None:
    with pytest.raises(InvalidArgument, match=f"^in_flight: expected an integer from 1 to {MAX_IN_FLIGHT}, got"):
        client.map("m", [], in_flight=in_flight)
    with pytest.raises(InvalidArgument, match=r"^in_flight"):
        AsyncClient(daemon.address).map("m", [], in_flight=in_flight)


@pytest.mark.parametrize("inputs", [{"x": [1]}, "x", 7, None])
def test_map_rejects_other_than_iterables(client: Client, inputs: Any) -> None:
    with pytest.raises(InvalidArgument, match=r"^inputs: expected an iterable of inputs, as in \[array, array\], got "):
        client.map("m", inputs)


# --- for asyncio ----------------------------------------------------------------------------------------------------


async def in_thread(function: Callable[..., T], *args: Any) -> T:
    return await asyncio.get_running_loop().run_in_executor(None, function, *args)


async def collect(flow: AsyncIterator[Any], outputs: List[float]) -> None:
    async for each in flow:
        outputs.append(each["x"][0])  # noqa: PERF401 - what came before a failure counts


@pytest.mark.parametrize("waits", [False, True])
def test_async_map_keeps_order(daemon: FakeDaemon, *, waits: bool) -> None:
    async def test() -> None:
        daemon.handle = Backwards(8)
        inputs = CountedInputs(80)
        source: Any = inputs.__aiter__() if waits else inputs.__iter__()
        async with AsyncClient(daemon.address) as client:
            index = 0
            async for outputs in client.map("m", source, in_flight=8):
                assert outputs["x"].tolist() == [index]
                index += 1
                assert inputs.taken - index <= 8
            assert index == 80

    run(test())


def test_async_input_may_depend_on_last_output(daemon: FakeDaemon) -> None:
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


def test_async_map_reads_inputs_in_one_task(daemon: FakeDaemon) -> None:
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


def test_async_failure_leaves_no_tasks_or_requests(daemon: FakeDaemon) -> None:
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
            await in_thread(stuck.wait_until_cancelled, daemon)

    run(test())


def test_async_inputs_raise_in_order(daemon: FakeDaemon) -> None:
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
def test_leaving_async_map_cancels_requests(daemon: FakeDaemon, how: str) -> None:
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
                await in_thread(stuck.wait_until_cancelled, daemon)
            else:
                await in_thread(lambda: [daemon.next() for _ in range(3)])
                assert sorted(stuck.cancelled) == sorted(stuck.ids[1:])

    run(test())


def test_retry_policy_applies_to_each_request(daemon: FakeDaemon) -> None:
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
