"""What users do to a daemon, each in a process of its own (see `users.User`): ask, flood, poison, storm, crowd."""

from __future__ import annotations

import contextlib
import fcntl
import http.client
import itertools
import os
import resource
import select
import socket
import struct
import termios
import threading
import time
from collections import Counter, deque
from pathlib import Path
from typing import Any, Callable, Deque, Dict, List, Mapping, NamedTuple, Sequence, Tuple

import numpy as np
import zmq

from testkit.lingering import lingering
from testkit.users_child import ProcessContext
from weightd import Client, Pending, RequestError
from weightd_common import memfd
from weightd_protocol import limits
from weightd_protocol.codec import decode, encode
from weightd_protocol.framing import MAX_FRAMES, FrameReader, message_prefix
from weightd_protocol.messages.control import ModelMetadata
from weightd_protocol.messages.events import Events
from weightd_protocol.messages.inference import Cancel, Error, Infer, Parameters, RequestDescription, TensorSpec
from weightd_protocol.messages.metrics import Metrics
from weightd_protocol.messages.regions import InputLocation, OutputLocation, Regions, Register, Registered, Unregister
from weightd_protocol.messages.status import Status
from weightd_protocol.messages.types import TO_CLIENT

Arrays = Mapping[str, "np.ndarray[Any, Any]"]

NOTHING: Mapping[str, Any] = {}

OK = "OK"
WRONG = "WRONG"

# Seconds that an answer of a gateway may take.
_ANSWER_TIMEOUT_S = 30.0

# A close that takes longer than this waits for the peer of the socket.
_CLOSE_S = 1.0

# The first id of users with subordinate ids, as useradd gives them.
_FIRST_SUBORDINATE = 100_000

# Messages of a storm that are sent at once over a connection.
_GUST = 16

# An element that kills a worker of the model `models.negated`.
_KILLER = struct.pack("<q", -(2**63))

# The greeting of a ZMTP 3.0 client without security, see https://rfc.zeromq.org/spec/23, and its READY command.
_GREETING: bytes = b"\xff" + bytes(8) + b"\x7f\x03\x00NULL" + bytes(16 + 1 + 31)
ZMTP_GREETING: bytes = _GREETING + b"\x04\x1c\x05READY\x0bSocket-Type\x00\x00\x00\x06DEALER"

# The preface of HTTP/2 with empty SETTINGS.
HTTP2 = b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + bytes([0, 0, 0, 4, 0, 0, 0, 0, 0])


def http2_frame(kind: int, stream: int = 0, content: bytes = b"") -> bytes:
    """Return a frame of HTTP/2 without flags."""
    return len(content).to_bytes(3, "big") + bytes([kind, 0]) + stream.to_bytes(4, "big") + content


# What a flood of each kind begins with after the preface, and repeats.
HTTP2_FLOODS: Mapping[str, Tuple[bytes, bytes]] = {
    "CONTINUATION": (http2_frame(1, 1, b"\x82\x87"), 64 * http2_frame(9, 1, b"\x40\x04name\x7f\x80\x07" + 1000 * b"v")),
    "PING": (b"", 2000 * http2_frame(6, 0, bytes(8))),
    "SETTINGS": (b"", 2000 * http2_frame(4, 0, b"\0\4\0\0\xff\xff")),
}

STORMS: Mapping[str, Callable[[str, str], Any]] = {
    "status": lambda id, _: Status(id),
    "metadata": ModelMetadata,
    "cancel": lambda id, _: Cancel(id),
}


class LoadResult(NamedTuple):
    """What became of requests.

    Attributes:
        seconds: of each that was answered.
        outcomes: how many ended how: in OK, WRONG or the code of an error.
        busy_s: how long it took.
    """

    seconds: List[float]
    outcomes: Dict[str, int]
    busy_s: float


def ask(
    hands: ProcessContext,
    model: str,
    inputs: Sequence[Arrays],
    answers: Sequence[Arrays],
    seconds: float,
    min_count: int = 3,
) -> LoadResult:
    """Ask one request at a time for so long, and so many at least; each must have its answer bit by bit."""
    took: List[float] = []
    outcomes: Counter[str] = Counter()
    begin = time.perf_counter()
    number = 0
    while number < min_count or time.perf_counter() - begin < seconds:
        index = number % len(inputs)
        number += 1
        sent = time.perf_counter()
        try:
            answer = hands.client.infer(model, inputs[index])
        except RequestError as error:
            outcomes[error.code] += 1
            continue
        took.append(time.perf_counter() - sent)
        outcomes[OK if _same(answer, answers[index]) else WRONG] += 1
    return LoadResult(took, dict(outcomes), time.perf_counter() - begin)


def at_once(
    hands: ProcessContext, model: str, inputs: Sequence[Arrays], options: Mapping[str, Any] = NOTHING
) -> List[str]:
    """Send all of these at once, and return what each has ended in: OK, or the code of its error with the text."""
    pending = [hands.client.submit(model, each, **options) for each in inputs]
    return [_end_of(each, with_text=True) for each in pending]


