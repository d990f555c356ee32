"""What may be done with the rows of requests where a generation serves them."""

from __future__ import annotations

from weightd.daemon.config.model import ModelConfig
from weightd.daemon.generations.generation import Generation
from weightd.daemon.requests.rows.terms import WHOLE, RowTerms


def terms(config: ModelConfig, generation: Generation) -> RowTerms:
    """Return what is configured, as far as the generation's holder has found it to be right."""
    found = None if generation.built is None else generation.built.rows
    if found is None or not found.inputs or not found.outputs:
        return WHOLE
    batching, split = config.batching, config.split
    return RowTerms(
        source=generation.source.number,
        inputs=frozenset(found.inputs),
        outputs=frozenset(found.outputs),
        max_rows=batching.max_rows if found.equal or not batching.exact else 1,
        part_rows=split.part_rows if found.equal or not split.exact else 0,
        sizes=batching.sizes,
        is_exact=found.equal,
    )
