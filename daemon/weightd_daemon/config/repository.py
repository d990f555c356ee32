"""The table [repository]: a directory of models, and the models that are in it.

Triton and OpenVINO Model Server use the same layout: NAME/VERSION/model.onnx, where VERSION is a number. Beside the
versions there may be a file NAME/config.toml with keys of [models.NAME].
"""

from __future__ import annotations

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

# Versions of each model that are read beside the newest ones, in case these cannot be loaded.
_OLDER_VERSIONS = 7

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
        table: its table [models.NAME].
        changed_at: for each version, when its files last changed, in nanoseconds, so that a changed version is noticed.
    """

    directory: Path
    table: Mapping[str, Any]
    changed_at: Mapping[str, int]


class Repository(NamedTuple):
    """The content of a repository.

    Attributes:
        models: the models by name.
        problems: an error by the name of its model, which is left out; by "" if the whole directory cannot be read. A
            name with unprintable characters is quoted.
        is_settled: whether no file has changed so recently that it is not taken yet.
    """

    models: Mapping[str, RepositoryModel]
    problems: Mapping[str, str]
    is_settled: bool


def scan(config: RepositoryConfig, now: float | None = None) -> Repository:
    """Return the models in the repository.

    Args:
        config: the table with an absolute path.
        now: the present time in seconds since the epoch; None: the clock's.
    """
    root, problems = Path(config.path), dict[str, str]()
    models: dict[str, RepositoryModel] = {}
    newest = float("-inf")
    try:
        names = sorted(each.name for each in os.scandir(root) if each.is_dir() and not each.name.startswith("."))
    except OSError as error:
        return Repository({}, {"": f"repository.path: {root}: {error.strerror}"}, is_settled=True)
    settled_before = (time.time() if now is None else now) - config.settle
    for name in names[: limits.MAX_MODELS]:
        directory, shown = root / name, f"{root}/{label(name)}"
        try:
            for wrong in check_name("model", name):
                raise ValueError(wrong.problem)
            found = dict(_versions(directory, config.keep + _OLDER_VERSIONS))
            table = _read_table(directory)
        except (OSError, ValueError) as error:
            reason = error.strerror if isinstance(error, OSError) else str(error)
            problems[label(name)] = f"{shown}: {reason}"
            continue
        newest = max([newest, *(changed_at / 1e9 for _, changed_at in found.values())])
        settled = {each: found[each] for each in found if found[each][1] / 1e9 <= settled_before}
        if settled:
            versions = {version: str(path) for version, (path, _) in settled.items()}
            changes = {version: changed_at for version, (_, changed_at) in settled.items()}
            models[name] = RepositoryModel(directory, {**table, "versions": versions}, changes)
    if len(names) > limits.MAX_MODELS:
        for name in names[limits.MAX_MODELS :]:
            problems[label(name)] = (
                f"{root}/{label(name)}: expected at most {limits.MAX_MODELS} models, got {len(names)}"
            )
    return Repository(models, problems, is_settled=newest <= settled_before)


def _versions(directory: Path, count: int) -> Iterator[tuple[str, tuple[Path, int]]]:
    """Yield the newest versions of a model, each with its model file and the time of its last change."""
    numbers = [each.name for each in os.scandir(directory) if _VERSION_PATTERN.fullmatch(each.name) and each.is_dir()]
    for version in sorted(numbers, key=int, reverse=True)[: min(count, limits.MAX_MODEL_VERSIONS)]:
        entries = [directory / version, *(Path(each.path) for each in os.scandir(directory / version))]
        model = _model_file(entries[1:])
        if model is not None:
            yield version, (model, max(_changed_at(each) for each in entries))


def _model_file(paths: list[Path]) -> Path | None:
    """Return the model among the files of a version: model.onnx or model.mindir, or the only file with its suffix."""
    # A name that is not UTF-8 cannot be shown to clients.
    files = [each for each in paths if each.suffix in _SUFFIXES and each.name.isprintable()]
    named = [each for each in files if each.stem == _MODEL_STEM]
    return next(iter(named if len(named) == 1 else files if len(files) == 1 else []), None)


def _changed_at(path: Path) -> int:
    # A program that copies files may set the time of the last write, but not the time of the last change (ctime).
    found = path.stat()
    return max(found.st_mtime_ns, found.st_ctime_ns) if stat.S_ISREG(found.st_mode) else found.st_mtime_ns


def _read_table(directory: Path) -> dict[str, Any]:
    """Return the keys in a model's config.toml.

    Raises:
        OSError: the file cannot be read.
        ValueError: it is not TOML, or has a key that follows from the layout.
    """
    path = directory / CONFIG_FILE
    try:
        text = read_regular(path, MAX_CONFIG_BYTES).decode("utf-8")
    except FileNotFoundError:
        return {}
    try:
        table = tomllib.loads(text)
    except (ValueError, RecursionError) as error:
        raise ValueError(f"{CONFIG_FILE}: not TOML: {error}") from None
    for key in _LAYOUT_KEYS:
        if key in table:
            raise ValueError(f"{CONFIG_FILE}: {label(key)}: follows from the directories of the versions")
    return table


def select_versions(
    found: tuple[int, ...], keep: int, *, failed: set[int], proven: set[int], current: set[int]
) -> tuple[int, ...]:
    """Return the versions to serve: the newest ones, and older ones for as long as no newer one has served.

    Args:
        found: the versions in the repository, ascending.
        keep: how many of the newest versions to serve.
        failed: the versions that cannot be loaded.
        proven: the versions that have served.
        current: the versions that are in force.
    """
    kept: list[int] = []
    loadable = 0
    for version in reversed(found):
        if loadable >= keep:
            if proven.intersection(kept):
                break
            if version not in current:
                continue
        kept.append(version)
        loadable += version not in failed
    return tuple(reversed(kept))
