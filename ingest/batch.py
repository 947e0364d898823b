"""The tensors of one step, made from the narrow form in which rows travel.

Owns the step from ids and segment lengths to what a model takes. Nothing here loops over rows or tokens in Python.

Segments are laid out on the host, where their number is known. Ids travel to the device as 16 or 32 bits and widen
there: a step moves 2 or 4 bytes a token instead of 32. Building all four tensors on the host and moving them was
rejected for those bytes.

The four [B, T] tensors agree with ``cu_seqlens``: each document of a row, and the padding of a row, is one segment of
the flattened batch, so attention by mask and attention by segment lengths see the same documents.

Cost: 2 to 3 ms of one CPU core for 131,072 tokens (64 rows of 2,048), to split it 0.1 ms a micro-batch.

A segment is a piece of slab.py or the padding of a row. One letter beyond those there: M is L + B, each row's pieces
and then its padding, which may be empty.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from ingest.errors import ConfigError
from ingest.pieces import NO_LABEL_BIT
from ingest.position import Position
from ingest.slab import Rows, TokenArray

IGNORE_INDEX = -100
"""A label that no loss counts. Source: the default of torch.nn.functional.cross_entropy."""

_TENSORS = ("input_ids", "labels", "position_ids", "document_ids", "cu_seqlens")


@dataclass(frozen=True, eq=False)
class HostLayout:
    """The segments of a batch on the host, so that no size has to be asked of the device.

    Args:
        cu_seqlens: int32 [D + 1], as in ``Batch``.
        row_tokens: int64 [B], tokens of each row that are not padding.
        max_seqlen: as in ``Batch``.
        num_tokens: as in ``Batch``.
    """

    cu_seqlens: Tensor
    row_tokens: Tensor
    max_seqlen: int
    num_tokens: int

    @classmethod
    def of(cls, cu_seqlens: Tensor, row_tokens: Tensor) -> HostLayout:
        """The layout with its two figures worked out."""
        return cls(cu_seqlens, row_tokens, int(cu_seqlens.diff().max()), int(row_tokens.sum()))


@dataclass(frozen=True, eq=False)
class Staged:
    """Rows as they travel to a device.

    Args:
        narrow_BX: int16 or int32 [B, T + 1], ids with the bits of the unsigned type they came in.
        lengths_M: int64 [M], segments of all rows, padding included; they sum to B * (T + 1).
        documents_M: int64 [M], the number of each segment within its row, -1 for padding.
        origins_M: int64 [M], the column in which each segment has position 0; below 0 where a document goes on.
        bits: mask that undoes the sign of an id; in 32 bits the sign says that a token is no label.
        host: what stays behind.
    """

    narrow_BX: Tensor
    lengths_M: Tensor
    documents_M: Tensor
    origins_M: Tensor
    bits: int
    host: HostLayout

    @classmethod
    def of(cls, rows: Rows) -> Staged:
        """Lays the segments of rows out on the host; see ``Batch.from_rows``."""
        lengths_M, documents_M, origins_M, host = _lay_out(rows)
        narrow_BX, bits = _narrow(rows.tokens_BX)
        return cls(narrow_BX, lengths_M, documents_M, origins_M, bits, host)

    def tensors(self) -> tuple[Tensor, ...]:
        """What travels: ids, lengths, documents, origins and ``cu_seqlens``."""
        return self.narrow_BX, self.lengths_M, self.documents_M, self.origins_M, self.host.cu_seqlens


@dataclass(frozen=True, eq=False)
class Batch:
    """One step of one rank, or a micro-batch of it.

    Args:
        input_ids: int64 [B, T]; at padding whatever the row holds there, which is the eos id.
        labels: int64 [B, T]; the next token of the same document, -100 at a document's last token, at padding, and if
            the next token is masked, as those of prompts are. A document that goes on in the next row has its next
            token at T - 1 here: a cut costs no label.
        position_ids: int64 [B, T]; offset within the document's piece, or with ``packing.position_ids: continue``
            within the document; 0 at padding.
        document_ids: int64 [B, T]; 0, 1, 2, ... along a row, -1 at padding.
        cu_seqlens: int32 [D + 1]; where segments begin in the B * T flattened positions, then B * T. The padding of a
            row is a segment of its own.
        position: the ``ingest.Position`` after the whole step, in a micro-batch too.
        host: the same segments on the host.
    """

    input_ids: Tensor
    labels: Tensor
    position_ids: Tensor
    document_ids: Tensor
    cu_seqlens: Tensor
    position: Position
    host: HostLayout = field(repr=False)

    @property
    def max_seqlen(self) -> int:
        """Tokens of the longest segment, padding segments included, as variable-length attention kernels want it."""
        return self.host.max_seqlen

    @property
    def num_tokens(self) -> int:
        """Input tokens that are not padding."""
        return self.host.num_tokens

    @classmethod
    def from_rows(cls, rows: Rows, position: Position, device: torch.device | None = None) -> Batch:
        """Builds the tensors of at least one row.

        Args:
            rows: the segments of each cover a prefix of its T + 1 positions, and none is empty.
            position: where the stream stands after them; kept as it is.
            device: where the tensors are made; None is the CPU.

        Raises:
            AssertionError: the rows break this contract.
        """
        staged = Staged.of(rows)
        return cls.widened(staged, [tensor.to(device) for tensor in staged.tensors()], position)

    @classmethod
    def widened(cls, staged: Staged, narrow: Sequence[Tensor], position: Position) -> Batch:
        """Builds the tensors from what travelled, where it travelled to, without waiting for that device.

        Args:
            staged: the rows on the host.
            narrow: ``staged.tensors()`` on the device.
            position: where the stream stands after them.
        """
        narrow_BX, lengths_M, documents_M, origins_M, cu_seqlens = narrow
        num_rows, num_columns = narrow_BX.shape
        segments_BX = torch.repeat_interleave(lengths_M, output_size=narrow_BX.numel()).view(num_rows, num_columns)
        segments_BT = segments_BX[:, :-1]
        documents_BT = documents_M[segments_BT]
        padding_BT = documents_BT < 0
        last_BT = segments_BT != segments_BX[:, 1:]
        columns_T = torch.arange(num_columns - 1, device=narrow_BX.device)
        no_label_BT = last_BT | padding_BT
        bits = staged.bits
        if bits == NO_LABEL_BIT - 1:  # the sign of 16 bits belongs to the id
            no_label_BT |= narrow_BX[:, 1:] < 0
        return cls(
            input_ids=narrow_BX[:, :-1].long().bitwise_and_(bits),
            labels=narrow_BX[:, 1:].long().bitwise_and_(bits).masked_fill_(no_label_BT, IGNORE_INDEX),
            position_ids=(columns_T - origins_M[segments_BT]).masked_fill_(padding_BT, 0),
            document_ids=documents_BT,
            cu_seqlens=cu_seqlens,
            position=position,
            host=staged.host,
        )

    def split(self, rows: int) -> Iterator[Batch]:
        """Micro-batches in row order, as views of this batch, without waiting for the device.

        Args:
            rows: rows a micro-batch; must divide the rows of this batch.

        Raises:
            ConfigError: it does not divide them.
        """
        num_rows = len(self.input_ids)
        if rows < 1 or num_rows % rows:
            fitting = ", ".join(str(size) for size in range(1, num_rows + 1) if num_rows % size == 0)
            rule = "rows of a micro-batch must divide the rows of the batch"
            raise ConfigError(f"{rule}; got {rows} and {num_rows}: split into one of {fitting}")
        return (self._part(slice(first, first + rows)) for first in range(0, num_rows, rows))

    def tensors(self) -> list[Tensor]:
        """Those on the device."""
        return [getattr(self, name) for name in _TENSORS]

    def to(self, device: torch.device | str, non_blocking: bool = False) -> Batch:
        """The batch with its tensors on ``device``; ``non_blocking`` matters from pinned memory only."""
        return self._map(lambda tensor: tensor.to(device, non_blocking=non_blocking))

    def pin_memory(self) -> Batch:
        """The batch with its tensors in page-locked memory.

        Raises:
            RuntimeError: this torch has no accelerator that could read from it.
        """
        return self._map(Tensor.pin_memory)

    def _map(self, change: Callable[[Tensor], Tensor]) -> Batch:
        changed: dict[str, Any] = {name: change(getattr(self, name)) for name in _TENSORS}
        return dataclasses.replace(self, **changed)

    def _part(self, part: slice) -> Batch:
        num_columns = self.input_ids.shape[1]
        bounds = torch.tensor([part.start, part.stop], dtype=torch.int32) * num_columns
        begin, end = torch.searchsorted(self.host.cu_seqlens, bounds).tolist()
        cut, offset = slice(begin, end + 1), part.start * num_columns
        return Batch(
            input_ids=self.input_ids[part],
            labels=self.labels[part],
            position_ids=self.position_ids[part],
            document_ids=self.document_ids[part],
            cu_seqlens=self.cu_seqlens[cut] - offset,
            position=self.position,
            host=HostLayout.of(self.host.cu_seqlens[cut] - offset, self.host.row_tokens[part]),
        )


def _lay_out(rows: Rows) -> tuple[Tensor, Tensor, Tensor, HostLayout]:
    """Adds to each row a segment for its padding.

    Returns:
        int64 [M], lengths that sum to B * X; int64 [M], the number of each within its row, -1 for padding; int64 [M],
        the column of its position 0; the layout.

    With T = 3: lengths 2, 1, 4 and counts 2, 1 give lengths 2, 1, 1, 4, 0, documents 0, 1, -1, 0, -1, origins
    0, 2, 3, 0, 0, cu_seqlens 0, 2, 3, 6 (the fourth position of each row is the look-ahead, which is no input).
    """
    lengths_L, counts_B, num_columns = (
        _tensor(rows.lengths_L).long(),
        _tensor(rows.counts_B).long(),
        rows.tokens_BX.shape[1],
    )
    num_segments, num_rows = len(lengths_L), len(counts_B)
    rows_B = torch.arange(num_rows)
    assert int(counts_B.sum()) == num_segments, "counts_B must sum to the number of segments"
    rows_L = torch.repeat_interleave(rows_B, counts_B, output_size=num_segments)
    totals_B = torch.zeros(num_rows, dtype=torch.int64).index_add_(0, rows_L, lengths_L)
    assert bool((lengths_L > 0).all() & (totals_B <= num_columns).all()), "segments must fit into their row"

    padding_B = counts_B.cumsum(0) + rows_B
    slots_L = torch.arange(num_segments) + rows_L
    lengths_M = torch.empty(num_segments + num_rows, dtype=torch.int64)
    lengths_M[slots_L], lengths_M[padding_B] = lengths_L, num_columns - totals_B
    documents_M = torch.full_like(lengths_M, -1)
    documents_M[slots_L] = slots_L - (padding_B - counts_B)[rows_L]
    origins_M = (lengths_M.cumsum(0) - lengths_M) % num_columns
    if len(rows.starts_L):
        assert len(rows.starts_L) == num_segments, "starts_L must be one a segment, or none"
        origins_M[slots_L] -= _tensor(rows.starts_L)

    last = num_columns - 1
    rows_M = torch.repeat_interleave(rows_B, counts_B + 1, output_size=num_segments + num_rows)
    ends_M = rows_M * last + (lengths_M.cumsum(0) - rows_M * num_columns).clamp_(max=last)
    cu_seqlens = torch.unique_consecutive(torch.cat([torch.zeros(1, dtype=torch.int64), ends_M])).int()
    return lengths_M, documents_M, origins_M, HostLayout.of(cu_seqlens, totals_B.clamp_(max=last))


def _narrow(tokens_BX: TokenArray) -> tuple[Tensor, int]:
    """Ids as signed integers of the same width, and the bits that undo the sign: torch has few unsigned operations."""
    assert tokens_BX.dtype in (np.uint16, np.uint32), f"ids must be uint16 or uint32; got {tokens_BX.dtype}"
    short = tokens_BX.dtype == np.uint16
    return _tensor(tokens_BX.view(np.int16 if short else np.int32)), 0xFFFF if short else NO_LABEL_BIT - 1


def _tensor(array: npt.NDArray[Any]) -> Tensor:
    """The array as a tensor; a copy where it is read-only, as views of Arrow buffers are, which torch does not know."""
    return torch.from_numpy(array if array.flags.writeable else array.copy())
