"""Updates on the CPU with real engines: one copy of the weights per generation, and no lost request."""

from __future__ import annotations

import shutil
import socket
from pathlib import Path

import numpy as np
import pytest

from testkit.service import Service
from testkit.waiting import until
from weightd import PermissionDenied

from .support import (
    MLP_WEIGHT_BYTES,
    ONE_ENGINE,
    BareEngine,
    DaemonPaths,
    Load,
    SampleRequest,
    Zoo,
    ask_all,
    model_status,
)

pytestmark = pytest.mark.e2e


@ONE_ENGINE
def test_update_and_rollback_lose_no_request(mlp: Path, questions: list[SampleRequest], tmp_path: Path) -> None:
    copy = Path(shutil.copyfile(mlp, tmp_path / mlp.name))
    with Service({"mlp": {"path": mlp, "workers": 1, "spares": 1}}) as service, service.client() as client:
        service.ready()
        with Load(service.address, "mlp", questions) as load:
            load.wait_for(50)
            assert client.update("mlp", str(copy)).generations == (2,)
            load.wait_for(50)
            assert client.update("mlp", rollback=True).generations == (3,)
            load.wait_for(50)
        until(lambda: len(model_status(service, "mlp").generations) == 1, "the old generations exit")
        status = model_status(service, "mlp")
        assert (status.failed, status.generations[0].number) == (0, 3)
        # The first processes that are READY become workers, in any order.
        roles = sorted(each.role for each in status.generations[0].processes)
        assert roles == ["holder", "spare", "worker"]
        for each in status.generations[0].processes:
            assert (each.shared_bytes or 0) >= 0.98 * MLP_WEIGHT_BYTES, each
        # Snapshots of the old generations are deleted.
        assert len(list(service.cache.rglob("model/*"))) == 1


def test_tcp_client_may_infer_but_not_update(zoo: Zoo, bare: BareEngine, place: DaemonPaths) -> None:
    path = zoo.path("fixed", "onnxruntime")
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        address = f"tcp://127.0.0.1:{probe.getsockname()[1]}"
    listeners = {"lan": address}
    with place.serve({"fixed": {"path": path}}, listeners) as weightd, weightd.client(address) as client:
        ask_all(client, "fixed", bare.questions(path, [{"x": np.ones((2, 3), np.float32)}]))
        with pytest.raises(PermissionDenied, match="only the user that weightd runs as, and root, may update a model"):
            client.update("fixed", str(path))
        assert weightd.end() == 0
    assert place.left == []