def hold(
    hands: ProcessContext, model: str, inputs: Sequence[Arrays], options: Mapping[str, Any] = NOTHING
) -> List[str]:
    """As `at_once`; it tells when all are sent, and the daemon has taken them in."""
    pending = [hands.client.submit(model, each, **options) for each in inputs]
    # Messages of one connection are handled in their order.
    hands.client.server()
    hands.report("started")
    return [_end_of(each, with_text=True) for each in pending]


def with_another(hands: ProcessContext, model: str, inputs: Arrays) -> Any:
    """Return what one more client is answered, the only output of it, as a list."""
    with hands.another() as client:
        (answer,) = client.infer(model, inputs).values()
    return answer.tolist()


def time_of(hands: ProcessContext, model: str, inputs: Arrays, count: int) -> List[float]:
    """Return the seconds that each of so many requests takes, whose answers nobody looks at."""
    took: List[float] = []
    for _ in range(count):
        sent = time.perf_counter()
        hands.client.infer(model, inputs)
        took.append(time.perf_counter() - sent)
    return took


def ask_until_stopped(
    hands: ProcessContext, model: str, inputs: Sequence[Arrays], answers: Sequence[Arrays]
) -> LoadResult:
    """As `ask`, until it is told to end; it tells when its first answer has come."""
    took: List[float] = []
    outcomes: Counter[str] = Counter()
    begin = time.perf_counter()
    while not hands.stopping.is_set():
        asked = ask(hands, model, inputs, answers, 0.0, len(inputs))
        if not outcomes:
            hands.report("started")
        took += asked.seconds
        outcomes.update(asked.outcomes)
    return LoadResult(took, dict(outcomes), time.perf_counter() - begin)


def keep(
    hands: ProcessContext, model: str, inputs: Sequence[Arrays], in_flight: int, warm_up: int = 1, address: str = ""
) -> LoadResult:
    """Keep so many requests in flight until told to end, and leave them then.

    It tells when so many have ended, with 0 at once; what it returns is of those after that. Who is refused asks again
    at once.
    They go to `address`, where one is given. It tells when so many have ended; what it returns is of those after that.
    Who is refused asks again at once.
    """
    outcomes: Counter[str] = Counter()
    if not warm_up:
        hands.report("started")
    begin = time.perf_counter()
    with Client(address, **hands.options) if address else hands.another() as client:
        pending: Deque[Pending] = deque()
        number = ended = 0
        while not hands.stopping.is_set():
            while len(pending) < in_flight and not hands.stopping.is_set():
                pending.append(client.submit(model, inputs[number % len(inputs)]))
                number += 1
            outcomes[_end_of(pending.popleft())] += 1
            ended += 1
            if ended == warm_up:
                hands.report("started")
                outcomes.clear()
                begin = time.perf_counter()
        busy_s = time.perf_counter() - begin
    return LoadResult([], dict(outcomes), busy_s)


def poison(hands: ProcessContext, model: str, inputs: Sequence[Arrays], in_flight: int) -> LoadResult:
    """Send requests that kill workers, each another one, until told to end.

    Each of `inputs` gets a number added, so that none is known already.
    """
    outcomes: Counter[str] = Counter()
    begin = time.perf_counter()
    with hands.another() as client:
        pending: Deque[Pending] = deque()
        number = 0
        while not hands.stopping.is_set():
            while len(pending) < in_flight:
                number += 1
                given = inputs[number % len(inputs)]
                changed = {name: np.append(array, np.array([number], array.dtype)) for name, array in given.items()}
                pending.append(client.submit(model, changed))
            code = _end_of(pending.popleft())
            if not outcomes:
                hands.report("started")
            outcomes[code] += 1
    return LoadResult([], dict(outcomes), time.perf_counter() - begin)


def storm(hands: ProcessContext, path: str, kind: str, model: str, connections: int = 4) -> Dict[str, int]:
    """Send messages of a kind over some connections to the unix socket at `path`, as many as go, until told to end.

    Each connection has a bounded number of them unanswered, and reads the answers without a look at them. Return how
    many were sent.
    """
    threads: List[threading.Thread] = []
    sent: List[int] = []
    for number in range(connections):
        thread = threading.Thread(target=_blow, args=(hands, path, kind, model, number, sent))
        thread.start()
        threads.append(thread)
    hands.report("started")
    for thread in threads:
        thread.join()
    return {"sent": sum(sent)}


def _blow(hands: ProcessContext, path: str, kind: str, model: str, number: int, sent: List[int]) -> None:
    """One connection; one that is ended is followed by another."""
    count = 0
    while not hands.stopping.is_set():
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as peer:
            peer.connect(path)
            peer.settimeout(0.2)
            while not hands.stopping.is_set():
                # After each gust one question with an answer, by which it is seen that all before it are done.
                gust = [STORMS[kind](f"{number}.{count + each}", model) for each in range(_GUST)]
                gust.append(ModelMetadata(f"last.{number}.{count}", model))
                peer.sendall(b"".join(map(_framed, gust)))
                count += _GUST
                _read_up_to(peer, f"last.{number}.{count - _GUST}".encode(), hands)
    sent.append(count)


