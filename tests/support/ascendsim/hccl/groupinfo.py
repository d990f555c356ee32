"""`group_info_file`: the rank groups of a model beside the world (comm_group_info.cc:50, node_strategy.proto).

ParallelGroupMap: field 1 is a group (1 its name, 2 its ranks), field 2 the ranks with the same weights. The framework
writes one file for each rank.
"""

from __future__ import annotations

from pathlib import Path
from typing import Dict, List, Sequence

from ascendsim import protobuf

Groups = Dict[str, List[int]]


def write(path: Path, groups: Groups, rank: int = 0) -> Path:
    """Write the file of a rank."""
    items = [protobuf.data(1, name.encode()) + protobuf.data(2, _ranks(ranks)) for name, ranks in groups.items()]
    path.write_bytes(b"".join(protobuf.data(1, item) for item in items) + protobuf.data(2, _ranks([rank])))
    return path


def read(path: Path) -> Groups:
    """Read a file. Raises OSError if it is missing, and ValueError if it has another format."""
    groups: Groups = {}
    for number, item in protobuf.fields(path.read_bytes()):
        if number == 1:
            values = dict(protobuf.fields(_bytes(item)))
            ranks = [value for field, value in protobuf.fields(_bytes(values.get(2))) if field == 1]
            groups[_bytes(values.get(1)).decode()] = [each for each in ranks if isinstance(each, int)]
    return groups


def _ranks(ranks: Sequence[int]) -> bytes:
    return b"".join(protobuf.number(1, rank) for rank in ranks)


def _bytes(value: object) -> bytes:
    if not isinstance(value, bytes):
        raise ValueError("not a group info file")
    return value
