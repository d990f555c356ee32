"""Load generators for processes of other users (see `users.User`): valid requests, floods, poison and hostile input."""

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

# Timeout of a gateway's response, in seconds.
_ANSWER_TIMEOUT_S = 30.0

# A close that takes longer than this blocks on the peer of the socket.
_CLOSE_S = 1.0

# The first id of users with subordinate ids, as useradd gives them.
_FIRST_SUBORDINATE = 100_000

# Number of messages that a storm sends at once over a connection.
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


# Kind of flood: the bytes after the preface, and the bytes that the flood repeats.
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
    """Latencies and outcomes of a series of requests.

    Attributes:
        seconds: latency of each successful request.
        outcomes: number of requests by outcome: OK, WRONG or an error code.
        busy_s: duration of the series.
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
    """Send one request at a time for a duration, and at least a minimum number; compare each answer bit by bit."""
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
    """Send all requests at once; return the outcome of each: OK, or the error code and text."""
    pending = [hands.client.submit(model, each, **options) for each in inputs]
    return [_end_of(each, with_text=True) for each in pending]


def hold(
    hands: ProcessContext, model: str, inputs: Sequence[Arrays], options: Mapping[str, Any] = NOTHING
) -> List[str]:
    """Do the same as `at_once`, and report when the daemon has received all requests."""
    pending = [hands.client.submit(model, each, **options) for each in inputs]
    # The daemon handles the messages of a connection in order.
    hands.client.server()
    hands.report("started")
    return [_end_of(each, with_text=True) for each in pending]


def with_another(hands: ProcessContext, model: str, inputs: Arrays) -> Any:
    """Return the only output of the model as a list, requested by an additional client."""
    with hands.another() as client:
        (answer,) = client.infer(model, inputs).values()
    return answer.tolist()


def time_of(hands: ProcessContext, model: str, inputs: Arrays, count: int) -> List[float]:
    """Return the latency in seconds of each of `count` requests; the answers are not checked."""
    took: List[float] = []
    for _ in range(count):
        sent = time.perf_counter()
        hands.client.infer(model, inputs)
        took.append(time.perf_counter() - sent)
    return took


def ask_until_stopped(
    hands: ProcessContext, model: str, inputs: Sequence[Arrays], answers: Sequence[Arrays]
) -> LoadResult:
    """Do the same as `ask` until stopped; report when the first answer has arrived."""
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
    """Keep a number of requests in flight until stopped, and abandon the remaining ones.

    The function reports once `warm_up` requests have ended, with 0 at once; its result covers only later requests. It
    repeats rejected requests at once. The requests go to `address` if it is given.
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
    """Send different requests that crash workers, until stopped.

    A number is added to each of `inputs`, so that the daemon knows none of them.
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
    """Send messages of a kind over several connections to the Unix socket at `path` as fast as possible.

    Each connection has a bounded number of unanswered messages, and drops the answers. The function ends when
    stopped, and returns the number of messages sent.
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
    """Use one connection at a time until stopped; replace it when the daemon closes it."""
    count = 0
    while not hands.stopping.is_set():
        with contextlib.suppress(OSError), socket.socket(socket.AF_UNIX) as peer:
            peer.connect(path)
            peer.settimeout(0.2)
            while not hands.stopping.is_set():
                # A request with an answer follows each gust; its answer shows that the daemon has handled the gust.
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
    """Open a number of connections to these sockets, send one of the texts on each, and hold all until stopped."""
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
    """Connect to a TCP address, send a byte, and hold the connection until stopped.

    Args:
        hands: context of the process.
        address: address of the listener.
        source: the address to connect from; None: the kernel chooses.
        device: name of the interface that the socket is bound to; "" for none.
        ends: action after the byte is sent: "half" sends a FIN, "close" closes the socket.
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
    """Hold `count` connections to these Unix sockets, each from a different user id, and keep replacing the oldest.

    Root stands for a user with subordinate ids. Return how many connections were opened and how many failed.
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
    """Open and close connections to a socket until stopped; return how many were opened and how many failed.

    Two threads do this. Each connection sends `says` before it is closed.
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
    """Send messages of 20 million empty frames to a ZeroMQ listener until stopped; count the outcomes."""
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
    """Send requests, each with its cancellation, over several connections as fast as possible, until stopped.

    `address` is a Unix socket or a ZeroMQ listener. Answers are dropped. Return the number of requests sent.
    """
    specs = tuple(TensorSpec(name, "FP32", array.shape) for name, array in inputs.items())
    pairs: List[bytes] = []
    for number in range(500):
        request = [*encode(Infer(str(number), RequestDescription(model, specs))), *map(_bytes_of, inputs.values())]
        pairs += [_as_sent(address, request), _as_sent(address, encode(Cancel(str(number))))]
    return _repeat(hands, address, b"".join(pairs), connections)


def ask_for(hands: ProcessContext, address: str, kind: str, connections: int = 4) -> Dict[str, int]:
    """Request the status, the metrics or the events over several connections as fast as the answers arrive.

    `address` is a Unix socket or a ZeroMQ listener. Return the number of requests sent.
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
    """Send 500 messages repeatedly over several connections until stopped; return the number of messages sent."""
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
    """Use one connection at a time until stopped; replace it when the daemon closes it."""
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
    """Queue `count` requests over the Unix socket and end all of them at the same time, repeatedly until stopped.

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
            # `connect` blocks while the backlog is full; this is its time limit.
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
        port: port of the gateway on this host.
        path: path of the method.
        headers: headers of HTTP, or metadata of gRPC.
        requests: bodies, sent in turn.
        ends: the last bytes of the response to each body.
    """

    protocol: str
    port: int
    path: str
    headers: Dict[str, str]
    requests: Sequence[bytes]
    ends: Sequence[bytes]


