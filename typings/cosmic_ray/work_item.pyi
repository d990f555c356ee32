from enum import Enum
from pathlib import Path

class WorkerOutcome(str, Enum):
    NORMAL = ...
    EXCEPTION = ...

class TestOutcome(str, Enum):
    SURVIVED = ...
    KILLED = ...

class WorkResult:
    worker_outcome: WorkerOutcome
    output: str | None
    test_outcome: TestOutcome | None
    diff: str | None

class MutationSpec:
    module_path: Path
    operator_name: str
    occurrence: int
    start_pos: tuple[int, int]
    end_pos: tuple[int, int]
    def __init__(
        self,
        module_path: Path,
        operator_name: str,
        occurrence: int,
        start_pos: tuple[int, int],
        end_pos: tuple[int, int],
    ) -> None: ...
