"""Checks of the requirements of ranks: cards, HCCL's library, addresses of the cards, a free port and a rank table."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from pathlib import Path

from weightd_daemon.config.check_ranks import read_rank_table
from weightd_daemon.doctor.findings import Verdict, failed, passed, untestable
from weightd_daemon.doctor.host import Host
from weightd_daemon.engines import ranktable
from weightd_daemon.engines.ranktable import RankDevice

TABLE = "rank table"

_CARDS = "cards of ranks"

_HCCL_LIBRARY = "libhccl.so"

_HCCN_CONF = "/etc/hccn.conf"

# Maximum bytes of /etc/hccn.conf. The file of the largest host needs far less.
_MAX_CONF_BYTES = 1024 * 1024

# Directories of libraries in CANN's home, which differ between CANN's versions.
_HOME_LIBRARY_DIRS = ("lib64", "{machine}-linux/lib64", "compiler/lib64")

_HCCL_PORT = ranktable.DEFAULT_PORT

_NO_CARD = "no card found"


def _cards(host: Host) -> dict[str, int | None]:
    """Return the physical number of each selected card by name, in the order of ranks; None for a missing card."""
    if not host.has_ascend:
        return {}
    devices = host.options.ranks or range(_device_count(host) or 0)
    return {f"ascend:{each}": host.card_number(each) for each in devices}


def _device_count(host: Host) -> int | None:
    count = host.report.value("devices", "count")
    return None if count is None else int(count)


def _addresses(host: Host) -> Mapping[int, str] | OSError:
    """Return the addresses of all cards by physical number, or the error if /etc/hccn.conf cannot be read."""
    try:
        with (host.root / _HCCN_CONF.lstrip("/")).open("rb") as file:
            return ranktable.parse_addresses(file.read(_MAX_CONF_BYTES).decode("utf-8", "replace"))
    except OSError as error:
        return error


def _known_addresses(host: Host) -> dict[str, str]:
    """Return the address of each selected card; "" for a card whose address is missing or unknown."""
    addresses = _addresses(host)
    known: Mapping[int, str] = {} if isinstance(addresses, OSError) else addresses
    return {name: known.get(-1 if number is None else number, "") for name, number in _cards(host).items()}


def _check_hccl_library(host: Host) -> Verdict:
    """Check that HCCL's library is installed, without loading it. The graph engine loads it even for one card."""
    directories = list(dict.fromkeys(_library_dirs(host.environment)))
    for path in (f"{each.rstrip('/')}/{_HCCL_LIBRARY}" for each in directories):
        if (host.root / path.lstrip("/")).is_file():
            return passed(f"{path}; not loaded by this check")
    where = ", ".join(directories) or "neither LD_LIBRARY_PATH nor ASCEND_HOME_PATH is set"
    return failed(
        f"no {_HCCL_LIBRARY}: {where}",
        "source CANN's set_env.sh in the shell (or the service's environment) that starts weightd; the runtime"
        " package of CANN may lack this library: install the toolkit",
    )


def _library_dirs(environment: Mapping[str, str]) -> Iterator[str]:
    """Yield the loader's directories of libraries, and further directories that CANN's set_env.sh would add."""
    yield from (each for each in environment.get("LD_LIBRARY_PATH", "").split(":") if each.startswith("/"))
    home = environment.get("ASCEND_HOME_PATH", "").rstrip("/")
    if home:
        yield from (f"{home}/{each.format(machine=platform.machine())}" for each in _HOME_LIBRARY_DIRS)


def _check_cards(host: Host) -> Verdict:
    """Check that the cards exist, and that there are at least two."""
    cards, count = _cards(host), _device_count(host)
    found = ", ".join(f"{name} is card {'?' if number is None else number}" for name, number in cards.items())
    if len(cards) < 2:
        advice = "a model with ranks needs two cards or more; on one card, serve a model without [models.NAME.ranks]"
        return failed(f"{found or _NO_CARD}: ranks need at least two", advice)
    missing = [name for name, number in cards.items() if number is None]
    if count is not None:
        missing += [name for name in cards if name not in missing and int(name.partition(":")[2]) >= count]
    if missing:
        seen = "" if count is None else f"; devices found: {count}"
        advice = "ASCEND_RT_VISIBLE_DEVICES hides and renumbers devices; npu-smi info lists the cards of the host"
        return failed(f"{found}; missing: {', '.join(missing)}{seen}", advice)
    if count is None:
        return untestable(f"{found}; the number of devices that a process can use is unknown", "see the check devices")
    return passed(found)


