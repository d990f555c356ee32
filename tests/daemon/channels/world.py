"""Daemon, clients and workers as processes over simulated sockets and pages. Each can be killed before any operation.

An operation is a store to a page, a system call or a message. Messages between two processes keep their order;
between different pairs of processes they are delayed and reordered, because each process reads when the test lets it.
"""

from __future__ import annotations

import collections
import weakref
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

from weightd.channels.calls import ChannelCalls, ClientChannel
from weightd.channels.requests import ChannelRequests
from weightd.pending import PendingCall
from weightd_common.channels.messages import AddChannel, Adopted, Ended, Granted, Lost, Notice, Refilled, Released
from weightd_common.channels.pages import ANSWERED, BYTES, OUTCOMES, REQUEST_LIMIT, REQUESTS, WORD_BYTES, Layout
from weightd_daemon.channels.page import DaemonPage
from weightd_daemon.channels.rows import RowReader
from weightd_daemon.channels.states import ChannelEvent, ChannelState
from weightd_daemon.channels.table import (
    ChannelTable,
    CloseDuplicate,
    Notify,
    Order,
    ReadQueue,
    Relay,
    ReplaceWorker,
    ShutDown,
)
from weightd_protocol.messages.channels import (
    OVERDRAWN,
    ChannelEnded,
    ChannelExtended,
    ChannelOpened,
    RequestAdopted,
    RequestLost,
)
from weightd_protocol.messages.inference import InferResponse
from weightd_worker.channels.pull_scheduler import PulledChannel, PullScheduler
from weightd_worker.channels.session import ChannelSession

from .kernel import EMPTY, Died, Memory, Pair, Result

LAYOUT = Layout(tenant_slots=3, channel_slots=5)
MAX_ROWS = 9
MAX_WORKERS = 4
TENANTS = (0, 1, 2)
LIFETIME_S = 50.0
NBYTES = 10
PACKET = bytes(NBYTES)
DESCRIPTION = b"all requests have this description"


RUNNABLE = "runnable"
REFUSED = "refused"  # the worker must not run it: its content is in quarantine
LATE = "late"  # the worker answers with an error: its deadline has passed


class Message(NamedTuple):
    """A request in a queue."""

    client: str
    request: int
    kind: str  # RUNNABLE, REFUSED or LATE


class Infer(NamedTuple):
    """A request on the connection between client and daemon."""

    request: int


class Answer(NamedTuple):
    """An answer, on a channel or on the connection."""

    request: int
    outcome: str = "answer"


class Reconnected(NamedTuple):
    """A worker has connected to the next daemon."""


class DaemonLost(NamedTuple):
    """The end of a connection to a daemon."""

    daemon: str


class Process:
    """A process that is killed before operation `fuse`, and during whose operation `interrupt` others run."""

    def __init__(self, world: World, name: str) -> None:
        self.world = world
        self.name = name
        self.fuse = -1
        self.interrupt: tuple[int, Callable[[], None]] | None = None

    def operate(self) -> None:
        """Called before each operation."""
        if self.interrupt is not None:
            count, action = self.interrupt
            self.interrupt = (count - 1, action) if count else None
            if not count:
                action()
        if self.fuse == 0:
            raise Died
        self.fuse -= 1

    def armed(self, fuse: int, action: Callable[[], Any]) -> None:
        """Run an action that is killed before its operation number `fuse`; -1 for no kill."""
        self.fuse = fuse
        try:
            action()
        except Died:
            self.world.kill(self)
        finally:
            self.fuse = -1
            self.interrupt = None


