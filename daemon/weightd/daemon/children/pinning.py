"""Snapshots, while they are taken: copied by a process of their own, told once the cards have said what they have."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from weightd.daemon.children import helpers, meter, snapshotter
from weightd.daemon.children.files import SnapshotFiles
from weightd.daemon.children.helpers import Answer
from weightd.daemon.children.meter import Copied
from weightd.daemon.children.owner import Owner, SliceSnapshot, Snapshot, digest_of
from weightd.daemon.children.probing import Probing
from weightd.daemon.children.running import Running
from weightd.daemon.children.snapshotter import Single, Taken, Wanted, changed
from weightd.daemon.config import canary
from weightd.daemon.config.model import ModelConfig
from weightd.daemon.config.ranks import RANK_PLACEHOLDER
from weightd.daemon.generations.plan import Source
from weightd.daemon.host import audit, clock
from weightd.daemon.host.directories import ClaimError
from weightd.daemon.host.ends import End
from weightd.daemon.host.shortage import explained
from weightd.shared.reach import OPERATOR
from weightd.shared.transient import is_transient

# Where the copy of a model has vanished that still serves, and its file is another one by now.
_REMEDY = "the workers that are there go on; put the old file back, or load the new one with weightctl update"


def directory_name(model: str, number: int) -> str:
    """Return the name of the directory for the snapshot of a model's source of this number."""
    return f"{model}.v{number}.snapshot"


class _Order(NamedTuple):
    """A snapshot that is being taken."""

    model: str
    config: ModelConfig
    source: Source
    files: SnapshotFiles
    expected: str

    def note(self, result: str, detail: str = "", sha256: str = "") -> None:
        """Write to the audit log whether the files could be read. A client's update that fails has an entry anyway."""
        source = self.source
        uid = source.weights_grant.uid if source.weights and source.grant.uid is None else source.grant.uid
        if uid is not None and result != audit.OK:
            return
        user = audit.OPERATOR if uid is None else f"uid {uid}"
        entry = audit.Entry("load", user, "", self.model, source.path, source.weights)
        audit.write(entry, result, detail, sha256=sha256)


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

    def pin(self, owner: Owner, model: str, config: ModelConfig, source: Source, expected: str = "") -> None:
        """Start the process that takes the snapshot; `expected`: the sha256 that it has to have, "" for any."""
        if expected and source.weights:
            text = f"the copy of {source.weights} is gone, and nobody knows whether that file is the same; {_REMEDY}"
            self._later(functools.partial(owner.on_snapshot_failed, source, text))
            return
        files = self._files(model, source)
        wanted = [
            Wanted(path, str(directory), self._taken.get(path), expected if config.ranks is None else "", source.grant)
            for path, directory in _models(config, source, files)
        ]
        more = [
            Single(path, str(copy), source.weights_grant if copy == files.weights else OPERATOR)
            for path, copy in _files(config, source, files)
        ]
        tell = functools.partial(self._on_answer, owner, _Order(model, config, source, files, expected))
        try:
            files.create()
            given = snapshotter.Order(wanted, str(files.meter), more).json()
            helpers.ask(self._running, files.directory.name, snapshotter.command(), files.log, tell, order=given)
        except (ClaimError, OSError) as error:
            cause = explained(f"cannot take a snapshot: {error}")
            self._later(functools.partial(owner.on_snapshot_failed, source, cause, is_transient=is_transient(error)))

    def copied(self, model: str, source: Source) -> Copied | None:
        """Return how much of a source's snapshot was copied; None where nothing was, or it is not known."""
        return meter.read(self._files(model, source).meter)

    def unpin(self, model: str, source: Source) -> None:
        """Remove the snapshot, or stop taking it."""
        files = self._files(model, source)
        name = files.directory.name
        for path in [path for path, there in self._taken.items() if files.directory in Path(there.path).parents]:
            del self._taken[path]
        for each in list(self._running.processes):
            if each == name or each.startswith(f"{name}."):
                self._running.kill(each)
        if name not in self._running.processes:
            files.remove()

    def _files(self, model: str, source: Source) -> SnapshotFiles:
        return SnapshotFiles(self._directory / directory_name(model, source.number))

    def _on_answer(self, owner: Owner, order: _Order, answer: Answer, end: End) -> None:
        _, config, source, files, expected = order
        models = _models(config, source, files)
        try:
            copies = [str(directory / Path(path).name) for path, directory in models]
            taken = [Taken(copy, *each) for copy, each in zip(copies, answer.get("taken", ()), strict=True)]
        except (TypeError, ValueError):
            taken = []
        if end.status != 0 or not taken:
            files.remove()
            cause = explained(answer["error"]) if answer.get("error") else end.words or f"the snapshot {end.how}"
            if answer.get("changed") is True:
                cause = f"{cause}; {_REMEDY}"
            transient = answer.get("transient") is True or end.is_transient
            order.note(audit.FAILED, cause)
            owner.on_snapshot_failed(source, cause, clock.now(), is_transient=transient)
            return
        self._taken.update((path, each) for (path, _), each in zip(models, taken, strict=True) if each.origin)
        snapshot = _snapshot(config, source, files, taken)
        if expected and snapshot.sha256 != expected:
            files.remove()
            cause = f"{changed(source.path, expected, snapshot.sha256)}; {_REMEDY}"
            order.note(audit.FAILED, cause)
            owner.on_snapshot_failed(source, cause, clock.now())
            return
        order.note(audit.OK, sha256=snapshot.sha256)
        self._probing.ask(config.python, config.devices, files.log, lambda: owner.on_snapshot_taken(source, snapshot, clock.now()))


def _models(config: ModelConfig, source: Source, files: SnapshotFiles) -> list[tuple[str, Path]]:
    """Return what is copied with all that belongs to it, and to where: the model file, or the slice of each rank."""
    if config.ranks is None:
        return [(source.path, files.model_dir)]
    return [(source.path.replace(RANK_PLACEHOLDER, str(rank)), files.slice_dir(rank)) for rank in range(config.ranks.size)]


def _files(config: ModelConfig, source: Source, files: SnapshotFiles) -> list[tuple[str, Path]]:
    """Return further files, and their copies."""
    ranks = config.ranks
    pairs = [(source.weights, files.weights), (canary.inputs_path(config.canary), files.sample)]
    if ranks is not None:
        pairs += [(ranks.group_info_path(rank), files.group_info(rank)) for rank in range(ranks.size)]
        pairs += [(ranks.rank_table_path(group), files.table(group)) for group in range(len(ranks.groups))]
    return [(path, copy) for path, copy in pairs if path]


def _snapshot(config: ModelConfig, source: Source, files: SnapshotFiles, taken: Sequence[Taken]) -> Snapshot:
    there = {copy for _, copy in _files(config, source, files)}
    weights, sample = (str(copy) if copy in there else "" for copy in (files.weights, files.sample))
    path, sha256, nbytes, identity, _ = taken[0]
    ranks = config.ranks
    if ranks is None:
        return Snapshot(path, weights, sha256, nbytes, sample, identity)
    infos = [str(files.group_info(rank)) if ranks.group_info_file else "" for rank in range(ranks.size)]
    slices = tuple(SliceSnapshot(*each[:4], group_info=info) for each, info in zip(taken, infos, strict=True))
    tables = tuple(str(files.table(group)) for group in range(len(ranks.groups)) if files.table(group) in there)
    nbytes = sum(each.nbytes for each in taken)
    return Snapshot(path, weights, digest_of(slices), nbytes, sample, identity, slices, tables)
