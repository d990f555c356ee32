"""The driver's device nodes, and who may open them. They are looked at, never opened: a driver counts who does."""

from __future__ import annotations

import grp
import stat
from dataclasses import dataclass
from pathlib import Path

from weightd_daemon.doctor.facts.unit import ServiceUser

# Beside the card's own: the device manager, shared virtual memory, and the channel between host and card.
REQUIRED_NODES = ("davinci_manager", "devmm_svm", "hisi_hdc")

_READ_WRITE = 0o6


@dataclass(frozen=True)
class DeviceNode:
    """A file below /dev: its name there, permissions, owner and group."""

    name: str
    mode: int
    uid: int
    gid: int

    def is_accessible_to(self, identity: ServiceUser) -> bool:
        """Return whether the permissions let it be read and written; access control lists are not looked at."""
        if identity.uid == 0:
            return True
        shift = 6 if identity.uid == self.uid else 3 if self.gid in identity.gids else 0
        return (self.mode >> shift) & _READ_WRITE == _READ_WRITE

    @property
    def group_name(self) -> str:
        """The name of its group, or its number where it has none here, as in a container."""
        try:
            return grp.getgrgid(self.gid).gr_name
        except KeyError:
            return str(self.gid)

    def __str__(self) -> str:
        return f"/dev/{self.name} ({self.mode:04o}, group {self.group_name})"


def read_device_nodes(root: Path = Path("/")) -> tuple[DeviceNode, ...]:
    """Return the driver's nodes below `root`/dev, by name."""
    device_nodes: list[DeviceNode] = []
    try:
        paths = sorted((root / "dev").iterdir())
    except OSError:
        return ()
    for path in paths:
        if path.name in REQUIRED_NODES or path.name.startswith(("davinci", "vdavinci")):
            status = path.stat()
            device_nodes.append(DeviceNode(path.name, stat.S_IMODE(status.st_mode), status.st_uid, status.st_gid))
    return tuple(device_nodes)
