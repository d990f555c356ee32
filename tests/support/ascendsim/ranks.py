"""Writers of networks split over ranks and of rank tables, and the right answers of the ranks.

::

    host = Host(tmp_path / "host", cards=4)
    slices = ranks.mlp(tmp_path / "slices", ranks=4)           # rank0.mindir ... rank3.mindir
    table = ranks.table(tmp_path / "table.json", devices=[0, 1, 2, 3])
    # rank r: provider "ge", rank_id r, device_id r, [ascend_context] rank_table_file; all ranks predict x
    assert np.array_equal(rank_3s_answer, slices.answers(x)[3])

Each file has the input "x" [batch, width] and the output "y" of the whole model, and a part of its weights. An answer
is right only if all ranks take part in lockstep, each with its slice.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Dict, Generator, List, NamedTuple, Optional, Sequence

import numpy as np
from numpy.typing import NDArray

from ascendsim import addresses, modelfile, network
from ascendsim.hccl import groupinfo
from ascendsim.hccl.world import add
from ascendsim.modelfile import Floats, ModelFile, TensorSpec
from ascendsim.network import WORLD, Collective

_MIB = 1024 * 1024


class Slices(NamedTuple):
    """A model split over ranks.

    Attributes:
        paths: paths of the slices, in rank order.
        group_infos: `group_info_file` of each rank; [] if the world is the only group.
        groups: the groups beside the world.
    """

    paths: List[Path]
    group_infos: List[Path]
    groups: Dict[str, List[int]]

    def answers(self, x: NDArray[Any]) -> List[Floats]:
        """Return the answer of each rank to x, bit for bit, if all are in lockstep."""
        rows: Floats = np.asarray(x, np.float32)
        models = [modelfile.read(path) for path in self.paths]
        return _in_step(models, rows, {WORLD: list(range(len(models))), **self.groups})


def mlp(
    directory: Path,
    ranks: int = 2,
    *,
    layers: int = 2,
    width: int = 16,
    batch: Optional[int] = None,
    seed: int = 0,
    stages: int = 1,
    output: str = "whole",
    broadcast: bool = False,
    size_mib: int = 0,
) -> Slices:
    """Write `layers` times x = relu(x @ A) @ B, with A split by columns, B by rows, and an AllReduce of the products.

    Weights are -1, 0 and 1. For small integers as inputs, every split gives the same bits as the whole network
    (`whole`); for other inputs, nearly the same values.

    Args:
        directory: directory of "rank0.mindir" and so on, created here; with groups also of "groups0.pb" and so on.
        ranks: number of ranks, a multiple of `stages`; ranks / stages divides `width`.
        layers: number of layers in each stage.
        width: length of a row of "x" and "y".
        batch: batch size; None: free.
        seed: seed of the weights.
        stages: of a pipeline, each of ranks / stages ranks in a separate group (`group_info_file`). Only the last
            has an answer; the others give zeros of its shape.
        output: "whole" (full_batch: every rank of the last stage has all of it) or "sliced" (each has its part of
            dimension 0, so the batch has to be divisible by their number).
        broadcast: pipeline_result_broadcast: every rank has the last stage's answer.
        size_mib: pretended size of each slice's weights on a card; 0: their real size.
    """
    directory.mkdir(parents=True, exist_ok=True)
    count = ranks // stages
    if ranks % stages or width % count or output not in ("whole", "sliced"):
        raise ValueError(f"{ranks} ranks, {stages} stages, width {width}, output {output!r}")
    groups = _groups(ranks, stages)
    matrices = _matrices(layers * stages, width, seed)
    free = -1 if batch is None else batch
    inputs, outputs = [TensorSpec("x", [free, width])], [TensorSpec("y", [free, width])]
    if output == "sliced" and batch is not None:
        outputs = [TensorSpec("y", [batch // count, width])]
    paths: List[Path] = []
    for rank in range(ranks):
        stage, part = divmod(rank, count)
        steps: List[List[Any]] = [["receive", f"pipe{part}", rank - count, width]] if stage else []
        weights: List[Floats] = []
        here = slice(part * (width // count), (part + 1) * (width // count))
        for a, b in matrices[stage * layers : (stage + 1) * layers]:
            steps += [["matmul", width, width // count], ["relu"], ["matmul", width // count, width]]
            weights += [a[:, here], b[here]]
            if count > 1:
                steps.append(["all_reduce", WORLD if stages == 1 else f"stage{stage}"])
        if stage < stages - 1:
            steps.append(["send", f"pipe{part}", rank + count])
        if broadcast and stages > 1:
            steps.append(["broadcast", WORLD, ranks - 1, width])
        elif stage < stages - 1:
            steps.append(["useless", width])
        if output == "sliced" and (broadcast or stage == stages - 1):
            steps.append(["part", part, count])
        data = b"".join(np.ascontiguousarray(each).tobytes() for each in weights)
        size = size_mib * _MIB or len(data)
        model = ModelFile(network.SLICE, layers, width, inputs, outputs, size, False, data, exported=True, steps=steps)
        paths.append(modelfile.write(directory / f"rank{rank}.mindir", model))
    infos = [groupinfo.write(directory / f"groups{rank}.pb", groups, rank) for rank in range(ranks) if groups]
    return Slices(paths, infos, groups)


def whole(x: NDArray[Any], *, layers: int = 2, width: int = 16, seed: int = 0) -> Floats:
    """Return the answer of the network before the split; `layers` is the total of all stages."""
    value: Floats = np.asarray(x, np.float32)
    for a, b in _matrices(layers, width, seed):
        value = network.product(np.maximum(network.product(value, a), np.float32(0)), b)
    return value


def table(path: Path, devices: Sequence[int], *, ports: Sequence[int] = (), **changes: Any) -> Path:
    """Write the rank table of these physical cards of one server, in rank order.

    Args:
        path: path of the .json file.
        devices: physical card of each rank.
        ports: port of each rank; empty: the default of each card.
        changes: replacements of top-level keys of the table; None removes a key.
    """
    listed: List[Dict[str, str]] = []
    for rank, device in enumerate(devices):
        row = {"device_id": str(device), "device_ip": addresses.of_card(device), "rank_id": str(rank)}
        listed.append({**row, **({"device_port": str(ports[rank])} if ports else {})})
    server = {"server_id": "node_0", "device": listed}
    values: Dict[str, Any] = {"version": "1.0", "server_count": "1", "status": "completed", "server_list": [server]}
    values.update(changes)
    path.write_text(json.dumps({key: value for key, value in values.items() if value is not None}), encoding="ascii")
    return path


def _matrices(count: int, width: int, seed: int) -> List[Any]:
    random = np.random.RandomState(seed)
    # Few ones: whole numbers stay small enough for float32.
    one: Any = [-1, 0, 0, 0, 0, 0, 0, 1]
    return [[random.choice(one, (width, width)).astype(np.float32) for _ in "ab"] for _ in range(count)]


def _groups(ranks: int, stages: int) -> Dict[str, List[int]]:
    if stages == 1:
        return {}
    count = ranks // stages
    groups = {f"stage{stage}": list(range(stage * count, (stage + 1) * count)) for stage in range(stages)}
    return {**groups, **{f"pipe{part}": list(range(part, ranks, count)) for part in range(count)}}


def _in_step(models: Sequence[ModelFile], x: Floats, groups: Dict[str, List[int]]) -> List[Floats]:
    """Compute all ranks at once."""
    runs = [network.run(model, modelfile.as_floats(model.weights, model), [x]) for model in models]
    results: Dict[int, List[Floats]] = {}
    waiting: Dict[int, Collective] = {}
    for rank, run in enumerate(runs):
        _go_on(rank, run, None, waiting, results)
    while waiting:
        rank, first = next((rank, each) for rank, each in waiting.items() if _are_there(rank, each, waiting, groups))
        members = _members(rank, first, groups)
        arrived = {each: waiting.pop(each) for each in members}
        parts = [arrived[each].data for each in members]
        for each in members:
            mine = arrived[each]
            if mine.operation == "all_reduce":
                value = add(parts)
            else:
                value = mine.data if mine.operation == "send" else arrived[mine.peer].data
            _go_on(each, runs[each], value, waiting, results)
    return [results[rank][0] for rank in range(len(models))]


def _members(rank: int, mine: Collective, groups: Dict[str, List[int]]) -> List[int]:
    if mine.operation in ("send", "receive"):
        return sorted([rank, mine.peer])
    return groups[mine.group]


def _are_there(rank: int, mine: Collective, waiting: Dict[int, Collective], groups: Dict[str, List[int]]) -> bool:
    members = _members(rank, mine, groups)
    return all(each in waiting and waiting[each].group == mine.group for each in members)


def _go_on(
    rank: int,
    run: Generator[Collective, Any, List[Floats]],
    value: Optional[Floats],
    waiting: Dict[int, Collective],
    results: Dict[int, List[Floats]],
) -> None:
    try:
        waiting[rank] = run.send(value)
    except StopIteration as end:
        results[rank] = end.value
