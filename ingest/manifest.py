"""The manifest: the ordered, immutable list of files and row groups of every source, and its place in the cache.

Guarantees: the same files give the same hash, wherever they lie; bytes that were cut or altered are refused when read.

Cost: making it is one listing, one request a file, 32 at a time, and a sample of text (see ``index``). A cached one
costs the listing, a stored one a single read.

Format: gzip over one JSON object, versioned; readable with ``zcat``. Rejected: pickle, which runs code when read and
breaks with a renamed class; a footer index that a table format keeps, which not every corpus has.
"""

from __future__ import annotations

import gzip
import json
import os
import re
import zlib
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import xxhash

from ingest.config import IngestConfig
from ingest.encoding import SourceEncoder
from ingest.errors import DataError, StorageError
from ingest.index import Encode, Progress, Ticker, index_source
from ingest.packed import PackedFormat
from ingest.source import FileEntry, SourceManifest, UnitInfo
from ingest.storage import FileInfo, Storage

__all__ = ["FileEntry", "Manifest", "SourceManifest", "UnitInfo", "build_manifest", "find_manifest", "load_manifest"]

Encoders = Mapping[str, SourceEncoder]

_VERSION = 4
_THREADS = 32
_MAX_DIFF_LINES = 10
_PROBE = ["The quick brown fox\n\tdef f(x): return x + 1"]


@dataclass(frozen=True, eq=False)
class Manifest:
    """Every source of a run, in the order of the settings."""

    sources: tuple[SourceManifest, ...]

    @cached_property
    def hash(self) -> str:
        """The identity of the data: xxh3_128 of the sources' names and hashes, 32 hex digits."""
        return xxhash.xxh3_128_hexdigest(json.dumps([[source.name, source.hash] for source in self.sources]).encode())

    def to_bytes(self) -> bytes:
        """The manifest as gzip over JSON; equal manifests give equal bytes."""
        sources = [_to_plain(source) for source in self.sources]
        body = {"format": "ingest manifest", "version": _VERSION, "hash": self.hash, "sources": sources}
        return gzip.compress(json.dumps(body, separators=(",", ":")).encode(), compresslevel=6, mtime=0)

    @classmethod
    def from_bytes(cls, data: bytes) -> Manifest:
        """Reads what ``to_bytes`` wrote.

        Raises:
            DataError: not a manifest, of another version, or damaged.
        """
        again = "run `ingest index` again"
        try:
            body = json.loads(gzip.decompress(data))
            kind, version = body["format"], body["version"]
        except (OSError, EOFError, zlib.error, ValueError, TypeError, KeyError) as error:
            raise DataError(f"manifest must be gzip over JSON; {type(error).__name__}, {error}: {again}") from error
        if (kind, version) != ("ingest manifest", _VERSION):
            raise DataError(f"manifest must be of version {_VERSION}; got {kind!r} of version {version!r}: {again}")
        try:
            manifest = cls(tuple(map(_from_plain, body["sources"])))
            promised = body["hash"]
        except (ValueError, TypeError, KeyError, OverflowError) as error:
            raise DataError(f"manifest must be complete; {type(error).__name__}, {error}: {again}") from error
        if promised != manifest.hash:
            raise DataError(f"manifest must match its hash; stored {promised}, computed {manifest.hash}: {again}")
        return manifest

    def diff(self, other: Manifest) -> list[str]:
        """What changed from this manifest to ``other``: at most 10 lines that name files, and one that counts the rest.

        Files that only moved are no difference.
        """
        old, new = {source.name: source for source in self.sources}, {source.name: source for source in other.sources}
        lines = [f"source {name} is gone" for name in old if name not in new]
        lines += [f"source {name} is new" for name in new if name not in old]
        lines += [line for name in old if name in new for line in old[name].diff(new[name])]
        if not lines and self.hash != other.hash:
            lines = [f"sources are in another order: {', '.join(old)}, now {', '.join(new)}"]
        rest = len(lines) - _MAX_DIFF_LINES
        return lines if rest <= 0 else [*lines[:_MAX_DIFF_LINES], f"and {rest} more"]


