"""The life of a child by its arguments, whether it was spawned or forked."""

from __future__ import annotations

import argparse
import faulthandler
import functools
import logging
import os
import sys
from pathlib import Path
from typing import Callable, Optional, Sequence, Union

import zmq

from weightd.protocol import limits
from weightd.protocol.codec import clip, encode
from weightd.protocol.errors import WeightdError
from weightd.protocol.messages.children import Broken
from weightd.shared.coredump import disable_core_dumps
from weightd.shared.cores import parse_cpulist
from weightd.shared.meeting import Meeting
from weightd.shared.members import Members, joint_digest
from weightd.shared.modelfile import ModelFileError, pinned_digest
from weightd.shared.oom import raise_score
from weightd.shared.parent import die_with_parent
from weightd.shared.title import Title
from weightd.shared.transient import is_transient
from weightd.worker import arguments as words_of
from weightd.worker import exits, pagesharing
from weightd.worker.concurrent import ConcurrentSession
from weightd.worker.connection import Connection
from weightd.worker.engines import ENGINES, RANK_ENGINES
from weightd.worker.engines.engine import Engine, Settings
from weightd.worker.engines.errors import BuildError
from weightd.worker.engines.mindspore import signature
from weightd.worker.engines.mindspore_lite.group import ModelGroup
from weightd.worker.engines.ranks import Meeting as RankMeeting
from weightd.worker.forking.beginning import Beginning
from weightd.worker.forking.forker import Forker, Made
from weightd.worker.lane import LaneConnection
from weightd.worker.members import MembersSession
from weightd.worker.ranks import broker
from weightd.worker.ranks.session import Given, RankSession
from weightd.worker.session import Files, Heirs, Origin, Session

_log = logging.getLogger("weightd.worker")

# The last message says why the process leaves: give libzmq this long to hand it over, and no longer.
_LINGER_MS = 2000


def begin() -> Beginning:
    """Make this process, which was just started, ready to be a child, or the one that children are forked of."""
    # As the daemon does: the interpreter may be a script that has raised the limit.
    disable_core_dumps()
    # A crash, and the SIGABRT of a daemon that has waited too long, leave the stacks of all threads in the log.
    faulthandler.enable()
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.INFO)
    pagesharing.prepare()
    return Beginning()


def belong(role: str, parent: int, beginning: Beginning) -> None:
    """Make this process one of the daemon's children, whether it was started or forked.

    Raises:
        SystemExit: the parent has ended.
    """
    die_with_parent(parent)
    raise_score(role, daemon_score=beginning.score)


def run(
    arguments: argparse.Namespace, beginning: Beginning, origin: str = "spawned", made: Optional[Made] = None
) -> int:
    """Live until the daemon stops it; return the exit status.

    Args:
        arguments: see `arguments.parse`.
        beginning: of this process, or of that which it was forked from.
        origin: how it came to be.
        made: what it has been given.
    """
    belong(arguments.role, arguments.parent, beginning)
    if arguments.cores:
        _stay_on(arguments.cores)
    if arguments.template or origin != "spawned":
        return _serve(LaneConnection(arguments.address), arguments, beginning, origin, made)
    context = zmq.Context()
    try:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.ROUTING_ID, arguments.name.encode())
        socket.setsockopt(zmq.MAXMSGSIZE, limits.MAX_FRAME_BYTES)
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        return _serve(Connection(socket, arguments.address), arguments, beginning, origin, made)
    finally:
        context.destroy(linger=_LINGER_MS)


def _stay_on(cores: str) -> None:
    """Have this thread on these cores alone, and so each that it will start: before there is another one.

    Raises:
        SystemExit: there are no such cores, or none of them can be had any more.
    """
    try:
        os.sched_setaffinity(0, parse_cpulist(cores))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "no list of cores"
        raise SystemExit(f"cannot run on cores {cores}: {why}") from None


def ready(
    parent: int, beginning: Beginning, shown: Title, words: Sequence[str], made: Optional[Made]
) -> Callable[[], int]:
    """Return the life of a process that is forked; `words` are its arguments, but for its parent.

    Raises:
        SystemExit: they are not such.
    """
    words = [*words, "--parent", str(parent)]
    arguments = words_of.parse(words)
    # Every user of the host may read it: it names no model.
    command = [shown.first_word, *words_of.PROGRAM, "--role", arguments.role, "--parent", str(parent)]

    def live() -> int:
        sys.argv = [sys.argv[0], *words]
        shown.set_title(command)
        return run(arguments, beginning, "forked" if made is None else "template", made)

    return live


def forker(parent: int, beginning: Beginning) -> Forker:
    """Return what makes processes of this one, as children of its parent."""
    return Forker(beginning, functools.partial(ready, parent, beginning, Title()))


