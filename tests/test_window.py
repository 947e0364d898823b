"""Windows: a golden order, purity, every document once and whole, and what is wrong named by file and row."""

from __future__ import annotations

import subprocess
import sys
from collections import Counter

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ingest.documents import ENCODE_BYTES
from ingest.encoding import Text
from ingest.errors import DataError
from ingest.filled import move
from ingest.plan import Cursors, SourceCursor
from ingest.slab import Rows, row_digests
from ingest.spec import UnitSpec, WindowSettings, WindowSpec
from ingest.tokenizer import DocumentError
from ingest.window import Window, document_address, make_window
from tests.conftest import ROOT
from tests.tiny import EOS, Tiny, documents_of, encode

CORPUS = ((("a", "bb", "ccc"), ("dddd", "", "eeeee", None), ("f" * 12, "g", "h", "i", "j")),)
EMPTY_UNITS = (((None, ""), ("", None, None)),)


def placed(window: Window) -> list[tuple[int, int, tuple[int, int]]]:
    """(window, lane, (unit, row)) of every piece, rows lane by lane."""
    lanes = np.repeat(np.arange(len(window.rows)) // max(window.prefix.rows, 1), window.rows.counts_B)
    addresses = (document_address(window, document) for document in window.piece_document_L.tolist())
    documents = [(unit.row_group, row) for unit, row in addresses]
    return list(zip([window.spec.cursors.window] * len(lanes), lanes.tolist(), documents, strict=True))


def pieces(rows: Rows) -> list[list[int]]:
    """The tokens of every piece, look-ahead included."""
    out, lengths = [], iter(rows.lengths_L.tolist())
    for tokens, count in zip(rows.tokens_BX.tolist(), rows.counts_B.tolist(), strict=True):
        begin = 0
        for _ in range(count):
            length = next(lengths)
            out.append(tokens[begin : begin + length])
            begin += length
    return out


def same(one: Window, other: Window) -> bool:
    pairs = zip(one.slabs(2), other.slabs(2), strict=True)
    return all(mine.to_table().equals(theirs.to_table()) for mine, theirs in pairs)


def made(texts: list[str | None], *, encoder=encode, unit: UnitSpec | None = None, batch: int = 3, **options) -> Window:
    """A window of one unit, read in batches."""
    unit = unit or UnitSpec(0, 0, "s3://bucket/a.parquet", 4, 0, "")
    spec = WindowSpec(Cursors(0, (SourceCursor(0, 0, 0),)), (unit,), True)
    defaults = {"columns": ("text",), "sequence_length": 8, "lanes": 2, "seed": 0, "shuffle": False}
    settings = WindowSettings(**(defaults | {"eos_id": EOS, "token_dtype": "uint16"} | options))
    arrays = [pa.array(texts[i : i + batch], pa.large_string()) for i in range(0, len(texts), batch)]
    return make_window(spec, settings, Text(encoder), lambda unit, column: iter(arrays))


def test_golden_order_of_window_lane_and_document() -> None:
    windows = list(Tiny(CORPUS, window_tokens=20).windows())
    assert [entry for window in windows for entry in placed(window)] == [
        (0, 0, (0, 1)),
        (0, 0, (0, 2)),
        (0, 0, (1, 2)),
        (0, 0, (1, 0)),
        (0, 1, (1, 0)),
        (0, 1, (0, 1)),
        (0, 1, (0, 0)),
        (0, 1, (1, 2)),
        (1, 0, (2, 3)),
        (1, 0, (2, 4)),
        (1, 0, (2, 0)),
        (1, 0, (2, 0)),
        (1, 0, (2, 1)),
        (1, 0, (2, 2)),
        (1, 1, (2, 0)),
        (1, 1, (2, 0)),
    ]


def test_golden_digests_of_the_steps() -> None:
    digests = [step.position.digest for step in Tiny(CORPUS, window_tokens=20).steps()]
    assert digests == ["02b35799a6d0c4d4", "ca87cf6257ad49d7", "eab96494c2d5793e", "d644c3a7f5e26896"]


def test_golden_rows_without_shuffling() -> None:
    window = made(["abc", "defgh", "i"], sequence_length=6, lanes=2)
    a, d, i = ord("a"), ord("d"), ord("i")
    assert window.rows.tokens_BX.tolist() == [
        [a, a + 1, a + 2, EOS, d, d + 1, d + 2],
        [d + 2, d + 3, d + 4, EOS, i, EOS, EOS],
    ]
    assert window.rows.lengths_L.tolist() == [4, 3, 4, 2]
    assert window.rows.counts_B.tolist() == [2, 2]


def test_rows_go_to_lanes_in_turn() -> None:
    window = made(["aaaaaaa", "bbbbbbb", "ccccccc", "ddddddd"])
    assert [[chr(row[0]) for row in slab.rows.tokens_BX.tolist()] for slab in window.slabs(window.lanes)] == [
        ["a", "c"],
        ["b", "d"],
    ]
    assert [slab.rank for slab in window.slabs(window.lanes)] == [0, 1]


@pytest.mark.parametrize("seed", [0, 5])
def test_a_window_made_twice_is_the_same_bit_for_bit(seed: int) -> None:
    first, second = (list(Tiny(CORPUS, seed=seed, num_epochs=2).windows()) for _ in range(2))
    assert all(same(one, other) for one, other in zip(first, second, strict=True))


def test_a_window_does_not_depend_on_how_the_text_is_batched() -> None:
    texts = ["a", None, "bb", "", "c" * 20, "d"] * 4
    assert all(same(made(texts, batch=1), made(texts, batch=batch)) for batch in (2, 5, 100))


def test_the_same_documents_have_another_order_in_the_next_epoch_and_with_another_seed() -> None:
    def order(seed: int) -> list[list[tuple[int, int]]]:
        tiny = Tiny(CORPUS, seed=seed, num_epochs=2, window_tokens=1000)
        return [[document for _, _, document in placed(window)] for window in tiny.windows()]

    (first, second), (other, _) = order(0), order(1)
    assert len({tuple(first), tuple(second), tuple(other)}) == 3


def test_unshuffled_documents_keep_their_order_row_by_row() -> None:
    window = next(Tiny(CORPUS, shuffle=False, lanes=1, window_tokens=1000).windows())
    seen = list(dict.fromkeys(document for _, _, document in placed(window)))
    assert seen == [(0, 0), (0, 1), (0, 2), (1, 0), (1, 2), (2, 0), (2, 1), (2, 2), (2, 3), (2, 4)]


@pytest.mark.parametrize("window_tokens", [1, 12, 1000])
def test_every_document_of_uneven_files_is_in_the_windows_exactly_once(window_tokens: int) -> None:
    windows = list(Tiny(CORPUS, window_tokens=window_tokens).windows())
    seen = Counter(document for window in windows for document in documents_of(window))
    expected = [(0, 0, 0), (0, 0, 1), (0, 0, 2), (0, 1, 0), (0, 1, 2), *((0, 2, row) for row in range(5))]
    assert seen == Counter((source, 0, unit, row) for source, unit, row in expected)
    assert sum(window.documents.skipped for window in windows) == 2


documents = st.one_of(st.none(), st.text("abé日\0", max_size=20))
corpora = st.lists(st.lists(st.lists(documents, max_size=6), min_size=1, max_size=3), min_size=1, max_size=2)


@given(corpora, st.integers(2, 9), st.sampled_from([1, 2, 4]), st.booleans(), st.integers(1, 60))
@settings(max_examples=30, deadline=None)
def test_the_tokens_in_the_rows_put_together_are_those_of_the_documents(
    corpus, sequence_length: int, lanes: int, shuffle: bool, window_tokens: int
) -> None:
    tiny = Tiny(corpus, sequence_length=sequence_length, lanes=lanes, shuffle=shuffle, window_tokens=window_tokens)
    expected = {
        (source, unit, row): encode([text])[0].tolist()
        for source, units in enumerate(corpus)
        for unit, texts in enumerate(units)
        for row, text in enumerate(texts)
        if text
    }
    whole: dict[tuple[int, int, int], list[list[int]]] = {}
    for window in tiny.windows():
        addresses = (document_address(window, document) for document in window.piece_document_L.tolist())
        for (unit, row), tokens in zip(addresses, pieces(window.rows), strict=True):
            whole.setdefault((unit.source, unit.row_group, row), []).append(tokens)
    assert whole.keys() == expected.keys()
    for address, parts in whole.items():
        assert joins(parts, expected[address]), (parts, expected[address])


def joins(parts: list[list[int]], document: list[int]) -> bool:
    """Whether the parts, in some order, make the document, each but the last overlapping the next by one token."""
    if not document:
        return not parts
    for number, part in enumerate(parts):
        rest = parts[:number] + parts[number + 1 :]
        if document[: len(part)] == part:
            if not rest:
                return part == document
            if len(part) > 1 and joins(rest, document[len(part) - 1 :]):
                return True
    return False


@given(corpora, st.sampled_from([1, 2, 4]))
@settings(max_examples=20, deadline=None)
def test_prefix_sums_are_those_of_the_first_rows_of_every_lane(corpus, lanes: int) -> None:
    for window in Tiny(corpus, lanes=lanes, global_batch_rows=lanes, num_epochs=1).windows():
        count = window.prefix.rows
        slabs = list(window.slabs(window.lanes))
        assert {len(slab.rows) for slab in slabs} == {count}
        for offset in range(count + 1):
            parts = [slab.rows.slice(0, offset) for slab in slabs]
            digests = [
                row_digests(part, np.full(offset, slab.window), np.arange(offset) * lanes + slab.rank)
                for part, slab in zip(parts, slabs, strict=True)
            ]
            at = window.prefix.at(offset)
            assert at.digest == int(np.concatenate(digests).sum(dtype=np.uint64))
            assert at.tokens == sum(at.source_tokens)
        end = window.prefix.at(count)
        assert end.tokens == int(window.documents.lengths_D.sum())
        assert end.documents == len(window.documents.lengths_D)
        assert end.skipped == window.documents.skipped


def test_the_tokens_of_a_mixture_are_counted_by_source() -> None:
    tiny = Tiny(((("aaa", "a"),), (("bbbbb",), ("bb",)), (("",),)), window_tokens=1000)
    (window,) = tiny.windows()
    assert window.prefix.source_tokens_OK.tolist()[0] == [0, 0, 0]
    assert window.prefix.source_tokens_OK.tolist()[-1] == [6, 9, 0]


def test_a_window_without_a_usable_document_has_slabs_of_no_rows() -> None:
    (window,) = Tiny(EMPTY_UNITS, lanes=4, global_batch_rows=4, window_tokens=1000).windows()
    slabs = list(window.slabs(window.lanes))
    assert [(slab.rank, len(slab.rows), slab.last) for slab in slabs] == [(lane, 0, True) for lane in range(4)]
    assert slabs[0].prefix.at(0).skipped == 5
    assert slabs[0].rows.tokens_BX.shape == (0, 9)


def test_a_window_with_fewer_tokens_than_lanes_gives_every_lane_a_row() -> None:
    window = made(["a"], lanes=4)
    assert [len(slab.rows) for slab in window.slabs(window.lanes)] == [1, 1, 1, 1]
    assert sorted(slab.rows.lengths_L.tolist() for slab in window.slabs(window.lanes)) == [[], [], [1], [2]]
    assert window.prefix.at(1).tokens == 2


def test_padding_in_a_row_holds_eos_and_no_piece() -> None:
    rows = made(["abc"], lanes=1, eos_id=7).rows
    assert rows.tokens_BX.tolist() == [[97, 98, 99, EOS, 7, 7, 7, 7, 7]]
    assert rows.lengths_L.tolist() == [4]


def test_tokens_keep_the_width_that_the_vocabulary_needs() -> None:
    def wide(texts):
        return np.full(len(texts), 70_000, np.uint32), np.ones(len(texts), np.int64)

    window = made(["a", "b"], encoder=wide, token_dtype="uint32", eos_id=70_001)
    assert window.rows.tokens_BX.dtype == np.uint32
    assert sorted(window.rows.tokens_BX.ravel().tolist())[:2] == [70_000, 70_000]


def test_each_source_is_read_by_its_own_column() -> None:
    asked = []

    def read(unit, column):
        asked.append((unit.source, column))
        return iter([pa.array(["a"], pa.large_string())])

    units = tuple(UnitSpec(source, 0, "p", 0, 0, "") for source in (0, 1))
    spec = WindowSpec(Cursors(0, (SourceCursor(0, 0, 0),) * 2), units, True)
    make_window(spec, WindowSettings(("text", "body"), 8, 2, 0, True, EOS, "uint16"), Text(encode), read)
    assert asked == [(0, "text"), (1, "body")]


@pytest.mark.parametrize("batch", [1, 2, 4, 100])
@pytest.mark.parametrize("row", [0, 3, 5, 8])
def test_a_document_that_cannot_be_tokenized_is_named_by_file_row_group_and_row(batch: int, row: int) -> None:
    texts = ["a", None, "", "b", None, "c", "d", "", "e"]

    def refuse(some):
        if texts[row] in some:
            raise DocumentError("a document must be nice", some.index(texts[row]))
        return encode(some)

    with pytest.raises(DataError) as caught:
        made(texts, encoder=refuse, batch=batch)
    assert type(caught.value) is DataError
    assert str(caught.value) == f"s3://bucket/a.parquet row group 4 row {row}: a document must be nice"


def test_the_row_of_a_bad_document_is_right_behind_a_cut_by_size() -> None:
    texts = ["x" * (ENCODE_BYTES - 1), "", "y" * 3, None, "bad", "z"]
    calls = []

    def refuse(some):
        calls.append(len(some))
        if "bad" in some:
            raise DocumentError("no", some.index("bad"))
        return np.full(len(some), EOS, np.uint16), np.ones(len(some), np.int64)

    with pytest.raises(DataError, match="row group 4 row 4: no"):
        made(texts, encoder=refuse, batch=100)
    assert calls == [2, 2]


def test_text_is_given_to_the_tokenizer_in_bounded_runs() -> None:
    sizes = []

    def count(some):
        sizes.append(sum(map(len, some)))
        return np.full(len(some), EOS, np.uint16), np.ones(len(some), np.int64)

    made(["x" * (ENCODE_BYTES // 4)] * 12, encoder=count, batch=100)
    assert sizes == [ENCODE_BYTES] * 3


@given(st.lists(st.integers(1, 9), min_size=1, max_size=60), st.randoms(use_true_random=False))
def test_tokens_arrive_where_they_belong_sorted_first_or_not(lengths: list[int], random) -> None:
    order = random.sample(range(len(lengths)), len(lengths))
    length_L = np.array(lengths)
    source_L = np.cumsum(length_L) - length_L
    target_L = np.empty_like(source_L)
    target_L[order] = np.cumsum(length_L[order]) - length_L[order]
    expected = np.concatenate([np.arange(source_L[piece], source_L[piece] + lengths[piece]) for piece in order])
    for staged_bytes in (0, 1 << 20):
        tokens, target = np.arange(sum(lengths), dtype=np.uint16), np.zeros(sum(lengths), np.uint16)
        move(tokens, source_L, target, target_L, length_L, staged_bytes)
        assert (target.tolist(), len(tokens)) == (expected.tolist(), 0)


LARGE = """
import numpy as np
from tests.test_window import made

def thousand(texts):
    return np.ones(len(texts) * 1_000, np.uint16), np.full(len(texts), 1_000)

def status(name):
    return next(int(line.split()[1]) << 10 for line in open("/proc/self/status") if line.startswith(name))

made(["a"], encoder=thousand)
before = status("VmRSS")
window = made(["a"] * 150_000, encoder=thousand, batch=1_000, sequence_length=2047, shuffle=True)
print((status("VmHWM") - before) / window.rows.tokens_BX.nbytes)
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the peak of a process from /proc")
def test_the_tokens_of_a_large_window_are_never_in_memory_twice() -> None:
    done = subprocess.run([sys.executable, "-c", LARGE], stdout=subprocess.PIPE, text=True, cwd=ROOT, check=True)
    assert 1.0 < float(done.stdout) < 1.6
