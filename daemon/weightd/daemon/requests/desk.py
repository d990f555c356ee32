"""The requests for one model: each is accepted or refused here, and answered once."""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any, Protocol

from weightd.daemon.config.model import ModelConfig
from weightd.daemon.host.ends import End
from weightd.daemon.meters.meter import Meter
from weightd.daemon.requests.blame.guard import Guard
from weightd.daemon.requests.job import Job
from weightd.daemon.requests.latency import Latencies
from weightd.daemon.requests.lockstep import Answer, Breach, Lockstep, Outcome, Refusal
from weightd.daemon.requests.part import Part
from weightd.daemon.requests.regions import Memory, Places
from weightd.daemon.requests.request import Request
from weightd.daemon.requests.rows.cut import Cut
from weightd.daemon.requests.rows.parties import Names
from weightd.daemon.requests.rows.terms import WHOLE, RowTerms
from weightd.daemon.requests.scheduler import AT_ONCE, MOST_ENDED, Scheduler
from weightd.daemon.requests.seat import Seat
from weightd.daemon.requests.shares import Clocks
from weightd.daemon.requests.signature import Signature, Waiter, example
from weightd.daemon.requests.turns import MemberSeat, Turns
from weightd.daemon.requests.validation import RowBounds
from weightd.daemon.requests.writers import Writers
from weightd.protocol.errors import Cancelled, RequestError, ResourceExhausted, Unavailable, request_error
from weightd.protocol.messages.children import Built, Failed, ChildOrder, Predict, Result, Skip, Together
from weightd.protocol.messages.control import ModelMetadataResponse
from weightd.protocol.messages.data import RequestDescription

# At what comes, before something runs that waits.
_MOST_LOOKS = 64

Order = Callable[[str, ChildOrder, Sequence[Any], Sequence[Memory]], None]


class Askers(Protocol):
    """What those have to be told who have asked something of a model."""

    def answer(self, request: Request, result: Result, frames: Sequence[Any]) -> None:
        """Send the model's answer to the client."""

    def refuse(self, request: Request, error: RequestError) -> None:
        """Send an error to the client."""

    def gathered(self, request: Request, nbytes: int) -> None:
        """So much more is kept of a request until it has ended.

        Raises:
            ResourceExhausted: there is no room for it.
        """

    def released(self, request: Request) -> None:
        """Tell the client of a request that was still running at its end that nobody writes for it any more."""

    def tell_metadata(self, client: bytes, metadata: ModelMetadataResponse) -> None:
        """Send a model's metadata to the client."""

    def tell_error(self, client: bytes, request_id: str, error: RequestError) -> None:
        """Send an error to the client."""


