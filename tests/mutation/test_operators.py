"""Tests that the operators produce their examples."""

from __future__ import annotations

import pytest

pytest.importorskip("cosmic_ray", reason="`make mutants` installs it and runs these")


@pytest.mark.parametrize("name", ["ForceCondition", "RemoveBound", "RemoveOperand", "RemoveStatement"])
def test_operator_produces_its_examples(name: str) -> None:
    from cosmic_ray.mutating import mutate_code

    from .operators import Provider

    operator = Provider()[name]
    for each in operator.examples():
        assert mutate_code(each.pre_mutation_code, operator(), each.occurrence) == each.post_mutation_code


@pytest.mark.parametrize(
    "code",
    [
        '"""A docstring."""\n',
        "def f(a: A | B, b: C | None = None) -> D | E: return a\n",
        "x: A | B = a\n",
        "self.log.info(a)\n",
        "while True: pass\n",
        "if a:\n    raise b\n",
        "x = min(a)\n",
        "x = min(a, key=b)\n",
        "x = a\n",
    ],
)
def test_keeps_other_conditions(code: str) -> None:
    from cosmic_ray.mutating import mutate_code

    from .operators import ForceCondition, Provider

    made = [mutate_code(code, operator(), 0) for operator in (Provider()[name] for name in Provider())]
    if code.startswith("if "):
        made = [each for each in made if each != mutate_code(code, ForceCondition(), 0)]
    assert made == [None] * len(made)


def test_keeps_attributes_of_constructor() -> None:
    from cosmic_ray.mutating import mutate_code

    from .operators import RemoveStatement

    code = "class A:\n    def __init__(self): self.a = 1\n    def b(self): self.a = 2\n"
    assert mutate_code(code, RemoveStatement(), 0) == code.replace("self.a = 2", "pass")
    assert mutate_code(code, RemoveStatement(), 1) is None
