"""Snapshot service: takes snapshots of models in helper processes, then queries the memory of the models' cards."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import NamedTuple

from weightd_common.safe_open import OPERATOR
from weightd_common.transient import is_transient
from weightd_daemon.config import selftest
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.config.ranks import RANK_PLACEHOLDER
from weightd_daemon.generations.spec import ModelSource
from weightd_daemon.platform import audit, event_loop
from weightd_daemon.platform.directories import PathInUse
from weightd_daemon.platform.exit_cause import ExitCause
from weightd_daemon.platform.resource_limits import with_limit_hint
from weightd_daemon.processes import snapshotter
from weightd_daemon.processes.device_probe import DeviceProbe
from weightd_daemon.processes.events import SliceSnapshot, Snapshot, SnapshotEventHandler, digest_of
from weightd_daemon.processes.files import SnapshotFiles
from weightd_daemon.processes.process_table import OneshotResult, ProcessTable, run_oneshot
from weightd_daemon.processes.snapshotter import (
    CopyProgress,
    SingleFile,
    SnapshotOrder,
    SnapshotRequest,
    SnapshotResult,
    changed_message,
    read_copy_progress,
)

# Appended to the error text if the snapshot of a serving model has vanished and its model file may have changed.
_REMEDY = "the current workers continue; restore the old file, or load the new one with weightctl update"


def snapshot_directory_name(model: str, number: int) -> str:
    """Return the name of a snapshot's directory. `number` is the number of the model's source."""
    return f"{model}.v{number}.snapshot"


class _PendingSnapshot(NamedTuple):
    """A snapshot whose helper process is running."""

    model: str
    config: ModelConfig
    source: ModelSource
    files: SnapshotFiles
    expected_sha256: str

    def write_audit(self, result: str, detail: str = "", sha256: str = "") -> None:
        """Write an audit entry for a load. Write none for a client's failed update, which has its own entry."""
        source = self.source
        uid = source.weights_grant.uid if source.weights and source.grant.uid is None else source.grant.uid
        if uid is not None and result != audit.OK:
            return
        user = audit.OPERATOR if uid is None else f"uid {uid}"
        entry = audit.AuditEntry("load", user, "", self.model, source.path, source.weights)
        audit.write(entry, result, detail, sha256=sha256)


