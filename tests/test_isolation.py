"""No token sees another document: every form that ``ingest.attention`` gives, on models that compute.

Exactness: in float64 two ways to the same sum differ by less than 1e-10 here. Models of Transformers compute norms,
angles and softmax in float32 whatever their weights are, so there it is 1e-5.
"""

import functools
from functools import partial
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.nn.attention.flex_attention import create_block_mask, flex_attention
from torch.nn.functional import cross_entropy, scaled_dot_product_attention
from transformers import AttentionInterface, AutoModelForCausalLM, LlamaConfig, MistralConfig
from transformers.masking_utils import find_packed_sequence_indices

import ingest
from ingest.batch import Batch
from ingest.best_fit import best_fit
from ingest.packing import concat
from ingest.slab import Rows
from jobs.model import GPT, GPTConfig

FIRST, OTHER, SECOND, THIRD = [1, 2, 3], [4, 5, 6], [7, 8, 9, 10, 11], [12, 13]
PADDED_TO = 12

pytestmark = pytest.mark.filterwarnings("ignore:flex_attention called without torch.compile:UserWarning")


def batch_of(*rows, length=PADDED_TO, starts=()):
    """Each row a list of documents, padded with zeros to ``length`` tokens and the look-ahead."""
    tokens = [[token for document in row for token in document] for row in rows]
    tokens = np.array([row + [0] * (length + 1 - len(row)) for row in tokens], np.uint16)
    lengths = np.array([len(document) for row in rows for document in row], np.int32)
    counts, starts = np.array([len(row) for row in rows], np.int32), np.array(starts, np.int32)
    return Batch.from_rows(Rows(tokens, lengths, counts, starts), position=None)


def by_eager_mask(batch):
    def attend(query, key, value):
        scores = query @ key.transpose(-1, -2) / query.shape[-1] ** 0.5
        return scores.masked_fill(~ingest.document_mask(batch), -torch.inf).softmax(-1) @ value

    return attend


def by_sdpa_mask(batch):
    return partial(scaled_dot_product_attention, attn_mask=ingest.document_mask(batch))


def by_block_mask(batch):
    return partial(flex_attention, block_mask=ingest.block_mask(batch))


def by_segments(batch):
    def attend(query, key, value):
        num_rows, _, length, _ = query.shape
        flat = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)]
        mixed = varlen_attention(*flat, **ingest.varlen_arguments(batch))
        return mixed.unflatten(0, (num_rows, length)).transpose(1, 2)

    return attend


def varlen_attention(query, key, value, *, cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k, causal):
    """``flash_attn_varlen_func`` in plain torch, over [places, heads, head]."""
    assert (cu_seqlens_q.dtype, cu_seqlens_k.dtype) == (torch.int32, torch.int32)
    assert (int(cu_seqlens_q[-1]), int(cu_seqlens_k[-1])) == (len(query), len(key))
    assert max_seqlen_q == max_seqlen_k == int(cu_seqlens_q.diff().max())
    parts = []
    for begin, end in pairwise(cu_seqlens_q.tolist()):
        one = [tensor[begin:end].transpose(0, 1) for tensor in (query, key, value)]
        parts.append(scaled_dot_product_attention(*one, is_causal=causal).transpose(0, 1))
    return torch.cat(parts)


def by_causal_mask_alone(_batch):
    return partial(scaled_dot_product_attention, is_causal=True)


WITH_GRADIENTS = [by_eager_mask, by_sdpa_mask, by_segments]
EVERY = [*WITH_GRADIENTS, by_block_mask]  # FlexAttention refuses gradients on a CPU


@pytest.fixture(scope="module")
def gpt():
    """In float64, with weights large enough that every input shows in the logits."""
    model = GPT(GPTConfig(vocab_size=16, num_layers=2, num_heads=2, width=16)).double()
    with torch.no_grad():
        for weights in model.parameters():
            weights.mul_(10 if weights.ndim == 2 else 1)
    return model


