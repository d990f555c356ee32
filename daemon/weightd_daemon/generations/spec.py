"""What a generation is to be: what it loads, and what the configuration says about it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import NamedTuple

from weightd_common.safe_open import OPERATOR, Grant
from weightd_daemon.config.model import ModelConfig
from weightd_daemon.config.selftest import AUTO, SelfTestSetting
from weightd_protocol.messages.worker_common import SelfTestCases

# How long a driver takes to clean up after a killed process is not known. What has no room at all is told after that.
_MEMORY_TIMEOUT_S = 30.0


@dataclass(frozen=True)
class SelfTestSpec:
    """What a holder is told of the self-test before it builds; the fields are those of `Build`.

    Attributes:
        should_search: whether it looks for one.
        cases: what worked before, or was configured.
        failed_cases: what did not.
    """

    should_search: bool = True
    cases: SelfTestCases = ()
    failed_cases: SelfTestCases = ()

    @classmethod
    def from_config(cls, key: SelfTestSetting) -> SelfTestSpec:
        """Return what the configuration says."""
        return cls(should_search=key == AUTO, cases=(key,) if isinstance(key, dict) else ())


class RowTestSpec(NamedTuple):
    """What is to be found out of the model's rows; the fields are those of `Build`.

    Attributes:
        max_rows: the most of one predict; 1: nothing is.
        sizes: the only ones that it may have; none: any.
        is_exact: whether rows together are to be tested against each alone.
    """

    max_rows: int = 1
    sizes: tuple[int, ...] = ()
    is_exact: bool = True

    @classmethod
    def from_config(cls, config: ModelConfig) -> RowTestSpec:
        """Return what the configuration says: what is used only where it is exact is tested."""
        tables = (config.batching.max_rows > 1, config.batching.exact), (config.split.part_rows > 0, config.split.exact)
        used = [exact for is_used, exact in tables if is_used]
        return cls(config.max_batch_rows, config.batching.sizes, any(used) or not used)

    def covers(self, other: RowTestSpec) -> bool:
        """Whether what is found out by this is enough for the other."""
        tested = self.max_rows >= other.max_rows and self.sizes == other.sizes and (self.is_exact or not other.is_exact)
        return tested or other.max_rows == 1


NO_ROW_TEST = RowTestSpec()

# Of `RankGroupSpec.reply_rank`: each rank answers with its share of the rows, in the order of ranks.
CONCAT = -1


@dataclass(frozen=True)
class RankGroupSpec:
    """What the configuration says of a generation whose processes live and die together.

    Attributes:
        size: how many ranks there are.
        devices: of each rank, in their order.
        connect_timeout: seconds in which all have to come to the first predict.
        reply_rank: the rank that answers, or `CONCAT`.
        has_broker: whether ranks find each other by a process of its own.
        is_sliced: whether the model is cut over ranks; else the one process serves several models.
        model_count: how many models it serves.
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
    """What the model's configuration says about a generation.

    Attributes:
        workers: how many take requests on each device.
        load_timeout: seconds that one build or attach may take, and, if it is more than a minute, what comes before.
        spares: how many more are attached there, and take requests only when another one is lost.
        is_sharing: whether the weights are shared; else every worker loads its own.
        can_outlive_holder: whether workers may go on where the engine says that its memory dies with the holder, but
            the driver counts references.
        predict_timeout: seconds that one predict may take.
        selftest: what is known of it where no generation has found out more.
        can_fork_from_holder: whether workers may be forked of a holder that has built: then none starts before that.
        devices: on which its workers are; none: where the generation is.
        row_test: what its holder is to find out of rows.
        rank_group: of processes that live and die together; None: of a holder and its workers.
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

    @classmethod
    def from_config(cls, config: ModelConfig, devices: tuple[str, ...]) -> GenerationSpec:
        """Return what the configuration says of a generation on these devices."""
        return cls(
            config.workers,
            config.load_timeout,
            spares=config.spares or 0,
            is_sharing=config.sharing != "off",
            can_outlive_holder=config.holder_loss == "frozen",
            predict_timeout=config.predict_timeout,
            selftest=SelfTestSpec.from_config(config.selftest),
            can_fork_from_holder=config.can_fork_from_holder,
            devices=devices,
            row_test=RowTestSpec.from_config(config),
        )

    @property
    def memory_timeout_s(self) -> float:
        """Seconds for which a start that finds no room on a card is tried again: what has ended gives it back late."""
        return min(_MEMORY_TIMEOUT_S, self.load_timeout)

    def without_sharing(self) -> GenerationSpec:
        """Return the same without sharing."""
        return replace(self, is_sharing=False, can_fork_from_holder=False)

    def without_forking(self) -> GenerationSpec:
        """Return the same with workers that build for themselves."""
        return replace(self, can_fork_from_holder=False)

    @property
    def processes_per_device(self) -> int:
        """How many processes attach on each device."""
        return self.workers + self.spares

    @property
    def process_count(self) -> int:
        """How many workers and spares attach, or how many ranks there are."""
        if self.rank_group is not None:
            return self.rank_group.size
        return self.processes_per_device * max(1, len(self.devices))


@dataclass(frozen=True)
class ModelSource:
    """What a generation loads.

    Attributes:
        path: the model file.
        weights: a file of arrays that every process loads over the model's weights, or "".
        number: tells sources of one path apart: the file may have been replaced. All generations of one source load
            the same bytes.
        grant: the right by which `path` was named.
        weights_grant: the right by which `weights` was named.
    """

    path: str
    weights: str = ""
    number: int = 1
    grant: Grant = OPERATOR
    weights_grant: Grant = OPERATOR

    def __str__(self) -> str:
        return f"{self.path} with {self.weights}" if self.weights else self.path
