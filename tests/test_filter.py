"""Filters: what a predicate may be, which rows it keeps, and which row groups statistics rule out."""

from __future__ import annotations

import ast
import datetime as dt
import itertools
import math

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ingest.columns import Columns, Filtered, Picked
from ingest.config import IngestConfig
from ingest.drain import describe_account
from ingest.errors import ConfigError, DataError, ResumeError
from ingest.filter import Filter
from ingest.footer import read_footer
from ingest.parquet import read_documents
from ingest.position import Position
from ingest.replay import replay_step
from ingest.run import Run
from ingest.storage import Storage
from tests.conftest import lines_of, steps_without_ray, texts, write_config
from tests.test_parquet import CountingStorage

ROWS = {
    "language": ["en", "de", None, "en"],
    "score": [0.9, 0.2, 0.8, None],
    "stars": [1, None, 3, 2**60],
    "fine": [True, False, None, True],
    "meta": [{"kind": "a"}, None, {"kind": None}, {"kind": "b"}],
    "day": [dt.date(2024, 1, 1), dt.date(2024, 6, 1), None, dt.date(2025, 1, 1)],
    "at": [dt.datetime(2024, 1, 1, 12), None, dt.datetime(2024, 1, 2), dt.datetime(2023, 1, 1)],
    "my name": ["x", "y", "z", None],
}


def written(path, rows=ROWS, **options):
    pq.write_table(pa.table(rows), path, **options)
    return str(path)


def kept(path, text):
    """Numbers of the rows of the first row group that a filter keeps, and whether its statistics keep the group."""
    filtered, footer = Filter.parse(text, "a"), read_footer(Storage(), path)
    filtered.leaves(footer.metadata, path)
    (batch,) = pq.read_table(path).to_batches()
    mask = filtered.keeps(batch).to_pylist()
    return list(itertools.compress(range(len(mask)), mask)), not filtered.excluded(footer.metadata, [0])


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ('language == "en"', [0, 3]),
        ('"en" == language', [0, 3]),
        ('language != "en"', [1]),
        ('not language == "en"', [1]),
        ('language in ["en", "fr"]', [0, 3]),
        ('language not in ("en", "fr")', [1]),
        ("language is None", [2]),
        ("language is not None", [0, 1, 3]),
        ("score > 0.7", [0, 2]),
        ("0.2 <= score < 0.9", [1, 2]),
        ("1 > score", [0, 1, 2]),
        ('language == "en" and score > 0.7', [0]),
        ('language == "de" or score > 0.7', [0, 1, 2]),
        ('not (language == "en" and score > 0.7)', [1]),
        ("score > -1", [0, 1, 2]),
        ("stars > 1", [2, 3]),
        ("stars >= 1.5", [2, 3]),
        ("stars < 9999999999999999999", [0, 2, 3]),
        ("stars > score", [0, 2]),
        ("fine", [0, 3]),
        ("not fine", [1]),
        ("fine == False", [1]),
        ('meta.kind == "b"', [3]),
        ("meta.kind is None", [1, 2]),
        ('day >= "2024-06-01"', [1, 3]),
        ('"2024-01-01" < at <= "2024-01-02T00:00:00"', [0, 2]),
        ('column("my name") in ["x", "z"]', [0, 2]),
    ],
)
def test_a_predicate_keeps_the_rows_for_which_it_is_true(tmp_path, text, rows):
    assert kept(written(tmp_path / "a.parquet"), text) == (rows, True)


@pytest.mark.parametrize(
    "text",
    [
        'language == "fr"',
        'language > "en"',
        'language in ["aa", "zz"]',
        'language == "fr" and score > 0.1',
        'language == "fr" or score > 0.95',
        "score > 0.95",
        "not stars > 0",
        "0.95 < score < 2",
        "stars < 0",
        'meta.kind > "b"',
        'day > "2025-01-01"',
        'at < "2022-12-31"',
    ],
)
def test_statistics_rule_out_a_row_group_without_such_rows(tmp_path, text):
    assert kept(written(tmp_path / "a.parquet"), text) == ([], False)
    assert kept(written(tmp_path / "b.parquet", write_statistics=False), text) == ([], True)


