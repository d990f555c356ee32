"""Rules for combinations of a model's keys with its table of ranks, and for models whose ranks use the same card.

The ranks of a group start, run and stop together. So keys about replacing a single process, or about sharing weights
between processes, have no effect on ranks and are rejected.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from weightd_common.devices import CPU, card_of
from weightd_common.toml_schema import ErrorCollector
from weightd_daemon.config import selftest as selftest_config
from weightd_daemon.config.devices import DeviceConfig
from weightd_daemon.config.model import ModelConfig, ReplacementPolicy
from weightd_daemon.config.model_rules import engine_name
from weightd_daemon.config.ranks import (
    GROUP_PLACEHOLDER,
    MINDSPORE_LITE,
    RANK_PLACEHOLDER,
    RanksConfig,
    complete_ranks,
)
from weightd_daemon.engines import ranktable
from weightd_protocol.schema import FieldError, label

# Minimum of HCCL_CONNECT_TIMEOUT; HCCL rejects a smaller value.
_MIN_CONNECT_TIMEOUT_S = 120

# The 910 and 310P cards round HCCL_EXEC_TIMEOUT down to a multiple of this number of seconds. weightd cannot read the
# type of a card from a file. So the checks assume the rounded value, the lowest value that any card uses. A value that
# is not a multiple is accepted, because some cards do not round.
EXEC_TIMEOUT_STEP_S = 68


def with_rank_defaults(
    config: ModelConfig, devices: Mapping[str, DeviceConfig], base: Path, problems: ErrorCollector
) -> ModelConfig:
    """Fill in the table of ranks, and the model's keys whose defaults depend on this table.

    The caller then passes the returned model and the other arguments to `complete_model`.
    """
    if config.ranks is None:
        return config
    if config.devices != (CPU,):
        text = "for a model with ranks, set devices in the table [models.NAME.ranks]"
        problems.add([FieldError(text).at(".devices")], "devices")
    problems.add((error.at(".ranks") for error in config.ranks.problems()), "ranks")
    path = str(base / (config.path or ""))
    ranks = complete_ranks(config.ranks, engine_name(config), path, base, devices)
    return dataclasses.replace(config, ranks=ranks, devices=ranks.all_devices, sharing=config.sharing or "off")


def apply_rank_rules(config: ModelConfig, problems: ErrorCollector) -> ModelConfig:
    """Return a complete model with the settings that its ranks require; violated rules are added to `problems`."""
    if config.ranks is None:
        return config
    for needed, rule in _RULES:
        problems.add(rule(config, config.ranks), *needed)
    if config.engine != MINDSPORE_LITE:
        return config
    # MindSpore Lite supports ranks with its graph engine only.
    return dataclasses.replace(config, mindspore_lite=dataclasses.replace(config.mindspore_lite, provider="ge"))


def check_card_ports(models: Mapping[str, ModelConfig]) -> Iterator[FieldError]:
    """Yield an error for each model whose ranks use the same port of a card as the ranks of an earlier model.

    Only `weightd check` checks the ports in rank tables that the user provides.
    """
    port_owners: dict[tuple[str, int], str] = {}
    for name, model in models.items():
        if model.ranks is None or not (model.ranks.is_table_generated or engine_name(model) != MINDSPORE_LITE):
            continue
        for device in model.ranks.all_devices:
            if card_of(device) is None:
                continue
            for port in model.ranks.device_ports or (ranktable.DEFAULT_PORT,):
                other = port_owners.setdefault((device, port), name)
                if other != name:
                    text = f"the ranks of {label(other)} already use port {port} on {device}; set other device_ports"
                    yield FieldError(text).at(f".{label(name)}.ranks.devices")
                    break


# --- Rules for combinations of keys ----------------------------------------------------------------------------------


def _check_path(config: ModelConfig, ranks: RanksConfig) -> Iterator[FieldError]:
    del ranks
    if RANK_PLACEHOLDER not in config.path:
        yield FieldError(
            f"expected a path with {RANK_PLACEHOLDER}, which stands for 0, 1 and so on: each rank has its own file"
        ).at(".path")


def _check_engine(config: ModelConfig, ranks: RanksConfig) -> Iterator[FieldError]:
    if config.engine == MINDSPORE_LITE and not ranks.is_on_cards:
        yield FieldError(f"expected mindspore on the CPU: {MINDSPORE_LITE} supports ranks only on cards").at(".engine")


def _check_processes(config: ModelConfig, ranks: RanksConfig) -> Iterator[FieldError]:
    if config.max_workers != 1:
        yield FieldError(f"expected 1: a group has one process for each rank, got {config.max_workers}").at(".workers")
    if config.spares:
        yield FieldError(f"expected 0: all ranks are replaced together, got {config.spares}").at(".spares")
    if config.start != "fork":
        yield FieldError("has no effect: each rank always has its own interpreter").at(".start")
    if config.policy == ReplacementPolicy.OVERLAP.value and not ranks.can_overlap:
        text = "a card allows one process of a rank group on each port; set two device_ports, or another policy"
        yield FieldError(text).at(".policy")


def _check_weights(config: ModelConfig, ranks: RanksConfig) -> Iterator[FieldError]:
    del ranks
    if config.sharing != "off":
        reason = "no other process has the slice of a rank"
        yield FieldError(f'expected "off": {reason}; got {config.sharing!r}').at(".sharing")
    if config.copies != "one":
        yield FieldError("has no effect on ranks: a rank group has one copy of the weights, in slices").at(".copies")
    if config.holder_loss != "strict":
        yield FieldError("has no effect on ranks: no process holds weights for others").at(".holder_loss")


def _check_engine_options(config: ModelConfig, ranks: RanksConfig) -> Iterator[FieldError]:
    del ranks
    if config.mindspore_lite.variable_weights:
        text = "not supported with ranks: the graph engine does not run models with variable weights"
        yield FieldError(text).at(".mindspore_lite.variable_weights")


def _check_selftest(config: ModelConfig, ranks: RanksConfig) -> Iterator[FieldError]:
    del ranks
    if not selftest_config.inputs_path(config.selftest):
        reason = "ranks with the same wrong slice would agree on wrong outputs"
        yield FieldError(f"expected the path of an .npz file with inputs and their correct outputs: {reason}").at(
            ".selftest"
        )
    if config.selftest_interval:
        text = "not supported with ranks: they run the self-test only when they start"
        yield FieldError(text).at(".selftest_interval")


def _check_batching(config: ModelConfig, ranks: RanksConfig) -> Iterator[FieldError]:
    if config.batching.sizes:
        text = "not supported with ranks: only a model that was converted for a card has sizes"
        yield FieldError(text).at(".batching.sizes")
    if ranks.reply_rank is None and config.max_batch_rows > 1:
        key = ".batching.max_rows" if config.batching.max_rows > 1 else ".split.part_rows"
        yield FieldError('not supported with reply = "concat": concatenated outputs cannot be split by rows').at(key)


def _check_reply(config: ModelConfig, ranks: RanksConfig) -> Iterator[FieldError]:
    del config
    if ranks.reply_rank is not None and ranks.reply_rank >= ranks.size:
        expected = f"expected a rank, 0 to {ranks.size - 1}"
        yield FieldError(f"{expected}, got {ranks.reply_rank}").at(".ranks.reply")


def _check_timeouts(config: ModelConfig, ranks: RanksConfig) -> Iterator[FieldError]:
    if ranks.is_on_cards and ranks.connect_timeout < _MIN_CONNECT_TIMEOUT_S:
        text = f"expected at least {_MIN_CONNECT_TIMEOUT_S} on cards, the minimum of HCCL, got {ranks.connect_timeout}"
        yield FieldError(text).at(".ranks.connect_timeout")
    effective_timeout_s = ranks.exec_timeout
    if ranks.is_on_cards:
        effective_timeout_s -= effective_timeout_s % EXEC_TIMEOUT_STEP_S
    if not effective_timeout_s:
        yield FieldError(f"expected at least {EXEC_TIMEOUT_STEP_S} on cards, got {ranks.exec_timeout}").at(
            ".ranks.exec_timeout"
        )
    elif config.predict_timeout >= effective_timeout_s:
        rounded = (
            f", which some cards round down to {effective_timeout_s}"
            if effective_timeout_s != ranks.exec_timeout
            else ""
        )
        reason = "weightd must detect first that a rank hangs"
        text = f"expected less than ranks.exec_timeout, {ranks.exec_timeout}{rounded}: {reason}; got "
        yield FieldError(f"{text}{config.predict_timeout:g}").at(".predict_timeout")


def _check_rank_table(config: ModelConfig, ranks: RanksConfig) -> Iterator[FieldError]:
    for key in ("rank_table", "group_info_file"):
        if getattr(ranks, key) and not ranks.is_on_cards:
            yield FieldError("has no effect on the CPU, only on a card").at(f".ranks.{key}")
        elif getattr(ranks, key) and config.engine != MINDSPORE_LITE:
            yield FieldError(f"has no effect: only {MINDSPORE_LITE} reads it, but the engine is {config.engine}").at(
                f".ranks.{key}"
            )
    if not ranks.is_on_cards or ranks.is_table_generated or not ranks.rank_table:
        return
    yield from (FieldError(text).at(".ranks.rank_table") for text in ranktable.path_problems(ranks.rank_table))
    if len(ranks.groups) > 1 and GROUP_PLACEHOLDER not in ranks.rank_table:
        text = (
            f"expected a path with {GROUP_PLACEHOLDER}, which stands for 0, 1 and so on: each rank group has its"
            " own table"
        )
        yield FieldError(text).at(".ranks.rank_table")


def _check_ports(config: ModelConfig, ranks: RanksConfig) -> Iterator[FieldError]:
    if not ranks.device_ports:
        return
    if not ranks.is_on_cards:
        yield FieldError("has no effect on the CPU, only on a card").at(".ranks.device_ports")
    elif config.engine != MINDSPORE_LITE:
        text = f"has no effect: only rank tables for {MINDSPORE_LITE} have ports, but the engine is {config.engine}"
        yield FieldError(text).at(".ranks.device_ports")
    elif not ranks.is_table_generated:
        yield FieldError("has no effect beside rank_table, which contains the ports").at(".ranks.device_ports")
    elif len(set(ranks.device_ports)) < len(ranks.device_ports):
        yield FieldError(f"{ranks.device_ports[0]} is given twice").at(".ranks.device_ports")


def _check_buffers(config: ModelConfig, ranks: RanksConfig) -> Iterator[FieldError]:
    for key in ("buffer_mib", "communicators"):
        if not ranks.is_on_cards and getattr(ranks, key) != getattr(RanksConfig, key):
            yield FieldError("has no effect on the CPU, only on a card").at(f".ranks.{key}")
    if ranks.is_on_cards and config.engine == MINDSPORE_LITE and ranks.communicators > 1 and not ranks.group_info_file:
        yield FieldError("has no effect without group_info_file: the only group contains all ranks").at(
            ".ranks.communicators"
        )


_Rule = Callable[[ModelConfig, RanksConfig], Iterable[FieldError]]

# The keys that each rule reads, and the rule. As in `model_rules`, a rule is evaluated only if these keys are valid.
_RULES: Sequence[tuple[Sequence[str], _Rule]] = (
    (("path",), _check_path),
    (("path", "engine", "ranks"), _check_engine),
    (("workers", "spares", "start", "policy", "ranks"), _check_processes),
    (("sharing", "copies", "holder_loss"), _check_weights),
    (("mindspore_lite",), _check_engine_options),
    (("selftest", "selftest_interval"), _check_selftest),
    (("batching", "split", "ranks"), _check_batching),
    (("ranks",), _check_reply),
    (("predict_timeout", "ranks"), _check_timeouts),
    (("path", "engine", "ranks"), _check_rank_table),
    (("path", "engine", "ranks"), _check_ports),
    (("path", "engine", "ranks"), _check_buffers),
)
