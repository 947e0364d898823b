"""Slabs to steps: which rows a rank trains on at each step, and the position after it. No Ray, no torch.

Rank r of W serves the lanes congruent to r modulo W. A step takes the next G / S rows of each lane, so all ranks move
in lockstep through the same windows, and every global batch holds the same rows at every world size. Each slab is
checked against the one that must come next: a splitter that loses, repeats or misroutes one is caught before a batch
is made.

Cost: one copy of the rows of a step, and about 50 µs.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from ingest.errors import ConfigError, DataError, OrderError
from ingest.plan import Cursors
from ingest.position import Position
from ingest.slab import IntArray, Rows, Slab, row_digests


@dataclass(frozen=True)
class Lanes:
    """Which lanes a rank serves, and how many rows of each make a step.

    Args:
        lanes: S.
        global_batch_rows: G, a multiple of S.
        rank: r, from 0 to ``world_size`` - 1.
        world_size: W, a divisor of S.

    Raises:
        ConfigError: W does not divide S, or the rank is out of range.
    """

    lanes: int
    global_batch_rows: int
    rank: int = 0
    world_size: int = 1

    def __post_init__(self) -> None:
        require_world_size(self.world_size, self.lanes)
        if not 0 <= self.rank < self.world_size:
            raise ConfigError(
                f"rank must be 0 to world_size - 1; got {self.rank} of {self.world_size}: number the ranks from 0"
            )

    @property
    def served(self) -> range:
        """The lanes of this rank."""
        return range(self.rank, self.lanes, self.world_size)

    @property
    def lane_rows(self) -> int:
        """Rows of each lane in a step."""
        return self.global_batch_rows // self.lanes


def require_world_size(world_size: int, lanes: int) -> None:
    """Refuses a world size that does not divide the lanes.

    Raises:
        ConfigError: names the world sizes that would do and the lanes that would do.
    """
    if world_size < 1 or lanes % world_size:
        fitting = [size for size in range(1, lanes + 1) if lanes % size == 0]
        near = sorted(sorted(fitting, key=lambda size: abs(size - world_size))[:6])
        more = lanes + (-lanes % world_size) if world_size >= 1 else lanes
        raise ConfigError(
            f"world_size must divide lanes; got {world_size} and {lanes}: "
            f"train on {' or '.join(map(str, near))} workers, or start a new run with lanes: {more} and "
            "global_batch_rows a multiple of it"
        )


class Step(NamedTuple):
    """One step of one rank.

    ``rows`` holds G / W rows, lane by lane. ``window_B`` and ``index_B`` (int64 [G / W]) are each row's address, -1
    for the padding rows that fill the last step. ``position`` is that after the step.
    """

    rows: Rows
    window_B: IntArray
    index_B: IntArray
    position: Position


def steps(
    slabs: Iterator[Slab],
    start: Position,
    lanes: Lanes,
    eos_id: int,
    total_tokens: int | None,
    check: Callable[[Position], object] = lambda _: None,
) -> Iterator[Step]:
    """Turns a rank's slabs into its steps.

    Args:
        slabs: the rank's, one a window, from the window of ``start`` on.
        start: where to go on.
        lanes: which rank this is.
        eos_id: fills padding rows.
        total_tokens: stop after the step that reaches it; None goes on to the window marked as the last.
        check: is given every place before its step, and raises where the stream must end.

    Raises:
        OrderError: a slab is missing, repeated or misrouted.
        DataError: a whole pass over every source brought no token, so the stream would never end.
        ResumeError: the re-made window is not the one that ``start`` was taken in.
    """
    if total_tokens is not None and start.tokens >= total_tokens:
        return
    slab = _next(slabs, start.window, lanes)
    place = start.entered(slab.prefix)
    needed, parts = lanes.lane_rows, _no_parts(lanes)
    fertile = slab.cursors  # of the last window that held rows
    while True:
        taken = min(needed, slab.prefix.rows - place.offset)
        for number, part in enumerate(parts):
            part.add(slab, number, place.offset, taken, lanes)
        needed -= taken
        offset = place.offset + taken
        place = replace(place, offset=offset, counts=place.base + slab.prefix.at(offset))
        check(place)
        if needed == 0:
            place = replace(place, step=place.step + 1)
            yield _joined(parts, place)
            if total_tokens is not None and place.tokens >= total_tokens:
                return
            needed, parts = lanes.lane_rows, _no_parts(lanes)
        elif slab.last:
            if needed < lanes.lane_rows:
                for part in parts:
                    part.pad(slab, needed, eos_id)
                yield _joined(parts, replace(place, step=place.step + 1))
            return
        else:
            slab = _next(slabs, place.window + 1, lanes)
            fertile = slab.cursors if slab.prefix.rows else fertile
            if total_tokens is not None:
                _require_text(fertile, slab.cursors, place.step)
            place = replace(place, cursors=slab.cursors, base=place.counts, offset=0)


def _require_text(fertile: Cursors, now: Cursors, step: int) -> None:
    """Ends a stream that would go on for ever: no rows in a whole pass over every source."""
    passes = zip(now.sources, fertile.sources, strict=True)
    if all(source.epoch > then.epoch + 1 for source, then in passes):
        raise DataError(
            f"the sources must hold text; got none in a whole pass over each after step {step}: "
            "check path, text_column and filter"
        )


def _next(slabs: Iterator[Slab], ordinal: int, lanes: Lanes) -> Slab:
    """The rank's slab of one window, checked to be the one that must come next."""
    slab = next(slabs, None)
    due = f"rank {lanes.rank} of {lanes.world_size} must get its slab of window {ordinal} next"
    if slab is None:
        raise OrderError(f"{due}; got the end: resume from the last checkpoint")
    if (slab.window, slab.rank, slab.world_size) != (ordinal, lanes.rank, lanes.world_size):
        got = f"that of rank {slab.rank} of {slab.world_size} of window {slab.window}"
        raise OrderError(f"{due}; got {got}: resume from the last checkpoint")
    if len(slab.rows) != len(lanes.served) * slab.prefix.rows:
        raise OrderError(f"{due}; got {len(slab.rows)} rows of it, it has others: resume from the last checkpoint")
    return slab


