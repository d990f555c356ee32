"""`weightd check`: what a start would find wrong, found without loading anything."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from weightd.daemon.config import canary as canary_config
from weightd.daemon.config import slices
from weightd.daemon.config.load import Config
from weightd.daemon.config.model import ModelConfig
from weightd.daemon.config.ranks import Ranks
from weightd.daemon.config.tenants import DEFAULT, TenantConfig
from weightd.daemon.host.ends import explain
from weightd.daemon.host.shortage import explained
from weightd.protocol.version import VERSION
from weightd.shared.modelfile import Model, ModelFileError

_INTERPRETER_TIMEOUT_S = 60.0

# Runs in the model's interpreter, which may be as old as 3.7.
_PROBE = """
import sys
from weightd.protocol.version import VERSION
import weightd.worker.session
from weightd.worker.engines import ENGINES
from weightd.worker.engines.engine import Settings
ENGINES[sys.argv[1]](Settings(1, sys.argv[2], sys.argv[3] == "on"))
print(VERSION)
"""
_PROBE_OF_RANKS = """
import sys
from weightd.protocol.version import VERSION
import weightd.worker.session
from weightd.worker.engines import RANK_ENGINES
from weightd.worker.engines.ranks import Meeting
RANK_ENGINES[sys.argv[1]](Meeting(0, 2, sys.argv[2]))
print(VERSION)
"""
_PROBE_OF_GROUPS = """
import sys
from weightd.protocol.version import VERSION
import mindspore_lite
if not hasattr(mindspore_lite, "ModelGroup"):
    sys.exit("expected mindspore_lite 2.1 or later, which has groups of models, got " + mindspore_lite.__version__)
print(VERSION)
"""


def problems(
    models: Mapping[str, ModelConfig], members: Collection[str] = (), *, runs_interpreters: bool = True
) -> dict[str, list[str]]:
    """Return, by model, what is wrong with its files and its interpreter; each text names the key.

    Args:
        models: those to be looked at.
        members: the names of those that are in a group.
        runs_interpreters: ask each interpreter whether it has the engine; else only see whether it can be run.
    """
    asked: dict[tuple[str, ...], str] = {}
    owners: slices.Owners = {}
    visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "")
    found: dict[str, list[str]] = {}
    for name, model in models.items():
        if model.ranks is None:
            of_files = _file_problems(model)
        else:
            of_files = slices.problems(name, model, model.ranks, visible, owners)
        of_others = _other_problems(model, asked, is_member=name in members, runs_interpreters=runs_interpreters)
        found[name] = [f"models.{name}.{problem}" for problem in (*of_files, *of_others)]
    return found


def _file_problems(model: ModelConfig) -> Iterator[str]:
    path = Path(model.path)
    try:
        with Model(path) as files, files.open(files.files[0]) as file:
            yield from (f"path: {path}: {problem}" for problem in model.spec.refusals(file))
    except ModelFileError as error:
        yield from (f"path: {problem}" for problem in str(error).splitlines())
    except OSError as error:
        yield f"path: {path}: {error.strerror}"


def _other_problems(
    model: ModelConfig, asked: dict[tuple[str, ...], str], *, is_member: bool, runs_interpreters: bool
) -> Iterator[str]:
    sample = canary_config.sample(model.canary)
    problem = slices.unreadable(sample) if sample else ""
    if problem:
        yield f"canary: {sample}: {problem}"
    yield from (str(error.at(f".{model.engine}")) for error in model.options.file_problems())
    if not runs_interpreters:
        if shutil.which(model.python) is None:
            yield f"python: {model.python}: cannot be run: expected an executable file"
        return
    # What models have in common is asked once: an interpreter takes a second.
    probe = _PROBE if model.ranks is None else _PROBE_OF_RANKS
    questions: list[tuple[str, ...]] = [(model.python, probe, model.engine, model.devices[0], _sharing(model))]
    if is_member:
        questions.append((model.python, _PROBE_OF_GROUPS))
    for question in questions:
        if question not in asked:
            asked[question] = _interpreter_problem(*question)
        if asked[question]:
            yield f"python: {model.python}: {asked[question]}"
            return


def described(config: Config) -> Iterator[str]:
    """Yield what each model will be, each group of models, and who each tenant is; a line each."""
    for name, model in config.models.items():
        workers = "1 worker" if model.workers == 1 else f"{model.workers} workers"
        what = workers if model.ranks is None else _of_ranks(model.ranks)
        yield f"{name}: {model.engine}, {what}, {model.path}"
    for name, group in config.groups.items():
        shared = "workspace and weights" if group.shares_weights and group.shares_workspace else group.share
        yield f"{name}: {', '.join(group.models)} in one process on {', '.join(group.devices)}, {shared} shared"
    for name, tenant in config.tenants.items():
        models = "all models" if "*" in tenant.models else f"models {', '.join(tenant.models)}"
        yield f"tenant {name}: {_who(name, tenant)}; may {', '.join(tenant.may) or 'do nothing'}; {models}"


def _who(name: str, tenant: TenantConfig) -> str:
    several = {"user": tenant.user_ids, "group": tenant.group_ids, "key": tenant.keys}
    parts = [f"{what} {', '.join(map(str, each))}" for what, each in several.items() if each]
    if name == DEFAULT:
        parts.append("whoever is in no other")
    return "; ".join(parts) or "whom others ask for"


def _of_ranks(ranks: Ranks) -> str:
    groups = "; ".join(", ".join(dict.fromkeys(group)) for group in ranks.groups)
    count = f"{len(ranks.groups)} groups of " if len(ranks.groups) > 1 else ""
    return f"{count}{ranks.size} ranks on {groups}"


def _sharing(model: ModelConfig) -> str:
    return "off" if model.sharing == "off" else "on"


def _interpreter_problem(python: str, probe: str, *arguments: str) -> str:
    try:
        done = subprocess.run(
            [python, "-c", probe, *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_INTERPRETER_TIMEOUT_S,
            check=False,
        )
    except OSError as error:
        return explained(f"cannot be run: {error.strerror}")
    except subprocess.TimeoutExpired:
        return f"did not answer within {_INTERPRETER_TIMEOUT_S:g} s"
    if done.returncode != 0:
        return (done.stderr.strip().splitlines() or [explain(done.returncode)])[-1]
    # An engine may greet on stdout when it is imported: ours is the last word.
    theirs = (done.stdout.split() or ["unknown"])[-1]
    return "" if theirs == VERSION else f"it has weightd {theirs}, the daemon is {VERSION}"
