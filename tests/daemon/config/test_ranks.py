from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from weightd.daemon.config import load
from weightd.daemon.config.load import ConfigError, parse
from weightd.daemon.config.model import ModelConfig
from weightd.daemon.config.ranks import Ranks
from weightd.daemon.host.memory import MIB
from weightd.protocol.schema import decode, plain

BASE = Path("/etc/weightd")
SHARDS = "/srv/big/rank{rank}.mindir"
CARDS = ["ascend:0", "ascend:1"]


@pytest.fixture
def _served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(load, "NOT_SERVED", {})


def tables(ranks: object, devices: object = None, **keys: Any) -> dict[str, Any]:
    model = {"path": SHARDS, "sharing": "off", "canary": "/srv/big/canary.npz", **keys, "ranks": ranks}
    return {"models": {"big": model}, "devices": devices or {}}


def completed(ranks: object, devices: object = None, **keys: Any) -> ModelConfig:
    return parse(tables(ranks, devices, **keys), BASE).models["big"]


def of(model: ModelConfig) -> Ranks:
    assert model.ranks is not None
    return model.ranks


def problems(content: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(content, BASE)
    return list(caught.value.problems)


def test_ranks_are_refused_until_they_are_served() -> None:
    assert problems(tables({"devices": CARDS})) == ["models.big.ranks: weightd does not serve the ranks of a model yet"]


@pytest.mark.usefixtures("_served")
def test_what_two_ranks_on_cards_come_to() -> None:
    model = completed({"devices": CARDS}, {"ascend:1": {"ip": "192.168.1.9"}})
    ranks = of(model)
    assert ranks.groups == (("ascend:0", "ascend:1"),)
    assert ranks.paths == ("/srv/big/rank0.mindir", "/srv/big/rank1.mindir")
    assert (ranks.size, ranks.reply_rank, ranks.generates, ranks.table_of(0)) == (2, 1, True, "")
    assert (ranks.on_cards, ranks.buffer_bytes, ranks.fits_beside) == (True, 400 * MIB, False)
    assert ranks.device_ips == {"ascend:1": "192.168.1.9"}
    assert (model.devices, model.spares, model.forks, model.on_cards) == (tuple(CARDS), 0, False, True)
    assert model.mindspore_lite.provider == "ge"


@pytest.mark.usefixtures("_served")
def test_what_is_written_down_is_read_again() -> None:
    model = completed({"devices": [CARDS, ["ascend:2", "ascend:3"]], "reply": 1, "device_ports": [16666, 16667]})
    assert of(model).fits_beside
    assert decode(ModelConfig, plain(model)) == model


@pytest.mark.usefixtures("_served")
def test_paths_are_absolute_and_have_the_numbers_of_rank_and_group() -> None:
    keys = {"rank_table": "hccl{group}.json", "group_info_file": "groups{rank}.pb"}
    ranks = of(completed({"devices": [CARDS, ["ascend:2", "ascend:3"]], **keys}))
    assert not ranks.generates
    assert [ranks.table_of(group) for group in (0, 1)] == ["/etc/weightd/hccl0.json", "/etc/weightd/hccl1.json"]
    assert ranks.group_info_of(1) == "/etc/weightd/groups1.pb"


@pytest.mark.parametrize(("reply", "rank"), [("last", 1), (0, 0), (1, 1), ("concat", None)])
@pytest.mark.usefixtures("_served")
def test_whose_outputs_are_the_answer(reply: object, rank: int | None) -> None:
    assert of(completed({"devices": CARDS, "reply": reply})).reply_rank == rank


@pytest.mark.parametrize(
    ("ranks", "problem"),
    [
        ({}, "devices: expected the device of each rank, or on the cpu their number as size"),
        ({"devices": CARDS, "size": 2}, "size: it has no effect beside devices, a list of which has one for each rank"),
        ({"devices": [CARDS, []]}, "devices[1]: expected at least one device"),
        ({"devices": [CARDS, ["ascend:2"]]}, "devices[1]: expected 2 devices as the first group has, got 1"),
        ({"devices": [["cpu"] * 33] * 2}, "devices: expected at most 64 ranks in all groups, got 66"),
        ({"devices": "cpu"}, "devices: expected list, got str 'cpu'"),
        ({"devices": [CARDS, "cpu"]}, "devices[1]: expected list, got str 'cpu'"),
        ({"devices": ["cpu", 3]}, "devices[1]: expected text, 1 to 256 bytes, got int 3"),
        ({"devices": CARDS, "reply": "first"}, 'reply: expected "last", "concat", or a rank, 0 to 63, got \'first\''),
        ({"devices": CARDS, "reply": True}, 'reply: expected "last", "concat", or a rank, 0 to 63, got True'),
        ({"devices": CARDS, "reply": 64}, "reply: expected integer, 0 to 63, got int 64"),
        ({"devices": CARDS, "device_ports": [1, 2, 3]}, "device_ports: expected at most 2 items, got 3"),
        ({"devices": CARDS, "connect_timeout": 1.5}, "connect_timeout: expected integer, 1 to 7200, got float 1.5"),
        ({"devices": CARDS, "exec_timeout": 0}, "exec_timeout: expected integer, 1 to 17340, got int 0"),
        ({"devices": CARDS, "rank_tabel": ""}, "rank_tabel: unknown key; did you mean rank_table?"),
    ],
)
@pytest.mark.usefixtures("_served")
def test_a_key_that_is_wrong_by_itself(ranks: object, problem: str) -> None:
    assert problems(tables(ranks)) == [f"models.big.ranks.{problem}"]