def _check_addresses(host: Host) -> Verdict:
    """Check that each card has its own address for the generated rank table. Most cards of one host need no address."""
    advice = (
        f"hccn_tool -i N -ip -g prints the address of card N; -s address A netmask M sets it and writes {_HCCN_CONF};"
        f' into a container: -v {_HCCN_CONF}:{_HCCN_CONF}:ro; or set ip in [devices."ascend:N"]; cards of one host'
        " need no addresses, except cards of a 300I Duo"
    )
    error, addresses = _addresses(host), _known_addresses(host)
    if isinstance(error, OSError):
        reason = error.strerror or str(error)
        return untestable(f"{_HCCN_CONF}: {reason}: a generated rank table would have no addresses", advice)
    missing = [name for name, address in addresses.items() if not address]
    if missing:
        detail = f"{_HCCN_CONF} has no address of {', '.join(missing)}: a generated rank table would have none at all"
        return untestable(detail, advice)
    duplicates = sorted({each for each in addresses.values() if [*addresses.values()].count(each) > 1})
    if duplicates:
        return failed(
            f"{_HCCN_CONF} has {', '.join(duplicates)} for several cards", "give each card a different address"
        )
    return passed(", ".join(f"{name}: {address}" for name, address in addresses.items()))


def _check_port(host: Host) -> Verdict:
    """Check that HCCL's port on each card is free. The host cannot see ports, so each card must have no process."""
    counts = {name: host.count_processes(int(name.partition(":")[2])) for name in _cards(host)}
    used_counts = [f"{count} on {name}" for name, count in counts.items() if isinstance(count, int) and count]
    unknown_counts = [f"{name} are unknown: {count}" for name, count in counts.items() if isinstance(count, OSError)]
    advice = (
        f"set device_ports to another port than {_HCCL_PORT} if a second process uses HCCL on the card; A2 and A3"
        " support this with driver 25.0.RC1 and later; on 910 and 300I Duo, end the other process"
    )
    if used_counts:
        each = ", ".join(used_counts)
        return untestable(
            f"processes: {each}; the host cannot see whether one uses port {_HCCL_PORT} of the card", advice
        )
    if unknown_counts:
        return untestable(f"the processes on {unknown_counts[0]}", advice)
    if not counts:
        return untestable(_NO_CARD)
    return passed(f"no process is on {', '.join(counts)}, so no process uses port {_HCCL_PORT}")


def _check_rank_table(host: Host) -> Verdict:
    """Check that the given rank table is valid and matches the cards, or that weightd can generate one."""
    path: Path | None = host.options.rank_table
    cards, addresses = _cards(host), _known_addresses(host)
    if path is None:
        numbers = [number for number in cards.values() if number is not None]
        if len(numbers) < 2 or len(numbers) < len(cards):
            return untestable(f"weightd could not generate a rank table: see the check {_CARDS!r}")
        generated_json = ranktable.generate(list(map(RankDevice, numbers, addresses.values())))
        with_ips = "with" if ranktable.parse(generated_json).devices[0].ip else "without"
        return passed(f"weightd would generate a rank table for {len(numbers)} ranks, {with_ips} addresses")
    rank_table = read_rank_table(path.absolute())
    advice = 'correct the file, or let weightd generate the rank table: rank_table = "generate" (default)'
    if isinstance(rank_table, str):
        return failed(f"{path}: {rank_table}", advice)
    found = f"{path}: {len(rank_table.devices)} ranks on {rank_table.server}"
    if not cards:
        return untestable(f"{found}; valid, but there are no cards to compare it with")
    problems = list(ranktable.device_problems(rank_table, cards))
    for (name, known), each in zip(addresses.items(), rank_table.devices, strict=False):
        if each.ip and known and each.ip != known:
            problems.append(f"{name} has the address {known} in {_HCCN_CONF}, but {each.ip} in the rank table")
    if problems:
        return failed(f"{path}: {'; '.join(problems)}", advice)
    return passed(found)


CHECKS = {
    "hccl": _check_hccl_library,
    _CARDS: _check_cards,
    "device addresses": _check_addresses,
    "hccl port": _check_port,
    TABLE: _check_rank_table,
}
"""The checks of ranks, by name in the order of the report."""
