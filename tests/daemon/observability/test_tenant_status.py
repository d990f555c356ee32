from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from weightd_daemon.config.tenants import TenantConfig
from weightd_daemon.observability.tenant_status import queued_counts, tenant_statuses
from weightd_daemon.observability.tenant_view import build_tenant_status
from weightd_daemon.tenants.tenant import Tenant
from weightd_daemon.tenants.usage import OTHER_MODELS, QuotaExceeded, Usage, UsageTable
from weightd_protocol import limits
from weightd_protocol.codec import encode
from weightd_protocol.errors import NotFound
from weightd_protocol.messages.accounts import AccountStatus
from weightd_protocol.messages.status import ModelStatus, StatusResponse

ANN = Tenant("ann", TenantConfig(weight=3.0, models=("m", "b*")))
BOB = Tenant("bob", TenantConfig())


def model(name: str, *queued: Tenant) -> Any:
    return SimpleNamespace(
        name=name,
        config=SimpleNamespace(engine="onnxruntime"),
        state=SimpleNamespace(display_name="serving"),
        dispatcher=SimpleNamespace(queued_by_tenant=Counter(queued)),
    )


def busy(accounts: UsageTable, tenant: str, name: str, requests: int = 1) -> Usage:
    account = accounts.usage_of(tenant, name)
    for _ in range(requests):
        account.count_accepted(100)
        account.add_run(0.5, 2)
        account.count_served(10)
    return account


def test_each_has_an_account_for_each_model_that_it_has_asked() -> None:
    accounts = UsageTable()
    accounts.sample()
    busy(accounts, "ann", "m", 3).count_accepted(7)
    accounts.usage_of("ann", "m").add_queue_time(0.25)
    accounts.usage_of("ann", "m").count_refused(QuotaExceeded("max_rate", "too many"))
    accounts.usage_of("ann", OTHER_MODELS).count_refused(NotFound("no"), requests=1)
    accounts.usage_of("ann", "never")
    queued = queued_counts([model("m", ANN, BOB, ANN), model("n")])
    ann, bob = tenant_statuses([ANN, BOB], accounts, queued)
    assert (ann.name, ann.weight, ann.share, ann.merged_accounts) == ("ann", 3.0, 1.0, 0)
    assert ann.accounts == (
        AccountStatus("m", 4, 3, 6, 1.5, 0.25, 307, 30, 1, 2, {"max_rate": 1}),
        AccountStatus("", 1, 0, 0, 0.0, 0.0, 0, 0, 0, 0, {"NOT_FOUND": 1}),
    )
    assert (bob.weight, bob.accounts, bob.share) == (1.0, (), None)


def test_nobody_has_a_share_where_nothing_has_run() -> None:
    [ann] = tenant_statuses([ANN], UsageTable(), {})
    assert ann.share is None


def test_what_has_no_room_is_in_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_ACCOUNTS", 4)
    accounts = UsageTable()
    for requests, name in enumerate(("a", "b", "c", "d"), 1):
        busy(accounts, "ann", name, requests).count_accepted(1)
    busy(accounts, "bob", "a", 9)
    accounts.usage_of("bob", OTHER_MODELS).count_refused(NotFound("no"), requests=1)
    ann, bob = tenant_statuses([ANN, BOB], accounts, {("ann", "a"): 1, ("ann", "c"): 1, ("ann", "d"): 1})
    assert [(each.model, each.requests, each.in_flight, each.queued) for each in ann.accounts] == [
        ("d", 5, 1, 1),
        ("", 9, 3, 2),
    ]
    assert (ann.merged_accounts, bob.merged_accounts) == (3, 0)
    assert [(each.model, each.requests) for each in bob.accounts] == [("a", 9), ("", 1)]


def test_the_largest_answer_fits() -> None:
    accounts = UsageTable()
    tenants = [Tenant(f"{number:064d}", TenantConfig()) for number in range(limits.MAX_TENANTS + 1)]
    for tenant in tenants:
        for number in range(limits.MAX_MODELS):
            account = accounts.usage_of(tenant.name, f"{number:064d}")
            for field in ("requests", "served", "rows", "bytes_in", "bytes_out", "unexpected_exits", "in_flight"):
                setattr(account, field, 2**54)
            account.refused = {f"{reason:020d}": 2**54 for reason in range(limits.MAX_REFUSAL_REASONS // 2)}
    whole = tenant_statuses(tenants, accounts, {})
    assert limits.MAX_ACCOUNTS - 256 < sum(len(each.accounts) for each in whole) <= limits.MAX_ACCOUNTS
    response = StatusResponse("id", "1", "running", 1, 1.0, 1, (), tenants=whole)
    assert len(b"".join(encode(response, max_bytes=limits.MAX_STATUS_BYTES))) < limits.MAX_STATUS_BYTES / 2


def test_who_may_not_see_others_is_told_of_its_models_and_of_itself() -> None:
    accounts = UsageTable()
    busy(accounts, "ann", "m", 2).count_refused(NotFound("no"))
    busy(accounts, "bob", "m", 100)
    models = [model("m", BOB, ANN, BOB), model("secret", BOB), model("big")]
    response = build_tenant_status("7", "running", 2.0, ANN, models, accounts)
    assert response.models == (
        ModelStatus("m", "onnxruntime", "", "serving", 1, 2, 1, ()),
        ModelStatus("big", "onnxruntime", "", "serving", 0, 0, 0, ()),
    )
    assert [each.name for each in response.tenants] == ["ann"]
    assert (response.id, response.state, response.uptime_s) == ("7", "running", 2.0)
    assert (response.pid, response.pss_bytes, response.buffered_bytes, response.max_memory_bytes) == (0, 0, 0, 0)
    assert (response.zmq_proxies, response.fork_servers, response.devices, response.memory) == ((), (), (), None)
    # What it has asked before its table was another one is in the sum, without a name.
    busy(accounts, "ann", "secret", 3)
    response = build_tenant_status("7", "running", 2.0, ANN, models, accounts)
    [ann] = response.tenants
    assert [(each.model, each.served) for each in ann.accounts] == [("m", 2), ("", 3)]
    assert ann.merged_accounts == 0
    for secret in ("bob", "secret"):
        assert secret not in str(response)
