"""Rendezvous of a rank group: how its ranks find each other, through a rank table or the port of a broker.

Each generation has a new rendezvous, so that its ranks never connect to ranks of an earlier generation that was killed.
"""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from weightd_common.devices import card_of, format_cpulist
from weightd_common.launch_arguments import RendezvousInfo
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.config.ranks import RanksConfig
from weightd_daemon.engines import ranktable
from weightd_daemon.engines.ranktable import physical_id
from weightd_daemon.platform.cgroup import allowed_cores
from weightd_daemon.processes.events import Snapshot
from weightd_daemon.processes.spec import WorkerProgram

_HOST = "127.0.0.1"

# The configuration file in which the driver's tools store the IP addresses of the cards' network ports.
_HCCN_CONF = Path("/etc/hccn.conf")

# The rank number of a broker in `RendezvousInfo`.
_NO_RANK = -1


@dataclass(frozen=True)
class Rendezvous:
    """The data with which the ranks of one generation find each other.

    Attributes:
        port: the port of the broker; 0 without a broker.
        rank_table_path: the path of the configured rank table, or "".
        rank_table_text: the content of the generated rank table, or "".
    """

    port: int = 0
    rank_table_path: str = ""
    rank_table_text: str = ""


def free_port() -> int:
    """Return a port of the loopback address that is free now.

    Another process may bind the port before the broker does. The broker then fails, and the next generation gets
    another port.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def generate_rank_table(devices: Sequence[str], ips: Mapping[str, str], port: int) -> str:
    """Return the rank table of a rank group on cards of this host.

    Args:
        devices: the device of each rank, in the order of the ranks.
        ips: the configured IP addresses of the cards' network ports, by device. Addresses that are not configured are
            taken from hccn.conf.
        port: the port of the communication library on each card; 0 for the default of the library.
    """
    visible = os.environ.get("ASCEND_RT_VISIBLE_DEVICES", "")
    configured_ips: dict[int, str] = {}
    with contextlib.suppress(OSError, ValueError):
        configured_ips = ranktable.parse_addresses(_HCCN_CONF.read_text("ascii"))
    entries: list[ranktable.RankDevice] = []
    for device in devices:
        card = card_of(device) or 0
        number = physical_id(card, visible)
        number = card if number is None else number
        entries.append(ranktable.RankDevice(number, ips.get(device) or configured_ips.get(number, ""), port))
    return ranktable.generate(entries)


def rank_program(
    config: ModelConfig, snapshot: Snapshot, device: str, rank: int | None, rendezvous: Rendezvous
) -> WorkerProgram:
    """Return the model and the settings of a rank, or of the broker if `rank` is None."""
    if config.ranks is None:
        raise ValueError("expected a model with ranks")
    rank_slice = snapshot.slices[rank or 0]
    return WorkerProgram(
        config.python,
        config.engine,
        rank_slice.path,
        device,
        threads=config.threads,
        sharing=False,
        options=config.engine_options.to_json(),
        sample=snapshot.sample,
        tolerance=config.selftest_tolerance,
        spawn_reason="ranks are not forked from a fork server",
        snapshot_identity=f"{rank_slice.identity}:{rank_slice.sha256}",
        cores="" if rank is None else config.cores_of(device),
        rendezvous=_rendezvous_info(config, config.ranks, rank_slice.group_info, device, rank, rendezvous),
        rank_table=rendezvous.rank_table_text,
    )


def _rendezvous_info(
    config: ModelConfig, ranks: RanksConfig, group_info: str, device: str, rank: int | None, rendezvous: Rendezvous
) -> RendezvousInfo:
    return RendezvousInfo(
        _NO_RANK if rank is None else rank,
        ranks.size,
        ranks.connect_timeout,
        ranks.exec_timeout,
        reply_rank=ranks.reply_rank,
        host=_HOST,
        port=rendezvous.port,
        rank_table=rendezvous.rank_table_path,
        group_info=group_info,
        buffer_mib=ranks.buffer_mib if ranks.is_on_cards else 0,
        cores="" if rank is None or ranks.is_on_cards or config.cores_of(device) else _rank_cores(rank, ranks.size),
    )


def _rank_cores(rank: int, size: int) -> str:
    """Return the cores for a rank of a group on the whole CPU; "" if there are fewer cores than ranks.

    Each rank gets separate cores. Otherwise the kernel places the ranks near the process that wakes them, often on
    the same core, where they run one after another while other cores are idle. A rank may use all cores while it
    starts, and is pinned afterwards.
    """
    cores = sorted(allowed_cores())
    cores_per_rank = len(cores) // size
    return format_cpulist(cores[rank * cores_per_rank :][:cores_per_rank])
