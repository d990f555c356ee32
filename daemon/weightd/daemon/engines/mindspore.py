"""MindSpore: the ranks of a model that is spread over several processes, on the CPU and on Ascend cards."""

from __future__ import annotations

from weightd.daemon.engines.spec import EngineSpec

SPEC = EngineSpec("mindspore", suffix=".mindir", on_cards=True, ranks_only=True, has_broker=True)
