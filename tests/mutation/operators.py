"""Additional mutation operators for cosmic-ray: they remove guards, calls, flags and bounds.

Each operator enumerates the positions in a syntax tree (parso) that it can change, and changes one of them.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from cosmic_ray.ast import get_ast
from cosmic_ray.operators.operator import Example, Operator

Position = tuple[tuple[int, int], tuple[int, int]]

_BOOLEAN = ("comparison", "not_test", "and_test")
_OPERANDS = (*_BOOLEAN, "or_test")
_KEYWORDS = ("if", "elif", "while")
_LOGGED = ("debug", "info", "warning", "error", "exception", "critical", "log")


class ForceCondition(Operator):
    """Replaces a condition with True and with False."""

    def mutation_positions(self, node: Any) -> Iterator[Position]:
        """Yield two positions for each condition of the node, or one if the loop would not end."""
        for index, _ in self._choices(node):
            yield _position(node.children[index])

    def mutate(self, node: Any, index: int) -> Any:
        place, value = self._choices(node)[index]
        node.children[place] = _replaced(node.children[place], value)
        return node

    @staticmethod
    def _choices(node: Any) -> list[tuple[int, str]]:
        values = ("False",) if node.type == "while_stmt" else ("True", "False")
        return [(index, value) for index in _conditions(node) for value in values]

    @classmethod
    def examples(cls) -> Sequence[Example]:
        return (
            Example("if a: pass\nelif b: pass", "if True: pass\nelif b: pass"),
            Example("if a: pass\nelif b: pass", "if a: pass\nelif False: pass", 3),
            Example("while a: pass", "while False: pass"),
            Example("x = a if b else c", "x = a if False else c", 1),
            Example("x = [a for a in b if c]", "x = [a for a in b if True]"),
            Example("return a < b", "return True"),
        )


class RemoveOperand(Operator):
    """Removes an operand of `and`, `or` and `|`, which joins flags and sets."""

    def mutation_positions(self, node: Any) -> Iterator[Position]:
        if node.type in ("and_test", "or_test") or _is_union(node):
            yield from map(_position, node.children[::2])

    def mutate(self, node: Any, index: int) -> Any:
        """Remove the operand with the operator before it, or the first one with the operator behind it."""
        first = max(0, 2 * index - 1)
        node.children = node.children[:first] + node.children[first + 2 :]
        return node

    @classmethod
    def examples(cls) -> Sequence[Example]:
        return (
            Example("x = a and b and c", "x = b and c"),
            Example("x = a and b and c", "x = a and c", 1),
            Example("x = a or b", "x = a", 1),
            Example("x = a | b", "x = b"),
        )


class RemoveStatement(Operator):
    """Replaces a statement that has only a side effect with `pass`."""

    def mutation_positions(self, node: Any) -> Iterator[Position]:
        if node.parent is not None and node.parent.type == "simple_stmt" and _has_effect(node):
            yield _position(node)

    def mutate(self, node: Any, index: int) -> Any:
        assert index == 0
        return _replaced(node, "pass")

    @classmethod
    def examples(cls) -> Sequence[Example]:
        return (
            Example("os.umask(0)\n", "pass\n"),
            Example("await a()\n", "pass\n"),
            Example("a.b = c\n", "pass\n"),
            Example("a -= 1\n", "pass\n"),
            Example("del a[b]\n", "pass\n"),
            Example("raise a\n", "pass\n"),
        )


class RemoveBound(Operator):
    """Removes an argument of `min` and `max`, that is, a bound."""

    def mutation_positions(self, node: Any) -> Iterator[Position]:
        yield from map(_position, _bounds(node))

    def mutate(self, node: Any, index: int) -> Any:
        """Remove the argument; the last remaining one replaces the call."""
        name = node.children[0].value
        left = [each.get_code().strip() for number, each in enumerate(_bounds(node)) if number != index]
        return _replaced(node, f"({left[0]})" if len(left) == 1 else f"{name}({', '.join(left)})")

    @classmethod
    def examples(cls) -> Sequence[Example]:
        return (
            Example("x = min(a, b)", "x = (b)"),
            Example("x = max(a, b, c)", "x = max(a, c)", 1),
        )


class Provider:
    """The operators by name, in the form that cosmic-ray loads."""

    def __iter__(self) -> Iterator[str]:
        return iter(_OPERATORS)

    def __getitem__(self, name: str) -> type[Operator]:
        return _OPERATORS[name]


_OPERATORS: dict[str, type[Operator]] = {
    each.__name__: each for each in (ForceCondition, RemoveBound, RemoveOperand, RemoveStatement)
}


def _position(node: Any) -> Position:
    return node.start_pos, node.end_pos


def _replaced(node: Any, text: str) -> Any:
    """Return a node with this text and the white space before the other node."""
    return get_ast(node.get_first_leaf().prefix + text)


def _conditions(node: Any) -> list[int]:
    """Return the indices of the node's children that are conditions and not constants."""
    children = getattr(node, "children", [])
    if node.type in ("if_stmt", "while_stmt", "comp_if", "ternary", "test"):
        found = [index + 1 for index, each in enumerate(children) if each.type == "keyword" and each.value in _KEYWORDS]
    elif node.type in _OPERANDS or (node.type == "atom" and node.parent.type in (*_OPERANDS, "if_stmt", "while_stmt")):
        found = []  # RemoveOperand covers these, or they are part of a condition.
    else:
        found = [index for index, each in enumerate(children) if each.type in _BOOLEAN]
    return [index for index in found if children[index].get_code().strip() not in ("True", "False")]


def _is_union(node: Any) -> bool:
    return node.type == "expr" and node.children[1].value == "|" and not _is_annotation(node)


def _is_annotation(node: Any) -> bool:
    while node.parent is not None and node.parent.type not in ("suite", "simple_stmt", "file_input"):
        node = node.parent
        if node.type in ("annassign", "funcdef", "tfpdef"):
            return True
    return False


def _has_effect(node: Any) -> bool:
    if node.type == "raise_stmt":  # Inside an `if` the condition covers the raise.
        block = node.parent.parent
        return "if_stmt" not in (block.type, block.parent and block.parent.type)
    if node.type == "expr_stmt":
        target, operator = node.children[:2]
        is_plain = operator.type == "operator" and operator.value == "="
        is_changed = is_plain and target.type == "atom_expr" and not _is_in_init(node)
        return is_changed or (operator.type == "operator" and operator.value not in "=:")
    return node.type in ("atom_expr", "yield_expr", "del_stmt") and not _is_log_call(node)


def _is_log_call(node: Any) -> bool:
    method = node.children[-2].children if node.type == "atom_expr" and node.children[-2].type == "trailer" else []
    return len(method) == 2 and method[1].type == "name" and method[1].value in _LOGGED


def _is_in_init(node: Any) -> bool:
    """Return whether the node is in a constructor, without whose assignments every test fails."""
    while node is not None and node.type != "funcdef":
        node = node.parent
    return node is not None and node.name.value == "__init__"


def _bounds(node: Any) -> list[Any]:
    """Return the arguments if the node is a call of `min` or `max` with several plain ones, otherwise none."""
    if node.type != "atom_expr" or len(node.children) != 2 or node.children[0].type != "name":
        return []
    name, call = node.children
    if name.value not in ("min", "max") or call.type != "trailer" or call.children[1].type != "arglist":
        return []
    arguments = [each for each in call.children[1].children if each.type != "operator"]
    return [] if any(each.type == "argument" for each in arguments) else arguments
