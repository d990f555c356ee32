"""Tests that every public argument rejects unsuitable objects with an error of weightd."""

from __future__ import annotations

import asyncio
import copy
import inspect
import pickle
import re
import tempfile
from decimal import Decimal
from fractions import Fraction
from functools import partial
from pathlib import Path
from typing import Any, Callable, Dict, Iterable, Iterator, List, Optional, Sequence, Tuple

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from testkit.examples import examples
from testkit.fakedaemon import FakeDaemon, taking
from weightd import AsyncClient, Client, InvalidArgument, NotCopyable, Retry, Unavailable, WeightdError, WrongLoop
from weightd_protocol.codec import encode
from weightd_protocol.errors import RemoteProtocolError
from weightd_protocol.messages.control import ModelMetadata, ServerMetadata
from weightd_protocol.messages.inference import Cancel, Error, Infer
from weightd_protocol.messages.types import ClientMessage

X = np.arange(6, dtype=np.float32)


class RequiresGrad:
    """Like a parameter of a PyTorch module: its conversion fails with a RuntimeError."""

    def __array__(self, *_: Any, **__: Any) -> Any:
        raise RuntimeError("Can't call numpy() on Tensor that requires grad.")


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no repr")


class NotHashable(str):
    """A string that cannot be a key of a cache."""

    __slots__ = ()
    __hash__: Any = None


def self_containing_list() -> List[Any]:
    items: List[Any] = []
    items.append(items)
    return items


ODD: Dict[str, Any] = {
    "None": None,
    "True": True,
    "zero": 0,
    "negative": -1,
    "huge": 10**400,
    "NaN": float("nan"),
    "infinity": float("inf"),
    "tiny": 1e-300,
    "a number as text": "5",
    "no text": "",
    "a lone surrogate": "\ud800",
    "a long text": "x" * 5000,
    "a zero byte": "/a\0b",
    "bytes": b"x",
    "no items": [],
    "lists": [[1, 2], [3]],
    "a list of itself": self_containing_list(),
    "a mapping": {"x": [1]},
    "invalid names": {1: X, None: X, ("a",): X},
    "unprintable": Unprintable(),
    "a list of strings": [Unprintable()],
    "a mapping of strings": {"x": Unprintable()},
    "a set": {"x"},
    "an object": object(),
    "a class": int,
    "a function": len,
    "a generator": (each for each in "x"),
    "a numpy number": np.float32(5),
    "a numpy integer": np.int64(3),
    "a numpy text": np.str_("m"),
    "a complex number": 1j,
    "an array": X,
    "an array of objects": np.array([object(), None]),
    "an array of text": np.array(["x"]),
    "Decimal": Decimal("0.5"),
    "a signaling NaN": Decimal("sNaN"),
    "Fraction": Fraction(1, 3),
    "requires grad": RequiresGrad(),
    "a mapping of that": {"x": RequiresGrad()},
    "a list of that": [RequiresGrad()],
    "a path": Path("/nowhere"),
    "a range": range(3),
    "a client": Client,
    "not hashable": NotHashable("m"),
    "a list of unhashable": [["x"], NotHashable("x")],
    "a retry": Retry(attempts=2, pause=0.001),
}

ODDITIES = st.one_of(
    st.just(None),
    st.text(),
    st.binary(),
    st.integers(),
    st.floats(),
    st.decimals(),
    st.fractions(),
    st.complex_numbers(),
    st.lists(st.none() | st.text(max_size=3) | st.integers() | st.lists(st.integers(), max_size=2), max_size=3),
    st.dictionaries(st.text(max_size=3), st.integers() | st.text(max_size=3), max_size=2),
)

