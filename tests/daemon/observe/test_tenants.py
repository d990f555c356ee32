from __future__ import annotations

from collections import Counter
from types import SimpleNamespace
from typing import Any

import pytest

from weightd.daemon.config.tenants import TenantConfig
from weightd.daemon.observe.own import own_report
from weightd.daemon.observe.tenants import told, waiting
from weightd.daemon.tenants.accounts import ELSEWHERE, Account, Accounts, QuotaExceeded
from weightd.daemon.tenants.tenant import Tenant
from weightd.protocol import limits
from weightd.protocol.codec import encode
from weightd.protocol.errors import NotFound
from weightd.protocol.messages.accounts import AccountStatus
from weightd.protocol.messages.status import ModelStatus, StatusResponse

ANN = Tenant("ann", TenantConfig(weight=3.0, models=("m", "b*")))
BOB = Tenant("bob", TenantConfig())


def model(name: str, *queued: Tenant) -> Any:
    line = SimpleNamespace(counts=Counter(queued))
    return SimpleNamespace(
        name=name,
        config=SimpleNamespace(engine="onnxruntime"),
        state=SimpleNamespace(told="serving"),
        desk=SimpleNamespace(scheduler=SimpleNamespace(line=line)),
    )


def busy(accounts: Accounts, tenant: str, name: str, requests: int = 1) -> Account:
    account = accounts.of(tenant, name)
    for _ in range(requests):
        account.accepts(100)
        account.ran(0.5, 2)
        account.answers(10)
    return account


def test_each_has_an_account_for_each_model_that_it_has_asked() -> None:
    accounts = Accounts()
    accounts.tick()
    busy(accounts, "ann", "m", 3).accepts(7)
    accounts.of("ann", "m").waited(0.25)
    accounts.of("ann", "m").refuses(QuotaExceeded("max_rate", "too many"))
    accounts.of("ann", ELSEWHERE).refuses(NotFound("no"), requests=1)
    accounts.of("ann", "never")
    queued = waiting([model("m", ANN, BOB, ANN), model("n")])
    ann, bob = told([ANN, BOB], accounts, queued)
    assert (ann.name, ann.weight, ann.share, ann.summed) == ("ann", 3.0, 1.0, 0)
    assert ann.accounts == (
        AccountStatus("m", 4, 3, 6, 1.5, 0.25, 307, 30, 1, 2, {"max_rate": 1}),
        AccountStatus("", 1, 0, 0, 0.0, 0.0, 0, 0, 0, 0, {"NOT_FOUND": 1}),
    )
    assert (bob.weight, bob.accounts, bob.share) == (1.0, (), None)


def test_nobody_has_a_share_where_nothing_has_run() -> None:
    [ann] = told([ANN], Accounts(), {})
    assert ann.share is None


def test_what_has_no_room_is_in_a_sum(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(limits, "MAX_ACCOUNTS", 4)
    accounts = Accounts()
    for requests, name in enumerate(("a", "b", "c", "d"), 1):
        busy(accounts, "ann", name, requests).accepts(1)
    busy(accounts, "bob", "a", 9)
    accounts.of("bob", ELSEWHERE).refuses(NotFound("no"), requests=1)
    ann, bob = told([ANN, BOB], accounts, {("ann", "a"): 1, ("ann", "c"): 1, ("ann", "d"): 1})
    assert [(each.model, each.requests, each.in_flight, each.queued) for each in ann.accounts] == [
        ("d", 5, 1, 1),
        ("", 9, 3, 2),
    ]
    assert (ann.summed, bob.summed) == (3, 0)
    assert [(each.model, each.requests) for each in bob.accounts] == [("a", 9), ("", 1)]


def test_the_largest_answer_fits() -> None:
    accounts = Accounts()
    tenants = [Tenant(f"{number:064d}", TenantConfig()) for number in range(limits.MAX_TENANTS + 1)]
    for tenant in tenants:
        for number in range(limits.MAX_MODELS):
            account = accounts.of(tenant.name, f"{number:064d}")
            for field in ("requests", "served", "rows", "bytes_in", "bytes_out", "deaths", "in_flight"):
                setattr(account, field, 2**54)
            account.refused = {f"{reason:020d}": 2**54 for reason in range(limits.MAX_REFUSAL_REASONS // 2)}
    whole = told(tenants, accounts, {})
    assert limits.MAX_ACCOUNTS - 256 < sum(len(each.accounts) for each in whole) <= limits.MAX_ACCOUNTS
    response = StatusResponse("id", "1", "running", 1, 1.0, 1, (), tenants=whole)
    assert len(b"".join(encode(response, max_bytes=limits.MAX_STATUS_BYTES))) < limits.MAX_STATUS_BYTES / 2


def test_who_may_not_see_others_is_told_of_its_models_and_of_itself() -> None:
    accounts = Accounts()
    busy(accounts, "ann", "m", 2).refuses(NotFound("no"))
    busy(accounts, "bob", "m", 100)
    models = [model("m", BOB, ANN, BOB), model("secret", BOB), model("big")]
    response = own_report("7", "running", 2.0, ANN, models, accounts)
    assert response.models == (
        ModelStatus("m", "onnxruntime", "", "serving", 1, 2, 1, ()),
        ModelStatus("big", "onnxruntime", "", "serving", 0, 0, 0, ()),
    )
    assert [each.name for each in response.tenants] == ["ann"]
    assert (response.id, response.state, response.uptime_s) == ("7", "running", 2.0)
    assert (response.pid, response.pss_bytes, response.held_bytes, response.max_memory_bytes) == (0, 0, 0, 0)
    assert (response.gates, response.fork_servers, response.devices, response.memory) == ((), (), (), None)
    # What it has asked before its table was another one is in the sum, without a name.
    busy(accounts, "ann", "secret", 3)
    response = own_report("7", "running", 2.0, ANN, models, accounts)
    [ann] = response.tenants
    assert [(each.model, each.served) for each in ann.accounts] == [("m", 2), ("", 3)]
    assert ann.summed == 0
    for secret in ("bob", "secret"):
        assert secret not in str(response)
