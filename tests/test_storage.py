"""Storage on local files and on a real S3 server, its globs and its retries."""

from __future__ import annotations

import pickle
import subprocess
import sys

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ingest.config import IngestConfig, SourceConfig, StorageConfig, TokenizerConfig
from ingest.errors import ConfigError, DataError, StorageError
from ingest.glob import glob_regex
from ingest.manifest import build_manifest
from ingest.parquet import read_documents
from ingest.storage import FileInfo, Storage
from tests.weed import free_port

ODD_NAMES = ["a b", "100%", "x%20y", "#hash", "ünï 数", "a+b", "[a]", "what?"]


def write(root, *names, data=b"x"):
    for name in names:
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(data)


def found(root, *paths):
    return [item.path.removeprefix(f"{root}/") for item in Storage().find_parquet([f"{root}/{path}" for path in paths])]


def test_a_directory_is_searched_recursively_and_strays_are_passed_over(tmp_path):
    write(tmp_path, "b.parquet", "a.PARQUET", "deep/er/c.parquet")
    write(
        tmp_path, "_SUCCESS", ".b.parquet.crc", "_hidden.parquet", ".x.parquet", "_tmp/d.parquet", "deep/.e/f.parquet"
    )
    write(tmp_path, "README.md", "b.parquet.crc")
    write(tmp_path, "empty.parquet", data=b"")
    assert found(tmp_path, "") == ["a.PARQUET", "b.parquet", "deep/er/c.parquet"]


def test_a_hidden_directory_that_is_named_is_searched(tmp_path):
    write(tmp_path, "_data/.v1/a.parquet")
    assert found(tmp_path, "_data/.v1") == ["_data/.v1/a.parquet"]


@pytest.mark.parametrize(
    ("glob", "expected"),
    [
        ("*.parquet", ["a1.parquet", "a2.parquet"]),
        ("a?.parquet", ["a1.parquet", "a2.parquet"]),
        ("a[2-9].parquet", ["a2.parquet"]),
        ("a[!2].parquet", ["a1.parquet"]),
        ("*.pq", ["b.pq"]),
        ("*", ["a1.parquet", "a2.parquet", "day=1/c.parquet", "day=2/x/d.parquet"]),
        ("day=*", ["day=1/c.parquet", "day=2/x/d.parquet"]),
        ("day=*/*.parquet", ["day=1/c.parquet"]),
        ("**/*.parquet", ["a1.parquet", "a2.parquet", "day=1/c.parquet", "day=2/x/d.parquet"]),
        ("day=2/**/d.parquet", ["day=2/x/d.parquet"]),
        ("**", ["a1.parquet", "a2.parquet", "day=1/c.parquet", "day=2/x/d.parquet"]),
    ],
)
def test_a_glob_stands_for_its_files_and_for_the_parquet_files_of_its_directories(tmp_path, glob, expected):
    write(
        tmp_path, "a1.parquet", "a2.parquet", "b.pq", "day=1/c.parquet", "day=2/x/d.parquet", "_x.parquet", "notes.txt"
    )
    assert found(tmp_path, glob) == expected


def test_the_parts_of_a_glob_stop_at_a_slash():
    assert glob_regex("a*").fullmatch("ab/c") is None
    assert glob_regex("a?c").fullmatch("a/c") is None
    assert glob_regex("a[!b]c").fullmatch("a/c") is None
    assert glob_regex("a.c").fullmatch("abc") is None


def test_files_that_several_paths_stand_for_come_once_and_sorted(tmp_path):
    write(tmp_path, "b.parquet", "a.parquet")
    assert found(tmp_path, "b.parquet", "", "*.parquet") == ["a.parquet", "b.parquet"]


def test_a_named_file_is_taken_whatever_its_name(tmp_path):
    write(tmp_path, "_data.bin", data=b"12345")
    (item,) = Storage().find_parquet([f"{tmp_path}/_data.bin"])
    assert item == FileInfo(f"{tmp_path}/_data.bin", 5, str((tmp_path / "_data.bin").stat().st_mtime_ns))


@pytest.mark.parametrize("name", ODD_NAMES)
def test_names_are_taken_raw(tmp_path, name):
    storage, path = Storage(), f"{tmp_path}/{name}.parquet"
    storage.write_bytes(path, name.encode())
    assert storage.read_bytes(path) == name.encode()
    assert [item.path for item in storage.find_parquet([path])] == [path]
    assert [item.path for item in storage.find_parquet([f"file://{tmp_path}"])] == [path]


def test_a_named_file_of_no_bytes_is_refused(tmp_path):
    write(tmp_path, "a.parquet", data=b"")
    with pytest.raises(DataError, match=r"a\.parquet has 0 bytes: write it again"):
        Storage().find_parquet([f"{tmp_path}/a.parquet"])