def ask_gateway(hands: ProcessContext, question: GatewayRequest, seconds: float) -> LoadResult:
    """Send a gateway one request at a time for `seconds`, over one connection."""
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
            except Exception as error:  # noqa: BLE001 - each library has its error classes
                outcomes[type(error).__name__] += 1
                continue
            if code != OK:
                outcomes[code] += 1
                continue
            took.append(time.perf_counter() - sent)
            outcomes[OK if answer.endswith(question.ends[index]) else WRONG] += 1
    return LoadResult(took, dict(outcomes), time.perf_counter() - begin)


def _sender(question: GatewayRequest, stack: contextlib.ExitStack) -> Callable[[bytes], Tuple[str, bytes]]:
    """Return a function that sends a request and returns the code and content of the response."""
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
    """Keep several calls with the same message in flight until stopped; return the number of calls by outcome."""
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
    """Send the same bytes repeatedly over several connections to a port of this host until stopped.

    Each connection starts with `begins`; a closed connection is replaced. Answers are dropped. Return the number of
    connections and of megabytes.
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
    """Send descriptors whose close blocks to the Unix socket at `path` until stopped; count the outcomes.

    The first is a TCP socket with unsent data and SO_LINGER; descriptors of /dev/null follow as fast as possible.
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
    """Leave the receiver at `path` with the last descriptor of a socket whose close blocks; return that socket's peer.

    Only the last close blocks. If this process closes last, it ends the wait and tries again.
    """
    while True:
        lingers, held = lingering(600)
        is_closed = threading.Event()
        thread = threading.Thread(target=_pass_and_close, args=(path, lingers, is_closed))
        thread.start()
        if is_closed.wait(_CLOSE_S):
            thread.join()
            return held
        # The close of a socket without a peer does not block.
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
    """Send requests over many connections to the Unix socket at `path`, read no answer, and shut down the sending half.

    Return the number of connections and of unread bytes when stopped.
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
    """Send a descriptor with an invalid message; return the outcome."""
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
    """Send messages with too many frames to a ZeroMQ listener until stopped, each over a new connection.

    Return the number of rejected messages. The listener closes the connection after each.
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
    """Send bytes that are no message over successive connections to the Unix socket; return how many were closed."""
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
    """Have workers read and write shared memory that was never written to, until stopped.

    The only output of `model` is as large as its input. Each request names a new memfd of twice `nbytes`, which is
    unregistered afterwards; the last `max_open` descriptors stay open. Return the number of requests and the memory of
    these descriptors in bytes, all of which the service has allocated.
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
    """Fill the kernel's buffers of connections: send requests while the socket accepts them, and read no answer.

    Return the number of messages sent and of connections that the daemon closed.
    """
    return _send_and_read_nothing(hands, path, _framed(ModelMetadata("unread", model)) * _GUST, connections)


def send_empty_frames(hands: ProcessContext, path: str, connections: int) -> Dict[str, int]:
    """Do the same as `leave_unread`, with messages of the maximum number of frames, all empty."""
    frames = [b""] * (limits.MAX_HEADER_FRAMES + limits.MAX_TENSORS)
    return _send_and_read_nothing(hands, path, message_prefix(frames) * _GUST, connections)


def _send_and_read_nothing(hands: ProcessContext, path: str, gust: bytes, connections: int) -> Dict[str, int]:
    """Send a gust of messages repeatedly over each connection; replace closed connections."""
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
    """Send shared memory whose last element crashes workers, and restore that element when the error arrives.

    The memory then has the same content as valid requests of other clients. Return the number of requests by outcome.
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
                # The daemon reads the region until the connection closes.
                time.sleep(0.05)
        finally:
            os.close(descriptor)
        if sum(outcomes.values()) == 1:
            hands.report("started")
        if hands.stopping.is_set():
            break
    return dict(outcomes)


class SharedMemoryPeer:
    """A connection to a Unix socket on which the caller sends and receives single messages.

    Args:
        path: path of the socket.
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
    """Send `infer` messages with headers of 64 KiB that are costly to unpack until stopped; return their number.

    `address` is `unix://PATH` or an address of ZeroMQ.
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
