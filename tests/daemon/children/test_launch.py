from __future__ import annotations

import os
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from weightd.daemon.children import launch
from weightd.daemon.children.files import GenerationFiles
from weightd.daemon.children.launch import Program
from weightd.daemon.generations.actions import Role

FILES = GenerationFiles(Path("/private/m.1"))
PLAIN = Program("/python", "onnxruntime", "/m.onnx", "cpu")
ALWAYS = (
    "/python -m weightd.worker --address ipc://s --name m.1.w1 --role worker --engine onnxruntime --model /m.onnx "
    "--threads 1 --device cpu --store /private/m.1/pages"
)


@pytest.mark.parametrize(
    ("change", "more"),
    [
        ({}, ""),
        ({"sharing": False}, " --sharing off"),
        ({"options": '{"a":1}'}, ' --options {"a":1}'),
        ({"weights": "/w.npz"}, " --weights /w.npz"),
        ({"sample": "/s.npz", "tolerance": 0.25}, " --sample /s.npz --tolerance 0.25"),
    ],
)
def test_a_worker_is_told_what_is_not_as_usual(change: dict[str, Any], more: str) -> None:
    program = replace(PLAIN, **change)
    child = launch.child(program, "m.1.w1", Role.WORKER, "ipc://s", FILES)
    assert (child.name, " ".join(child.argv), child.log) == ("m.1.w1", ALWAYS + more, FILES.log("m.1.w1"))


def test_the_environment_is_the_daemons_unless_another_is_given() -> None:
    given = replace(PLAIN, environment={"A": "1"})
    environments = [launch.child(each, "h", Role.HOLDER, "ipc://s", FILES).environment for each in (PLAIN, given)]
    assert environments == [dict(os.environ), {"A": "1"}]
