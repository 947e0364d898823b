"""Resuming across the stages of the core: what is made again, and what is not read any more."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from itertools import islice

import pyarrow as pa
import pytest

from ingest.spec import UnitSpec
from tests.tiny import Tiny

CORPUS = [[[f"document {unit:03} {row}" for row in range(4)] for unit in range(200)]]


@dataclass(frozen=True)
class Counted(Tiny):
    """Keeps the units it reads."""

    units_read: list[int] = field(default_factory=list)

    def read(self, unit: UnitSpec, column: str) -> Iterator[pa.Array]:
        self.units_read.append(unit.row_group)
        return super().read(unit, column)


@pytest.mark.parametrize("share", [0.5, 0.9, 0.99])
def test_a_resume_reads_what_is_left_and_the_window_it_stands_in(share: float) -> None:
    """Case 3: nothing before the position's window is read again."""
    whole = list(Counted(CORPUS, window_tokens=300).steps())
    position = whole[round(share * len(whole)) - 1].position
    resumed = Counted(CORPUS, window_tokens=300)
    rest = list(resumed.steps(position))
    assert [step.position for step in rest] == [step.position for step in whole[position.step :]]
    assert len(set(resumed.units_read)) == len(resumed.units_read)
    window_units = max(len(window.units) for window in resumed.plan.windows(resumed.plan.start()))
    assert len(resumed.units_read) <= 200 * (1 - share) + window_units + 1


def test_the_first_step_of_a_resume_needs_one_window() -> None:
    """So that at 90 % of an epoch it comes as early as that of a cold start."""
    whole = list(Counted(CORPUS, window_tokens=300).steps())
    cold, resumed = Counted(CORPUS, window_tokens=300), Counted(CORPUS, window_tokens=300)
    list(islice(cold.steps(), 1))
    list(islice(resumed.steps(whole[round(0.9 * len(whole))].position), 1))
    assert len(resumed.units_read) <= len(cold.units_read) + 1
