from __future__ import annotations

from typing import List

import numpy as np

from weightd_worker.pagesharing import memory as hashing
from weightd_worker.pagesharing.libc import PAGE


def hashes_of(data: bytes) -> List[int]:
    memory = np.frombuffer(data, dtype=np.uint8)
    hashes = np.empty(len(data) // PAGE, dtype=np.uint64)
    hashing.hash_pages(int(memory.ctypes.data), hashes)
    return [int(value) for value in hashes]


def test_multipliers_are_fixed_odd_and_different() -> None:
    multipliers = [int(value) for value in hashing.multipliers(PAGE // 8)]
    assert multipliers[:2] == [0xE220A8397B1DCDAF, 0x6E789E6AA1B965F5]  # those of splitmix64 with seed 0, made odd
    assert all(value % 2 for value in multipliers)
    assert len(set(multipliers)) == len(multipliers)


def test_a_hash_is_the_sum_of_products() -> None:
    data = np.random.RandomState(3).bytes(3 * PAGE)
    multipliers = [int(value) for value in hashing.multipliers(PAGE // 8)]
    words = [int(value) for value in np.frombuffer(data, dtype=np.uint64)]
    pages = [words[start : start + PAGE // 8] for start in range(0, len(words), PAGE // 8)]
    expected = [sum(a * b for a, b in zip(page, multipliers)) % 2**64 for page in pages]
    count = (16 << 20) // PAGE + 3  # more than are hashed in one go
    assert hashes_of(data[:PAGE] * (count - 3) + data) == [expected[0]] * (count - 3) + expected
    assert hashes_of(bytes(PAGE)) == [hashing.ZERO_PAGE]
