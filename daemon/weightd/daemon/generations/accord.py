"""What the ranks of a unit have to agree on, and what they have built together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from weightd.daemon.generations.plan import CONCAT, RankTerms
from weightd.protocol.messages.children import Built, Hello
from weightd.protocol.messages.data import TensorSignature
from weightd.protocol.messages.ranks import Entered, Member, Proof, Slice, Warmed


def misplaced(hello: Hello, rank: int) -> str:
    """Return why a process that said this is not the rank that was started, or ""."""
    if hello.slice is None:
        return f"expected rank {rank} of a model that is cut, got a process that names none"
    if hello.slice.rank != rank:
        return f"expected rank {rank}, got rank {hello.slice.rank}"
    return ""


def discord(said: Mapping[str, Slice | Entered | Member]) -> str:
    """Return which two of these, by name, say different things of the model's tensors, or ""."""
    (first, model), *others = said.items()
    for name, other in others:
        for what, ours, theirs in (("input", model.inputs, other.inputs), ("output", model.outputs, other.outputs)):
            if ours != theirs:
                return f"{name} and {first} are not ranks of one model: {_difference(what, theirs, ours)}"
    return ""


def unproven(warmed: Mapping[int, Warmed], terms: RankTerms) -> str:
    """Return which of the ranks that answer has compared nothing with the known answer, or ""."""
    for rank in range(terms.size) if terms.reply == CONCAT else [terms.reply]:
        if not warmed[rank].canary:
            return f"rank {rank} answers requests, and has compared nothing with the canary's known answer"
    return ""


def loaded(entered: Entered, terms: RankTerms) -> tuple[Built, ...]:
    """Return what a unit has loaded, by its members or as one model; nobody knows yet whether it computes rightly."""
    note = "the ranks have not run it yet"
    models: Sequence[Entered | Member] = [entered] if terms.is_cut else entered.members
    return tuple(Built("", each.inputs, _joined(each.outputs, terms), (), "", 0, canary_note=note) for each in models)


def proven(built: tuple[Built, ...], warmed: Mapping[int, Warmed], terms: RankTerms) -> tuple[Built, ...]:
    """Return the same, whose canary all ranks have run."""
    said = warmed[max(terms.reply, 0)]
    proofs: Sequence[Warmed | Proof] = [said] if terms.is_cut else said.members
    return tuple(
        replace(
            each,
            canary_cases=proof.canary_cases if proof.canary else (),
            canary=proof.canary,
            canary_note="" if proof.canary else "none was configured",
            device=said.device,
            rows=said.rows,
        )
        for each, proof in zip(built, proofs, strict=True)
    )


def _joined(outputs: tuple[TensorSignature, ...], terms: RankTerms) -> tuple[TensorSignature, ...]:
    """What a client gets of what each rank gives."""
    if terms.reply != CONCAT:
        return outputs
    return tuple(
        replace(each, shape=(each.shape[0] * (terms.size if each.shape[0] > 0 else 1), *each.shape[1:]))
        if each.shape
        else each
        for each in outputs
    )


def _difference(what: str, ours: tuple[TensorSignature, ...], theirs: tuple[TensorSignature, ...]) -> str:
    if len(ours) != len(theirs):
        return f"{len(ours)} {what}s here, {len(theirs)} there"
    index = next(index for index, each in enumerate(ours) if each != theirs[index])
    here, there = ours[index], theirs[index]
    return f"{what} {index} is {_told(here)} here, {_told(there)} there"


def _told(each: TensorSignature) -> str:
    return f"{each.name} {each.datatype} {each.form}"
