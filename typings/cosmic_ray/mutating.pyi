from collections.abc import Iterable

from cosmic_ray.operators.operator import Operator
from cosmic_ray.work_item import MutationSpec, WorkResult

def mutate_and_test(mutations: Iterable[MutationSpec], test_command: str, timeout: float) -> WorkResult: ...
def mutate_code(code: str, operator: Operator, occurrence: int) -> str | None: ...
