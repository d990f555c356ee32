"""Tests that `Client` and `AsyncClient` have the same methods, parameters and defaults."""

from __future__ import annotations

import inspect
from typing import Any, Dict, List, Type

import pytest

from weightd import AsyncClient, AsyncModel, Client, Model

# Only a blocking client has this method: a task awaits a response where a thread submits a request.
ONLY_BLOCKING = {"submit"}

# Inputs may also come from an asynchronous iterable.
OTHER_TYPES = {"map": {"inputs"}}

NOT_AWAITED = {"address", "empty", "map", "model", "name", "timeout", "transport"}


def public(kind: Type[Any]) -> Dict[str, Any]:
    names = {name for name in dir(kind) if not name.startswith("_")} | ({"__init__", "__call__"} & set(vars(kind)))
    return {name: inspect.getattr_static(kind, name) for name in names}


def parameters(name: str, member: Any) -> List[Any]:
    function: Any = member.fget if isinstance(member, property) else member
    return [
        (each.name, each.kind, each.default, None if each.name in OTHER_TYPES.get(name, ()) else each.annotation)
        for each in inspect.signature(function).parameters.values()
    ]


@pytest.mark.parametrize(("blocking", "awaited"), [(Client, AsyncClient), (Model, AsyncModel)])
def test_both_have_the_same_methods(blocking: Type[Any], awaited: Type[Any]) -> None:
    assert set(public(awaited)) == set(public(blocking)) - ONLY_BLOCKING


@pytest.mark.parametrize(
    ("blocking", "awaited", "name"),
    [(Client, AsyncClient, each) for each in sorted(public(AsyncClient))]
    + [(Model, AsyncModel, each) for each in sorted(set(public(AsyncModel)) - {"__init__"})],
)
def test_each_method_has_the_same_signature_and_docstring(blocking: Type[Any], awaited: Type[Any], name: str) -> None:
    one, other = public(blocking)[name], public(awaited)[name]
    assert parameters(name, one) == parameters(name, other)
    if name in ("__init__", "__call__"):
        return
    assert inspect.iscoroutinefunction(other) == (name not in NOT_AWAITED and not isinstance(other, property))
    # The first lines agree; the asynchronous docstring refers to the blocking one for the rest.
    first_line = (inspect.getdoc(other) or "").split("\n")[0]
    first_line = first_line.partition(f": as `{blocking.__name__}.")[0].rstrip(".")
    assert (inspect.getdoc(one) or "").startswith(first_line[:30])