def test_paths_that_stand_for_nothing_are_refused_by_name(tmp_path):
    (tmp_path / "void").mkdir()
    with pytest.raises(StorageError, match=r"/void holds none .* check the path"):
        Storage().find_parquet([f"{tmp_path}/void"])
    with pytest.raises(StorageError, match=r"/\*\.parquet holds none"):
        Storage().find_parquet([f"{tmp_path}/*.parquet"])
    with pytest.raises(StorageError, match=r"/nowhere/\*\.parquet holds none"):
        Storage().find_parquet([f"{tmp_path}/nowhere/*.parquet"])
    with pytest.raises(StorageError, match="/nowhere does not exist: check its spelling"):
        Storage().find_parquet([f"{tmp_path}/nowhere"])
    with pytest.raises(StorageError, match=r"open .*/nowhere failed; .*: check the path"):
        Storage().open(f"{tmp_path}/nowhere")


def test_settings_that_cannot_work_are_refused():
    with pytest.raises(ConfigError, match=r"ftp://host, .*: correct it"):
        Storage().info("ftp://host/a")
    with pytest.raises(ConfigError, match="got s3:///: write s3://BUCKET/PATH"):
        Storage().info("s3:///a")
    with pytest.raises(ConfigError, match=r"write file:///data/a"):
        Storage().info("file://host/data/a")
    with pytest.raises(ConfigError, match=r"storage\.endpoint must be .*; got localhost:8333"):
        Storage(StorageConfig(endpoint="localhost:8333")).info("s3://b/a")


@pytest.mark.parametrize(
    "path",
    ["s3://key:hunter2@bucket/a", "abfss://c@a.dfs.core.windows.net/a?sig=hunter2", "gs://b/a?secret_key=hunter2"],
)
def test_a_credential_in_a_path_is_refused_and_not_repeated(path):
    with pytest.raises(ConfigError, match="credential") as caught:
        Storage().info(path)
    assert "hunter2" not in str(caught.value)


def test_a_credential_in_the_endpoint_is_refused_and_not_repeated():
    with pytest.raises(ConfigError, match="credential") as caught:
        Storage(StorageConfig(endpoint="http://key:hunter2@127.0.0.1:1")).info("s3://b/a")
    assert "hunter2" not in str(caught.value)


def test_info_tells_files_from_directories_and_from_nothing(tmp_path):
    write(tmp_path, "a")
    assert Storage().info(f"{tmp_path}/a") == FileInfo(f"{tmp_path}/a", 1, str((tmp_path / "a").stat().st_mtime_ns))
    assert Storage().info(f"{tmp_path}") is None
    assert Storage().info(f"{tmp_path}/b") is None


def test_a_write_makes_directories_replaces_and_leaves_nothing_else(tmp_path):
    Storage().write_bytes(f"{tmp_path}/new/er/a.json", b"one")
    Storage().write_bytes(f"{tmp_path}/new/er/a.json", b"two")
    assert [(path.name, path.read_bytes()) for path in (tmp_path / "new/er").iterdir()] == [("a.json", b"two")]


def test_a_write_below_a_file_is_refused_by_name(tmp_path):
    write(tmp_path, "a")
    with pytest.raises(StorageError, match=r"write .*/a/b failed"):
        Storage().write_bytes(f"{tmp_path}/a/b", b"x")


def test_a_storage_travels_with_its_settings_alone(tmp_path):
    write(tmp_path, "a")
    storage = Storage(StorageConfig(endpoint="http://127.0.0.1:1"))
    assert storage.read_bytes(f"{tmp_path}/a") == b"x"
    again = pickle.loads(pickle.dumps(storage))
    assert again.config == storage.config
    assert again.read_bytes(f"{tmp_path}/a") == b"x"


@pytest.mark.slow
def test_storage_needs_neither_ray_nor_torch():
    code = "import sys, ingest.storage, ingest.manifest; sys.exit(bool({'ray', 'torch'} & set(sys.modules)))"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


@pytest.fixture
def s3(s3_endpoint):
    return Storage(StorageConfig(endpoint=s3_endpoint, region="us-east-1", request_timeout_s=10))


@pytest.mark.s3
def test_s3_stores_bytes_as_they_are_whatever_the_name_ends_in(s3):
    s3.write_bytes("s3://data/ends/manifest.json.gz", b"as it is")
    assert s3.read_bytes("s3://data/ends/manifest.json.gz") == b"as it is"


@pytest.mark.s3
def test_s3_reads_back_what_was_written_under_any_name(s3):
    for name in ODD_NAMES:
        s3.write_bytes(f"s3://data/odd/{name}.parquet", name.encode())
    items = s3.find_parquet(["s3://data/odd"])
    assert [item.path for item in items] == sorted(f"s3://data/odd/{name}.parquet" for name in ODD_NAMES)
    assert [s3.read_bytes(item.path) for item in items] == [item.path[14:-8].encode() for item in items]
    assert s3.find_parquet(["s3://data/odd/what?.parquet"])[0].size_bytes == 5
    with s3.open("s3://data/odd/x%20y.parquet") as file:
        file.seek(2)
        assert (file.size(), file.read(2)) == (5, b"20")