def _read_up_to(peer: socket.socket, last: bytes, hands: ProcessContext) -> None:
    tail = b""
    while last not in tail and not hands.stopping.is_set():
        with contextlib.suppress(socket.timeout):
            part = peer.recv(1 << 20)
            if not part:
                raise ConnectionError("hung up")
            tail = tail[-len(last) :] + part


def hold_connections(
    hands: ProcessContext, addresses: Sequence[Any], count: int, greetings: Sequence[bytes] = (b"",)
) -> Dict[str, int]:
    """Open so many connections to these sockets, say one of these on each, and hold all until told to end."""
    _allow_descriptors(count + 100)
    outcomes: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        for number in range(count):
            address = addresses[number % len(addresses)]
            peer = stack.enter_context(socket.socket(_family(address)))
            peer.settimeout(5.0)
            try:
                peer.connect(address)
                peer.sendall(greetings[number % len(greetings)])
                outcomes["connected"] += 1
            except OSError as error:
                outcomes[type(error).__name__] += 1
        hands.report("started")
        hands.stopping.wait()
    return dict(outcomes)


def connect_from(
    hands: ProcessContext, address: Any, source: Any = None, device: str = "", ends: str = "", linger_s: int = 0
) -> None:
    """Connect to a TCP address, send a byte, and hold the connection until told to end.

    Args:
        hands: of the process.
        address: of the listener.
        source: the address to connect from; None: the kernel chooses.
        device: name of the interface that the socket is bound to; "" for none.
        ends: what happens after the byte is sent: "half" sends a FIN, "close" closes the socket.
        linger_s: how long the kernel keeps a closed socket that waits for the FIN of the other end; 0 for its default.
    """
    with socket.socket(_family(address)) as peer:
        peer.settimeout(5.0)
        if device:
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, device.encode())
        if source is not None:
            peer.bind(source)
        if linger_s:
            peer.setsockopt(socket.IPPROTO_TCP, socket.TCP_LINGER2, linger_s)
        peer.connect(address)
        peer.sendall(b"x")
        if ends == "half":
            peer.shutdown(socket.SHUT_WR)
        elif ends == "close":
            peer.close()
        hands.report("started")
        hands.stopping.wait()


def _family(address: Any) -> int:
    if isinstance(address, str):
        return socket.AF_UNIX
    return socket.AF_INET6 if ":" in address[0] else socket.AF_INET


def connect_as_many_users(hands: ProcessContext, addresses: Sequence[str], count: int) -> Dict[str, int]:
    """Hold so many connections to these Unix sockets, each of another user, and go on to replace the oldest.

    Root does this in the place of a user with subordinate ids. Return how many connections were opened and failed.
    """
    _allow_descriptors(count + 100)
    outcomes: Counter[str] = Counter()
    held: Deque[socket.socket] = deque()
    number = 0
    while not hands.stopping.is_set():
        os.seteuid(_FIRST_SUBORDINATE + number % 65536)
        peer = socket.socket(socket.AF_UNIX)
        peer.setblocking(False)
        try:
            peer.connect(addresses[number % len(addresses)])
            held.append(peer)
            outcomes["connected"] += 1
        except OSError as error:
            peer.close()
            outcomes[type(error).__name__] += 1
            time.sleep(0.0005)
        os.seteuid(0)
        number += 1
        if len(held) > count:
            held.popleft().close()
        if number == count:
            hands.report("started")
    for each in held:
        each.close()
    return dict(outcomes)


def reconnect(hands: ProcessContext, address: Any, says: bytes = b"") -> Dict[str, int]:
    """Open and close connections to a socket until told to stop; return how many were opened and failed.

    Two threads do so. Each connection sends `says` before it is closed.
    """
    outcomes: Counter[str] = Counter()
    threads = [threading.Thread(target=_reconnect, args=(hands, address, says, outcomes)) for _ in range(2)]
    for thread in threads:
        thread.start()
    hands.report("started")
    for thread in threads:
        thread.join()
    return dict(outcomes)


def send_millions_of_frames(hands: ProcessContext, address: str) -> Dict[str, int]:
    """Send messages of 20 million empty frames to a ZeroMQ listener until told to stop; return what became of them."""
    outcomes: Counter[str] = Counter()
    part = b"\1\0" * 100_000
    hands.report("started")
    while not hands.stopping.is_set():
        with socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(1.0)
            try:
                peer.connect(address)
                peer.sendall(ZMTP_GREETING)
                for _ in range(200):
                    peer.sendall(part)
                outcomes["sent"] += 1
            except OSError as error:
                outcomes[type(error).__name__] += 1
    return dict(outcomes)


