"""What crosses from the actors to the ranks: what one rank gets of one window, as one Arrow row.

Legend of the dimension letters, used as suffixes of array names everywhere:

    B  rows of a batch          T  tokens of a row         X  T + 1: a row with its look-ahead token
    R  rows of a window         S  lanes                   N  rows of one lane of a window, R / S
    D  documents                L  pieces of documents     K  sources
    O  lane offsets, N + 1

Every slab carries, for its whole window, prefix sums by lane offset *over all lanes*: entry o counts the first o rows
of every lane. That is why any rank can write a position without talking to another one.

The digest is the sum modulo 2^64 of one XXH3-64 hash a row, over the row's token bytes (little endian, look-ahead and
padding included) and its piece lengths (int32; where positions continue, each with its start behind it), seeded with
(window << 32) + row. So it depends on content and address, and not on who consumed the row. Source: xxHash
specification, XXH3_64bits_withSeed (stable since 0.8.0).

Cost: header and prefix sums are about 48 + 8 K bytes a lane row; encoding and decoding copy nothing.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import xxhash

from ingest.account import NOTHING, Account
from ingest.errors import OrderError
from ingest.plan import Cursors, SourceCursor

DIGEST_MODULUS = 2**64

IntArray = npt.NDArray[np.int64]
TokenArray = npt.NDArray[np.uint16] | npt.NDArray[np.uint32]


@dataclass(frozen=True, eq=False)
class Rows:
    """Packed rows as they travel.

    Args:
        tokens_BX: uint16 or uint32 [B, T + 1]; padding holds the eos token.
        lengths_L: int32 [L], tokens of each piece, look-ahead included; rows one after another.
        counts_B: int32 [B], pieces of each row.
        starts_L: int32 [L], where in its document each piece begins, if positions continue; else int32 [0], which
            slices, joins and hashes to nothing.
    """

    tokens_BX: TokenArray
    lengths_L: npt.NDArray[np.int32]
    counts_B: npt.NDArray[np.int32]
    starts_L: npt.NDArray[np.int32] = field(default_factory=lambda: np.zeros(0, np.int32))

    def __len__(self) -> int:
        return len(self.counts_B)

    @cached_property
    def _ends(self) -> IntArray:
        return np.concatenate(([0], np.cumsum(self.counts_B, dtype=np.int64)))

    def slice(self, start: int, stop: int) -> Rows:
        """Rows ``start`` to ``stop``, without a copy of the tokens."""
        pieces = slice(self._ends[start], self._ends[stop])
        counts_B = self.counts_B[start:stop]
        return Rows(self.tokens_BX[start:stop], self.lengths_L[pieces], counts_B, self.starts_L[pieces])

    @staticmethod
    def concatenate(parts: Sequence[Rows]) -> Rows:
        """The rows of all parts, in order; a single part as it is."""
        if len(parts) == 1:
            return parts[0]
        return Rows(
            np.concatenate([part.tokens_BX for part in parts]),
            np.concatenate([part.lengths_L for part in parts]),
            np.concatenate([part.counts_B for part in parts]),
            np.concatenate([part.starts_L for part in parts]),
        )

    @staticmethod
    def padding(count: int, width: int, dtype: npt.DTypeLike, eos_id: int) -> Rows:
        """``count`` rows of ``width`` = T + 1 tokens that hold no document."""
        nothing = np.zeros(0, np.int32)
        return Rows(np.full((count, width), eos_id, dtype), nothing, np.zeros(count, np.int32))


@dataclass(frozen=True)
class Counts:
    """What a stretch of the stream holds.

    Args:
        tokens: input tokens, padding apart.
        documents: documents that begin in it.
        documents_cut: those of them that go on in another row.
        skipped: documents without text (null or empty), counted at the end of their window.
        source_tokens: tokens of each source, in the config's order.
        digest: sum of row hashes modulo 2^64.
        account: what became of the rows that were read, booked at the end of their window.
    """

    tokens: int
    documents: int
    documents_cut: int
    skipped: int
    source_tokens: tuple[int, ...]
    digest: int
    account: Account = NOTHING

    @classmethod
    def zero(cls, num_sources: int) -> Counts:
        """Nothing consumed."""
        return cls(0, 0, 0, 0, (0,) * num_sources, 0)

    def __add__(self, other: Counts) -> Counts:
        pairs = zip(self.source_tokens, other.source_tokens, strict=True)
        return Counts(
            self.tokens + other.tokens,
            self.documents + other.documents,
            self.documents_cut + other.documents_cut,
            self.skipped + other.skipped,
            tuple(mine + theirs for mine, theirs in pairs),
            (self.digest + other.digest) % DIGEST_MODULUS,
            self.account + other.account,
        )


@dataclass(frozen=True, eq=False)
class Prefix:
    """Prefix sums over all lanes of a window, by lane offset.

    Args:
        tokens_O, documents_O, documents_cut_O: int64 [N + 1].
        source_tokens_OK: int64 [N + 1, K].
        digest_O: uint64 [N + 1].
        skipped: documents of the window without text.
        account: of the window.
    """

    tokens_O: IntArray
    documents_O: IntArray
    documents_cut_O: IntArray
    source_tokens_OK: IntArray
    digest_O: npt.NDArray[np.uint64]
    skipped: int
    account: Account = NOTHING

    @property
    def rows(self) -> int:
        """N, rows of each lane."""
        return len(self.tokens_O) - 1

    def at(self, offset: int) -> Counts:
        """What the first ``offset`` rows of every lane hold; at the window's end, its account and skips too."""
        return Counts(
            int(self.tokens_O[offset]),
            int(self.documents_O[offset]),
            int(self.documents_cut_O[offset]),
            self.skipped if offset == self.rows else 0,
            tuple(self.source_tokens_OK[offset].tolist()),
            int(self.digest_O[offset]),
            self.account if offset == self.rows else NOTHING,
        )


