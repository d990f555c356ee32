"""A user's program: mypy and pyright, strict, find nothing in it, and miss nothing that is wrong.

Each line that is marked as an error is one for both of them: a mark where there is none would be an error, too.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Iterator
from typing import Any

import numpy as np
from numpy.typing import NDArray

from weightd import AsyncClient, Client, Model, Pending, RequestError, Retry, WeightdError


def outputs(client: Client, images: NDArray[np.float32]) -> NDArray[Any]:
    """What is given may be an array, a list or a number, with a name or without; outputs are arrays."""
    client.infer("digits", images)
    client.infer("digits", [[0.0, 1], [2, 3]])
    client.infer("digits", {"x": 1.5}, outputs=["y"], timeout=5.0, priority=1)
    by_name: dict[str, NDArray[Any]] = client.infer(
        "digits", {"x": images}, out={"y": client.empty((1, 64), np.float32)}
    )
    pending: Pending = client.submit("digits", images)
    pending.result()["y"].argmax(axis=1)
    return by_name["y"]


def as_a_function(client: Client, images: NDArray[np.float32]) -> None:
    """One input without a name, or each by its name."""
    digits: Model = client.model("digits", outputs=["y"])
    digits(images).argmax(axis=1)
    digits(x=images)
    digits({"x": images})
    digits.submit(x=images).result().argmax(axis=1)
    print(digits.metadata().inputs[0].shape)


def many(client: Client) -> Iterator[NDArray[Any]]:
    """What `for` goes through."""
    rows = (np.zeros((1, 64), np.float32) for _ in range(10))
    for each in client.map("digits", rows, in_flight=4):
        yield each["y"]
    flow = client.model("digits").map([[[0.0]], [[1.0]]])
    next(flow)
    flow.close()


async def awaited(images: AsyncIterator[NDArray[np.float32]]) -> None:
    """And what `async for` goes through, where it is awaited."""
    async with AsyncClient(retry=Retry(attempts=2)) as client:
        scores: NDArray[Any] = (await client.infer("digits", [[0.0]]))["y"]
        digits = client.model("digits")
        print(scores.shape, await digits(x=scores))
        async for each in client.map("digits", images):
            print(each["y"].shape)
        flow = digits.map([scores])
        await flow.aclose()


def failures() -> str:
    """An error has a code; some say when to try again."""
    try:
        with Client("/run/weightd/weightd.sock", timeout=1.0) as client:
            client.infer("digits", 1)
    except RequestError as error:
        return f"{error.code} {error.retry_after}"
    except WeightdError as error:
        return str(error)
    return ""


def errors(client: Client) -> None:
    """What is wrong is found."""
    client.infer("digits", None)  # type: ignore[arg-type]
    client.infer("digits", {"x": None})  # type: ignore[dict-item]
    client.infer("digits", [1.0], timeout="5")  # type: ignore[arg-type]
    client.map("digits", 7)  # type: ignore[arg-type]
    client.model("digits")(1.0, 2.0)  # type: ignore[call-overload]
    client.model("digits")(1.0, x=2.0)  # type: ignore[call-overload]
    client.infer("digits", [1.0])["y"].no_such_method()  # type: ignore[attr-defined]