def request_and_cancel(
    hands: ProcessContext, address: str, model: str, inputs: Arrays, connections: int = 4
) -> Dict[str, int]:
    """Send requests, each with its cancellation, over some connections as fast as they go, until told to stop.

    The address is that of the Unix socket or of a ZeroMQ listener. Answers are read and dropped. Return how many
    requests were sent.
    """
    specs = tuple(TensorSpec(name, "FP32", array.shape) for name, array in inputs.items())
    pairs: List[bytes] = []
    for number in range(500):
        request = [*encode(Infer(str(number), RequestDescription(model, specs))), *map(_bytes_of, inputs.values())]
        pairs += [_as_sent(address, request), _as_sent(address, encode(Cancel(str(number))))]
    return _repeat(hands, address, b"".join(pairs), connections)


def ask_for(hands: ProcessContext, address: str, kind: str, connections: int = 4) -> Dict[str, int]:
    """Ask for the status, the metrics or the events over some connections as fast as answers are read.

    The address is that of the Unix socket or of a ZeroMQ listener. Return how many requests were sent.
    """
    message: Any = {"status": Status, "metrics": Metrics, "events": Events}[kind]
    return _repeat(hands, address, _as_sent(address, encode(message("1"))) * 500, connections)


def compute(hands: ProcessContext) -> Dict[str, int]:
    """Keep one core busy and send nothing until the test stops this load."""
    hands.report("started")
    while not hands.stopping.is_set():
        sum(range(10_000))
    return {}


def _as_sent(address: str, frames: Sequence[bytes]) -> bytes:
    return _stream_message(frames) if address.endswith(".unix") else _zmtp_message(frames)


def _repeat(hands: ProcessContext, address: str, messages: bytes, connections: int) -> Dict[str, int]:
    """Send 500 messages again and again over some connections until told to stop; return how many were sent."""
    data = (b"" if address.endswith(".unix") else ZMTP_GREETING), messages
    sent: List[int] = []
    threads = [threading.Thread(target=_repeat_one, args=(hands, address, data, sent)) for _ in range(connections)]
    for thread in threads:
        thread.start()
    hands.report("started")
    for thread in threads:
        thread.join()
    return {"sent": sum(sent)}


def _repeat_one(hands: ProcessContext, address: str, data: Tuple[bytes, bytes], sent: List[int]) -> None:
    """One connection; one that is ended is followed by another."""
    begin, pairs = data
    while not hands.stopping.is_set():
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as peer:
            peer.connect(address)
            peer.sendall(begin)
            peer.setblocking(False)
            rest = memoryview(pairs)
            while not hands.stopping.is_set():
                readable, writable, _ = select.select([peer], [peer], [], 0.1)
                if readable and not peer.recv(1 << 20):
                    break
                if writable:
                    rest = rest[peer.send(rest[: 1 << 18]) :] or memoryview(pairs)
                    sent.append(500 if len(rest) == len(pairs) else 0)


def end_many(hands: ProcessContext, path: str, model: str, inputs: Arrays, count: int, way: str) -> Dict[str, int]:
    """Queue `count` requests over the Unix socket and end them all at one moment, again and again until told to stop.

    They end when the connection closes ("close"), at their deadline ("deadline"), or by one cancellation, as all have
    the same id ("cancel"). With "expire", they stay in the queue, and requests with a deadline in 1 us follow. Return
    how many requests were sent.
    """
    specs = tuple(TensorSpec(name, "FP32", array.shape) for name, array in inputs.items())
    description, tensors = RequestDescription(model, specs), [*map(_bytes_of, inputs.values())]

    def requests(seconds: float, count: int = 50) -> bytes:
        parameters = Parameters(timeout_us=max(1, int(1e6 * seconds)))
        return _stream_message([*encode(Infer("1", description, parameters)), *tensors]) * count

    sent = 0
    hands.report("started")
    while not hands.stopping.is_set():
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as peer:
            peer.connect(path)
            peer.settimeout(2.0)
            end = time.monotonic() + 1.0
            for _ in range(count // 50):
                peer.sendall(requests(end - time.monotonic() if way == "deadline" else 600.0))
            sent += count
            if way == "cancel":
                peer.sendall(_framed(Cancel("1")))
            while way == "expire" and not hands.stopping.is_set():
                peer.sendall(requests(1e-6))
                sent += 50
                while select.select([peer], [], [], 0)[0] and peer.recv(1 << 20):
                    pass
            if way != "close":
                hands.stopping.wait(max(0.0, end + 0.2 - time.monotonic()))
        hands.stopping.wait(0.1)
    return {"sent": sent}


def _zmtp_message(frames: Sequence[bytes]) -> bytes:
    last = len(frames) - 1
    return b"".join(struct.pack(">BQ", 2 | (index < last), len(frame)) + frame for index, frame in enumerate(frames))


def _stream_message(frames: Sequence[bytes]) -> bytes:
    return message_prefix(frames) + b"".join(frames)


def _bytes_of(array: np.ndarray[Any, Any]) -> bytes:
    return array.tobytes()


def _reconnect(hands: ProcessContext, address: Any, says: bytes, outcomes: Counter[str]) -> None:
    while not hands.stopping.is_set():
        with socket.socket(_family(address)) as peer:
            # Where the backlog is full, `connect` waits, for no longer than this.
            peer.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, struct.pack("@ll", 1, 0))
            try:
                peer.connect(address)
                if says:
                    peer.send(says)
                outcomes["connected"] += 1
            except OSError as error:
                outcomes[type(error).__name__] += 1


