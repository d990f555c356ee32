"""Checks of `weightd check` on files and interpreters: finds errors that would make a load fail, without loading."""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Collection, Iterator, Mapping
from pathlib import Path

from weightd_common.modelfiles.files import ModelFileError, OpenModel
from weightd_daemon.config import check_ranks
from weightd_daemon.config import selftest as selftest_config
from weightd_daemon.config.load import Config
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.config.ranks import RanksConfig
from weightd_daemon.config.tenants import DEFAULT_TENANT_NAME, TenantConfig
from weightd_daemon.platform.exit_cause import describe_status
from weightd_daemon.platform.resource_limits import with_limit_hint
from weightd_protocol.version import VERSION

_INTERPRETER_TIMEOUT_S = 60.0

# Programs that `weightd check` runs in a model's interpreter (Python 3.7 or later) to test whether the engine is
# installed there.
_ENGINE_PROBE = """
import sys
from weightd_protocol.version import VERSION
import weightd_worker.sessions.model
from weightd_worker.engines import ENGINES
from weightd_worker.engines.engine import BuildSettings
ENGINES[sys.argv[1]](BuildSettings(1, sys.argv[2], sys.argv[3] == "on"))
print(VERSION)
"""
_RANK_ENGINE_PROBE = """
import sys
from weightd_protocol.version import VERSION
import weightd_worker.sessions.model
from weightd_worker.engines import RANK_ENGINES
from weightd_worker.engines.ranks import RankRendezvous
RANK_ENGINES[sys.argv[1]](RankRendezvous(0, 2, sys.argv[2]))
print(VERSION)
"""
_MODEL_GROUP_PROBE = """
import sys
from weightd_protocol.version import VERSION
import mindspore_lite
if not hasattr(mindspore_lite, "ModelGroup"):
    sys.exit("expected mindspore_lite 2.1 or later, which supports model groups, got " + mindspore_lite.__version__)
print(VERSION)
"""


def find_problems(
    models: Mapping[str, ModelConfig], group_members: Collection[str] = (), *, runs_interpreters: bool = True
) -> dict[str, list[str]]:
    """Return the errors in each model's files and interpreter, by the name of the model. Each error names its key.

    Args:
        models: the models to check.
        group_members: the names of the models that are in a model group.
        runs_interpreters: run each interpreter to see whether it has the engine; otherwise only check that the
            interpreter is executable.
    """
    probe_results: dict[tuple[str, ...], str] = {}
    port_owners: check_ranks.PortOwners = {}
    visible_devices = os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "")
    found: dict[str, list[str]] = {}
    for name, model in models.items():
        if model.ranks is None:
            of_files = _file_problems(model)
        else:
            of_files = check_ranks.find_problems(name, model, model.ranks, visible_devices, port_owners)
        of_others = _other_problems(
            model, probe_results, is_member=name in group_members, runs_interpreters=runs_interpreters
        )
        found[name] = [f"models.{name}.{problem}" for problem in (*of_files, *of_others)]
    return found


def _file_problems(model: ModelConfig) -> Iterator[str]:
    path = Path(model.path)
    try:
        with OpenModel(path) as files, files.open(files.files[0]) as file:
            yield from (f"path: {path}: {problem}" for problem in model.engine_spec.find_problems(file))
    except ModelFileError as error:
        yield from (f"path: {problem}" for problem in str(error).splitlines())
    except OSError as error:
        yield f"path: {path}: {error.strerror}"


def _other_problems(
    model: ModelConfig, probe_results: dict[tuple[str, ...], str], *, is_member: bool, runs_interpreters: bool
) -> Iterator[str]:
    inputs_path = selftest_config.inputs_path(model.selftest)
    problem = check_ranks.unreadable_reason(inputs_path) if inputs_path else ""
    if problem:
        yield f"selftest: {inputs_path}: {problem}"
    yield from (str(error.at(f".{model.engine}")) for error in model.engine_options.file_problems())
    if not runs_interpreters:
        if shutil.which(model.python) is None:
            yield f"python: {model.python}: cannot be run: expected an executable file"
        return
    # Models with the same interpreter and engine share one run, because starting an interpreter takes a second.
    probe = _ENGINE_PROBE if model.ranks is None else _RANK_ENGINE_PROBE
    probes: list[tuple[str, ...]] = [(model.python, probe, model.engine, model.devices[0], _sharing_argument(model))]
    if is_member:
        probes.append((model.python, _MODEL_GROUP_PROBE))
    for each in probes:
        if each not in probe_results:
            probe_results[each] = _interpreter_problem(*each)
        if probe_results[each]:
            yield f"python: {model.python}: {probe_results[each]}"
            return


def describe_config(config: Config) -> Iterator[str]:
    """Yield one line of description for each model, each model group and each tenant."""
    for name, model in config.models.items():
        workers = _describe_workers(model)
        what = workers if model.ranks is None else _describe_ranks(model.ranks)
        yield f"{name}: {model.engine}, {what}, {model.path}"
    for name, group in config.groups.items():
        shared = "workspace and weights" if group.shares_weights and group.shares_workspace else group.share
        yield f"{name}: {', '.join(group.models)} in one process on {', '.join(group.devices)}, {shared} shared"
    for name, tenant in config.tenants.items():
        models = "all models" if "*" in tenant.models else f"models {', '.join(tenant.models)}"
        yield f"tenant {name}: {_describe_tenant(name, tenant)}; may {', '.join(tenant.may) or 'do nothing'}; {models}"


def _describe_workers(model: ModelConfig) -> str:
    low, high = model.min_workers, model.max_workers
    if low < high:
        return f"{low} to {high} workers"
    return "1 worker" if high == 1 else f"{high} workers"


def _describe_tenant(name: str, tenant: TenantConfig) -> str:
    accounts_by_kind = {"user": tenant.user_ids, "group": tenant.group_ids, "key": tenant.keys}
    parts = [f"{what} {', '.join(map(str, each))}" for what, each in accounts_by_kind.items() if each]
    if name == DEFAULT_TENANT_NAME:
        parts.append("clients of no other tenant")
    return "; ".join(parts) or "only through a gateway"


def _describe_ranks(ranks: RanksConfig) -> str:
    groups = "; ".join(", ".join(dict.fromkeys(group)) for group in ranks.groups)
    count = f"{len(ranks.groups)} groups of " if len(ranks.groups) > 1 else ""
    return f"{count}{ranks.size} ranks on {groups}"


def _sharing_argument(model: ModelConfig) -> str:
    return "off" if model.sharing == "off" else "on"


def _interpreter_problem(python: str, probe: str, *arguments: str) -> str:
    try:
        result = subprocess.run(
            [python, "-c", probe, *arguments],
            capture_output=True,
            text=True,
            errors="replace",
            timeout=_INTERPRETER_TIMEOUT_S,
            check=False,
        )
    except OSError as error:
        return with_limit_hint(f"cannot be run: {error.strerror}")
    except subprocess.TimeoutExpired:
        return f"did not answer within {_INTERPRETER_TIMEOUT_S:g} s"
    if result.returncode != 0:
        return (result.stderr.strip().splitlines() or [describe_status(result.returncode)])[-1]
    # The last word on stdout is the version of weightd. An engine may have printed other words when it was imported.
    version = (result.stdout.split() or ["unknown"])[-1]
    return (
        ""
        if version == VERSION
        else f"the interpreter has weightd {version}, the daemon is {VERSION}: install the same version in both"
    )
