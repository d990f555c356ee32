"""Models as functions, and inputs that need to know what a model takes."""

from __future__ import annotations

import asyncio
import select
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Coroutine, List, Sequence, TypeVar

import numpy as np
import pytest

from testkit.fakedaemon import LIMIT_S, FakeDaemon, echo, taking
from weightd import AsyncClient, Client, DeadlineExceeded, InvalidArgument, NotFound
from weightd_protocol.codec import encode
from weightd_protocol.messages.control import ModelMetadata
from weightd_protocol.messages.inference import Error, Infer
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
        with pytest.raises(
            InvalidArgument, match=r"^inputs: expected each by its name, as in model\(x=array\), or one"
        ):
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