@pytest.mark.parametrize(
    "kind", [pa.string(), pa.string_view(), pa.binary(), pa.dictionary(pa.int32(), pa.string())], ids=str
)
def test_text_of_every_kind_compares_with_text(tmp_path, kind):
    path = written(tmp_path / "a.parquet", {"language": pa.array(["en", "de", None]).cast(kind)})
    assert kept(path, 'language == "en"') == ([0], True)
    assert kept(path, 'language == "fr"') == ([], False)


def test_a_column_without_values_compares_to_null(tmp_path):
    path = written(tmp_path / "a.parquet", {"language": pa.nulls(2), "score": pa.array([None, None], pa.float64())})
    assert kept(path, 'language == "en"') == ([], False)
    assert kept(path, "score is None and not score is not None") == ([0, 1], True)


def test_a_value_that_is_not_a_number_loses_no_row(tmp_path):
    path = written(tmp_path / "a.parquet", {"score": [5.0, math.nan, 5.0]})
    assert kept(path, "score != 5") == ([1], True)
    assert kept(path, "not score > 0") == ([1], True)


def test_whether_a_field_is_null_is_read_and_not_taken_from_statistics(tmp_path):
    path = written(tmp_path / "a.parquet", {"meta": [{"kind": "a"}] * 2, "kind": ["a"] * 2})
    assert kept(path, "meta.kind is None") == ([], True)
    assert kept(path, "kind is None") == ([], False)


class Chunk:
    """A column chunk whose statistics say what they like."""

    def __init__(self, low, high, null_count=0):
        self.min, self.max, self.null_count = low, high, null_count
        self.has_min_max = self.has_null_count = True
        self.statistics, self.num_rows, self.num_columns, self.path = self, 3, 1, "score"

    def column(self, _):
        return self

    row_group = column

    @property
    def schema(self):
        return self

    def to_arrow_schema(self):
        return pa.schema([("score", pa.int64())])


@pytest.mark.parametrize(("low", "high"), [(9, 1), (math.nan, math.nan), (b"\0", b"\1"), ("a", "b"), (None, None)])
def test_statistics_that_contradict_themselves_or_are_of_another_type_lose_no_row(low, high):
    assert not Filter.parse("score == 5", "a").excluded(Chunk(low, high), [0])
    assert Filter.parse("score == 5", "a").excluded(Chunk(1, 4), [0])


def test_a_count_of_nulls_that_contradicts_the_bounds_loses_no_row():
    assert not Filter.parse("score == 2", "a").excluded(Chunk(1, 4, null_count=3), [0])


@pytest.mark.parametrize("text", ["score < 5", "score != 7"])
def test_bounds_of_short_floats_are_bytes_and_lose_no_row_where_these_read_as_digits(tmp_path, text):
    path = written(tmp_path / "a.parquet", {"score": pa.array(np.frombuffer(b"11", np.float16))})
    assert read_footer(Storage(), path).metadata.row_group(0).column(0).statistics.min == b"11"
    assert kept(path, text) == ([0], True)


@pytest.mark.parametrize("unit", ["s", "ms", "us", "ns"])
@pytest.mark.parametrize("zone", ["UTC", "America/New_York", "+02:00"])
def test_moments_compare_in_any_zone_and_unit(tmp_path, unit, zone):
    at = pa.array([1_704_067_200, 1_704_153_600, None], pa.int64()).cast(pa.timestamp("s", zone))  # 2024-01-01, -02
    other = at.cast(pa.timestamp("us", "UTC"))
    path = written(tmp_path / "a.parquet", {"at": at.cast(pa.timestamp(unit, zone)), "other": other})
    assert kept(path, 'at == "2024-01-01"') == ([0], True)
    assert kept(path, 'at > "2024-01-01T01:00:00+01:00"') == ([1], True)
    assert kept(path, 'at > "2024-01-03"') == ([], False)
    assert kept(path, "at == other") == ([0, 1], True)


@pytest.mark.parametrize(
    ("text", "rows"),
    [
        ("big > small", [0, 1]),
        ("small < big", [0, 1]),
        ("big == small", [2]),
        ("small < 9223372036854775808", [0, 1, 2]),
        ("small == 9223372036854775808", []),
        ("big > -1", [0, 1, 2]),
        ("big == 18446744073709551615", [0]),
    ],
)
def test_integers_compare_by_value_whatever_their_types_hold(tmp_path, text, rows):
    big, small = pa.array([2**64 - 1, 1, 2**63 - 1], pa.uint64()), pa.array([-1, -(2**63), 2**63 - 1])
    assert kept(written(tmp_path / "a.parquet", {"big": big, "small": small}), text)[0] == rows


