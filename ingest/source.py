"""One source in the manifest: its files and row groups in order, as arrays, with the identity of their content.

Guarantees: immutable (the arrays are read-only copies); the hash speaks of content as the footers show it, so it is the
same wherever the files lie. Cost: 24 bytes a unit and about 300 bytes a file.
"""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import dataclass, fields
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import xxhash

from ingest.errors import DataError
from ingest.packed import PackedFormat


class FileEntry(NamedTuple):
    """One file as it was when the manifest was made."""

    path: str
    size_bytes: int
    footer_hash: str  # xxh3_64 of the footer's bytes, 16 hex digits
    version: str  # modification time in ns as text; '' where the store gives none

    @property
    def content(self) -> tuple[int, str]:
        """What two files with the same content agree in: size in bytes and footer hash."""
        return self.size_bytes, self.footer_hash


class UnitInfo(NamedTuple):
    """All that reading one unit takes."""

    path: str
    size_bytes: int
    footer_hash: str
    row_group: int
    rows: int


@dataclass(frozen=True, eq=False)
class SourceManifest:
    """The ordered files and units of one source; a unit is one row group that holds rows.

    Args:
        name: of the source in the settings.
        files: in order of their paths, those without rows included.
        unit_file: int32 [units], index into ``files``.
        unit_row_group: int32 [units], index within the file.
        unit_rows: int64 [units], at least 1.
        unit_text_bytes: int64 [units], uncompressed bytes of the column that is read: of the text, or of packed tokens.
            0 where statistics show that the source's filter leaves no row.
        tokens_per_mib: estimated tokens in a MiB of those bytes, at least 1; 0 for a packed source, which is counted.
        warnings: what the user should know, one line each.
        packed: how the rows of all files were packed; None for text.
        bytes_per_row: sampled mean of the text, 0 where there is none; a dictionary tells less than its rows hold.
        skipped: path and reason of the files left out because they cannot be read.
        filter: which rows the sizes count; None for all. No part of the hash: it is in the fingerprint on its own.

    Raises:
        DataError: the parts do not fit each other.
    """

    name: str
    files: tuple[FileEntry, ...]
    unit_file: npt.NDArray[np.int32]
    unit_row_group: npt.NDArray[np.int32]
    unit_rows: npt.NDArray[np.int64]
    unit_text_bytes: npt.NDArray[np.int64]
    tokens_per_mib: int
    warnings: tuple[str, ...] = ()
    packed: PackedFormat | None = None
    skipped: tuple[tuple[str, str], ...] = ()
    bytes_per_row: int = 0
    filter: str | None = None

    def __post_init__(self) -> None:
        for name, dtype in _ARRAYS.items():
            array = np.array(getattr(self, name), dtype=dtype)
            array.setflags(write=False)
            object.__setattr__(self, name, array)
        sound = (
            {getattr(self, name).shape for name in _ARRAYS} == {(self.num_units,)}
            and self.num_units > 0
            and bool(((self.unit_file >= 0) & (self.unit_file < len(self.files))).all())
            and bool(
                (self.unit_row_group >= 0).all() and (self.unit_rows > 0).all() and (self.unit_text_bytes >= 0).all()
            )
            and (self.tokens_per_mib >= 1 if self.packed is None else self.tokens_per_mib == 0)
        )
        if not sound:
            raise DataError(f"source {self.name}: the manifest's arrays must fit each other: run `ingest index` again")

    def __reduce__(self) -> tuple[Any, ...]:
        return SourceManifest, tuple(getattr(self, field.name) for field in fields(self))

    @property
    def num_units(self) -> int:
        """Number of units."""
        return len(self.unit_file)

    @cached_property
    def hash(self) -> str:
        """xxh3_128 of sizes, footer hashes, row groups, rows and text bytes in order, 32 hex digits; no paths.

        Of a packed source also of its format.
        """
        digest = xxhash.xxh3_128()
        digest.update("".join(f"{file.size_bytes} {file.footer_hash}\n" for file in self.files).encode())
        for name in _ARRAYS:
            digest.update(getattr(self, name).astype("<i8").tobytes())
        if self.packed is not None:
            digest.update(json.dumps(self.packed.to_plain(), sort_keys=True).encode())
        return digest.hexdigest()

    @cached_property
    def unit_tokens(self) -> npt.NDArray[np.int64]:
        """int64 [units], tokens, at least 1: estimated as ``unit_text_bytes * tokens_per_mib >> 20``.

        Text bytes are taken for a quarter of ``bytes_per_row`` a row at least, since those of a dictionary count each
        text once, however many rows refer to it.
        Of a packed source exactly the places for tokens, rows times the sequence length.
        """
        text_bytes = np.maximum(self.unit_text_bytes, self.unit_rows * (self.bytes_per_row // 4))
        tokens: npt.NDArray[np.int64] = np.maximum(1, text_bytes * self.tokens_per_mib >> 20)
        if self.packed is not None:
            tokens = self.unit_rows * self.packed.sequence_length
        tokens.setflags(write=False)
        return tokens

    def unit(self, index: int) -> UnitInfo:
        """What is needed to read unit ``index``."""
        file = self.files[self.unit_file[index]]
        row_group, rows = int(self.unit_row_group[index]), int(self.unit_rows[index])
        return UnitInfo(file.path, file.size_bytes, file.footer_hash, row_group, rows)

    def diff(self, now: SourceManifest) -> list[str]:
        """One line for each file whose content changed, went or came; none for a file that only moved.

        A file is known by its path, then by its content, then by its name.
        """
        if self.hash == now.hash:
            return []
        label = f"source {self.name}"
        old, new = {file.path: file for file in self.files}, {file.path: file for file in now.files}
        pairs = [(old[path], new[path]) for path in old if path in new]
        gone = [file for path, file in old.items() if path not in new]
        came = [file for path, file in new.items() if path not in old]
        gone, came = _minus(gone, came), _minus(came, gone)
        names = {_name(file): file for file in came}
        pairs += [(file, names.pop(_name(file))) for file in gone if _name(file) in names]
        paired = {file for pair in pairs for file in pair}
        lines = [f"{label}: {b.path} changed ({_change(a, b)})" for a, b in pairs if a.content != b.content]
        lines += [f"{label}: {file.path} is gone ({file.size_bytes} bytes)" for file in gone if file not in paired]
        lines += [f"{label}: {file.path} is new ({file.size_bytes} bytes)" for file in came if file not in paired]
        return lines or [f"{label}: {self._reordered(now)}"]

    def _reordered(self, now: SourceManifest) -> str:
        for old, new in zip(self.files, now.files, strict=False):
            if old.content != new.content:
                return f"the same files in another order, from {new.path} on"
        return "the same files, but other row groups or another text column"


_ARRAYS = {"unit_file": np.int32, "unit_row_group": np.int32, "unit_rows": np.int64, "unit_text_bytes": np.int64}


def _minus(files: list[FileEntry], others: list[FileEntry]) -> list[FileEntry]:
    """The files without one match in ``others`` each, by content."""
    spare = Counter(file.content for file in others)
    left = []
    for file in files:
        if spare[file.content]:
            spare[file.content] -= 1
        else:
            left.append(file)
    return left


def _name(file: FileEntry) -> str:
    return file.path.rpartition("/")[2]


def _change(old: FileEntry, new: FileEntry) -> str:
    if old.size_bytes != new.size_bytes:
        return f"{old.size_bytes} bytes, now {new.size_bytes}"
    return f"{old.size_bytes} bytes, footer hash {old.footer_hash}, now {new.footer_hash}"
