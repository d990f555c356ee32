"""A serving service: access, privileges, memory, journal and reload. No test here stops the service."""

from __future__ import annotations

import json
import signal
import stat
import time
from collections.abc import Iterator

import pytest

from testkit.waiting import until

from . import materials
from .manager import Manager
from .service import MLP, STRANGER_UID, Weightd

pytestmark = pytest.mark.e2e

ERROR, WARNING, INFO = "3", "4", "6"


@pytest.fixture(scope="module")
def serving(manager: Manager) -> Iterator[Weightd]:
    weightd = Weightd(manager)
    weightd.reset()
    weightd.start()
    weightd.wait_for_workers()
    yield weightd
    weightd.reset()


@pytest.fixture(autouse=True)
def unchanged(serving: Weightd) -> Iterator[None]:
    """Check that the daemon is the same process before and after the test."""
    before = serving.main_pid
    yield
    assert (serving.main_pid, serving.restarts) == (before, 0), serving.journal()


@pytest.mark.parametrize("scheme", ["", "unix://", "ipc://"])
def test_group_member_gets_answers(serving: Weightd, scheme: str) -> None:
    assert serving.report("ask", materials.QUESTIONS, scheme=scheme).get("wrong") == 0


def test_systemd_shows_active_service(serving: Weightd) -> None:
    shown = serving.manager.shows(serving.service, "ActiveState", "SubState", "StatusText", "Type")
    assert (shown["ActiveState"], shown["SubState"]) == ("active", "running")
    assert shown["StatusText"]


def test_sockets_belong_to_group(serving: Weightd) -> None:
    for path in serving.sockets:
        status = serving.manager.path(path).stat()
        assert stat.S_IMODE(status.st_mode) == 0o660
        assert status.st_gid == serving.clients_gid
        assert status.st_uid == user_id(serving)


def user_id(weightd: Weightd) -> int:
    return int(weightd.manager.run(["id", "--user", "weightd"]))


def test_other_users_may_not_connect(serving: Weightd) -> None:
    process = serving.client("probe", uid=STRANGER_UID, member=False)
    assert process.stdout
    assert process.stdout.readline().strip() == "begun"
    time.sleep(0.1)
    output, _ = process.communicate(timeout=20)
    assert set(json.loads(output)) == {"EACCES"}
    done = serving.weightctl("status", uid=STRANGER_UID)
    assert done.returncode == 77
    assert serving.address in done.stderr
    assert serving.report("ask", materials.QUESTIONS, uid=STRANGER_UID, member=False)["error"] == "PERMISSION_DENIED"


def test_only_owner_and_root_may_reload_over_unix_socket(serving: Weightd) -> None:
    assert serving.report("reload", uid=0, scheme="ipc://")["error"] == "PERMISSION_DENIED"
    assert serving.report("reload")["error"] == "PERMISSION_DENIED"
    assert serving.report("reload", uid=0) == {}
    assert serving.report("reload", uid=user_id(serving)) == {}


def test_daemon_is_in_user_namespace_of_host(serving: Weightd) -> None:
    # In a separate user namespace, all clients would appear as the user nobody.
    def user_namespace(pid: int) -> str:
        return serving.manager.run(["readlink", f"/proc/{pid}/ns/user"])

    assert user_namespace(serving.main_pid) == user_namespace(1)


def test_processes_run_as_user_without_privileges(serving: Weightd) -> None:
    pids = serving.pids()
    assert len(pids) >= 4
    for pid in pids:
        fields = dict(line.split(":", 1) for line in serving.manager.proc(pid, "status").splitlines())
        assert set(fields["Uid"].split()) == {str(user_id(serving))}
        assert int(fields["CapBnd"], 16) == int(fields["CapEff"], 16) == 0
        assert fields["NoNewPrivs"].strip() == "1"
        assert fields["Seccomp"].strip() == "2"


