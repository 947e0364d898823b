import sysconfig
from pathlib import Path

import pyarrow.parquet as pq
import pytest

from ingest.config import IngestConfig
from ingest.errors import ConfigError, StorageError
from ingest.sample import write_sample
from ingest.tokenizer import Tokenizer

SMALL = {"vocab_size": 400, "files": 3, "max_bytes": 600_000}


@pytest.fixture(scope="module")
def sample(tmp_path_factory):
    return write_sample(tmp_path_factory.mktemp("made") / "deeper" / "sample", **SMALL)


def rows(sample):
    return [row for path in sorted(sample.corpus.iterdir()) for row in pq.read_table(path).to_pylist()]


def test_documents_are_the_source_files_in_path_order(sample):
    root = Path(sysconfig.get_path("stdlib"))
    found = rows(sample)
    assert found[0]["path"] == "__future__.py"
    assert [row["path"] for row in found] == sorted(row["path"] for row in found)
    assert all((root / row["path"]).read_bytes() == row["text"].encode() for row in found)
    assert 500_000 < sum(len(row["text"].encode()) for row in found) <= 600_000


def test_files_and_row_groups_are_several_and_uneven(sample):
    groups = [pq.ParquetFile(path).metadata for path in sorted(sample.corpus.iterdir())]
    assert [path.name for path in sorted(sample.corpus.iterdir())] == [f"stdlib-00{n}.parquet" for n in range(3)]
    assert len({metadata.num_row_groups for metadata in groups}) > 1
    assert len({metadata.row_group(0).num_rows for metadata in groups}) > 1


def test_the_config_loads_and_names_what_was_written(sample):
    config = IngestConfig.from_yaml(sample.config)
    assert config.sources[0].path == str(sample.corpus / "*.parquet")
    assert (config.lanes, config.global_batch_rows, config.packing.sequence_length) == (4, 16, 256)
    tokenizer = Tokenizer.load(config.tokenizer, lambda path: Path(path).read_bytes())
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (400, 0)
    assert tokenizer.decode(tokenizer.encode(["import os\n"])[0]) == "import os\n<|endoftext|>"


def test_with_packages_every_text_comes_once_in_rows_for_benchmarks(tmp_path):
    made = write_sample(tmp_path / "large", vocab_size=400, files=2, max_bytes=400_000, packages=True)
    found = rows(made)
    assert {row["path"].split("/")[0] for row in found} == {"stdlib", "purelib"}
    assert len({row["text"] for row in found}) == len(found) > 20
    config = IngestConfig.from_yaml(made.config)
    assert (config.lanes, config.global_batch_rows, config.packing.sequence_length) == (8, 64, 2048)


def test_a_second_sample_is_the_same_byte_for_byte(sample, tmp_path):
    other = write_sample(tmp_path / "other", **SMALL)
    assert other.tokenizer.read_bytes() == sample.tokenizer.read_bytes()
    assert rows(other) == rows(sample)


def test_a_complete_sample_is_left_as_it_is(sample):
    before = sample.tokenizer.stat().st_mtime_ns
    said = []
    assert write_sample(sample.config.parent, vocab_size=500, progress=said.append) == sample
    assert sample.tokenizer.stat().st_mtime_ns == before
    assert said == [f"{sample.config.parent} holds a sample already: left as it is"]


def test_an_empty_directory_is_filled_and_nothing_is_left_beside_it(tmp_path):
    (tmp_path / "empty").mkdir()
    write_sample(tmp_path / "empty", vocab_size=300, files=2, max_bytes=50_000)
    assert [path.name for path in tmp_path.iterdir()] == ["empty"]
    assert sorted(path.name for path in (tmp_path / "empty").iterdir()) == ["corpus", "run.yaml", "tokenizer.json"]


def test_a_directory_with_other_content_is_refused_and_untouched(tmp_path):
    (tmp_path / "thesis.tex").write_text("mine")
    with pytest.raises(ConfigError, match="holds something else: name another directory"):
        write_sample(tmp_path)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_failed_sample_leaves_nothing_behind(tmp_path):
    with pytest.raises(StorageError, match=r"needs \*\.py files; got none"):
        write_sample(tmp_path / "sample", max_bytes=10)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_made_is_a_storage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(StorageError, match=r"cannot be written; .*: name a writable directory"):
        write_sample(tmp_path / "file" / "sample")


@pytest.mark.parametrize(("name", "value"), [("vocab_size", 256), ("files", 0), ("files", 1001)])
def test_a_setting_out_of_range_is_refused(tmp_path, name, value):
    with pytest.raises(ConfigError, match=f"sample {name} must be .* got {value}: try"):
        write_sample(tmp_path / "sample", **{name: value})


def test_more_files_than_documents_are_refused(tmp_path):
    with pytest.raises(ConfigError, match="must hold a row group; got 900 files"):
        write_sample(tmp_path / "sample", files=900, max_bytes=100_000)
