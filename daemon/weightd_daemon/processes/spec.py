"""What is started: the command line of a holder, a worker or a rank, with all that it runs in."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from weightd_common.launch_arguments import RendezvousInfo
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.generations.actions import Role
from weightd_daemon.generations.base import GenerationBase
from weightd_daemon.processes.events import Snapshot
from weightd_daemon.processes.files import GenerationFiles


@dataclass(frozen=True)
class WorkerProgram:
    """What holders and workers run, whichever of them they are, or one process of a unit.

    Attributes:
        python: the interpreter.
        engine: the library that runs the model.
        model: the file that is loaded.
        device: where it runs: the CPU, a set of its cores, or an Ascend card.
        threads: of one predict.
        sharing: whether weights are shared.
        options: of the engine, as JSON.
        weights: a file of arrays to load over the model's weights, or "".
        sample: a file of inputs for the self-test, or "".
        tolerance: how far answers to the self-test may be apart.
        environment: all of it; None for that of this process.
        spawn_reason: why it is not forked, "" where it may be.
        can_be_template: whether workers may be forked of it once it has built.
        snapshot_identity: by what it knows the model again, and its digest.
        sharer_count: how many share what it builds, where it is to ask whether that is worth a process; else 0.
        cores: on which all its threads stay, "" for those that weightd itself has.
        rendezvous: how it meets the other processes of its unit; None: it is of none.
        rank_table: what the rank table is to say that is written for them, or "".
        members_json: the models of a process that serves several, as JSON, or "".
    """

    python: str
    engine: str
    model: str
    device: str
    threads: int = 1
    sharing: bool = True
    options: str = "{}"
    weights: str = ""
    sample: str = ""
    tolerance: float = 0.0
    environment: Mapping[str, str] | None = None
    spawn_reason: str = ""
    can_be_template: bool = False
    snapshot_identity: str = ""
    sharer_count: int = 0
    cores: str = ""
    rendezvous: RendezvousInfo | None = None
    rank_table: str = ""
    members_json: str = ""


@dataclass(frozen=True)
class ProcessSpec:
    """A process that is to be started.

    Attributes:
        name: no other child that runs has it.
        command: the interpreter, and what it runs. Every user of the host may read it: it names no model.
        arguments: of that, but for who is the parent; the process reads them from stdin.
        log: where its output goes.
        environment: all of it.
        is_channel_only: whether it speaks over its channel alone, however it comes to be.
    """

    name: str
    command: Sequence[str]
    arguments: Sequence[str]
    log: Path
    environment: Mapping[str, str]
    is_channel_only: bool = False

    def with_parent(self, parent: int) -> ProcessSpec:
        """Return the same for a process of this parent."""
        return replace(self, command=[*self.command, "--parent", str(parent)])

    @property
    def stdin_data(self) -> bytes:
        """What the process reads from stdin."""
        return json.dumps([*self.arguments]).encode()

    def with_origin_note(self, why: str) -> ProcessSpec:
        """Return the same for a process that tells why it was not forked."""
        return replace(self, arguments=[*self.arguments, "--origin-note", why])


class SurvivingProcess(NamedTuple):
    """A child that outlives the daemon, and has not been waited for: so its pid is its own."""

    pid: int
    name: str
    log: Path


def worker_program(config: ModelConfig, generation: GenerationBase, snapshot: Snapshot, device: str) -> WorkerProgram:
    """Return what the children of a generation run on a device."""
    return WorkerProgram(
        config.python,
        config.engine,
        snapshot.path,
        device,
        threads=config.threads,
        sharing=generation.spec.is_sharing,
        options=config.engine_options.to_json(),
        weights=snapshot.weights,
        sample=snapshot.sample,
        tolerance=config.selftest_tolerance,
        spawn_reason=_spawn_reason(config),
        can_be_template=generation.spec.can_fork_from_holder,
        snapshot_identity=f"{snapshot.identity}:{snapshot.sha256}" if snapshot.identity else "",
        sharer_count=0 if config.is_on_cards else generation.spec.process_count,
        cores=config.cores_of(device),
    )


def _spawn_reason(config: ModelConfig) -> str:
    if config.is_on_cards:
        return "what drives a card does not survive a fork"
    return "" if config.can_fork else 'start = "spawn"'


def fork_server_spec(python: str, engine: str, name: str, address: str, log: Path) -> ProcessSpec:
    """Return how the process is started of which others are forked that run this engine."""
    command = [python, "-m", "weightd_worker.forkserver", "--engine", engine]
    arguments = ["--address", address, "--name", name]
    return ProcessSpec(name, command, arguments, log, _environment(None, log), is_channel_only=True)


def child_spec(program: WorkerProgram, name: str, role: Role, address: str, files: GenerationFiles) -> ProcessSpec:
    """Return how a child is started: one program for all, the orders it gets make the difference.

    Args:
        program: what it runs.
        name: of the child, under which it connects.
        role: what it is for; its command line shows it.
        address: where it connects.
        files: where its log is, the page store that a holder may write, and the rank table.
    """
    argv = ["--address", address, "--name", name, "--role", role.value]
    argv += ["--engine", program.engine, "--model", program.model, "--threads", str(program.threads)]
    argv += ["--device", program.device, "--store", str(files.store)]
    if program.cores:
        argv += ["--cores", program.cores]
    if program.snapshot_identity:
        argv += ["--snapshot-identity", program.snapshot_identity]
    if not program.sharing:
        argv += ["--sharing", "off"]
    if program.options != WorkerProgram.options:
        argv += ["--options", program.options]
    if program.weights:
        argv += ["--weights", program.weights]
    if program.sample:
        argv += ["--selftest-inputs", program.sample]
    if program.tolerance:
        argv += ["--tolerance", repr(program.tolerance)]
    argv += _rank_arguments(program, files)
    if role is Role.HOLDER:
        argv += ["--sharer-count", str(program.sharer_count)] if program.sharer_count else []
        argv += ["--template"] if program.can_be_template else []
    command, log = [program.python, "-m", "weightd_worker", "--role", role.value], files.log(name)
    is_template = program.can_be_template and role is Role.HOLDER
    return ProcessSpec(name, command, argv, log, _environment(program.environment, log), is_channel_only=is_template)


def _rank_arguments(program: WorkerProgram, files: GenerationFiles) -> list[str]:
    argv: list[str] = []
    if program.rendezvous is not None:
        rendezvous = (
            program.rendezvous._replace(rank_table=str(files.rank_table)) if program.rank_table else program.rendezvous
        )
        argv += ["--rendezvous", rendezvous.json()]
    if program.members_json:
        argv += ["--models", program.members_json]
    return argv


def _environment(base: Mapping[str, str] | None, log: Path) -> Mapping[str, str]:
    """All of it.

    Of numpy a process only wants arrays, and of ONNX Runtime no telemetry: without either it has one thread. Temporary
    files go with its log: the /tmp of a service that has PrivateTmp= is removed when that is restarted.
    """
    overrides = {"OPENBLAS_NUM_THREADS": "1", "ORT_DISABLE_TELEMETRY": "1", "TMPDIR": str(log.parent)}
    return {**(os.environ if base is None else base), **overrides}