VALUES = st.one_of(st.none(), st.sampled_from([0.0, 1.0, 2.0, math.nan, math.inf]))
LEAVES = st.builds(
    "{} {} {}".format,
    st.sampled_from(["a", "b"]),
    st.sampled_from(["==", "!=", "<", "<=", ">", ">="]),
    st.sampled_from(["0", "1.5", "2", "a", "b", "1e999"]),
) | st.sampled_from(["a is None", "b is not None", "a in [0, 2]", "b not in [1]", "0 < a <= 2"])
TREES = st.recursive(
    LEAVES,
    lambda part: st.one_of(
        st.builds("({} and {})".format, part, part),
        st.builds("({} or {})".format, part, part),
        st.builds("(not {})".format, part),
    ),
    max_leaves=5,
)


def reference(text, row):  # noqa: C901 - a language of its own
    """The same by Python, with None for null: only what the test's grammar has."""

    def value(node):
        match node:
            case ast.Name(id=name):
                return row[name]
            case ast.Constant(value=found):
                return found

    def compare(left, op, right):
        if isinstance(op, ast.Is | ast.IsNot):
            return (left is None) == isinstance(op, ast.Is)
        if left is None or right is None:
            return None
        if isinstance(op, ast.In | ast.NotIn):
            return (left in right) == isinstance(op, ast.In)
        made = {"Eq": left == right, "NotEq": left != right, "Lt": left < right, "LtE": left <= right}
        return (made | {"Gt": left > right, "GtE": left >= right})[type(op).__name__]

    def both(values, every):
        return not every if (not every) in values else None if None in values else every

    def truth(node):
        match node:
            case ast.BoolOp(op=op, values=parts):
                return both([truth(part) for part in parts], isinstance(op, ast.And))
            case ast.UnaryOp(operand=part):
                inner = truth(part)
                return None if inner is None else not inner
            case ast.Compare(left=left, ops=ops, comparators=others):
                found = [
                    [item.value for item in each.elts] if isinstance(each, ast.List) else value(each)
                    for each in (left, *others)
                ]
                return both(
                    [compare(a, op, b) for (a, b), op in zip(itertools.pairwise(found), ops, strict=True)], every=True
                )

    return truth(ast.parse(text, mode="eval").body)


