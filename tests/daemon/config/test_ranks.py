from __future__ import annotations

import os
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from weightd_daemon.config.load import ConfigError, parse
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.config.ranks import RanksConfig
from weightd_daemon.platform.memory import MIB
from weightd_protocol.schema import decode, plain

BASE = Path("/etc/weightd")
SHARDS = "/srv/big/rank{rank}.mindir"
CARDS = ["ascend:0", "ascend:1"]


def tables(ranks: object, devices: object = None, **keys: Any) -> dict[str, Any]:
    model = {"path": SHARDS, "selftest": "/srv/big/selftest.npz", **keys, "ranks": ranks}
    return {"models": {"big": model}, "devices": devices or {}}


def parse_model(ranks: object, devices: object = None, **keys: Any) -> ModelConfig:
    return parse(tables(ranks, devices, **keys), BASE).models["big"]


def ranks_of(model: ModelConfig) -> RanksConfig:
    assert model.ranks is not None
    return model.ranks


def problems(content: dict[str, Any]) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        parse(content, BASE)
    return list(caught.value.problems)


def test_ranks_on_cards_get_defaults() -> None:
    model = parse_model({"devices": CARDS}, {"ascend:1": {"ip": "192.168.1.9"}})
    ranks = ranks_of(model)
    assert ranks.groups == (("ascend:0", "ascend:1"),)
    assert ranks.paths == ("/srv/big/rank0.mindir", "/srv/big/rank1.mindir")
    assert (ranks.size, ranks.reply_rank, ranks.is_table_generated, ranks.rank_table_path(0)) == (2, 1, True, "")
    assert (ranks.is_on_cards, ranks.buffer_bytes, ranks.can_overlap) == (True, 400 * MIB, False)
    assert ranks.device_ips == {"ascend:1": "192.168.1.9"}
    assert (model.devices, model.spares, model.can_fork, model.is_on_cards) == (tuple(CARDS), 0, False, True)
    assert model.mindspore_lite.provider == "ge"


def test_config_survives_encoding() -> None:
    model = parse_model({"devices": [CARDS, ["ascend:2", "ascend:3"]], "reply": 1, "device_ports": [16666, 16667]})
    assert ranks_of(model).can_overlap
    assert decode(ModelConfig, plain(model)) == model


def test_paths_are_absolute_and_include_rank_and_group() -> None:
    keys = {"rank_table": "hccl{group}.json", "group_info_file": "groups{rank}.pb"}
    ranks = ranks_of(parse_model({"devices": [CARDS, ["ascend:2", "ascend:3"]], **keys}))
    assert not ranks.is_table_generated
    assert [ranks.rank_table_path(group) for group in (0, 1)] == ["/etc/weightd/hccl0.json", "/etc/weightd/hccl1.json"]
    assert ranks.group_info_path(1) == "/etc/weightd/groups1.pb"


@pytest.mark.parametrize(("reply", "rank"), [("last", 1), (0, 0), (1, 1), ("concat", None)])
def test_reply_selects_rank(reply: object, rank: int | None) -> None:
    assert ranks_of(parse_model({"devices": CARDS, "reply": reply})).reply_rank == rank


@pytest.mark.parametrize(
    ("ranks", "problem"),
    [
        ({}, "devices: expected the device of each rank or, on the CPU, the number of ranks as size"),
        ({"devices": CARDS, "size": 2}, "size: has no effect beside devices, which lists one device for each rank"),
        ({"devices": [CARDS, []]}, "devices[1]: expected 2 devices, as in the first group, got 0"),
        ({"devices": [CARDS, ["ascend:2"]]}, "devices[1]: expected 2 devices, as in the first group, got 1"),
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
        (
            {"devices": ["ascend:0"]},
            "devices: expected at least two ranks; a model in one file *",
        ),
        ({"size": 1}, "size: expected at least two ranks; a model in one file needs no table of ranks"),
        ({"devices": ["ascend:0", "ascend:0"]}, "devices[1]: ascend:0 is given twice"),
        ({"devices": [CARDS, ["ascend:1", "ascend:2"]]}, "devices[1][0]: ascend:1 already has a rank of group 0"),
        ({"devices": ["ascend:0", "cpu"]}, "devices: expected either the CPU or cards, not both: their outputs differ"),
        ({"devices": ["ascend:0", "npu:1"]}, 'devices: expected "cpu", a set of cores such as*'),
    ],
)
def test_rejects_invalid_key(ranks: object, problem: str) -> None:
    first, *rest = problems(tables(ranks))
    assert first.startswith(f"models.big.ranks.{problem.rstrip('*')}")
    assert rest == []


# --- combinations of keys ---------------------------------------------------------------------------------------------

MINDSPORE = {"engine": "mindspore"}
ON_CPU = {"size": 2}
ON_CARDS = {"devices": CARDS}
NO_CPU = "has no effect on the CPU, only on a card"


