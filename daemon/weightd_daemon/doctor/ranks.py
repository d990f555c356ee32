"""What ranks need of a host beside its cards: HCCL's library, addresses, a free port and a rank table."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from weightd_daemon.doctor.findings import Finding, failed, passed, untestable
from weightd_daemon.doctor.host import NO_ASCEND
from weightd_daemon.engines import ranktable
from weightd_daemon.engines.ranktable import RankDevice, RankTable

HCCL_LIBRARY = "libhccl.so"

HCCN_CONF = "/etc/hccn.conf"

# More than one for each card of the largest host takes.
_MAX_CONF_BYTES = 1024 * 1024

# Where CANN has its libraries, by its age.
_HOME_LIBRARY_DIRS = ("lib64", "{machine}-linux/lib64", "compiler/lib64")

HCCL = "hccl"

CARDS = "cards of ranks"

ADDRESSES = "device addresses"

PORT = "hccl port"

TABLE = "rank table"

CHECK_NAMES = (HCCL, CARDS, ADDRESSES, PORT, TABLE)
"""Every check of ranks, in the order in which they are told."""

_HCCL_PORT = ranktable.DEFAULT_PORT

_NO_CARD = "no card here"

# The physical number of each card in the order of ranks, by the name of its device; None: it is not there.
CardNumbers = Mapping[str, int | None]


@dataclass(frozen=True)
class NetworkFacts:
    """What was seen.

    Attributes:
        hccl_path: where HCCL is; "" if it was not found.
        searched_dirs: the directories that were looked into.
        addresses: of the cards, by their physical number.
        conf_error: "" if /etc/hccn.conf could be read, else why not.
    """

    hccl_path: str = ""
    searched_dirs: tuple[str, ...] = ()
    addresses: Mapping[int, str] = field(default_factory=dict[int, str])
    conf_error: str = ""


def read_network(environment: Mapping[str, str], root: Path = Path("/")) -> NetworkFacts:
    """Look at the host below `root`; `environment` is the one that counts. Nothing is loaded."""
    searched_dirs = tuple(dict.fromkeys(_library_dirs(environment)))
    candidates = (f"{each.rstrip('/')}/{HCCL_LIBRARY}" for each in searched_dirs)
    hccl_path = next((each for each in candidates if (root / each.lstrip("/")).is_file()), "")
    try:
        with (root / HCCN_CONF.lstrip("/")).open("rb") as file:
            text = file.read(_MAX_CONF_BYTES).decode("utf-8", "replace")
    except OSError as error:
        return NetworkFacts(hccl_path, searched_dirs, conf_error=error.strerror or str(error))
    return NetworkFacts(hccl_path, searched_dirs, ranktable.parse_addresses(text))


def check_hccl_library(network: NetworkFacts) -> Finding:
    """HCCL is there: the graph engine loads it even for one card."""
    if network.hccl_path:
        return passed(HCCL, f"{network.hccl_path}; it was not loaded")
    where = ", ".join(network.searched_dirs) or "neither LD_LIBRARY_PATH nor ASCEND_HOME_PATH is set"
    advice = "source CANN's set_env.sh in the shell (or the service's environment) that starts weightd; the runtime "
    advice += "parts of CANN may lack it: install the toolkit"
    return failed(HCCL, f"no {HCCL_LIBRARY}: {where}", advice)


def check_cards(devices: CardNumbers, count: int | None) -> Finding:
    """The cards are there, and at least two.

    Args:
        devices: those that are asked for.
        count: how many a process sees; None where that is not known.
    """
    found = ", ".join(f"{name} is card {'?' if number is None else number}" for name, number in devices.items())
    if len(devices) < 2:
        advice = "a model with ranks has two or more; on one card serve it without [models.NAME.ranks]"
        return failed(CARDS, f"{found or _NO_CARD}: ranks need at least two", advice)
    missing = [name for name, number in devices.items() if number is None]
    if count is not None:
        missing += [name for name in devices if name not in missing and int(name.partition(":")[2]) >= count]
    if missing:
        seen = "" if count is None else f"; {count} seen"
        advice = "ASCEND_RT_VISIBLE_DEVICES hides and renumbers devices; npu-smi info lists those of the host"
        return failed(CARDS, f"{found}; not there: {', '.join(missing)}{seen}", advice)
    if count is None:
        return untestable(CARDS, f"{found}; how many a process sees is unknown", "see the line devices")
    return passed(CARDS, found)


def check_addresses(devices: CardNumbers, network: NetworkFacts) -> Finding:
    """Each card has an address of its own, which the generated table gives; on one host some kinds can do without."""
    advice = (
        f"hccn_tool -i N -ip -g tells the address of card N, -s address A netmask M sets it and writes {HCCN_CONF};"
        " into a "
        f'container: -v {HCCN_CONF}:{HCCN_CONF}:ro; or set ip in [devices."ascend:N"]. Cards of one host can do'
        " without, but "
        "those of a 300I Duo"
    )
    if network.conf_error:
        return untestable(
            ADDRESSES, f"{HCCN_CONF}: {network.conf_error}: the table that weightd writes has none", advice
        )
    address_by_device = {
        name: network.addresses.get(-1 if number is None else number, "") for name, number in devices.items()
    }
    missing = [name for name, address in address_by_device.items() if not address]
    if missing:
        detail = f"{HCCN_CONF} has none for {', '.join(missing)}: the table that weightd writes has none at all"
        return untestable(ADDRESSES, detail, advice)
    duplicates = sorted(
        {address for address in address_by_device.values() if [*address_by_device.values()].count(address) > 1}
    )
    if duplicates:
        return failed(
            ADDRESSES, f"{HCCN_CONF} has {', '.join(duplicates)} for several cards", "give each card one of its own"
        )
    return passed(ADDRESSES, ", ".join(f"{name}: {address}" for name, address in address_by_device.items()))


def check_port(counts: Mapping[str, int | OSError]) -> Finding:
    """Nobody has HCCL's port of the cards, as far as that is seen: it is open on the card, where no host looks.

    Args:
        counts: the processes on each card, or why they cannot be counted.
    """
    used_counts = {name: count for name, count in counts.items() if isinstance(count, int) and count}
    unknown_counts = {name: count for name, count in counts.items() if not isinstance(count, int)}
    advice = (
        f"a second process with HCCL on a card needs another port than {_HCCL_PORT}, as device_ports says, which A2"
        " and "
    )
    advice += "A3 take with driver 25.0.RC1 and later; on 910 and 300I Duo end the other one"
    if used_counts:
        each = ", ".join(f"{count} on {name}" for name, count in used_counts.items())
        return untestable(PORT, f"processes: {each}; whether one has port {_HCCL_PORT} of the card is not seen", advice)
    if unknown_counts:
        name, reason = next(iter(unknown_counts.items()))
        return untestable(PORT, f"the processes on {name} are unknown: {reason}", advice)
    if not counts:
        return untestable(PORT, _NO_CARD)
    return passed(PORT, f"no process is on {', '.join(counts)}, so no process uses port {_HCCL_PORT}")


def check_rank_table(
    devices: CardNumbers, network: NetworkFacts, path: str, rank_table: RankTable | str | None
) -> Finding:
    """The table is good, and that of these cards.

    Args:
        devices: those that are asked for.
        network: has the addresses for a table that weightd would write.
        path: of the table that was given, "" where none was.
        rank_table: what it says, or what is wrong with it; None where none was given.
    """
    if rank_table is None:
        return _check_generated_table(devices, network)
    advice = 'rank_table = "generate", the default, has weightd write one'
    if isinstance(rank_table, str):
        return failed(TABLE, f"{path}: {rank_table}", advice)
    count = f"{path}: {len(rank_table.devices)} ranks on {rank_table.server}"
    if not devices:
        return untestable(TABLE, f"{count}; it is good by itself, there are no cards to compare it with")
    problems = list(ranktable.device_problems(rank_table, devices))
    for (name, number), each in zip(devices.items(), rank_table.devices, strict=False):
        known = network.addresses.get(-1 if number is None else number, "")
        if each.ip and known and each.ip != known:
            problems.append(f"{name} has the address {known} in {HCCN_CONF}, and {each.ip} here")
    if problems:
        return failed(TABLE, f"{path}: {'; '.join(problems)}", advice)
    return passed(TABLE, count)


def no_ascend_findings() -> list[Finding]:
    """What is to be said of every check but that of a table where there is nothing of Ascend."""
    return [untestable(name, NO_ASCEND) for name in CHECK_NAMES if name != TABLE]


def _library_dirs(environment: Mapping[str, str]) -> Iterator[str]:
    """As the loader goes, and where set_env.sh of CANN would lead it."""
    yield from (each for each in environment.get("LD_LIBRARY_PATH", "").split(":") if each.startswith("/"))
    home = environment.get("ASCEND_HOME_PATH", "").rstrip("/")
    if home:
        yield from (f"{home}/{each.format(machine=platform.machine())}" for each in _HOME_LIBRARY_DIRS)


def _check_generated_table(devices: CardNumbers, network: NetworkFacts) -> Finding:
    numbers = [number for number in devices.values() if number is not None]
    if len(numbers) < 2 or len(numbers) < len(devices):
        return untestable(TABLE, f"weightd could write none: {CARDS} has the reason")
    generated_json = ranktable.generate([RankDevice(each, network.addresses.get(each, "")) for each in numbers])
    with_ips = "with" if ranktable.parse(generated_json).devices[0].ip else "without"
    return passed(TABLE, f"weightd would write one for {len(numbers)} ranks, {with_ips} addresses")