class Daemon(Process):
    """A daemon with its page and the rows of its workers."""

    table_type: type[ChannelTable] = ChannelTable

    def __init__(self, world: World, number: int) -> None:
        super().__init__(world, f"daemon {number}")
        memory = Memory(LAYOUT.daemon_page_bytes)
        self.memory = memory.page
        self.table = self.table_type(LAYOUT, DaemonPage(LAYOUT, memory.watched(self.operate)), 1000 * number + 1)
        self.row_memories = [Memory(LAYOUT.row_bytes) for _ in range(MAX_ROWS)]
        self.row_memory = [memory.page for memory in self.row_memories]
        self.rows: dict[str, int] = {}
        self.relay: list[tuple[str, int]] = []
        self.table.rows.readers = [RowReader(LAYOUT, page, world.now) for page in self.row_memory]
        self.granted: dict[int, tuple[int, int]] = {}
        for tenant in TENANTS:
            self.table.add_tenant(tenant, 1.0, world.now)

    def run_actions(self) -> None:
        while actions := self.table.take_actions():
            for action in actions:
                self.run_action(action)

    def run_action(self, action: Any) -> None:
        world = self.world
        self.operate()
        if isinstance(action, Notify):
            world.on_notice(action.client, action.notice)
            if (client := world.clients.get(action.client)) is not None and client.daemon is self:
                client.inbox.append(action.notice)
        elif isinstance(action, Order):
            self.order(action)
        elif isinstance(action, ShutDown):
            world.pairs[action.channel].is_shut = True
            world.wake(action.channel)
        elif isinstance(action, ReadQueue):
            self.read_queue(action.channel)
        elif isinstance(action, Relay):
            self.relay.append((action.client, action.request))
        elif isinstance(action, CloseDuplicate):
            world.pairs[action.channel].close(self.name)
            world.closed.add(action.channel)
        else:
            self.replace(action)

    def order(self, action: Order) -> None:
        worker = self.world.workers.get(action.worker)
        if worker is not None and worker.daemon is self:
            worker.orders.append(action.order)
            if isinstance(action.order, AddChannel):
                self.world.pairs[action.order.channel].holders.add(worker.name)
            worker.is_asleep = False

    def replace(self, action: ReplaceWorker) -> None:
        assert self.world.has_corruption
        if (worker := self.world.workers.get(action.worker)) is not None:
            self.world.kill(worker)

    def read_queue(self, serial: int) -> None:
        pair = self.world.pairs[serial]
        while True:
            self.operate()
            message = pair.worker_receive()
            if isinstance(message, Message):
                self.table.on_queued(serial, message.request, b"")
                continue
            if message is Result.RESET or pair.to_workers:
                continue
            if message is Result.END:
                self.table.on_queue_end(serial)
            return

    def grant(self, client: Client, tenant: int, generation: int, limits: tuple[int, int]) -> None:
        expires_at = self.world.now + LIFETIME_S
        serial = self.table.grant(client.name, tenant, generation, limits, expires_at, self.world.now)
        if serial is None:
            return
        pair = self.world.pairs[serial] = Pair(serial)
        pair.holders.add(self.name)
        client.pairs.append(serial)
        self.granted[serial] = limits
        self.run_actions()

    def refill(self, serial: int, requests: int, nbytes: int) -> None:
        if (limits := self.granted.get(serial)) is not None:
            self.granted[serial] = limits[0] + requests, limits[1] + nbytes
        self.table.refill(serial, requests, nbytes, self.world.now + LIFETIME_S, self.world.now)
        self.run_actions()

    def end(self, serial: int, event: ChannelEvent) -> None:
        self.table.end(serial, event)
        self.run_actions()

    def look_at_queues(self) -> None:
        """Look whether the queues of revoked channels are empty."""
        for serial, channel in list(self.table.channels.items()):
            if channel.machine.state is ChannelState.REVOKED and not self.world.pairs[serial].to_workers:
                self.table.on_queue_end(serial)
        self.run_actions()

    def receive(self, worker: Worker) -> None:
        if not worker.reports:
            return
        report = worker.reports.popleft()
        self.on_report(worker, report)
        self.run_actions()

    def on_report(self, worker: Worker, report: Any) -> None:
        if isinstance(report, Reconnected):
            self.table.add_worker(worker.name, worker.generation, self.row_of(worker))
        else:
            self.table.on_report(worker.name, report)

    def row_of(self, worker: Worker) -> RowReader:
        return self.table.rows.readers[self.rows[worker.name]]

    def new_row(self, worker: str) -> int:
        """Return the number of a free row; row `n` is `row_memory[n]`."""
        number = min(set(range(MAX_ROWS)) - set(self.rows.values()))
        self.rows[worker] = number
        return number

    def serve(self, client: Client) -> None:
        """Read one message of a client."""
        if client.outbox:
            self.relay.append((client.name, client.outbox.popleft().request))

    def run_relayed(self) -> None:
        if self.relay:
            name, request = self.relay.pop(0)
            self.operate()
            self.world.run(name, request)
            self.operate()
            if (client := self.world.clients.get(name)) is not None and client.daemon is self:
                client.inbox.append(Answer(request))

    def reap(self, worker: Worker) -> None:
        """A worker has exited: read its last messages, then its row."""
        for report in worker.reports:
            self.on_report(worker, report)
            self.run_actions()
        if worker.name in self.table._workers:
            self.table.on_worker_exit(worker.name, self.world.now)
        self.rows.pop(worker.name, None)
        self.run_actions()