def build_manifest(
    config: IngestConfig,
    storage: Storage,
    encode: Encode,
    progress: Progress | None = None,
    *,
    encoders: Encoders | None = None,
) -> Manifest:
    """Lists the sources' files and reads every footer.

    Args:
        config: names the sources.
        storage: where the files lie.
        encode: texts to (flat token ids, tokens of each text); used on a sample.
        progress: takes lines such as ``indexed 1200 of 3000 files``, about every 2 s and once at the end.
        encoders: those of sources whose documents are no plain text, by name; used on a sample of their rows.

    Raises:
        DataError: a file is not Parquet, damaged, or has no such column; a source holds no rows, or text beside
            packed rows.
        StorageError: a path has no files, or they cannot be read.
    """
    return _build(config, storage, encode, progress or _say_nothing, _find_files(config, storage), encoders or {})


def load_manifest(
    config: IngestConfig,
    storage: Storage,
    encode: Encode,
    progress: Progress | None = None,
    *,
    rebuild: bool = False,
    tokenizer: str = "",
    encoders: Encoders | None = None,
) -> Manifest:
    """The stored manifest where there is one, else a new one, stored for the next time.

    With ``config.manifest`` it is stored there. Without, in the cache: ``$INGEST_CACHE``, or ``ingest`` in
    ``$XDG_CACHE_HOME`` or ``~/.cache``. A cached manifest is used while the listing shows the same paths, sizes and
    versions, and the tokenizer gives the same ids on a probe. A damaged one is made again; a cache that cannot be
    written is reported to ``progress`` and otherwise passed over.

    Args:
        config: names the sources, and the manifest or None.
        storage: where the files lie.
        encode: as for ``build_manifest``.
        progress: as for ``build_manifest``.
        rebuild: makes and stores a new one in any case.
        tokenizer: identity of the tokenizer, on which the estimates in the fingerprint depend.
        encoders: as for ``build_manifest``.

    Raises:
        DataError: as for ``build_manifest``; or the manifest at ``config.manifest`` is damaged or has other sources.
        StorageError: as for ``build_manifest``; or ``config.manifest`` cannot be read or written.
    """
    say, encoders = progress or _say_nothing, encoders or {}
    if config.manifest is not None:
        if not rebuild and storage.info(config.manifest) is not None:
            return _stored(config, storage, config.manifest)
        manifest = _build(config, storage, encode, say, _find_files(config, storage), encoders)
        storage.write_bytes(config.manifest, manifest.to_bytes())
        return manifest
    listing = _find_files(config, storage)
    key = _cache_key(config, listing, encode, tokenizer, encoders)
    if key is not None and not rebuild:
        cached = _cached("by-files", key)
        if cached is not None:
            return cached
    manifest = _build(config, storage, encode, say, listing, encoders)
    if key is not None:
        _cache("by-files", key, manifest, say)
    return manifest


def find_manifest(hash: str) -> Manifest | None:  # noqa: A002 - the attribute's name
    """The manifest with this hash, if one was built on this machine and its cache is still there."""
    found = _cached("by-hash", hash) if re.fullmatch("[0-9a-f]{32}", hash) else None
    return found if found is not None and found.hash == hash else None


def _to_plain(source: SourceManifest) -> dict[str, Any]:
    return {
        "name": source.name,
        "tokens_per_mib": source.tokens_per_mib,
        "warnings": source.warnings,
        "files": source.files,
        "unit_file": source.unit_file.tolist(),
        "unit_row_group": source.unit_row_group.tolist(),
        "unit_rows": source.unit_rows.tolist(),
        "unit_text_bytes": source.unit_text_bytes.tolist(),
        "packed": None if source.packed is None else source.packed.to_plain(),
        "skipped": source.skipped,
        "bytes_per_row": source.bytes_per_row,
        **({} if source.filter is None else {"filter": source.filter}),
    }