class Desk:
    """Takes requests, has seats run them, and tells each one's client how it has ended.

    Args:
        name: of the model.
        config: of the model.
        askers: are told.
        order: sends an order, with the frames that follow it and the memory that it names, to a process.
        due_by: called with a time that may be sooner than what `next_event` was.
        clocks: of the devices, for all models.

    Attributes:
        latencies: from a request's arrival to its answer, in the daemon.
        by_process: the same for each process's answers, by its name.
        failed: requests that ended in an error after they were accepted.
        meter: of the model, whichever desk it has.
        names: of tenants and users whose requests have shared a job.
    """

    def __init__(
        self,
        name: str,
        config: ModelConfig,
        askers: Askers,
        order: Order,
        due_by: Callable[[float], object],
        clocks: Clocks | None = None,
    ) -> None:
        bounds = config.max_queue, config.max_queue_bytes, config.predict_timeout
        levels, count = config.priority_levels, config.max_concurrency
        self.scheduler = Scheduler(*bounds, due_by, levels=levels, clocks=clocks, count=count)
        self._deadlines = self.scheduler.deadlines
        self.guard = Guard(config, self.scheduler, self.refuse, due_by)
        self.signature = Signature(_bounds(config))
        self.names = Names()
        self.writers = Writers()
        self.latencies = Latencies()
        self.by_process: dict[str, Latencies] = {}
        self.failed = 0
        self.meter = self.scheduler.seats.meter
        # Whether there is, or was, a seat whose processes compute together.
        self._in_step = False
        # Requests wait for those that have come with them, and there is news since that was last looked at.
        self._looks = False
        self._has_news = False
        self._looked = 0
        # Requests that have been taken from the queue and from the seats, and still have to be refused.
        self._ending: deque[tuple[Request, RequestError]] = deque()
        self._due_by = due_by
        self._name = name
        self._config = config
        self._askers = askers
        self._order = order

    def count_with(self, meter: Meter) -> None:
        """From now on what becomes of requests is counted there."""
        self.meter = self.scheduler.seats.meter = meter

    # --- from clients -------------------------------------------------------------------------------------------

    def infer(self, request: Request, now: float) -> None:
        """Accept a request. While the model loads it waits, and is checked once it is known what the model takes.

        Raises:
            RequestError: it is refused.
        """
        request.description = self.signature.check(request.description)
        self.scheduler.asks(request, now)
        aside = False
        if self.guard.has_to(request):
            aside = self.guard.check(request, now)
        if not aside and self.scheduler.seats.merging:
            self._gather(request, now)
            return
        started = None if aside else self.scheduler.start(request, now)
        if started is None:
            self.scheduler.submit(request, now, aside=aside)
            self._tell_evicted()
        else:
            self._run(*started)
        if self.scheduler.line.begun.count or self.scheduler.line.shared:
            self.dispatch(now)

    def metadata(self, waiter: Waiter) -> None:
        """Tell somebody what the model takes and gives, at once or when it is known.

        Raises:
            ResourceExhausted: too many wait, and most of them are this one's.
        """
        refused = self.signature.ask(waiter, self._config.max_queue)
        if refused is not None:
            error = ResourceExhausted(
                f"{self._config.max_queue} requests wait for the metadata already, most of them of this client's user"
            )
            if refused == waiter:
                raise error
            self._askers.tell_error(refused.client, refused.request_id, error)
        self._tell_metadata()

    def cancel(self, client: bytes, request_id: str, now: float) -> None:
        """The client takes its request back."""
        error = Cancelled("taken back by the client")
        self._end([(each, error) for each in self.scheduler.end_of(client, request_id)])
        self.dispatch(now)

    def vanished(self, client: bytes, now: float) -> None:
        """The client is gone: nobody waits for what it asked."""
        self.signature.take_waiters(lambda request: request.client == client)
        error = Cancelled("its client is gone")
        self._end([(each, error) for each in self.scheduler.end_of(client)])
        self.dispatch(now)

    def shed(self, unfit: Callable[[Request], bool], error: RequestError, now: float) -> None:
        """Refuse what waits and is `unfit`, all at once, as its memory is needed; what runs goes on."""
        ending, self._ending = self._ending, deque()
        for request, its_error in ending:
            if unfit(request):
                self.refuse(request, its_error)
            else:
                self._ending.append((request, its_error))
        for request in self.scheduler.withdraw(unfit):
            self.refuse(request, error)
        self.dispatch(now)

    def turn_away(self, unfit: Callable[[bytes], bool], error: RequestError) -> None:
        """Refuse who waits for the metadata and is `unfit`."""
        for request in self.signature.take_waiters(lambda each: unfit(each.client)):
            self._askers.tell_error(request.client, request.request_id, error)

    # --- from seats ---------------------------------------------------------------------------------------------

    def enlist(self, process: str, *, device: str = "", terms: RowTerms = WHOLE, concurrency: int = 1) -> None:
        """The process is a seat that takes jobs from now on: see `Seat`."""
        self.by_process[process] = Latencies()
        self.scheduler.seats.enlist(process, (process,), device=device, terms=terms, concurrency=concurrency)

    def enlist_ranks(
        self,
        seat: str,
        lockstep: Lockstep,
        now: float,
        *,
        others: Sequence[str] = (),
        device: str = "",
        terms: RowTerms = WHOLE,
    ) -> None:
        """The ranks of a model are one seat that takes jobs from now on. They are pinged, and never with the canary.

        Args:
            seat: its name.
            lockstep: of the ranks. Where that joins their outputs, requests may not share a job, nor be filled up:
                nobody tells which of its rows a rank has.
            now: the clock.
            others: processes without which they are lost.
            device: where they run.
            terms: see `Seat`.
        """
        self._in_step = True
        # What one answers all have run.
        self.by_process.update(dict.fromkeys((*lockstep.processes, *others), Latencies()))
        for each in lockstep.processes:
            self.guard.watchdog.watch(each, now, proves=False)
        self.scheduler.seats.add(Seat(seat, lockstep.processes, device, terms, lockstep=lockstep, others=tuple(others)))

    def enlist_member(
        self, process: str, turns: Turns, member: int, now: float, *, device: str = "", terms: RowTerms = WHOLE
    ) -> None:
        """The process, which serves several models in turn, takes jobs of this one from now on.

        It is pinged, and never with the canary. Whatever becomes of it, all desks of its models have to be told.

        Args:
            process: its name.
            turns: of the process.
            member: which of its models this is.
            now: the clock.
            device: where it runs.
            terms: see `Seat`.
        """
        self.by_process[process] = Latencies()
        self.guard.watchdog.watch(process, now, proves=False)
        seat = MemberSeat(process, (process,), device, terms, member=member, turns=turns)
        turns.join(seat, self.scheduler.seats, self.scheduler.line, self.dispatch)

    def dismiss(self, process: str) -> None:
        """Its seat gets nothing new, and nobody asks whether it still answers."""
        self.scheduler.seats.dismiss(process)
        for each in self.mates(process):
            self.guard.watchdog.forget(each)

    def result(self, process: str, result: Result, frames: Sequence[Any], now: float) -> str:
        """A part of a job has been answered.

        Returns:
            Why the process has to be ended, and all of its seat, which is lost; "" if it has not.
        """
        if self._in_step and (lockstep := self.scheduler.seats.lockstep_of(process)) is not None:
            return self._told(process, result.request, lockstep.answered(process, result, frames), now)
        if self.writers.begun:
            self._release(self.writers.end(process, result.request))
        part = self.scheduler.seats.finish(process, result.request, now)
        if part is not None and part.cut is not None:
            self._join(part, part.cut, process, result, frames, now)
        elif part is not None:
            self._answer(part.request, process, result, frames, now)
        self.guard.watchdog.heard(process, now)
        if not self.scheduler.line.is_still:
            if self.scheduler.seats.merging:
                self._look_on()
            else:
                self.dispatch(now)
        return ""

    def done(self, process: str, number: int, now: float) -> str:
        """A rank has run a part, and another one has the outputs; return as `result` does."""
        lockstep = self.scheduler.seats.lockstep_of(process)
        if lockstep is None:
            # It was of a seat that is lost.
            return ""
        return self._told(process, number, lockstep.done(process, number), now)

    def job_failed(self, process: str, failed: Failed, now: float) -> str:
        """A part of a job has ended in an error, or a job of several, which run again alone then.

        Who leaves has lost what it had. Return as `result` does.
        """
        if self._in_step and (lockstep := self.scheduler.seats.lockstep_of(process)) is not None:
            outcome = Breach(f"{process}: {failed.error}") if failed.leaving else lockstep.refused(process, failed)
            return self._told(process, failed.request, outcome, now)
        self.guard.watchdog.heard(process, now)
        self._release(self.writers.end(process, failed.request))
        seat = self.scheduler.seats.of(process)
        if failed.leaving:
            self.guard.leaves(process, failed.request, now)
            if seat is not None:
                seat.lost()
        job = seat.job_of(failed.request) if seat is not None else None
        if job is not None and failed.leaving and job.sole is None:
            job.keep_apart()
        else:
            part = self.scheduler.seats.finish(process, failed.request, now)
            if part is not None:
                self.refuse(part.request, request_error(failed.code, failed.error))
        if failed.leaving:
            self.scheduler.release(process)
        else:
            self.dispatch(now)
        return ""

    def skipped(self, process: str, number: int, now: float) -> str:
        """A part of a job was taken back before that had begun; return as `result` does."""
        if self._in_step and self.scheduler.seats.lockstep_of(process) is not None:
            return self._told(process, number, Breach(f"{process}: has left out {number}"), now)
        self._release(self.writers.end(process, number))
        return ""

    def broke(self, process: str, why: str, now: float) -> None:
        """A process can go on no more, for this reason, and its seat is lost with it."""
        self.guard.broke(process, why, now)

    def died(self, process: str, end: End, now: float) -> None:
        """A process has ended, and with it its seat."""
        self._release(self.writers.died(process))
        self.guard.died(process, end, now)
        self.guard.watchdog.forget(process)
        self.by_process.pop(process, None)

    def release(self, process: str) -> None:
        """Its seat is lost, and what it had is not to blame: that waits again."""
        self.scheduler.release(process)

    def mates(self, process: str) -> tuple[str, ...]:
        """Return all processes of its seat: who loses one of them has lost all."""
        seat = self.scheduler.seats.of(process)
        return (process,) if seat is None else seat.lives_on

    def has_answered(self, process: str) -> bool:
        """Whether the process has answered any request."""
        latencies = self.by_process.get(process)
        return latencies is not None and latencies.count > 0

    # --- from the model -----------------------------------------------------------------------------------------

    def reconfigure(self, config: ModelConfig) -> None:
        """Do as this configuration says, which differs in no bound and in no time from the one before."""
        self._config = config
        self.signature.bound(_bounds(config))

    def dispatch_gathered(self, now: float) -> None:
        """All that is known to have come has been taken in: have everything run that can.

        Where requests share jobs, one more look is taken first at what has come meanwhile; and another as long as that
        was something, and could go with it. Nothing is waited for; and looks have an end, for what comes may have ended
        at the next one.
        """
        if self._has_news and self._looked < _MOST_LOOKS and self.scheduler.may_gather:
            self._has_news = False
            self._looked += 1
        else:
            self._looks = False
            self._looked = 0
            self.dispatch(now)

    def dispatch(self, now: float) -> None:
        """Have everything run that can; a seat hears what it need not run before it gets something in its place."""
        for slot, batch in self.scheduler.assign(now):
            self._skip()
            self._run(slot, batch)
        self._skip()

    def expire(self, now: float, explained: Callable[[RequestError], RequestError]) -> None:
        """Go on with ending requests, and end those whose deadlines have passed.

        The latter end with the error that `explained` makes of theirs.
        """
        self._end_some()
        for request, error in self.scheduler.expire(now):
            self.refuse(request, explained(error))

    def overdue(self, now: float) -> Iterator[tuple[str, str]]:
        """Yield each process whose seat computes for too long, with the reason to end it."""
        for slot, reason in list(self.guard.overdue(now)):
            yield from ((process, reason) for process in slot.processes)

    def silent(self, now: float) -> Iterator[str]:
        """Ping who has been idle; yield who has not answered the last one."""
        for process, ping in list(self.guard.pings(now)):
            if ping is not None:
                self._order(process, ping, (), ())
            else:
                yield process

    def learn(self, built: Built) -> None:
        """It is known what the model takes: what waits and does not fit ends."""
        self.signature.learn(built)
        unfit = self.signature.refusals(list(self.scheduler.line))
        gone = self.scheduler.withdraw(lambda each: each.number in unfit)
        self._end([(each, unfit[each.number]) for each in gone])
        self._tell_metadata()

    def renew(self, built: Built | None) -> None:
        """Another model is served, which may take more sizes; what killed the last one says nothing."""
        self.guard.clear()
        if built is not None:
            self.signature.learn(built)

    def adopt(self, old: Desk) -> Iterator[Request]:
        """Take over who waits at another desk for metadata; yield what waits there for an answer."""
        old.guard.give_up()
        for request in old.scheduler.give_up():
            old.scheduler.deadlines.remove(request)
            yield request
        self.signature.adopt(old.signature)
        self.names = old.names
        self._tell_metadata()

    def refuse(self, request: Request, error: RequestError) -> None:
        """End a request in an error."""
        self.failed += 1
        self.scheduler.end_whole(request)
        self._deadlines.remove(request)
        request.running = bool(request.written)
        self._askers.refuse(request, error)

    def give_up(self, error: RequestError) -> None:
        """End what waits."""
        self.guard.give_up()
        self._end([(each, error) for each in self.scheduler.give_up()])

    def close(self, error: RequestError) -> None:
        """Nobody will ever answer: end what waits, metadata included."""
        self.give_up(error)
        for client, request_id, _ in self.signature.take_waiters():
            self._askers.tell_error(client, request_id, error)

    def leave(self, now: float) -> None:
        """The daemon ends before its workers: answer what has not been answered."""
        self.guard.give_up()
        error = Unavailable("weightd is restarting")
        self._end([(each, error) for each, _ in self.scheduler.end(lambda _: True)])
        while self._ending:
            self._end_some()

    # --- what it tells ------------------------------------------------------------------------------------------

    @property
    def idle(self) -> bool:
        """Whether each request that was accepted has ended."""
        return not self._ending and self.scheduler.idle

    @property
    def has_to_refuse(self) -> bool:
        """Whether clients have still to be told of requests that neither wait nor run any more."""
        return bool(self._ending)

    @property
    def next_event(self) -> float:
        """Nothing is due before this, in monotonic seconds."""
        if self._ending or self.guard.looks or self._looks:
            return AT_ONCE
        ping, event = self.guard.watchdog.next_event, self.scheduler.next_event
        return ping if ping < event else event

    # --- within -------------------------------------------------------------------------------------------------

    def _gather(self, request: Request, now: float) -> None:
        """What comes with it may share its job: it runs once all of that has been taken in."""
        try:
            self.scheduler.submit(request, now, evicts=False)
        except ResourceExhausted:
            # There is room again once those run that could.
            self.dispatch(now)
            self.scheduler.submit(request, now)
            self._tell_evicted()
        self._look_on()

    def _tell_evicted(self) -> None:
        self._end(self.scheduler.take_evicted())

    def _look_on(self) -> None:
        self._has_news = self._looks = True
        self._due_by(AT_ONCE)

    def _end(self, requests: Iterable[tuple[Request, RequestError]]) -> None:
        """Refuse requests that neither wait nor run any more: some at once, and the rest in the next turns."""
        has_others = bool(self._ending)
        self._ending += requests
        if not has_others:
            self._end_some()

    def _end_some(self) -> None:
        for _ in range(min(MOST_ENDED, len(self._ending))):
            self.refuse(*self._ending.popleft())
        if self._ending:
            self._due_by(AT_ONCE)

    def _skip(self) -> None:
        for slot, number in self.scheduler.seats.take_recalled():
            for process in slot.processes:
                self._order(process, Skip(number), (), ())

    def _run(self, seat: Seat, job: Job) -> None:
        if job.form is not None:
            rows = seat.terms.padded(job.rows)
            if job.count > 1 or rows:
                parties: tuple[int, ...] = ()
                if job.count > 1 and seat.terms.is_exact and seat.lockstep is None:
                    parties = tuple([self.names.number(item.request.origin.far) for item in job.parts.values()])
                self._order_all(seat, Together(job.count, rows, parties))
        for item in job.parts.values():
            self._predict(seat, item)

    def _predict(self, seat: Seat, part: Part) -> None:
        request, cut = part.request, part.cut
        if cut is None:
            frames, places, description = request.frames, request.places, request.description
        else:
            (frames, places), description = cut.contents(part.first, part.rows), cut.described(part.rows)
        if seat.lockstep is not None:
            self._predict_in_step(seat, seat.lockstep, part, description, frames, places)
            return
        if places.outputs and not self.writers.begin(seat.processes, part):
            places = places.without_outputs()
        predict = Predict(part.number, description, places.mapped, 0, seat.member)
        self._order_all(seat, predict, frames, places.memories)

    def _predict_in_step(
        self,
        seat: Seat,
        lockstep: Lockstep,
        part: Part,
        description: RequestDescription,
        frames: Sequence[Any],
        places: Places,
    ) -> None:
        """All processes get the same; one of them alone may write outputs where the client has room for them."""
        step, reply = lockstep.begin(part.number), lockstep.reply
        read_only = places.without_outputs() if places.outputs else places
        # Where there is an input, too, another one may still have to read that.
        if places.outputs and (reply is None or places.overlap or not self.writers.begin((reply,), part)):
            places = read_only
        for process in seat.processes:
            own_locations = places if process == reply else read_only
            self._order(process, Predict(part.number, description, own_locations.mapped, step), frames, own_locations.memories)

    def _told(self, process: str, number: int, outcome: Outcome | None, now: float) -> str:
        """A process has told of a part that all of its seat were given, and this comes of it; None: nothing yet."""
        self.guard.watchdog.heard(process, now)
        if isinstance(outcome, Breach):
            # Nor is it believed that it does not write any more.
            self.guard.broke(process, outcome.why, now)
            return outcome.why
        self._release(self.writers.end(process, number))
        if outcome is None:
            return ""
        seat = self.scheduler.seats.of(process)
        job = seat.job_of(number) if seat is not None else None
        part = self.scheduler.seats.finish(process, number, now)
        if part is not None and isinstance(outcome, Refusal):
            if job is not None and job.count > 1:
                self.scheduler.again_alone(part)
            else:
                self.refuse(part.request, outcome.error)
        elif part is not None and isinstance(outcome, Answer):
            result, frames = outcome.result, outcome.frames
            if part.cut is not None:
                self._join(part, part.cut, process, result, frames, now)
            else:
                self._answer(part.request, process, result, frames, now)
        if self.scheduler.seats.merging:
            self._look_on()
        else:
            self.dispatch(now)
        return ""

    def _order_all(
        self, seat: Seat, order: ChildOrder, frames: Sequence[Any] = (), memories: Sequence[Memory] = ()
    ) -> None:
        for process in seat.processes:
            self._order(process, order, frames, memories)

    def _join(self, part: Part, cut: Cut, process: str, result: Result, frames: Sequence[Any], now: float) -> None:
        """Rows of a request have been answered."""
        try:
            whole = cut.add(part.first, part.rows, result, frames)
            if whole is None:
                self._askers.gathered(part.request, sum(map(len, frames)))
        except RequestError as error:
            self.refuse(part.request, error)
            return
        if whole is not None:
            self.scheduler.end_whole(part.request)
            self._answer(part.request, process, *whole, now)

    def _answer(self, request: Request, process: str, result: Result, frames: Sequence[Any], now: float) -> None:
        self._deadlines.remove(request)
        request.running = bool(request.written)
        self._askers.answer(request, result, frames)
        latency = now - request.arrived
        self.latencies.add(latency)
        self.meter.requests.add(latency)
        self.by_process[process].add(latency)
        if request.origin.is_tenant or self.guard.quarantine.suspects:
            self.guard.answered(request, now)

    def _release(self, requests: Iterable[Request]) -> None:
        for request in requests:
            self._askers.released(request)

    def _tell_metadata(self) -> None:
        built = self.signature.built
        if built is None:
            return
        for client, request_id, _ in self.signature.take_waiters():
            self._askers.tell_metadata(
                client,
                ModelMetadataResponse(
                    request_id,
                    self._name,
                    self._config.engine,
                    built.inputs,
                    built.outputs,
                    _exact(self._config, built),
                    example(built),
                ),
            )


def _bounds(config: ModelConfig) -> RowBounds:
    """How many rows a request may have: as many as can be run, be it in parts."""
    sizes = config.batching.sizes
    if config.split.part_rows:
        return RowBounds(config.split.max_rows, "split.max_rows", sizes)
    return RowBounds(max(sizes, default=0), "the largest of batching.sizes", sizes)


def _exact(config: ModelConfig, built: Built) -> bool | None:
    """Whether answers are known to be those of each request alone; None where each runs alone."""
    found, batching, split = built.rows, config.batching, config.split
    if found is None or not found.inputs or not found.outputs:
        return None
    is_done = (batching.max_rows > 1 and not batching.exact) or (split.part_rows > 0 and not split.exact)
    return found.equal if found.equal or is_done else None
