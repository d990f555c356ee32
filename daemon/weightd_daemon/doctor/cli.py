"""The command: the order of the checks, and what is printed."""

from __future__ import annotations

import argparse
import os
import platform
import signal
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path

from weightd_common.modelfiles.files import ModelFileError, model_files
from weightd_common.terminal import ends_on_hangup
from weightd_daemon.config import selftest as selftest_config
from weightd_daemon.config.check_ranks import read_rank_table
from weightd_daemon.doctor import access, interpreter, ranks
from weightd_daemon.doctor import host as host_checks
from weightd_daemon.doctor.access import ServiceUser, SystemdUnit, current_user, read_unit, service_user
from weightd_daemon.doctor.findings import CheckResult, Finding, exit_status, render_json, render_table
from weightd_daemon.doctor.host_facts import HostFacts, NpuInfo, count_card_processes, read_host
from weightd_daemon.doctor.interpreter import InterpreterReport
from weightd_daemon.doctor.ranks import NetworkFacts
from weightd_daemon.doctor.selftest import checks as selftest_checks
from weightd_daemon.doctor.selftest.processes import SelfTestProcesses
from weightd_daemon.doctor.selftest.weight_sharing import run_selftest as share
from weightd_daemon.engines.ranktable import RankTable, physical_id
from weightd_daemon.generations.spec import SelfTestSpec
from weightd_daemon.platform import exit_watch
from weightd_daemon.processes.spec import WorkerProgram

# Of the interpreter's report: imports from a cold disk, and a driver that takes its time to begin.
_REPORT_TIMEOUT_S = 120.0


def run(options: argparse.Namespace) -> int:
    """Check, print, and return the exit status."""
    # As Ctrl-C does: the blocks that own processes and files are left in order.
    for number in (signal.SIGTERM, *((signal.SIGHUP,) if ends_on_hangup() else ())):
        signal.signal(number, _on_signal)
    findings = list(_run_checks(options))
    sys.stdout.write(render_json(findings) if options.json else render_table(findings))
    return exit_status(findings)


def _on_signal(number: int, _: object) -> None:
    raise SystemExit(128 + number)


def _run_checks(options: argparse.Namespace) -> Iterator[Finding]:
    unit = _read_unit(options.unit)
    environment = os.environ if isinstance(unit, OSError) else unit.environment
    host = read_host(ascend_home=environment.get("ASCEND_HOME_PATH", ""))
    try:
        report = interpreter.run_report(
            options.python, options.device, min(options.limit, _REPORT_TIMEOUT_S), environment
        )
    except OSError as error:
        report = InterpreterReport(exit_description=f"cannot be run: {error.strerror}")
    yield host_checks.check_interpreter(options.python, report)
    yield host_checks.check_process_exits(platform.release(), exit_watch.unavailable_reason())
    if not host_checks.has_ascend(host, report):
        yield from host_checks.no_ascend_findings()
        if options.ranks is not None:
            yield from ranks.no_ascend_findings()
            yield ranks.check_rank_table({}, NetworkFacts(), *_read_rank_table(options.rank_table))
        if options.model:
            yield from selftest_checks.not_run(host_checks.NO_ASCEND)
        return
    selftest_findings = _test_sharing(options, report, environment)
    can_import = any(
        each.name == selftest_checks.ATTACH and each.result is CheckResult.PASS for each in selftest_findings
    )
    device_nodes = access.read_device_nodes()
    yield access.check_service(unit)
    yield access.check_device_nodes(device_nodes, _read_service_user(unit), host.install_group)
    yield host_checks.check_library(report)
    yield host_checks.check_driver(host)
    yield host_checks.check_cann(host, report)
    yield host_checks.check_libascendcl(report)
    yield host_checks.check_chip(report, can_share=_can_share(selftest_findings))
    yield host_checks.check_current_pid(report)
    yield host_checks.check_devices(report, options.device)
    yield host_checks.check_memory(report, options.device)
    card = host.card(physical_id(options.device, environment.get("ASCEND_RT_VISIBLE_DEVICES", "")))
    yield host_checks.check_processes(host, card, _count_processes(host, card, options.device), options.device)
    yield host_checks.check_virtual_instance(host, report, can_import=can_import)
    if options.ranks is not None:
        yield from _check_ranks(options, host, report, environment)
    yield from selftest_findings


def _check_ranks(
    options: argparse.Namespace, host: HostFacts, report: InterpreterReport, environment: Mapping[str, str]
) -> Iterator[Finding]:
    visible_devices = environment.get("ASCEND_RT_VISIBLE_DEVICES", "")
    device_count = report.value("devices", "count")
    devices = options.ranks or range(int(device_count or 0))
    cards = {f"ascend:{each}": physical_id(each, visible_devices) for each in devices}
    network = ranks.read_network(environment)
    yield ranks.check_hccl_library(network)
    yield ranks.check_cards(cards, None if device_count is None else int(device_count))
    yield ranks.check_addresses(cards, network)
    yield ranks.check_port(
        {f"ascend:{each}": _count_processes(host, host.card(cards[f"ascend:{each}"]), each) for each in devices}
    )
    yield ranks.check_rank_table(cards, network, *_read_rank_table(options.rank_table))


def _read_rank_table(path: Path | None) -> tuple[str, RankTable | str | None]:
    return ("", None) if path is None else (str(path), read_rank_table(path.absolute()))


def _count_processes(host: HostFacts, card: NpuInfo | None, device: int) -> int | OSError:
    if card is None:
        return OSError(host.npu_smi_error or f"npu-smi lists no device {device}")
    try:
        return count_card_processes(card)
    except OSError as error:
        return error


def _read_unit(name: str) -> SystemdUnit | OSError:
    try:
        return read_unit(name)
    except OSError as error:
        return error


def _read_service_user(unit: SystemdUnit | OSError) -> ServiceUser | OSError:
    try:
        return current_user() if isinstance(unit, OSError) else service_user(unit)
    except OSError as error:
        return error


def _can_share(selftest_findings: list[Finding]) -> bool | None:
    """Whether a handle could be had, as far as that was tried."""
    verdicts = {each.name: each.result for each in selftest_findings}
    return {CheckResult.PASS: True, CheckResult.FAIL: False}.get(
        verdicts.get(selftest_checks.BUILD, CheckResult.NOT_TESTABLE)
    )


def _test_sharing(
    options: argparse.Namespace, report: InterpreterReport, environment: Mapping[str, str]
) -> list[Finding]:
    if not options.model:
        return selftest_checks.not_requested()
    # Whatever else is wrong, the worker's own words for it are worth more than a guess.
    reason = "the library cannot be imported" if report.error("library") else _model_problem(options.model)
    if reason:
        return selftest_checks.not_run(reason)
    program = WorkerProgram(
        options.python,
        "mindspore_lite",
        str(options.model.absolute()),
        f"ascend:{options.device}",
        sample=selftest_config.inputs_path(options.selftest),
        tolerance=options.selftest_tolerance,
        environment=environment,
    )
    with SelfTestProcesses(program, options.limit) as children:
        selftest_report = share(children, SelfTestSpec.from_config(options.selftest))
    return selftest_checks.evaluate(
        selftest_report, report.value("memory", "free_bytes")
    ) + selftest_checks.check_survivors(children.survivors)


def _model_problem(model: Path) -> str:
    try:
        model_files(model)
    except ModelFileError as error:
        return str(error)
    return ""
