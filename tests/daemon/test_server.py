from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from weightd.daemon.budget import Device
from weightd.daemon.config import load
from weightd.daemon.server import Server
from weightd.protocol.errors import Unavailable


def test_a_reload_that_is_refused_changes_no_device(tmp_path: Path) -> None:
    path = tmp_path / "weightd.toml"

    def written(mib: int, workers: int) -> Path:
        path.write_text(
            f'[devices."ascend:0"]\nmemory_mib = {mib}\n'
            "[models.m]\n"
            f'path = "/models/m.mindir"\npython = "python3"\ndevices = ["ascend:0"]\nworkers = {workers}\n'
        )
        return path

    server: Any = Server(load(written(1000, 1)), path)
    server._frontend = SimpleNamespace(stopping=False)
    device = server._devices["ascend:0"] = Device("ascend:0")
    device.capacity = 1000 * 2**20
    server._fleet.models["m"] = SimpleNamespace(updating=True, successor=None, config=server._config.models["m"])
    written(2000, 2)
    with pytest.raises(Unavailable):
        server._reload(0.0)
    assert device.capacity == 1000 * 2**20
