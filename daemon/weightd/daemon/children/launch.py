"""What is started: the command line of a holder or a worker, with all that it runs in."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from weightd.daemon.children.files import GenerationFiles
from weightd.daemon.children.owner import Snapshot
from weightd.daemon.config.model import ModelConfig
from weightd.daemon.generations.actions import Role
from weightd.daemon.generations.generation import Generation


@dataclass(frozen=True)
class Program:
    """What holders and workers run, whichever of them they are.

    Attributes:
        python: the interpreter.
        engine: the library that runs the model.
        model: the file that is loaded.
        device: where it runs: the CPU, or an Ascend card.
        threads: of one predict.
        sharing: whether weights are shared.
        options: of the engine, as JSON.
        weights: a file of arrays to load over the model's weights, or "".
        sample: a file of inputs for the canary, or "".
        tolerance: how far answers to the canary may be apart.
        environment: all of it; None for that of this process.
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


@dataclass(frozen=True)
class Launch:
    """A process that is to be started.

    Attributes:
        name: no other child that runs has it.
        argv: the command, but for who is the parent.
        log: where its output goes.
        environment: all of it.
    """

    name: str
    argv: Sequence[str]
    log: Path
    environment: Mapping[str, str]


def program(config: ModelConfig, generation: Generation, snapshot: Snapshot) -> Program:
    """Return what the children of a generation run."""
    return Program(
        config.python,
        config.engine,
        snapshot.path,
        generation.device,
        threads=config.threads,
        sharing=generation.terms.sharing,
        options=config.options.json(),
        weights=snapshot.weights,
        sample=snapshot.sample,
        tolerance=config.canary_tolerance,
    )


def child(program: Program, name: str, role: Role, address: str, files: GenerationFiles) -> Launch:
    """Return how a holder or a worker is started: one program for both, the orders it gets make the difference.

    Args:
        program: what it runs.
        name: of the child, under which it connects.
        role: for who looks at its command line.
        address: where it connects.
        files: where its log is, and the page store that a holder may write.
    """
    argv = [program.python, "-m", "weightd.worker", "--address", address, "--name", name, "--role", role.value]
    argv += ["--engine", program.engine, "--model", program.model, "--threads", str(program.threads)]
    argv += ["--device", program.device, "--store", str(files.store)]
    if not program.sharing:
        argv += ["--sharing", "off"]
    if program.options != Program.options:
        argv += ["--options", program.options]
    if program.weights:
        argv += ["--weights", program.weights]
    if program.sample:
        argv += ["--sample", program.sample]
    if program.tolerance:
        argv += ["--tolerance", repr(program.tolerance)]
    return Launch(name, argv, files.log(name), dict(os.environ if program.environment is None else program.environment))
