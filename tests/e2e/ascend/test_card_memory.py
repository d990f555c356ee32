"""Models on demand that share a card whose memory fits only one of them."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

from ..support import ask_all, model_status
from .support import make_host, on_card, questions

pytestmark = pytest.mark.e2e

# Holder and worker take 216 MiB each, the probe of the card 200 MiB for a moment.
CAPACITY_MIB = 900


def test_observed_memory_makes_room_on_the_card(tmp_path: Path) -> None:
    cards = make_host(tmp_path)
    cards.host.switch(capacity_mib=CAPACITY_MIB)
    paths = {name: cards.mlp(name, seed) for seed, name in enumerate("ab")}
    # The files are small: only the memory that the processes took before tells that the models do not fit together.
    tables = {name: on_card(path, python=sys.executable, workers=1, load="on_demand") for name, path in paths.items()}
    with cards.service(tables, {"min_resident": 0.0}) as service, service.client() as client:
        for name, other in ("ab", "ba", "ab"):
            ask_all(client, name, questions(paths[name]))
            assert model_status(service, name).reserved_bytes > CAPACITY_MIB * 2**20 // 2
            found = model_status(service, other)
            assert (found.state, found.unexpected_exits) == ("unloaded", 0)
            assert cards.host.copies_of_weights() == 1