@given(TREES, st.lists(st.tuples(VALUES, VALUES), min_size=1, max_size=4))
def test_rows_are_kept_as_in_sql_and_statistics_never_lose_one(tmp_path_factory, text, rows):
    path = written(
        tmp_path_factory.mktemp("any") / "a.parquet",
        {name: pa.array([row[i] for row in rows], pa.float64()) for i, name in enumerate("ab")},
    )
    found, read = kept(path, text)
    assert found == [n for n, (a, b) in enumerate(rows) if reference(text, {"a": a, "b": b}) is True]
    assert read or not found


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "invalid syntax at column 1"),
        ("score >", "invalid syntax at column"),
        ("score = 1", "invalid syntax"),
        ("score > 1\nand score < 2", "invalid syntax"),
        ("0.5", "where 0.5 at column 1 is no comparison"),
        ("1 < 2", "where 1 at column 1 is compared without a column"),
        ("a > 1 and score + 1 > 2", r"where score \+ 1 at column 11 is compared without a column"),
        ("a > score * 2", r"where score \* 2 at column 5 is no value"),
        ("len(text) > 5", r"where len\(text\) at column 1 is compared without a column"),
        ('__import__("os").system("ls")', "at column 1 is no comparison"),
        ("text[0] == 'a'", "at column 1 is compared without a column"),
        ("score == None", "where None at column 10 is null, so compare with `is None`"),
        ("score in []", r"where \[\] at column 10 is no list of values"),
        ("score in other", "where other at column 10 is no list"),
        ("score in [1, None]", "where None at column 14 is null"),
        ("1 in score", "where 1 at column 1 is no column"),
        ("score is 1", "where 1 at column 10 is not None"),
        ("'é' == 'é' or 1j == score", "where 'é' at column 1 is compared without"),
        ("name == 'é' and 1j == score", "where 1j at column 17 is no value"),
        ("score == -'a'", "where -'a' at column 10 is no value"),
        ("score > 99999999999999999999", "is beyond 64 bits"),
        ("lambda: score", "is no comparison"),
        ("score\0", "null bytes"),
        ("(" * 3000 + "score" + ")" * 3000, "of 6005 characters: use at most 4096"),
        ("not " * 33 + "score", "where not score at column 129 is nested deeper than 32 times"),
        ("not " * 1000 + "score", "nested"),
    ],
)
def test_what_is_no_predicate_is_refused_with_its_place(text, reason):
    with pytest.raises(
        ConfigError, match=rf"source web: filter must be a predicate on columns; got .*{reason}"
    ) as caught:
        Filter.parse(text, "web")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        (
            "lang == 'en'",
            "one column lang of plain values for filter .*; there are 0, columns are language, .*: mend the filter",
        ),
        ("meta.lang == 'en'", "one column meta.lang .*; there are 0"),
        ("language.x == 'en'", "one column language.x .*; there are 0"),
        ("meta is None", "one column meta .*; it is of type struct<kind: string>"),
        ("score == 'high'", "got column score of type double == 'high': mend"),
        ("language > 3", "got column language of type large_string > 3"),
        ("language", "got column language of type large_string == True"),
        ("fine < 2", "got column fine of type bool < 2"),
        ("day == 'soon'", r"got column day of type date32\[day\] == 'soon'"),
        ("at == '2024-01-01T00:00:00Z'", "got column at of type timestamp"),
        ("at == '2024-01-01T00:00:00.123456789'", "got column at of type timestamp"),
        ("language == score", "got column language of type large_string == column score of type double"),
    ],
)
def test_a_file_that_the_filter_does_not_fit_is_named_with_the_column(tmp_path, text, reason):
    path = written(tmp_path / "a.parquet")
    with pytest.raises(DataError, match=rf"a\.parquet.*{reason}"):
        Filter.parse(text, "a").leaves(read_footer(Storage(), path).metadata, path)


def test_white_space_and_quotes_make_no_difference():
    assert Filter.parse(" a  ==  'x' and(b>1)", "s") == Filter.parse('a == "x" and b > 1', "s")
    assert Filter.parse("a == 'x'", "s").text == "a == 'x'"


def read(path, text, storage=None, row_group=0):
    return list(
        read_documents(storage or Storage(), path, row_group, Columns("text", ("text",), Filter.parse(text, "a")))
    )


def test_reading_costs_the_bytes_of_text_and_of_the_filter_s_columns(tmp_path):
    wide = {f"column{i}": [f"{i} {row}" * 20 for row in range(100)] for i in range(50)}
    rows = {**wide, "score": [float(i) for i in range(100)], "text": ["abc"] * 100}
    path, storage = written(tmp_path / "a.parquet", rows), CountingStorage()
    left_out, picked = read(path, "score >= 97.0", storage)
    assert left_out == Filtered(97)
    assert (picked.rows.to_pylist(), picked.numbers.tolist()) == (["abc"] * 3, [97, 98, 99])
    group = read_footer(Storage(), path).metadata.row_group(0)
    assert storage.reads == [64 << 10, sum(group.column(index).total_compressed_size for index in (50, 51))]


def test_a_row_group_that_statistics_rule_out_is_not_read(tmp_path):
    path = written(tmp_path / "a.parquet", {"text": list("abcd"), "n": [1, 2, 3, 4]}, row_group_size=2)
    storage = CountingStorage()
    assert read(path, "n > 2", storage) == [Filtered(2)]
    assert len(storage.reads) == 1
    (picked,) = read(path, "n > 2", row_group=1)
    assert isinstance(picked, Picked)
    assert picked.rows.to_pylist() == ["c", "d"]


def test_a_row_that_is_filtered_out_need_not_be_utf8(tmp_path):
    path = written(tmp_path / "a.parquet", {"text": [b"a", b"\xff", b"b"], "n": [1, 2, 3]})
    assert [len(item) for item in read(path, "n != 2") if isinstance(item, Picked)] == [2]
    with pytest.raises(DataError, match="row 1 must be UTF-8"):
        read(path, "n > 0")


