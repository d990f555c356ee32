"""What the ranks of a unit have to agree on, and what they have built together."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

from weightd_daemon.generations.spec import CONCAT, RankGroupSpec
from weightd_protocol.messages.inference import TensorSignature
from weightd_protocol.messages.ranks import GroupModelSignature, JoinedGroup, RankSlice, SelfTestDone, SelfTestResult
from weightd_protocol.messages.worker import Built, Hello


def rank_mismatch(hello: Hello, rank: int) -> str:
    """Return why a process that said this is not the rank that was started, or ""."""
    if hello.slice is None:
        return f"expected rank {rank} of a model that is cut, got a process that names none"
    if hello.slice.rank != rank:
        return f"expected rank {rank}, got rank {hello.slice.rank}"
    return ""


def signature_mismatch(signatures: Mapping[str, RankSlice | JoinedGroup | GroupModelSignature]) -> str:
    """Return which two of these, by name, say different things of the model's tensors, or ""."""
    (first, model), *others = signatures.items()
    for name, other in others:
        for what, ours, theirs in (("input", model.inputs, other.inputs), ("output", model.outputs, other.outputs)):
            if ours != theirs:
                return f"{name} and {first} are not ranks of one model: {_describe_difference(what, theirs, ours)}"
    return ""


def unverified_rank(selftests: Mapping[int, SelfTestDone], spec: RankGroupSpec) -> str:
    """Return which of the ranks that answer has compared nothing with the known answer, or ""."""
    for rank in range(spec.size) if spec.reply_rank == CONCAT else [spec.reply_rank]:
        if not selftests[rank].selftest_digest:
            return f"rank {rank} answers requests, and has compared nothing with the self-test's known answer"
    return ""


def loaded_models(joined: JoinedGroup, spec: RankGroupSpec) -> tuple[Built, ...]:
    """Return what a unit has loaded, by its members or as one model; nobody knows yet whether it computes rightly."""
    note = "the ranks have not run it yet"
    models: Sequence[JoinedGroup | GroupModelSignature] = [joined] if spec.is_sliced else joined.members
    return tuple(
        Built("", each.inputs, _joined_outputs(each.outputs, spec), (), "", 0, selftest_note=note) for each in models
    )


def verified_models(
    built: tuple[Built, ...], selftests: Mapping[int, SelfTestDone], spec: RankGroupSpec
) -> tuple[Built, ...]:
    """Return the same, whose self-test all ranks have run."""
    selftest = selftests[max(spec.reply_rank, 0)]
    results: Sequence[SelfTestDone | SelfTestResult] = [selftest] if spec.is_sliced else selftest.members
    return tuple(
        replace(
            each,
            selftest_cases=result.selftest_cases if result.selftest_digest else (),
            selftest_digest=result.selftest_digest,
            selftest_note="" if result.selftest_digest else "none was configured",
            device=selftest.device,
            row_support=selftest.row_support,
        )
        for each, result in zip(built, results, strict=True)
    )


def _joined_outputs(outputs: tuple[TensorSignature, ...], spec: RankGroupSpec) -> tuple[TensorSignature, ...]:
    """What a client gets of what each rank gives."""
    if spec.reply_rank != CONCAT:
        return outputs
    return tuple(
        replace(each, shape=(each.shape[0] * (spec.size if each.shape[0] > 0 else 1), *each.shape[1:]))
        if each.shape
        else each
        for each in outputs
    )


def _describe_difference(what: str, ours: tuple[TensorSignature, ...], theirs: tuple[TensorSignature, ...]) -> str:
    if len(ours) != len(theirs):
        return f"{len(ours)} {what}s here, {len(theirs)} there"
    index = next(index for index, each in enumerate(ours) if each != theirs[index])
    here, there = ours[index], theirs[index]
    return f"{what} {index} is {_describe_tensor(here)} here, {_describe_tensor(there)} there"


def _describe_tensor(tensor: TensorSignature) -> str:
    return f"{tensor.name} {tensor.datatype} {tensor.shape_text}"
