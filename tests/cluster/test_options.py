"""Tests of arguments from a command line and from YAML; an error names the argument and the expected value."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from weightd_ray.options import ArgumentError, parse_arguments

DIGEST = "ab" * 32

WORKERS = "workers: expected integer, 1 to 1024, or a table with min and max"


def test_accepts_strings_and_yaml_values() -> None:
    arguments = parse_arguments({"model": "/m/a.onnx", "workers": "4", "selftest": "off", "batching": "{max_rows = 8}"})
    assert arguments == parse_arguments(
        {"model": "/m/a.onnx", "workers": 4, "selftest": "off", "batching": {"max_rows": 8}}
    )
    assert (arguments.model, arguments.name, arguments.model_table["workers"]) == ("/m/a.onnx", "a", 4)


def test_resolves_relative_path(tmp_path: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    assert parse_arguments({"model": "a.onnx"}).model == str(tmp_path / "a.onnx")


@pytest.mark.parametrize(
    ("args", "most", "cores"),
    [
        ({"model": "/a.onnx"}, 128, 1),
        ({"model": "/a.onnx", "workers": 8, "threads": 2}, 256, 16),
        ({"model": "/a.onnx", "workers": 4, "max_ongoing_requests": 3}, 3, 4),
        ({"address": "/run/weightd/weightd.sock", "name": "a"}, 128, 1),
    ],
)
def test_limits_derived_from_workers(args: Mapping[str, Any], most: int, cores: int) -> None:
    arguments = parse_arguments(args)
    assert (arguments.max_ongoing_requests, arguments.cores) == (most, cores)


def test_parses_digest_of_published_model() -> None:
    arguments = parse_arguments({"model": f"sha256:{DIGEST}", "name": "a"})
    assert (arguments.published_digest, arguments.sha256) == (DIGEST, DIGEST)


@pytest.mark.parametrize(
    ("args", "problem"),
    [
        ({}, "model: missing"),
        ({"modle": "a.onnx"}, "modle: unknown argument; did you mean model?"),
        ({"model": "a.onnx", "worker": 2}, "worker: unknown argument; did you mean workers?"),
        ({"model": "a.onnx", "path": "b.onnx"}, "path: unknown argument"),
        ({"model": "a.onnx", "workers": "0"}, "workers: expected integer, 1 to 1024, got int 0"),
        (
            {"model": "a.onnx", "workers": "many"},
            WORKERS + ", got str 'many'",
        ),
        ({"model": "a.onnx", "name": "/"}, "name: expected a model name"),
        ({"model": "a.onnx", "python": "venv/bin/python"}, "python: expected an absolute path"),
        ({"model": "a.onnx", "selftest": "sample.npz"}, "selftest: expected an absolute path"),
        ({"model": "a.onnx", "directory": "w"}, "directory: expected an absolute path, got str 'w'"),
        ({"model": "a.txt"}, "model: expected a file that ends in .onnx or .mindir, got"),
        ({"model": "a.onnx", "sha256": "12"}, "sha256: expected a sha256 of 64 hexadecimal digits, got str '12'"),
        ({"model": "sha256:", "name": "a"}, "model: expected a sha256 of 64 hexadecimal digits, got str ''"),
        ({"model": f"sha256:{DIGEST}"}, "name: missing: required for a published model"),
        (
            {"model": f"sha256:{DIGEST}", "name": "a", "sha256": "cd" * 32},
            f"sha256: expected the digest of the model, {DIGEST}",
        ),
        ({"model": "a.onnx", "tenant": "t"}, "tenant: has no effect without address"),
        ({"address": "/s", "name": "a", "workers": 2}, "workers: has no effect with address"),
        ({"address": "/s"}, "name: missing: required with address to select the model"),
        ({"model": "a.onnx", "devices": ["cpu:0"]}, "devices[0]: expected a table"),
        (
            {"model": "a.onnx", "workers": "2\nthreads = 2"},
            WORKERS + ", got str",
        ),
        ({"model": "a.onnx", "batching": {8: 8}}, "batching.8: unknown key"),
        ({"model": f"sha256:{DIGEST}", "name": "a", "engine": ["onnxruntime"]}, "engine: expected one of"),
    ],
)
def test_rejects_invalid_arguments(args: Mapping[str, Any], problem: str) -> None:
    with pytest.raises(ArgumentError) as error:
        parse_arguments(args)
    assert str(error.value).startswith(problem)


def test_reports_all_errors() -> None:
    with pytest.raises(ArgumentError, match=r"(?s)foo: unknown.*\nworkers: .*\nthreads: "):
        parse_arguments({"model": "a.onnx", "workers": 0, "threads": 0, "foo": 1, "name": "a"})