def test_ranks_on_cpu_get_defaults() -> None:
    model = parse_model(ON_CPU, **MINDSPORE)
    ranks = ranks_of(model)
    assert (ranks.groups, ranks.size, ranks.rank_table, ranks.buffer_bytes) == ((("cpu", "cpu"),), 2, "", 0)
    assert (ranks.can_overlap, model.devices, model.can_fork, model.spares) == (True, ("cpu",), False, 0)
    assert model.sharing == "off"
    several = ranks_of(parse_model({"devices": [["cpu", "cpu"], ["cpu", "cpu"]]}, **MINDSPORE, policy="overlap"))
    assert several.groups == (("cpu", "cpu"), ("cpu", "cpu"))


@pytest.mark.parametrize(
    ("ranks", "keys"),
    [
        (ON_CARDS, {"policy": "replace", "predict_timeout": 67.9, "process_mib": 300, "selftest_tolerance": 0.1}),
        ({**ON_CARDS, "device_ports": [16666, 16667]}, {"policy": "overlap"}),
        ({**ON_CARDS, "exec_timeout": 200}, {"predict_timeout": 135}),
        ({**ON_CARDS, "rank_table": "/srv/t.json", "group_info_file": "/srv/{rank}.pb", "communicators": 3}, {}),
        (ON_CARDS, {"batching": {"max_rows": 8}, "split": {"part_rows": 4}}),
        ({**ON_CARDS, "reply": "concat", "buffer_mib": 100}, {}),
        (ON_CARDS, {"engine": "mindspore"}),
        (ON_CARDS, {"sharing": "off"}),
        ({**ON_CPU, "exec_timeout": 5, "connect_timeout": 30}, {**MINDSPORE, "predict_timeout": 4}),
    ],
)
def test_accepts_compatible_keys(ranks: dict[str, Any], keys: dict[str, Any]) -> None:
    parse_model(ranks, **keys)


@pytest.mark.parametrize(
    ("ranks", "keys", "problem"),
    [
        (ON_CARDS, {"path": "/srv/big.mindir"}, "path: expected a path with {rank}, which stands for 0, 1 *"),
        (ON_CARDS, {"path": "/srv/{rank}.onnx"}, "engine: expected mindspore, or mindspore_lite on cards*"),
        (ON_CPU, {}, "engine: expected mindspore on the CPU: mindspore_lite supports ranks only on cards"),
        (ON_CARDS, {"sharing": "on"}, "sharing: expected \"off\": no other process has the slice *"),
        (ON_CARDS, {"sharing": "auto"}, "sharing: expected \"off\": no other process has *; got 'auto'"),
        (ON_CARDS, {"workers": 2}, "workers: expected 1: a group has one process for each rank, got 2"),
        (ON_CARDS, {"spares": 1}, "spares: expected 0: all ranks are replaced together, got 1"),
        (ON_CARDS, {"start": "spawn"}, "start: has no effect: each rank always has its own interpreter"),
        (ON_CARDS, {"holder_loss": "frozen"}, "holder_loss: has no effect on ranks: no process holds weights for *"),
        (ON_CARDS, {"policy": "overlap"}, "policy: a card allows one process of a rank group on each port; *"),
        (ON_CARDS, {"selftest": "auto"}, "selftest: expected the path of an .npz file with inputs and *"),
        (ON_CARDS, {"selftest": {"x": [1]}}, "selftest: expected the path of an .npz file with inputs and *"),
        (ON_CARDS, {"selftest": "off"}, "selftest: expected the path of an .npz file with inputs and *"),
        (ON_CARDS, {"selftest_interval": 60}, "selftest_interval: not supported with ranks: they run *"),
        (ON_CARDS, {"batching": {"sizes": [1, 4]}}, "batching.sizes: not supported with ranks: only a model *"),
        ({**ON_CARDS, "reply": "concat"}, {"batching": {"max_rows": 2}}, "batching.max_rows: not supported with *"),
        ({**ON_CARDS, "reply": "concat"}, {"split": {"part_rows": 2}}, "split.part_rows: not supported with reply *"),
        ({**ON_CARDS, "reply": 2}, {}, "ranks.reply: expected a rank, 0 to 1, got 2"),
        ({**ON_CARDS, "connect_timeout": 119}, {}, "ranks.connect_timeout: expected at least 120 on cards, *, got 119"),
        ({**ON_CARDS, "exec_timeout": 67}, {}, "ranks.exec_timeout: expected at least 68 on cards, got 67"),
        (ON_CARDS, {"predict_timeout": 68}, "predict_timeout: expected less than ranks.exec_timeout, 68: weightd *68"),
        ({**ON_CARDS, "exec_timeout": 135}, {"predict_timeout": 70}, "predict_timeout: expected less than *, 135, *"),
        ({**ON_CPU, "exec_timeout": 9}, {**MINDSPORE, "predict_timeout": 9}, "predict_timeout: expected less *"),
        ({**ON_CARDS, "rank_table": "/srv/t"}, {}, "ranks.rank_table: expected a path with .json once, at its end, *"),
        ({"devices": [CARDS, ["ascend:2", "ascend:3"]], "rank_table": "/t.json"}, {}, "ranks.rank_table: expected *"),
        ({**ON_CARDS, "rank_table": "/t.json"}, MINDSPORE, "ranks.rank_table: has no effect: only mindspore_lite *"),
        ({**ON_CARDS, "group_info_file": "/g"}, MINDSPORE, "ranks.group_info_file: has no effect: only mindspore_*"),
        ({**ON_CARDS, "device_ports": [1]}, MINDSPORE, "ranks.device_ports: has no effect: only rank tables for *"),
        ({**ON_CARDS, "device_ports": [1], "rank_table": "/t.json"}, {}, "ranks.device_ports: has no effect beside *"),
        ({**ON_CARDS, "device_ports": [1, 1]}, {}, "ranks.device_ports: 1 is given twice"),
        ({**ON_CARDS, "communicators": 2}, {}, "ranks.communicators: has no effect without group_info_file: *"),
        *(
            ({**ON_CPU, **ranks}, MINDSPORE, f"ranks.{next(iter(ranks))}: {NO_CPU}")
            for ranks in (
                {"rank_table": "/t.json"},
                {"group_info_file": "/g"},
                {"device_ports": [1]},
                {"buffer_mib": 100},
                {"communicators": 2},
            )
        ),
        (ON_CARDS, {"mindspore_lite": {"variable_weights": True}}, "mindspore_lite.variable_weights: not supported *"),
        (ON_CARDS, {"mindspore_lite": {"parallel_workers": 2}}, "mindspore_lite.parallel_workers: expected 1 on a *"),
        (ON_CARDS, {"mindspore_lite": {"rank_table_file": "/r"}}, "mindspore_lite.rank_table_file: unknown key; *"),
        (ON_CPU, {**MINDSPORE, "mindspore_lite": {"inter_op_parallel": 2}}, "mindspore_lite: has no effect: the *"),
    ],
)  # fmt: skip
def test_rejects_incompatible_keys(ranks: dict[str, Any], keys: dict[str, Any], problem: str) -> None:
    [reported] = problems(tables(ranks, **keys))
    first, *rest = problem.split("*")
    assert reported.startswith(f"models.big.{first}")
    assert reported.endswith(rest[-1]) if rest else reported == f"models.big.{first}"


