"""A small real corpus, a tokenizer and a run.yaml, made offline from the Python standard library's sources.

Guarantees: the same interpreter and the same settings give the same documents in the same order and the same
tokenizer; the sample appears whole or not at all; a sample that is there is left as it is.

Shape: one document a source file, empty files included, since real data holds empty documents; files and row groups
differ in size on purpose, so that nothing downstream gets by on even ones. About 31 MB of text where the
library's own tests are installed, about 13 MB where they are not. With ``packages``, for benchmarks, the text files of
all installed packages too: 250 MB or more beside torch, and a run.yaml with rows of 2,048 tokens.

Cost: about 4 s on one core, most of it training on at most ``_TRAINING_BYTES`` of the text; half a minute with
packages and 32,000 ids.

Rejected: downloading a public data set, which needs a network and a licence notice for what a test only skims.
"""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import sysconfig
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from ingest.errors import ConfigError, StorageError

_TEXT_SUFFIXES = {".c", ".cpp", ".h", ".hpp", ".html", ".js", ".json", ".md", ".py", ".pyi", ".rst", ".txt"}
_MAX_FILE_BYTES = 4 << 20
_EOS_TOKEN = "<|endoftext|>"  # noqa: S105 - a token of text
_TRAINING_BYTES = 12 << 20
_ROW_GROUP_KIB = (256, 448, 320, 512, 384)  # text a row group; cycled, uneven on purpose
_FILE_WEIGHTS = (1, 3, 2)  # row groups a file, relative; cycled, uneven on purpose

_PACKAGES_SCALE = 10.0  # of the row groups, when there is ten times the text
_SMALL = {"SEQUENCE_LENGTH": 256, "LANES": 4, "ROWS": 16}

_RUN_YAML = """\
# A run over the sample corpus. Paths are relative to this file's directory.

# What to read: Parquet files with one document a row.
sources:
  - {name: stdlib, path: corpus/*.parquet, text_column: text}

# How text becomes ids. The end-of-document token follows every document.
tokenizer: {path: tokenizer.json, eos_token: "<|endoftext|>"}

# How documents become rows: tokens a row.
packing: {sequence_length: SEQUENCE_LENGTH}

# The order is a pure function of the seed and the data.
shuffle: {seed: 0}

# Fixed logical streams. Every world size that divides this number can train and resume.
lanes: LANES

# Rows a step over all ranks, a multiple of lanes.
global_batch_rows: ROWS

# Passes over the corpus.
epochs: 1

# What the run may use. Only speed depends on it, so it may change between runs.
resources: {tokenize_actors: [1, 2], cpus_per_actor: 1}
"""


@dataclass(frozen=True)
class SamplePaths:
    """Where a sample lies: the config that names the rest, the tokenizer, and the directory of Parquet files."""

    config: Path
    tokenizer: Path
    corpus: Path

    @classmethod
    def under(cls, directory: Path) -> SamplePaths:
        """The paths of the sample in ``directory``, whether it is there or not."""
        return cls(directory / "run.yaml", directory / "tokenizer.json", directory / "corpus")

    def exist(self) -> bool:
        """Whether the sample is there; it appears whole or not at all."""
        return self.config.is_file() and self.tokenizer.is_file() and self.corpus.is_dir()


