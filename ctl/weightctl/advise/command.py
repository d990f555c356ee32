"""`weightctl advise`: arguments, measurement sequence and output."""

from __future__ import annotations

import argparse
import json
import os
from typing import List, Sequence, Union

from weightctl import exit_codes, request_inputs, target
from weightctl.advise import recommend
from weightctl.advise.measure import (
    AdvisePlan,
    BatchTest,
    BatchTestResult,
    FileRows,
    Measurement,
    SyntheticRows,
    batching_refusal,
)
from weightctl.command import Command, CommandError, Connect
from weightctl.text import clean
from weightd_protocol.errors import FailedPrecondition
from weightd_protocol.messages.inference import TensorSignature

_DESCRIPTION = f"""\
Measures whether it pays that the daemon runs requests of a model together (batching), and whether
each row then has the bits that it has alone; says what to write into the configuration.

  weightctl advise resnet50
  weightctl advise bert --shape ids=1,128 --shape mask=1,128
  weightctl advise bert --inputs sentences.npz

It asks the running daemon for 1, 2, 4, 8, 16 and 32 rows, as one request each, in turn. Only one is
under way at any time: so nothing is merged with anything, if nobody else asks. What others ask
meanwhile makes the figures worse: measure when it is quiet, on the host and the device that count.

MS is the median as a client sees it. What of that is the way to the worker and back stays as it is;
an estimate of it is below the table. GAIN is how many times the rows/s of single rows the model
makes without it, LATENCY how many times as long a request takes. BITS tells how many rows differ
from the answer to the same row alone; lines below name the outputs, and by how much. That bits are
equal is tested, not proved, for it hangs on values too. At 1 row the same row was asked for twice.

Rows are made up: floats around 0, of which each third row is 100 times as large and each third a
hundredth; integers 0 or 1, for they may be indices; floats 0 or 1, too, where the model refuses
others; --inputs gives others. Dimensions behind the first are those that the model is known to
run on, those of its self-test, unless --shape says otherwise; where none are known, free ones
are 1.

Advised is the smallest number of rows with {recommend.ENOUGH_OF_BEST:.0%} of the best gain, among those at which
requests that wait are answered sooner together than one after another; and nothing, where {recommend.GAIN_ROWS} rows
bring less than {recommend.MIN_GAIN} times the rows/s. Then advise makes the test that
the daemon makes when it loads the model, for up to 10 s: what the daemon would refuse is not
advised. Where that needs the rows of --inputs, the advice names the file (selftest).

Where rows differ, but by less than {recommend.ROUNDING_TOLERANCE:.0%} of their largest value,
merging takes exact = false. Where they differ by more, the model makes one answer of all its rows,
and must not be merged.

It ends when --different rows have been compared, each in each size, but not before --seconds.
Ctrl-C shows what has been measured.

--json prints one object, times in microseconds: {{"model_name", "overhead_us", "sizes": [{{"rows",
"answers", "p50_us", "rows_per_s", "gain", "bits_equal", "rows_compared", "rows_unequal", "split",
"refused", "outputs"}}], "advice": {{"verdict", "max_rows", "sizes", "reason", "configuration"}}}}; the
verdict is "merge", "inexact" or "no".

Exit status: 0 measured, whatever is advised, 1 the model cannot be asked, or its requests have no
rows, 64 it does not take such a shape, 66 --inputs cannot be used, 130 Ctrl-C."""

_MAX_DISTINCT_ROWS = 1_000_000


