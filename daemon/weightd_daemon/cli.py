"""Command line of `weightd`."""

from __future__ import annotations

import argparse
import logging
import os
import shlex
import signal
import sys
from pathlib import Path
from typing import NoReturn

from weightd_common import commandline, endpoints, process_start
from weightd_common.commandline import Parser
from weightd_common.devices import CPU
from weightd_common.service_manager import ServiceManager
from weightd_common.terminal import ends_on_hangup
from weightd_daemon import app, exit_codes
from weightd_daemon.api.version_sets import ProvenVersions
from weightd_daemon.config.check import describe_config, find_problems
from weightd_daemon.config.daemon import default_path, unit_of
from weightd_daemon.config.load import Config, ConfigError, check_config, parse
from weightd_daemon.config.tenants import find_warnings
from weightd_daemon.config_file import CONFIG, ConfigFile
from weightd_daemon.doctor import arguments as doctor
from weightd_daemon.handover.shim_launcher import SHIM
from weightd_daemon.main_loop import Options
from weightd_daemon.memory_plan import plan_memory
from weightd_daemon.platform import environment, log_setup
from weightd_daemon.platform.directories import PathInUse
from weightd_daemon.repository import select_models
from weightd_daemon.zmq_proxy.zygote import Zygote
from weightd_protocol.schema import label
from weightd_protocol.version import VERSION

_DESCRIPTION = """\
Serves models from worker processes that share one copy of the weights.
Use weightctl to talk to a running daemon."""


def main(arguments: list[str] | None = None, zygote: Zygote | None = None) -> int:
    """Run a command line; return the exit status.

    Args:
        arguments: the arguments of the command line; None for the arguments of this process.
        zygote: forks ZeroMQ proxies for the commands that start a daemon; if None, the daemon starts a zygote when it
            needs one.
    """
    options = parser().parse_args(arguments)
    options.zygote = zygote
    log_setup.set_up(logging.DEBUG if options.verbose else logging.INFO)
    try:
        status: int = options.run(options)
    except ConfigError as error:
        for problem in error.problems:
            log_setup.print_error(problem)
        return exit_codes.CONFIG
    except PathInUse as error:
        log_setup.print_error(str(error))
        return exit_codes.CANNOT_CREATE
    except KeyboardInterrupt:
        return exit_codes.INTERRUPTED
    return status


def _serve(options: argparse.Namespace) -> int:
    manager = ServiceManager(os.environ, (SHIM, CONFIG))
    file = ConfigFile((options.config or default_path()).absolute(), manager)
    with process_start.gc_paused():
        config = file.load_initial()
    environment.remove_unlisted(os.environ, config.daemon.pass_environment)
    return app.run(Options(config, file, manager, zygote=options.zygote))


def _run(options: argparse.Namespace) -> int:
    name = options.name or Path(options.model).stem
    # Without --socket, use the address to which weightctl connects without --socket.
    socket = endpoints.daemon_socket(options.socket or os.environ.get("WEIGHTD_SOCKET", ""))
    model = {
        "path": options.model,
        "python": options.python,
        "workers": options.workers,
        "threads": options.threads,
        "devices": options.device or [CPU],
    }
    try:
        # `parse` checks the arguments in the same way as the keys of a configuration file.
        config = parse(
            {"daemon": {"socket": socket, "cache_dir": options.cache_dir}, "models": {name: model}}, Path.cwd()
        )
    except ConfigError as error:
        for problem in error.problems:
            log_setup.print_error(_name_argument(problem, name, is_name_given=bool(options.name)))
        return exit_codes.USAGE
    environment.remove_unlisted(os.environ)
    example = _example_command(config.daemon.socket, name)
    return app.run(Options(config, one_shot=example, zygote=options.zygote))


def _example_command(socket: str, model: str) -> str:
    """Return an example command for the user, which sends a request with random inputs to the model."""
    address_options = (
        [] if socket == endpoints.socket_address(endpoints.runtime_dir()) else ["--socket", _client_address(socket)]
    )
    return shlex.join(["weightctl", *address_options, "predict", model, "--random"])


