"""Tests of the lookup of the model that a client names, with fake models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any, cast

import pytest

from weightd_daemon.api.model_lookup import ModelLookup
from weightd_daemon.api.version_sets import ProvenRecord
from weightd_daemon.config.tenants import TenantConfig
from weightd_daemon.config.versions import VersionSetConfig
from weightd_daemon.models.registry import ModelRegistry
from weightd_daemon.tenants.tenant import DEFAULT_TENANT, Tenant
from weightd_protocol.errors import FailedPrecondition, NotFound
from weightd_protocol.messages.control import ABORT, PROMOTE, SET_SHARE, Rollout
from weightd_protocol.messages.inference import RequestDescription, TensorSpec
from weightd_protocol.messages.status import VersionSetStatus, VersionShare

INPUTS = (TensorSpec("x", "FP32", (1,)),)


def model(name: str, state: str = "serving") -> Any:
    """Return a fake model: "serving", "loading", "failed", "unloaded", "on_demand" or "idle" (has served)."""
    is_unloaded = state in ("unloaded", "on_demand", "idle")
    return SimpleNamespace(
        name=name,
        readiness=SimpleNamespace(has_failed=state == "failed", may_serve_soon=state == "serving"),
        loading=SimpleNamespace(unavailable="not loaded" if is_unloaded else None),
        config=SimpleNamespace(path=f"/{name}", revision=0, is_on_demand=state in ("on_demand", "idle")),
        dispatcher=SimpleNamespace(signature=SimpleNamespace(built="built" if state in ("serving", "idle") else None)),
    )


def lookup_of(**states: str) -> ModelLookup:
    """Return the lookup of a model `plain` and of `m`, whose versions 1, 2 … have these states: v1="serving" …."""
    registry = ModelRegistry(cast(Any, None))
    names = {f"m@{name[1:]}": state for name, state in states.items()}
    registry.models = {name: model(name, state) for name, state in {"plain": "serving", **names}.items()}
    lookup = ModelLookup(registry)
    lookup.configure({"m": VersionSetConfig(tuple(int(name[1:]) for name in states))})
    return lookup


def test_version_that_an_earlier_daemon_has_loaded_answers_first() -> None:
    before = lookup_of(v1="idle", v2="on_demand", v3="on_demand")
    before.proven.restore([ProvenRecord("m@2", "/another", 0)])
    records = list(before.proven.records())
    assert records == [ProvenRecord("m@1", "/m@1", 0)]
    after = lookup_of(v1="on_demand", v2="on_demand", v3="on_demand")
    after.proven.restore(records)
    assert after.find("m", DEFAULT_TENANT).name == "m@1"
    assert list(after.proven.records()) == records


@pytest.mark.parametrize(
    ("states", "answers"),
    [
        ({"v1": "serving", "v2": "serving"}, 2),
        ({"v1": "serving", "v2": "loading"}, 1),
        ({"v1": "serving", "v2": "failed"}, 1),
        ({"v1": "serving", "v2": "on_demand"}, 1),
        ({"v1": "on_demand", "v2": "on_demand"}, 2),
        ({"v1": "loading", "v2": "failed"}, 1),
        ({"v1": "loading", "v2": "unloaded"}, 1),
    ],
)
def test_default_version_can_answer(states: dict[str, str], answers: int) -> None:
    lookup = lookup_of(**states)
    assert lookup.find("m", DEFAULT_TENANT).name == f"m@{answers}"
    assert [each.version for each in lookup.version_shares("m") if each.percent] == [answers]


def test_version_that_was_loaded_before_is_preferred() -> None:
    lookup = lookup_of(v1="idle", v2="on_demand", v3="loading")
    assert lookup.find("m", DEFAULT_TENANT).name == "m@1"


def test_shares_do_not_depend_on_other_models() -> None:
    lookup = lookup_of(v1="serving")
    lookup.registry.models["m"] = model("m")
    assert lookup.version_shares("m") == (VersionShare(1, 100.0),)
    assert lookup.find("m", DEFAULT_TENANT).name == "m"


def test_named_version_is_found_in_any_state() -> None:
    lookup = lookup_of(v1="failed", v2="serving")
    assert lookup.find("m@1", DEFAULT_TENANT).name == "m@1"
    assert lookup.find("plain@1", DEFAULT_TENANT).name == "plain"


def test_response_names_the_version() -> None:
    lookup = lookup_of(v1="serving", v2="serving")
    description = RequestDescription("m", INPUTS)
    found, named = lookup.find_for_request(description, "7", DEFAULT_TENANT)
    assert (found.name, named.model_name, named.inputs) == ("m@2", "m@2", INPUTS)
    assert lookup.find_for_request(RequestDescription("m", INPUTS), "8", DEFAULT_TENANT)[1] is named
    own = RequestDescription("m@1", INPUTS)
    assert lookup.find_for_request(own, "7", DEFAULT_TENANT)[1] is own


@pytest.mark.parametrize(
    ("name", "text"),
    [
        ("m@3", "no version '3' of model 'm'; there are: 1, 2"),
        ("plain@2", "no version '2' of model 'plain'; there are: 1"),
        ("m@1@1", "no version '1@1' of model 'm'; there are: 1, 2"),
        ("@1", "no model '@1'; there are: plain, m@1, m@2, m"),
        ("", "no model ''; there are: plain, m@1, m@2, m"),
    ],
)
def test_error_lists_what_exists(name: str, text: str) -> None:
    lookup = lookup_of(v1="serving", v2="serving")
    with pytest.raises(NotFound) as by_name:
        lookup.find(name, DEFAULT_TENANT)
    with pytest.raises(NotFound) as by_request:
        lookup.find_for_request(RequestDescription(name or "?", INPUTS), "7", DEFAULT_TENANT)
    assert str(by_name.value) == text
    assert str(by_request.value) == text.replace("''", "'?'")


def test_tenant_sees_all_versions_of_its_models() -> None:
    lookup = lookup_of(v1="serving", v2="serving")
    own, other = Tenant("own", TenantConfig(models=("m",))), Tenant("other", TenantConfig(models=("plain",)))
    assert lookup.visible_names(own) == ["m@1", "m@2", "m"]
    assert lookup.visible_names(other) == ["plain"]
    assert [each.name for each in lookup.version_sets(own)] == ["m"]
    assert lookup.version_sets(other) == ()
    for name in ("m", "m@1", "m@3"):
        with pytest.raises(NotFound, match=f"no model '{name}'; there are: plain"):
            lookup.find(name, other)
    assert not other.known_models.keys() - {"m", "m@1", "m@2", "plain"}


def test_unknown_names_are_not_remembered() -> None:
    lookup, tenant = lookup_of(v1="serving"), Tenant("t", TenantConfig())
    for number in range(10):
        with pytest.raises(NotFound):
            lookup.find(f"unknown{number}@1", tenant)
        assert not lookup.is_visible(f"unknown{number}", tenant)
    assert not any(name.startswith("unknown") for name in tenant.known_models)


def test_rollout_is_kept_for_the_next_daemon() -> None:
    lookup = lookup_of(v1="serving", v2="serving")
    lookup.roll_out(Rollout("1", "m", SET_SHARE, 1, 25.0))
    assert lookup.version_shares("m") == (VersionShare(1, 25.0), VersionShare(2, 75.0))
    after = ModelLookup(lookup.registry)
    after.configure({"m": VersionSetConfig((1, 2, 3))}, lookup.rollout_records())
    assert [each.percent for each in after.version_shares("m")] == [25.0, 75.0, 0.0]
    gone = ModelLookup(lookup.registry)
    gone.configure({"m": VersionSetConfig((2, 3))}, lookup.rollout_records())
    assert gone.rollout_records() == []


def test_reload_keeps_rollout() -> None:
    lookup = lookup_of(v1="serving", v2="serving")
    lookup.roll_out(Rollout("1", "m", PROMOTE, 1))
    lookup.configure({"m": VersionSetConfig((1, 2))})
    assert lookup.version_sets(None) == (VersionSetStatus("m", (VersionShare(1, 100.0), VersionShare(2, 0.0)), True),)
    lookup.roll_out(Rollout("1", "m", ABORT))
    assert lookup.find("m", DEFAULT_TENANT).name == "m@2"


def test_model_without_versions_has_no_rollout() -> None:
    with pytest.raises(FailedPrecondition, match="plain has no versions: its configuration has no key versions"):
        lookup_of(v1="serving").roll_out(Rollout("1", "plain", PROMOTE, 1))
