"""Detection of missing, duplicate and wrong answers by the request accounting."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from .ledger import OK, WRONG, Incident, RequestAccounting, SentRequest

ASKED = SentRequest("m", 3, at=10.0, timeout=1.0)


def play(ledger: RequestAccounting, story: str) -> list[Incident]:
    """Apply events to request 1, one every 0.1 s: methods of RequestAccounting, or the code in which it ends."""
    incidents: list[Incident | None] = []
    for step, word in enumerate(story.split()):
        now = 10.0 + step / 10
        if word == "begin":
            ledger.begin("1", ASKED)
        elif word == "heard":
            ledger.heard("1", now)
        elif word == "cancel":
            ledger.cancel("1")
        elif word == "forget":
            ledger.forget("1")
        elif word == "lost":
            ledger.lost()
        elif word == "lost_on_channel":
            ledger.lost_on_channel("1")
        elif word == "channel_ended":
            ledger.channel_ended()
        elif word == "refused":
            incidents.append(ledger.refused(ASKED, "UNAVAILABLE", "connection refused", now))
        else:
            incidents.append(ledger.end("1", word, "", now))
    return [each for each in incidents if each is not None]


@pytest.mark.parametrize(
    ("story", "codes", "problems"),
    [
        ("begin heard OK", [], []),
        ("begin", [], ["missing: no answer for 1", "missing: 1 requests were sent, 0 ended"]),
        ("begin OK", [], ["missing: 1 ended in OK without an answer"]),
        ("begin heard heard OK", [], ["duplicate: 2 answers for 1"]),
        ("begin heard OK heard", [], ["duplicate: 2 answers for 1, which had ended"]),
        ("begin heard OK OK", [], ["duplicate: 1 ended again"]),
        ("heard", [], ["unasked: an answer for 1"]),
        ("begin heard WRONG", [WRONG], []),
        # The connection was lost.
        ("begin UNAVAILABLE", ["UNAVAILABLE"], []),
        # The client's timeout ended the request: it must still be answered, unless the connection is lost since then.
        ("begin DEADLINE_EXCEEDED", ["DEADLINE_EXCEEDED"], ["missing: no answer for 1"]),
        ("begin DEADLINE_EXCEEDED heard", ["DEADLINE_EXCEEDED"], []),
        ("begin DEADLINE_EXCEEDED lost", ["DEADLINE_EXCEEDED"], []),
        ("refused", ["UNAVAILABLE"], []),
        ("begin forget", [], []),
        ("begin forget begin heard OK", [], []),
        ("begin cancel heard CANCELLED", ["CANCELLED"], []),
        # On a direct channel, the client itself ends a cancelled request. An answer follows unless it is lost.
        ("begin cancel CANCELLED heard", ["CANCELLED"], []),
        ("begin cancel CANCELLED", ["CANCELLED"], ["missing: no answer for 1"]),
        ("begin cancel CANCELLED lost_on_channel", ["CANCELLED"], []),
        ("begin cancel CANCELLED channel_ended", ["CANCELLED"], []),
        ("begin lost_on_channel", [], ["missing: no answer for 1", "missing: 1 requests were sent, 0 ended"]),
    ],
)
def test_reports_mismatched_answers(story: str, codes: Sequence[str], problems: Sequence[str]) -> None:
    ledger = RequestAccounting()
    incidents = play(ledger, story)
    assert [each.code for each in incidents] == codes
    ledger.close()
    assert len(ledger.problems) == len(problems), ledger.problems
    assert [said for said, text in zip(ledger.problems, problems, strict=True) if not said.startswith(text)] == []


def test_counts_and_incident_of_request() -> None:
    ledger = RequestAccounting()
    assert play(ledger, "begin cancel heard WRONG") == [
        Incident("m", 3, WRONG, "", sent_at=10.0, ended_at=10.2, timeout=1.0, cancelled=True)
    ]
    play(ledger, "begin heard OK")
    assert (ledger.sent, ledger.outcomes, ledger.unheard) == (2, {OK: 1, WRONG: 1}, 0)
    play(ledger, "begin DEADLINE_EXCEEDED")
    assert ledger.unheard == 1
