"""Command-line arguments of a child."""

from __future__ import annotations

import argparse
import functools
import json
import os
import sys
from typing import Any, Dict, List, Sequence, Tuple, cast

from weightd_common.process_attributes import SCORES_ABOVE_DAEMON
from weightd_worker.engines import ENGINES, RANK_ENGINES
from weightd_worker.engines.engine import BuildError

PROGRAM = ("-m", "weightd_worker")


def parse(argv: Sequence[str]) -> argparse.Namespace:
    """Parse the command-line arguments of a child process.

    Raises:
        SystemExit: the arguments are invalid. The parser has printed the error to stderr.
    """
    return parser().parse_args(argv)


@functools.lru_cache(maxsize=None)
def parser() -> argparse.ArgumentParser:
    """Return the argument parser, which is built only once.

    A fork server calls this function before it forks, so that all forked processes share the memory of the parser.
    """
    parser = argparse.ArgumentParser(
        prog="python -m weightd_worker",
        description="A process of weightd. The daemon starts it; do not start it by hand.",
    )
    parser.add_argument("--address", required=True, help="the daemon's socket for its children")
    parser.add_argument("--name", required=True, help="this process's name and routing id")
    parser.add_argument("--parent", required=True, type=int, help="pid of the process that starts it")
    parser.add_argument("--role", choices=sorted(SCORES_ABOVE_DAEMON), default="worker", help="role of the process")
    parser.add_argument(
        "--engine", required=True, choices=sorted({*ENGINES, *RANK_ENGINES}), help="the library that runs the model"
    )
    parser.add_argument("--model", required=True, help="path of the model's snapshot")
    parser.add_argument(
        "--snapshot-identity",
        default="",
        help="identity and digest of the snapshot, so that the process need not read it again",
    )
    parser.add_argument("--store", required=True, help="path where the holder may write its page store")
    parser.add_argument("--threads", required=True, type=int, help="threads of one predict")
    parser.add_argument("--device", required=True, help="device: cpu, a set of its cores cpu:N, or a card ascend:N")
    parser.add_argument("--cores", default="", help="the cores on which all its threads stay: 0-3,8")
    parser.add_argument(
        "--sharing", choices=["on", "off"], default="on", help="off: the process has a private copy of the weights"
    )
    parser.add_argument("--options", default="{}", help="the engine's own options, a JSON object")
    parser.add_argument("--weights", default="", help="an .npz of weights that replace the model's")
    parser.add_argument("--selftest-inputs", default="", help="an .npz of self-test inputs")
    parser.add_argument("--tolerance", default=0.0, type=float, help="allowed difference of answers to the self-test")
    parser.add_argument(
        "--sharer-count",
        default=0,
        type=int,
        help="number of processes that will share the model; 0: share in any case",
    )
    parser.add_argument("--template", action="store_true", help="fork workers from this holder if possible")
    parser.add_argument("--models", default="", help="models of a model group, a JSON object")
    parser.add_argument(
        "--rendezvous", default="", help="for a rank or a broker: rendezvous of its group, a JSON object"
    )
    parser.add_argument("--origin-note", default="", help="reason why the process was not forked")
    return parser


def read_arguments() -> List[str]:
    """Return the arguments on stdin, a JSON list of strings, followed by the arguments of the command line.

    The daemon passes the arguments on stdin because they contain names of models, and every user of the host can read
    the command line. Afterwards stdin is /dev/null. If `--help` is the only argument, the function does not read
    stdin.

    Raises:
        SystemExit: stdin does not contain a JSON list of strings.
    """
    if sys.argv[1:] == ["--help"]:
        return sys.argv[1:]
    with open(0, "rb", closefd=False) as file:
        content = file.read()
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    try:
        argv: Any = json.loads(content)
    except ValueError:
        argv = None
    if not isinstance(argv, list) or not all(isinstance(word, str) for word in cast(List[object], argv)):
        raise SystemExit("stdin: expected the arguments as a JSON list of strings; weightd starts this process")
    return [*cast(List[str], argv), *sys.argv[1:]]


def parse_options(text: str) -> Dict[str, Any]:
    """Parse a JSON object of engine options. The engine checks keys and values later.

    Raises:
        BuildError: the text is not a JSON object, or contains a key twice.
    """

    def reject_duplicate_keys(pairs: List[Tuple[str, Any]]) -> Dict[str, Any]:
        options: Dict[str, Any] = {}
        for key, value in pairs:
            if key in options:
                raise BuildError(f"options.{key}: given twice")
            options[key] = value
        return options

    try:
        options: Any = json.loads(text, object_pairs_hook=reject_duplicate_keys)
    except (ValueError, RecursionError) as error:
        raise BuildError(f"options: not JSON: {error}") from None
    if not isinstance(options, dict):
        raise BuildError(f"options: expected a JSON object, got {type(options).__name__}")
    return cast(Dict[str, Any], options)
