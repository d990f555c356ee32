"""The ledger sees an answer that is missing, one too many, and a wrong one."""

from __future__ import annotations

from .ledger import OK, WRONG, Asked, Ledger

ASKED = Asked("m", 3, at=10.0, timeout=1.0)


def test_one_request_and_one_answer_add_up() -> None:
    ledger = Ledger()
    ledger.begin("1", ASKED)
    assert ledger.open == 1
    ledger.heard("1", 10.1)
    assert ledger.end("1", OK, "", 10.2) is None
    ledger.close()
    assert (ledger.open, ledger.sent, ledger.outcomes, ledger.problems) == (0, 1, {OK: 1}, [])


def test_a_missing_answer_is_noticed() -> None:
    ledger = Ledger()
    ledger.begin("1", ASKED)
    ledger.close()
    assert [each.split(":")[0] for each in ledger.problems] == ["missing", "missing"]


def test_outputs_that_the_wire_never_brought_are_noticed() -> None:
    ledger = Ledger()
    ledger.begin("1", ASKED)
    ledger.end("1", OK, "", 10.1)
    assert ledger.problems[0].startswith("missing: 1 ended in OK without an answer")


def test_a_second_answer_is_noticed_before_the_end_and_after_it() -> None:
    for ended in (False, True):
        ledger = Ledger()
        ledger.begin("1", ASKED)
        ledger.heard("1", 10.1)
        if ended:
            ledger.end("1", OK, "", 10.2)
        ledger.heard("1", 10.3)
        assert [each.split(":")[0] for each in ledger.problems] == ["duplicate"]


def test_a_second_end_is_noticed() -> None:
    ledger = Ledger()
    ledger.begin("1", ASKED)
    ledger.heard("1", 10.1)
    ledger.end("1", OK, "", 10.2)
    ledger.end("1", OK, "", 10.3)
    assert ledger.problems[0].startswith("duplicate: 1 ended again")


def test_an_answer_that_nobody_asked_for_is_noticed() -> None:
    ledger = Ledger()
    ledger.heard("1", 10.1)
    assert ledger.problems[0].startswith("unasked")


def test_a_wrong_answer_is_an_incident() -> None:
    ledger = Ledger()
    ledger.begin("1", ASKED)
    ledger.heard("1", 10.1)
    incident = ledger.end("1", WRONG, "", 10.2)
    assert incident is not None
    assert (incident.code, incident.model, incident.question, incident.sent_at, incident.ended_at) == (
        WRONG,
        "m",
        3,
        10.0,
        10.1,
    )
    ledger.close()
    assert ledger.problems == []


def test_a_lost_connection_ends_a_request_without_an_answer() -> None:
    ledger = Ledger()
    ledger.begin("1", ASKED)
    assert ledger.end("1", "UNAVAILABLE", "lost", 10.2) is not None
    ledger.close()
    assert ledger.problems == []


def test_what_a_client_gives_up_by_its_own_watch_must_still_be_answered() -> None:
    for answered in (False, True):
        ledger = Ledger()
        ledger.begin("1", ASKED)
        assert ledger.end("1", "DEADLINE_EXCEEDED", "no answer", 11.1) is not None
        assert ledger.open == 0
        if answered:
            ledger.heard("1", 11.2)
        ledger.close()
        assert [each.split(":")[0] for each in ledger.problems] == ([] if answered else ["missing"])


def test_what_was_given_up_before_the_connection_was_lost_needs_no_answer() -> None:
    ledger = Ledger()
    ledger.begin("1", ASKED)
    ledger.end("1", "DEADLINE_EXCEEDED", "no answer", 11.1)
    ledger.lost()
    ledger.close()
    assert ledger.problems == []


def test_a_request_that_could_not_be_sent_has_ended() -> None:
    ledger = Ledger()
    assert ledger.refused(ASKED, "UNAVAILABLE", "nobody listens", 10.0).code == "UNAVAILABLE"
    ledger.close()
    assert (ledger.sent, ledger.problems) == (1, [])


def test_a_cancelled_request_says_so() -> None:
    ledger = Ledger()
    ledger.begin("1", ASKED)
    ledger.cancel("1")
    ledger.heard("1", 10.1)
    incident = ledger.end("1", "CANCELLED", "", 10.2)
    assert incident is not None
    assert incident.cancelled