class GatewayRequest(NamedTuple):
    """A request to a gateway, as bytes.

    Attributes:
        protocol: "http" or "grpc".
        port: of the gateway on this host.
        path: of the method.
        headers: of HTTP, or the metadata of gRPC.
        requests: the bodies, which are asked in turn.
        ends: how the answer to each of them ends.
    """

    protocol: str
    port: int
    path: str
    headers: Dict[str, str]
    requests: Sequence[bytes]
    ends: Sequence[bytes]


def ask_gateway(hands: ProcessContext, question: GatewayRequest, seconds: float) -> LoadResult:
    """Ask a gateway one request at a time for so long, over one connection."""
    took: List[float] = []
    outcomes: Counter[str] = Counter()
    with contextlib.ExitStack() as stack:
        send = _sender(question, stack)
        send(question.requests[0])
        begin = time.perf_counter()
        number = 0
        while time.perf_counter() - begin < seconds:
            index = number % len(question.requests)
            number += 1
            sent = time.perf_counter()
            try:
                code, answer = send(question.requests[index])
            except Exception as error:  # noqa: BLE001 - each library has its own
                outcomes[type(error).__name__] += 1
                continue
            if code != OK:
                outcomes[code] += 1
                continue
            took.append(time.perf_counter() - sent)
            outcomes[OK if answer.endswith(question.ends[index]) else WRONG] += 1
    return LoadResult(took, dict(outcomes), time.perf_counter() - begin)


def _sender(question: GatewayRequest, stack: contextlib.ExitStack) -> Callable[[bytes], Tuple[str, bytes]]:
    """Return what sends a request, and returns the code and the content of the answer."""
    if question.protocol == "grpc":
        import grpc

        channel: Any = stack.enter_context(grpc.insecure_channel(f"127.0.0.1:{question.port}"))
        call = channel.unary_unary(question.path)
        metadata = tuple(question.headers.items())
        return lambda request: (OK, call(request, metadata=metadata, timeout=_ANSWER_TIMEOUT_S))
    connection = http.client.HTTPConnection("127.0.0.1", question.port, timeout=_ANSWER_TIMEOUT_S)
    stack.callback(connection.close)

    def send(request: bytes) -> Tuple[str, bytes]:
        connection.request("POST", question.path, request, question.headers)
        response = connection.getresponse()
        answer = response.read()
        return OK if response.status == 200 else str(response.status), answer

    return send


def call_grpc(
    hands: ProcessContext, port: int, path: str, message: bytes, metadata: Sequence[Tuple[str, str]], calls: int = 4
) -> Dict[str, int]:
    """Have some calls with the same message under way until told to stop; return how many calls had which end."""
    import grpc

    outcomes: Counter[str] = Counter()
    with grpc.insecure_channel(f"127.0.0.1:{port}") as channel:
        call: Any = channel.unary_unary(path)

        def keep_calling() -> None:
            while not hands.stopping.is_set():
                try:
                    call(message, metadata=metadata, timeout=_ANSWER_TIMEOUT_S)
                    outcomes[OK] += 1
                except grpc.RpcError as error:
                    outcomes[error.code().name] += 1

        threads = [threading.Thread(target=keep_calling) for _ in range(calls)]
        for thread in threads:
            thread.start()
        hands.report("started")
        for thread in threads:
            thread.join()
    return dict(outcomes)


