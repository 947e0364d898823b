"""Batches ahead of the consumer: the same tensors as without, and on a GPU no slot overwritten while it is in flight.

The tests marked ``gpu`` need torch and nothing of Ray.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from itertools import count, islice

import numpy as np
import pytest
import torch

from ingest.batch import Batch
from ingest.lanes import Step
from ingest.prefetch import Prefetcher
from ingest.slab import Rows
from tests.tiny import Tiny

CORPUS = ((("a", "bb" * 9, "ccc"), ("dddd", "e" * 30), ("f", "g" * 5)),)
cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def same(one: Batch, other: Batch) -> bool:
    pairs = zip(one.tensors(), other.tensors(), strict=True)
    return one.position == other.position and all(torch.equal(a.cpu(), b.cpu()) for a, b in pairs)


@pytest.mark.parametrize("depth", [1, 3, 50])
def test_prefetched_batches_are_those_made_one_by_one(depth: int) -> None:
    steps = list(Tiny(CORPUS).steps())
    batches = list(Prefetcher(depth=depth).batches(iter(steps)))
    assert len(batches) == len(steps)
    assert all(
        same(batch, Batch.from_rows(step.rows, step.position)) for batch, step in zip(batches, steps, strict=True)
    )


def test_an_error_of_the_steps_comes_behind_their_batches() -> None:
    def failing() -> Iterator[Step]:
        yield from islice(Tiny(CORPUS).steps(), 2)
        raise ValueError("broken")

    batches = Prefetcher().batches(failing())
    assert [batch.position.step for batch in islice(batches, 2)] == [1, 2]
    with pytest.raises(ValueError, match="broken"):
        next(batches)


def large_steps(rows: int = 32, columns: int = 4097) -> Iterator[Step]:
    """Endless steps, each filled with its own number, so that an overwritten slot shows."""
    position = Tiny(CORPUS).start()
    for number in count():
        tokens = np.full((rows, columns), number % 60_000, np.uint16)
        lengths, counts = np.full(rows, columns, np.int32), np.ones(rows, np.int32)
        yield Step(Rows(tokens, lengths, counts), np.zeros(rows, np.int64), np.arange(rows), position)


@pytest.mark.gpu
@cuda
def test_no_slot_is_filled_again_while_its_copy_is_in_flight() -> None:
    device = torch.device("cuda")
    matrix = torch.randn(4096, 4096, device=device)
    for number, batch in enumerate(islice(Prefetcher(device, depth=2).batches(large_steps()), 50)):
        for _ in range(3):
            matrix = matrix @ matrix / 64
        assert batch.input_ids.unique().tolist() == [number]
        assert batch.labels.unique().tolist() == [number]


@pytest.mark.gpu
@cuda
def test_the_copy_hides_under_compute() -> None:
    device = torch.device("cuda")
    matrix = torch.randn(8192, 8192, device=device)

    def seconds(batches: Iterator[Batch], work: bool) -> float:
        next(batches)
        torch.cuda.synchronize()
        began = time.perf_counter()
        for batch in islice(batches, 30):
            if work:
                torch.mm(matrix, matrix)
            batch.input_ids.sum()
        torch.cuda.synchronize()
        return time.perf_counter() - began

    steps = list(islice(large_steps(), 40))
    plain = (Batch.from_rows(step.rows, step.position, device) for step in steps)
    blocking = seconds(plain, work=True)
    hidden = seconds(Prefetcher(device).batches(iter(steps)), work=True)
    began = time.perf_counter()
    for _ in range(30):
        torch.mm(matrix, matrix)
    torch.cuda.synchronize()
    compute = time.perf_counter() - began
    print(f"compute alone {compute:.3f} s, prefetched {hidden:.3f} s, blocking copy {blocking:.3f} s")
    assert hidden < blocking