@pytest.mark.parametrize("skip", [False, True])
def test_values_that_a_comparison_cannot_take_are_refused_and_never_skipped_as_undecodable(tmp_path, skip):
    late = pa.array([dt.datetime(2924, 1, 1), dt.datetime(2024, 1, 1)], pa.timestamp("us"))
    rows = {"text": ["a", "b"], "late": late, "at": pa.array([0, 1], pa.timestamp("ns"))}
    path, columns = written(tmp_path / "a.parquet", rows), Columns("text", ("text",), Filter.parse("late > at", "a"))
    with pytest.raises(DataError, match=r"row group 0: filter late > at must compare values that fit .*: mend the"):
        list(read_documents(Storage(), path, 0, columns, skip=skip))


@pytest.fixture
def corpus(tmp_path, tokenizer_file):
    """Source ``a``: 4 files of 30 rows in row groups of 10, language and number beside the text; made by a filter."""
    documents = texts(120, seed=1)
    for number in range(4):
        mine = documents[number * 30 : number * 30 + 30]
        rows = {"language": ["en", "de", "fr"] * 10, "n": list(range(30)), "text": mine}
        (tmp_path / "a").mkdir(exist_ok=True)
        pq.write_table(pa.table(rows), tmp_path / f"a/part-{number}.parquet", row_group_size=10)

    def write(text=None, **settings):
        source = {"name": "a", "path": "a"} | ({} if text is None else {"filter": text})
        tokenizer = {"path": str(tokenizer_file), "backend": "tokenizers"}
        return write_config(tmp_path / "run.yaml", **{"sources": [source], "tokenizer": tokenizer, **settings})

    return write


def test_filtered_rows_are_counted_on_their_own_and_the_others_are_trained(corpus):
    path = corpus('language == "en" and n < 20')
    end = steps_without_ray(path)[-1].position
    (a,) = end.counts.account.sources
    assert (a.read, a.documents, a.filtered, a.empty, a.bad) == (120, 28, 92, 0, 0)
    assert a.tokens == end.tokens
    assert (end.counts.skipped, end.counts.account.skips) == (0, ())
    assert Position.from_json(end.to_json()) == end
    told = describe_account(Run.prepare(IngestConfig.from_yaml(path)), end)["sources"][0]
    assert (told["read"], told["filtered"]) == (120, 92)


def test_a_filtered_run_resumes_from_every_step(corpus):
    path = corpus('language != "de"', epochs=2)
    whole = steps_without_ray(path)
    for step in whole[::3]:
        rest = steps_without_ray(path, Position.from_json(step.position.to_json()))
        assert lines_of(rest, step.position) == lines_of(whole)[step.position.step :]


def test_inspect_names_the_rows_of_the_files(corpus, tmp_path):
    run = Run.prepare(IngestConfig.from_yaml(corpus('language == "fr" and n >= 20')))
    seen = {
        (piece.file, piece.row_group, piece.row) for row in replay_step(run, 1, run.start()) for piece in row.pieces
    }
    assert seen
    assert {group for _, group, _ in seen} == {2}
    assert {row % 3 for _, _, row in seen} == {0}  # rows 0, 3, 6 and 9 of row group 2 are 20, 23, 26 and 29 of the file


def test_a_filter_is_in_the_fingerprint_in_one_form_and_absent_where_there_is_none(corpus):
    plain = Run.prepare(IngestConfig.from_yaml(corpus()))
    assert "filter" not in plain.fingerprint["sources"]["a"]
    run = Run.prepare(IngestConfig.from_yaml(corpus("n<  20")))
    assert run.fingerprint["sources"]["a"]["filter"] == "n < 20"
    Run.prepare(IngestConfig.from_yaml(corpus("n < 20"))).require(run.start())
    with pytest.raises(ResumeError, match=r"sources.a.filter: n < 20 then, n < 10 now"):
        Run.prepare(IngestConfig.from_yaml(corpus("n < 10"))).require(run.start())