class SnapshotService:
    """Takes and removes the snapshots of models.

    Args:
        directory: the parent directory of all snapshots.
        process_table: starts and watches the helper processes.
        device_probe: queries the free memory of a model's cards.
        defer: has the event loop call a function with the current time after the caller has returned.
    """

    def __init__(
        self,
        directory: Path,
        process_table: ProcessTable,
        device_probe: DeviceProbe,
        defer: Callable[[Callable[[float], None]], None],
    ) -> None:
        self._directory = directory
        self._process_table = process_table
        self._device_probe = device_probe
        self._defer = defer
        # The latest snapshot of each model file, by the path of the model file.
        self._last_results: dict[str, SnapshotResult] = {}
        # By model, the source whose files were read last, and their identity before that.
        self._identities: dict[str, tuple[ModelSource, str]] = {}

    def take_snapshot(
        self,
        event_handler: SnapshotEventHandler,
        model: str,
        config: ModelConfig,
        source: ModelSource,
        expected_sha256: str = "",
    ) -> None:
        """Start to take a snapshot, which fails if its digest is not `expected_sha256`; "" accepts any digest."""
        if expected_sha256 and source.weights:
            text = f"the copy of {source.weights} is missing, and that file may have changed; {_REMEDY}"
            self._defer(functools.partial(event_handler.on_snapshot_failed, source, text))
            return
        files = self._files(model, source)
        on_result = functools.partial(
            self._on_result, event_handler, _PendingSnapshot(model, config, source, files, expected_sha256)
        )
        try:
            files.create()
            stdin_data = self.order(model, config, source, expected_sha256).json()
            run_oneshot(
                self._process_table,
                files.directory.name,
                snapshotter.command(),
                files.log,
                on_result,
                stdin_data=stdin_data,
            )
        except (PathInUse, OSError) as error:
            cause = with_limit_hint(f"cannot take a snapshot: {error}")
            self._defer(
                functools.partial(event_handler.on_snapshot_failed, source, cause, is_transient=is_transient(error))
            )

    def order(self, model: str, config: ModelConfig, source: ModelSource, expected_sha256: str = "") -> SnapshotOrder:
        """Return the order for the snapshotter, which names the files that a load reads."""
        files = self._files(model, source)
        requests = [
            SnapshotRequest(
                path,
                str(directory),
                self._last_results.get(path),
                expected_sha256 if config.ranks is None else "",
                source.grant,
            )
            for path, directory in _models_to_copy(config, source, files)
        ]
        extra_files = [
            SingleFile(path, str(copy), source.weights_grant if copy == files.weights else OPERATOR)
            for path, copy in _extra_files_to_copy(config, source, files)
        ]
        return SnapshotOrder(requests, str(files.copy_progress), extra_files)

    def identity(self, model: str, source: ModelSource) -> str:
        """Return `identify_files` of the files of a source from before the last load read them; "" if unknown."""
        read_source, identity = self._identities.get(model, (None, ""))
        return identity if read_source == source else ""

    def copy_progress(self, model: str, source: ModelSource) -> CopyProgress | None:
        """Return how much of a snapshot has been copied; None if the copy has not begun or the progress is unknown."""
        return read_copy_progress(self._files(model, source).copy_progress)

    def remove_snapshot(self, model: str, source: ModelSource) -> None:
        """Remove a snapshot, and kill the helper processes that are taking it."""
        files = self._files(model, source)
        name = files.directory.name
        for path in [path for path, there in self._last_results.items() if files.directory in Path(there.path).parents]:
            del self._last_results[path]
        for each in list(self._process_table.processes):
            if each == name or each.startswith(f"{name}."):
                self._process_table.kill(each)
        if name not in self._process_table.processes:
            files.remove()

    def _files(self, model: str, source: ModelSource) -> SnapshotFiles:
        return SnapshotFiles(self._directory / snapshot_directory_name(model, source.number))

    def _on_result(
        self, event_handler: SnapshotEventHandler, order: _PendingSnapshot, reply: OneshotResult, exit_cause: ExitCause
    ) -> None:
        _, config, source, files, expected_sha256 = order
        self._identities[order.model] = (source, str(reply.get("identity", "")))
        models = _models_to_copy(config, source, files)
        try:
            copies = [str(directory / Path(path).name) for path, directory in models]
            results = [
                SnapshotResult(copy, *each) for copy, each in zip(copies, reply.get("snapshots", ()), strict=True)
            ]
        except (TypeError, ValueError):
            results = []
        if exit_cause.status != 0 or not results:
            files.remove()
            cause = (
                with_limit_hint(reply["error"])
                if reply.get("error")
                else exit_cause.detail or f"the snapshot process {exit_cause.description}"
            )
            if reply.get("changed") is True:
                cause = f"{cause}; {_REMEDY}"
            transient = reply.get("transient") is True or exit_cause.is_transient
            order.write_audit(audit.FAILED, cause)
            event_handler.on_snapshot_failed(source, cause, event_loop.now(), is_transient=transient)
            return
        self._last_results.update(
            (path, each) for (path, _), each in zip(models, results, strict=True) if each.source_identity
        )
        snapshot = _build_snapshot(config, source, files, results)
        if expected_sha256 and snapshot.sha256 != expected_sha256:
            files.remove()
            cause = f"{changed_message(source.path, expected_sha256, snapshot.sha256)}; {_REMEDY}"
            order.write_audit(audit.FAILED, cause)
            event_handler.on_snapshot_failed(source, cause, event_loop.now())
            return
        order.write_audit(audit.OK, sha256=snapshot.sha256)
        self._device_probe.probe(
            config.python,
            config.devices,
            files.log,
            lambda: event_handler.on_snapshot_taken(source, snapshot, event_loop.now()),
        )


def _models_to_copy(config: ModelConfig, source: ModelSource, files: SnapshotFiles) -> list[tuple[str, Path]]:
    """Return the paths of the models to copy, each with its target directory: the model, or the slice of each rank."""
    if config.ranks is None:
        return [(source.path, files.model_dir)]
    return [
        (source.path.replace(RANK_PLACEHOLDER, str(rank)), files.slice_dir(rank)) for rank in range(config.ranks.size)
    ]


def _extra_files_to_copy(config: ModelConfig, source: ModelSource, files: SnapshotFiles) -> list[tuple[str, Path]]:
    """Return the paths of the other files to copy, such as self-test inputs, each with the path of its copy."""
    ranks = config.ranks
    pairs = [(source.weights, files.weights), (selftest.inputs_path(config.selftest), files.sample)]
    if ranks is not None:
        pairs += [(ranks.group_info_path(rank), files.group_info(rank)) for rank in range(ranks.size)]
        pairs += [(ranks.rank_table_path(group), files.rank_table(group)) for group in range(len(ranks.groups))]
    return [(path, copy) for path, copy in pairs if path]


def _build_snapshot(
    config: ModelConfig, source: ModelSource, files: SnapshotFiles, results: Sequence[SnapshotResult]
) -> Snapshot:
    copies = {copy for _, copy in _extra_files_to_copy(config, source, files)}
    weights, sample = (str(copy) if copy in copies else "" for copy in (files.weights, files.sample))
    path, sha256, nbytes, identity, _ = results[0]
    ranks = config.ranks
    if ranks is None:
        return Snapshot(path, weights, sha256, nbytes, sample, identity)
    infos = [str(files.group_info(rank)) if ranks.group_info_file else "" for rank in range(ranks.size)]
    slices = tuple(SliceSnapshot(*each[:4], group_info=info) for each, info in zip(results, infos, strict=True))
    rank_tables = tuple(
        str(files.rank_table(group)) for group in range(len(ranks.groups)) if files.rank_table(group) in copies
    )
    nbytes = sum(each.nbytes for each in results)
    return Snapshot(path, weights, digest_of(slices), nbytes, sample, identity, slices, rank_tables)
