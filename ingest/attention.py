"""What attention needs so that no token sees another document, in the form that each implementation takes.

    document_mask           torch's scaled_dot_product_attention: dense, for short rows
    block_mask              torch's FlexAttention: blocks that hold nothing are skipped
    varlen_arguments        flash_attn_varlen_func and its likes: no mask, bounds of segments
    transformers_arguments  a model of Hugging Face Transformers, whatever its implementation of attention

Guarantee: the first three see the same, padding included: a token sees itself and what precedes it in its segment, and
the padding of a row is a segment. So every token sees at least itself, and no softmax gives NaN. Nothing waits for the
device: sizes are known on the host.

Cost: the dense mask is B * T * T bytes. A block mask is made from the ends of blocks alone. Rejected:
``create_block_mask``, which fills a dense mask to throw it away (16 GiB a row of 131,072); and 4-D masks for
Transformers, which replace the sliding windows of a model that has some.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention.flex_attention import BlockMask

from ingest.batch import Batch

BLOCK = 128
"""Positions a block. Source: the default of torch.nn.attention.flex_attention.create_block_mask."""

_NO_DOCUMENT = -2


def document_mask(batch: Batch) -> Tensor:
    """Which places each place of a row sees.

    Returns:
        bool [B, 1, T, T], True where the first place sees the second; one mask for all heads.
    """
    documents_BT = batch.document_ids
    return (documents_BT.unsqueeze(2) == documents_BT.unsqueeze(1)).tril().unsqueeze(1)


def block_mask(batch: Batch) -> BlockMask:
    """The same for FlexAttention, for rows of any length and one mask for all heads.

    A document is one stretch of its row. So two blocks share one exactly if the last place of the first and the first
    place of the second do, and hold nothing else if the outer two places do.

    Source: torch.nn.attention.flex_attention.create_block_mask, whose result this is.
    """
    documents_BT = batch.document_ids
    length = documents_BT.shape[1]

    def sees(row: Tensor, _head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        return (query >= key) & (documents_BT[row, query] == documents_BT[row, key])

    blocks = functional.pad(documents_BT, (0, -length % BLOCK), value=_NO_DOCUMENT).unflatten(1, (-1, BLOCK))
    first, last = blocks[..., 0], blocks[..., -1]
    itself = torch.eye(first.shape[1], dtype=torch.bool, device=first.device)
    earlier = torch.ones_like(itself).tril(-1)
    shared = (first.unsqueeze(2) == last.unsqueeze(1)) & earlier
    whole = (last.unsqueeze(2) == first.unsqueeze(1)) & earlier
    partial = (shared & ~whole) | itself
    return BlockMask.from_kv_blocks(
        *_chosen(partial), *_chosen(whole), BLOCK_SIZE=BLOCK, mask_mod=sees, seq_lengths=(length, length)
    )


def _chosen(blocks: Tensor) -> tuple[Tensor, Tensor]:
    """How many blocks of each line of a bool [B, Q, K] are chosen, and all of them, the chosen ones first."""
    chosen = blocks.unsqueeze(1).int()
    return chosen.sum(-1, dtype=torch.int32), chosen.argsort(dim=-1, descending=True, stable=True).int()


def varlen_arguments(batch: Batch) -> dict[str, Any]:
    """The keywords of ``flash_attn_varlen_func``, for queries, keys and values of [B * T, heads, features].

    Source: flash_attn.flash_attn_interface, flash-attn 2.
    """
    bounds, longest = batch.cu_seqlens, batch.max_seqlen
    return {
        "cu_seqlens_q": bounds,
        "cu_seqlens_k": bounds,
        "max_seqlen_q": longest,
        "max_seqlen_k": longest,
        "causal": True,
    }


def transformers_arguments(batch: Batch) -> dict[str, Any]:
    """The keywords of a causal language model of Transformers, from ids to labels.

    Eager, SDPA and FlexAttention get their mask from ``position_ids``, which go up by one within a document and jump
    where the next one begins; also where positions continue, as no packing lays a rest behind a piece that ends at the
    position before it. Flash attention takes the bounds. There must be no ``attention_mask`` and no cache, or the
    documents go unseen. The labels are those of a batch, already shifted: ``labels`` asks for a loss, and
    ``shift_labels`` keeps the model from shifting them once more. The loss is a mean over the labels of this batch,
    which is NaN where all is padding; give ``num_items_in_batch``, the labels of the global batch, to sum them and
    divide by that.

    Source: transformers 5, masking_utils.py (packed sequences), modeling_flash_attention_utils.py, loss_utils.py.
    """
    bounds, longest = batch.cu_seqlens, batch.max_seqlen
    return {
        "input_ids": batch.input_ids,
        "position_ids": batch.position_ids,
        "labels": batch.labels,
        "shift_labels": batch.labels,
        "use_cache": False,
        "cu_seq_lens_q": bounds,
        "cu_seq_lens_k": bounds,
        "max_length_q": longest,
        "max_length_k": longest,
    }
