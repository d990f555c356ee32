"""The table [repository]: a directory of models, and the models that are in it.

Triton and OpenVINO Model Server use the same layout: NAME/VERSION/model.onnx, where VERSION is a number. Beside the
versions there may be a file NAME/config.toml with keys of [models.NAME].
"""

from __future__ import annotations

import itertools
import os
import re
import stat
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from weightd_common.safe_open import MAX_CONFIG_BYTES, read_regular
from weightd_common.toml_schema import MAX_SECONDS, check_name, user_path
from weightd_daemon.config.model import LoadMode
from weightd_daemon.engines import ENGINES
from weightd_protocol import limits
from weightd_protocol.model_names import join_version
from weightd_protocol.schema import integer, label, number, one_of

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

CONFIG_FILE = "config.toml"
"""Name of the file with the keys of a model, in the model's directory."""

_MODEL_STEM = "model"
_SUFFIXES = frozenset(each.suffix for each in ENGINES.values())
_VERSION_PATTERN = re.compile(r"[1-9][0-9]{0,8}")

# Keys of config.toml that follow from the layout of the directory.
_LAYOUT_KEYS = ("path", "versions")


@dataclass(frozen=True)
class RepositoryConfig:
    """The table [repository]."""

    path: str = field(metadata=user_path(limits.MAX_PATH_BYTES))
    """Directory with the models: NAME/VERSION/model.onnx or model.mindir, where VERSION is a number, and optionally
    NAME/config.toml with keys of [models.NAME]. Each model is served as NAME, each version as NAME@VERSION."""

    keep: int = field(default=1, metadata=integer(1, limits.MAX_MODEL_VERSIONS))
    """Newest versions of each model to serve. An older version stays until a newer one has served."""

    load: str = field(default=LoadMode.ON_DEMAND.value, metadata=one_of([each.value for each in LoadMode]))
    """When the models are loaded, unless their config.toml has the key `load`."""

    poll: float = field(default=10.0, metadata=number(MAX_SECONDS, positive=True))
    """Seconds between two searches for changes that the kernel does not report, as on a network file system."""

    settle: float = field(default=5.0, metadata=number(MAX_SECONDS))
    """Seconds for which the files of a version must not have changed before it is served: they may still be copied."""


class RepositoryModel(NamedTuple):
    """A model in the repository.

    Attributes:
        directory: its directory, to which the paths in its config.toml are relative.
        content: the content of its config.toml; empty without one.
        files: the model file of each version.
        changed_at: for each version, when its files last changed, in nanoseconds since the epoch.
    """

    directory: Path
    content: bytes
    files: Mapping[str, str]
    changed_at: Mapping[str, int]

    def table(self) -> dict[str, Any]:
        """Return the model's table [models.NAME].

        Raises:
            ValueError: config.toml is not TOML, or has a key that follows from the layout of the directory.
        """
        try:
            table = tomllib.loads(self.content.decode("utf-8"))
        except (ValueError, RecursionError) as error:
            raise ValueError(f"not TOML: {error}") from None
        for key in _LAYOUT_KEYS:
            if key in table:
                raise ValueError(f"{label(key)}: follows from the directories of the versions")
        if type(table.get("traffic")) is dict:
            # A version that was deleted needs no share any more.
            table["traffic"] = {each: weight for each, weight in table["traffic"].items() if each in self.files}
        return {**table, "versions": self.files}


class Repository(NamedTuple):
    """The content of a repository.

    Attributes:
        models: the models by name, with the versions whose files have settled.
        unsettled: the versions, as NAME@VERSION, whose files have changed so recently that they are not taken yet.
        problems: an error by the name of its model, which is left out; by "" if the whole directory cannot be read. A
            name with unprintable characters is quoted.
    """

    models: Mapping[str, RepositoryModel]
    unsettled: frozenset[str]
    problems: Mapping[str, str]