@torch.no_grad()
def logits_of(model, batch, attention):
    return model(batch.input_ids, batch.position_ids, attention(batch))


def gradients_of(model, loss):
    return torch.autograd.grad(loss, list(model.parameters()))


def assert_sums(whole, parts, tolerance):
    """The gradients of the whole are the sums of those of its parts, relative to the largest of each matrix."""
    for one, *others in zip(whole, *parts, strict=True):
        torch.testing.assert_close(one, sum(others), rtol=0, atol=tolerance * max(1.0, float(one.abs().max())))


@pytest.mark.parametrize("attention", EVERY)
def test_the_logits_of_document_2_do_not_move_when_document_1_changes(gpt, attention):
    one = logits_of(gpt, batch_of([FIRST, SECOND, THIRD]), attention)
    other = logits_of(gpt, batch_of([OTHER, SECOND, THIRD]), attention)
    assert torch.equal(one[:, 3:], other[:, 3:])
    assert not torch.allclose(one[:, :3], other[:, :3])


def test_with_a_causal_mask_alone_they_move(gpt):
    one = logits_of(gpt, batch_of([FIRST, SECOND, THIRD]), by_causal_mask_alone)
    other = logits_of(gpt, batch_of([OTHER, SECOND, THIRD]), by_causal_mask_alone)
    assert not torch.allclose(one[:, 3:10], other[:, 3:10])


@pytest.mark.parametrize("attention", EVERY)
def test_a_packed_document_has_the_logits_that_it_has_alone(gpt, attention):
    packed = logits_of(gpt, batch_of([FIRST, SECOND, THIRD], [THIRD]), attention)
    places = [(0, 0, FIRST), (0, 3, SECOND), (0, 8, THIRD), (1, 0, THIRD)]
    for row, begin, document in places:
        [alone] = logits_of(gpt, batch_of([document], length=len(document)), attention)
        end = begin + len(document)
        torch.testing.assert_close(packed[row, begin:end], alone, rtol=0, atol=1e-10)
    assert bool(packed.isfinite().all())


CONTINUED = {"starts": [24, 0, 48]}
"""The first document goes on in this row, and so does the third, whose rest stands behind a whole one."""


@pytest.mark.parametrize("attention", EVERY)
def test_documents_that_continue_stay_apart_and_rotary_logits_are_those_of_positions_that_restart(gpt, attention):
    one = logits_of(gpt, batch_of([FIRST, SECOND, THIRD], **CONTINUED), attention)
    other = logits_of(gpt, batch_of([OTHER, SECOND, THIRD], **CONTINUED), attention)
    assert torch.equal(one[:, 3:], other[:, 3:])
    assert not torch.allclose(one[:, :3], other[:, :3])
    restarted = logits_of(gpt, batch_of([FIRST, SECOND, THIRD]), attention)
    torch.testing.assert_close(one, restarted, rtol=0, atol=1e-3)  # angles are float32


def loss_of(model, batch, attention):
    return model(batch.input_ids, batch.position_ids, attention(batch), batch.labels)


@pytest.mark.parametrize("attention", WITH_GRADIENTS)
def test_the_gradient_of_a_packed_row_is_the_sum_over_its_documents_alone(gpt, attention):
    packed = gradients_of(gpt, loss_of(gpt, batch_of([FIRST, SECOND, THIRD], [OTHER]), attention))
    documents = (FIRST, SECOND, THIRD, OTHER)
    alone = [gradients_of(gpt, loss_of(gpt, batch_of([each], length=len(each)), attention)) for each in documents]
    assert_sums(packed, alone, 1e-10)


def test_with_a_causal_mask_alone_the_gradient_is_another(gpt):
    packed = gradients_of(gpt, loss_of(gpt, batch_of([FIRST, SECOND]), by_causal_mask_alone))
    alone = [gradients_of(gpt, loss_of(gpt, batch_of([each]), by_causal_mask_alone)) for each in (FIRST, SECOND)]
    with pytest.raises(AssertionError, match="not close"):
        assert_sums(packed, alone, 1e-10)


