"""The batching policy of a generation: computed from the configuration and the row test, and described for users.

For the row test, the holder of a generation runs several rows together in one predict and each row alone, and compares
the results.
"""

from __future__ import annotations

from collections.abc import Mapping

from weightd_common.log_text import plural
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.generations.base import GenerationBase
from weightd_daemon.generations.progress import UnmergedPrincipal
from weightd_daemon.generations.shared_weights import Generation
from weightd_daemon.scheduling.batching.policy import NO_BATCHING, BatchingPolicy, Dims
from weightd_protocol.messages.worker import Built
from weightd_protocol.messages.worker_common import RowSupport


def batching_policy(config: ModelConfig, generation: GenerationBase) -> BatchingPolicy:
    """Return the configured batching policy, as far as the row test of the generation's holder allows it."""
    built = generation.built
    row_support = None if built is None else built.row_support
    if built is None or row_support is None or not row_support.inputs or not row_support.outputs:
        return NO_BATCHING
    batching, split = config.batching, config.split
    can_share = (row_support.is_equal or not batching.exact) and not _inputs_without_rows(generation)
    return BatchingPolicy(
        source_number=generation.source.number,
        inputs=frozenset(row_support.inputs),
        outputs=frozenset(row_support.outputs),
        max_rows=batching.max_rows if can_share else 1,
        max_split_rows=split.part_rows if row_support.is_equal or not split.exact else 0,
        sizes=batching.sizes,
        is_exact=row_support.is_equal,
        tested_dims=_tested_dims(built, row_support) if split.exact else None,
        unmerged_principals=frozenset(_unmerged_principals(generation)),
    )


def max_rows(config: ModelConfig, generation: GenerationBase) -> int:
    """Return the maximum number of rows that the requests of one batch may have together.

    The result is 0 if no batching is configured or the row test has not ended, and 1 if the row test forbids batching.
    """
    row_support = None if generation.built is None else generation.built.row_support
    return 0 if row_support is None or config.batching.max_rows == 1 else batching_policy(config, generation).max_rows


def describe_batching(config: ModelConfig, generation: GenerationBase) -> str:
    """Return a text for users: how requests of the generation are batched and split, or why they are not.

    The text is "" if neither batching nor splitting is configured, or if the row test has not ended.
    """
    row_support = None if generation.built is None else generation.built.row_support
    if row_support is None:
        return ""
    policy = batching_policy(config, generation)
    texts: list[str] = []
    if policy.can_merge:
        texts.append(f"requests are batched up to {policy.max_rows} rows")
    if policy.max_split_rows:
        where = (
            " of the self-test's dimensions"
            if policy.tested_dims is not None and _has_other_free_dims(generation)
            else ""
        )
        texts.append(f"requests of more than {plural(policy.max_split_rows, 'row')}{where} are split")
    if texts:
        texts.append("tested bit-equal" if row_support.is_equal else "not tested to be exact")
    if config.batching.max_rows > 1:
        texts += [
            f"no requests are batched: input {name} has no rows"
            for name in _inputs_without_rows(generation)[:1]
            if row_support.inputs
        ]
    if row_support.note:
        texts.append(row_support.note)
    unmerged = _unmerged_principals(generation).values()
    if texts and unmerged:
        names = sorted({each.name for each in unmerged})
        notes = ", ".join(dict.fromkeys(each.note for each in unmerged))
        texts.append(f"requests of {', '.join(names)} are neither batched nor split: {notes}")
    return ", ".join(texts)


def _tested_dims(built: Built, row_support: RowSupport) -> Dims | None:
    """Return each input's name and the dimensions, without the row dimension, that the row test has used.

    The row test uses the same dimensions as the self-test. The result is None without a self-test.
    """
    if not built.selftest_cases:
        return None
    shapes = built.selftest_cases[0].items()
    return frozenset((name, tuple(shape[1:] if name in row_support.inputs else shape)) for name, shape in shapes)


def _inputs_without_rows(generation: GenerationBase) -> list[str]:
    """Return the names of the inputs that have no row dimension.

    A model with such inputs cannot batch requests, because two requests may have different values for these inputs.
    """
    built = generation.built
    if built is None or built.row_support is None:
        return []
    return [each.name for each in built.inputs if each.name not in built.row_support.inputs]


def _has_other_free_dims(generation: GenerationBase) -> bool:
    """Return whether any input has a dimension of variable size other than its first dimension, the number of rows."""
    return generation.built is not None and any(-1 in (each.shape or ())[1:] for each in generation.built.inputs)


def _unmerged_principals(generation: GenerationBase) -> Mapping[int, UnmergedPrincipal]:
    """Return, by number, the principals whose requests never share a predict with other requests.

    The result is empty for a rank group, because rank groups do not detect such principals.
    """
    return generation.unmerged_principals if isinstance(generation, Generation) else {}
