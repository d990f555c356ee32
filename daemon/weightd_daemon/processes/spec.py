"""Specifications of processes: command line, stdin, environment and log of holders, workers, ranks and fork servers."""

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
    """The model and the settings with which the processes of one generation run on one device.

    Holders and workers have the same program. Each rank and the broker of a rank group have their own program.

    Attributes:
        python: the path of the Python interpreter.
        engine: the library that runs the model.
        model: the path of the model file.
        device: the device: the CPU, a set of its cores, or an Ascend card.
        threads: the number of threads of one predict.
        sharing: whether the weights are shared.
        options: the options of the engine, as JSON.
        weights: the path of a file of arrays that replace weights of the model, or "".
        sample: the path of a file of inputs for the self-test, or "".
        tolerance: the largest accepted difference from the known answers of the self-test.
        environment: the complete environment; None for the environment of the daemon.
        spawn_reason: why the process must not be forked; "" if it may be forked.
        can_be_template: whether workers may be forked from the holder after its build.
        snapshot_identity: the identity of the snapshot's files, ":" and the digest of the model. A process that finds
            the same identity takes this digest, instead of reading the snapshot to compute it.
        sharer_count: the number of processes that will share the holder's weights. The holder shares them only if this
            saves more memory than the holder itself takes. With 0, the holder shares them in any case.
        cores: the cores on which all threads run; "" for the cores of the daemon.
        rendezvous: the rendezvous of a rank group; None outside of a rank group.
        rank_table: the content of the generated rank table, or "".
        members_json: the models of a model group, as JSON, or "".
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
    """A process to start.

    Attributes:
        name: a name that no other running child has.
        command: the command line: the interpreter and the module that it runs. Every user of the host can read the
            command line, so it does not name the model.
        arguments: the arguments of the module, which the process reads from stdin. The pid of its parent is not one of
            them: it is on the command line.
        log: the file for stdout and stderr.
        environment: the complete environment.
        is_channel_only: whether the process uses only its channel, without ZeroMQ, even if it is spawned. A forked
            process never uses ZeroMQ.
    """

    name: str
    command: Sequence[str]
    arguments: Sequence[str]
    log: Path
    environment: Mapping[str, str]
    is_channel_only: bool = False

    def with_parent(self, parent: int) -> ProcessSpec:
        """Return the same spec with the pid of the parent on the command line."""
        return replace(self, command=[*self.command, "--parent", str(parent)])

    @property
    def stdin_data(self) -> bytes:
        """The arguments as JSON, which the process reads from stdin."""
        return json.dumps([*self.arguments]).encode()

    def with_origin_note(self, why: str) -> ProcessSpec:
        """Return the same spec with an argument that tells the process why it was not forked."""
        return replace(self, arguments=[*self.arguments, "--origin-note", why])


class SurvivingProcess(NamedTuple):
    """A child that has outlived its daemon. No other process can have its pid, because it has not been reaped yet."""

    pid: int
    name: str
    log: Path


def worker_program(config: ModelConfig, generation: GenerationBase, snapshot: Snapshot, device: str) -> WorkerProgram:
    """Return the program of a generation's holder and workers on a device."""
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
        return "the driver of a card does not survive a fork"
    return "" if config.can_fork else 'start = "spawn"'


def fork_server_spec(python: str, engine: str, name: str, address: str, log: Path) -> ProcessSpec:
    """Return the spec of the fork server for an engine."""
    command = [python, "-m", "weightd_worker.forkserver", "--engine", engine]
    arguments = ["--address", address, "--name", name]
    return ProcessSpec(name, command, arguments, log, _environment(None, log), is_channel_only=True)


def child_spec(program: WorkerProgram, name: str, role: Role, address: str, files: GenerationFiles) -> ProcessSpec:
    """Return the spec of a holder, a worker, a rank or a broker. All of them run the same module.

    Args:
        program: the model and the settings of the child.
        name: the name of the child, with which it identifies itself to the daemon.
        role: the role of the child, visible on its command line.
        address: the address to which the child connects.
        files: the paths of the log, the page store and the rank table.
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
    """Return the complete environment of a process.

    OpenBLAS and the telemetry of ONNX Runtime must not start threads: only a process with one thread can be forked.
    Temporary files go to the directory of the log, not to /tmp: with PrivateTmp=, systemd removes the /tmp of a service
    when the service is restarted, while holders and workers continue to run.
    """
    overrides = {"OPENBLAS_NUM_THREADS": "1", "ORT_DISABLE_TELEMETRY": "1", "TMPDIR": str(log.parent)}
    return {**(os.environ if base is None else base), **overrides}