CALLS: Dict[str, Callable[[Any, Any], Any]] = {
    "infer model": lambda client, odd: client.infer(odd, {"x": X}),
    "infer inputs": lambda client, odd: client.infer("m", odd),
    "infer an input": lambda client, odd: client.infer("m", {"x": odd}),
    "infer a name": lambda client, odd: client.infer("m", {_key(odd): X}),
    "infer outputs": lambda client, odd: client.infer("m", {"x": X}, outputs=odd),
    "infer an output": lambda client, odd: client.infer("m", {"x": X}, outputs=[odd]),
    "infer out": lambda client, odd: client.infer("m", {"x": X}, out=odd),
    "infer an out": lambda client, odd: client.infer("m", {"x": X}, out={"x": odd}),
    "infer timeout": lambda client, odd: client.infer("m", {"x": X}, timeout=odd),
    "infer priority": lambda client, odd: client.infer("m", {"x": X}, priority=odd),
    "model": lambda client, odd: client.model(odd)(X),
    "model inputs": lambda client, odd: client.model("m")(odd),
    "model an input": lambda client, odd: client.model("m")(x=odd),
    "model outputs": lambda client, odd: client.model("m", outputs=odd)(X),
    "model timeout": lambda client, odd: client.model("m", timeout=odd)(X),
    "model priority": lambda client, odd: client.model("m", priority=odd)(X),
    "model metadata": lambda client, odd: client.model("m").metadata(timeout=odd),
    "empty shape": lambda client, odd: client.empty(odd, np.float32),
    "empty a size": lambda client, odd: client.empty([odd], np.float32),
    "empty dtype": lambda client, odd: client.empty((2,), odd),
    "ready": lambda client, odd: client.ready(odd),
    "ready timeout": lambda client, odd: client.ready("m", timeout=odd),
    "metadata": lambda client, odd: client.metadata(odd),
    "metadata timeout": lambda client, odd: client.metadata("m", timeout=odd),
    "server timeout": lambda client, odd: client.server(timeout=odd),
    "status timeout": lambda client, odd: client.status(timeout=odd),
    "metrics timeout": lambda client, odd: client.metrics(timeout=odd),
    "events after": lambda client, odd: client.events(odd),
    "events model": lambda client, odd: client.events(0, odd),
    "logs model": lambda client, odd: client.logs(odd),
    "logs process": lambda client, odd: client.logs("m", odd),
    "logs lines": lambda client, odd: client.logs("m", lines=odd),
    "update model": lambda client, odd: client.update(odd),
    "update path": lambda client, odd: client.update("m", odd),
    "update weights": lambda client, odd: client.update("m", weights=odd),
    "update rollback": lambda client, odd: client.update("m", rollback=odd),
    "reload timeout": lambda client, odd: client.reload(timeout=odd),
}

# `map` takes iterables of these objects and passes their exceptions on.
MAPS: Dict[str, Callable[[Any, Any], Any]] = {
    "map model": lambda client, odd: client.map(odd, [X]),
    "map inputs": lambda client, odd: client.map("m", odd),
    "map an input": lambda client, odd: client.map("m", [odd]),
    "map in_flight": lambda client, odd: client.map("m", [X], in_flight=odd),
    "map outputs": lambda client, odd: client.map("m", [X], outputs=odd),
    "map timeout": lambda client, odd: client.map("m", [X], timeout=odd),
    "map priority": lambda client, odd: client.map("m", [X], priority=odd),
    "model map": lambda client, odd: client.model("m").map(odd),
    "model map in_flight": lambda client, odd: client.model("m").map([X], in_flight=odd),
}

SUBMITS: Dict[str, Callable[[Any, Any], Any]] = {
    "submit model": lambda client, odd: client.submit(odd, {"x": X}),
    "submit inputs": lambda client, odd: client.submit("m", odd),
    "submit an input": lambda client, odd: client.submit("m", {"x": odd}),
    "submit outputs": lambda client, odd: client.submit("m", {"x": X}, outputs=odd),
    "submit out": lambda client, odd: client.submit("m", {"x": X}, out=odd),
    "submit timeout": lambda client, odd: client.submit("m", {"x": X}, timeout=odd),
    "submit priority": lambda client, odd: client.submit("m", {"x": X}, priority=odd),
    "model submit": lambda client, odd: client.model("m").submit(odd),
}

