"""What makes windows in an actor: the picklable part of a run. No Ray, no torch."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from ingest.columns import Columns, Item
from ingest.encoding import Encoded, Encoder, IntArray
from ingest.metrics import Stopwatch
from ingest.packed import PackedRows, read_packed
from ingest.parquet import read_documents
from ingest.spec import UnitSpec, WindowSettings, WindowSpec
from ingest.storage import Storage
from ingest.tokenizer import Tokenizer
from ingest.window import Turn, Window, make_window


@dataclass(frozen=True, eq=False)
class Maker:
    """Makes windows of one run.

    Args:
        settings: of the run.
        tokenizer: of the run; each process builds its own encoder at the first use.
        storage: opens the files.
        encoders: one a source.
    """

    settings: WindowSettings
    tokenizer: Tokenizer
    storage: Storage
    encoders: tuple[Encoder, ...]

    def __call__(self, spec: WindowSpec, turn: Turn = lambda make: make(), watch: Stopwatch | None = None) -> Window:
        """Makes one window; see ``make_window``.

        Raises:
            DataError, StorageError: with the file named.
        """
        return make_window(spec, self.settings, self._encode, self._read, self._read_packed, turn, watch)

    def _encode(self, rows: Any, unit: UnitSpec, numbers: IntArray) -> Encoded:
        return self.encoders[unit.source](rows, unit, numbers)

    def _read(self, unit: UnitSpec, columns: Columns) -> Iterator[Item]:
        expect = (unit.size_bytes, unit.footer_hash)
        skip = self.settings.skips_rows(unit.source)
        return read_documents(self.storage, unit.path, unit.row_group, columns, expect, skip=skip)

    def _read_packed(self, unit: UnitSpec) -> PackedRows:
        expect = (unit.size_bytes, unit.footer_hash)
        return read_packed(self.storage, unit.path, unit.row_group, self.settings.sequence_length, expect)