def scan(config: RepositoryConfig, now: float | None = None) -> Repository:
    """Return the models in the repository.

    Args:
        config: the table with an absolute path.
        now: the current time in seconds since the epoch; None to read it from the clock.
    """
    root, problems = Path(config.path), dict[str, str]()
    models: dict[str, RepositoryModel] = {}
    unsettled: set[str] = set()
    try:
        names = sorted(each.name for each in os.scandir(root) if each.is_dir() and not each.name.startswith("."))
    except OSError as error:
        return Repository({}, frozenset(), {"": f"repository.path: {root}: {error.strerror}"})
    settled_before = (time.time() if now is None else now) - config.settle
    for name in names:
        directory, shown = root / name, f"{root}/{label(name)}"
        try:
            for wrong in check_name("model", name):
                raise ValueError(wrong.problem)
            if len(models) >= limits.MAX_MODELS:
                raise ValueError(f"expected at most {limits.MAX_MODELS} models, got more")
            found = dict(
                itertools.islice(_versions(directory, settled_before + config.settle), limits.MAX_MODEL_VERSIONS)
            )
            content = _read_config(directory)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            problems[label(name)] = f"{shown}: {reason}"
            continue
        settled = {version for version, (_, changed_at) in found.items() if changed_at / 1e9 <= settled_before}
        unsettled.update(join_version(name, version) for version in found if version not in settled)
        if settled:
            files = {version: str(path) for version, (path, _) in found.items() if version in settled}
            changes = {version: changed_at for version, (_, changed_at) in found.items() if version in settled}
            models[name] = RepositoryModel(directory, content, files, changes)
    return Repository(models, frozenset(unsettled), problems)


def _versions(directory: Path, now: float) -> Iterator[tuple[str, tuple[Path, int]]]:
    """Yield the versions of a model, newest first, each with its model file and the time of its last change."""
    numbers = [each.name for each in os.scandir(directory) if _VERSION_PATTERN.fullmatch(each.name) and each.is_dir()]
    for version in sorted(numbers, key=int, reverse=True):
        entries = [Path(each.path) for each in os.scandir(directory / version) if not each.name.startswith(".")]
        model = _model_file(entries)
        if model is not None:
            yield version, (model, max(_changed_at(each, now) for each in (directory / version, *entries)))


def _model_file(paths: list[Path]) -> Path | None:
    """Return the model among the files of a version: model.onnx or model.mindir, or the only file with its suffix."""
    # Ignore a file whose name is not UTF-8, because the name cannot be shown to clients.
    files = [each for each in paths if each.suffix in _SUFFIXES and each.name.isprintable()]
    named = [each for each in files if each.stem == _MODEL_STEM]
    return next(iter(named if len(named) == 1 else files if len(files) == 1 else []), None)


def _changed_at(path: Path, now: float) -> int:
    """Return when a file or directory last changed, in nanoseconds since the epoch; 0 if it has vanished."""
    try:
        found = path.stat()
    except FileNotFoundError:
        return 0
    if not stat.S_ISREG(found.st_mode):
        return found.st_mtime_ns
    # A program that copies files may set the time of the last write, even to a time in the future, but not the time of
    # the last change (ctime).
    return max(found.st_ctime_ns, found.st_mtime_ns if found.st_mtime_ns <= now * 1e9 else 0)


def _read_config(directory: Path) -> bytes:
    """Return the content of a model's config.toml; empty without one.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is too long.
    """
    try:
        return read_regular(directory / CONFIG_FILE, MAX_CONFIG_BYTES)
    except FileNotFoundError:
        return b""


def select_versions(
    found: tuple[int, ...], keep: int, *, failed: set[int], proven: set[int], current: set[int]
) -> tuple[int, ...]:
    """Return the versions to serve: the newest ones, and older ones until as many newer ones have served.

    Args:
        found: the versions in the repository, ascending.
        keep: how many of the newest versions to serve.
        failed: the versions that cannot be loaded.
        proven: the versions that have served.
        current: the versions that are served according to the configuration in force.
    """
    kept: list[int] = []
    loadable = 0
    for version in reversed(found):
        if loadable >= keep:
            if len(proven.intersection(kept)) >= keep:
                break
            if version not in current:
                continue
        kept.append(version)
        loadable += version not in failed
    return tuple(reversed(kept))
