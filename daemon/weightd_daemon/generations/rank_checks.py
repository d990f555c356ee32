"""The checks of a rank group: whether its ranks agree, which models they have loaded, and which loss caused the others.

Processes that compute together fail together, so the first loss that the daemon observes need not be the first that
happened. A process that exited by itself, before the daemon killed the others, is the cause. The texts and statuses in
this module only indicate that a loss may be a consequence.
"""

from __future__ import annotations

import signal
from collections.abc import Mapping, Sequence
from dataclasses import replace

from weightd_daemon.generations.actions import Role
from weightd_daemon.generations.spec import CONCAT, RankGroupSpec
from weightd_daemon.platform.exit_cause import ExitCause, ExitInitiator
from weightd_protocol.messages.inference import TensorSignature
from weightd_protocol.messages.ranks import GroupModelSignature, JoinedGroup, RankSlice, SelfTestDone, SelfTestResult
from weightd_protocol.messages.worker import Built, Hello

# The errors of libraries after the failure of a peer: MindSpore's, HCCL's for a link and for a collective, and
# MindSpore's for every predict after a failed one.
_PEER_FAILURE_TEXTS = ("Launch kernel failed", "EI0006", "EI0002", "previous step")

# MindSpore sends its process SIGTERM after the loss of the broker; the second value is the exit status if the process
# handles that signal.
_BROKER_LOST_STATUSES = frozenset({-signal.SIGTERM, 128 + signal.SIGTERM})

# The exit statuses of MindSpore's broker after the loss of a rank; the status 1 also means that it cannot listen.
_RANK_LOST_STATUSES = frozenset({0, 1})
_LISTEN_FAILED_STATUS = 1


def rank_mismatch(hello: Hello, rank: int) -> str:
    """Return why a process with this HELLO is not the rank that was started, or ""."""
    if hello.slice is None:
        return f"expected rank {rank} of a sliced model, got a process without a rank"
    if hello.slice.rank != rank:
        return f"expected rank {rank}, got rank {hello.slice.rank}"
    return ""


def signature_mismatch(signatures: Mapping[str, RankSlice | JoinedGroup | GroupModelSignature]) -> str:
    """Return the difference between two ranks, by name, in the tensors of the model, or ""."""
    (first, model), *others = signatures.items()
    for name, other in others:
        for what, ours, theirs in (("input", model.inputs, other.inputs), ("output", model.outputs, other.outputs)):
            if ours != theirs:
                return f"{name} and {first} are not ranks of the same model: {_describe_difference(what, theirs, ours)}"
    return ""


def unverified_rank(selftests: Mapping[int, SelfTestDone], spec: RankGroupSpec) -> str:
    """Return an error for a rank that answers requests without having verified the known answer, or ""."""
    for rank in range(spec.size) if spec.reply_rank == CONCAT else [spec.reply_rank]:
        if not selftests[rank].selftest_digest:
            return f"rank {rank} returns results, but has not compared any with the self-test's known answer"
    return ""


def loaded_models(joined: JoinedGroup, spec: RankGroupSpec) -> tuple[Built, ...]:
    """Return the descriptions of the models that a group has loaded; their self-tests have not run yet."""
    note = "the ranks have not run it yet"
    models: Sequence[JoinedGroup | GroupModelSignature] = [joined] if spec.is_sliced else joined.members
    return tuple(
        Built("", each.inputs, _joined_outputs(each.outputs, spec), (), "", 0, selftest_note=note) for each in models
    )


def verified_models(
    built: tuple[Built, ...], selftests: Mapping[int, SelfTestDone], spec: RankGroupSpec
) -> tuple[Built, ...]:
    """Return the descriptions of the models after all ranks have run the self-test."""
    selftest = selftests[max(spec.reply_rank, 0)]
    results: Sequence[SelfTestDone | SelfTestResult] = [selftest] if spec.is_sliced else selftest.members
    return tuple(
        replace(
            each,
            selftest_cases=result.selftest_cases if result.selftest_digest else (),
            selftest_digest=result.selftest_digest,
            selftest_note="" if result.selftest_digest else "the model has no key selftest",
            device=selftest.device,
            row_support=selftest.row_support,
        )
        for each, result in zip(built, results, strict=True)
    )


def is_peer_failure_text(text: str) -> bool:
    """Return whether a library's error text names the failure of another process."""
    return any(each in text for each in _PEER_FAILURE_TEXTS)


def is_peer_failure_exit(role: Role, exit_cause: ExitCause, *, has_connected: bool) -> bool:
    """Return whether the exit of a process may be a consequence of the loss of another one.

    Args:
        role: the role of the process.
        exit_cause: how it has exited.
        has_connected: whether the ranks had found each other. Before that, a broker exits only for its own reasons.
    """
    if role is Role.BROKER:
        return has_connected and exit_cause.status in _RANK_LOST_STATUSES
    return exit_cause.status in _BROKER_LOST_STATUSES or is_peer_failure_text(exit_cause.detail)


def is_port_taken(exit_cause: ExitCause, *, has_connected: bool) -> bool:
    """Return whether a broker has probably found its port in use; the next broker gets another port."""
    return not has_connected and exit_cause.status == _LISTEN_FAILED_STATUS


def is_independent_exit(exit_cause: ExitCause) -> bool:
    """Return whether a process to which the daemon has sent SIGKILL had exited before that."""
    if exit_cause.status is None or exit_cause.initiator is ExitInitiator.SHIM:
        return False
    return exit_cause.status != -signal.SIGKILL or exit_cause.initiator is not ExitInitiator.DAEMON


def _joined_outputs(outputs: tuple[TensorSignature, ...], spec: RankGroupSpec) -> tuple[TensorSignature, ...]:
    """Return the outputs that a client receives, which may join the rows of all ranks."""
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
        return f"{what}s: {len(ours)} here, {len(theirs)} there"
    index = next(index for index, each in enumerate(ours) if each != theirs[index])
    here, there = ours[index], theirs[index]
    return f"{what} {index} is {_describe_tensor(here)} here, {_describe_tensor(there)} there"


def _describe_tensor(tensor: TensorSignature) -> str:
    return f"{tensor.name} {tensor.datatype} {tensor.shape_text}"