def test_cache_is_private(serving: Weightd) -> None:
    status = serving.manager.path("/var/cache/weightd").stat()
    assert stat.S_IMODE(status.st_mode) == 0o700
    assert status.st_uid == user_id(serving)


def test_workers_share_weights(serving: Weightd) -> None:
    generation = serving.generation()
    workers = [each for each in generation["processes"] if each["role"] == "worker"]
    weights = materials.LAYERS * materials.WIDTH**2 * 4
    assert all(each["shared_bytes"] >= weights * 0.9 for each in workers), workers
    # Two workers share one copy; the status knows how much of the store is in memory.
    assert generation["copy_bytes"] >= weights * 0.9
    assert generation["saved_bytes"] <= weights * 1.1


def test_oom_scores_of_workers_holder_and_daemon(serving: Weightd) -> None:
    def score(pid: int) -> int:
        return int(serving.manager.proc(pid, "oom_score_adj"))

    daemon = score(serving.main_pid)
    [holder] = [score(each.pid) for each in serving.children() if each.role == "holder"]
    workers = {score(each.pid) for each in serving.children() if each.role == "worker"}
    assert daemon < holder < min(workers)


def test_oom_score_is_above_other_services(serving: Weightd) -> None:
    assert int(serving.manager.proc(serving.main_pid, "oom_score_adj")) > 0


def test_service_is_in_slice(serving: Weightd) -> None:
    assert serving.show("Slice") == "weightd.slice"


def test_journal_has_priority_and_fields(serving: Weightd) -> None:
    before = serving.workers()
    serving.manager.kill(before[0], signal.SIGKILL)
    until(lambda: before[0] not in serving.workers(), "the worker exits")
    serving.wait_for_workers()
    records = serving.manager.records(serving.service)
    own = [each for each in records if each.get("_PID") == str(serving.main_pid)]
    [lost] = [each for each in own if "lost" in each["MESSAGE"]]
    assert lost["PRIORITY"] == WARNING
    assert {lost["MODEL"], lost["GENERATION"], lost["SYSLOG_IDENTIFIER"]} == {"mlp", "1", "weightd"}
    assert lost["CHILD"].startswith("mlp.1.w")
    assert {each["_TRANSPORT"] for each in own} == {"journal"}
    assert {each["PRIORITY"] for each in own if "serving" in each["MESSAGE"]} == {INFO}
    # The journal already stores time and priority.
    assert not [each["MESSAGE"] for each in own if "INFO" in each["MESSAGE"] or "WARNING" in each["MESSAGE"]]


def test_reload_changes_models_and_keeps_processes(serving: Weightd) -> None:
    before = serving.workers()
    serving.configure({"mlp": MLP, "other": {"path": materials.OTHER_MODEL}})
    serving.manager.systemctl("reload", serving.service)
    until(lambda: [each["name"] for each in serving.status()["models"]] == ["mlp", "other"], "the reload is in force")
    serving.wait_for_workers(1, "other")
    assert serving.workers() == before
    serving.configure({"mlp": MLP})
    serving.manager.systemctl("reload", serving.service)
    until(lambda: [each["name"] for each in serving.status()["models"]] == ["mlp"], "the reload is in force")
    assert serving.workers() == before


def test_reload_with_invalid_file_fails_with_reason(serving: Weightd) -> None:
    before = serving.workers()
    serving.configure({"mlp": {**MLP, "wrokers": 3}})
    assert serving.manager.try_run(["systemctl", "reload", serving.service]).returncode != 0
    errors = [each for each in serving.manager.records(serving.service) if "wrokers" in each["MESSAGE"]]
    # The audit log has an entry as well.
    assert [each["PRIORITY"] for each in errors if not each["MESSAGE"].startswith("audit ")] == [ERROR]
    assert "wrokers" in serving.status()["note"]
    assert (serving.workers(), serving.show("ActiveState")) == (before, "active")
    serving.configure({"mlp": MLP})
    serving.manager.systemctl("reload", serving.service)
    assert not serving.status()["note"]
    serving.ask()
