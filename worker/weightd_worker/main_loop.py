"""Main function of a spawned or forked child process: sets up the process, makes the engine and runs a session."""

from __future__ import annotations

import argparse
import faulthandler
import functools
import logging
import os
import sys
from pathlib import Path
from typing import Callable, Optional, Sequence

import zmq

from weightd_common.devices import parse_cpulist
from weightd_common.launch_arguments import GroupMembers, RendezvousInfo, joint_digest
from weightd_common.modelfiles.files import ModelFileError, snapshot_digest
from weightd_common.process_attributes import ProcessTitle, enter_load_priority, raise_score
from weightd_common.process_start import die_with_parent, disable_core_dumps
from weightd_common.transient import is_transient
from weightd_protocol import limits
from weightd_protocol.codec import clip, encode
from weightd_protocol.errors import WeightdError
from weightd_protocol.messages.worker import ProcessFailed
from weightd_worker import arguments as child_arguments
from weightd_worker import exit_codes, pagesharing
from weightd_worker.connection import ChannelConnection, Connection, WorkerConnection
from weightd_worker.engines import ENGINES, RANK_ENGINES
from weightd_worker.engines.engine import BuildError, BuildSettings, Engine
from weightd_worker.engines.mindspore import read_signature
from weightd_worker.engines.mindspore_lite.group import ModelGroup
from weightd_worker.engines.ranks import RankRendezvous
from weightd_worker.forking import Forker, InheritedModel, ProcessState
from weightd_worker.sessions.build import ModelInputs
from weightd_worker.sessions.concurrent import ConcurrentSession
from weightd_worker.sessions.group import MultiModelSession
from weightd_worker.sessions.model import ProcessOrigin, SharingPlan, WorkerSession
from weightd_worker.sessions.rank import RankInputs, RankSession, run_broker

_log = logging.getLogger("weightd.worker")

# Milliseconds for which libzmq may delay the exit to deliver the last message, which contains the reason for the exit.
_LINGER_MS = 2000


def prepare_process() -> ProcessState:
    """Set up a process that was just started: a spawned child, or a fork server. Return its state."""
    # This process inherits the daemon's limit for core dumps, but a wrapper script around the interpreter may have
    # raised the limit.
    disable_core_dumps()
    # Write the stacks of all threads to the log after a crash, and after the SIGABRT that the daemon sends to a hung
    # process.
    faulthandler.enable()
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.INFO)
    pagesharing.prepare()
    return ProcessState()


def attach_to_parent(role: str, parent_pid: int, process_state: ProcessState) -> None:
    """Make the kernel kill this process when its parent exits, and set the OOM score for this process's role.

    Raises:
        SystemExit: the parent has exited.
    """
    die_with_parent(parent_pid)
    raise_score(role, daemon_score=process_state.oom_score)


def run(
    arguments: argparse.Namespace,
    process_state: ProcessState,
    origin: str = "spawned",
    inherited_model: Optional[InheritedModel] = None,
) -> int:
    """Run the session of a child until the daemon stops it, and return the exit status.

    Args:
        arguments: the parsed arguments, see `arguments.parse`.
        process_state: the state of this process, or of the process from which it was forked.
        origin: how this process was started: "spawned", "forked" by a fork server, or forked from a "template".
        inherited_model: the built model, if this process was forked from a template; otherwise None.
    """
    attach_to_parent(arguments.role, arguments.parent, process_state)
    if arguments.cores:
        _set_cpu_affinity(arguments.cores)
    if arguments.template or origin != "spawned":
        return _run_session(ChannelConnection(arguments.address), arguments, process_state, origin, inherited_model)
    context = zmq.Context()
    try:
        socket = context.socket(zmq.DEALER)
        socket.setsockopt(zmq.ROUTING_ID, arguments.name.encode())
        socket.setsockopt(zmq.MAXMSGSIZE, limits.MAX_FRAME_BYTES)
        socket.setsockopt(zmq.LINGER, _LINGER_MS)
        return _run_session(
            WorkerConnection(socket, arguments.address), arguments, process_state, origin, inherited_model
        )
    finally:
        context.destroy(linger=_LINGER_MS)