@dataclass(frozen=True, eq=False)
class Slab:
    """The rows of one rank's lanes of one window, lane by lane, with the plan's cursors before that window.

    ``last`` marks the slabs of the window that ends the stream. A window without a usable document has slabs of 0 rows.
    ``spent`` is what the whole window cost its actor, see ``metrics.py``; it is no part of the content.
    """

    cursors: Cursors
    rank: int
    world_size: int
    last: bool
    rows: Rows
    prefix: Prefix
    spent: Mapping[str, float] = field(default_factory=dict)

    @property
    def window(self) -> int:
        """Ordinal of the slab's window."""
        return self.cursors.window

    def lane_rows(self, place: int, start: int, stop: int) -> Rows:
        """Rows ``start`` to ``stop`` of the rank's lane number ``place``, counted from 0."""
        first = place * self.prefix.rows
        return self.rows.slice(first + start, first + stop)

    def to_table(self) -> pa.Table:
        """One Arrow row; the arrays' memory is shared, not copied."""
        prefix, rows = self.prefix, self.rows
        header = {
            "cursors": cursors_to_json(self.cursors),
            "rank": [self.rank, self.world_size],
            "last": self.last,
            "skipped": prefix.skipped,
            "account": prefix.account.to_plain(_numbers(prefix)),
            "tokens": [rows.tokens_BX.dtype.str, *rows.tokens_BX.shape],
            "sources": prefix.source_tokens_OK.shape[1],
            "spent": dict(self.spent),
        }
        columns = [pa.array([json.dumps(header)], pa.string())]
        columns += [_binary(array) for array in _arrays(rows, prefix)]
        return pa.Table.from_arrays(columns, schema=SCHEMA)

    @classmethod
    def from_table(cls, table: pa.Table) -> Slab:
        """Reads one Arrow row; the arrays are read-only views into its memory.

        Raises:
            OrderError: the table is not exactly one slab, as when Ray split or merged a block.
        """
        if table.num_rows != 1 or not table.schema.equals(SCHEMA):
            names = table.schema.names
            raise OrderError(f"a block must be one slab; got {table.num_rows} rows of {names}: report this Ray version")
        header = json.loads(table["header"][0].as_py())
        dtype, num_rows, width = header["tokens"]
        tokens, lengths, counts, starts, *sums = (_view(table[name]) for name in _NAMES)
        tokens_O, documents_O, documents_cut_O, sources, digest_O = sums
        pieces = (array.view(np.int32) for array in (lengths, counts, starts))
        prefix = Prefix(
            tokens_O.view(np.int64),
            documents_O.view(np.int64),
            documents_cut_O.view(np.int64),
            sources.view(np.int64).reshape(-1, header["sources"]),
            digest_O.view(np.uint64),
            header["skipped"],
        )
        return cls(
            cursors=cursors_from_json(header["cursors"]),
            rank=header["rank"][0],
            world_size=header["rank"][1],
            last=header["last"],
            rows=Rows(tokens.view(dtype).reshape(num_rows, width), *pieces),
            prefix=replace(prefix, account=Account.from_plain(header["account"], _numbers(prefix))),
            spent=header["spent"],
        )