@pytest.mark.s3
def test_s3_lists_directories_and_globs_like_local_ones(s3):
    for name in ("a.parquet", "d/b.PARQUET", "d/e/c.parquet", "_SUCCESS", "d/_x.parquet", "d/.y.parquet", "n.txt"):
        s3.write_bytes(f"s3://data/tree/{name}", b"x")
    s3.write_bytes("s3://data/tree/empty.parquet", b"")

    def names(path):
        return [item.path.removeprefix("s3://data/tree/") for item in s3.find_parquet([path])]

    assert names("s3://data/tree") == ["a.parquet", "d/b.PARQUET", "d/e/c.parquet"]
    assert names("s3://data/tree/") == ["a.parquet", "d/b.PARQUET", "d/e/c.parquet"]
    assert names("s3://data/tree/*.parquet") == ["a.parquet"]
    assert names("s3://data/tree/**/*.parquet") == ["a.parquet", "d/e/c.parquet"]
    assert names("s3://data/tr*/[d-f]") == ["d/b.PARQUET", "d/e/c.parquet"]


@pytest.mark.s3
def test_an_s3_source_has_the_hash_and_the_documents_of_its_local_copy(s3, tmp_path, monkeypatch):
    monkeypatch.setenv("INGEST_CACHE", str(tmp_path / "cache"))
    texts = [f"{index} ünï" * 50 for index in range(1000)]
    pq.write_table(pa.table({"id": range(1000), "text": texts}), tmp_path / "a b.parquet", row_group_size=300)
    s3.write_bytes("s3://data/corpus/a b.parquet", (tmp_path / "a b.parquet").read_bytes())

    def encode(texts):
        return np.zeros(len(texts), np.int32), np.ones(len(texts), np.int64)

    def index(path):
        sources = (SourceConfig(name="web", path=path),)
        return build_manifest(IngestConfig(sources=sources, tokenizer=TokenizerConfig(path="t.json")), s3, encode)

    remote = index("s3://data/corpus/*.parquet")
    assert remote.hash == index(str(tmp_path / "a b.parquet")).hash
    unit = remote.sources[0].unit(3)
    for request_bytes in (None, 4096):
        expect = (unit.size_bytes, unit.footer_hash)
        arrays = read_documents(s3, unit.path, unit.row_group, "text", expect, request_bytes=request_bytes)
        assert [text for array in arrays for text in array.to_pylist()] == texts[900:]


@pytest.mark.s3
def test_s3_info_has_size_and_version_and_none_for_a_missing_file(s3):
    s3.write_bytes("s3://data/info/a", b"12345")
    item = s3.info("s3://data/info/a")
    assert (item.path, item.size_bytes, item.version.isdigit()) == ("s3://data/info/a", 5, True)
    assert s3.info("s3://data/info/b") is None
    assert s3.info("s3://data/info") is None


@pytest.mark.s3
def test_s3_names_what_is_missing(s3):
    with pytest.raises(StorageError, match=r"open s3://data/none failed; .*: check the path"):
        s3.open("s3://data/none")
    with pytest.raises(StorageError, match=r"s3://data/none does not exist: check its spelling"):
        s3.find_parquet(["s3://data/none"])
    with pytest.raises(StorageError, match=r"s3://nowhere/a .*: check"):
        s3.find_parquet(["s3://nowhere/a"])
    with pytest.raises(StorageError, match=r"s3://nowhere/\*\.parquet .*: check"):
        s3.find_parquet(["s3://nowhere/*.parquet"])


@pytest.mark.s3
def test_s3_refuses_wrong_keys_in_one_try_and_keeps_them_secret(s3_endpoint, monkeypatch):
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "hunter2")
    storage = Storage(StorageConfig(endpoint=s3_endpoint, region="us-east-1"))
    with pytest.raises(StorageError, match=r"s3://data/x failed; .*: check the permissions and the cred") as caught:
        storage.find_parquet(["s3://data/x"])
    assert "hunter2" not in str(caught.value)
    assert "test-access" not in str(caught.value)


@pytest.mark.s3
def test_a_dead_s3_endpoint_is_reported_with_its_cure(monkeypatch):
    monkeypatch.setenv("AWS_ACCESS_KEY_ID", "test-access")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "test-secret")
    storage = Storage(StorageConfig(endpoint=f"http://127.0.0.1:{free_port()}", max_attempts=2))
    with pytest.raises(
        StorageError, match=r"open s3://data/x failed after 2 tries; .*: check the network and storage\.e"
    ):
        storage.open("s3://data/x")


def test_links_that_repeat_a_directory_or_lead_back_into_it_add_no_file(tmp_path):
    real = tmp_path / "corpus" / "2024-01"
    real.mkdir(parents=True)
    (real / "a.parquet").write_bytes(b"a")
    (tmp_path / "corpus" / "latest").symlink_to(real)
    for name in ("loop", "again"):
        (tmp_path / "corpus" / name).symlink_to(tmp_path / "corpus")
    (found,) = Storage().find_parquet([str(tmp_path / "corpus")])
    assert found.path == str(real / "a.parquet")
