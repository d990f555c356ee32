"""Checks of a rank group: whether its ranks agree, which models they have loaded, and which loss was the first.

Ranks compute together and fail together, so the first lost process that the daemon observes need not be the first that
failed. The cause is a process that exited by itself, before the daemon killed the remaining processes. The error texts
and exit statuses in this module only indicate that the loss of a process may be the consequence of an earlier loss.
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

# Parts of error texts which show that another process of the group has failed. In this order, the texts come from
# MindSpore, from HCCL for a link, from HCCL for a collective operation, and from MindSpore for every predict after a
# failed predict.
_PEER_FAILURE_TEXTS = ("Launch kernel failed", "EI0006", "EI0002", "previous step")

# Exit statuses of a rank that has lost its broker. MindSpore then sends SIGTERM to the rank's process, which exits with
# the first status, or with the second one if it handles the signal.
_BROKER_LOST_STATUSES = frozenset({-signal.SIGTERM, 128 + signal.SIGTERM})

# Exit statuses of MindSpore's broker after the loss of a rank. The broker also exits with status 1 if it cannot listen.
_RANK_LOST_STATUSES = frozenset({0, 1})
_LISTEN_FAILED_STATUS = 1


def rank_mismatch(hello: Hello, rank: int) -> str:
    """Return why a process that has sent this HELLO message is not the rank with the number `rank`, or ""."""
    if hello.slice is None:
        return f"expected rank {rank} of a sliced model, got a process without a rank"
    if hello.slice.rank != rank:
        return f"expected rank {rank}, got rank {hello.slice.rank}"
    return ""


def signature_mismatch(signatures: Mapping[str, RankSlice | JoinedGroup | GroupModelSignature]) -> str:
    """Return how the inputs or outputs of two ranks differ, as a text that names both, or "" if all ranks agree."""
    (first, model), *others = signatures.items()
    for name, other in others:
        for what, ours, theirs in (("input", model.inputs, other.inputs), ("output", model.outputs, other.outputs)):
            if ours != theirs:
                return f"{name} and {first} are not ranks of the same model: {_describe_difference(what, theirs, ours)}"
    return ""


def unverified_rank(selftests: Mapping[int, SelfTestDone], spec: RankGroupSpec) -> str:
    """Return an error text if a rank that serves results has not checked any in the self-test; else ""."""
    for rank in range(spec.size) if spec.reply_rank == CONCAT else [spec.reply_rank]:
        if not selftests[rank].selftest_digest:
            return f"rank {rank} returns results, but has not compared any with the self-test's known answer"
    return ""


def loaded_models(joined: JoinedGroup, spec: RankGroupSpec) -> tuple[Built, ...]:
    """Return the descriptions of the models that a rank group has loaded, before their self-tests have run."""
    note = "the ranks have not run it yet"
    models: Sequence[JoinedGroup | GroupModelSignature] = [joined] if spec.is_sliced else joined.members
    return tuple(
        Built("", each.inputs, _joined_outputs(each.outputs, spec), (), "", 0, selftest_note=note) for each in models
    )


def verified_models(
    built: tuple[Built, ...], selftests: Mapping[int, SelfTestDone], spec: RankGroupSpec
) -> tuple[Built, ...]:
    """Return the descriptions of the models with the results of the self-test, which all ranks have run."""
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
    """Return whether the error text of a library shows that another process has failed."""
    return any(each in text for each in _PEER_FAILURE_TEXTS)


def is_peer_failure_exit(role: Role, exit_cause: ExitCause, *, has_connected: bool) -> bool:
    """Return whether a process may have exited because another process was lost.

    Args:
        role: the role of the process.
        exit_cause: how the process has exited.
        has_connected: whether the ranks had found each other. Before that, a broker never exits because of a rank.
    """
    if role is Role.BROKER:
        return has_connected and exit_cause.status in _RANK_LOST_STATUSES
    return exit_cause.status in _BROKER_LOST_STATUSES or is_peer_failure_text(exit_cause.detail)


def is_port_taken(exit_cause: ExitCause, *, has_connected: bool) -> bool:
    """Return whether a broker has probably exited because its port was in use. The next broker gets another port."""
    return not has_connected and exit_cause.status == _LISTEN_FAILED_STATUS


def is_independent_exit(exit_cause: ExitCause) -> bool:
    """Return whether a process to which the daemon has sent SIGKILL had exited before the signal."""
    if exit_cause.status is None or exit_cause.initiator is ExitInitiator.SHIM:
        return False
    return exit_cause.status != -signal.SIGKILL or exit_cause.initiator is not ExitInitiator.DAEMON


def _joined_outputs(outputs: tuple[TensorSignature, ...], spec: RankGroupSpec) -> tuple[TensorSignature, ...]:
    """Return the outputs that a client receives. With `CONCAT`, they have the rows of all ranks."""
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
