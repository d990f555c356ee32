"""Declarations of an argument parser as plain objects."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from typing import Any, NamedTuple

# argparse has no public interface to its declarations. Its help formatter reads these attributes in all versions.
_ACTIONS = "_actions"
_CHOICES_ACTIONS = "_choices_actions"

# A named type: from a comparison with `dict`, type checkers would infer a map of unknown types.
_MAP: type[Any] = dict


class Argument(NamedTuple):
    """An option, or a positional argument if it has no flags.

    Attributes:
        flags: as in ("-v", "--verbose").
        metavar: the placeholder of the value; "" for a flag without a value.
        choices: the allowed values; empty if any value is allowed.
        help: the help text, including the default.
        is_optional: whether it may be omitted.
        is_repeatable: whether it may be given several times.
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
        name: the name on the command line.
        help: the summary in one line; "" for the program.
        description: the full description.
        epilog: the text after the list of arguments.
        options: the options.
        positionals: the positional arguments, in their order.
        commands: the commands of a program.
    """

    name: str
    help: str
    description: str
    epilog: str
    options: tuple[Argument, ...]
    positionals: tuple[Argument, ...]
    commands: tuple[ProgramCommand, ...]


def read_parser(parser: argparse.ArgumentParser, name: str | None = None, help: str = "") -> ProgramCommand:
    """Return the declarations of `parser`, without its hidden arguments."""
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
        # The values of the action include the default, for %(default)s.
        _expand(parser, action.help or "", vars(action)),
        is_optional=bool(action.option_strings and not action.required) or action.nargs in ("?", "*"),
        is_repeatable="Append" in type(action).__name__ or action.nargs in ("*", "+"),
    )


def _expand(parser: argparse.ArgumentParser, text: str, values: dict[str, Any] | None = None) -> str:
    """Return the text with its placeholders replaced, which argparse itself does only in the help of arguments."""
    if values is None:
        return text.replace("%(prog)s", parser.prog)
    return text % {**values, "prog": parser.prog}
