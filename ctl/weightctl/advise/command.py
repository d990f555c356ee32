"""The command `weightctl advise`: its arguments, the sequence of the measurement, and its output."""

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

_DESCRIPTION = """\
Measures whether batching speeds up a model, and whether a row's output stays
the same, bit for bit, in a batch. Prints the configuration. See weightctl(1).

  weightctl advise bert --shape ids=1,128 --shape mask=1,128

Exit status: 0 measured, 1 failed, 64 bad shape, 66 bad --inputs, 130 Ctrl-C."""

_MANUAL = f"""\
  weightctl advise resnet50
  weightctl advise bert --inputs sentences.npz

advise sends requests of 1, 2, 4, 8, 16 and 32 rows to the running daemon, one request at a time,
so that the daemon cannot merge them with each other. Requests of other clients distort the
results: measure on the target host and device while they are idle.

The table has these columns. MS is the median latency at the client. GAIN is the speed-up in rows/s
compared to single rows, without the overhead, which is the estimated time between client and
worker printed below the table. LATENCY is the latency compared to single rows, as a factor. BITS
is the number of rows whose output differs from the output of the same row alone; lines below the
table name the outputs and the largest differences. Equal bits are tested, not proved, because they
also depend on the values. With 1 row, the output is compared with a second request for the same
row.

Without --inputs, rows are generated: floats around 0, of which every third row is 100 times as
large and every third a hundredth; integers are 0 or 1, because they may be indices; floats are 0
or 1, too, if the model rejects others. --shape sets the dimensions after the first.
Otherwise they come from the self-test, with which the model is known to run; if it has none, free
dimensions are 1.

advise recommends the smallest number of rows with at least {recommend.ENOUGH_OF_BEST:.0%} of the
best gain, among those at which waiting requests are answered sooner in a batch than one after
another. It does not recommend batching if {recommend.GAIN_ROWS} rows bring less than
{recommend.MIN_GAIN} times the rows/s. Before it recommends batching, it runs the test that the
daemon runs when it loads the model, for up to 10 s; it does not recommend what the daemon would
reject. If that test needs the rows of --inputs, the recommended configuration names the file
(selftest).

If rows differ by less than {recommend.ROUNDING_TOLERANCE:.0%} of their largest value, batching
requires exact = false. If they differ by more, the model's answer to a row depends on the other
rows, and its requests must not be batched.

The measurement ends when --different rows have been compared in each size, but not before
--seconds. Ctrl-C ends it and shows the results so far.

--json prints one object, times in microseconds: {{"model_name", "overhead_us", "sizes": [{{"rows",
"answers", "p50_us", "rows_per_s", "gain", "bits_equal", "rows_compared", "rows_unequal", "split",
"refused", "outputs"}}], "advice": {{"verdict", "max_rows", "sizes", "reason", "configuration"}}}};
the verdict is "merge", "inexact" or "no".

Exit status 0 does not depend on the recommendation. 1 means that the model does not answer, or
that its requests have no rows; 64 that the model does not accept such a shape; 66 that --inputs
cannot be used."""

_MAX_DISTINCT_ROWS = 1_000_000


class NoRows(CommandError):
    """An input of the model has no free first dimension, so requests have no rows that can be batched."""

    code = FailedPrecondition.code


def _add_arguments(parser: argparse.ArgumentParser) -> None:
    target.add_arguments(parser, ", rows first")
    parser.add_argument(
        "--rows",
        default=(1, 2, 4, 8, 16, 32),
        type=request_inputs.parse_counts,
        metavar="N,N",
        help="numbers of rows to compare with 1 (default: 1,2,...,32)",
    )
    parser.add_argument("--inputs", metavar="FILE.npz", help="file with one array per input, used row by row")
    parser.add_argument(
        "--different",
        default=200,
        type=_parse_distinct_rows,
        metavar="N",
        help="minimum number of distinct rows (default: %(default)d)",
    )
    parser.add_argument(
        "--seconds",
        default=5.0,
        type=request_inputs.parse_seconds,
        metavar="S",
        help="minimum duration in seconds (default: %(default)g)",
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
        options.fail("expected --inputs or --shape, not both: --inputs determines the shape")
    sizes = sorted({1, *options.rows})
    with target.open_target(connect, name) as model:
        source = _make_source(options, model, sizes[-1])
        batch_test = BatchTest(model.client, name, model.inputs)
        measurement = Measurement(model.client, AdvisePlan(name, sizes, source, options.different, options.seconds))
        status = exit_codes.OK
        test_result = BatchTestResult("the daemon's test was not run, because the measurement was interrupted")
        try:
            with model.explain_errors():
                if isinstance(source, SyntheticRows):
                    source.kind = batch_test.find_kind(source, sizes[-1])
                measurement.run(lambda done, all_: model.show_progress(f"{done:,} of {max(done, all_):,} rows"))
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
    """If batching is recommended, run the test with which the daemon decides about batching. Return its result."""
    recommendation = recommend.recommend(results)
    if recommendation.verdict is not recommend.Verdict.MERGE:
        return BatchTestResult("")
    note = batching_refusal(model.client.status(), model.name)
    if note:
        return BatchTestResult(note)
    model.show_progress("running the test that the daemon runs when it loads the model")
    return batch_test.verify(source, recommendation.max_rows, recommendation.sizes)


def _make_source(options: argparse.Namespace, model: target.BenchTarget, rows: int) -> Union[SyntheticRows, FileRows]:
    inputs = model.inputs
    fixed: List[TensorSignature] = [each for each in inputs if not request_inputs.has_free_rows(each)]
    if fixed or not inputs:
        raise NoRows(
            f"{clean(options.model)}: its requests cannot be batched: expected a free first dimension of each "
            f"input, got {request_inputs.describe(fixed)}"
        )
    if options.inputs:
        return FileRows(options.inputs, inputs)
    return SyntheticRows(request_inputs.specify(inputs, options.shape, rows, model.example))


COMMAND = Command("measure whether batching speeds up a model", _DESCRIPTION, _add_arguments, _run, _MANUAL)
