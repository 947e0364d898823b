import dataclasses
from itertools import pairwise

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.batch import Batch
from ingest.errors import ConfigError
from ingest.slab import Rows


def rows_of(tokens, segments, dtype=np.uint16, starts=()):
    lengths = np.array([length for row in segments for length in row], dtype=np.int32)
    counts = np.array([len(row) for row in segments], dtype=np.int32)
    return Rows(np.array(tokens, dtype=dtype), lengths, counts, np.array(starts, dtype=np.int32))


def lists(batch):
    return {
        "input_ids": batch.input_ids.tolist(),
        "labels": batch.labels.tolist(),
        "position_ids": batch.position_ids.tolist(),
        "document_ids": batch.document_ids.tolist(),
        "cu_seqlens": batch.cu_seqlens.tolist(),
        "max_seqlen": batch.max_seqlen,
        "num_tokens": batch.num_tokens,
    }


def slow_reference(rows):
    """Position by position, the definition."""
    num_rows, columns = rows.tokens_BX.shape
    masked = [[token >= 2**31 for token in row] for row in rows.tokens_BX.tolist()]
    tokens, lengths = (
        [[token % 2**31 for token in row] for row in rows.tokens_BX.tolist()],
        iter(rows.lengths_L.tolist()),
    )
    out = {name: [] for name in ("input_ids", "labels", "position_ids", "document_ids")}
    starts, origins = [], iter(rows.starts_L.tolist() or [0] * len(rows.lengths_L))
    for row in range(num_rows):
        owner, offset = [-1] * columns, [0] * columns
        column = 0
        for document in range(rows.counts_B[row]):
            origin = next(origins)
            for place in range(next(lengths)):
                owner[column], offset[column] = document, origin + place
                column += 1
        last = columns - 1
        labelled = [owner[t] >= 0 and owner[t] == owner[t + 1] and not masked[row][t + 1] for t in range(last)]
        out["input_ids"].append(tokens[row][:last])
        out["labels"].append([tokens[row][t + 1] if labelled[t] else -100 for t in range(last)])
        out["position_ids"].append(offset[:last])
        out["document_ids"].append(owner[:last])
        starts += [row * last + t for t in range(last) if t == 0 or owner[t] != owner[t - 1]]
    bounds = [*starts, num_rows * (columns - 1)]
    out["cu_seqlens"] = bounds
    out["max_seqlen"] = max(b - a for a, b in pairwise(bounds))
    out["num_tokens"] = sum(document >= 0 for row in out["document_ids"] for document in row)
    return out


@st.composite
def any_rows(draw):
    num_rows, columns = draw(st.integers(1, 6)), draw(st.integers(2, 12))
    segments = []
    for _ in range(num_rows):
        used = draw(st.integers(0, columns))
        cuts = draw(st.sets(st.integers(1, used - 1))) if used > 1 else set()
        bounds = sorted({0, used} | cuts)
        segments.append([b - a for a, b in pairwise(bounds)])
    dtype = draw(st.sampled_from([np.uint16, np.uint32]))
    ids = st.lists(st.integers(0, np.iinfo(dtype).max), min_size=columns, max_size=columns)
    count = sum(map(len, segments)) * draw(st.booleans())
    starts = draw(st.lists(st.integers(0, 2**31 - 100), min_size=count, max_size=count))
    return rows_of(draw(st.lists(ids, min_size=num_rows, max_size=num_rows)), segments, dtype, starts)


def test_two_documents_and_padding_give_these_tensors():
    batch = Batch.from_rows(rows_of([[5, 6, 9, 7, 9, 0, 0]], [[3, 2]]), position=None)
    assert lists(batch) == {
        "input_ids": [[5, 6, 9, 7, 9, 0]],
        "labels": [[6, 9, -100, 9, -100, -100]],
        "position_ids": [[0, 1, 2, 0, 1, 0]],
        "document_ids": [[0, 0, 0, 1, 1, -1]],
        "cu_seqlens": [0, 3, 5, 6],
        "max_seqlen": 3,
        "num_tokens": 5,
    }


def test_a_document_cut_at_the_row_end_keeps_its_label():
    batch = Batch.from_rows(rows_of([[5, 6, 7, 8], [8, 9, 4, 9]], [[4], [2, 2]]), position=None)
    assert lists(batch) == {
        "input_ids": [[5, 6, 7], [8, 9, 4]],
        "labels": [[6, 7, 8], [9, -100, 9]],
        "position_ids": [[0, 1, 2], [0, 1, 0]],
        "document_ids": [[0, 0, 0], [0, 0, 1]],
        "cu_seqlens": [0, 3, 5, 6],
        "max_seqlen": 3,
        "num_tokens": 6,
    }


