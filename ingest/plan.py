"""The order of units: which row groups make up which window, as pure arithmetic.

A unit is one row group. The units of a source are permuted afresh each epoch from (seed, source, epoch); sources are
interleaved by weight, counted in estimated tokens; a window closes at its target size and at the end of an epoch. The
whole state is a ``Cursors``: a few integers a source, so a resume costs one permutation and never a replay.

Guarantees: within an epoch of a source every unit is in exactly one window; the same inputs give the same windows on
every machine and library version (see ``permutation``). Cost: about 3 µs a unit, and one permutation an epoch and
source (0.1 s for a million units).

The epoch that closes a window is that of the *leading* source, the one whose passes take longest at the given weights,
or the largest of those, since by default all take equally long; with one source it is simply the source's. Smaller
sources turn over inside windows, so a tiny source that repeats often cannot shred the windows of a large one.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

PLAN_VERSION = 1  # in the fingerprint; raise it with any change of order, and say so in CHANGELOG.md

# Streams of random numbers, so that no two uses share their keys.
_UNITS, _DOCUMENTS, _ROWS, _TRANSFORMS = 1, 2, 3, 4


def permutation(count: int, seed: int, stream: int, *key: int) -> npt.NDArray[np.int64]:
    """A permutation of ``range(count)`` that stays the same for ever.

    Raw 64-bit words of PCG64, seeded by numpy's SeedSequence, are sorted stably. Both are covered by numpy's
    compatibility promise, while ``Generator.permutation`` is not.

    Args:
        count: number of items.
        seed: the run's seed.
        stream: which use this is; one of the module's constants.
        key: what else the permutation depends on, each from 0 to 2^64-1.

    Returns:
        int64 [count].

    Source: numpy documentation, "Compatibility policy" (NEP 19) and "PCG64.random_raw".
    """
    words = np.random.PCG64(np.random.SeedSequence([seed, stream, *key])).random_raw(count)
    return np.argsort(words, kind="stable")


def document_order(count: int, seed: int, window: int) -> npt.NDArray[np.int64]:
    """The order in which a window packs its documents: int64 [count]."""
    return permutation(count, seed, _DOCUMENTS, window)


def row_order(count: int, seed: int, window: int) -> npt.NDArray[np.int64]:
    """The order in which a window hands out its packed rows: int64 [count]."""
    return permutation(count, seed, _ROWS, window)


def document_words(
    seed: int, source: str, epoch: int, unit: int, rows: npt.NDArray[np.int64]
) -> npt.NDArray[np.uint64]:
    """Random words for the documents of a unit, the same for ever, however the rows are batched.

    Args:
        seed: the run's seed.
        source: name of the source.
        epoch: pass over it.
        unit: number of the unit in its manifest.
        rows: int64 [D], ascending rows in the unit.

    Returns:
        uint64 [D, 4]: raw words 4 r to 4 r + 3 of the unit's PCG64 for row r.
    """
    if not len(rows):
        return np.zeros((0, 4), np.uint64)
    name = xxhash.xxh3_64_intdigest(source.encode())
    bits = np.random.PCG64(np.random.SeedSequence([seed, _TRANSFORMS, name, epoch, unit]))
    first = int(rows[0])
    bits.advance(4 * first)
    return bits.random_raw(4 * (int(rows[-1]) - first + 1)).reshape(-1, 4)[rows - first]


class Unit(NamedTuple):
    """One row group in one pass over its source."""

    source: int  # index of the source in the config
    epoch: int  # pass over that source
    number: int  # index of the unit in the source's manifest


@dataclass(frozen=True)
class SourceCursor:
    """Where one source stands: the next unit is number ``unit`` of the permutation of ``epoch``.

    ``served`` is the source's virtual time, tokens over weight, above that of the source served least.
    """

    epoch: int
    unit: int
    served: int


@dataclass(frozen=True)
class Cursors:
    """Where the plan stands before window number ``window``.

    ``weights`` are those of a window that was begun before the plan's came to hold; None is the plan's.
    """

    window: int
    sources: tuple[SourceCursor, ...]
    weights: tuple[int, ...] | None = None


@dataclass(frozen=True)
class WindowPlan:
    """One window: the cursors before it, its units in order, its estimated tokens, and whether it ends the stream."""

    cursors: Cursors
    units: tuple[Unit, ...]
    tokens: int
    last: bool


@dataclass(frozen=True, eq=False)
class PlanSource:
    """What the plan knows of a source.

    Args:
        name: seeds the permutations, so that adding a source leaves the others' orders alone.
        unit_tokens: int64 [units], estimated tokens of each unit, all at least 1.
        weight: share of the tokens as a positive integer; only ratios matter.
    """

    name: str
    unit_tokens: npt.NDArray[np.int64]
    weight: int

    @property
    def total_tokens(self) -> int:
        """Estimated tokens of one pass."""
        return int(self.unit_tokens.sum())


def auto_window_tokens(total_tokens: int, sequence_length: int, lanes: int) -> int:
    """The default target size of a window, from the data and the settings alone.

    Large corpora get 8 million tokens; small ones a sixteenth of the data, so that several actors have work and the
    first batch comes early. It is never less than 200 rows a lane, so that what rounding up to the lanes pads stays
    below half a percent.
    """
    return max(200 * sequence_length * lanes, min(8_000_000, total_tokens // 16))


class Plan:
    """All windows of a run, from any cursors on.

    Args:
        sources: in the config's order.
        seed: of every permutation.
        shuffle: False keeps units in the manifest's order.
        window_tokens: target size of a window in estimated tokens.
        num_epochs: passes over every source, after which it leaves the mix; None repeats for ever.
    """

    def __init__(
        self, sources: Sequence[PlanSource], *, seed: int, shuffle: bool, window_tokens: int, num_epochs: int | None
    ) -> None:
        divisor = math.gcd(*(source.weight for source in sources))  # 0.7 and 0.3 are 7 and 3: exact virtual times
        self.sources = tuple(replace(source, weight=source.weight // divisor) for source in sources)
        self.seed = seed
        self.shuffle = shuffle
        self.window_tokens = window_tokens
        self.num_epochs = num_epochs
        self._leading = max(
            range(len(self.sources)),
            key=lambda index: (
                self.sources[index].total_tokens / self.sources[index].weight,
                self.sources[index].total_tokens,
                -index,
            ),
        )
        self._orders: dict[int, tuple[int, npt.NDArray[np.int64], npt.NDArray[np.int64]]] = {}

    def start(self) -> Cursors:
        """The cursors before the first window."""
        return Cursors(0, tuple(SourceCursor(0, 0, 0) for _ in self.sources))

    def windows(self, cursors: Cursors) -> Iterator[WindowPlan]:
        """Yields the windows from ``cursors`` on; the first one starts exactly there, and has its weights.

        Args:
            cursors: from ``start``, from a window, or from a position.
        """
        while self._active(cursors):
            plan = self if cursors.weights is None else self._weighted(cursors.weights)
            window, cursors = plan._close(cursors)
            if plan is not self:
                cursors = self._converted(cursors, plan)
            yield window

    def _weighted(self, weights: Sequence[int]) -> Plan:
        sources = [replace(source, weight=weight) for source, weight in zip(self.sources, weights, strict=True)]
        return Plan(
            sources,
            seed=self.seed,
            shuffle=self.shuffle,
            window_tokens=self.window_tokens,
            num_epochs=self.num_epochs,
        )

    def _converted(self, cursors: Cursors, then: Plan) -> Cursors:
        """Cursors of a plan of other weights: virtual times are tokens over weight."""
        sources = [
            replace(cursor, served=cursor.served * old.weight // new.weight)
            for cursor, old, new in zip(cursors.sources, then.sources, self.sources, strict=True)
        ]
        return replace(cursors, sources=self._rebased(sources, self._active(cursors)))

    def _active(self, cursors: Cursors) -> list[int]:
        limit = self.num_epochs
        return [index for index, cursor in enumerate(cursors.sources) if limit is None or cursor.epoch < limit]

    def _close(self, start: Cursors) -> tuple[WindowPlan, Cursors]:
        """The window that begins at ``start``, and the cursors behind it."""
        state = list(start.sources)
        units: list[Unit] = []
        tokens = 0
        active = self._active(start)
        while active:
            source = min(active, key=lambda index: (state[index].served, index))
            unit, unit_tokens, state[source] = self._take(source, state[source])
            units.append(unit)
            tokens += unit_tokens
            epoch_ended = state[source].unit == 0
            if epoch_ended:
                active = self._active(Cursors(0, tuple(state)))
            if epoch_ended and source == self._leading:
                break
            if tokens >= self.window_tokens and not self._short_tail(state, active):
                break
        behind = Cursors(start.window + 1, self._rebased(state, active))
        return WindowPlan(start, tuple(units), tokens, last=not active), behind

    def _take(self, source: int, cursor: SourceCursor) -> tuple[Unit, int, SourceCursor]:
        order, _ = self._order(source, cursor.epoch)
        index = int(order[cursor.unit])
        tokens = int(self.sources[source].unit_tokens[index])
        served = cursor.served + (tokens << 32) // self.sources[source].weight
        following = cursor.unit + 1
        if following == len(order):
            return Unit(source, cursor.epoch, index), tokens, SourceCursor(cursor.epoch + 1, 0, served)
        return Unit(source, cursor.epoch, index), tokens, SourceCursor(cursor.epoch, following, served)

    def _short_tail(self, state: list[SourceCursor], active: list[int]) -> bool:
        """Whether what is left of the epoch is under half a window, so that this window had better take it along."""
        lead = self._leading
        if lead not in active or state[lead].unit == 0:
            return False
        _, left = self._order(lead, state[lead].epoch)
        weight = sum(self.sources[index].weight for index in active)
        return 2 * int(left[state[lead].unit]) * weight < self.window_tokens * self.sources[lead].weight

    def _order(self, source: int, epoch: int) -> tuple[npt.NDArray[np.int64], npt.NDArray[np.int64]]:
        """The source's units in the order of ``epoch``, and the tokens left before each of them."""
        cached = self._orders.get(source)
        if cached is None or cached[0] != epoch:
            unit_tokens = self.sources[source].unit_tokens
            count = len(unit_tokens)
            name = xxhash.xxh3_64_intdigest(self.sources[source].name.encode())
            order = permutation(count, self.seed, _UNITS, name, epoch) if self.shuffle else np.arange(count)
            left = np.cumsum(unit_tokens[order][::-1])[::-1]
            cached = self._orders[source] = (epoch, order, left)
        return cached[1], cached[2]

    @staticmethod
    def _rebased(state: list[SourceCursor], active: list[int]) -> tuple[SourceCursor, ...]:
        """Virtual times above the least of the active sources; only differences matter, and they stay small."""
        least = min((state[index].served for index in active), default=0)
        return tuple(replace(cursor, served=max(0, cursor.served - least)) for cursor in state)
