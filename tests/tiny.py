"""A tiny corpus in memory: the core's stages on literal documents, without files, Ray or torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cache, cached_property
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq

from ingest.encoding import Text
from ingest.lanes import Lanes, Step, steps
from ingest.packing import PositionIds, Strategy
from ingest.plan import Cursors, Plan, PlanSource
from ingest.position import Position
from ingest.slab import Slab
from ingest.spec import UnitSpec, WindowSettings, WindowSpec
from ingest.window import Window, make_window

EOS = 256


def encode(texts: list[str]) -> tuple[np.ndarray, np.ndarray]:
    """Bytes as token ids, each document followed by EOS."""
    ids = [[*text.encode(), EOS] for text in texts]
    return np.array([i for each in ids for i in each], np.uint16), np.array([len(each) for each in ids], np.int64)


Corpus = Sequence[Sequence[Sequence[str | None]]]  # [source][unit][document]


@dataclass(frozen=True)
class Tiny:
    """A run over literal documents."""

    corpus: Corpus
    sequence_length: int = 8
    lanes: int = 2
    global_batch_rows: int = 2
    seed: int = 0
    shuffle: bool = True
    window_tokens: int = 40
    num_epochs: int | None = 1
    total_tokens: int | None = None
    weights: tuple[int, ...] | None = None
    strategy: Strategy = "concat"
    position_ids: PositionIds = "restart"

    @property
    def settings(self) -> WindowSettings:
        columns = ("text",) * len(self.corpus)
        how = (self.sequence_length, self.lanes, self.seed, self.shuffle, EOS, "uint16", self.strategy)
        return WindowSettings(columns, *how, position_ids=self.position_ids)

    @cached_property
    def plan(self) -> Plan:
        sizes = [np.array([max(1, sum(len(d or "") + 1 for d in unit)) for unit in units]) for units in self.corpus]
        weights = self.weights or tuple(int(size.sum()) for size in sizes)
        sources = [PlanSource(f"source{i}", size, weights[i]) for i, size in enumerate(sizes)]
        return Plan(
            sources, seed=self.seed, shuffle=self.shuffle, window_tokens=self.window_tokens, num_epochs=self.num_epochs
        )

    @property
    def fingerprint(self) -> dict:
        names = {source.name: {"index": i} for i, source in enumerate(self.plan.sources)}
        return {
            "sources": names,
            "packing": {"sequence_length": self.sequence_length},
            "global_batch_rows": self.global_batch_rows,
        }

    def read(self, unit: UnitSpec, column: str) -> Iterator[pa.Array]:
        yield pa.array(list(self.corpus[unit.source][unit.row_group]), pa.large_string())

    def windows(self, cursors: Cursors | None = None) -> Iterator[Window]:
        for planned in self.plan.windows(cursors or self.plan.start()):
            units = tuple(UnitSpec(u.source, u.epoch, f"source{u.source}", u.number, 0, "") for u in planned.units)
            yield make_window(WindowSpec(planned.cursors, units, planned.last), self.settings, Text(encode), self.read)

    def slabs(self, cursors: Cursors, rank: int = 0, world_size: int = 1) -> Iterator[Slab]:
        for window in self.windows(cursors):
            yield Slab.from_table(list(window.slabs(world_size))[rank].to_table())

    def start(self) -> Position:
        return Position.start(self.plan.start(), self.fingerprint)

    def steps(self, start: Position | None = None, rank: int = 0, world_size: int = 1) -> Iterator[Step]:
        start = start or self.start()
        lanes = Lanes(self.lanes, self.global_batch_rows, rank, world_size)
        yield from steps(self.slabs(start.cursors, rank, world_size), start, lanes, EOS, self.total_tokens)


def documents_of(window: Window) -> list[tuple[int, int, int, int]]:
    """(source, epoch, unit, row) of every document that begins in the window's rows."""
    whole = {}
    for piece, length in zip(window.piece_document_L.tolist(), window.rows.lengths_L.tolist(), strict=True):
        whole[piece] = whole.get(piece, 0) + length
    documents = window.documents
    units = window.spec.units
    return [
        (
            units[documents.unit_D[d]].source,
            units[documents.unit_D[d]].epoch,
            units[documents.unit_D[d]].row_group,
            int(documents.row_D[d]),
        )
        for d in sorted(whole)
    ]


@cache
def tokenizer_json() -> str:
    """A byte-level BPE of 280 tokens, trained in a few milliseconds, that ends documents with <|endoftext|>."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    built = Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=280,
        special_tokens=["<|endoftext|>", "<|pad|>"],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    built.train_from_iterator(["the cat sat on the mat", "the hat that the cat had"] * 3, trainer)
    return built.to_str()


def write_parquet(path: Path, texts: Sequence[str | None], column: str = "text", **options: object) -> Path:
    """Writes one document a row."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table({column: pa.array(texts, pa.string())}), path, **options)
    return path