MAKES: Dict[str, Callable[[Any, Any], Any]] = {
    "address": lambda make, odd: make(odd),
    "timeout": lambda make, odd: make(timeout=odd),
    "tenant": lambda make, odd: make(tenant=odd),
    "key": lambda make, odd: make("tcp://127.0.0.1:1", key=odd, server_key="/nowhere"),
    "server_key": lambda make, odd: make("tcp://127.0.0.1:1", key="/nowhere", server_key=odd),
    "retry": lambda make, odd: make(retry=odd),
}


def _key(odd: Any) -> Any:
    try:
        hash(odd)
    except TypeError:
        return "x"
    return odd


def answers(message: ClientMessage, tensors: Sequence[bytes]) -> Iterable[List[Any]]:
    """Answer as a model with one input; every other model is unknown."""
    if isinstance(message, (Cancel, Infer, ModelMetadata, ServerMetadata)):
        return taking(x="FP32")(message, tensors)
    return [encode(Error(message.id, "NOT_FOUND", "no such model"))]


@pytest.fixture(scope="module")
def address() -> Iterator[str]:
    """Return the address of a daemon that answers each message at once."""
    with tempfile.TemporaryDirectory(prefix="weightd-test-") as directory:
        fake = FakeDaemon(f"unix://{directory}/d.sock", answers)
        yield fake.address
        fake.stop()