def write_sample(
    directory: Path,
    *,
    vocab_size: int = 8192,
    files: int = 8,
    max_bytes: int | None = None,
    packages: bool = False,
    progress: Callable[[str], None] = lambda _: None,
) -> SamplePaths:
    """Writes ``corpus/*.parquet``, ``tokenizer.json`` and ``run.yaml`` into a directory.

    Args:
        directory: missing, empty, or a sample already, which is then left as it is whatever the other arguments say.
        vocab_size: ids of the tokenizer, the end-of-document token included.
        files: Parquet files; each has at least one row group.
        max_bytes: stop before the document that would exceed this much text; None takes all.
        packages: take the text of all installed packages too, each text once, mixed by a hash of its path.
        progress: called with one line at the start of each step.

    Returns:
        The paths of the sample.

    Raises:
        ConfigError: an argument is out of range, or the directory holds something else.
        StorageError: the directory cannot be written, or the standard library's sources are not installed.
    """
    directory = directory.expanduser().resolve()
    paths = SamplePaths.under(directory)
    if paths.exist():
        progress(f"{directory} holds a sample already: left as it is")
        return paths
    _check(directory, vocab_size, files)
    building = directory.parent / f".{directory.name}.{os.getpid()}.tmp"
    try:
        building.mkdir(parents=True)
        _build(SamplePaths.under(building), vocab_size, files, max_bytes, packages, progress)
        _publish(building, paths, directory)
    except OSError as error:
        raise StorageError(f"sample {directory} cannot be written; {error}: name a writable directory") from error
    finally:
        shutil.rmtree(building, ignore_errors=True)
    progress(f"sample written to {directory}")
    return paths


def _check(directory: Path, vocab_size: int, files: int) -> None:
    if not 257 <= vocab_size <= 65536:
        raise ConfigError(f"sample vocab_size must be 257 to 65536; got {vocab_size}: try 8192")
    if not 1 <= files <= 1000:
        raise ConfigError(f"sample files must be 1 to 1000; got {files}: try 8")
    if directory.exists() and (not directory.is_dir() or any(directory.iterdir())):
        rule = "the directory of a sample must be missing, empty or a sample already"
        raise ConfigError(f"{rule}; {directory} holds something else: name another directory")


def _publish(building: Path, paths: SamplePaths, directory: Path) -> None:
    """Renames the finished directory; of two processes that build the same sample the first one wins."""
    try:
        building.rename(directory)
    except OSError:
        if not paths.exist():
            raise


def _build(
    paths: SamplePaths,
    vocab_size: int,
    files: int,
    max_bytes: int | None,
    packages: bool,
    progress: Callable[[str], None],
) -> None:
    progress("reading the text of all installed packages" if packages else "reading the standard library's sources")
    documents = list(_installed(max_bytes) if packages else _documents(max_bytes))
    if not documents:
        step = "install Python with its sources, or raise max_bytes"
        raise StorageError(f"the sample needs *.py files; got none from {sysconfig.get_path('stdlib')}: {step}")
    text_bytes = sum(len(text) for _, text in documents)
    progress(f"writing {len(documents)} documents, {text_bytes / 1e6:.1f} MB of text, as {files} Parquet files")
    _write_corpus(paths.corpus, documents, files, _PACKAGES_SCALE if packages else 1.0)
    progress(f"training a byte-level BPE of {vocab_size} ids")
    paths.tokenizer.write_text(_train(documents, text_bytes, vocab_size), encoding="utf-8")
    values = {"SEQUENCE_LENGTH": 2048, "LANES": 8, "ROWS": 64} if packages else _SMALL
    text = _RUN_YAML
    for name, value in values.items():
        text = text.replace(name, str(value))
    paths.config.write_text(text, encoding="utf-8")


def _documents(max_bytes: int | None) -> Iterator[tuple[str, bytes]]:
    """Relative path and UTF-8 text of every source file of the standard library, ordered by path."""
    root = Path(sysconfig.get_path("stdlib"))
    found = [path.relative_to(root) for path in root.rglob("*.py")]
    total = 0
    for path in sorted(found, key=lambda path: path.as_posix()):
        if {"site-packages", "dist-packages", "__pycache__"}.intersection(path.parts):
            continue
        text = (root / path).read_bytes()
        if not _is_utf8(text):
            continue  # test data in old encodings
        total += len(text)
        if max_bytes is not None and total > max_bytes:
            return
        yield path.as_posix(), text