def test_where_positions_continue_a_cut_document_counts_on_and_nothing_else_changes():
    rows = rows_of([[5, 6, 7, 8], [8, 9, 4, 9], [7, 9, 3, 0]], [[4], [2, 2], [1, 2]], starts=[0, 3, 0, 70_000, 6])
    batch = Batch.from_rows(rows, position=None)
    assert batch.position_ids.tolist() == [[0, 1, 2], [3, 4, 0], [70_000, 6, 7]]
    restarted = lists(Batch.from_rows(dataclasses.replace(rows, starts_L=rows.starts_L[:0]), position=None))
    assert lists(batch) | {"position_ids": restarted["position_ids"]} == restarted


def test_padding_has_position_0_where_positions_continue():
    batch = Batch.from_rows(rows_of([[5, 9, 0, 0], [0, 0, 0, 0]], [[2], []], starts=[8]), position=None)
    assert batch.position_ids.tolist() == [[8, 9, 0], [0, 0, 0]]


def test_a_document_that_ends_exactly_at_the_row_end_has_no_label_there():
    batch = Batch.from_rows(rows_of([[5, 6, 9, 7]], [[3]]), position=None)
    assert batch.labels.tolist() == [[6, 9, -100]]
    assert batch.cu_seqlens.tolist() == [0, 3]


def test_a_row_of_padding_is_one_segment_without_labels():
    batch = Batch.from_rows(rows_of([[0, 0, 0], [4, 9, 0], [0, 0, 0]], [[], [2], []]), position=None)
    assert lists(batch) == {
        "input_ids": [[0, 0], [4, 9], [0, 0]],
        "labels": [[-100, -100], [9, -100], [-100, -100]],
        "position_ids": [[0, 0], [0, 1], [0, 0]],
        "document_ids": [[-1, -1], [0, 0], [-1, -1]],
        "cu_seqlens": [0, 2, 4, 6],
        "max_seqlen": 2,
        "num_tokens": 2,
    }


def test_a_segment_that_lies_in_the_look_ahead_alone_is_no_document_of_the_row():
    batch = Batch.from_rows(rows_of([[5, 9, 7]], [[2, 1]]), position=None)
    assert batch.labels.tolist() == [[9, -100]]
    assert batch.cu_seqlens.tolist() == [0, 2]
    assert batch.num_tokens == 2


@pytest.mark.parametrize(("dtype", "largest"), [(np.uint16, 65535), (np.uint32, 2147483647)])
def test_the_largest_ids_stay_positive(dtype, largest):
    batch = Batch.from_rows(rows_of([[largest, largest - 1, largest]], [[3]], dtype), position=None)
    assert batch.input_ids.tolist() == [[largest, largest - 1]]
    assert batch.labels.tolist() == [[largest - 1, largest]]


def test_a_masked_token_is_an_input_and_no_label():
    masked = 1 << 31
    rows = rows_of([[masked | 5, masked | 6, 7, masked | 70_000, 9]], [[5]], np.uint32)
    batch = Batch.from_rows(rows, position=None)
    assert batch.input_ids.tolist() == [[5, 6, 7, 70_000]]
    assert batch.labels.tolist() == [[-100, 7, -100, 9]]


def test_ids_of_16_bits_have_no_mask():
    batch = Batch.from_rows(rows_of([[5, 40_000, 65_535]], [[3]]), position=None)
    assert batch.labels.tolist() == [[40_000, 65_535]]


def test_dtypes_are_the_ones_that_models_and_kernels_take():
    batch = Batch.from_rows(rows_of([[1, 2, 3]], [[2]]), position="here")
    ids = (batch.input_ids, batch.labels, batch.position_ids, batch.document_ids)
    assert [tensor.dtype for tensor in ids] == [torch.int64] * 4
    assert batch.cu_seqlens.dtype == torch.int32
    assert all(tensor.is_contiguous() for tensor in ids)
    assert batch.position == "here"


def test_read_only_arrays_are_taken_and_left_as_they_are():
    rows = rows_of([[5, 6, 9, 0]], [[3]])
    for array in (rows.tokens_BX, rows.lengths_L, rows.counts_B):
        array.flags.writeable = False
    batch = Batch.from_rows(rows, position=None)
    batch.input_ids.zero_()
    assert rows.tokens_BX.tolist() == [[5, 6, 9, 0]]


