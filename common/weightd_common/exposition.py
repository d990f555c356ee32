"""Metrics in the Prometheus text exposition format (0.0.4): names, types, help texts and samples.

A counter never decreases while the model and tenant in its labels exist. Labels contain only names from the
configuration and no text from clients, so clients cannot increase the number of time series.
"""

from __future__ import annotations

from typing import Callable, Iterable, Iterator, NamedTuple, Optional, Sequence, Tuple, Union

from weightd_protocol.errors import ERRORS, ResourceExhausted
from weightd_protocol.messages.accounts import AccountStatus, TenantStatus, total_failed
from weightd_protocol.messages.metrics import Histogram, MetricsResponse, ModelMetrics

# Value of the HTTP header Content-Type for the text that `exposition` returns.
CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

Number = Union[int, float]
Labels = Tuple[Tuple[str, str], ...]


class Sample(NamedTuple):
    """One value of a metric family.

    Attributes:
        labels: pairs of label name and value.
        value: the value.
        suffix: text appended to the name of the family, such as "_bucket".
    """

    labels: Labels
    value: Number
    suffix: str = ""


class Family(NamedTuple):
    """A metric family: a name, a type ("counter", "gauge" or "histogram"), a help text, and a sample per label set.

    The function `samples` computes the samples from a metrics response.
    """

    name: str
    kind: str
    help: str
    samples: Callable[[MetricsResponse], Iterable[Sample]]


def exposition(response: MetricsResponse) -> str:
    """Return all metrics of a response in the text exposition format."""
    return "".join(iterate_text(response))


def iterate_text(response: MetricsResponse) -> Iterator[str]:
    """Yield the text of `exposition` in small pieces, so that the caller can do other work in between."""
    for family in FAMILIES:
        begun = False
        for sample in family.samples(response):
            if not begun:
                begun = True
                yield f"# HELP {family.name} {family.help}\n# TYPE {family.name} {family.kind}\n"
            yield f"{family.name}{sample.suffix}{_labels(sample.labels)} {_number(sample.value)}\n"


def _labels(labels: Labels) -> str:
    listed = ",".join([f'{name}="{_escaped(value)}"' for name, value in labels])
    return f"{{{listed}}}" if listed else ""


def _escaped(value: str) -> str:
    return value.replace("\\", "\\\\").replace('"', '\\"').replace("\n", "\\n")


def _number(value: Number) -> str:
    return repr(value) if isinstance(value, float) else str(int(value))


# --- functions that build `Family.samples` -----------------------------------------------------------------------


def _daemon_samples(
    value: Callable[[MetricsResponse], Optional[Number]],
) -> Callable[[MetricsResponse], Iterator[Sample]]:
    """Return a function for `Family.samples` that yields one sample without labels, or none if the value is None."""

    def samples(response: MetricsResponse) -> Iterator[Sample]:
        found = value(response) if _is_complete(response) else None
        if found is not None:
            yield Sample((), found)

    return samples


def _model_samples(
    value: Callable[[ModelMetrics], Optional[Number]], *, is_public: bool = False
) -> Callable[[MetricsResponse], Iterator[Sample]]:
    """Return a function for `Family.samples` that yields a sample with the label `model` for each model.

    Args:
        value: returns the value of a model; None for no sample.
        is_public: whether clients that may see only their own tenant receive the samples as well.
    """

    def samples(response: MetricsResponse) -> Iterator[Sample]:
        for model in response.models if is_public or _is_complete(response) else ():
            found = value(model)
            if found is not None:
                yield Sample((("model", model.name),), found)

    return samples


def _histogram_samples(
    histogram_of: Callable[[ModelMetrics], Histogram], bounds: Callable[[MetricsResponse], Sequence[Number]]
) -> Callable[[MetricsResponse], Iterator[Sample]]:
    """Return a function for `Family.samples` that yields each model's histogram, with cumulative buckets."""

    def samples(response: MetricsResponse) -> Iterator[Sample]:
        names = [*(format(bound, "g") for bound in bounds(response)), "+Inf"]
        for model in response.models:
            histogram, label = histogram_of(model), ("model", model.name)
            if len(histogram.counts) != len(names):
                continue
            count = 0
            for name, each in zip(names, histogram.counts):
                count += each
                yield Sample((label, ("le", name)), count, "_bucket")
            yield Sample((label,), histogram.sum, "_sum")
            yield Sample((label,), count, "_count")

    return samples


def _tenant_samples(value: Callable[[TenantStatus], Optional[Number]]) -> Callable[[MetricsResponse], Iterator[Sample]]:
    """Return a function for `Family.samples` that yields a sample with the label `tenant` for each tenant."""

    def samples(response: MetricsResponse) -> Iterator[Sample]:
        for tenant in response.tenants:
            found = value(tenant)
            if found is not None:
                yield Sample((("tenant", tenant.name),), found)

    return samples


def _tenant_sum_samples(value: Callable[[AccountStatus], Number]) -> Callable[[MetricsResponse], Iterator[Sample]]:
    """Return a function for `Family.samples` that yields the sum over all accounts of each tenant.

    The sum does not decrease when a model is removed: the requests of removed models count in the tenant's account
    without a model.
    """
    return _tenant_samples(lambda tenant: sum(value(account) for account in tenant.accounts))


