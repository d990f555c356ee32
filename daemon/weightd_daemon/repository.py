"""The model repository while the daemon runs: which versions it serves, and the search for changes.

A thread searches, because a file system may not answer for a long time. After a change, the helper process of a reload
reads the repository together with the configuration in force.
"""

from __future__ import annotations

import dataclasses
import logging
import os
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from weightd_daemon.config.load import Config, ConfigError
from weightd_daemon.config.repository import Repository, RepositoryConfig, scan, select_versions
from weightd_daemon.config.versions import VersionSetConfig
from weightd_daemon.models.model import ServedModel
from weightd_daemon.models.persisted import ModelRecord
from weightd_daemon.platform.event_loop import EventLoop
from weightd_daemon.platform.inotify import DirectoryWatch
from weightd_protocol import limits
from weightd_protocol.model_names import join_version, split_version

_log = logging.getLogger("weightd")

# A change is followed by others soon: the search begins when this time has passed without one.
_QUIET_S = 0.2


def select_models(config: Config, models: Mapping[str, ServedModel], records: Iterable[ModelRecord] = ()) -> Config:
    """Return the configuration with the versions of the repository that are to be served now.

    Args:
        config: the configuration with all versions.
        models: the models that are served.
        records: the models that a previous daemon has handed over, at the start.

    Raises:
        ConfigError: there would be too many models.
    """
    if config.repository is None:
        return config
    handed_over = {record.name: bool(record.generations) for record in records}
    version_sets = dict(config.version_sets)
    removed: set[str] = set()
    for name, versions in config.version_sets.items():
        if versions.keep:
            kept = _select(name, versions, config, models, handed_over)
            version_sets[name] = dataclasses.replace(versions, versions=kept)
            removed.update(join_version(name, str(each)) for each in versions.versions if each not in kept)
    selected = {name: model for name, model in config.models.items() if name not in removed}
    if len(selected) > limits.MAX_MODELS:
        text = f"expected at most {limits.MAX_MODELS} models and versions, got {len(selected)}"
        raise ConfigError(f"{config.repository.path}: {text}")
    return dataclasses.replace(config, models=selected, version_sets=version_sets)


def _select(
    name: str,
    versions: VersionSetConfig,
    config: Config,
    models: Mapping[str, ServedModel],
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
            # A version whose files have changed is not proven until it has been loaded again.
            is_same = model.config.revision == config.models[full_name].revision
            was_loaded = model.loading.is_unloaded and model.dispatcher.signature.built is not None
            if is_same and (model.readiness.is_complete or was_loaded):
                proven.add(version)
            elif is_same and model.readiness.has_failed:
                failed.add(version)
        elif full_name in handed_over:
            current.add(version)
            if handed_over[full_name]:
                proven.add(version)
    return select_versions(versions.versions, versions.keep, failed=failed, proven=proven, current=current)


def unproven_versions(config: Config, models: Mapping[str, ServedModel]) -> Sequence[ServedModel]:
    """Return the newest versions that load on demand and were never loaded, beside an older version that serves.

    They have to be loaded now: as long as the older version serves, no request would cause that.
    """
    waiting: list[ServedModel] = []
    for name, versions in config.version_sets.items():
        there = [model for each in versions.versions if (model := models.get(join_version(name, str(each))))]
        if versions.keep and len(there) > 1:
            newest = there[-1]
            is_new = newest.loading.is_unloaded and newest.dispatcher.signature.built is None
            if is_new and newest.config.is_on_demand and any(each.readiness.is_serving for each in there[:-1]):
                waiting.append(newest)
    return waiting


def keep_broken_of_daemon(config: Config, records: Iterable[ModelRecord]) -> Config:
    """Return the configuration with the broken models of the repository as the previous daemon has handed them over."""
    models = {each.name: each.config for each in records if each.config.revision}
    numbers: dict[str, list[int]] = {}
    for full_name in models:
        name, version = split_version(full_name)
        numbers.setdefault(name, []).append(int(version))
    keep = 1 if config.repository is None else config.repository.keep
    sets = {name: VersionSetConfig(tuple(sorted(found)), keep=keep) for name, found in numbers.items()}
    return keep_broken(config, dataclasses.replace(config, models=models, version_sets=sets))


def log_problems(config: Config, previous: Mapping[str, str]) -> None:
    """Log the errors of models in the repository, except errors that were known before."""
    for name, problem in config.repository_problems.items():
        if previous.get(name) != problem:
            for line in problem.splitlines():
                _log.warning("repository: %s", line)


def keep_broken(config: Config, previous: Config) -> Config:
    """Return the configuration with the models whose directories cannot be read as they were before."""
    broken = config.repository_problems
    before = previous.version_sets.items()
    kept = {name: versions for name, versions in before if versions.keep and (name in broken or "" in broken)}
    kept = {name: versions for name, versions in kept.items() if name not in config.version_sets}
    if config.repository is None or not kept:
        return config
    models = {full_name: model for full_name, model in previous.models.items() if split_version(full_name)[0] in kept}
    return dataclasses.replace(config, models={**config.models, **models}, version_sets={**config.version_sets, **kept})


class RepositoryWatcher:
    """Searches the repository for changes in a thread.

    Args:
        config: the table [repository].
        loop: calls `on_change`.
        on_change: called in the event loop after the repository has changed.
    """

    def __init__(self, config: RepositoryConfig, loop: EventLoop, on_change: Callable[[], object]) -> None:
        self.config = config
        self._loop = loop
        self._on_change = on_change
        self._is_stopped = False
        self._wakeup = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
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
        """Report no more changes; the thread ends after its present wait."""
        self._is_stopped = True
        self._loop.remove(self._wakeup)

    def _run(self) -> None:
        previous: Repository | None = None
        while not self._is_stopped:
            self._wait(previous)
            found = scan(self.config)
            # Between the start and the first search, the repository may have changed, too.
            if found != previous and not self._is_stopped:
                os.eventfd_write(self._wakeup, 1)
            previous = found
        os.close(self._wakeup)
        if self._watch is not None:
            self._watch.close()

    def _wait(self, previous: Repository | None) -> None:
        """Wait for a change, for the time after which unsettled files are taken, or for the poll interval."""
        if previous is None:
            return
        timeout_s = self.config.poll if previous.is_settled else min(self.config.poll, self.config.settle + _QUIET_S)
        if self._watch is None:
            time.sleep(timeout_s)
            return
        self._watch.watch(_directories(Path(self.config.path)))
        deadline = time.monotonic() + timeout_s
        while self._watch.wait(min(timeout_s, deadline - time.monotonic())):
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