def _installed(max_bytes: int | None) -> Iterator[tuple[str, bytes]]:
    """Name and UTF-8 text of every text file of the standard library and of the packages, each text once."""
    found = {}
    for name in ("stdlib", "purelib"):
        root = Path(sysconfig.get_path(name))
        for path in root.rglob("*"):
            if path.suffix in _TEXT_SUFFIXES and "__pycache__" not in path.parts and path.is_file():
                found[f"{name}/{path.relative_to(root).as_posix()}"] = path
    seen, total = set(), 0
    for name in sorted(found, key=lambda name: hashlib.sha256(name.encode()).digest()):
        text = found[name].read_bytes() if found[name].stat().st_size <= _MAX_FILE_BYTES else b""
        identity = hashlib.sha256(text).digest()
        if not text or identity in seen or not _is_utf8(text):
            continue
        seen.add(identity)
        total += len(text)
        if max_bytes is not None and total > max_bytes:
            return
        yield name, text


def _is_utf8(text: bytes) -> bool:
    try:
        text.decode("utf-8")
    except UnicodeDecodeError:
        return False
    return True


def _write_corpus(corpus: Path, documents: list[tuple[str, bytes]], files: int, scale: float) -> None:
    import pyarrow as pa
    from pyarrow import parquet

    groups = _row_groups(documents, files, scale)
    schema = pa.schema([("path", pa.string()), ("text", pa.string())])
    corpus.mkdir()
    for number, mine in enumerate(_split(groups, files)):
        with parquet.ParquetWriter(corpus / f"stdlib-{number:03}.parquet", schema, compression="zstd") as writer:
            for group in mine:
                columns = [[path for path, _ in group], [text.decode("utf-8") for _, text in group]]
                writer.write_table(pa.table(columns, schema=schema), row_group_size=len(group))


def _row_groups(documents: list[tuple[str, bytes]], files: int, scale: float) -> list[list[tuple[str, bytes]]]:
    """Consecutive documents of about the sizes in ``_ROW_GROUP_KIB``, smaller where there would be under two a file."""
    total = sum(len(text) for _, text in documents)
    scale = min(1024.0 * scale, total / (2 * files * max(_ROW_GROUP_KIB)))
    groups: list[list[tuple[str, bytes]]] = [[]]
    size = 0
    for document in documents:
        if groups[-1] and size + len(document[1]) > scale * _ROW_GROUP_KIB[len(groups) % len(_ROW_GROUP_KIB)]:
            groups.append([])
            size = 0
        groups[-1].append(document)
        size += len(document[1])
    return groups


def _split(groups: list[list[tuple[str, bytes]]], files: int) -> Iterator[list[list[tuple[str, bytes]]]]:
    """Consecutive groups, one at least for each file, the others by ``_FILE_WEIGHTS``."""
    if len(groups) < files:
        rule = "each file of a sample must hold a row group"
        raise ConfigError(f"{rule}; got {files} files and {len(groups)} row groups: ask for fewer files or more text")
    weights = [_FILE_WEIGHTS[number % len(_FILE_WEIGHTS)] for number in range(files)]
    spare = len(groups) - files
    for number in range(files):
        first = number + spare * sum(weights[:number]) // sum(weights)
        last = number + 1 + spare * sum(weights[: number + 1]) // sum(weights)
        yield groups[first:last]


def _train(documents: list[tuple[str, bytes]], text_bytes: int, vocab_size: int) -> str:
    """A ``tokenizer.json``: byte-level BPE with GPT-2's regex, trained on every k-th document."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    stride = -(-text_bytes // _TRAINING_BYTES)
    tokenizer: Any = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True)
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=[_EOS_TOKEN],
        initial_alphabet=sorted(pre_tokenizers.ByteLevel.alphabet()),
        show_progress=False,
    )
    tokenizer.train_from_iterator((text.decode("utf-8") for _, text in documents[::stride]), trainer)
    return json.dumps(json.loads(tokenizer.to_str()), ensure_ascii=False) + "\n"
