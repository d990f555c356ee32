"""What the processes of a unit are started with: each its slice, and all the same place where they meet.

The place is new for each generation: nothing of one that was killed is met there.
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

# Where the driver's tools keep the addresses of the cards' own network ports.
_HCCN_CONF = Path("/etc/hccn.conf")

# What a broker has in the place of a rank.
_NO_RANK = -1


@dataclass(frozen=True)
class Rendezvous:
    """Where the ranks of one generation meet.

    Attributes:
        port: on which the broker listens; 0 where there is none.
        rank_table_path: the path of a rank table that is given, or "".
        rank_table_text: of the rank table that is written for them, or "".
    """

    port: int = 0
    rank_table_path: str = ""
    rank_table_text: str = ""


def free_port() -> int:
    """Return a port of this host's own on which nobody listens now.

    Somebody may, by the time that it is used: then the broker cannot come up, and the next generation has another.
    """
    with socket.socket(socket.AF_INET, socket.SOCK_STREAM) as probe:
        probe.bind((_HOST, 0))
        port: int = probe.getsockname()[1]
        return port


def generate_rank_table(devices: Sequence[str], ips: Mapping[str, str], port: int) -> str:
    """Return the rank table of ranks on these cards of this host.

    Args:
        devices: of each rank, in their order.
        ips: of the cards' own network ports, as far as they are configured.
        port: on which the communication of each listens; 0: the library's own.
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
    """Return what the process of a rank runs; None: the broker's."""
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
        spawn_reason="ranks are of no fork server",
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
    """Return the cores that a rank on the whole CPU stays on; "": there are not as many as ranks.

    One process wakes all of them, near to which the kernel puts them: on the same core more often than not, where they
    compute in turn while others idle. To start, each uses all there are.
    """
    cores = sorted(allowed_cores())
    cores_per_rank = len(cores) // size
    return format_cpulist(cores[rank * cores_per_rank :][:cores_per_rank])
