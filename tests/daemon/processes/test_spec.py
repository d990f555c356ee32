from __future__ import annotations

import json
import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from weightd_daemon.generations.actions import Role
from weightd_daemon.processes import spec
from weightd_daemon.processes.files import GenerationFiles
from weightd_daemon.processes.spec import WorkerProgram

FILES = GenerationFiles(Path("/private/m.1"))
PLAIN = WorkerProgram("/python", "onnxruntime", "/m.onnx", "cpu")
ALWAYS = (
    "--address ipc://s --name m.1.w1 --role worker --engine onnxruntime --model /m.onnx "
    "--threads 1 --device cpu --store /private/m.1/pages"
)


@pytest.mark.parametrize(
    ("change", "more"),
    [
        ({}, ""),
        ({"sharing": False}, " --sharing off"),
        ({"snapshot_identity": "1:2"}, " --snapshot-identity 1:2"),
        ({"options": '{"a":1}'}, ' --options {"a":1}'),
        ({"cores": "0-3"}, " --cores 0-3"),
        ({"weights": "/w.npz"}, " --weights /w.npz"),
        ({"sample": "/s.npz", "tolerance": 0.25}, " --selftest-inputs /s.npz --tolerance 0.25"),
    ],
)
def test_worker_gets_only_non_default_arguments(change: dict[str, Any], more: str) -> None:
    program = replace(PLAIN, **change)
    child = spec.child_spec(program, "m.1.w1", Role.WORKER, "ipc://s", FILES)
    assert (child.name, " ".join(child.arguments), child.log) == ("m.1.w1", ALWAYS + more, FILES.log("m.1.w1"))


@pytest.mark.parametrize(("role", "more"), [(Role.HOLDER, " --sharer-count 3 --template"), (Role.WORKER, "")])
def test_holder_gets_template_arguments(role: Role, more: str) -> None:
    child = spec.child_spec(replace(PLAIN, can_be_template=True, sharer_count=3), "m.1.w1", role, "ipc://s", FILES)
    assert " ".join(child.arguments) == ALWAYS.replace("--role worker", f"--role {role.value}") + more


def test_spawned_child_gets_the_reason() -> None:
    child = spec.child_spec(PLAIN, "m.1.w1", Role.WORKER, "ipc://s", FILES)
    assert child.with_origin_note("no reason").arguments == [*child.arguments, "--origin-note", "no reason"]
    assert child.with_origin_note("no reason").command == child.command


@pytest.mark.parametrize("role", Role)
def test_command_line_names_no_model(role: Role) -> None:
    child = spec.child_spec(replace(PLAIN, weights="/w.npz", sample="/s.npz"), "m.1.w1", role, "ipc://s", FILES)
    assert child.with_parent(7).command == ["/python", "-m", "weightd_worker", "--role", role.value, "--parent", "7"]
    assert json.loads(child.stdin_data) == child.arguments


def test_environment_limits_threads_and_overrides_the_given() -> None:
    own = {"OPENBLAS_NUM_THREADS": "1", "ORT_DISABLE_TELEMETRY": "1", "TMPDIR": "/private/m.1"}
    given = replace(PLAIN, environment={"A": "1", "OPENBLAS_NUM_THREADS": "8"})
    environments = [spec.child_spec(each, "h", Role.HOLDER, "ipc://s", FILES).environment for each in (PLAIN, given)]
    assert environments == [{**os.environ, **own}, {"A": "1", **own}]