def pour(hands: ProcessContext, port: int, begins: bytes, repeats: bytes, connections: int = 2) -> Dict[str, int]:
    """Send the same bytes again and again over some connections to a port of this host until told to stop.

    Each connection begins with `begins`; one that is closed is followed by another. What is answered is read, and not
    looked at. Return how many connections and megabytes there were.
    """
    counts: Counter[str] = Counter()
    threads = [threading.Thread(target=_pour, args=(hands, port, begins, repeats, counts)) for _ in range(connections)]
    for thread in threads:
        thread.start()
    hands.report("started")
    for thread in threads:
        thread.join()
    return {"connections": counts["connections"], "megabytes": counts["bytes"] // 1_000_000}


def _pour(hands: ProcessContext, port: int, begins: bytes, repeats: bytes, counts: Counter[str]) -> None:
    while not hands.stopping.is_set():
        with contextlib.suppress(OSError), socket.socket() as peer:
            peer.settimeout(1.0)
            peer.connect(("127.0.0.1", port))
            counts["connections"] += 1
            peer.sendall(begins)
            peer.setblocking(False)
            view = memoryview(repeats)
            while not hands.stopping.is_set():
                readable, writable, _ = select.select([peer], [peer], [], 0.1)
                if readable and not peer.recv(1 << 16):
                    break
                if writable:
                    sent = peer.send(view)
                    counts["bytes"] += sent
                    view = view[sent:] or memoryview(repeats)


def pass_unclosable(hands: ProcessContext, path: str) -> Dict[str, int]:
    """Send descriptors whose close waits, to the Unix socket at `path`, until told to stop; return how that ended.

    The first is a TCP socket with unsent data and SO_LINGER; then come as many of /dev/null as go.
    """
    outcomes: Counter[str] = Counter()
    with _passed_lingering(path), Path("/dev/null").open("rb") as null:
        for _ in range(100):
            outcomes[pass_descriptor(path, null.fileno())] += 1
        hands.report("started")
        while not hands.stopping.is_set():
            outcomes[pass_descriptor(path, null.fileno())] += 1
    return dict(outcomes)


def _passed_lingering(path: str) -> socket.socket:
    """Leave the receiver at `path` with the last descriptor of a socket whose close waits; return that socket's peer.

    The close that waits is that of whoever closes last. If that is this process, it ends the wait and tries again.
    """
    while True:
        lingers, held = lingering(600)
        is_closed = threading.Event()
        thread = threading.Thread(target=_pass_and_close, args=(path, lingers, is_closed))
        thread.start()
        if is_closed.wait(_CLOSE_S):
            thread.join()
            return held
        # Without its peer the socket waits for nothing.
        held.close()
        thread.join()
        lingers.close()


def _pass_and_close(path: str, passed: socket.socket, is_closed: threading.Event) -> None:
    def close() -> None:
        passed.close()
        is_closed.set()

    pass_descriptor(path, passed.fileno(), close)


def hoard(
    hands: ProcessContext, path: str, model: str, connections: int = 2000, questions: int = 300
) -> Dict[str, int]:
    """Ask over many connections to the Unix socket at `path`, read no answer, and end the half that sends.

    Return how many connections were made, and the bytes of answers that nobody has read, when told to stop.
    """
    _allow_descriptors(connections + 100)
    outcomes: Counter[str] = Counter()
    gust = b"".join(_framed(ModelMetadata(str(number), model)) for number in range(questions))
    unread = bytearray(4)
    with contextlib.ExitStack() as stack:
        peers: List[socket.socket] = []
        for number in range(connections):
            if number == connections // 8:
                hands.report("started")
            if hands.stopping.wait(1 / 100):
                break
            peer = stack.enter_context(socket.socket(socket.AF_UNIX))
            peer.setblocking(False)
            try:
                peer.connect(path)
                peer.send(gust)
                peer.shutdown(socket.SHUT_WR)
            except OSError as error:
                outcomes[type(error).__name__] += 1
            else:
                peers.append(peer)
        hands.stopping.wait()
        for peer in peers:
            fcntl.ioctl(peer.fileno(), termios.FIONREAD, unread)
            outcomes["unread bytes"] += struct.unpack("@i", unread)[0]
        outcomes["connected"] += len(peers)
    return dict(outcomes)


def _allow_descriptors(count: int) -> None:
    _, hard_limit = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (min(hard_limit, count), hard_limit))


def pass_descriptor(path: str, descriptor: int, on_sent: Callable[[], object] = lambda: None) -> str:
    """Send a descriptor with a message that is none; return how that ended."""
    rights = struct.pack("@i", descriptor)
    try:
        with socket.socket(socket.AF_UNIX) as peer:
            peer.settimeout(1.0)
            peer.connect(path)
            peer.sendmsg([message_prefix([b"x"]) + b"x"], [(socket.SOL_SOCKET, socket.SCM_RIGHTS, rights)])
            on_sent()
            peer.recv(1000)
    except OSError as error:
        return type(error).__name__
    return "sent"


def overlong(hands: ProcessContext, address: str) -> Dict[str, int]:
    """Send messages of too many frames to a ZeroMQ listener until told to stop, each over a connection of its own.

    Return how many were refused, after which the listener closes the connection.
    """
    refused = 0
    with zmq.Context() as context:
        hands.report("started")
        while not hands.stopping.is_set():
            with context.socket(zmq.DEALER) as peer:
                peer.setsockopt(zmq.LINGER, 0)
                peer.connect(f"ipc://{address}")
                peer.send_multipart([b""] * (MAX_FRAMES + 1))
                refused += peer.poll(1000) != 0
    return {"refused": refused}


