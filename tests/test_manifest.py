"""The manifest: what is indexed, its identity, its bytes, its cache, and what a difference says."""

from __future__ import annotations

import gzip
import json
import pickle
import shutil

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ingest.config import IngestConfig, SourceConfig, TokenizerConfig
from ingest.errors import DataError, StorageError
from ingest.index import Ticker
from ingest.manifest import Manifest, SourceManifest, build_manifest, find_manifest, load_manifest
from ingest.source import FileEntry, UnitInfo
from ingest.storage import Storage


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    monkeypatch.setenv("INGEST_CACHE", str(tmp_path / "cache"))
    return tmp_path / "cache"


class Encoder:
    """One token for every four bytes, rounded up; counts its calls."""

    def __init__(self):
        self.calls, self.bytes = 0, 0

    def __call__(self, texts):
        self.calls += 1
        sizes = [len(text.encode()) for text in texts]
        self.bytes += sum(sizes)
        lengths = np.array([(size + 3) // 4 for size in sizes])
        return np.zeros(lengths.sum(), np.int32), lengths


def write(path, texts, **options):
    path.parent.mkdir(parents=True, exist_ok=True)
    array = texts if isinstance(texts, pa.Array) else pa.array(texts, pa.string())
    pq.write_table(pa.table({"text": array}), path, **options)


def settings(*paths, **options):
    sources = tuple(SourceConfig(name=f"s{index}", path=str(path)) for index, path in enumerate(paths))
    return IngestConfig(sources=sources, tokenizer=TokenizerConfig(path="tokenizer.json"), **options)


def build(*paths, progress=None):
    return build_manifest(settings(*paths), Storage(), Encoder(), progress)


def names(source):
    return [file.path.rpartition("/")[2] for file in source.files]


def test_units_are_the_row_groups_with_rows_in_order_of_paths(tmp_path):
    write(tmp_path / "d/b.parquet", ["x" * 8, "y" * 8, "z" * 8], row_group_size=2)
    write(tmp_path / "d/a.parquet", ["a" * 8])
    write(tmp_path / "d/c.parquet", [])
    (source,) = build(tmp_path / "d").sources
    assert names(source) == ["a.parquet", "b.parquet", "c.parquet"]
    assert source.unit_file.tolist() == [0, 1, 1]
    assert source.unit_row_group.tolist() == [0, 0, 1]
    assert source.unit_rows.tolist() == [1, 2, 1]
    assert [array.dtype for array in (source.unit_file, source.unit_row_group)] == [np.int32, np.int32]
    assert [array.dtype for array in (source.unit_rows, source.unit_text_bytes)] == [np.int64, np.int64]
    assert source.warnings == ("1 of 3 files hold no rows",)
    assert source.unit(2) == UnitInfo(*source.files[1][:3], row_group=1, rows=1)


def test_text_bytes_are_those_of_the_uncompressed_text_column(tmp_path):
    options = {"use_dictionary": False, "compression": "zstd", "write_statistics": False}
    pq.write_table(pa.table({"id": [1], "text": ["a" * 4096]}), tmp_path / "a.parquet", **options)
    (source,) = build(tmp_path / "a.parquet").sources
    chunk = pq.read_metadata(tmp_path / "a.parquet").row_group(0).column(1)
    assert source.unit_text_bytes.tolist() == [chunk.total_uncompressed_size]
    assert chunk.total_uncompressed_size > 4096 > chunk.total_compressed_size


def test_files_of_every_text_type_mix_and_the_first_may_be_all_null(tmp_path):
    write(tmp_path / "d/a.parquet", pa.nulls(2))
    for name, kind in zip("bcde", (pa.string(), pa.large_string(), pa.string_view(), pa.binary()), strict=True):
        write(tmp_path / f"d/{name}.parquet", pa.array(["a", None]).cast(kind))
    write(tmp_path / "d/f.parquet", pa.array(["a", "a"]).dictionary_encode())
    (source,) = build(tmp_path / "d").sources
    assert source.unit_rows.tolist() == [2] * 6


def test_a_file_without_the_column_is_refused_by_name(tmp_path):
    write(tmp_path / "d/a.parquet", ["a"])
    pq.write_table(pa.table({"body": ["a"], "id": [1]}), tmp_path / "d/b.parquet")
    with pytest.raises(
        DataError, match=r"d/b\.parquet must have a text column text; .* columns are body, id: set text"
    ):
        build(tmp_path / "d")


def test_a_truncated_file_among_many_is_refused_by_name(tmp_path):
    for index in range(50):
        write(tmp_path / f"d/{index:02}.parquet", ["a"])
    data = (tmp_path / "d/31.parquet").read_bytes()
    (tmp_path / "d/31.parquet").write_bytes(data[:-30])
    with pytest.raises(DataError, match=r"d/31\.parquet must be a Parquet file; .* truncated"):
        build(tmp_path / "d")


def test_a_source_without_rows_is_refused(tmp_path):
    write(tmp_path / "d/a.parquet", [])
    with pytest.raises(DataError, match="source s0 must hold rows; its 1 files hold none: check its path"):
        build(tmp_path / "d")


def test_the_tokens_of_a_unit_are_estimated_from_a_sample(tmp_path):
    write(tmp_path / "d/a.parquet", ["a" * 40, None, "b" * 60], use_dictionary=False)
    (source,) = build(tmp_path / "d").sources
    assert source.tokens_per_mib == 1 << 18
    assert source.unit_tokens.tolist() == [source.unit_text_bytes[0] // 4]


def test_the_text_behind_a_dictionary_is_estimated_from_its_rows(tmp_path):
    write(tmp_path / "d/a.parquet", ["a" * 400, None] * 5000)
    (source,) = build(tmp_path / "d").sources
    assert source.unit_text_bytes[0] < 10_000
    assert source.bytes_per_row == 200 + 1  # 64 documents in 127 rows
    assert source.unit_tokens.tolist() == [10_000 * (201 // 4) * source.tokens_per_mib >> 20]
    assert (
        Manifest.from_bytes(Manifest((source,)).to_bytes()).sources[0].unit_tokens.tolist()
        == source.unit_tokens.tolist()
    )


def test_a_unit_has_at_least_one_token():
    assert make(text_bytes=[0, 4, 1 << 40], tokens_per_mib=1 << 18).unit_tokens.tolist() == [1, 1, 1 << 38]


def test_the_sample_is_bounded_in_files_documents_and_bytes(tmp_path):
    for index in range(20):
        write(tmp_path / f"many/{index:02}.parquet", ["abcd"] * 100)
    encode = Encoder()
    build_manifest(settings(tmp_path / "many"), Storage(), encode)
    assert (encode.calls, encode.bytes) == (8, 8 * 64 * 4)
    write(tmp_path / "huge.parquet", ["ä" * 1_000_000])
    encode = Encoder()
    build_manifest(settings(tmp_path / "huge.parquet"), Storage(), encode)
    assert encode.bytes == 256 << 10


def test_a_source_of_nulls_is_told_apart_and_gets_a_guess(tmp_path):
    write(tmp_path / "d/a.parquet", [None, None])
    (source,) = build(tmp_path / "d").sources
    assert source.tokens_per_mib == 1 << 18
    assert source.warnings == ("no text in the first documents of 1 files; sizes are guesses",)


def test_the_same_files_elsewhere_have_the_same_hash(tmp_path):
    write(tmp_path / "d/a.parquet", ["a"])
    write(tmp_path / "d/e/b.parquet", ["b"])
    shutil.copytree(tmp_path / "d", tmp_path / "moved")
    here, there = build(tmp_path / "d"), build(tmp_path / "moved")
    assert here.hash == there.hash
    assert here.diff(there) == []


def test_another_document_of_the_same_length_has_another_hash(tmp_path):
    write(tmp_path / "a.parquet", ["a"])
    write(tmp_path / "b.parquet", ["b"])
    assert build(tmp_path / "a.parquet").hash != build(tmp_path / "b.parquet").hash


def make(name="web", files=("a", "b"), sizes=None, hashes=None, text_bytes=(8, 8), tokens_per_mib=1000):
    sizes = sizes or [100] * len(files)
    hashes = hashes or [f"{path.rpartition('/')[2]:0>16}" for path in files]
    return SourceManifest(
        name=name,
        files=tuple(FileEntry(*parts, "1") for parts in zip(files, sizes, hashes, strict=True)),
        unit_file=[min(index, len(files) - 1) for index in range(len(text_bytes))],
        unit_row_group=range(len(text_bytes)),
        unit_rows=[1] * len(text_bytes),
        unit_text_bytes=text_bytes,
        tokens_per_mib=tokens_per_mib,
    )


def test_the_hash_of_today_stays():
    assert make().hash == "19838afb52944dbbed7efb303d26c872"
    assert Manifest((make(),)).hash == "de5710435e7866a3101a05ba8e55443a"


def test_estimates_paths_and_versions_are_not_in_the_hash():
    moved = make(files=("x/a", "x/b"), tokens_per_mib=2000)
    assert moved.hash == make().hash


@pytest.mark.parametrize(
    "other",
    [make(sizes=[100, 101]), make(hashes=["0", "1"]), make(text_bytes=[8, 9]), make(text_bytes=[8]), make(files="ba")],
)
def test_sizes_footers_units_and_order_are_in_the_hash(other):
    assert other.hash != make().hash


def test_the_arrays_are_read_only_also_after_a_journey():
    array = np.array([8, 8])
    source = make(text_bytes=array)
    array[0] = 9
    for item in (source, pickle.loads(pickle.dumps(source))):
        assert item.unit_text_bytes.tolist() == [8, 8]
        with pytest.raises(ValueError, match="read-only"):
            item.unit_rows[0] = 2
        with pytest.raises(ValueError, match="read-only"):
            item.unit_tokens[0] = 2


def test_arrays_that_do_not_fit_each_other_are_refused():
    with pytest.raises(DataError, match="source web: the manifest's arrays must fit each other"):
        SourceManifest("web", (FileEntry("a", 1, "0", ""),), [1], [0], [1], [1], 1)
    with pytest.raises(DataError, match="source web: the manifest's arrays must fit each other"):
        SourceManifest("web", (FileEntry("a", 1, "0", ""),), [0], [0, 1], [1], [1], 1)


def test_a_manifest_reads_back_as_written():
    manifest = Manifest((make(), make(name="code", files=("ü /1.parquet",))))
    again = Manifest.from_bytes(manifest.to_bytes())
    assert again.hash == manifest.hash
    assert again.to_bytes() == manifest.to_bytes()
    assert again.sources[1].files == (FileEntry("ü /1.parquet", 100, "00000001.parquet", "1"),)
    assert again.sources[0].unit_tokens.tolist() == manifest.sources[0].unit_tokens.tolist()


def altered(change):
    body = json.loads(gzip.decompress(Manifest((make(),)).to_bytes()))
    change(body)
    return gzip.compress(json.dumps(body).encode())


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "must be gzip over JSON"),
        (b"PAR1", "must be gzip over JSON; BadGzipFile"),
        (Manifest((make(),)).to_bytes()[:-20], "must be gzip over JSON; EOFError"),
        (gzip.compress(b"[]"), "must be gzip over JSON; TypeError"),
        (altered(lambda body: body.update(version=1)), "must be of version 4; got 'ingest manifest' of version 1"),
        (altered(lambda body: body["sources"][0].pop("files")), "must be complete; KeyError, 'files'"),
        (altered(lambda body: body["sources"][0].update(unit_rows=["x", "y"])), "must be complete; ValueError"),
        (altered(lambda body: body["sources"][0].update(unit_rows=[1, 2])), "must match its hash; stored "),
        (altered(lambda body: body["sources"][0].update(unit_file=[0, 7])), "arrays must fit each other"),
    ],
)
def test_bytes_that_are_no_manifest_are_refused_with_the_reason(data, reason):
    with pytest.raises(DataError, match=rf"{reason}.*: run `ingest index` again"):
        Manifest.from_bytes(data)


def difference(old, new):
    return Manifest((old,)).diff(Manifest((new,)))


def test_a_difference_names_the_files():
    old = make(files=("d/a", "d/b", "d/c"))
    assert difference(old, make(files=("d/a", "d/b", "d/c"), sizes=[100, 120, 100])) == [
        "source web: d/b changed (100 bytes, now 120)"
    ]
    assert difference(old, make(files=("d/a", "d/b", "d/c"), hashes=["a".zfill(16), "9".zfill(16), "c".zfill(16)])) == [
        "source web: d/b changed (100 bytes, footer hash 000000000000000b, now 0000000000000009)"
    ]
    assert difference(old, make(files=("d/a", "d/c"))) == ["source web: d/b is gone (100 bytes)"]
    assert difference(old, make(files=("d/a", "d/b", "d/c", "d/e"))) == ["source web: d/e is new (100 bytes)"]


def test_a_difference_sees_through_a_move():
    old = make(files=("d/a", "d/b", "d/c"))
    assert difference(old, make(files=("s3://x/a", "s3://x/b", "s3://x/c"))) == []
    assert difference(old, make(files=("s3://x/a", "s3://x/b", "s3://x/c"), sizes=[100, 120, 100])) == [
        "source web: s3://x/b changed (100 bytes, now 120)"
    ]
    hashes = ["b".zfill(16), "a".zfill(16), "c".zfill(16)]
    assert difference(old, make(files=("x/a", "x/b", "x/c"), hashes=hashes)) == [
        "source web: the same files in another order, from x/a on"
    ]


def test_a_difference_in_the_text_column_alone_is_told():
    assert difference(make(), make(text_bytes=[8, 9])) == [
        "source web: the same files, but other row groups or another text column"
    ]


def test_a_difference_in_the_sources_is_told():
    web, code = make(), make(name="code")
    assert Manifest((web,)).diff(Manifest((code,))) == ["source web is gone", "source code is new"]
    assert Manifest((web, code)).diff(Manifest((code, web))) == [
        "sources are in another order: web, code, now code, web"
    ]


def test_a_long_difference_is_cut_and_counted():
    files = tuple(f"{index:02}" for index in range(14))
    lines = difference(make(files=files), make(files=files, sizes=[101] * 14))
    assert len(lines) == 11
    assert lines[9:] == ["source web: 09 changed (100 bytes, now 101)", "and 4 more"]


def test_progress_is_said_every_two_seconds_and_at_the_end():
    lines, times = [], iter([0.0, 1.0, 2.5, 2.5, 3.0, 5.0, 5.0, 5.0])
    ticker = Ticker(lines.append, 4, lambda: next(times))
    assert list(ticker.count("abcd")) == ["a", "b", "c", "d"]
    ticker.end()
    assert lines == ["indexed 2 of 4 files", "indexed 4 of 4 files"]


@pytest.mark.slow
def test_three_thousand_tiny_files_are_indexed_in_parallel_and_counted(tmp_path):
    write(tmp_path / "a.parquet", ["a", "b"])
    (tmp_path / "d").mkdir()
    for index in range(3000):
        (tmp_path / f"d/{index:04}.parquet").hardlink_to(tmp_path / "a.parquet")
    lines = []
    (source,) = build(tmp_path / "d", progress=lines.append).sources
    assert source.num_units == 3000
    assert lines[-1] == "indexed 3000 of 3000 files"


def test_a_cached_manifest_is_used_until_a_file_changes(tmp_path):
    write(tmp_path / "d/a.parquet", ["a"])
    encode, config = Encoder(), settings(tmp_path / "d")
    first = load_manifest(config, Storage(), encode)
    assert encode.calls == 2
    assert load_manifest(config, Storage(), encode).hash == first.hash
    assert encode.calls == 3
    write(tmp_path / "d/a.parquet", ["changed"])
    second = load_manifest(config, Storage(), encode)
    assert encode.calls == 5
    assert first.diff(second) == [
        f"source s0: {tmp_path}/d/a.parquet changed ({first.sources[0].files[0].size_bytes} bytes, "
        f"now {second.sources[0].files[0].size_bytes})"
    ]


def test_another_tokenizer_makes_another_estimate(tmp_path):
    write(tmp_path / "d/a.parquet", ["abcd"])

    def one_token_a_byte(texts):
        return np.zeros(sum(map(len, texts)), np.int32), np.array([len(text) for text in texts])

    config = settings(tmp_path / "d")
    assert load_manifest(config, Storage(), Encoder()).sources[0].tokens_per_mib == 1 << 18
    assert load_manifest(config, Storage(), one_token_a_byte).sources[0].tokens_per_mib == 1 << 20


def test_a_damaged_cache_is_made_again(tmp_path, cache):
    write(tmp_path / "d/a.parquet", ["a"])
    config = settings(tmp_path / "d")
    first = load_manifest(config, Storage(), Encoder())
    for file in cache.rglob("*.gz"):
        file.write_bytes(b"damaged")
    assert find_manifest(first.hash) is None
    assert load_manifest(config, Storage(), Encoder()).hash == first.hash
    assert find_manifest(first.hash) is not None


def test_a_cache_that_cannot_be_written_is_said_and_passed_over(tmp_path, monkeypatch):
    write(tmp_path / "d/a.parquet", ["a"])
    monkeypatch.setenv("INGEST_CACHE", str(tmp_path / "d/a.parquet/cache"))
    lines = []
    assert load_manifest(settings(tmp_path / "d"), Storage(), Encoder(), lines.append).sources[0].num_units == 1
    assert [line.partition(";")[0] for line in lines] == ["indexed 1 of 1 files"] + ["the manifest is not cached"] * 2


def test_every_built_manifest_is_found_by_its_hash(tmp_path):
    write(tmp_path / "d/a.parquet", ["a"])
    manifest = build(tmp_path / "d")
    found = find_manifest(manifest.hash)
    assert found is not None
    assert found.to_bytes() == manifest.to_bytes()
    assert find_manifest("0" * 32) is None
    assert find_manifest("../by-hash/" + manifest.hash) is None


def test_a_manifest_in_the_settings_is_made_once_and_then_kept(tmp_path):
    write(tmp_path / "d/a.parquet", ["a"])
    config = settings(tmp_path / "d", manifest=str(tmp_path / "m/manifest.json.gz"))
    first = load_manifest(config, Storage(), Encoder())
    assert Manifest.from_bytes((tmp_path / "m/manifest.json.gz").read_bytes()).hash == first.hash
    write(tmp_path / "d/a.parquet", ["changed"])
    assert load_manifest(config, Storage(), Encoder()).hash == first.hash
    again = load_manifest(config, Storage(), Encoder(), rebuild=True)
    assert again.hash != first.hash
    assert load_manifest(config, Storage(), Encoder()).hash == again.hash


def test_a_manifest_in_the_settings_that_does_not_fit_is_refused_by_name(tmp_path):
    write(tmp_path / "d/a.parquet", ["a"])
    path = tmp_path / "manifest.json.gz"
    path.write_bytes(b"damaged")
    with pytest.raises(DataError, match=r"manifest\.json\.gz: manifest must be gzip over JSON"):
        load_manifest(settings(tmp_path / "d", manifest=str(path)), Storage(), Encoder())
    path.write_bytes(Manifest((make(),)).to_bytes())
    with pytest.raises(
        DataError, match=r"manifest\.json\.gz must hold the sources .* got \['web'\], not \['s0'\]: run"
    ):
        load_manifest(settings(tmp_path / "d", manifest=str(path)), Storage(), Encoder())


def test_a_manifest_in_the_settings_that_cannot_be_written_is_an_error(tmp_path):
    write(tmp_path / "d/a.parquet", ["a"])
    config = settings(tmp_path / "d", manifest=str(tmp_path / "d/a.parquet/manifest.json.gz"))
    with pytest.raises(StorageError, match=r"a\.parquet/manifest\.json\.gz failed"):
        load_manifest(config, Storage(), Encoder())