class NoRows(CommandError):
    """Requests of the model have no rows, so they cannot be batched."""

    code = FailedPrecondition.code


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    target.add_arguments(parser, "; the first one is the number of rows")
    parser.add_argument(
        "--rows",
        default=(1, 2, 4, 8, 16, 32),
        type=request_inputs.parse_counts,
        metavar="N,N",
        help="how many rows a request has, beside 1 (default: 1,2,4,8,16,32)",
    )
    parser.add_argument(
        "--inputs", metavar="FILE.npz", help="take the rows of these arrays in turn, one array for each input by name"
    )
    parser.add_argument(
        "--different",
        default=200,
        type=_parse_distinct_rows,
        metavar="N",
        help="how many different rows to compare at least; fewer find less (default: %(default)d)",
    )
    parser.add_argument(
        "--seconds",
        default=5.0,
        type=request_inputs.parse_seconds,
        metavar="S",
        help="how long to measure at least (default: %(default)g)",
    )


def _parse_distinct_rows(argument: str) -> int:
    try:
        number = int(argument)
    except ValueError:
        number = 0
    if not 1 <= number <= _MAX_DISTINCT_ROWS:
        raise argparse.ArgumentTypeError(f"expected a number from 1 to {_MAX_DISTINCT_ROWS:,}, got {argument!r}")
    return number


def _run(options: argparse.Namespace, connect: Connect) -> int:
    name: str = options.model
    if options.inputs and options.shape:
        options.fail("expected --inputs or --shape, not both: the arrays have a shape")
    sizes = sorted({1, *options.rows})
    with target.open_target(connect, name) as model:
        source = _make_source(options, model, sizes[-1])
        batch_test = BatchTest(model.client, name, model.inputs)
        measurement = Measurement(model.client, AdvisePlan(name, sizes, source, options.different, options.seconds))
        status = exit_codes.OK
        test_result = BatchTestResult("its test was not made, for this was ended before")
        try:
            with model.explain_errors():
                if isinstance(source, SyntheticRows):
                    source.kind = batch_test.find_kind(source, sizes[-1])
                measurement.run(lambda done, all_: model.show_progress(f"{done:,} rows of {max(done, all_):,}"))
                test_result = _verify(model, batch_test, source, measurement.results)
        except KeyboardInterrupt:
            status = exit_codes.INTERRUPTED
    results = measurement.results
    if results[0].answers:
        recommendation = recommend.recommend(results)
        if recommendation.verdict is recommend.Verdict.MERGE:
            sample_path = os.path.abspath(options.inputs) if test_result.needs_sample else ""  # noqa: PTH100 - does not resolve links
            recommendation = (
                recommend.not_batched(test_result.note)
                if test_result.note
                else recommendation._replace(sample=sample_path)
            )
        show = recommend.as_json(name, results, recommendation)
        print(
            json.dumps(show) if options.json else recommend.render(name, results, recommendation, source.distinct_rows)
        )
    return status


def _verify(
    model: target.BenchTarget,
    batch_test: BatchTest,
    source: Union[SyntheticRows, FileRows],
    results: Sequence[recommend.BatchSizeResult],
) -> BatchTestResult:
    """Run the daemon's batching test if the recommendation is to batch; return its result."""
    recommendation = recommend.recommend(results)
    if recommendation.verdict is not recommend.Verdict.MERGE:
        return BatchTestResult("")
    note = batching_refusal(model.client.status(), model.name)
    if note:
        return BatchTestResult(note)
    model.show_progress("makes the test that the daemon makes when it loads the model")
    return batch_test.verify(source, recommendation.max_rows, recommendation.sizes)


def _make_source(options: argparse.Namespace, model: target.BenchTarget, rows: int) -> Union[SyntheticRows, FileRows]:
    inputs = model.inputs
    fixed: List[TensorSignature] = [each for each in inputs if not request_inputs.has_free_rows(each)]
    if fixed or not inputs:
        raise NoRows(
            f"{clean(options.model)}: its requests have no rows that could be merged, for the first dimension of each "
            f"input must be free: {request_inputs.describe(fixed)}"
        )
    if options.inputs:
        return FileRows(options.inputs, inputs)
    return SyntheticRows(request_inputs.specify(inputs, options.shape, rows, model.example))


COMMAND = Command("tell whether a model gains by running requests together", _DESCRIPTION, _add_arguments, _run)