def _account_samples(value: Callable[[AccountStatus], Number]) -> Callable[[MetricsResponse], Iterator[Sample]]:
    """Return a function for `Family.samples` that yields a sample for each model and tenant.

    The tenant's account for requests of no listed model, such as a removed model, has no sample.
    """

    def samples(response: MetricsResponse) -> Iterator[Sample]:
        for tenant, account in _iterate_accounts(response):
            yield Sample((("model", account.model), ("tenant", tenant.name)), value(account))

    return samples


def _iterate_accounts(response: MetricsResponse) -> Iterator[Tuple[TenantStatus, AccountStatus]]:
    for tenant in response.tenants:
        for account in tenant.accounts:
            if account.model:
                yield tenant, account


def _is_complete(response: MetricsResponse) -> bool:
    """Return whether the response contains the data of all tenants.

    A client that may see only its own tenant receives 0 for other values, and exporting the 0 would be misleading.
    """
    return bool(response.seconds_bounds)


# --- special families --------------------------------------------------------------------------------------------


def _build(response: MetricsResponse) -> Iterator[Sample]:
    yield Sample((("version", response.version),), 1)


def _model_infos(response: MetricsResponse) -> Iterator[Sample]:
    for model in response.models if _is_complete(response) else ():
        labels = ("generation", str(model.generation)), ("sha256", model.sha256)
        yield Sample((("model", model.name), ("engine", model.engine), *labels), 1)


def _processes(response: MetricsResponse) -> Iterator[Sample]:
    for model in response.models:
        for each in model.processes:
            yield Sample((("model", model.name), ("role", each.role), ("state", each.state)), each.count)


def _requests(response: MetricsResponse) -> Iterator[Sample]:
    """Yield the number of requests for each result code.

    Requests that were rejected because of one of the tenant's limits count as RESOURCE_EXHAUSTED.
    """
    for tenant, account in _iterate_accounts(response):
        codes = {"OK": account.served}
        for reason, count in account.failed.items():
            code = reason if reason in ERRORS else ResourceExhausted.code
            codes[code] = codes.get(code, 0) + count
        for code, count in sorted(codes.items()):
            yield Sample((("model", account.model), ("tenant", tenant.name), ("code", code)), count)


def _refused(response: MetricsResponse) -> Iterator[Sample]:
    for tenant in response.tenants:
        for reason, count in total_failed(tenant.accounts).items():
            yield Sample((("tenant", tenant.name), ("reason", reason)), count)


def _reloads(response: MetricsResponse) -> Iterator[Sample]:
    if _is_complete(response):
        yield Sample((("result", "succeeded"),), response.reloads.succeeded)
        yield Sample((("result", "refused"),), response.reloads.refused)


def _seconds_bounds(response: MetricsResponse) -> Sequence[Number]:
    return response.seconds_bounds


def _rows_bounds(response: MetricsResponse) -> Sequence[Number]:
    return response.rows_bounds


# --- all families ------------------------------------------------------------------------------------------------

COUNTER, GAUGE, HISTOGRAM = "counter", "gauge", "histogram"