class Worker(Process):
    """A worker that reads channels of one generation."""

    session_type: type[ChannelSession] = ChannelSession
    scheduler_type: type[PullScheduler] = PullScheduler

    def __init__(self, world: World, name: str, generation: int) -> None:
        super().__init__(world, name)
        self.generation = generation
        self.orders: collections.deque[Any] = collections.deque()
        self.reports: collections.deque[Any] = collections.deque()
        self.sessions: list[ChannelSession] = []
        self.is_asleep = False
        self.has_request = False
        self.ready: set[int] = set()
        self.join(world.daemon)
        self.steps = self.life()

    def join(self, daemon: Daemon) -> None:
        self.daemon = daemon
        own = daemon.row_memories[daemon.new_row(self.name)].watched(self.operate)
        scheduler = self.scheduler_type(daemon.memory, daemon.row_memory, own, daemon.row_memory)
        self.sessions.append(self.session_type(LAYOUT, daemon.memory, own, scheduler, self.generation))

    def send(self, report: Any) -> None:
        self.operate()
        if self.daemon is self.world.daemon:
            self.reports.append(report)

    def close(self, releases: list[Released]) -> None:
        for released in releases:
            self.operate()
            self.world.pairs[released.channel].close(self.name)
            self.ready.discard(released.channel)
            self.send(released)

    def readable(self, session: ChannelSession) -> list[PulledChannel]:
        """Return the channels that epoll reports."""
        pairs, world = self.world.pairs, self.world
        return [
            each
            for serial, each in session.channels.items()
            if pairs[serial].is_readable and (serial in self.ready or not world.is_exclusive)
        ]

    def follow_orders(self) -> None:
        while self.orders:
            order = self.orders.popleft()
            if isinstance(order, AddChannel):
                self.ready.add(order.channel)
                self.close(self.sessions[-1].add(order))
            elif isinstance(order, DaemonLost):
                if order.daemon == self.daemon.name:
                    self.reconnect()
            else:
                for session in self.sessions:
                    self.close(session.release(order.channel))

    def reconnect(self) -> None:
        serials = sorted(each for session in self.sessions for each in session.channels)
        for serial in serials:
            self.operate()
            self.world.pairs[serial].is_shut = True
            self.world.wake(serial)
        self.reports.clear()
        self.join(self.world.daemon)
        self.send(Reconnected())

    def life(self) -> Iterator[None]:
        while True:
            self.follow_orders()
            for session in list(self.sessions):
                channel = session.choose(self.readable(session), self.world.now)
                self.close(session.take_releases())
                if channel is not None:
                    self.has_request = True
                    yield from self.serve(session, channel)
                    self.has_request = False
                    break
            else:
                self.is_asleep = not self.orders and not any(self.readable(session) for session in self.sessions)
                yield

    def serve(self, session: ChannelSession, channel: PulledChannel) -> Iterator[None]:
        yield
        self.operate()
        message = self.world.pairs[channel.serial].worker_receive()
        if message in (Result.NOTHING, Result.RESET):
            session.on_nothing(channel)
        elif message is Result.END:
            self.close(session.on_end(channel))
        else:
            yield
            reason = session.on_request(channel, message.request, NBYTES, self.world.now)
            yield
            if reason or message.kind == REFUSED:
                yield from self.hand_over(session, channel, reason or "quarantined")
            elif message.kind == LATE:
                yield from self.answer(session, channel, message, "rejected")
            else:
                yield from self.run(session, channel, message)

    def hand_over(self, session: ChannelSession, channel: PulledChannel, reason: str) -> Iterator[None]:
        if reason == OVERDRAWN and not self.world.has_corruption:
            assert channel.serial in self.world.greedy, "a client within its credits was refused"
        handed = session.hand_over(channel, b"", reason)
        yield
        self.send(handed)
        yield
        self.close(session.on_handed_over(channel))

    def run(self, session: ChannelSession, channel: PulledChannel, message: Message) -> Iterator[None]:
        key = message.client, message.request
        assert key not in self.world.resent or self.world.has_corruption, "a lost request runs on its channel"
        session.run(self.world.now)
        self.operate()
        self.world.run(message.client, message.request)
        self.world.started.add(key)
        self.world.on_channel_run(self, channel.serial)
        yield
        session.on_result(channel, 0.01)
        yield from self.answer(session, channel, message, "answer")

    def answer(self, session: ChannelSession, channel: PulledChannel, message: Message, outcome: str) -> Iterator[None]:
        yield
        self.operate()
        assert channel.serial not in self.world.closed, "an answer after the end of the channel was confirmed"
        result = self.world.pairs[channel.serial].worker_send(Answer(message.request, outcome))
        if result is Result.FULL:
            self.send(session.drop_answer(channel))
        elif result is None:
            self.world.answered.add((message.client, message.request))
        yield
        session.on_answered(channel, ANSWERED)

    def step(self) -> None:
        if not self.is_asleep or self.orders:
            self.is_asleep = False
            next(self.steps)

    def run_steps(self, count: int) -> None:
        for _ in range(count):
            self.step()


