"""Load progress of a real model, estimated from the measurements of the previous daemon."""

from __future__ import annotations

import signal
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from testkit.managed import ManagedService
from weightd_protocol.messages.status import GenerationStatus

from .support import ONE_ENGINE, model_status

pytestmark = [pytest.mark.e2e, ONE_ENGINE]

PAUSE_S = 0.02


def test_progress_uses_measurements_of_previous_daemon(mlp: Path) -> None:
    with ManagedService({"mlp": {"path": mlp, "workers": 1}}) as service:
        service.ready()
        service.restart(signal.SIGTERM)
        service.ready()
        shares: list[GenerationStatus] = []
        with service.client() as client, ThreadPoolExecutor(1) as pool:
            updating = pool.submit(client.update, "mlp", str(mlp))
            while not updating.done():
                shares += [each for each in model_status(service, "mlp").generations if each.number == 2]
                time.sleep(PAUSE_S)
            assert updating.result().generations == (2,)
        done = [each.load_fraction for each in shares if each.load_fraction is not None]
        assert done == sorted(done)
        assert 0 < done[-1] < 1
        assert any(each.remaining_s for each in shares)
        assert all((each.load_fraction is None) == (each.state == "serving") for each in shares), shares
        # A serving generation has no progress.
        (generation,) = [each for each in model_status(service, "mlp").generations if each.number == 2]
        assert (generation.load_fraction, generation.remaining_s) == (None, None)
