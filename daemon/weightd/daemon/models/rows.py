"""What may be done with the rows of requests where a generation serves them, and what is told of that."""

from __future__ import annotations

from weightd.daemon.config.model import ModelConfig
from weightd.daemon.generations.life import Life
from weightd.daemon.requests.rows.terms import WHOLE, Dims, RowTerms
from weightd.protocol.messages.children import Built
from weightd.protocol.messages.findings import Rows


def terms(config: ModelConfig, generation: Life) -> RowTerms:
    """Return what is configured, as far as the generation's holder has found it to be right."""
    built = generation.built
    found = None if built is None else built.rows
    if built is None or found is None or not found.inputs or not found.outputs:
        return WHOLE
    batching, split = config.batching, config.split
    may_share = (found.equal or not batching.exact) and not _rowless(generation)
    return RowTerms(
        source=generation.source.number,
        inputs=frozenset(found.inputs),
        outputs=frozenset(found.outputs),
        max_rows=batching.max_rows if may_share else 1,
        part_rows=split.part_rows if found.equal or not split.exact else 0,
        sizes=batching.sizes,
        is_exact=found.equal,
        tested=_tested(built, found) if split.exact else None,
        apart=frozenset(generation.apart),
    )


def max_rows(config: ModelConfig, generation: Life) -> int:
    """Return how many rows of several requests share a predict; 0 where this is not configured, or not known yet."""
    found = None if generation.built is None else generation.built.rows
    return 0 if found is None or config.batching.max_rows == 1 else terms(config, generation).max_rows


def told(config: ModelConfig, generation: Life) -> str:
    """Return for people what is done with rows, and why not what is configured; "" where nothing is."""
    found = None if generation.built is None else generation.built.rows
    if found is None:
        return ""
    done = terms(config, generation)
    words: list[str] = []
    if done.merges:
        words.append(f"requests share a predict of up to {done.max_rows} rows")
    if done.part_rows:
        where = " of the canary's dimensions" if done.tested is not None and _has_others(generation) else ""
        words.append(f"requests of more than {done.part_rows} rows{where} run in parts")
    if words:
        words.append("tested bit-equal" if found.equal else "not tested to be exact")
    if config.batching.max_rows > 1:
        words += [
            f"none share a predict: input {name} has no rows" for name in _rowless(generation)[:1] if found.inputs
        ]
    if found.note:
        words.append(found.note)
    if words and generation.apart:
        names = sorted({each.name for each in generation.apart.values()})
        notes = ", ".join(dict.fromkeys(each.note for each in generation.apart.values()))
        words.append(f"requests of {', '.join(names)} share no predict and run in one piece: {notes}")
    return ", ".join(words)


def _tested(built: Built, found: Rows) -> Dims | None:
    """The dimensions with which the holder has run rows together and alone: those of the canary."""
    if not built.canary_cases:
        return None
    shapes = built.canary_cases[0].items()
    return frozenset((name, tuple(shape[1:] if name in found.inputs else shape)) for name, shape in shapes)


def _rowless(generation: Life) -> list[str]:
    """The inputs that have no rows: what one request gives there is not what another does."""
    built = generation.built
    if built is None or built.rows is None:
        return []
    return [each.name for each in built.inputs if each.name not in built.rows.inputs]


def _has_others(generation: Life) -> bool:
    """Whether a request may have more free dimensions than its rows."""
    return generation.built is not None and any(-1 in (each.shape or ())[1:] for each in generation.built.inputs)
