"""The table [models.NAME.ranks]: a model that several processes (ranks) compute together, each with one slice.

A rank group is a set of processes that together hold the model once; a rank is one of these processes. The rules for
combinations of keys are in `rank_rules`.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

from weightd_common.devices import CPU, is_cpu
from weightd_common.toml_schema import derived, user_path
from weightd_daemon.config.devices import DeviceConfig
from weightd_daemon.platform.memory import MIB
from weightd_protocol import limits
from weightd_protocol.schema import FieldError, FieldType, integer, list_of, mapping, short_repr, text

# Maximum number of ranks in all groups of a model together. No host has more cards.
MAX_RANKS = limits.MAX_DEVICES

GENERATE = "generate"
LAST = "last"
CONCAT = "concat"

ReplySetting = str | int

# The engine that runs ranks only on cards and reads a rank table. Ranks of the engine `mindspore` find each other
# through MindSpore's scheduler process instead.
MINDSPORE_LITE = "mindspore_lite"

# Placeholders in paths for the number of a rank and of a rank group.
RANK_PLACEHOLDER = "{rank}"
GROUP_PLACEHOLDER = "{group}"

_TOO_FEW_RANKS = "expected at least two ranks; a model in one file needs no table of ranks"

_NAME_METADATA = text(limits.MAX_NAME_BYTES)
_PATH_METADATA = user_path(limits.MAX_PATH_BYTES, empty=True)
_GROUP_METADATA = list_of(_NAME_METADATA, MAX_RANKS)
_GROUPS_METADATA = list_of(_GROUP_METADATA, MAX_RANKS)
_RANK_KIND = integer(0, MAX_RANKS - 1)["field_type"]
_REPLY_EXPECTED = f'"{LAST}", "{CONCAT}", or a rank, 0 to {MAX_RANKS - 1}'


def _devices_metadata() -> Mapping[str, FieldType]:
    """Return the metadata of a key with a list of names for each rank group; for one group, also a flat list."""
    group_kind, groups_kind = _GROUP_METADATA["field_type"], _GROUPS_METADATA["field_type"]

    def check(value: Any) -> Any:
        items = cast("list[object]", value) if type(value) is list else []
        alone = bool(items) and not any(type(each) is list for each in items)
        return (group_kind.check(value),) if alone else groups_kind.check(value)

    return {
        "field_type": FieldType(check, check, groups_kind.plain, f"{group_kind.description}; or a list of such lists")
    }


def _reply_metadata() -> Mapping[str, FieldType]:
    def check(value: Any) -> ReplySetting:
        if type(value) is int:
            number: int = _RANK_KIND.check(value)
            return number
        if value not in (LAST, CONCAT):
            raise FieldError(f"expected {_REPLY_EXPECTED}, got {short_repr(value)}")
        word: str = value
        return word

    return {"field_type": FieldType(check, check, check, _REPLY_EXPECTED)}


@dataclass(frozen=True)
class RanksConfig:
    """The table [models.NAME.ranks]. Some fields are derived from keys of this table and of the model."""

    devices: tuple[tuple[str, ...], ...] = field(default=(), metadata=_devices_metadata())
    """The device of each rank, in the order of ranks. [["ascend:0", "ascend:1"], ["ascend:2", "ascend:3"]] has two rank
    groups, each with the whole model, that serve in parallel. On the CPU: "cpu" for each rank, or sets of cores."""

    size: int = field(default=0, metadata=integer(0, MAX_RANKS))
    """On the CPU: number of ranks of one group, instead of `devices`. 0: as many as `devices` has."""

    rank_table: str = field(default="", metadata=_PATH_METADATA)
    """On cards with MindSpore Lite: the rank table of the communication library (HCCL), with {group} for the number of
    the rank group, from 0. Default: "generate", weightd writes the table."""

    device_ports: tuple[int, ...] = field(default=(), metadata=list_of(integer(1, 65535), 2))
    """Ports on which a card listens for the other ranks, for the rank tables that weightd writes. With two ports, a new
    rank group starts beside the old one, if card and driver allow it. Empty: HCCL's default, 16666."""

    group_info_file: str = field(default="", metadata=_PATH_METADATA)
    """On cards with MindSpore Lite: the file about communication groups within the model, as written by its export,
    with {rank} for the rank. Default: none; the only communication group contains all ranks."""

    reply: ReplySetting = field(default=LAST, metadata=_reply_metadata())
    """Whose outputs are the result. "last": the last rank's, for a model that is split by operators or layers. A
    number: this rank's. "concat": all ranks', concatenated in order along the first dimension."""

    connect_timeout: int = field(default=120, metadata=integer(1, 7200))
    """Maximum seconds for all ranks to connect to each other and to compile and run their first predict. Sets
    HCCL_CONNECT_TIMEOUT on cards (at least 120), MS_TOPO_TIMEOUT on the CPU."""

    exec_timeout: int = field(default=68, metadata=integer(1, 17340))
    """Maximum seconds for which a rank waits for another one in a predict; longer than `predict_timeout`. Sets
    HCCL_EXEC_TIMEOUT on cards (at least 68; some cards round down to a multiple of 68), MS_NODE_TIMEOUT on the CPU."""

    buffer_mib: int = field(default=200, metadata=integer(1, 2**20))
    """On cards: HCCL_BUFFSIZE in MiB. Each communication group takes twice this memory on each card."""

    communicators: int = field(default=1, metadata=integer(1, 1024))
    """On cards: number of communication groups within the model for each rank. With 1, the only group contains all
    ranks."""

    groups: tuple[tuple[str, ...], ...] = field(default=(), metadata=derived(_GROUPS_METADATA))
    """The device of each rank, for each group; all groups have the same number of ranks."""

    paths: tuple[str, ...] = field(default=(), metadata=derived(list_of(_PATH_METADATA, MAX_RANKS)))
    """The model file of each rank."""

    device_ips: Mapping[str, str] = field(
        default_factory=dict[str, str], metadata=derived(mapping(_NAME_METADATA, limits.MAX_DEVICES))
    )
    """The addresses of the cards' network ports in the tables [devices.NAME], by device."""

    def problems(self) -> Iterator[FieldError]:
        """Yield errors in `devices` and `size`, on which the checks of other keys depend."""
        if self.devices and self.size:
            yield FieldError("has no effect beside devices, which lists one device for each rank").at(".size")
        if not self.devices and not self.size:
            yield FieldError("expected the device of each rank or, on the CPU, the number of ranks as size").at(
                ".devices"
            )
        if self.size == 1:
            yield FieldError(_TOO_FEW_RANKS).at(".size")
        sizes = [len(group) for group in self.devices]
        for index, size in enumerate(sizes):
            if index == 0 and size < 2:
                yield FieldError(_TOO_FEW_RANKS).at(self._devices_path(index))
            elif size != sizes[0]:
                text = f"expected {sizes[0]} devices, as in the first group, got {size}"
                yield FieldError(text).at(self._devices_path(index))
        if sum(sizes) > MAX_RANKS:
            yield FieldError(f"expected at most {MAX_RANKS} ranks in all groups, got {sum(sizes)}").at(".devices")
        yield from self._check_duplicates()

    def _check_duplicates(self) -> Iterator[FieldError]:
        """Reject a device with two ranks: ranks run at the same time, and would block each other on one device."""
        groups: dict[str, int] = {}
        for index, group in enumerate(self.devices):
            for rank, device in enumerate(group):
                if device == CPU:
                    continue
                other = groups.setdefault(device, index)
                if other != index:
                    yield FieldError(f"{device} already has a rank of group {other}").at(
                        f"{self._devices_path(index)}[{rank}]"
                    )
                elif device in group[:rank]:
                    yield FieldError(f"{device} is given twice").at(f"{self._devices_path(index)}[{rank}]")

    def _devices_path(self, group: int) -> str:
        return f".devices[{group}]" if len(self.devices) > 1 else ".devices"

    @property
    def is_on_cards(self) -> bool:
        """Whether the ranks run on cards. Cards and CPU cannot be mixed."""
        return any(not is_cpu(each) for group in self.groups for each in group)

    @property
    def all_devices(self) -> tuple[str, ...]:
        """The devices of all groups, without duplicates."""
        return tuple(dict.fromkeys(each for group in self.groups for each in group))

    @property
    def reply_rank(self) -> int | None:
        """The rank whose outputs are the result; None if the outputs of all ranks are concatenated."""
        if self.reply == CONCAT:
            return None
        return self.reply if isinstance(self.reply, int) else self.size - 1

    @property
    def is_table_generated(self) -> bool:
        """Whether weightd writes the rank table."""
        return self.rank_table == GENERATE

    @property
    def buffer_bytes(self) -> int:
        """Bytes of each card's memory that HCCL uses for communication buffers."""
        return 2 * self.buffer_mib * MIB * self.communicators if self.is_on_cards else 0

    @property
    def can_overlap(self) -> bool:
        """Whether a rank group can start on the devices of a running group. On cards, each group needs its own port."""
        return not self.is_on_cards or len(self.device_ports) > 1

    def rank_table_path(self, group: int) -> str:
        """Return the path of the user's rank table for a group; "" if there is no such table."""
        return "" if self.is_table_generated else self.rank_table.replace(GROUP_PLACEHOLDER, str(group))

    def group_info_path(self, rank: int) -> str:
        """Return the path of a rank's file about the communication groups within the model; "" without such a file."""
        return self.group_info_file.replace(RANK_PLACEHOLDER, str(rank))


def complete_ranks(
    ranks: RanksConfig, engine: str, path: str, base: Path, devices: Mapping[str, DeviceConfig]
) -> RanksConfig:
    """Return the table with its defaults filled in and its paths made absolute.

    Args:
        ranks: the table as it was read.
        engine: the engine of the model.
        path: the absolute path of the model, with {rank} as a placeholder.
        base: the directory to which paths are relative.
        devices: the tables [devices.NAME] by name.
    """
    groups = ranks.devices or ((CPU,) * ranks.size,)
    size = len(groups[0])
    ranks = dataclasses.replace(ranks, groups=groups, size=size)
    rank_table = ranks.rank_table or (GENERATE if ranks.is_on_cards and engine == MINDSPORE_LITE else "")
    return dataclasses.replace(
        ranks,
        rank_table=rank_table if rank_table in ("", GENERATE) else str(base / rank_table),
        group_info_file=str(base / ranks.group_info_file) if ranks.group_info_file else "",
        paths=tuple(path.replace(RANK_PLACEHOLDER, str(rank)) for rank in range(size)),
        device_ips={each: devices[each].ip for each in ranks.all_devices if each in devices and devices[each].ip},
    )
