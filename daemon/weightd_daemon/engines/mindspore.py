"""MindSpore: the ranks of a model that is spread over several processes, on the CPU and on Ascend cards."""

from __future__ import annotations

from weightd_daemon.engines.spec import EngineSpec

# Measured with 2.7.1: 1.8 for 96 MiB of matrices, beside the 400 MB of each process.
SPEC = EngineSpec(
    "mindspore", suffix=".mindir", can_run_on_cards=True, build_factor=2.0, is_ranks_only=True, has_broker=True
)