def test_sizes_are_estimated_behind_the_filter(corpus):
    whole = Run.prepare(IngestConfig.from_yaml(corpus("n >= 0"))).manifest.sources[0]
    part = Run.prepare(IngestConfig.from_yaml(corpus('language == "en" and n < 20'))).manifest.sources[0]
    assert part.unit_tokens.tolist()[2::3] == [1] * 4
    assert 0.15 < part.unit_tokens.sum() / whole.unit_tokens.sum() < 0.35
    assert part.warnings == (
        "filter language == 'en' and n < 20: rows are those before it, tokens those behind it, as sampled; "
        "statistics rule out 4 of 12 row groups, which are not read",
    )


def test_a_stored_manifest_of_another_filter_is_refused(corpus, tmp_path):
    stored = {"manifest": str(tmp_path / "manifest.json.gz")}
    for made, wanted in ((None, "n < 20"), ("n >= 20", "n < 20"), ("n < 20", None)):
        whole = Run.prepare(IngestConfig.from_yaml(corpus(made, **stored)), rebuild=True)
        again = Run.prepare(IngestConfig.from_yaml(corpus(made, **stored)))
        assert (again.manifest.hash, again.manifest.sources[0].filter) == (whole.manifest.hash, made)
        with pytest.raises(
            DataError,
            match=rf"manifest\.json\.gz must be made with the filter of source a; got {made}, not {wanted}: run",
        ):
            Run.prepare(IngestConfig.from_yaml(corpus(wanted, **stored)))


def test_a_filter_that_statistics_show_to_leave_nothing_is_refused(corpus):
    with pytest.raises(DataError, match=r"source a: filter n > 99 must leave rows; .* 12 row groups it leaves none"):
        Run.prepare(IngestConfig.from_yaml(corpus("n > 99")))


def test_an_endless_run_whose_filter_leaves_nothing_ends(corpus):
    path = corpus('language == "eo"', total_tokens=1000)
    with pytest.raises(DataError, match=r"none in a whole pass over each .* check path, text_column and filter"):
        steps_without_ray(path)


def test_packed_rows_have_no_filter(corpus, tmp_path):
    from ingest.pack import pack, packing_run

    run = packing_run(Run.prepare(IngestConfig.from_yaml(corpus())))
    steps = iter(steps_without_ray(run.config))
    pack(steps, run.packed_format, run.storage, str(tmp_path / "packed"), lanes=4)
    sources = [{"name": "a", "path": "packed", "filter": "n > 1"}]
    with pytest.raises(ConfigError, match=r"source a: filter must stand beside documents .*; got packed rows"):
        Run.prepare(IngestConfig.from_yaml(corpus(sources=sources)))


def test_other_kinds_of_sources_are_filtered_too(tmp_path, corpus):
    rows = {
        "ids": [[1, 2, 3], [4], [5, 6]],
        "prompt": ["a", "b", "c"],
        "response": ["x", "y", "z"],
        "keep": [True, False, True],
    }
    written(tmp_path / "kinds.parquet", rows)
    sources = [
        {"name": "ids", "path": "kinds.parquet", "tokens": "ids", "filter": "keep"},
        {"name": "pairs", "path": "kinds.parquet", "prompt": "prompt", "response": "response", "filter": "not keep"},
    ]
    account = steps_without_ray(corpus(sources=sources))[-1].position.counts.account
    assert [(source.read, source.documents, source.filtered) for source in account.sources] == [(3, 2, 1), (3, 1, 2)]


def test_sizes_are_estimated_from_row_groups_all_over_a_sorted_file(tmp_path, tokenizer_file):
    words = [("a " * 5 if n < 80 else "a " * 50) if n >= 40 else "a" for n in range(160)]
    table = pa.table({"n": range(160), "text": words})
    pq.write_table(table, tmp_path / "a.parquet", row_group_size=10)
    tokenizer = {"path": str(tokenizer_file), "backend": "tokenizers"}
    source = {"name": "a", "path": "a.parquet", "filter": "not n < 45"}
    run = Run.prepare(IngestConfig.from_yaml(write_config(tmp_path / "r.yaml", sources=[source], tokenizer=tokenizer)))
    tokens = steps_without_ray(run.config)[-1].position.tokens
    assert 0.8 < run.manifest.sources[0].unit_tokens.sum() / tokens < 1.25