@st.composite
def any_batch(draw, most):
    length = draw(st.integers(2, most))
    rows = []
    for _ in range(draw(st.integers(1, 3))):
        used = draw(st.integers(0, length))
        bounds = sorted({0, used, *draw(st.sets(st.integers(0, used), max_size=8))})
        rows.append([[1 + (begin + 3 * place) % 15 for place in range(end - begin)] for begin, end in pairwise(bounds)])
    return batch_of(*rows, length=length)


@given(batch=any_batch(most=12))
@settings(max_examples=8)
def test_all_forms_give_the_same_logits_padding_included(gpt, batch):
    first, *others = (logits_of(gpt, batch, attention) for attention in EVERY)
    for other in others:
        torch.testing.assert_close(other, first, rtol=0, atol=1e-10)


@given(batch=any_batch(most=12))
@settings(max_examples=40)
def test_the_dense_mask_is_causal_within_a_segment(batch):
    bounds = torch.tensor(batch.cu_seqlens.tolist())
    flat = torch.searchsorted(bounds, torch.arange(batch.input_ids.numel()), right=True).view_as(batch.input_ids)
    length = flat.shape[1]
    slow = [
        [[[key <= query and row[key] == row[query] for key in range(length)] for query in range(length)]]
        for row in flat.tolist()
    ]
    assert ingest.document_mask(batch).tolist() == slow


def test_the_mask_of_two_documents_and_padding_is_this_one():
    assert ingest.document_mask(batch_of([[1, 2], [3]], length=5)).int().tolist() == [
        [
            [
                [1, 0, 0, 0, 0],
                [1, 1, 0, 0, 0],
                [0, 0, 1, 0, 0],
                [0, 0, 0, 1, 0],
                [0, 0, 0, 1, 1],
            ]
        ]
    ]


BLOCK_FIELDS = [
    *("kv_num_blocks", "kv_indices", "full_kv_num_blocks", "full_kv_indices"),
    *("q_num_blocks", "q_indices", "full_q_num_blocks", "full_q_indices"),
]


@given(batch=any_batch(most=700))
@settings(max_examples=25)
def test_the_block_mask_is_the_one_that_torch_makes_from_every_pair_of_places(batch):
    documents, (num_rows, length) = batch.document_ids, batch.document_ids.shape

    def sees(row, _head, query, key):
        return (query >= key) & (documents[row, query] == documents[row, key])

    slow, fast = create_block_mask(sees, num_rows, None, length, length, device="cpu"), ingest.block_mask(batch)
    assert (fast.shape, fast.BLOCK_SIZE, fast.seq_lengths) == (slow.shape, slow.BLOCK_SIZE, slow.seq_lengths)
    for name in BLOCK_FIELDS:
        one, other = getattr(fast, name), getattr(slow, name)
        assert one.dtype == other.dtype
        assert torch.equal(one, other), name


def test_a_block_mask_skips_the_blocks_of_other_documents():
    batch = batch_of([[1] * 256, [2] * 256], length=512)
    assert ingest.block_mask(batch).to_dense().int().tolist() == [
        [[[1, 0, 0, 0], [1, 1, 0, 0], [0, 0, 1, 0], [0, 0, 1, 1]]]
    ]
    assert ingest.block_mask(batch).full_kv_num_blocks.tolist() == [[[0, 1, 0, 1]]]


def test_the_arguments_of_flash_attention_are_these():
    arguments = ingest.varlen_arguments(batch_of([FIRST, SECOND], [THIRD]))
    bounds = [arguments.pop(name).tolist() for name in ("cu_seqlens_q", "cu_seqlens_k")]
    assert bounds == [[0, 3, 8, 12, 14, 24]] * 2
    assert arguments == {"max_seqlen_q": 10, "max_seqlen_k": 10, "causal": True}


def test_a_micro_batch_brings_its_own_arguments(gpt):
    whole = batch_of([FIRST, SECOND, THIRD], [THIRD, OTHER])
    for attention in EVERY:
        parts = [logits_of(gpt, micro, attention) for micro in whole.split(1)]
        torch.testing.assert_close(torch.cat(parts), logits_of(gpt, whole, attention), rtol=0, atol=1e-10)


