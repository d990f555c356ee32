"""Load of one client with several requests in flight."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

from benchmarks.material import Arrays
from weightd import Client, Pending


def answers(
    client: Client, model: str, inputs: Sequence[Arrays], count: int, in_flight: int
) -> Iterator[tuple[int, Arrays]]:
    """Send `count` requests, each with the next of `inputs`; yield number and answer of each, in order."""
    under_way: deque[tuple[int, Pending]] = deque()
    for index in range(count):
        if len(under_way) == in_flight:
            first, pending = under_way.popleft()
            yield first, pending.result()
        under_way.append((index, client.submit(model, inputs[index % len(inputs)])))
    for index, pending in under_way:
        yield index, pending.result()