class Client(Process):
    """A client of one tenant."""

    calls_type: type[ChannelCalls] = ChannelCalls

    def __init__(self, world: World, name: str, tenant: int, is_greedy: bool) -> None:
        super().__init__(world, name)
        self.tenant = tenant
        self.is_greedy = is_greedy
        self.inbox: collections.deque[Any] = collections.deque()
        self.outbox: collections.deque[Infer] = collections.deque()
        self.pairs: list[int] = []
        self.daemon: Daemon | None = world.daemon
        self.count = 0
        # The calls without an answer, as their owners hold them, and as the client knows them.
        self.pending: dict[int, PendingCall] = {}
        self.tracked: dict[str, weakref.ref[PendingCall]] = {}
        self.requests = ChannelRequests(lambda: "", None, lambda: world.now)
        self.calls = self.calls_type(self.tracked, self.requests)
        self.calls.on_connected(can_open=True)

    def submit(self, kind: str) -> None:
        self.count += 1
        request = self.count
        self.world.outcomes[self.name, request] = None
        call = self.pending[request] = PendingCall(str(request), InferResponse)
        self.tracked[call.id] = weakref.ref(call)
        channel = self.channel()
        if channel is not None and self.send_on(channel, call, Message(self.name, request, kind)):
            return
        if self.daemon is None:
            self.connect()
        self.operate()
        self.outbox.append(Infer(request))

    def channel(self) -> ClientChannel | None:
        """Return the channel on which the next request is sent."""
        if self.is_greedy:
            return next(reversed(self.calls.channels.values()), None)
        return self.calls.usable.get(DESCRIPTION)

    def send_on(self, channel: ClientChannel, call: PendingCall, message: Message) -> bool:
        """Send a request on a channel; return whether the channel has it."""
        self.operate()
        if not self.calls.begin_sending(channel, call, PACKET, self.world.now):
            if not self.is_greedy:
                return False
            call.channel, call.packet = channel, PACKET
            channel.sent_requests += 1
            channel.sent_bytes += NBYTES
        result = self.world.pairs[channel.end].client_send(message)
        if result is None:
            self.world.wake(channel.end)
            self.world.sent_on[self.name, message.request] = channel.end
            if channel.sent_requests > channel.max_requests:
                self.world.greedy.add(channel.end)
            return True
        if result is not Result.FULL:
            self.calls.stop_sending(channel)
        return not self.calls.on_not_sent(channel, call)

    def connect(self) -> None:
        self.daemon = self.world.daemon
        self.calls.on_connected(can_open=True)
        for channel in self.calls.take_unused():
            self.close(channel)

    def close(self, channel: ClientChannel) -> None:
        """Close the client's end of a channel."""
        self.close_end(channel.end)

    def close_end(self, serial: int) -> None:
        if serial in self.pairs:
            self.pairs.remove(serial)
            self.world.pairs[serial].close_client()
            self.world.wake(serial)

    def send_empty(self) -> None:
        channel = self.channel()
        if channel is not None and self.world.pairs[channel.end].client_send(EMPTY) is None:
            self.world.wake(channel.end)

    def time_out(self) -> None:
        """The deadline of the oldest pending call passes."""
        if self.pending:
            request = min(self.pending)
            self.world.timed_out.add((self.name, request))
            del self.tracked[str(request)]
            self.settle(request, "may have run")

    def settle(self, request: int, outcome: str) -> None:
        """End a call, which is not tracked any more."""
        self.world.settle(self.name, request, outcome)
        self.pending.pop(request).succeed(None)

    def fail(self, calls: list[PendingCall]) -> None:
        for call in calls:
            self.settle(int(call.id), "may have run")

    def send_again(self, calls: list[PendingCall]) -> None:
        for call in calls:
            self.world.on_resent(self.name, int(call.id))
            self.outbox.append(Infer(int(call.id)))

    def on_answer(self, answer: Answer, channel: ClientChannel | None) -> None:
        """End a call, as `ClientCore.on_message` does."""
        call = self.pending.get(answer.request)
        if call is not None and (channel is None or call.channel is channel) and call.id in self.tracked:
            del self.tracked[call.id]
            self.settle(answer.request, answer.outcome)

    def read_channel(self, serial: int) -> bool:
        """Read one message of a channel; return whether there may be more."""
        self.operate()
        channel = self.calls.channels[str(serial)]
        message = self.world.pairs[serial].client_receive()
        if isinstance(message, Answer):
            self.on_answer(message, channel)
        elif message is Result.END:
            self.pairs.remove(serial)
            self.fail(self.calls.on_end(channel))
        return message not in (Result.END, Result.NOTHING)

    def read_channels(self) -> None:
        for serial in list(self.pairs):
            while str(serial) in self.calls.channels and self.read_channel(serial):
                pass

    def read_connection(self) -> None:
        if not self.inbox:
            return
        message = self.inbox.popleft()
        if isinstance(message, Answer):
            self.on_answer(message, None)
        elif isinstance(message, DaemonLost):
            if self.daemon is not None and message.daemon == self.daemon.name:
                self.on_disconnected()
        else:
            self.on_notice(message)

    def on_disconnected(self) -> None:
        self.daemon = None
        self.outbox.clear()
        relayed = [call for call in self.pending.values() if call.channel is None]
        for call in relayed:
            del self.tracked[call.id]
        self.fail(relayed)
        self.fail(self.calls.on_disconnected())

    def on_notice(self, notice: Notice) -> None:
        if isinstance(notice, Granted):
            self.on_granted(notice)
            return
        channel = str(notice.channel)
        if isinstance(notice, Refilled):
            _, requests, nbytes, expires_at = notice
            self.calls.on_message(ChannelExtended(channel, requests, nbytes, int(expires_at * 1e6)))
            return
        if isinstance(notice, Ended):
            self.calls.on_message(ChannelEnded(channel))
        elif isinstance(notice, Adopted):
            self.calls.on_message(RequestAdopted(str(notice.request), channel))
        else:
            self.calls.on_message(RequestLost(str(notice.request), channel))
        self.read_channels()
        lost, ended = self.calls.apply_notices()
        for each in ended:
            self.close(each)
        self.send_again(lost)

    def on_granted(self, granted: Granted) -> None:
        """Take a channel, each of another model, as if the client had asked for it."""
        serial, requests, nbytes, expires_at = granted
        model = f"model {serial}"
        self.requests._unanswered[str(serial)] = model
        channel = self.calls.add(ChannelOpened(str(serial), requests, nbytes, int(expires_at * 1e6)), serial)
        if channel is None:
            # It has expired before the client has read the notice.
            assert self.world.now > expires_at - 1e-6
            self.close_end(serial)
        else:
            self.calls.on_relayed_answer(model, DESCRIPTION)


