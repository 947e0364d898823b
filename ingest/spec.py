"""What an actor is told: which units make a window, and the settings that decide its content. Plain values."""

from __future__ import annotations

from dataclasses import dataclass

from ingest.columns import Columns
from ingest.packing import PositionIds, Strategy
from ingest.plan import Cursors


@dataclass(frozen=True)
class UnitSpec:
    """All that an actor needs to read one unit, so that actors hold no manifest."""

    source: int
    epoch: int
    path: str
    row_group: int
    size_bytes: int
    footer_hash: str
    packed: bool = False
    number: int = 0  # of the unit in its source's manifest


@dataclass(frozen=True)
class WindowSpec:
    """All that an actor needs to make one window."""

    cursors: Cursors
    units: tuple[UnitSpec, ...]
    last: bool


@dataclass(frozen=True)
class WindowSettings:
    """The part of the config that decides a window's content.

    Args:
        columns: what each source is read from.
        sequence_length, lanes, seed, shuffle: as in the config.
        eos_id: what padding holds.
        token_dtype: ``uint16`` or ``uint32``.
        strategy, position_ids: as in the config.
        skips: of each source, whether rows that cannot be read are skipped; () for none.
    """

    columns: tuple[Columns, ...]
    sequence_length: int
    lanes: int
    seed: int
    shuffle: bool
    eos_id: int
    token_dtype: str
    strategy: Strategy = "concat"
    skips: tuple[bool, ...] = ()
    position_ids: PositionIds = "restart"

    def skips_rows(self, source: int) -> bool:
        """Whether rows of a source that cannot be read are skipped."""
        return bool(self.skips) and self.skips[source]
