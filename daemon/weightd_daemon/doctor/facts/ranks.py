"""What ranks need of a host beside its cards: HCCL's library, and the addresses of the cards' own network ports."""

from __future__ import annotations

import platform
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path

from weightd_daemon.engines import ranktable

HCCL_LIBRARY = "libhccl.so"
HCCN_CONF = "/etc/hccn.conf"

# More than one for each card of the largest host takes.
_MAX_CONF_BYTES = 1024 * 1024

# Where CANN has its libraries, by its age.
_HOME_LIBRARY_DIRS = ("lib64", "{machine}-linux/lib64", "compiler/lib64")


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


def _library_dirs(environment: Mapping[str, str]) -> Iterator[str]:
    """As the loader goes, and where set_env.sh of CANN would lead it."""
    yield from (each for each in environment.get("LD_LIBRARY_PATH", "").split(":") if each.startswith("/"))
    home = environment.get("ASCEND_HOME_PATH", "").rstrip("/")
    if home:
        yield from (f"{home}/{each.format(machine=platform.machine())}" for each in _HOME_LIBRARY_DIRS)