FAMILIES: Sequence[Family] = (
    Family("weightd_build_info", GAUGE, "Always 1. The label is the version of the daemon.", _build),
    Family("weightd_uptime_seconds", GAUGE, "Seconds since the daemon started.",
           _daemon_samples(lambda each: each.uptime_s)),
    Family("weightd_pss_bytes", GAUGE,
           "Memory (PSS) of the daemon, its ZeroMQ proxies and its shim, from an earlier scrape.",
           _daemon_samples(lambda each: each.pss_bytes)),
    Family("weightd_buffered_bytes", GAUGE, "Memory held for clients: requests in progress and unread responses.",
           _daemon_samples(lambda each: each.buffered_bytes)),
    Family("weightd_buffered_limit_bytes", GAUGE, "Maximum of weightd_buffered_bytes.",
           _daemon_samples(lambda each: each.max_memory_bytes)),
    Family("weightd_dropped_responses_total", COUNTER,
           "Responses dropped because the client had disconnected or did not read them.",
           _daemon_samples(lambda each: each.dropped_responses)),
    Family("weightd_reloads_total", COUNTER, "Reloads of the configuration, by result: succeeded or refused.",
           _reloads),
    Family("weightd_model_info", GAUGE,
           "Always 1. The labels describe the generation that represents the state of the model.",
           _model_infos),
    Family("weightd_ready", GAUGE, "1 if a worker of the model has responded recently, otherwise 0.",
           _model_samples(lambda each: each.ready, is_public=True)),
    Family("weightd_generation", GAUGE, "Number of the generation that represents the state of the model.",
           _model_samples(lambda each: each.generation)),
    Family("weightd_processes", GAUGE, "Processes by role and state.", _processes),
    Family("weightd_unexpected_exits_total", COUNTER, "Processes that exited without being stopped by the daemon.",
           _model_samples(lambda each: each.unexpected_exits)),
    Family("weightd_restarts_total", COUNTER, "Processes started to replace lost ones.",
           _model_samples(lambda each: each.restarts)),
    Family("weightd_selftest_failures_total", COUNTER,
           "Workers that did not reproduce the known answer of the self-test.",
           _model_samples(lambda each: each.selftest_failures)),
    Family("weightd_batch_mismatches_total", COUNTER,
           "Generations in which batched rows had other results than the same rows run alone.",
           _model_samples(lambda each: each.batch_mismatches)),
    Family("weightd_quarantined", GAUGE,
           "Inputs in quarantine: matching requests are rejected, because they crashed or hung workers.",
           _model_samples(lambda each: each.quarantined)),
    Family("weightd_requests_total", COUNTER, "Completed requests, by result: OK or the code of the error.", _requests),
    Family("weightd_request_duration_seconds", HISTOGRAM,
           "Time from the arrival of a request to its response, for successful requests.",
           _histogram_samples(lambda each: each.request_seconds, _seconds_bounds)),
    Family("weightd_queue_duration_seconds", HISTOGRAM,
           "Time from the arrival of a request until a worker receives it.",
           _histogram_samples(lambda each: each.queue_seconds, _seconds_bounds)),
    Family("weightd_compute_duration_seconds", HISTOGRAM,
           "Time from when a worker can start an execution until its result arrives.",
           _histogram_samples(lambda each: each.compute_seconds, _seconds_bounds)),
    Family("weightd_batch_rows", HISTOGRAM, "Rows per execution of models whose requests are batched or split.",
           _histogram_samples(lambda each: each.batch_rows, _rows_bounds)),
    Family("weightd_model_reserved_bytes", GAUGE, "Memory that is reserved for a model in the budget for models.",
           _model_samples(lambda each: each.reserved_bytes)),
    Family("weightd_executions_total", COUNTER, "Completed executions.", _model_samples(lambda each: each.executions)),
    Family("weightd_requests_running", GAUGE, "Requests that workers are running.",
           _model_samples(lambda each: each.running)),
    Family("weightd_requests_queued", GAUGE, "Requests in the queue.", _account_samples(lambda each: each.queued)),
    Family("weightd_requests_in_flight", GAUGE, "Requests that are queued or running.",
           _account_samples(lambda each: each.in_flight)),
    Family("weightd_queue_length", GAUGE, "Requests in the queue, of all tenants.",
           _model_samples(lambda each: each.queued, is_public=True)),
    Family("weightd_queue_limit", GAUGE, "Maximum number of requests in the queue.",
           _model_samples(lambda each: each.max_queue)),
    Family("weightd_model_pss_bytes", GAUGE, "Memory (PSS) of the model's processes, measured at an earlier scrape.",
           _model_samples(lambda each: each.pss_bytes)),
    Family("weightd_model_shared_bytes", GAUGE, "Sum of the bytes of the model that each worker shares.",
           _model_samples(lambda each: each.shared_bytes)),
    Family("weightd_model_copy_bytes", GAUGE, "Memory of the copies of the model's weights.",
           _model_samples(lambda each: each.copy_bytes)),
    Family("weightd_model_saved_bytes", GAUGE,
           "Memory saved by sharing: weightd_model_shared_bytes less weightd_model_copy_bytes.",
           _model_samples(lambda each: each.saved_bytes)),
    Family("weightd_refused_total", COUNTER,
           "Failed requests and other refused messages, by the tenant's limit or the error code.",
           _refused),
    Family("weightd_tenant_rows_total", COUNTER, "Rows that were run, for models whose rows are known.",
           _tenant_sum_samples(lambda each: each.rows)),
    Family("weightd_tenant_slot_seconds_total", COUNTER, "Time in which workers ran the tenant's requests.",
           _tenant_sum_samples(lambda each: each.slot_seconds)),
    Family("weightd_tenant_queue_seconds_total", COUNTER,
           "Time from the arrival of requests until workers received them.",
           _tenant_sum_samples(lambda each: each.queue_seconds)),
    Family("weightd_tenant_received_bytes_total", COUNTER, "Bytes of tensors in the tenant's requests.",
           _tenant_sum_samples(lambda each: each.bytes_in)),
    Family("weightd_tenant_sent_bytes_total", COUNTER, "Bytes of tensors in responses to the tenant.",
           _tenant_sum_samples(lambda each: each.bytes_out)),
    Family("weightd_tenant_unexpected_exits_total", COUNTER,
           "Workers that exited while they ran the tenant's requests.",
           _tenant_sum_samples(lambda each: each.unexpected_exits)),
    Family("weightd_tenant_resident_byte_seconds_total", COUNTER,
           "Memory that was reserved for models on the tenant's account, times its duration.",
           _tenant_sum_samples(lambda each: each.resident_byte_seconds)),
    Family("weightd_tenant_weight", GAUGE, "Weight of the tenant in fair-share scheduling.",
           _tenant_samples(lambda each: each.weight)),
    Family("weightd_tenant_share_ratio", GAUGE,
           "The tenant's fraction of all workers' running time in the last minute.",
           _tenant_samples(lambda each: each.share)),
)  # fmt: skip
