"""Tests of the operations of operators, with a fake model and fake permissions."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any, cast

import pytest

from weightd_common.safe_open import OPERATOR
from weightd_daemon.api.admin import AdminApi, DaemonControl
from weightd_daemon.models.registry import ConfigDiff
from weightd_protocol.errors import Unavailable
from weightd_protocol.messages.control import RESTART, Load, Reload, UpdateResponse

CONNECTION: Any = SimpleNamespace(key=b"client", tenant=None, identity=SimpleNamespace(audit_name="uid 0"))


class AdminHarness:
    """The operations of operators on a serving model, whose updates the test ends."""

    def __init__(self) -> None:
        self.updates: list[dict[str, Any]] = []
        self.replies: list[Any] = []
        model = SimpleNamespace(
            name="m",
            loading=SimpleNamespace(is_unloaded=False, may_retry=False),
            versions=SimpleNamespace(current=SimpleNamespace(weights="/new.npz")),
            readiness=SimpleNamespace(state_name="serving"),
            update=lambda *_, **named: self.updates.append(named),
        )
        lookup = SimpleNamespace(find=lambda *_: model, registry=SimpleNamespace(is_closed=False))
        authorizer = SimpleNamespace(
            authorize_load=lambda *_: None, check_operator=lambda *_: None, file_grant=lambda _: OPERATOR
        )
        responses = SimpleNamespace(
            reply=lambda client, response: self.replies.append(response),
            reply_error=lambda client, request_id, error: self.replies.append(error),
        )
        daemon = DaemonControl(*[cast(Any, None)] * 6)
        self.admin = AdminApi(cast(Any, lookup), cast(Any, authorizer), daemon, cast(Any, responses))

    def restart(self, *, wait: bool) -> None:
        self.admin.on_load(CONNECTION, Load("1", "m", RESTART, wait), (), 0.0)


def test_restart_keeps_replaced_weights() -> None:
    harness = AdminHarness()
    harness.restart(wait=True)
    assert harness.updates == [{"path": "", "weights": "/new.npz", "rollback": False, "grant": OPERATOR}]


@pytest.mark.parametrize("wait", [True, False])
@pytest.mark.parametrize("fails", [True, False])
def test_restart_has_one_reply(*, wait: bool, fails: bool) -> None:
    harness = AdminHarness()
    harness.restart(wait=wait)
    assert len(harness.replies) == (0 if wait else 1)
    if fails:
        harness.admin.reply_failed(b"client", "1", Unavailable("not updated"))
    else:
        harness.admin.reply_updated(b"client", UpdateResponse("1", "m", (2,), "/m.onnx", "", "/m.onnx"))
        harness.admin.send_saved_responses()
    assert len(harness.replies) == 1
    harness.restart(wait=True)  # the id is free again
    harness.admin.reply_failed(b"client", "1", Unavailable("not updated"))
    assert len(harness.replies) == 2


def test_audit_log_does_not_call_a_dry_run_a_reload(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "weightd.audit")
    authorizer = SimpleNamespace(check_reload=lambda *_: None)
    responses = SimpleNamespace(reply=lambda *_: None)
    daemon = DaemonControl(*cast(Any, (None, lambda on_done, _: on_done(ConfigDiff((), (), (), ())), *[None] * 4)))
    admin = AdminApi(cast(Any, SimpleNamespace(registry=None)), cast(Any, authorizer), daemon, cast(Any, responses))
    for dry_run in (True, False):
        admin.on_reload(CONNECTION, Reload("1", dry_run), (), 0.0)
    assert [each.getMessage() for each in caplog.records] == [
        f'audit action="{action}" result="ok" user="uid 0"' for action in ("dry_run", "reload")
    ]
