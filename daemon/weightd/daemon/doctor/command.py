"""The verb: the order of the checks, and what is printed."""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from weightd.daemon.children.launch import Program
from weightd.daemon.config import canary as canary_config
from weightd.daemon.config.slices import read_table
from weightd.daemon.doctor import render
from weightd.daemon.doctor.facts import interpreter, nodes
from weightd.daemon.doctor.facts.host import Card, Host, look, processes_on
from weightd.daemon.doctor.facts.interpreter import Report
from weightd.daemon.doctor.facts.ranks import Network
from weightd.daemon.doctor.facts.ranks import look as network_of
from weightd.daemon.doctor.facts.unit import Identity, Unit, ask, identity_of, own_identity
from weightd.daemon.doctor.trial.children import Children
from weightd.daemon.doctor.trial.trial import run as share
from weightd.daemon.doctor.verdicts import access as access_checks
from weightd.daemon.doctor.verdicts import host as checks
from weightd.daemon.doctor.verdicts import ranks as rank_checks
from weightd.daemon.doctor.verdicts import trial as trial_checks
from weightd.daemon.doctor.verdicts.finding import Finding, Verdict, exit_status
from weightd.daemon.engines.ascend import physical_id
from weightd.daemon.engines.ranktable import RankTable
from weightd.daemon.generations.plan import Canary
from weightd.daemon.host import exitwatch
from weightd.shared.modelfile import ModelFileError, model_files
from weightd.shared.terminal import ends_on_hangup

# Of the interpreter's report: imports from a cold disk, and a driver that takes its time to begin.
_REPORT_LIMIT_S = 120.0


def run(options: argparse.Namespace) -> int:
    """Check, print, and return the exit status."""
    # As Ctrl-C does: the blocks that own processes and files are left in order.
    for number in (signal.SIGTERM, *((signal.SIGHUP,) if ends_on_hangup() else ())):
        signal.signal(number, _terminated)
    findings = list(_findings(options))
    sys.stdout.write(render.as_json(findings) if options.json else render.table(findings))
    return exit_status(findings)


def _terminated(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def _findings(options: argparse.Namespace) -> Iterator[Finding]:
    unit = _unit(options.unit)
    environment = os.environ if isinstance(unit, OSError) else unit.environment
    host = look(home=environment.get("ASCEND_HOME_PATH", ""))
    try:
        report = interpreter.ask(options.python, options.device, min(options.limit, _REPORT_LIMIT_S), environment)
    except OSError as error:
        report = Report(end=f"cannot be run: {error.strerror}")
    yield checks.interpreter(options.python, report)
    yield checks.exits(platform.release(), exitwatch.unavailable())
    if not checks.has_ascend(host, report):
        yield from checks.nowhere()
        if options.ranks is not None:
            yield from rank_checks.nowhere()
            yield rank_checks.table({}, Network(), *_table(options.rank_table))
        if options.model:
            yield from trial_checks.not_tried(checks.NO_ASCEND)
        return
    trial = _sharing(options, report, environment)
    imports = any(each.name == trial_checks.ATTACH and each.verdict is Verdict.PASS for each in trial)
    seen = nodes.look()
    yield access_checks.service(unit)
    yield access_checks.device_nodes(seen, _identity(unit), host.group)
    yield checks.library(report)
    yield checks.driver(host)
    yield checks.cann(host, report)
    yield checks.libascendcl(report)
    yield checks.chip(report, shares=_shares(trial))
    yield checks.current_pid(report)
    yield checks.devices(report, options.device)
    yield checks.memory(report, options.device)
    card = host.card(physical_id(options.device, environment.get("ASCEND_RT_VISIBLE_DEVICES", "")))
    yield checks.processes(host, card, _count(host, card, options.device), options.device)
    yield checks.virtual(host, report, imports=imports)
    if options.ranks is not None:
        yield from _ranks(options, host, report, environment)
    yield from trial


def _ranks(
    options: argparse.Namespace, host: Host, report: Report, environment: Mapping[str, str]
) -> Iterator[Finding]:
    visible = environment.get("ASCEND_RT_VISIBLE_DEVICES", "")
    count = report.value("devices", "count")
    devices = options.ranks or range(int(count or 0))
    cards = {f"ascend:{each}": physical_id(each, visible) for each in devices}
    network = network_of(environment)
    yield rank_checks.library(network)
    yield rank_checks.cards(cards, None if count is None else int(count))
    yield rank_checks.addresses(cards, network)
    yield rank_checks.port(
        {f"ascend:{each}": _count(host, host.card(cards[f"ascend:{each}"]), each) for each in devices}
    )
    yield rank_checks.table(cards, network, *_table(options.rank_table))


def _table(path: Path | None) -> tuple[str, RankTable | str | None]:
    return ("", None) if path is None else (str(path), read_table(path.absolute()))


def _count(host: Host, card: Card | None, device: int) -> int | OSError:
    if card is None:
        return OSError(host.npu_smi or f"npu-smi lists no device {device}")
    try:
        return processes_on(card)
    except OSError as error:
        return error


def _unit(name: str) -> Unit | OSError:
    try:
        return ask(name)
    except OSError as error:
        return error


def _identity(unit: Unit | OSError) -> Identity | OSError:
    try:
        return own_identity() if isinstance(unit, OSError) else identity_of(unit)
    except OSError as error:
        return error


def _shares(trial: list[Finding]) -> bool | None:
    """Whether a handle could be had, as far as that was tried."""
    verdicts = {each.name: each.verdict for each in trial}
    return {Verdict.PASS: True, Verdict.FAIL: False}.get(verdicts.get(trial_checks.BUILD, Verdict.NOT_TESTABLE))


def _sharing(options: argparse.Namespace, report: Report, environment: Mapping[str, str]) -> list[Finding]:
    if not options.model:
        return trial_checks.not_asked_for()
    # Whatever else is wrong, the worker's own words for it are worth more than a guess.
    cause = "the library cannot be imported" if report.error("library") else _model_problem(options.model)
    if cause:
        return trial_checks.not_tried(cause)
    program = Program(
        options.python,
        "mindspore_lite",
        str(options.model.absolute()),
        f"ascend:{options.device}",
        sample=canary_config.sample(options.canary),
        tolerance=options.canary_tolerance,
        environment=environment,
    )
    with Children(program, options.limit) as children:
        trial = share(children, Canary.configured(options.canary))
    return trial_checks.judge(trial, report.value("memory", "free_bytes")) + trial_checks.survivors(children.survivors)


def _model_problem(model: Path) -> str:
    try:
        model_files(model)
    except ModelFileError as error:
        return str(error)
    return ""