class _Parts:
    """The rows that one lane gives to one step, gathered over windows."""

    def __init__(self) -> None:
        self.rows: list[Rows] = []
        self.windows: list[IntArray] = []
        self.indexes: list[IntArray] = []

    def add(self, slab: Slab, place: int, offset: int, count: int, lanes: Lanes) -> None:
        if count:
            self.rows.append(slab.lane_rows(place, offset, offset + count))
            self.windows.append(np.full(count, slab.window))
            self.indexes.append(np.arange(offset, offset + count) * lanes.lanes + lanes.served[place])

    def pad(self, slab: Slab, count: int, eos_id: int) -> None:
        tokens_NX = slab.rows.tokens_BX
        self.rows.append(Rows.padding(count, tokens_NX.shape[1], tokens_NX.dtype, eos_id))
        self.windows.append(np.full(count, -1))
        self.indexes.append(np.full(count, -1))


def _no_parts(lanes: Lanes) -> list[_Parts]:
    return [_Parts() for _ in lanes.served]


def _joined(parts: list[_Parts], place: Position) -> Step:
    rows = Rows.concatenate([rows for part in parts for rows in part.rows])
    windows = np.concatenate([array for part in parts for array in part.windows])
    indexes = np.concatenate([array for part in parts for array in part.indexes])
    return Step(rows, windows, indexes, place)


def step_digest(step: Step) -> int:
    """The part of the global batch's digest that this rank's rows make, recomputed from their content.

    Returns:
        0 to 2^64-1; summed over the ranks modulo 2^64 it is the difference of the positions' digests.
    """
    real = np.flatnonzero(step.window_B >= 0)
    rows = step.rows
    if len(real) < len(rows):  # the last step, where padding rows follow the real ones of each lane
        rows = Rows.concatenate([rows.slice(i, i + 1) for i in real.tolist()])
    return int(row_digests(rows, step.window_B[real], step.index_B[real]).sum(dtype=np.uint64))