def _client_address(socket: str) -> str:
    """Return the address for clients: PATH instead of ipc://PATH, so that clients try the Unix socket beside PATH."""
    return socket.removeprefix("ipc://")


def _name_argument(problem: str, name: str, *, is_name_given: bool) -> str:
    """Replace the configuration key in an error text by the command-line argument that sets it."""
    if problem.startswith("listeners"):
        return (
            "--socket: expected ipc:///ABSOLUTE/PATH; tcp:// needs a configuration file, in which the listener has "
            'security = "curve" or insecure = true (see weightd.toml(5))'
        )
    name_argument = "--name" if is_name_given else f"MODEL: {name!r} is not a valid model name; set --name"
    for key, argument in (("daemon.cache_dir", "--cache-dir"), ("daemon.", "--")):
        if problem.startswith(key):
            return argument + problem.removeprefix(key)
    rest = problem.removeprefix(f"models.{label(name)}").removeprefix(".")
    for key, argument in (("path", "MODEL"), ("devices", "--device"), (": ", f"{name_argument}: ")):
        if rest.startswith(key):
            return argument + rest.removeprefix(key)
    return f"--{rest}"


def _check(options: argparse.Namespace) -> int:
    # On a signal, raise SystemExit, so that `with` blocks stop their processes and remove their files.
    for number in (signal.SIGTERM, signal.SIGINT, *((signal.SIGHUP,) if ends_on_hangup() else ())):
        signal.signal(number, _exit_on_signal)
    unit = unit_of(options.config)
    checked = check_config(options.config, unit)
    config = select_models(checked.config, {}, ProvenVersions(dict))
    loadable = {name: model for name, model in checked.loadable.items() if name in config.models or not model.revision}
    found = [*checked.problems, *(f"{options.config}: {each}" for each in config.repository_problems.values())]
    members = {name for group in config.groups.values() for name in group.models}
    model_problems = find_problems(loadable, members)
    found += [f"{options.config}: {problem}" for name in model_problems for problem in model_problems[name]]
    for problem in found:
        log_setup.print_error(problem)
    can_load = True
    if options.load:
        from weightd_daemon.doctor.selftest.load_check import find_load_failures  # noqa: PLC0415 - only `check --load` needs it

        environment.remove_unlisted(os.environ, config.daemon.pass_environment)
        for problem in find_load_failures(
            {name: model for name, model in config.models.items() if not model_problems[name]}
        ):
            can_load = False
            log_setup.print_error(f"{options.config}: {problem}")
    if found or not can_load:
        return exit_codes.CONFIG if found else exit_codes.MODEL_FAILED
    for line in describe_config(config):
        print(line)
    for warning in find_warnings(config.tenants, config.models):
        log_setup.print_error(f"{options.config}: warning: {warning}")
    addresses = [f"unix://{config.daemon.unix_socket}", *(each.address for each in config.listeners.values())]
    unit_suffix = f" for {unit.name}" if unit else ""
    print(f"{options.config}: valid{unit_suffix}; clients connect to {', '.join(addresses)}")
    return _print_plan(config) if options.plan else exit_codes.OK


def _print_plan(config: Config) -> int:
    plan = plan_memory(config)
    for line in plan.lines():
        print(line)
    return exit_codes.MODEL_FAILED if plan.never else exit_codes.OK


def _gateway(options: argparse.Namespace) -> NoReturn:
    """Replace this process by the gateway's program, which runs no code of the daemon."""
    program = [sys.executable, "-m", "weightd_gateway"]
    os.execv(sys.executable, [*program, *commandline.to_gateway_arguments(options)])  # noqa: S606 - no shell is wanted


