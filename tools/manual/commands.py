"""Declarations of an argument parser as plain objects."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any, NamedTuple

# argparse has no public way to ask for what was declared. Its own help formatter reads these two, in every version.
_ACTIONS = "_actions"
_CHOICES_ACTIONS = "_choices_actions"

# Named so that no checker infers a map of unknown things from the comparison.
_MAP: type[Any] = dict


class Argument(NamedTuple):
    """An option, or a positional argument where there are no flags.

    Attributes:
        flags: as in ("-v", "--verbose").
        metavar: what stands for its value; "" if it takes none.
        choices: the values that it allows; none if it allows any.
        help: what it does, the default filled in.
        is_optional: it may be left out.
        is_repeatable: it may be given several times.
    """

    flags: tuple[str, ...]
    metavar: str
    choices: tuple[str, ...]
    help: str
    is_optional: bool
    is_repeatable: bool


class ProgramCommand(NamedTuple):
    """A program, or one of its commands.

    Attributes:
        name: what is typed.
        help: what it does, in a line; "" for the program.
        description: the same at length.
        epilog: what stands after the list of arguments.
        options: its options.
        positionals: its other arguments, in their order.
        commands: what it has of them.
    """

    name: str
    help: str
    description: str
    epilog: str
    options: tuple[Argument, ...]
    positionals: tuple[Argument, ...]
    commands: tuple[ProgramCommand, ...]


def read_parser(parser: argparse.ArgumentParser, name: str | None = None, help: str = "") -> ProgramCommand:
    """Return what `parser` declares; what it hides is left out."""
    actions = [action for action in _actions(parser) if action.help != argparse.SUPPRESS]
    arguments = [_argument(parser, action) for action in actions if not _is_commands(action)]
    return ProgramCommand(
        parser.prog if name is None else name,
        help,
        _expand(parser, parser.description or help),
        _expand(parser, parser.epilog or ""),
        tuple(argument for argument in arguments if argument.flags),
        tuple(argument for argument in arguments if not argument.flags),
        tuple(command for action in actions if _is_commands(action) for command in _commands(action)),
    )


def _actions(parser: argparse.ArgumentParser) -> Iterable[argparse.Action]:
    found: Iterable[argparse.Action] = vars(parser)[_ACTIONS]
    return found


def _is_commands(action: argparse.Action) -> bool:
    return type(action.choices) is _MAP and _CHOICES_ACTIONS in vars(action)


def _commands(action: argparse.Action) -> Iterable[ProgramCommand]:
    parsers: dict[str, argparse.ArgumentParser] = vars(action)["choices"]
    for each in vars(action)[_CHOICES_ACTIONS]:
        yield read_parser(parsers[each.dest], each.dest, _expand(parsers[each.dest], each.help or ""))


def _argument(parser: argparse.ArgumentParser, action: argparse.Action) -> Argument:
    takes_value = action.nargs != 0
    choices = tuple(str(each) for each in action.choices or ())
    metavar = action.metavar if isinstance(action.metavar, str) else ""
    if takes_value and not metavar:
        metavar = "{" + ",".join(choices) + "}" if choices else action.dest.upper().replace("_", "-")
    return Argument(
        tuple(action.option_strings),
        metavar if takes_value else "",
        choices,
        # Last, an action's own: its default is what %(default)s means.
        _expand(parser, action.help or "", vars(action)),
        is_optional=bool(action.option_strings and not action.required) or action.nargs in ("?", "*"),
        is_repeatable="Append" in type(action).__name__ or action.nargs in ("*", "+"),
    )


def _expand(parser: argparse.ArgumentParser, text: str, values: dict[str, Any] | None = None) -> str:
    """What argparse fills in when it prints a help: it does that for the help of arguments only."""
    if values is None:
        return text.replace("%(prog)s", parser.prog)
    return text % {**values, "prog": parser.prog}
