"""The test that the daemon makes of a model when it loads it, made by requests: what it would refuse is not advised."""

from __future__ import annotations

from typing import Any, NamedTuple, Optional, Sequence, Tuple, Union

from weightctl.advise.source import FileRows, SyntheticRows
from weightd.client import Client
from weightd_common.rowtest import comparison
from weightd_common.rowtest.bits import Arrays, NotBatchable
from weightd_common.rowtest.comparison import TestedModel
from weightd_common.rowtest.rows import RowKind
from weightd_protocol.errors import Internal, InvalidArgument
from weightd_protocol.messages.inference import TensorSignature
from weightd_protocol.messages.status import StatusResponse


class BatchTestResult(NamedTuple):
    """What the test has shown.

    Attributes:
        note: why the daemon would not batch requests; "" if it would.
        needs_sample: the daemon needs the rows of the file for that (key `selftest`).
    """

    note: str
    needs_sample: bool = False


class BatchTest:
    """Tests a model as the daemon does.

    Args:
        client: asks.
        model: its name.
        inputs: of the model.
    """

    def __init__(self, client: Client, model: str, inputs: Sequence[TensorSignature]) -> None:
        self._client = client
        self._model = model
        self._inputs = inputs

    def find_kind(self, source: SyntheticRows, rows: int) -> RowKind:
        """Return the kind of made-up rows that the model accepts, in requests of up to so many rows."""
        return comparison.compare(self._row_test_subject(source, None, rows, ()), exact=False).kind

    def verify(self, source: Union[SyntheticRows, FileRows], rows: int, sizes: Tuple[int, ...]) -> BatchTestResult:
        """Test the model with made-up rows, as the daemon does; if they do not do, with those of the file.

        Args:
            source: of the rows that were measured.
            rows: the largest number of rows that is to be in one execution.
            sizes: the only numbers of rows that the model takes; none: any.
        """
        try:
            comparison.inputs_with_rows(self._inputs, sizes)
        except NotBatchable as error:
            return BatchTestResult(str(error))
        note = comparison.compare(self._row_test_subject(source, None, rows, sizes), exact=True).note
        if note and source.sample is not None:
            return BatchTestResult(
                comparison.compare(self._row_test_subject(source, source.sample, rows, sizes), exact=True).note, True
            )
        return BatchTestResult(note)

    def _row_test_subject(
        self, source: Union[SyntheticRows, FileRows], sample: Optional[Arrays], rows: int, sizes: Tuple[int, ...]
    ) -> TestedModel:
        return TestedModel(self._infer, self._inputs, source.shapes, rows, sizes, sample, (InvalidArgument, Internal))

    def _infer(self, inputs: Arrays) -> Any:
        return self._client.infer(self._model, inputs)


def batching_refusal(status: StatusResponse, model: str) -> str:
    """Return why the daemon, which is configured to batch requests of a model, does not; "" if it does, or is not."""
    for each in status.models:
        if each.name == model:
            return next((generation.batching_note for generation in each.generations if generation.max_rows == 1), "")
    return ""