def _exit_on_signal(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    parser = Parser(prog="weightd", description=_DESCRIPTION, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--version", action="version", version=f"weightd {VERSION}")
    parser.add_argument("-v", "--verbose", action="store_true", help="also log debug messages")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    serve = commands.add_parser(
        "serve",
        help="serve the models of a configuration file",
        description=(
            "Serves the models of a configuration file until SIGTERM or SIGINT. Then it finishes accepted requests, "
            "stops its processes and removes its files except the usage counters. If a service manager restarts it, "
            "its processes continue and wait for the next daemon. After a second signal it does not wait for requests. "
            "SIGHUP reads the configuration again: new models are loaded, changed models are loaded beside the old "
            "ones and replace them, removed models finish their requests and are unloaded; an invalid file changes "
            "nothing. Exit status: 0 success, 1 a model could not be served, 2 a process exited unexpectedly, 64 "
            "invalid command line, 73 a socket or directory is not available, 78 invalid configuration."
        ),
    )
    serve.add_argument(
        "config",
        type=Path,
        nargs="?",
        metavar="CONFIG",
        help="configuration file in TOML, see weightd.toml(5) (default: weightd.toml in CONFIGURATION_DIRECTORY or in "
        "/etc/weightd)",
    )
    serve.set_defaults(run=_serve)

    run = commands.add_parser(
        "run",
        help="serve one model, without a configuration file",
        description=(
            "Serves one model without a configuration file, until Ctrl-C or until the terminal closes. Once the model "
            "is ready, weightd prints an example command. Exit status 1 if the model cannot be served."
        ),
    )
    run.add_argument("model", metavar="MODEL", help="model file, .onnx or .mindir")
    run.add_argument("--workers", type=int, default=2, metavar="N", help="worker processes (default: %(default)s)")
    run.add_argument(
        "--threads", type=int, default=1, metavar="N", help="threads of one predict (default: %(default)s)"
    )
    run.add_argument(
        "--device",
        action="append",
        metavar="DEVICE",
        help='device that runs the model, such as "ascend:0" for a card; repeat for several cards (default: cpu)',
    )
    run.add_argument("--name", default="", help="name of the model (default: the file name without suffix)")
    run.add_argument(
        "--python", default="", metavar="FILE", help="Python interpreter with the engine (default: this one)"
    )
    run.add_argument(
        "--socket", default="", metavar="ADDRESS", help="address for clients, ipc:///PATH (default: as for weightctl)"
    )
    run.add_argument("--cache-dir", default="", metavar="DIR", help="directory of snapshots and page stores, on a disk")
    run.set_defaults(run=_run)

    check = commands.add_parser(
        "check",
        help="check a configuration file, its models and interpreters",
        description=(
            "Reports every error in a configuration, one per line: invalid keys, unreadable files, interpreters "
            "without the engine, and ONNX models with inputs or outputs that requests cannot carry. For a model with "
            "ranks, it compares the slices and checks the rank tables. It does not load models: only --load shows "
            "whether an engine can run a model, and which inputs a MindIR model without ranks takes. For a file in "
            "CONFIGURATION_DIRECTORY or in /etc/weightd, it prints the sockets of the systemd unit that serves the "
            "file: weightd.service for weightd.toml, weightd@NAME.service for NAME.toml. Exit status: 0 the "
            "configuration is valid, 1 a model does not load, 78 any other error."
        ),
    )
    check.add_argument("config", type=Path, metavar="CONFIG", help="configuration file in TOML")
    check.add_argument(
        "--load",
        action="store_true",
        help="also load and unload each model without ranks, one after another, as the daemon would; needs memory for "
        "one copy of the weights, on a card for two processes",
    )
    check.add_argument(
        "--plan",
        action="store_true",
        help="also print the measured or estimated memory of each model, and which models fit into max_model_bytes "
        "together; exit status 1 if a model can never be loaded",
    )
    check.set_defaults(run=_check)

    doctor.add_arguments(commands.add_parser("doctor", help=doctor.HELP))

    gateway = commands.add_parser("gateway", help=commandline.GATEWAY_HELP)
    commandline.add_gateway_arguments(gateway)
    gateway.set_defaults(run=_gateway)
    return parser
