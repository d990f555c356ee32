"""The command `python -m weightd_ray`: publishes models in the object store of a Ray cluster, and removes them."""

from __future__ import annotations

import argparse
import sys

import weightd_ray as cluster
from weightd_common import process_start
from weightd_common.commandline import Parser
from weightd_protocol.errors import WeightdError

OK = 0
FAILED = 1


def main(arguments: list[str] | None = None) -> int:
    """Run the command and return its exit status."""
    options = parser().parse_args(arguments)
    try:
        if options.command == "publish":
            print(cluster.publish(options.path))
        else:
            cluster.unpublish(options.model)
    except (WeightdError, ConnectionError) as error:
        print(f"python -m weightd_ray: {error}", file=sys.stderr)
        return FAILED
    return OK


def parser() -> argparse.ArgumentParser:
    """Return the command-line parser."""
    parser = Parser(prog="python -m weightd_ray", description=(__doc__ or "").partition(": ")[2])
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    publish = commands.add_parser("publish", help="publish a model's files in the cluster and print its name, sha256:…")
    publish.add_argument("path", metavar="PATH", help="path of an .onnx or .mindir file")
    unpublish = commands.add_parser("unpublish", help="remove a published model from the cluster")
    unpublish.add_argument("model", metavar="NAME", help="name that publish printed")
    return parser


if __name__ == "__main__":
    process_start.reset_signals()
    process_start.serve_as_init()
    sys.exit(main())