def garbage(hands: ProcessContext, address: str, seconds: float = float("inf")) -> Dict[str, int]:
    """Send bytes that are no message over one connection to the Unix socket after another; return how many ended."""
    ended, begin = 0, time.monotonic()
    hands.report("started")
    while not hands.stopping.is_set() and (not ended or time.monotonic() < begin + seconds):
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as peer:
            peer.connect(address)
            peer.settimeout(1.0)
            peer.sendall(b"\xff" * 64)
            while peer.recv(4096):
                pass
            ended += 1
    return {"ended": ended}


def share_holes(hands: ProcessContext, path: str, model: str, nbytes: int, max_open: int) -> Dict[str, int]:
    """Have workers read and write memory that was never written to, until told to stop.

    Each request of `model`, whose one output is as large as its input, names a memfd of its own of twice `nbytes`,
    which is unregistered then; the last `max_open` descriptors stay open. Return the number of requests and how many
    bytes of memory these descriptors have: all of that was allocated by the service.
    """
    descriptors: Deque[int] = deque()
    outcomes: Counter[str] = Counter()
    count = 0
    spec = TensorSpec("x", "FP32", (1, nbytes // 4))
    try:
        with SharedMemoryPeer(path) as peer:
            while not hands.stopping.is_set():
                if len(descriptors) == max_open:
                    os.close(descriptors.popleft())
                descriptors.append(memfd.create(2 * nbytes))
                region = peer.register(descriptors[-1])
                regions = Regions((InputLocation(0, region, 0),), (OutputLocation(0, region, nbytes, nbytes),))
                request = Infer(f"hole {count}", RequestDescription(model, (spec,)), Parameters(regions=regions))
                answer = peer.ask(request)
                outcomes[answer.code if isinstance(answer, Error) else OK] += 1
                peer.send(Unregister(f"done {count}", region))
                count += 1
                if count == 2:
                    hands.report("started")
            allocated = sum(os.fstat(each).st_blocks * 512 for each in descriptors)
            return {**outcomes, "bytes": allocated}
    finally:
        for each in descriptors:
            os.close(each)


def leave_unread(hands: ProcessContext, path: str, model: str, connections: int) -> Dict[str, int]:
    """Fill the kernel's buffers of connections: ask on each as long as that is taken, and read no answer.

    Return how many messages were sent, and how often a connection was closed by the daemon.
    """
    return _send_and_read_nothing(hands, path, _framed(ModelMetadata("unread", model)) * _GUST, connections)


def send_empty_frames(hands: ProcessContext, path: str, connections: int) -> Dict[str, int]:
    """As `leave_unread`, with messages of as many frames as one may have, all of them empty."""
    frames = [b""] * (limits.MAX_HEADER_FRAMES + limits.MAX_TENSORS)
    return _send_and_read_nothing(hands, path, message_prefix(frames) * _GUST, connections)


def _send_and_read_nothing(hands: ProcessContext, path: str, gust: bytes, connections: int) -> Dict[str, int]:
    """Send a gust of messages again and again over each connection; one that is closed is followed by another."""
    outcomes: Counter[str] = Counter()
    peers: List[socket.socket] = []
    hands.report("started")
    while not hands.stopping.is_set():
        if len(peers) < connections:
            peer = socket.socket(socket.AF_UNIX)
            peer.settimeout(0.05)
            with contextlib.suppress(OSError):
                peer.connect(path)
            peers.append(peer)
        for peer in [*peers]:
            try:
                peer.sendall(gust)
                outcomes["sent"] += _GUST
            except socket.timeout:
                continue
            except OSError:
                outcomes["closed"] += 1
                peers.remove(peer)
                peer.close()
            if hands.stopping.is_set():
                break
    for peer in peers:
        peer.close()
    return dict(outcomes)


def frame_innocent(
    hands: ProcessContext, path: str, model: str, innocent: Sequence[np.ndarray[Any, Any]]
) -> Dict[str, int]:
    """Send contents in shared memory that kill workers by their last element, and restore that when the error comes.

    Then the memory has a content that others send. Return how many requests ended how.
    """
    outcomes: Counter[str] = Counter()
    for array in itertools.cycle(innocent):
        descriptor = memfd.create(array.nbytes)
        try:
            with SharedMemoryPeer(path) as peer:
                os.pwrite(descriptor, array.tobytes(), 0)
                os.pwrite(descriptor, _KILLER, array.nbytes - len(_KILLER))
                regions = Regions((InputLocation(0, peer.register(descriptor), 0),))
                description = RequestDescription(model, (TensorSpec("a", "INT64", array.shape),))
                answer = peer.ask(Infer("killer", description, Parameters(regions=regions)))
                os.pwrite(descriptor, array.tobytes()[-len(_KILLER) :], array.nbytes - len(_KILLER))
                outcomes[answer.code if isinstance(answer, Error) else OK] += 1
                # The daemon reads as long as the connection, and with it the region, is there.
                time.sleep(0.05)
        finally:
            os.close(descriptor)
        if sum(outcomes.values()) == 1:
            hands.report("started")
        if hands.stopping.is_set():
            break
    return dict(outcomes)


class SharedMemoryPeer:
    """A connection to a Unix socket whose messages are made by the caller, one at a time.

    Args:
        path: of the socket.
    """

    def __init__(self, path: str) -> None:
        self._socket = socket.socket(socket.AF_UNIX)
        self._socket.connect(path)
        self._socket.settimeout(60.0)
        self._incoming = FrameReader()

    def __enter__(self) -> SharedMemoryPeer:
        return self

    def __exit__(self, *_: object) -> None:
        self._socket.close()

    def register(self, descriptor: int) -> str:
        """Register memory, and return the name of the region."""
        rights = [(socket.SOL_SOCKET, socket.SCM_RIGHTS, struct.pack("i", descriptor))]
        self._socket.sendmsg([_framed(Register("register"))], rights)
        answer = self.receive()
        assert isinstance(answer, Registered), answer
        return answer.region

    def ask(self, request: Any) -> Any:
        """Send a request, and return the answer without its tensors."""
        self.send(request)
        return self.receive()

    def send(self, message: Any) -> None:
        """Send a message."""
        self._socket.sendall(_framed(message))

    def receive(self) -> Any:
        """Return the next message without its tensors."""
        while True:
            data = self._socket.recv(1 << 20)
            if not data:
                raise ConnectionError("the daemon has closed the connection")
            for received in self._incoming.receive(data):
                return decode(received.frames, TO_CLIENT)


def slow_headers(hands: ProcessContext, address: str, model: str) -> Dict[str, int]:
    """Send `infer` messages with headers of 64 KiB that are costly to unpack, until told to stop; return how many.

    The address is `unix://PATH`, or one of ZeroMQ.
    """
    messages = _slow_headers(model)
    sent = 0
    with contextlib.ExitStack() as stack:
        send, receive = _unix_peer(stack, address) if address.startswith("unix://") else _zmq_peer(stack, address)
        hands.report("started")
        while not hands.stopping.is_set():
            for each in messages:
                send(each)
            sent += len(messages)
            receive(len(messages), hands)
    return {"sent": sent}


def _slow_headers(model: str) -> List[List[bytes]]:
    """Return messages full of maps, extension types, texts and lists: in the envelope, and in the description."""
    units = (b"\x80", b"\x81\xa1x\xc0", b"\xd4\x05x", b"\xd6\xff\x00\x00\x00\x01", b"\xa2\xc3\xa9", b"\x90")
    lists = [(b"\xdc\x00\x3c" + unit * 60, 65_000 // (3 + 60 * len(unit))) for unit in units]
    fills = [b"\xdc" + count.to_bytes(2, "big") + each * count for each, count in lists]
    plain = encode(Cancel("7"))[0].replace(b"\xa6cancel", b"\xa5infer")
    name = model.encode()
    described = b"\x82\xaamodel_name" + bytes([0xA0 + len(name)]) + name + b"\xa6inputs"
    return [
        *[[b"\x84" + plain[1:] + b"\xaaparameters" + fill] for fill in fills],
        *[[plain, described + fill] for fill in fills],
    ]


Peer = Tuple[Callable[[Sequence[bytes]], Any], Callable[[int, ProcessContext], Any]]


def _unix_peer(stack: contextlib.ExitStack, address: str) -> Peer:
    peer = stack.enter_context(socket.socket(socket.AF_UNIX))
    peer.connect(address[len("unix://") :])
    peer.settimeout(0.2)
    incoming = FrameReader()

    def receive(count: int, hands: ProcessContext) -> None:
        while count > 0 and not hands.stopping.is_set():
            with contextlib.suppress(socket.timeout):
                count -= len(incoming.receive(peer.recv(1 << 20)))

    def send(frames: Sequence[bytes]) -> None:
        data = memoryview(message_prefix(frames) + b"".join(frames))
        while data:
            with contextlib.suppress(socket.timeout):
                data = data[peer.send(data) :]

    return send, receive


def _zmq_peer(stack: contextlib.ExitStack, address: str) -> Peer:
    peer = stack.enter_context(stack.enter_context(zmq.Context()).socket(zmq.DEALER))
    peer.linger = 0
    peer.connect(address)

    def receive(count: int, hands: ProcessContext) -> None:
        while count > 0 and not hands.stopping.is_set():
            if peer.poll(200):
                peer.recv_multipart()
                count -= 1

    return peer.send_multipart, receive


def _framed(message: Any) -> bytes:
    frames = encode(message)
    return message_prefix(frames) + b"".join(frames)


def _end_of(pending: Pending, *, with_text: bool = False) -> str:
    try:
        pending.result()
    except RequestError as error:
        return f"{error.code} {error}" if with_text else error.code
    return OK


def _same(answer: Arrays, expected: Arrays) -> bool:
    return answer.keys() == expected.keys() and all(
        (answer[name].dtype, answer[name].shape) == (array.dtype, array.shape)
        and answer[name].tobytes() == array.tobytes()
        for name, array in expected.items()
    )