def _serve(
    connection: Union[Connection, LaneConnection],
    arguments: argparse.Namespace,
    beginning: Beginning,
    origin: str,
    made: Optional[Made],
) -> int:
    if arguments.ranks:
        return _serve_unit(connection, arguments)
    if arguments.members:
        return _serve_members(connection, arguments)
    try:
        engine = _engine(arguments) if made is None else made.engine
    except BuildError as error:
        return _broken(connection, error, exits.CANNOT_BUILD)
    except Exception as error:  # noqa: BLE001 - an import runs foreign code: it can fail in any way
        _log.error("%s", error, exc_info=not isinstance(error, WeightdError))
        return _broken(connection, error, exits.NO_ENGINE, f"{sys.executable}: ")
    try:
        sha256 = pinned_digest(Path(arguments.model), arguments.pinned) if made is None else made.sha256
    except ModelFileError as error:
        return _broken(connection, error, exits.CANNOT_BUILD)
    is_template = arguments.template and arguments.sharing == "on"
    session = (Session if engine.concurrency == 1 else ConcurrentSession)(
        connection,
        engine,
        Files(arguments.model, arguments.store, arguments.weights, arguments.sample),
        arguments.tolerance,
        origin=Origin(origin, clip(arguments.origin_note), made),
        heirs=Heirs(arguments.users, forker(arguments.parent, beginning) if is_template else None),
    )
    return session.run(sha256)


def _serve_unit(connection: Union[Connection, LaneConnection], arguments: argparse.Namespace) -> int:
    """Be one of the processes of a unit."""
    try:
        meeting = Meeting.from_json(arguments.ranks)
        kind = RANK_ENGINES[arguments.engine]
        _live_beside(arguments)
        if arguments.role == "broker":
            kind.load_broker(_told(meeting, arguments))
            return broker.run(connection, functools.partial(kind.serve_broker, _told(meeting, arguments)))
        says = signature(arguments.model)
        engine = kind(_told(meeting, arguments))
        sha256 = pinned_digest(Path(arguments.model), arguments.pinned)
    except (BuildError, ModelFileError) as error:
        return _broken(connection, error, exits.CANNOT_BUILD)
    except Exception as error:  # noqa: BLE001 - an import runs foreign code: it can fail in any way
        _log.error("%s", error, exc_info=not isinstance(error, WeightdError))
        return _broken(connection, error, exits.NO_ENGINE, f"{sys.executable}: ")
    given = Given(
        arguments.model, says, words_of.options(arguments.options), arguments.sample, tolerance=arguments.tolerance
    )
    return RankSession(connection, engine, meeting, given).run(sha256)


def _serve_members(connection: Union[Connection, LaneConnection], arguments: argparse.Namespace) -> int:
    """Be the process of several models."""
    try:
        told = Members.from_json(arguments.members)
        group = ModelGroup(
            arguments.device, told.share, [(each.model, words_of.options(each.options)) for each in told.models]
        )
        digests = [pinned_digest(Path(each.model), each.pinned) for each in told.models]
    except (BuildError, ModelFileError) as error:
        return _broken(connection, error, exits.CANNOT_BUILD)
    except Exception as error:  # noqa: BLE001 - an import runs foreign code: it can fail in any way
        _log.error("%s", error, exc_info=not isinstance(error, WeightdError))
        return _broken(connection, error, exits.NO_ENGINE, f"{sys.executable}: ")
    return MembersSession(connection, group, told.models).run(joint_digest(digests))


def _live_beside(arguments: argparse.Namespace) -> None:
    """Have a directory to work in, where libraries write files that may have the same names in each process."""
    directory = Path(arguments.store).with_name(f"{arguments.name}.files")
    directory.mkdir(mode=0o700, exist_ok=True)
    os.chdir(str(directory))


def _told(meeting: Meeting, arguments: argparse.Namespace) -> RankMeeting:
    return RankMeeting(
        meeting.rank,
        meeting.size,
        arguments.device,
        arguments.threads,
        meeting.host,
        meeting.port,
        meeting.table,
        meeting.group_info,
        meeting.connect_timeout,
        meeting.exec_timeout,
        meeting.buffer_mib,
    )


def _engine(arguments: argparse.Namespace) -> Engine:
    if arguments.engine not in ENGINES:
        raise BuildError(f"engine: {arguments.engine} runs ranks only")
    options, sharing = words_of.options(arguments.options), arguments.sharing == "on"
    return ENGINES[arguments.engine](Settings(arguments.threads, arguments.device, sharing, options))


def _broken(connection: Union[Connection, LaneConnection], error: Exception, status: int, what: str = "") -> int:
    connection.send(encode(Broken(clip(f"{what}{error}"), transient=is_transient(error))))
    connection.receive()  # whatever it is: the daemon has read the cause
    return status