def _from_plain(plain: dict[str, Any]) -> SourceManifest:
    files = tuple(
        FileEntry(str(path), int(size), str(footer), str(version)) for path, size, footer, version in plain["files"]
    )
    return SourceManifest(
        name=str(plain["name"]),
        files=files,
        unit_file=plain["unit_file"],
        unit_row_group=plain["unit_row_group"],
        unit_rows=plain["unit_rows"],
        unit_text_bytes=plain["unit_text_bytes"],
        tokens_per_mib=int(plain["tokens_per_mib"]),
        warnings=tuple(map(str, plain["warnings"])),
        packed=None if plain["packed"] is None else PackedFormat.from_plain(plain["packed"]),
        skipped=tuple((str(path), str(reason)) for path, reason in plain["skipped"]),
        bytes_per_row=int(plain["bytes_per_row"]),
        filter=None if plain.get("filter") is None else str(plain["filter"]),
    )


def _say_nothing(line: str) -> None:
    """Takes progress where nobody listens."""


def _find_files(config: IngestConfig, storage: Storage) -> list[list[FileInfo]]:
    return [storage.find_parquet(source.paths) for source in config.sources]


def _build(
    config: IngestConfig,
    storage: Storage,
    encode: Encode,
    say: Progress,
    listing: list[list[FileInfo]],
    encoders: Encoders,
) -> Manifest:
    ticker = Ticker(say, sum(map(len, listing)))
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="ingest-index") as pool:
        sources = [
            index_source(
                source,
                files,
                storage,
                encode,
                pool,
                ticker,
                encoders[source.name].encode if source.name in encoders else None,
            )
            for source, files in zip(config.sources, listing, strict=True)
        ]
    ticker.end()
    manifest = Manifest(tuple(sources))
    _cache("by-hash", manifest.hash, manifest, say)
    return manifest


def _stored(config: IngestConfig, storage: Storage, path: str) -> Manifest:
    try:
        manifest = Manifest.from_bytes(storage.read_bytes(path))
    except DataError as error:
        raise DataError(f"{path}: {error}") from error
    names, promised = [source.name for source in manifest.sources], [source.name for source in config.sources]
    if names != promised:
        raise DataError(
            f"{path} must hold the sources of the settings; got {names}, not {promised}: run `ingest index`"
        )
    for source, settings in zip(manifest.sources, config.sources, strict=True):
        wanted = None if settings.columns.filter is None else settings.columns.filter.text
        if source.filter != wanted:  # its sizes are others, and nobody has looked at the filter's statistics
            rule = f"{path} must be made with the filter of source {source.name}"
            raise DataError(f"{rule}; got {source.filter}, not {wanted}: run `ingest index`")
    return manifest


def _cache_key(
    config: IngestConfig, listing: list[list[FileInfo]], encode: Encode, tokenizer: str, encoders: Encoders
) -> str | None:
    """32 hex digits over all that a cached manifest depends on; None where a store tells no version to rely on."""
    if any(not file.version for files in listing for file in files):
        return None
    ids, lengths = encode(_PROBE)
    probe = [np.asarray(ids).tolist(), np.asarray(lengths).tolist()]
    read = [encoders[each.name].identity if each.name in encoders else each.text_column for each in config.sources]
    sources = [
        [source.name, columns, [[file.path, file.size_bytes, file.version] for file in files]]
        for source, columns, files in zip(config.sources, read, listing, strict=True)
    ]
    return xxhash.xxh3_128_hexdigest(json.dumps([_VERSION, tokenizer, probe, sources]).encode())


def _cache_file(kind: str, key: str) -> str:
    base = os.environ.get("INGEST_CACHE")
    if not base:
        base = os.path.join(os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache"), "ingest")
    return os.path.join(base, kind, f"{key}.json.gz")


def _cached(kind: str, key: str) -> Manifest | None:
    try:
        return Manifest.from_bytes(Storage().read_bytes(_cache_file(kind, key)))
    except (StorageError, DataError):
        return None


def _cache(kind: str, key: str, manifest: Manifest, say: Progress) -> None:
    try:
        Storage().write_bytes(_cache_file(kind, key), manifest.to_bytes())
    except StorageError as error:
        say(f"the manifest is not cached; {error}")