@pytest.mark.parametrize("make", [ingest.document_mask, ingest.block_mask])
def test_a_mask_is_made_without_asking_the_device_for_a_value(make):
    """Tensors on ``meta`` have no values to be asked for."""
    assert make(batch_of([FIRST, SECOND]).to("meta")).shape == (1, 1, PADDED_TO, PADDED_TO)


@pytest.mark.parametrize("make", [ingest.varlen_arguments, ingest.transformers_arguments])
def test_the_longest_segment_is_known_on_the_host(make):
    arguments = make(batch_of([FIRST, SECOND]).to("meta"))
    assert [value for name, value in arguments.items() if name.startswith("max_")] == [5, 5]


# Models of Transformers


def segments_in_transformers(
    _module, query, key, value, attention_mask, scaling, cu_seq_lens_q, cu_seq_lens_k, max_length_q, max_length_k, **_
):
    """Stands where flash attention stands, which has no CPU kernel, and takes what it takes."""
    assert attention_mask is None
    assert scaling == query.shape[-1] ** -0.5
    num_rows, heads, length, _size = query.shape
    key, value = (tensor.repeat_interleave(heads // tensor.shape[1], 1) for tensor in (key, value))
    flat = [tensor.transpose(1, 2).flatten(0, 1) for tensor in (query, key, value)]
    bounds = {"cu_seqlens_q": cu_seq_lens_q, "cu_seqlens_k": cu_seq_lens_k}
    mixed = varlen_attention(*flat, **bounds, max_seqlen_q=max_length_q, max_seqlen_k=max_length_k, causal=True)
    return mixed.unflatten(0, (num_rows, length)), None


AttentionInterface.register("segments", segments_in_transformers)
SIZES = {
    "vocab_size": 16,
    "hidden_size": 32,
    "intermediate_size": 32,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 64,
}
IN_TRANSFORMERS = ["eager", "sdpa", "segments"]
FLEX = pytest.param("flex_attention", marks=pytest.mark.filterwarnings("ignore::DeprecationWarning"))  # torch's own


@functools.cache
def llama(implementation, config=LlamaConfig, **settings):
    torch.manual_seed(0)
    model = AutoModelForCausalLM.from_config(config(**SIZES, **settings), attn_implementation=implementation)
    with torch.no_grad():
        for weights in model.parameters():
            weights.mul_(20 if weights.ndim == 2 else 1)
    return model


@torch.no_grad()
def logits_in_transformers(model, batch):
    with torch.compiler.set_stance("force_eager"):  # or FlexAttention would be compiled
        return model(**ingest.transformers_arguments(batch)).logits


@pytest.mark.parametrize("implementation", [*IN_TRANSFORMERS, FLEX])
def test_in_a_llama_document_2_does_not_move_when_document_1_changes(implementation):
    model = llama(implementation)
    one = logits_in_transformers(model, batch_of([FIRST, SECOND, THIRD], [SECOND]))
    other = logits_in_transformers(model, batch_of([OTHER, SECOND, THIRD], [SECOND]))
    assert torch.equal(one[0, 3:10], other[0, 3:10])
    assert torch.equal(one[1], other[1])
    assert not torch.allclose(one[0, :3], other[0, :3])
    assert bool(one.isfinite().all())


@pytest.mark.parametrize("implementation", [*IN_TRANSFORMERS, FLEX])
def test_in_a_llama_documents_that_continue_stay_apart(implementation):
    model = llama(implementation)
    one = logits_in_transformers(model, batch_of([FIRST, SECOND, THIRD], **CONTINUED))
    other = logits_in_transformers(model, batch_of([OTHER, SECOND, THIRD], **CONTINUED))
    assert torch.equal(one[0, 3:10], other[0, 3:10])
    assert not torch.allclose(one[0, :3], other[0, :3])
    restarted = logits_in_transformers(model, batch_of([FIRST, SECOND, THIRD]))
    torch.testing.assert_close(one[0, :10], restarted[0, :10], rtol=0, atol=1e-2)  # all in float32


@given(
    st.lists(st.integers(1, 40), min_size=1, max_size=30),
    st.integers(2, 16),
    st.sampled_from([1, 2, 4]),
    st.sampled_from([concat, best_fit]),
)
@settings(max_examples=100)
def test_transformers_finds_the_documents_by_positions_that_continue(lengths, length, lanes, pack):
    packing = pack(np.array(lengths), length, lanes)
    tokens = np.zeros((len(packing.counts_R), length + 1), np.uint16)
    pieces = (array.astype(np.int32) for array in (packing.length_L, packing.counts_R, packing.start_L))
    batch = Batch.from_rows(Rows(tokens, *pieces), position=None)
    found = find_packed_sequence_indices(batch.position_ids)
    found = torch.zeros_like(batch.position_ids) if found is None else found
    real = batch.document_ids >= 0
    assert torch.equal(found[real], batch.document_ids[real])


@torch.no_grad()
@pytest.mark.parametrize("left_out", ["position_ids", "use_cache"])
def test_in_a_llama_it_moves_without_positions_or_with_a_cache(left_out):
    model = llama("sdpa")
    one, other = (ingest.transformers_arguments(batch_of([first, SECOND, THIRD])) for first in (FIRST, OTHER))
    del one[left_out], other[left_out]
    assert not torch.allclose(model(**one).logits[:, 3:10], model(**other).logits[:, 3:10])


@pytest.mark.parametrize("implementation", IN_TRANSFORMERS)
def test_in_a_llama_the_gradient_of_a_packed_row_is_the_sum_over_its_documents_alone(implementation):
    model = llama(implementation)

    def gradients(batch):
        logits = model(**ingest.transformers_arguments(batch)).logits
        return gradients_of(model, cross_entropy(logits.flatten(0, 1), batch.labels.flatten(), reduction="sum"))

    alone = [gradients(batch_of([each], length=len(each))) for each in (FIRST, SECOND, THIRD)]
    assert_sums(gradients(batch_of([FIRST, SECOND, THIRD])), alone, 1e-5)


def test_the_loss_of_a_llama_is_over_the_labels_of_the_batch_as_they_are():
    model, batch = llama("sdpa"), batch_of([FIRST, SECOND, THIRD], [SECOND])
    arguments = ingest.transformers_arguments(batch)
    logits = model(**arguments).logits
    places = [(0, 0), (0, 1), (0, 3), (0, 4), (0, 5), (0, 6), (0, 8), (1, 0), (1, 1), (1, 2), (1, 3)]
    labels = [2, 3, 8, 9, 10, 11, 13, 8, 9, 10, 11]
    picked = logits.log_softmax(-1)
    losses = [-picked[row, place, label] for (row, place), label in zip(places, labels, strict=True)]
    torch.testing.assert_close(model(**arguments).loss, sum(losses) / 11, rtol=0, atol=1e-5)
    torch.testing.assert_close(model(**arguments, num_items_in_batch=22).loss, sum(losses) / 22, rtol=0, atol=1e-5)


@pytest.mark.parametrize("implementation", ["eager", "sdpa"])
def test_a_model_keeps_its_sliding_window(implementation):
    document = [*SECOND, *THIRD, *FIRST]
    changed = [15, *document[1:]]
    model = llama(implementation, MistralConfig, sliding_window=3)
    one, other = (logits_in_transformers(model, batch_of([FIRST, each], length=16)) for each in (document, changed))
    [alone] = logits_in_transformers(model, batch_of([document], length=len(document)))
    torch.testing.assert_close(one[0, 3:13], alone, rtol=0, atol=1e-4)
    assert torch.equal(one[0, 8:13], other[0, 8:13])  # two layers of three tokens reach back four places
    assert not torch.allclose(one[0, 3:8], other[0, 3:8])
