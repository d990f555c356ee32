"""Snapshots, while they are taken: copied by a process of their own, told once the cards have said what they have."""

from __future__ import annotations

import functools
import time
from collections.abc import Callable
from pathlib import Path

from weightd.daemon.children import helpers, snapshotter
from weightd.daemon.children.files import SnapshotFiles
from weightd.daemon.children.helpers import Answer
from weightd.daemon.children.owner import Owner, Snapshot
from weightd.daemon.children.probing import Probing
from weightd.daemon.children.running import Running
from weightd.daemon.children.snapshotter import Taken
from weightd.daemon.config import canary
from weightd.daemon.config.model import ModelConfig
from weightd.daemon.generations.plan import Source
from weightd.daemon.host.directories import ClaimError
from weightd.daemon.host.ends import End


def directory_name(model: str, number: int) -> str:
    """Return the name of the directory for the snapshot of a model's source of this number."""
    return f"{model}.v{number}.snapshot"


class Pinning:
    """Takes snapshots.

    Args:
        directory: where they lie, each in a directory of its own.
        running: has the processes.
        probing: asks the cards of a model.
        later: has something called soon, with the clock, but not before this call has returned.
    """

    def __init__(
        self, directory: Path, running: Running, probing: Probing, later: Callable[[Callable[[float], None]], None]
    ) -> None:
        self._directory = directory
        self._running = running
        self._probing = probing
        self._later = later
        # What was taken last of each file, by its path.
        self._taken: dict[str, Taken] = {}

    def pin(self, owner: Owner, model: str, config: ModelConfig, source: Source) -> None:
        """Start the process that takes the snapshot."""
        files = self._files(model, source)
        sample = canary.sample(config.canary)
        arguments = [source.path, str(files.model_dir)]
        arguments += [source.weights, str(files.weights)] if source.weights else []
        arguments += [sample, str(files.sample)] if sample else []
        tell = functools.partial(self._on_answer, owner, config, source, files)
        try:
            files.create()
            known = self._taken.get(source.path)
            helpers.ask(self._running, files.directory.name, snapshotter.command(arguments, known), files.log, tell)
        except (ClaimError, OSError) as error:
            self._later(functools.partial(owner.pin_failed, source, f"cannot take a snapshot: {error}"))

    def unpin(self, model: str, source: Source) -> None:
        """Remove the snapshot, or stop taking it."""
        files = self._files(model, source)
        name = files.directory.name
        there = self._taken.get(source.path)
        if there is not None and files.directory in Path(there.path).parents:
            del self._taken[source.path]
        for each in list(self._running.processes):
            if each == name or each.startswith(f"{name}."):
                self._running.kill(each)
        if name not in self._running.processes:
            files.remove()

    def _files(self, model: str, source: Source) -> SnapshotFiles:
        return SnapshotFiles(self._directory / directory_name(model, source.number))

    def _on_answer(
        self, owner: Owner, config: ModelConfig, source: Source, files: SnapshotFiles, answer: Answer, end: End
    ) -> None:
        sha256, nbytes = answer.get("sha256"), answer.get("nbytes")
        if end.status != 0 or not isinstance(sha256, str) or not isinstance(nbytes, int):
            files.remove()
            cause = answer.get("error") or end.words or f"the snapshot {end.how}"
            owner.pin_failed(source, cause, time.monotonic())
            return
        path = str(files.model_dir / Path(source.path).name)
        taken = Taken(path, sha256, nbytes, str(answer.get("identity", "")), str(answer.get("origin", "")))
        if taken.origin:
            self._taken[source.path] = taken
        weights = str(files.weights) if source.weights else ""
        sample = str(files.sample) if canary.sample(config.canary) else ""
        snapshot = Snapshot(path, weights, sha256, nbytes, sample, taken.identity)
        self._probing.ask(
            config.python, config.devices, files.log, lambda: owner.pinned(source, snapshot, time.monotonic())
        )
