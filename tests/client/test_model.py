"""Models as functions, and inputs that need to know what a model takes."""

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
    """libzmq tells of a loss a moment later: what is asked in between is lost, too."""
    if client.transport == "zmq":
        select.select([client._session.connection.descriptors[1]], [], [], LIMIT_S)  # pyright: ignore[reportPrivateUsage]


def asked(daemon: FakeDaemon) -> List[str]:
    """The types of what has come, in order."""
    return [type(daemon.seen.get_nowait()[0]).__name__ for _ in range(daemon.seen.qsize())]


# --- inputs without names, or without a datatype --------------------------------------------------------------------


def test_an_array_alone_is_the_only_input_and_stays_as_it_is(client: Client, daemon: FakeDaemon) -> None:
    daemon.handle = taking(image="FP64")
    outputs = client.infer("m", X)
    # The model's datatype is another: that is the daemon's to refuse.
    assert outputs["image"].dtype == np.float32
    assert np.array_equal(outputs["image"], X)
    assert client.submit("m", X).result()["image"].shape == (6,)
    assert asked(daemon) == ["ModelMetadata", "Infer", "Infer"]


def test_lists_and_numbers_get_the_datatype_of_the_model(client: Client, daemon: FakeDaemon) -> None:
    daemon.handle = taking(ids="INT16", scale="FP16")
    outputs = client.infer("m", {"ids": [[1, 2]], "scale": 0.1})
    assert outputs["ids"].dtype == np.int16
    assert outputs["ids"].tolist() == [[1, 2]]
    assert outputs["scale"] == np.float16(0.1)
    with pytest.raises(InvalidArgument, match=r"^input ids\[0\]: expected an integer from -32768 to 32767, got int 4"):
        client.submit("m", {"ids": [40000], "scale": 0.1})


def test_with_arrays_by_name_nobody_asks(client: Client, daemon: FakeDaemon) -> None:
    client.infer("m", {"x": X})
    client.submit("m", {"x": X}).result()
    assert asked(daemon) == ["Infer", "Infer"]


def test_what_a_model_takes_is_asked_again_on_another_connection(client: Client, daemon: FakeDaemon) -> None:
    daemon.handle = taking(x="INT8")
    assert client.infer("m", [1])["x"].dtype == np.int8
    daemon.stop()
    again = FakeDaemon(daemon.address, taking(x="INT32"))
    until_lost(client)
    assert client.infer("m", [1])["x"].dtype == np.int32
    again.stop()


def test_a_model_that_takes_something_else_now_is_found_out_by_one_refusal(client: Client, daemon: FakeDaemon) -> None:
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
    # What does not even fit what is known is not refused before that is looked at again.
    daemon.handle = taking(x="INT64")
    assert client.infer("m", [2**40])["x"].dtype == np.int64


def test_what_cannot_be_told_ends_in_the_error_of_the_question(client: Client, daemon: FakeDaemon) -> None:
    daemon.handle = lambda message, _: [encode(Error(message.id, "NOT_FOUND", "no such model"))]
    with pytest.raises(NotFound, match="no such model") as caught:
        client.infer("m", [1.0])
    # What happens within is nothing to tell of.
    assert caught.value.__context__ is None
    daemon.handle = lambda message, _: []
    with pytest.raises(DeadlineExceeded):
        client.infer("m", [1.0], timeout=0.05)


def test_threads_that_need_the_same_wait_for_one_question(client: Client, daemon: FakeDaemon) -> None:
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


def test_tasks_that_need_the_same_wait_for_one_question(daemon: FakeDaemon) -> None:
    async def test() -> None:
        daemon.handle = taking(x="INT8")
        async with AsyncClient(daemon.address) as client:
            answers = await asyncio.gather(*(client.infer("m", [number]) for number in range(20)))
            assert [each["x"].tolist() for each in answers] == [[number] for number in range(20)]
            assert asked(daemon).count("ModelMetadata") == 1
            # Who asked may go: the others still get the answer.
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


# --- as a function --------------------------------------------------------------------------------------------------


def test_a_model_is_called_with_its_input_or_with_names(client: Client, daemon: FakeDaemon) -> None:
    daemon.handle = taking(x="FP32")
    model = client.model("m")
    assert model.name == "m"
    # One output, and it is alone.
    assert np.array_equal(model(X), X)
    assert np.array_equal(model(x=X), X)
    assert np.array_equal(model({"x": X}), X)
    assert model([0.5]).tolist() == [0.5]
    assert np.array_equal(model.submit(X).result(), X)
    assert model.metadata().platform == "echo"
    assert [each[0] for each in model.map(X + each for each in range(3))] == [0, 1, 2]
    # Two outputs, by their names.
    daemon.handle = taking(a="FP32", b="FP32")
    assert {*model(a=X, b=[1.0])} == {"a", "b"}
    assert {*model.submit(a=X, b=X).result()} == {"a", "b"}


def test_more_than_one_input_without_a_name_is_refused(client: Client, daemon: FakeDaemon) -> None:
    call: Any = client.model("m")
    for arguments, names in (((X, X), {}), ((X,), {"y": X})):
        with pytest.raises(InvalidArgument, match=r"^inputs: expected inputs by name, as in model\(x=array\), or one"):
            call(*arguments, **names)
    assert asked(daemon) == []


def test_what_it_was_made_with_goes_with_each_request(client: Client, daemon: FakeDaemon) -> None:
    model = client.model("m", outputs=["x"], timeout=7.0, priority=2)
    model(x=X)
    model.submit(x=X).result()
    [*_] = model.map([{"x": X}])
    for _ in range(3):
        message, _tensors = daemon.next()
        assert isinstance(message, Infer)
        assert message.description.outputs == ("x",)
        assert (message.parameters.timeout_us, message.parameters.priority) == (7_000_000, 2)


def test_a_model_for_asyncio(daemon: FakeDaemon) -> None:
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
    with pytest.raises(InvalidArgument, match=r"^inputs: expected an iterable of inputs, as in \[array, array\], got "):
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