_NAMES = (
    *("tokens", "lengths", "counts", "starts", "prefix_tokens", "prefix_documents", "prefix_documents_cut"),
    *("prefix_source_tokens", "prefix_digest"),
)
SCHEMA = pa.schema([("header", pa.string()), *((name, pa.large_binary()) for name in _NAMES)])


def _numbers(prefix: Prefix) -> list[str]:
    """Names of the sources where nothing but their number is known."""
    return [str(number) for number in range(prefix.source_tokens_OK.shape[1])]


def _arrays(rows: Rows, prefix: Prefix) -> Iterable[npt.NDArray[Any]]:
    """In the order of ``_NAMES``."""
    sums = (prefix.tokens_O, prefix.documents_O, prefix.documents_cut_O, prefix.source_tokens_OK, prefix.digest_O)
    return (rows.tokens_BX, rows.lengths_L, rows.counts_B, rows.starts_L, *sums)


def _binary(array: npt.NDArray[Any]) -> pa.Array:
    offsets = pa.py_buffer(np.array([0, array.nbytes], np.int64))
    return pa.Array.from_buffers(pa.large_binary(), 1, [None, offsets, pa.py_buffer(np.ascontiguousarray(array))])


def _view(column: pa.ChunkedArray) -> npt.NDArray[np.uint8]:
    """The bytes of the only value, in place: a scalar's ``as_buffer`` would be a copy."""
    array = column.combine_chunks() if column.num_chunks != 1 else column.chunk(0)
    _, offsets, data = array.buffers()
    start, stop = np.frombuffer(offsets, np.int64)[array.offset : array.offset + 2].tolist()
    view = np.frombuffer(data, np.uint8, stop - start, start) if stop > start else np.zeros(0, np.uint8)
    view.flags.writeable = False
    return view


def row_digests(rows: Rows, windows_B: IntArray, indexes_B: IntArray) -> npt.NDArray[np.uint64]:
    """The hash of every row at its address.

    Args:
        rows: B rows.
        windows_B: int64 [B], ordinal of each row's window.
        indexes_B: int64 [B], g of each row, its index in the window.

    Returns:
        uint64 [B].
    """
    tokens, pieces = np.ascontiguousarray(rows.tokens_BX), rows.lengths_L
    if len(rows.starts_L):
        pieces = np.stack((pieces, rows.starts_L), axis=1)
    seeds, content = ((windows_B << 32) + indexes_B).tolist(), pieces.tobytes()
    bounds = (rows._ends * (len(content) // max(len(pieces), 1))).tolist()
    digests = []
    for row, seed, begin, end in zip(tokens, seeds, bounds, bounds[1:], strict=False):
        state = xxhash.xxh3_64(row, seed=seed)
        state.update(content[begin:end])
        digests.append(state.intdigest())
    return np.array(digests, np.uint64)


def cursors_to_json(cursors: Cursors) -> dict[str, Any]:
    """Plain values that ``cursors_from_json`` takes back."""
    sources = [[c.epoch, c.unit, c.served] for c in cursors.sources]
    weights = {} if cursors.weights is None else {"weights": list(cursors.weights)}
    return {"window": cursors.window, "sources": sources, **weights}


def cursors_from_json(value: dict[str, Any]) -> Cursors:
    """The inverse of ``cursors_to_json``."""
    weights = tuple(value["weights"]) if "weights" in value else None
    return Cursors(value["window"], tuple(SourceCursor(*source) for source in value["sources"]), weights)
