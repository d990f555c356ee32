"""Shell completion: a bash script, which zsh reads through `bashcompinit`.

It needs only bash itself, tr and sed, not the package bash-completion.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Mapping

from tools.manual.commands import Argument, ProgramCommand

# Kinds of completions.
FILE = "file"
DIRECTORY = "directory"
MODEL = "model"  # a name that the running daemon knows

_HEAD = """\
# Completion of @NAME@ for bash. In zsh: autoload -U +X bashcompinit && bashcompinit && source THIS_FILE

"""

# The script queries the daemon only to complete a model's name, with a time limit of one second.
_MODELS_FUNCTION = r"""_@NAME@_models() {
    local socket="" word previous=""
    # COMP_WORDS is of no use here, because bash splits an address at its colons.
    while IFS= read -r word; do
        case "$previous" in (--socket) socket="$word" ;; esac
        case "$word" in (--socket=*) socket="${word#--socket=}" ;; esac
        previous="$word"
    done < <(printf '%s' "$COMP_LINE" | tr -s '[:space:]' '\n')
    @NAME@ status --timeout 1 ${socket:+"--socket=$socket"} 2>/dev/null </dev/null |
        sed -n 's/^\([A-Za-z0-9_][A-Za-z0-9._-]*\): [A-Z]*, .*/\1/p'
}

"""

_BODY = """\
_@NAME@() {
    local current="${COMP_WORDS[COMP_CWORD]}"
    local command="" position=0 option="" value="" wanted="" options="" index word line
    local -a positionals
    COMPREPLY=()
    # Find the command, the number of positional arguments before this word, and whether this word is an option's value.
    for ((index = 1; index < COMP_CWORD; index++)); do
        word="${COMP_WORDS[index]}"
        case "$value$word" in
            # bash splits --option=value into three words, and also an address.
            (=|:|value=) value="value" ;;
            (value*) value="" ;;
            (@VALUED@) value="value" option="$word" ;;
            (-*) option="" ;;
            (*) if [ -n "$command" ]; then position=$((position + 1)); else command="$word"; fi ;;
        esac
    done
    case "$current" in (=|:) current="" value="value" ;; esac
    case "$command" in
@COMMANDS@        (*) return ;;
    esac
    case "$value$current" in
        (value*) case "$command $option" in
@VALUES@        esac ;;
        (-*) wanted="$options" ;;
        (*) if [ "$position" -lt "${#positionals[@]}" ]; then wanted="${positionals[position]}"; fi ;;
    esac
    # With this option bash quotes spaces, and appends a slash to directories.
    case "$wanted" in (file|directory) compopt -o filenames 2>/dev/null ;; esac
    while IFS= read -r line; do COMPREPLY+=("$line"); done < <(
        case "$wanted" in
            (file) compgen -f -- "$current" ;;
            (directory) compgen -d -- "$current" ;;
@MODELS@            (*) compgen -W "$wanted" -- "$current" ;;
        esac
    )
}
complete -F _@NAME@ @NAME@
"""

_MODELS = """\
            (model) compgen -W "$(_@NAME@_models)" -- "$current" ;;
"""


def bash_script(program: ProgramCommand, kinds: Mapping[str, str]) -> str:
    """Return the script for a program.

    Args:
        program: the command line to complete.
        kinds: the kind of completion for each metavar: `FILE`, `DIRECTORY` or `MODEL`. Others have no completion.
    """
    needs_models = MODEL in kinds.values()
    text = _HEAD + (_MODELS_FUNCTION if needs_models else "") + _BODY
    parts = {
        "@MODELS@": _MODELS if needs_models else "",
        "@VALUED@": "|".join(
            sorted(
                {
                    flag
                    for each in _with_subcommands(program)
                    for option in each.options
                    for flag in _flags_with_value(option)
                }
            )
        ),
        "@VALUES@": "".join(f"            {line}\n" for line in _value_cases(program, kinds)),
        "@COMMANDS@": "".join(f"        {line}\n" for line in _command_cases(program, kinds)),
        "@NAME@": program.name,
    }
    for mark, part in parts.items():
        text = text.replace(mark, part)
    return text


def _with_subcommands(program: ProgramCommand) -> Iterator[ProgramCommand]:
    yield program._replace(name="")
    yield from program.commands


def _flags_with_value(option: Argument) -> Iterator[str]:
    if option.metavar:
        yield from option.flags


def _value_cases(program: ProgramCommand, kinds: Mapping[str, str]) -> Iterator[str]:
    for command in _with_subcommands(program):
        for option in command.options:
            for flag in _flags_with_value(option):
                wanted = _completion_of(option, kinds)
                if wanted:
                    yield f"({shlex.quote(f'{command.name} {flag}')}) wanted={shlex.quote(wanted)} ;;"


def _command_cases(program: ProgramCommand, kinds: Mapping[str, str]) -> Iterator[str]:
    for command in _with_subcommands(program):
        options = shlex.quote(" ".join(flag for option in command.options for flag in option.flags))
        completions = [_completion_of(each, kinds) for each in command.positionals]
        if command.commands:
            completions.append(" ".join(each.name for each in command.commands))
        listed = " ".join(map(shlex.quote, completions))
        yield f"({shlex.quote(command.name)}) options={options} positionals=({listed}) ;;"


def _completion_of(argument: Argument, kinds: Mapping[str, str]) -> str:
    return " ".join(argument.choices) or kinds.get(argument.metavar, "")