@pytest.fixture(autouse=True)
def _no_default(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WEIGHTD_SOCKET", "/nowhere/d.sock")


def other_error(call: Callable[[], Any]) -> Optional[Exception]:
    """Return the exception of a call unless it is an error of weightd."""
    try:
        call()
    except (WeightdError, MemoryError):  # For some shapes no machine has enough memory.
        return None
    except Exception as error:  # noqa: BLE001 - that is the question
        return error
    return None


RETRIES = [None, Retry(attempts=2, pause=0.001)]


def blocking(client: Client, name: str, odd: Any) -> Optional[Exception]:
    if name in MAPS:
        return other_error(lambda: [*MAPS[name](client, odd)])
    if name in SUBMITS:
        return other_error(lambda: SUBMITS[name](client, odd).result())
    return other_error(lambda: CALLS[name](client, odd))


async def awaited(client: AsyncClient, name: str, odd: Any) -> Optional[Exception]:
    try:
        if name in MAPS:
            async for _ in MAPS[name](client, odd):
                pass
        else:
            answer = CALLS[name](client, odd)
            if inspect.isawaitable(answer):
                await answer
    except WeightdError:
        return None
    except Exception as error:  # noqa: BLE001 - that is the question
        return error
    return None


@pytest.mark.parametrize("retry", RETRIES)
def test_wrong_arguments_raise_weightd_errors(address: str, retry: Optional[Retry]) -> None:
    with Client(address, retry=retry) as client:
        found = {(name, odd): blocking(client, name, ODD[odd]) for name in [*CALLS, *MAPS, *SUBMITS] for odd in ODD}
        assert client.infer("m", {"x": X})["x"].tobytes() == X.tobytes()
    assert {where: error for where, error in found.items() if error is not None} == {}


@pytest.mark.parametrize("retry", RETRIES)
def test_wrong_arguments_of_async_client(address: str, retry: Optional[Retry]) -> None:
    async def test() -> Dict[Any, Optional[Exception]]:
        async with AsyncClient(address, retry=retry) as client:
            found = {(name, odd): await awaited(client, name, ODD[odd]) for name in [*CALLS, *MAPS] for odd in ODD}
            assert (await client.infer("m", {"x": X}))["x"].tobytes() == X.tobytes()
            return found

    found = asyncio.run(test())
    assert {where: error for where, error in found.items() if error is not None} == {}


@pytest.mark.parametrize("kind", [Client, AsyncClient])
def test_wrong_arguments_of_constructors(kind: Any) -> None:
    found = {(name, odd): other_error(partial(MAKES[name], kind, ODD[odd])) for name in MAKES for odd in ODD}
    assert {where: error for where, error in found.items() if error is not None} == {}


# --- messages, and accepted values ----------------------------------------------------------------------------------


@pytest.mark.parametrize("timeout", [np.float32(5), np.float64(5), np.int64(5), 5, Decimal(5), Fraction(5), 5.0])
def test_timeout_is_any_real_number(address: str, timeout: Any) -> None:
    pauses: Dict[str, Any] = {"pause": np.float32(0.5), "max_pause": Fraction(1, 2)}
    with Client(address, timeout=timeout, retry=Retry(**pauses)) as client:
        assert (type(client.timeout), client.timeout) == (float, 5.0)
        client.infer("m", {"x": X}, timeout=timeout)
        client.submit("m", {"x": X}, timeout=timeout).result()
        client.server(timeout=timeout)
    assert Retry(**pauses) == Retry(pause=0.5, max_pause=0.5)


@pytest.mark.parametrize(
    ("timeout", "shown"),
    [
        ("5", "str '5'"),
        (True, "bool True"),
        (0, "int 0"),
        (float("nan"), "float nan"),
        (Decimal("Infinity"), "Decimal Decimal('Infinity')"),
        (3600.1, "float 3600.1"),
        (10**400, "int of 1329 bits"),
        (Fraction(1, 10**400), "Fraction "),
    ],
)
def test_error_describes_timeout(address: str, timeout: Any, shown: str) -> None:
    expected = f"^timeout: expected more than 0 and at most 3600 seconds, got {re.escape(shown)}"
    with Client(address) as client:
        for call in (lambda: client.infer("m", {"x": X}, timeout=timeout), lambda: client.server(timeout=timeout)):
            with pytest.raises(InvalidArgument, match=expected):
                call()
    for kind in (Client, AsyncClient):
        with pytest.raises(InvalidArgument, match=expected):
            kind(address, timeout=timeout)
    with pytest.raises(InvalidArgument, match=r"^pause: expected more than 0 and at most 60 seconds, got "):
        Retry(pause=timeout)


REFUSALS: List[Tuple[Callable[[Any], Any], str]] = [
    (lambda client: client.infer(5, X), "^model: expected text, got int 5$"),
    (lambda client: client.infer("m", {5: X}), "^inputs: name: expected text, got int 5$"),
    (lambda client: client.infer("m", {"x": X}, outputs="y"), "^outputs: expected a list of names, got str 'y'$"),
    (lambda client: client.infer("m", {"x": X}, outputs=["y", 5]), r"^outputs\[1\]: expected text, got int 5$"),
    (lambda client: client.infer("m", {"x": X}, out=X), "^out: expected an array for each name, .* got ndarray "),
    (lambda client: client.infer("m", {"x": X}, out={"x": [1]}), "^out: x: expected a writable numpy array, got list$"),
    (lambda client: client.infer("m", {"x": X}, priority=True), "^priority: expected an integer .* got bool True$"),
    (lambda client: client.infer("m" * 300, {"x": X}), "model_name: expected text, 1 to 256 bytes, got 300$"),
    (lambda client: client.ready(None), "^model: expected text, got NoneType None$"),
    (lambda client: client.events("1"), "after: expected integer, .* got str '1'$"),
    (lambda client: client.empty((2, -1), np.float32), r"^shape: expected integers from 0, got tuple of 2 items$"),
    (lambda client: client.empty(2, "vague"), "^dtype: expected a numpy dtype, got str 'vague': "),
    (lambda client: [*client.map("m", [X], in_flight="4")], "^in_flight: expected an integer .*, got str '4'$"),
]


@pytest.mark.parametrize(("call", "expected"), REFUSALS)
def test_error_names_argument(address: str, call: Callable[[Client], Any], expected: str) -> None:
    with Client(address) as client:
        # The number 1 equals True, which is rejected.
        client.infer("m", {"x": X}, priority=1)
        with pytest.raises(InvalidArgument, match=expected):
            call(client)


def test_error_has_cause_of_failed_conversion(address: str) -> None:
    expected = "^input x: expected an array: Can't call numpy.. on Tensor that requires grad"
    with Client(address) as client:
        for wrong in ({"x": RequiresGrad()}, RequiresGrad()):
            with pytest.raises(InvalidArgument, match=expected) as caught:
                client.infer("m", wrong)
            assert isinstance(caught.value.__cause__, RuntimeError)


def test_accepts_numpy_strings(address: str) -> None:
    """The caches must not return an equal string of another type."""
    own = np.arange(7, dtype=np.float32)
    with Client(address) as client:
        for text in (np.str_, str):
            inputs = {text("x"): own}
            assert client.infer(text("own"), inputs, outputs=[text("x")])["x"].tobytes() == own.tobytes()
            assert [*client.model(text("own"))({text("x"): own}).shape] == [7]


def test_empty_accepts_shapes_of_numpy(address: str) -> None:
    shapes: List[Any] = [3, (3,), [np.int64(3)], np.array([3])]
    with Client(address) as client:
        assert [client.empty(shape, np.float32).shape for shape in shapes] == [(3,)] * 4
        assert client.empty((), np.float32).shape == ()


# --- copies ---------------------------------------------------------------------------------------------------------

COPIES: List[Callable[[Any], Any]] = [copy.copy, copy.deepcopy]
DUMPS: List[Callable[[Any], Any]] = [pickle.dumps, partial(pickle.dumps, protocol=0)]


def pickled(value: Any) -> Any:
    return pickle.loads(pickle.dumps(value))


@pytest.mark.parametrize("again", [*COPIES, *DUMPS])
def test_clients_are_not_copyable(address: str, again: Callable[[Any], Any]) -> None:
    with Client(address) as client:
        beside = AsyncClient(address)
        model = client.model("m")
        for each in (client, beside, model, beside.model("m"), client.submit("m", {"x": X}), model.submit(X)):
            # The error is Python's error for objects that cannot be pickled, and an error of weightd.
            for kind in (TypeError, WeightdError, NotCopyable):
                with pytest.raises(kind, match=f"^{type(each).__name__} objects cannot be copied or pickled: "):
                    again(each)
        # The failed copies leave the client open.
        assert client.server().version == "9.9"


@pytest.mark.parametrize("again", [*COPIES, pickled])
def test_arrays_policies_and_errors_are_copyable(address: str, again: Callable[[Any], Any]) -> None:
    with Client(address) as client:
        array = client.empty((20, 1000), np.float32)
        array[:] = 7
        copied = again(array)
        array[:] = 8
        assert (copied == 7).all()
        assert again(Retry(attempts=2)) == Retry(attempts=2)
    refused = again(Unavailable("why", retry_after=2.0))
    assert (str(refused), refused.retry_after) == ("why", 2.0)
    assert again(RemoteProtocolError("why", "7")).request_id == "7"


# --- event loops ----------------------------------------------------------------------------------------------------


def test_error_without_asyncio_loop(address: str) -> None:
    for call in (
        AsyncClient(address).infer("m", {"x": X}),
        AsyncClient(address).server(),
        AsyncClient(address).close(),
    ):
        with pytest.raises(WrongLoop, match="requires a running asyncio event loop"):
            call.send(None)


# --- any value ------------------------------------------------------------------------------------------------------


@settings(max_examples=examples(100), deadline=None)
@given(st.sampled_from(sorted([*CALLS, *MAPS, *SUBMITS])), ODDITIES)
def test_any_argument_raises_only_weightd_errors(address: str, name: str, odd: Any) -> None:
    with Client(address) as client:
        assert blocking(client, name, odd) is None


@settings(max_examples=examples(50), deadline=None)
@given(st.sampled_from(sorted(MAKES)), ODDITIES)
def test_any_constructor_argument_raises_only_weightd_errors(name: str, odd: Any) -> None:
    assert other_error(lambda: MAKES[name](Client, odd)) is None


@settings(max_examples=examples(50), deadline=None)
@given(ODDITIES, ODDITIES, ODDITIES)
def test_any_retry_argument_raises_only_weightd_errors(attempts: Any, pause: Any, max_pause: Any) -> None:
    assert other_error(lambda: Retry(attempts, pause, max_pause)) is None
    assert other_error(lambda: Retry(pause=pause)) is None