def _set_cpu_affinity(cores: str) -> None:
    """Pin this thread to the cores in a core list. Threads that it starts later inherit the affinity.

    Raises:
        SystemExit: the core list is invalid, or none of the cores is available.
    """
    try:
        os.sched_setaffinity(0, parse_cpulist(cores))
    except (OSError, ValueError) as error:
        why = error.strerror if isinstance(error, OSError) else "no list of cores"
        raise SystemExit(f"cannot run on cores {cores}: {why}") from None


def make_child_main(
    parent_pid: int,
    process_state: ProcessState,
    title: ProcessTitle,
    argv: Sequence[str],
    inherited_model: Optional[InheritedModel],
) -> Callable[[], int]:
    """Return the main function of a process that will be forked from this process.

    Args:
        parent_pid: the pid of the parent of both processes.
        process_state: the state of this process.
        title: sets the command line that `ps` shows for the forked process.
        argv: the command-line arguments of the forked process, without `--parent`.
        inherited_model: the built model, if this process is a template; otherwise None.

    Raises:
        SystemExit: the arguments are invalid.
    """
    argv = [*argv, "--parent", str(parent_pid)]
    arguments = child_arguments.parse(argv)
    # The command line shown by `ps` names no model, because every user of the host can read it.
    command = [title.first_word, *child_arguments.PROGRAM, "--role", arguments.role, "--parent", str(parent_pid)]

    def child_main() -> int:
        sys.argv = [sys.argv[0], *argv]
        title.set_title(command)
        return run(arguments, process_state, "forked" if inherited_model is None else "template", inherited_model)

    return child_main


def make_forker(parent_pid: int, process_state: ProcessState) -> Forker:
    """Return a forker for this process. The processes that it forks are children of `parent_pid`."""
    return Forker(process_state, functools.partial(make_child_main, parent_pid, process_state, ProcessTitle()))


def _run_session(
    connection: Connection,
    arguments: argparse.Namespace,
    process_state: ProcessState,
    origin: str,
    inherited_model: Optional[InheritedModel],
) -> int:
    if arguments.rendezvous:
        return _run_rank_or_broker(connection, arguments)
    if arguments.models:
        return _run_model_group(connection, arguments)
    enter_load_priority(process_state.nice)
    try:
        engine = _make_engine(arguments) if inherited_model is None else inherited_model.engine
    except BuildError as error:
        return _report_failure(connection, error, exit_codes.CANNOT_BUILD)
    except Exception as error:  # noqa: BLE001 - an import runs foreign code: it can fail in any way
        _log.error("%s", error, exc_info=not isinstance(error, WeightdError))
        return _report_failure(connection, error, exit_codes.NO_ENGINE, f"{sys.executable}: ")
    try:
        sha256 = (
            snapshot_digest(Path(arguments.model), arguments.snapshot_identity)
            if inherited_model is None
            else inherited_model.sha256
        )
    except ModelFileError as error:
        return _report_failure(connection, error, exit_codes.CANNOT_BUILD)
    is_template = arguments.template and arguments.sharing == "on"
    session = (WorkerSession if engine.concurrency == 1 else ConcurrentSession)(
        connection,
        engine,
        ModelInputs(
            arguments.model, arguments.store, arguments.weights, arguments.selftest_inputs, arguments.tolerance
        ),
        origin=ProcessOrigin(origin, clip(arguments.origin_note), inherited_model, process_state.nice),
        sharing_plan=SharingPlan(
            arguments.sharer_count, make_forker(arguments.parent, process_state) if is_template else None
        ),
    )
    status = session.run(sha256)
    # The kernel frees the memory of the model when this process exits, which must not delay requests either.
    enter_load_priority(process_state.nice)
    return status


