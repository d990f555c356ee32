"""The model repository while the daemon runs: selects the versions to serve, and watches the files for changes.

A thread searches the repository for changes, because its file system may not answer for a long time. After a change,
the helper process of a reload reads the repository together with the configuration in force.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import select
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from weightd_daemon.api.version_sets import ProvenVersions
from weightd_daemon.config.load import Config
from weightd_daemon.config.repository import Repository, RepositoryConfig, scan, select_versions
from weightd_daemon.config.versions import VersionSetConfig
from weightd_daemon.models.model import ServedModel
from weightd_daemon.models.persisted import ModelRecord
from weightd_daemon.platform.event_loop import EventLoop
from weightd_daemon.platform.inotify import DirectoryWatch
from weightd_protocol import limits
from weightd_protocol.model_names import join_version, split_version

_log = logging.getLogger("weightd")

# Seconds without a change before the search begins, because other changes usually follow a change soon.
_QUIET_S = 0.2


def select_models(
    config: Config, models: Mapping[str, ServedModel], proven: ProvenVersions, records: Iterable[ModelRecord] = ()
) -> Config:
    """Return the configuration with only those versions of the repository's models that the daemon has to serve now.

    Args:
        config: the configuration with all versions.
        models: the models that are served.
        proven: knows which versions were loaded.
        records: the models that a previous daemon has handed over, at the start.
    """
    if config.repository is None:
        return config
    handed_over = {record.name: bool(record.generations) for record in records}
    version_sets = dict(config.version_sets)
    removed: set[str] = set()
    for name, versions in config.version_sets.items():
        if versions.keep:
            kept = _select(name, versions, config, models, proven, handed_over)
            traffic = tuple(each for each in versions.traffic if each[0] in kept)
            version_sets[name] = dataclasses.replace(versions, versions=kept, traffic=traffic)
            removed.update(join_version(name, str(each)) for each in versions.versions if each not in kept)
    selected = {name: model for name, model in config.models.items() if name not in removed}
    # Surplus models at the end of the repository are left out.
    for name in [name for name in reversed(version_sets) if version_sets[name].keep]:
        if len(selected) <= limits.MAX_MODELS:
            break
        for version in version_sets.pop(name).versions:
            del selected[join_version(name, str(version))]
    return dataclasses.replace(config, models=selected, version_sets=version_sets)


def _select(
    name: str,
    versions: VersionSetConfig,
    config: Config,
    models: Mapping[str, ServedModel],
    proven_versions: ProvenVersions,
    handed_over: Mapping[str, bool],
) -> tuple[int, ...]:
    current: set[int] = set()
    failed: set[int] = set()
    proven: set[int] = set()
    for version in versions.versions:
        full_name = join_version(name, str(version))
        model = models.get(full_name)
        if model is not None:
            current.add(version)
            # A version is proven if its present files were loaded. If the files have changed, the version must be
            # loaded again first.
            is_same = model.config.revision == config.models[full_name].revision
            was_loaded = model.loading.is_unloaded and proven_versions.was_loaded(model)
            if is_same and (model.readiness.is_complete or was_loaded):
                proven.add(version)
            elif is_same and model.readiness.has_failed:
                failed.add(version)
        elif full_name in handed_over:
            current.add(version)
            if handed_over[full_name]:
                proven.add(version)
        elif proven_versions.was_loaded_earlier(full_name, config.models[full_name]):
            current.add(version)
            proven.add(version)
    return select_versions(versions.versions, versions.keep, failed=failed, proven=proven, current=current)


def unproven_versions(
    config: Config, models: Mapping[str, ServedModel], proven: ProvenVersions
) -> Sequence[ServedModel]:
    """Return each model's newest version that loads on demand and was never loaded, while an older version serves.

    The daemon must load them without a request: as long as the older version serves, it answers all requests.
    """
    waiting: list[ServedModel] = []
    for name, versions in config.version_sets.items():
        there = [model for each in versions.versions if (model := models.get(join_version(name, str(each))))]
        if versions.keep and len(there) > 1:
            newest = there[-1]
            is_new = newest.loading.is_unloaded and not proven.was_loaded(newest)
            if is_new and newest.config.is_on_demand and any(each.readiness.is_serving for each in there[:-1]):
                waiting.append(newest)
    return waiting


def keep_handed_over(config: Config, records: Iterable[ModelRecord]) -> Config:
    """Return the result of `keep_unreadable` for the models that the previous daemon has handed over."""
    models = {each.name: each.config for each in records if each.config.revision}
    numbers: dict[str, list[int]] = {}
    for full_name in models:
        name, version = split_version(full_name)
        numbers.setdefault(name, []).append(int(version))
    keep = 1 if config.repository is None else config.repository.keep
    sets = {name: VersionSetConfig(tuple(sorted(found)), keep=keep) for name, found in numbers.items()}
    return keep_unreadable(config, dataclasses.replace(config, models=models, version_sets=sets))


def log_problems(config: Config, previous: Mapping[str, str]) -> None:
    """Log the errors of models in the repository, except errors that were known before."""
    for name, problem in config.repository_problems.items():
        if previous.get(name) != problem:
            for line in problem.splitlines():
                _log.warning("repository: %s", line)


def keep_unreadable(config: Config, previous: Config) -> Config:
    """Return the configuration with the versions in the repository that cannot be read now as they were before.

    These are all versions of a model whose directory has an error, and the versions whose files have changed but have
    not settled yet.
    """
    if config.repository is None:
        return config
    problems, models, version_sets = config.repository_problems, dict(config.models), dict(config.version_sets)
    for name, before in previous.version_sets.items():
        now = version_sets.get(name)
        if not before.keep or name in models or (now is not None and not now.keep):
            continue  # the table [models.NAME] takes precedence
        is_broken = now is None and (name in problems or "" in problems)
        kept = set(() if now is None else now.versions)
        for version in before.versions:
            full_name = join_version(name, str(version))
            if full_name in previous.models and (is_broken or full_name in config.unsettled):
                models[full_name] = previous.models[full_name]
                kept.add(version)
        if kept:
            version_sets[name] = dataclasses.replace(now or before, versions=tuple(sorted(kept)))
    return dataclasses.replace(config, models=models, version_sets=version_sets)


class RepositoryWatcher:
    """Watches the repository for changes, in a thread.

    Args:
        config: the table [repository] of the configuration.
        loop: calls `on_change`.
        on_change: called in the event loop after the repository has changed.
    """

    def __init__(self, config: RepositoryConfig, loop: EventLoop, on_change: Callable[[], object]) -> None:
        self.config = config
        self._loop = loop
        self._on_change = on_change
        self._is_stopped = False
        # The thread reports a change by the first descriptor, and is stopped by the second one.
        self._wakeup, self._stop = (os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(2))
        self._watch: DirectoryWatch | None = None

    def start(self) -> None:
        """Start the thread."""
        self._loop.add(self._wakeup, self._on_wakeup)
        try:
            self._watch = DirectoryWatch()
        except OSError as error:
            text = "repository: the kernel cannot report changes (%s); weightd looks for them every %g s"
            _log.warning(text, error.strerror, self.config.poll)
        threading.Thread(target=self._run, name="repository", daemon=True).start()

    def stop(self) -> None:
        """Report no more changes, and end the thread once a search in progress has ended."""
        self._is_stopped = True
        self._loop.remove(self._wakeup)
        os.eventfd_write(self._stop, 1)

    def _run(self) -> None:
        previous: Repository | None = None
        while not self._is_stopped:
            try:
                previous = self._search(previous)
                is_settled = not previous.unsettled
            except Exception:  # noqa: BLE001 - the thread has to go on
                _log.exception("repository: the search for changes failed")
                is_settled = True
            self._wait(is_settled=is_settled)
        if self._watch is not None:
            self._watch.close()
        os.close(self._stop)
        os.close(self._wakeup)

    def _search(self, previous: Repository | None) -> Repository:
        if self._watch is not None:
            # New directories are watched before the search, so that no change after the search goes unnoticed.
            self._watch.watch(_directories(Path(self.config.path)))
        found = scan(self.config)
        # Between the start and the first search, the repository may have changed, too.
        if found != previous and not self._is_stopped:
            os.eventfd_write(self._wakeup, 1)
        return found

    def _wait(self, *, is_settled: bool) -> None:
        """Wait for a change, for the time after which unsettled files are taken, or for the poll interval."""
        timeout_s = self.config.poll if is_settled else min(self.config.poll, self.config.settle + _QUIET_S)
        deadline = time.monotonic() + timeout_s
        poll = select.poll()
        poll.register(self._stop, select.POLLIN)
        if self._watch is not None:
            poll.register(self._watch, select.POLLIN)
        while not self._is_stopped and poll.poll(1000 * max(0.0, min(timeout_s, deadline - time.monotonic()))):
            if self._watch is not None:
                self._watch.clear()
            timeout_s = _QUIET_S

    def _on_wakeup(self) -> None:
        os.eventfd_read(self._wakeup)
        self._on_change()


def _directories(root: Path) -> Iterator[Path]:
    """Yield the directories of the repository, of its models and of their versions."""
    yield root
    for model in _subdirectories(root):
        yield model
        yield from _subdirectories(model)


def _subdirectories(directory: Path) -> list[Path]:
    try:
        return [Path(each.path) for each in os.scandir(directory) if each.is_dir()]
    except OSError:
        return []
