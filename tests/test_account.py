"""Nothing is lost in silence: what is read is trained, empty, or skipped on purpose, counted and recorded."""

from __future__ import annotations

from dataclasses import replace

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingest.account import Account, Bad, Skip, SourceAccount
from ingest.config import IngestConfig
from ingest.drain import describe_account
from ingest.errors import ConfigError, DataError
from ingest.position import Position
from ingest.run import Run
from ingest.window import conserved
from tests.conftest import lines_of, steps_without_ray, texts, write_config, write_corpus
from tests.tiny import Tiny


def damaged(path, row_group, column=0):
    """Flips one bit in the middle of a column chunk; page checksums are on."""
    chunk = pq.read_metadata(path).row_group(row_group).column(column)
    data = bytearray(path.read_bytes())
    begin = chunk.dictionary_page_offset or chunk.data_page_offset
    data[begin + chunk.total_compressed_size // 2] ^= 1
    path.write_bytes(data)


@pytest.fixture
def config(tmp_path, tokenizer_file):
    """Source ``a``: 5 files of 20 documents in row groups of 10; ``b``: 2 files of 10. A function of ``on_error``."""
    write_corpus(tmp_path / "a", texts(100, seed=1), files=5)
    write_corpus(tmp_path / "b", ["", None, *texts(18, seed=2)], files=2)

    def write(on_error, **settings):
        return write_config(
            tmp_path / "run.yaml",
            sources=[{"name": "a", "path": "a", "on_error": on_error}, {"name": "b", "path": "b"}],
            tokenizer={"path": str(tokenizer_file), "backend": "tokenizers"},
            **settings,
        )

    return write


def last(path):
    return steps_without_ray(path)[-1].position


def test_every_row_read_is_a_document_or_empty_and_every_token_made_is_trained(config):
    end = last(config("raise"))
    a, b = end.counts.account.sources
    assert (a.read, a.documents, a.empty, a.bad) == (100, 100, 0, 0)
    assert (b.read, b.documents, b.empty, b.bad) == (20, 18, 2, 0)
    assert (a.tokens, b.tokens) == end.counts.source_tokens == (2_914, 692)
    assert (end.counts.documents, end.counts.skipped) == (118, 2)
    assert end.tokens + end.padding == end.rows * 16


def test_a_row_that_is_not_utf8_ends_the_run_or_is_skipped_counted_and_recorded(config, tmp_path):
    rows = pa.array([b"one", b"\xff", None, b"two", b"caf\xe9", b""])
    pq.write_table(pa.table({"text": rows}), tmp_path / "a/part-0.parquet")
    with pytest.raises(DataError, match=r"part-0\.parquet: row group 0, row 1 must be UTF-8; .*: mend it, .* on_error"):
        last(config("raise"))
    end = last(config({"skip_rows": 2}))
    a = end.counts.account.sources[0]
    assert (a.read, a.documents, a.empty, a.bad) == (86, 82, 2, 2)
    assert sorted(end.counts.account.skips) == [
        Skip(0, str(tmp_path / "a/part-0.parquet"), 0, row, 1, "not UTF-8") for row in (1, 4)
    ]
    assert Position.from_json(end.to_json()) == end
    run = Run.prepare(IngestConfig.from_yaml(config({"skip_rows": 2})))
    told = describe_account(run, end)
    assert told["sources"][0] == {
        "name": "a",
        "read": 86,
        "documents": 82,
        "empty": 2,
        "bad": 2,
        "tokens": a.tokens,
        "trained_tokens": a.tokens,
    }
    assert f"a: {tmp_path}/a/part-0.parquet row group 0, row 4: not UTF-8" in told["skips"]


def test_a_row_group_that_cannot_be_decoded_is_skipped_whole_within_the_budget(config, tmp_path):
    damaged(tmp_path / "a/part-2.parquet", 1)
    with pytest.raises(DataError, match=r"part-2\.parquet: row group 1 cannot be decoded; .*CRC.*set on_error"):
        last(config("raise"))
    end = last(config({"skip_rows": 0.1}))
    a = end.counts.account.sources[0]
    assert (a.read, a.documents, a.empty, a.bad) == (100, 90, 0, 10)
    (skip,) = end.counts.account.skips
    assert skip[:5] == (0, str(tmp_path / "a/part-2.parquet"), 1, 0, 10)
    with pytest.raises(
        DataError, match=r"source a: on_error\.skip_rows .*; got 10 in pass 1, 9 a pass allowed, the first is .*part-2"
    ):
        last(config({"skip_rows": 9}))


def test_the_budget_of_rows_is_a_pass_s(config, tmp_path):
    damaged(tmp_path / "a/part-2.parquet", 1)
    end = last(config({"skip_rows": 10}, epochs=3))
    assert [(source.read, source.bad) for source in end.counts.account.sources] == [(300, 30), (60, 0)]
    assert len(end.counts.account.skips) == 3


def test_a_file_that_cannot_be_read_is_skipped_when_the_manifest_is_made_and_stays_in_the_position(config, tmp_path):
    path = tmp_path / "a/part-3.parquet"
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(DataError, match=r"part-3\.parquet must be a Parquet file; .*truncated"):
        last(config("raise"))
    found = steps_without_ray(config({"skip_files": 1}))
    first, end = found[0].position, found[-1].position
    assert (end.counts.account.sources[0].read, end.counts.account.skipped_files) == (80, 1)
    assert first.counts.account.skips == end.counts.account.skips
    assert str(end.counts.account.skips[0]).startswith(f"{path}: must be a Parquet file; its end is missing")
    path.unlink()
    assert lines_of(found) == lines_of(steps_without_ray(config("raise")))


def test_more_files_than_allowed_end_the_run_also_from_a_stored_manifest(config, tmp_path):
    for number in (1, 3):
        path = tmp_path / f"a/part-{number}.parquet"
        path.write_bytes(path.read_bytes()[:-30])
    assert last(config({"skip_files": 0.4})).counts.account.skipped_files == 2
    with pytest.raises(DataError, match=r"source a: on_error\.skip_files .*; got 2, 1 allowed, the first is .*part-1"):
        last(config({"skip_files": 0.39}))
    with pytest.raises(DataError, match=r"part-1\.parquet"):
        last(config("raise"))


def test_a_source_of_nothing_but_bad_files_is_refused(config, tmp_path):
    for path in (tmp_path / "a").iterdir():
        path.write_bytes(b"text, not Parquet")
    with pytest.raises(DataError, match=r"source a must hold a file that can be read; got 5 that cannot, the first is"):
        last(config({"skip_files": 5}))


def test_a_file_that_changed_since_the_manifest_is_never_skipped(config, tmp_path):
    run = Run.prepare(IngestConfig.from_yaml(config({"skip_rows": 100, "skip_files": 5})))
    path = tmp_path / "a/part-3.parquet"
    path.write_bytes(path.read_bytes()[:-30])
    with pytest.raises(DataError, match=r"part-3\.parquet changed since the manifest was made"):
        list(map(run.maker, run.specs(run.start().cursors)))


def test_a_resume_may_allow_more_and_goes_on_with_the_same_steps(config, tmp_path):
    rows = pa.array([b"\xff", *(text.encode() for text in texts(19, seed=3))])
    pq.write_table(pa.table({"text": rows}), tmp_path / "a/part-4.parquet")
    whole = steps_without_ray(config({"skip_rows": 1}))
    middle = Position.from_json(whole[9].position.to_json())
    rest = steps_without_ray(config({"skip_rows": 50}), middle)
    assert lines_of(rest, middle) == lines_of(whole)[10:]
    assert rest[-1].position.counts == whole[-1].position.counts


@pytest.mark.parametrize(
    ("on_error", "words"),
    [
        ({"skip_rows": -1}, r"on_error\.skip_rows must be a number from 1 on, a share from 0 to 1, or 0; got -1"),
        ({"skip_files": 1.5}, r"on_error\.skip_files must be a number .*; got 1\.5"),
        ("pass", r"sources\.0\.on_error"),
        ({"skip_row": 1}, r"sources\.0\.on_error.*skip_row is not a setting; got 1: did you mean skip_rows"),
    ],
)
def test_a_budget_that_makes_no_sense_is_refused(config, on_error, words):
    with pytest.raises(ConfigError, match=words):
        IngestConfig.from_yaml(config(on_error))


def test_accounts_add_and_read_back_and_the_record_is_bounded():
    skips = tuple(Skip.of(1, "x" * 999, 3, Bad(5, 1, "y" * 999)) for _ in range(6))
    one = Account((SourceAccount(3, 2, 1, 0, 9), SourceAccount(1, 0, 0, 1, 0)), skips, 1)
    both = one + Account() + one
    assert both.sources == (SourceAccount(6, 4, 2, 0, 18), SourceAccount(2, 0, 0, 2, 0))
    assert (len(both.skips), both.skipped_files, both.balanced) == (8, 2, True)
    assert Account.from_plain(both.to_plain(["a", "b"]), ["a", "b"]) == both
    assert len(str(both.to_plain(["a", "b"]))) < 3_000
    assert not Account((SourceAccount(3, 2),)).balanced
    with pytest.raises(ValueError, match="-1 where a count is due"):
        Account.from_plain({"sources": {}, "skips": [], "skipped_files": -1}, [])


DOCUMENTS = st.lists(st.lists(st.sampled_from([None, "", "a", "bcd" * 9, "é"]), min_size=1, max_size=6), min_size=1)


@given(st.lists(DOCUMENTS, min_size=1, max_size=3), st.sampled_from(["concat", "best_fit"]))
def test_every_window_holds_what_was_read_whatever_the_documents(corpus, strategy):
    for window in Tiny(corpus, strategy=strategy).windows():
        assert conserved(window.prefix)
        sources = window.prefix.account.sources
        assert not conserved(replace(window.prefix, account=Account((SourceAccount(1, 1, 0, 0, 1), *sources[1:]))))
    texts = [[text for unit in units for text in unit] for units in corpus]
    total = sum((window.prefix.account for window in Tiny(corpus, strategy=strategy).windows()), Account())
    assert [(source.read, source.empty) for source in total.sources] == [
        (len(each), sum(not text for text in each)) for each in texts
    ]