def _run_rank_or_broker(connection: Connection, arguments: argparse.Namespace) -> int:
    """Run a process of a rank group: a rank, or the broker."""
    try:
        rendezvous = RendezvousInfo.from_json(arguments.rendezvous)
        engine_type = RANK_ENGINES[arguments.engine]
        _enter_work_dir(arguments)
        if arguments.role == "broker":
            engine_type.load_broker(_to_rank_rendezvous(rendezvous, arguments))
            return run_broker(
                connection, functools.partial(engine_type.serve_broker, _to_rank_rendezvous(rendezvous, arguments))
            )
        file_signature = read_signature(arguments.model)
        engine = engine_type(_to_rank_rendezvous(rendezvous, arguments))
        sha256 = snapshot_digest(Path(arguments.model), arguments.snapshot_identity)
    except (BuildError, ModelFileError) as error:
        return _report_failure(connection, error, exit_codes.CANNOT_BUILD)
    except Exception as error:  # noqa: BLE001 - an import runs foreign code: it can fail in any way
        _log.error("%s", error, exc_info=not isinstance(error, WeightdError))
        return _report_failure(connection, error, exit_codes.NO_ENGINE, f"{sys.executable}: ")
    rank_inputs = RankInputs(
        arguments.model,
        file_signature,
        child_arguments.parse_options(arguments.options),
        arguments.selftest_inputs,
        tolerance=arguments.tolerance,
    )
    return RankSession(connection, engine, rendezvous, rank_inputs).run(sha256)


def _run_model_group(connection: Connection, arguments: argparse.Namespace) -> int:
    """Run a process that serves all models of a model group."""
    try:
        members = GroupMembers.from_json(arguments.models)
        group = ModelGroup(
            arguments.device,
            members.sharing,
            [(each.model, child_arguments.parse_options(each.options)) for each in members.models],
        )
        digests = [snapshot_digest(Path(each.model), each.snapshot_identity) for each in members.models]
    except (BuildError, ModelFileError) as error:
        return _report_failure(connection, error, exit_codes.CANNOT_BUILD)
    except Exception as error:  # noqa: BLE001 - an import runs foreign code: it can fail in any way
        _log.error("%s", error, exc_info=not isinstance(error, WeightdError))
        return _report_failure(connection, error, exit_codes.NO_ENGINE, f"{sys.executable}: ")
    return MultiModelSession(connection, group, members.models).run(joint_digest(digests))


def _enter_work_dir(arguments: argparse.Namespace) -> None:
    """Change to a working directory that only this process uses.

    Libraries write files to the working directory, and may use the same names in each process.
    """
    directory = Path(arguments.store).with_name(f"{arguments.name}.files")
    directory.mkdir(mode=0o700, exist_ok=True)
    os.chdir(str(directory))


def _to_rank_rendezvous(rendezvous: RendezvousInfo, arguments: argparse.Namespace) -> RankRendezvous:
    return RankRendezvous(
        rendezvous.rank,
        rendezvous.size,
        arguments.device,
        arguments.threads,
        rendezvous.host,
        rendezvous.port,
        rendezvous.rank_table,
        rendezvous.group_info,
        rendezvous.connect_timeout_s,
        rendezvous.exec_timeout_s,
        rendezvous.buffer_mib,
    )


def _make_engine(arguments: argparse.Namespace) -> Engine:
    if arguments.engine not in ENGINES:
        raise BuildError(f"engine: {arguments.engine} runs ranks only")
    options, sharing = child_arguments.parse_options(arguments.options), arguments.sharing == "on"
    return ENGINES[arguments.engine](BuildSettings(arguments.threads, arguments.device, sharing, options))


def _report_failure(connection: Connection, error: Exception, status: int, prefix: str = "") -> int:
    connection.send(encode(ProcessFailed(clip(f"{prefix}{error}"), is_transient=is_transient(error))))
    connection.receive()  # wait for the daemon's reply, which shows that the daemon has read the reason
    return status