def test_ranks_on_core_sets(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", mock.Mock(return_value={0, 1}))
    sets = {f"cpu:{each}": {"cpus": str(each)} for each in (0, 1)}
    ranks = {"devices": list(sets)}
    model = parse_model(ranks, sets, **MINDSPORE)
    assert (model.devices, model.cores_of("cpu:1")) == (("cpu:0", "cpu:1"), "1")
    assert problems(tables(ranks, sets, **MINDSPORE, copies="each")) == [
        "models.big.copies: has no effect on ranks: a rank group has one copy of the weights, in slices"
    ]
    assert problems(tables(ranks, **MINDSPORE)) == [
        f'models.big.ranks.devices: expected a table [devices."{each}"] with the key cpus' for each in sets
    ]


def test_devices_of_ranks_belong_in_ranks_table() -> None:
    content = tables(ON_CARDS)
    content["models"]["big"]["devices"] = CARDS
    assert problems(content) == [
        "models.big.devices: for a model with ranks, set devices in the table [models.NAME.ranks]"
    ]


# --- two models on one card: port conflicts ---------------------------------------------------------------------------


def two_models(one: dict[str, Any], other: dict[str, Any], **keys: Any) -> dict[str, Any]:
    first, second = (tables(ranks, **keys)["models"]["big"] for ranks in (one, other))
    return {"models": {"one": first, "other": second}}


@pytest.mark.parametrize(
    ("one", "other"),
    [
        ({"devices": CARDS}, {"devices": ["ascend:2", "ascend:3"]}),
        ({"devices": CARDS}, {"devices": CARDS, "device_ports": [16667]}),
        ({"devices": CARDS, "device_ports": [1, 2]}, {"devices": ["ascend:1", "ascend:2"], "device_ports": [3, 4]}),
        # The rank table names the ports, so this check does not know them.
        ({"devices": CARDS}, {"devices": CARDS, "rank_table": "/t.json"}),
    ],
)
def test_accepts_models_without_port_conflict(one: dict[str, Any], other: dict[str, Any]) -> None:
    assert len(parse(two_models(one, other), BASE).models) == 2


@pytest.mark.parametrize(
    ("one", "other", "problem"),
    [
        (
            {"devices": CARDS},
            {"devices": ["ascend:2", "ascend:1"]},
            "the ranks of one already use port 16666 on ascend:1; *",
        ),
        (
            {"devices": CARDS},
            {"devices": CARDS, "device_ports": [16666]},
            "the ranks of one already use port 16666 on ascend:0*",
        ),
        (
            {"devices": CARDS, "device_ports": [1, 2]},
            {"devices": CARDS, "device_ports": [3, 2]},
            "the ranks of one already use port *",
        ),
    ],
)
def test_rejects_models_with_port_conflict(one: dict[str, Any], other: dict[str, Any], problem: str) -> None:
    [*reported] = problems(two_models(one, other))
    assert reported[0].startswith(f"models.other.ranks.devices: {problem.rstrip('*')}")


def test_ranks_on_cpu_have_no_port_conflict() -> None:
    assert len(parse(two_models(ON_CPU, ON_CPU, engine="mindspore"), BASE).models) == 2
