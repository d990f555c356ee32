"""Messages of more frames than a message may have: what they cost others."""

from __future__ import annotations

import pytest
import zmq

from weightd.daemon.gate.reader import Reader
from weightd.protocol.framing import MAX_FRAMES

# Of each of three messages.
COUNTS = [1, 2, MAX_FRAMES, MAX_FRAMES + 1, 5_000, 20_000]


@pytest.mark.parametrize("count", COUNTS)
def test_messages_of_any_length_are_told_apart_and_what_is_too_much_is_dropped_in_portions(count: int) -> None:
    with zmq.Context() as context, context.socket(zmq.ROUTER) as router, context.socket(zmq.DEALER) as client:
        router.bind("inproc://reader")
        client.connect("inproc://reader")
        for _ in range(3):
            client.send_multipart([b"%d" % each for each in range(count)])
        client.send_multipart([b"the", b"end", b"of", b"all"])
        reader = Reader(router)
        whole: list[int] = []
        reads = 0
        while not whole or whole[-1] != 4:
            message = reader.read()
            if message is not None:
                whole.append(0 if reader.has_rest else len(message[1]))
            reads += 1
    assert whole == [count if count <= MAX_FRAMES else 0] * 3 + [4]
    # The loop comes to its other work meanwhile.
    assert reads > count // 2000
