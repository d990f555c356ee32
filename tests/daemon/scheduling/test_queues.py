from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from weightd_daemon.scheduling.queues import PRIORITY_LEVEL_S, PriorityQueue, sort_key
from weightd_daemon.scheduling.request import Request
from weightd_protocol.messages.inference import RequestDescription


def request(number: int, arrived: float, level: int) -> Request:
    return Request(
        number, b"%d" % (number % 2), "x", RequestDescription("m", ()), (), arrived, 1e9, number, priority_level=level
    )


@given(
    st.lists(
        st.tuples(st.sampled_from([0.0, 0.0, 1.0, PRIORITY_LEVEL_S, 3 * PRIORITY_LEVEL_S]), st.integers(0, 2)),
        max_size=20,
    )
)
def test_orders_by_priority_and_arrival(arrivals: list[tuple[float, int]]) -> None:
    queue, now = PriorityQueue(3), 0.0
    requests: list[Request] = []
    for number, (later, level) in enumerate(arrivals):
        now += later
        requests.append(request(number, now, level))
        queue.append(requests[-1])
    assert (queue.count, queue.nbytes) == (len(requests), sum(each.nbytes for each in requests))
    assert [*queue] == sorted(requests, key=sort_key)
    mine = [each for each in requests if each.client == b"1"]
    assert sorted(queue.take_of_client(b"1"), key=sort_key) == sorted(mine, key=sort_key)
    others = [queue.take() for _ in range(queue.count)]
    assert others == sorted((each for each in requests if each not in mine), key=sort_key)
    queue.put_back(others)
    assert [*queue] == others


def test_lower_priority_waits_a_bounded_time() -> None:
    queue = PriorityQueue(2)
    low = request(0, 0.0, 1)
    high = [request(number, PRIORITY_LEVEL_S * number / 4, 0) for number in range(1, 9)]
    for each in (*high, low):
        queue.append(each)
    # At equal effective arrival times, the request that arrived first goes first.
    assert [queue.take().number for _ in range(5)] == [1, 2, 3, 0, 4]
