"""Tests of the keys `versions` and `traffic` of a model."""

from __future__ import annotations

from pathlib import Path

import pytest

from weightd_daemon.config.load import Config, ConfigError, parse
from weightd_daemon.config.versions import VersionSetConfig
from weightd_protocol import limits

BASE = Path("/etc")


def parsed(**model: object) -> Config:
    return parse({"models": {"m": model, "other": {"path": "o.onnx"}}}, BASE)


def test_each_version_is_a_model_with_the_other_keys() -> None:
    config = parsed(versions={"10": "b.onnx", "2": "/a.onnx"}, traffic={"2": 3, "10": 1}, workers=4)
    assert list(config.models) == ["m@2", "m@10", "other"]
    assert [config.models[each].path for each in ("m@2", "m@10")] == ["/a.onnx", "/etc/b.onnx"]
    assert {config.models[each].workers for each in ("m@2", "m@10")} == {4}
    assert config.version_sets == {"m": VersionSetConfig((2, 10), ((2, 3), (10, 1)))}


@pytest.mark.parametrize(
    ("model", "problem"),
    [
        ({}, "models.m.path: missing"),
        ({"path": "a.onnx", "traffic": {"1": 1}}, "models.m.traffic: has no effect without versions"),
        ({"path": "a.onnx", "versions": {"1": "b.onnx"}}, "models.m.path: has no effect with versions"),
        ({"versions": {"1": "b.mindir"}, "engine": "onnxruntime"}, "models.m.versions.1: expected a .onnx file"),
        ({"versions": {"1": "b.txt"}}, "models.m.versions.1: expected a file that ends in"),
        ({"versions": {"0": "b.onnx"}}, "models.m.versions.0: expected the number of a version"),
        ({"versions": {"01": "b.onnx"}}, "models.m.versions.01: expected the number of a version"),
        ({"versions": {"1": 2}}, "models.m.versions.1: expected"),
        ({"versions": {"1": "b.onnx"}, "traffic": {"2": 1}}, "models.m.traffic.2: expected one of the versions 1"),
        ({"versions": {"1": "b.onnx"}, "traffic": {"1": 0}}, "models.m.traffic.1: expected"),
        ({"versions": {"1": "b.onnx", "2": "b.onnx"}, "workers": 0}, "models.m.workers: expected"),
    ],
)  # fmt: skip
def test_rejects_wrong_keys_once(model: dict[str, object], problem: str) -> None:
    with pytest.raises(ConfigError) as caught:
        parsed(**model)
    [found] = caught.value.problems
    assert found.startswith(problem)


def test_version_belongs_to_the_length_of_a_name() -> None:
    name = "n" * (limits.MAX_MODEL_NAME_BYTES - 2)
    assert f"{name}@1" in parse({"models": {name: {"versions": {"1": "a.onnx"}}}}, BASE).models
    with pytest.raises(ConfigError, match="expected a name of at most 64 bytes with its version"):
        parse({"models": {name: {"versions": {"10": "a.onnx"}}}}, BASE)


def test_versions_count_as_models() -> None:
    versions = {str(number): "a.onnx" for number in range(1, limits.MAX_MODEL_VERSIONS + 1)}
    count = limits.MAX_MODELS // limits.MAX_MODEL_VERSIONS
    models: dict[str, object] = {f"m{number}": {"versions": versions} for number in range(count)}
    assert len(parse({"models": models}, BASE).models) == limits.MAX_MODELS
    with pytest.raises(ConfigError, match="expected at most 1024 models and versions, got more"):
        parse({"models": {**models, "one": {"path": "a.onnx"}}}, BASE)


def test_members_of_groups_have_no_versions() -> None:
    content = {
        "models": {"a": {"versions": {"1": "a.mindir"}}, "b": {"path": "b.mindir"}},
        "groups": {"g": {"models": ["a", "b"]}},
    }
    with pytest.raises(ConfigError, match=r"models.a.versions: a model in a group cannot have versions"):
        parse(content, BASE)
