from __future__ import annotations

from pathlib import Path

import pytest

from testkit import models
from weightd_daemon.config.load import load
from weightd_daemon.handover.counter_store import CounterEntry, CounterStore
from weightd_daemon.memory_plan import MemoryPlan, plan_memory
from weightd_daemon.models.residency.needs import MeasuredNeeds, NeedRecord

MIB = 1024 * 1024
PROCESS = 12 * MIB


class Plans:
    """Writes a configuration whose models all have the same file, and plans its memory."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self.file = directory / "weightd.toml"
        self.file_bytes = models.tiny(directory / "m.onnx", 0).stat().st_size

    def remember(self, *records: NeedRecord) -> None:
        needs = MeasuredNeeds()
        store = CounterStore(
            load(self.file).daemon.counters_file, {"need": CounterEntry(needs, NeedRecord)}, lambda function: function()
        )
        store.open(0.0)
        needs.restore(records)
        store.close()

    def __call__(self, budget: int, **tables: str) -> MemoryPlan:
        """Plan the memory of models with these further keys, or "" for one worker; a budget of 0 means none."""
        directories = "".join(f'{key} = "{self._directory}"\n' for key in ("runtime_dir", "cache_dir"))
        texts = [f"[daemon]\nmax_model_bytes = {budget}\n{directories}"]
        texts += [f'[models.{name}]\npath = "m.onnx"\n{keys or "workers = 1"}\n' for name, keys in tables.items()]
        self.file.write_text("".join(texts), "utf-8")
        return plan_memory(load(self.file))


@pytest.fixture
def plan(tmp_path: Path) -> Plans:
    return Plans(tmp_path)


ON_DEMAND = 'workers = 1\nload = "on_demand"'


def needs(planned: MemoryPlan) -> dict[str, int]:
    return {each.name: each.nbytes for each in planned.models}


def test_estimates_need_from_files_and_processes(plan: Plans) -> None:
    planned = plan(0, one="", spare="workers = 2\nspares = 1", copies='workers = 2\nspares = 0\nsharing = "off"')
    weights = plan.file_bytes
    # A process is a worker, a spare or the holder.
    expected = {"one": weights + 2 * PROCESS, "spare": weights + 4 * PROCESS, "copies": 2 * weights + 3 * PROCESS}
    assert needs(planned) == expected
    assert not any(each.is_measured for each in planned.models)


def test_counts_processes_on_every_device(plan: Plans) -> None:
    devices = 'workers = 1\ndevices = ["cpu:0", "cpu:1"]'
    cores = "".join(f'\n[devices."cpu:{core}"]\ncpus = "{core}"' for core in (0, 1))
    planned = plan(0, shared=devices, own=f'{devices}\ncopies = "each"{cores}')
    weights = plan.file_bytes
    assert needs(planned) == {"shared": weights + 3 * PROCESS, "own": 2 * (weights + 2 * PROCESS)}


def test_uses_measurement_of_the_same_files(plan: Plans) -> None:
    plan(0, same="", changed="")
    weights = plan.file_bytes
    plan.remember(NeedRecord("same", weights, 7 * MIB), NeedRecord("changed", weights + 1, 7 * MIB))
    same, changed = plan(0, same="", changed="").models
    assert (same.nbytes, same.is_measured) == (7 * MIB, True)
    assert (changed.nbytes, changed.is_measured) == (weights + 2 * PROCESS, False)


def test_fits_models_in_the_order_of_the_configuration(plan: Plans) -> None:
    # Each model needs a little more than 24 MiB.
    planned = plan(80 * MIB, a=ON_DEMAND, b=ON_DEMAND, c=ON_DEMAND, start="")
    assert (planned.together, planned.never) == (("start", "a", "b"), ())
    assert list(planned.lines())[-2:] == [
        "plan: loaded together: start, a, b",
        "plan: loaded only after others are unloaded: c",
    ]


def test_names_models_that_can_never_be_loaded(plan: Plans) -> None:
    planned = plan(30 * MIB, a=ON_DEMAND, start="")
    assert (planned.together, planned.never) == (("start",), ("a",))
    assert list(planned.lines())[-2:] == ["plan: loaded together: start", "plan: a can never be loaded"]
    assert plan(20 * MIB, a=ON_DEMAND, start="").never == ("a", "start")


def test_without_budget_all_models_fit(plan: Plans) -> None:
    planned = plan(0, a=ON_DEMAND, start="")
    assert (set(planned.together), planned.never) == ({"a", "start"}, ())
    assert "there is no budget" in list(planned.lines())[-1]
