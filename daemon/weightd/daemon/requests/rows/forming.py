"""Which requests share a job: the one whose turn it is, and what waits and fits it."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from typing import NamedTuple

from weightd.daemon.requests.request import Company, Request
from weightd.daemon.requests.rows.cut import Cut
from weightd.daemon.requests.rows.terms import Form, RowTerms
from weightd.daemon.requests.rows.times import Kind, Times
from weightd.protocol import limits

# So many that do not fit are looked at: it is done with each job.
_MOST_MISFITS = 64

# More is not put together: by itself a request may be larger.
_MOST_BYTES = 64 * 1024 * 1024

# While others wait, what can be bounded takes no longer than this.
LONG_S = 0.1

# Of the most rows that a part may have: one with so many has all of them.
_NEARLY = 0.8


class Where(NamedTuple):
    """The seat that a job is for.

    Attributes:
        terms: what may be done with rows there.
        expected: returns the seconds that so many rows of a kind take there at most, about.
        most: requests that share the job: what waits is divided among all seats that are free.
        longest: seconds that a job of several may take, about.
    """

    terms: RowTerms
    expected: Callable[[Kind, int], float]
    most: int = limits.MAX_BATCH_ITEMS
    longest: float = math.inf


class Mates(NamedTuple):
    """What may share a job.

    Attributes:
        requests: in the order in which they are to run.
        number: how many they are.
        longest: seconds that a job of several may take, about.
    """

    requests: Iterable[Request]
    number: int
    longest: float = math.inf


class Group(NamedTuple):
    """Requests that share a job, or one that has it for itself.

    Attributes:
        requests: in the order of their rows.
        rows: of all of them.
        is_full: nothing that may still come could be added.
    """

    requests: list[Request]
    rows: int
    is_full: bool


def together(first: Request, form: Form, waiting: Iterable[Request], where: Where, now: float) -> Group:
    """Return the first request, and those that share its job.

    Each of them will be answered before its deadline, as far as it can be told how long the job runs.

    Args:
        first: whose turn it is.
        form: of that one.
        waiting: what waits, in the order in which it is to run; the first may be among that.
        where: they are to run.
        now: the clock.
    """
    terms = where.terms
    if not _shares(first, form, terms):
        return Group([first], form.rows, is_full=True)
    chosen, rows, nbytes, deadline = [first], form.rows, first.content_bytes, first.deadline
    misfits, is_full = 0, rows == terms.max_rows
    for each in waiting:
        if is_full or misfits >= _MOST_MISFITS or len(chosen) >= where.most:
            break
        if each is first:
            continue
        other = terms.form(each.description)
        if other is None or other.kind != form.kind or not _agree(first, each, terms):
            misfits += 1
            continue
        if terms.cuts(other, each.origin.far):
            misfits += 1
            continue
        total, size, least = rows + other.rows, nbytes + each.content_bytes, min(deadline, each.deadline)
        seconds = where.expected(form.kind, total)
        if (
            total > terms.max_rows
            or size > _MOST_BYTES
            or seconds > (min(LONG_S, where.longest) if misfits else where.longest)
        ):
            is_full = True
        elif now + seconds < least:
            chosen.append(each)
            rows, nbytes, deadline = total, size, least
            is_full = rows == terms.max_rows
        else:
            misfits += 1
    return Group(chosen, rows, is_full)


def rows_of_part(cut: Cut, device: str, devices: Sequence[str], times: Times, longest: float) -> int:
    """Return how many rows of a request that runs in parts the next part has at most.

    All devices are to be ready at once, and while others wait no part is so long that these wait for long.

    Args:
        cut: the request, of which rows are left.
        device: of the seat that is free.
        devices: of all seats that run it, this one among them.
        times: of earlier jobs.
        longest: seconds that it may take, about.
    """
    terms, form = cut.terms, cut.form
    share = math.ceil(form.rows * times.share(device, devices, form.kind, form.rows))
    most = min(terms.part_rows, cut.next_rows)
    # A few rows that were left would be a job of their own: shares are never known that well.
    rows = most if share >= _NEARLY * most else share
    if longest < math.inf:
        rows = times.most(device, form.kind, rows, longest)
    return max((size for size in terms.sizes if size <= rows), default=min(terms.sizes, default=rows))


def _shares(request: Request, form: Form, terms: RowTerms) -> bool:
    """Whether the request may share a job: nothing speaks against it, and it would not fill more than one alone."""
    may = terms.merges and form.is_all_rows and form.rows <= terms.max_rows and request.company is Company.ANY
    return may and not terms.keeps_apart(request.origin.far)


def _agree(one: Request, other: Request, terms: RowTerms) -> bool:
    if terms.keeps_apart(other.origin.far):
        return False
    return other.company is Company.ANY and (terms.is_exact or one.origin.far == other.origin.far)
