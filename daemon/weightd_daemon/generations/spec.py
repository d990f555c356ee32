"""The specification of a generation: the model files that it loads, and its configuration."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from weightd_common.safe_open import OPERATOR, Grant
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.config.selftest import AUTO, SelfTestSetting
from weightd_protocol.messages.worker import Built
from weightd_protocol.messages.worker_common import SelfTestCases

# Seconds for which a start that finds no free memory on the card is retried. It is unknown how long a driver takes to
# release the memory of a killed process.
_MEMORY_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class SelfTestSpec:
    """The self-test settings for a holder. All fields except `built` are sent to the holder in `Build`.

    Attributes:
        should_search: whether the holder searches for inputs on which the model can run.
        cases: the inputs that worked for an earlier holder, or the configured inputs.
        digest: the digest of an earlier holder's answers to `cases`; "" if unknown.
        failed_cases: the inputs that failed for earlier holders.
        built: the report of an earlier holder that shared no weights; workers then load without a holder. None if a
            holder is needed.
    """

    should_search: bool = True
    cases: SelfTestCases = ()
    failed_cases: SelfTestCases = ()
    digest: str = ""
    built: Built | None = None

    @classmethod
    def from_config(cls, key: SelfTestSetting) -> SelfTestSpec:
        """Return the settings for the value of the configuration key `selftest`."""
        return cls(should_search=key == AUTO, cases=(key,) if isinstance(key, dict) else ())


class RowTestSpec(NamedTuple):
    """The row test, in which a holder checks whether rows of several requests can run in one predict.

    The fields are sent to the holder in `Build`.

    Attributes:
        max_rows: the maximum number of rows of one predict; 1 disables the test.
        sizes: the only numbers of rows that a predict may have; empty if any number is allowed.
        is_exact: whether the results of rows in one predict are compared with the results of each row alone.
    """

    max_rows: int = 1
    sizes: tuple[int, ...] = ()
    is_exact: bool = True

    @classmethod
    def from_config(cls, config: ModelConfig) -> RowTestSpec:
        """Return the row test for a model, which is exact if batching or splitting is configured to be exact."""
        tables = (config.batching.max_rows > 1, config.batching.exact), (config.split.part_rows > 0, config.split.exact)
        used = [exact for is_used, exact in tables if is_used]
        return cls(config.max_batch_rows, config.batching.sizes, any(used) or not used)

    def covers(self, other: RowTestSpec) -> bool:
        """Return whether a result of this row test makes the row test `other` unnecessary."""
        tested = self.max_rows >= other.max_rows and self.sizes == other.sizes and (self.is_exact or not other.is_exact)
        return tested or other.max_rows == 1


NO_ROW_TEST = RowTestSpec()

# Value of `RankGroupSpec.reply_rank`: each rank returns its share of the rows. The reply has all rows, in the order of
# the ranks.
CONCAT = -1


@dataclass(frozen=True)
class RankGroupSpec:
    """The configuration of a rank group.

    Attributes:
        size: the number of ranks.
        devices: the device of each rank, in the order of the ranks.
        connect_timeout: the seconds within which all ranks must have connected to each other in the first predict.
        reply_rank: the rank whose results are sent to the client, or `CONCAT`.
        has_broker: whether the ranks find each other through a broker process.
        is_sliced: whether the model is divided among the ranks; otherwise a single process serves several models.
        model_count: the number of models that the group serves.
    """

    size: int
    devices: tuple[str, ...]
    connect_timeout: float
    reply_rank: int
    has_broker: bool = False
    is_sliced: bool = True
    model_count: int = 1


@dataclass(frozen=True)
class GenerationSpec:
    """The configuration of a generation.

    Attributes:
        workers: the minimum number of workers on each device that serve requests.
        load_timeout: the seconds that one build or attach may take. If it is more than a minute, a process also has
            this time until its HELLO message.
        spares: the number of further attached workers on each device, which replace lost workers.
        is_sharing: whether the weights are shared; otherwise every worker loads its own weights.
        can_outlive_holder: whether workers may continue after the loss of the holder, although the engine then declares
            the shared memory invalid. This is safe if the driver keeps the memory as long as a worker uses it.
        predict_timeout: the seconds that one predict may take.
        selftest: the configured self-test settings, which apply until a generation has found a self-test.
        can_fork_from_holder: whether workers may be forked from the holder; then no worker starts before the build.
        devices: the devices of the workers; empty for the generation's device.
        row_test: the row test that the holder runs.
        rank_group: the configuration of the rank group; None for a holder and its workers.
        max_workers: the maximum number of workers on each device that serve requests; 0 for the value of `workers`.
    """

    workers: int
    load_timeout: float
    spares: int = 0
    is_sharing: bool = True
    can_outlive_holder: bool = False
    predict_timeout: float = 60.0
    selftest: SelfTestSpec = SelfTestSpec()
    can_fork_from_holder: bool = False
    devices: tuple[str, ...] = ()
    row_test: RowTestSpec = NO_ROW_TEST
    rank_group: RankGroupSpec | None = None
    max_workers: int = 0

    @classmethod
    def from_config(cls, config: ModelConfig, devices: tuple[str, ...]) -> GenerationSpec:
        """Return the configuration of a model's generation on these devices."""
        return cls(
            config.min_workers,
            config.load_timeout,
            spares=config.spares or 0,
            is_sharing=config.sharing != "off",
            can_outlive_holder=config.holder_loss == "frozen",
            predict_timeout=config.predict_timeout,
            selftest=SelfTestSpec.from_config(config.selftest),
            can_fork_from_holder=config.can_fork_from_holder,
            devices=devices,
            row_test=RowTestSpec.from_config(config),
            max_workers=config.max_workers,
        )

    @property
    def memory_timeout_s(self) -> float:
        """The seconds for which a start that finds no free memory on a card is retried."""
        return min(_MEMORY_TIMEOUT_S, self.load_timeout)

    def without_sharing(self) -> GenerationSpec:
        """Return this configuration without shared weights."""
        return replace(self, is_sharing=False, can_fork_from_holder=False)

    def without_forking(self) -> GenerationSpec:
        """Return this configuration with workers that are not forked from the holder."""
        return replace(self, can_fork_from_holder=False)

    @property
    def process_count(self) -> int:
        """The maximum number of workers and spares on all devices, or the number of ranks."""
        return self.process_count_with(max(self.workers, self.max_workers))

    def process_count_with(self, workers: int) -> int:
        """Return the number of workers and spares on all devices if each device has `workers` workers.

        For a rank group, return the number of ranks.
        """
        if self.rank_group is not None:
            return self.rank_group.size
        return (workers + self.spares) * max(1, len(self.devices))

    def clamp_workers(self, workers: int) -> int:
        """Return `workers`, limited to the configured minimum and maximum number of workers on each device."""
        return max(self.workers, min(workers, self.max_workers))


@dataclass(frozen=True)
class ModelSource:
    """The files that a generation loads.

    Attributes:
        path: the path of the model file.
        weights: the path of a file of arrays that replace weights of the model in every process, or "".
        number: distinguishes sources with the same path, whose file may have been replaced. All generations with one
            source number load the same bytes.
        grant: the file permissions of the client that named `path`.
        weights_grant: the file permissions of the client that named `weights`.
    """

    path: str
    weights: str = ""
    number: int = 1
    grant: Grant = OPERATOR
    weights_grant: Grant = OPERATOR

    def __str__(self) -> str:
        return f"{self.path} with {self.weights}" if self.weights else self.path