class World:
    """All processes, and the counts of the test."""

    worker_type: type[Worker] = Worker
    daemon_type: type[Daemon] = Daemon
    client_type: type[Client] = Client
    is_exclusive = False  # EPOLLEXCLUSIVE

    def __init__(self) -> None:
        self.now = 0.0
        self.pairs: dict[int, Pair] = {}
        self.closed: set[int] = set()
        self.clients: dict[str, Client] = {}
        self.workers: dict[str, Worker] = {}
        self.dead_workers: list[Worker] = []
        self.runs: collections.Counter[tuple[str, int]] = collections.Counter()
        self.channel_runs: collections.Counter[int] = collections.Counter()
        self.started: set[tuple[str, int]] = set()  # requests that have run on a channel
        self.answered: set[tuple[str, int]] = set()  # requests whose answer is in the queue of a channel, or was read
        self.sent_on: dict[tuple[str, int], int] = {}  # the channel on which a request was sent
        self.lost: set[tuple[str, int] | int] = set()  # requests and channels that the daemon has reported as lost
        self.adopted: set[tuple[str, int]] = set()  # requests of channels that the daemon answers
        self.resent: set[tuple[str, int]] = set()  # requests that their client has sent again
        self.greedy: set[int] = set()  # channels whose clients send more than they have credits for
        self.timed_out: set[tuple[str, int]] = set()
        self.has_corruption = False
        self.outcomes: dict[tuple[str, int], str | None] = {}
        self.restarts = 0
        self.worker_count = 0
        self.deaths = 0
        self.gone: list[int] = []  # channels whose clients have exited, for the daemon to notice
        self.daemon = self.daemon_type(self, 0)

    # --- reports of processes to the test ----------------------------------------------------------------------------

    def run(self, client: str, request: int) -> None:
        key = client, request
        self.runs[key] += 1
        limit = 1 + (key in self.resent)
        assert self.runs[key] <= limit, f"{client}: request {request} runs {limit + 1} times"

    def on_notice(self, client: str, notice: Notice) -> None:
        """The daemon sends a notice."""
        if isinstance(notice, Lost):
            key = client, notice.request
            is_repeated = key in self.lost
            assert notice.may_have_run or key not in self.started or is_repeated or self.has_corruption, (
                f"{client}: request {notice.request} has run, and the daemon reports that it has not"
            )
            self.lost.add(key)
        elif isinstance(notice, Ended):
            self.lost.add(notice.channel)
        elif isinstance(notice, Adopted):
            self.adopted.add((client, notice.request))

    def on_resent(self, client: str, request: int) -> None:
        key = client, request
        assert key in self.lost or self.sent_on[key] in self.lost, f"{client}: request {request} was not reported lost"
        assert key not in self.answered, f"{client}: request {request} is sent again although it was answered"
        assert key not in self.adopted, f"{client}: request {request} is sent again although the daemon has it"
        assert key not in self.resent, f"{client}: request {request} is sent again twice"
        self.resent.add(key)

    def on_channel_run(self, worker: Worker, serial: int) -> None:
        self.channel_runs[serial] += 1
        limits = self.daemon.granted.get(serial)
        if self.has_corruption:
            return
        if limits is not None and worker.daemon is self.daemon:
            assert self.channel_runs[serial] <= limits[0], "more requests run than the channel had credits for"

    def settle(self, client: str, request: int, outcome: str) -> None:
        assert self.outcomes[client, request] is None, f"{client}: request {request} ends twice"
        self.outcomes[client, request] = outcome

    # --- processes ----------------------------------------------------------------------------------------------------

    def add_worker(self, generation: int) -> None:
        if len(self.daemon.rows) < MAX_WORKERS and len(self.workers) < MAX_WORKERS:
            self.worker_count += 1
            worker = self.worker_type(self, f"worker {self.worker_count}", generation)
            self.workers[worker.name] = worker
            self.daemon.table.add_worker(worker.name, generation, self.daemon.row_of(worker))
            self.daemon.run_actions()

    def kill(self, process: Process) -> None:
        self.deaths += 1
        if isinstance(process, Worker):
            del self.workers[process.name]
            for serial, pair in self.pairs.items():
                pair.close(process.name)
                self.wake(serial)
            self.dead_workers.append(process)
        elif isinstance(process, Client):
            del self.clients[process.name]
            self.gone += process.pairs
            for serial in process.pairs:
                self.pairs[serial].close_client()
                self.wake(serial)
        else:
            assert process is self.daemon
            self.restart_daemon()

    def restart_daemon(self) -> None:
        old = self.daemon
        self.restarts += 1
        for pair in self.pairs.values():
            pair.close(old.name)
        self.daemon = self.daemon_type(self, self.restarts)
        self.dead_workers = []
        for worker in self.workers.values():
            worker.orders.append(DaemonLost(old.name))
        for client in self.clients.values():
            client.inbox.append(DaemonLost(old.name))

    def notice_gone(self) -> None:
        """The daemon notices that the clients of channels have exited."""
        while self.gone:
            self.daemon.end(self.gone.pop(), ChannelEvent.CLIENT_GONE)

    def corrupt(self, worker: Worker, index: int, value: float) -> None:
        """A worker writes a value that no working worker writes."""
        row = worker.daemon.row_memory[worker.daemon.rows[worker.name]]
        index %= LAYOUT.row_bytes // WORD_BYTES
        if isinstance(value, int):
            row.words[index] = value
        else:
            row.reals[index] = value
        self.has_corruption = True

    def wake(self, serial: int) -> None:
        """Wake the workers that wait for a channel to become readable."""
        holders = [
            each for each in self.workers.values() if any(serial in session.channels for session in each.sessions)
        ]
        if self.is_exclusive:
            asleep = [each for each in holders if each.is_asleep]
            holders = asleep[:1] or holders
        for worker in holders:
            worker.is_asleep = False
            worker.ready.add(serial)

    # --- invariants ---------------------------------------------------------------------------------------------------

    def check(self) -> None:
        for worker in self.workers.values():
            if worker.is_asleep and not worker.orders:
                waiting = [
                    each for session in worker.sessions for each in session.channels if self.pairs[each].to_workers
                ]
                assert not waiting, f"{worker.name} sleeps beside readable channels {waiting}"
        self.check_credits()

    def check_credits(self) -> None:
        if self.has_corruption:
            return
        words = self.daemon.memory.words
        for serial, channel in self.daemon.table.channels.items():
            index, row_index = LAYOUT.channel(channel.slot), LAYOUT.row_channel(channel.slot)
            excess = (
                sum(row.words[row_index + REQUESTS] for row in self.daemon.row_memory) - words[index + REQUEST_LIMIT]
            )
            assert excess <= self.worker_count, f"channel {serial}: {excess} requests beyond its credits"

    def check_accounts(self) -> None:
        """All requests that were taken have ended, or their worker has exited."""
        if self.has_corruption:
            return
        for slot in range(LAYOUT.channel_slots):
            index = LAYOUT.row_channel(slot)
            taken = sum(row.words[index + REQUESTS] for row in self.daemon.row_memory)
            ended = sum(row.words[index + each] for row in self.daemon.row_memory for each in OUTCOMES)
            nbytes = sum(row.words[index + BYTES] for row in self.daemon.row_memory)
            assert 0 <= taken - ended <= self.deaths, f"accounts: {taken} requests taken, {ended} ended"
            assert abs(nbytes - NBYTES * taken) <= NBYTES * self.deaths, f"accounts: {nbytes} bytes"

    def finish(self, turns: int = 400) -> None:
        """Let all processes run, without further faults, until nothing moves; then check how each call has ended."""
        for _ in range(turns):
            self.turn()
            self.check()
        for (name, request), outcome in self.outcomes.items():
            if name in self.clients:
                self.check_outcome(name, request, outcome)
        self.check_accounts()

    def inspect_rows(self) -> None:
        """Let the daemon read the rows of all workers."""
        table = self.daemon.table
        table.inspect_rows(dict.fromkeys(table._workers, range(LAYOUT.channel_slots)), self.now)

    def turn(self) -> None:
        """Let each process do a little."""
        daemon = self.daemon
        self.notice_gone()
        self.inspect_rows()
        daemon.look_at_queues()
        served = {worker.generation for worker in self.workers.values()}
        for generation in {channel.generation for channel in daemon.table.channels.values()} - served:
            daemon.table.end_generation(generation, ChannelEvent.END_GENERATION)
        daemon.run_actions()
        for worker in self.dead_workers:
            if worker.daemon is daemon:
                daemon.reap(worker)
        self.dead_workers.clear()
        for worker in self.workers.values():
            worker.step()
            if worker.daemon is daemon:
                daemon.receive(worker)
        for client in self.clients.values():
            daemon.serve(client)
            client.read_channels()
            client.read_connection()
        daemon.run_relayed()

    def check_outcome(self, name: str, request: int, outcome: str | None) -> None:
        key = name, request
        runs = self.runs[key]
        assert outcome is not None, f"{name}: request {request} has no end"
        if outcome == "answer":
            assert 1 <= runs <= 1 + (key in self.resent)
        elif outcome == "rejected":
            assert runs == 0, f"{name}: request {request} has run, and its client got the error of one that has not"
        else:
            assert self.restarts or key in self.timed_out, f"{name}: request {request} fails beside a daemon"