def test_writing_into_the_tensors_leaves_writable_rows_as_they_are():
    rows = rows_of([[5, 6, 9, 0]], [[3]])
    batch = Batch.from_rows(rows, position=None)
    for tensor in (batch.input_ids, batch.labels, batch.document_ids, batch.cu_seqlens):
        tensor.zero_()
    assert (rows.tokens_BX.tolist(), rows.lengths_L.tolist(), rows.counts_B.tolist()) == ([[5, 6, 9, 0]], [3], [1])


@given(any_rows())
@settings(deadline=None)
def test_every_batch_equals_the_slow_definition(rows):
    assert lists(Batch.from_rows(rows, position=None)) == slow_reference(rows)


@given(any_rows(), st.data())
@settings(max_examples=40, deadline=None)
def test_a_micro_batch_equals_the_batch_of_its_rows_alone(rows, data):
    num_rows = len(rows.counts_B)
    size = data.draw(st.sampled_from([n for n in range(1, num_rows + 1) if num_rows % n == 0]))
    first_L = np.concatenate([[0], rows.counts_B.cumsum()])
    alone = [
        Rows(
            rows.tokens_BX[b : b + size],
            rows.lengths_L[first_L[b] : first_L[b + size]],
            rows.counts_B[b : b + size],
            rows.starts_L[first_L[b] : first_L[b + size]],
        )
        for b in range(0, num_rows, size)
    ]
    micros = list(Batch.from_rows(rows, position=None).split(size))
    assert [lists(micro) for micro in micros] == [slow_reference(part) for part in alone]


def test_splitting_rebases_cu_seqlens_and_keeps_the_position_of_the_step():
    batch = Batch.from_rows(rows_of([[5, 6, 7, 8], [8, 9, 4, 9]], [[4], [2, 2]]), position="after")
    first, second = batch.split(1)
    assert (first.cu_seqlens.tolist(), second.cu_seqlens.tolist()) == ([0, 3], [0, 2, 3])
    assert (first.max_seqlen, second.max_seqlen) == (3, 2)
    assert (first.position, second.position) == ("after", "after")


@pytest.mark.parametrize("rows", [0, 3, 4, -1])
def test_a_micro_batch_size_that_does_not_divide_is_refused_at_once(rows):
    batch = Batch.from_rows(rows_of([[5, 6], [8, 9]], [[2], [2]]), position=None)
    with pytest.raises(ConfigError, match=rf"must divide .* got {rows} and 2: split into one of 1, 2"):
        batch.split(rows)


@pytest.mark.parametrize(
    "rows",
    [
        Rows(np.zeros((1, 3), np.uint16), np.array([2, 2], np.int32), np.array([2], np.int32)),
        Rows(np.zeros((1, 3), np.uint16), np.array([2, 0], np.int32), np.array([2], np.int32)),
        Rows(np.zeros((1, 3), np.uint16), np.array([2, 1], np.int32), np.array([1], np.int32)),
        Rows(np.zeros((1, 3), np.int64), np.array([2], np.int32), np.array([1], np.int32)),
        Rows(np.zeros((1, 3), np.uint16), np.array([1, 1], np.int32), np.array([2], np.int32), np.zeros(1, np.int32)),
    ],
    ids=["longer than the row", "an empty segment", "more segments than counted", "wide ids", "fewer starts"],
)
def test_rows_that_break_the_contract_are_refused(rows):
    with pytest.raises(AssertionError):
        Batch.from_rows(rows, position=None)


def test_moving_a_batch_keeps_everything():
    batch = Batch.from_rows(rows_of([[5, 6, 9, 7, 9, 0]], [[3, 2]]), position="here")
    moved = batch.to("cpu")
    assert (lists(moved), moved.position) == (lists(batch), "here")
    assert batch.to("meta").labels.device.type == "meta"


@pytest.mark.gpu
@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_a_batch_made_on_the_gpu_equals_the_one_made_on_the_cpu():
    rows = rows_of([[65535, 6, 9, 7, 9, 0], [1, 2, 3, 4, 5, 6]], [[3, 2], [6]])
    on_cpu, on_gpu = (Batch.from_rows(rows, None, torch.device(name)) for name in ("cpu", "cuda"))
    assert on_gpu.labels.is_cuda
    assert on_gpu.cu_seqlens.is_cuda
    assert lists(on_gpu) == lists(on_cpu)
    assert lists(on_cpu.pin_memory().to("cuda", non_blocking=True)) == lists(on_cpu)
