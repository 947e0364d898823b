"""What became of every row, by source: trained, filtered out, empty, or skipped because it cannot be read.

    rows read = documents + filtered + empty + bad        tokens made = tokens handed out, padding apart

A window's account is made where its units are read and tokenized, apart from the packing, and compared with what is in
its rows before they leave the actor; so a document or a token that is lost on the way ends the run. It is booked at
the window's end, the same on every rank, and added up in the position.

Cost: nothing worth a figure. A position holds the first ``MAX_SKIPS`` skips in words and counts all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

MAX_SKIPS = 8
_MAX_PATH, _MAX_REASON = 160, 120  # characters


class Bad(NamedTuple):
    """Rows that cannot be read, in the place of their text."""

    first_row: int  # in the row group
    num_rows: int
    reason: str


class Skip(NamedTuple):
    """One entry of the record of what was skipped."""

    source: int
    path: str
    row_group: int  # -1: the whole file, when the manifest was made
    row: int  # the first one
    rows: int
    reason: str

    @classmethod
    def of(cls, source: int, path: str, row_group: int, bad: Bad) -> Skip:
        """An entry of bounded length: the end of the path and the beginning of the reason."""
        return cls(source, path[-_MAX_PATH:], row_group, bad.first_row, bad.num_rows, bad.reason[:_MAX_REASON])

    def __str__(self) -> str:
        rows = f", row {self.row}" if self.rows == 1 else f", rows {self.row} to {self.row + self.rows - 1}"
        place = f" row group {self.row_group}{rows}" if self.row_group >= 0 else ""
        return f"{self.path}{place}: {self.reason}"


@dataclass(frozen=True)
class SourceAccount:
    """Of one source.

    Args:
        read: rows that were read, or left out with their row group.
        documents: of them those that became documents.
        empty: null or of no characters.
        bad: not to be read, and skipped as ``on_error`` allows.
        tokens: made of the documents, each with its eos.
        filtered: rows that the source's filter leaves out, of those read.
    """

    read: int = 0
    documents: int = 0
    empty: int = 0
    bad: int = 0
    tokens: int = 0
    filtered: int = 0

    def __add__(self, other: SourceAccount) -> SourceAccount:
        return SourceAccount(*(getattr(self, f.name) + getattr(other, f.name) for f in fields(self)))

    @property
    def balanced(self) -> bool:
        """Whether every row has become something."""
        return self.read == self.documents + self.filtered + self.empty + self.bad


@dataclass(frozen=True)
class Account:
    """Of whole windows.

    Args:
        sources: in the config's order; () while there is nothing.
        skips: the first of them, ``MAX_SKIPS`` at most.
        skipped_files: files left out when the manifest was made.
    """

    sources: tuple[SourceAccount, ...] = ()
    skips: tuple[Skip, ...] = ()
    skipped_files: int = 0

    def __add__(self, other: Account) -> Account:
        pairs = zip(self.sources, other.sources, strict=True)
        sources = tuple(a + b for a, b in pairs) if self.sources and other.sources else self.sources or other.sources
        skips = (*self.skips, *other.skips)[:MAX_SKIPS]
        return Account(sources, skips, self.skipped_files + other.skipped_files)

    @property
    def balanced(self) -> bool:
        """Whether every row of every source has become something."""
        return all(source.balanced for source in self.sources)

    def to_plain(self, names: Sequence[str]) -> dict[str, Any]:
        """Plain values, sources by name; ``from_plain`` takes them back."""
        own = self.sources or tuple(SourceAccount() for _ in names)
        return {
            "sources": {name: _told(source) for name, source in zip(names, own, strict=True)},
            "skips": [list(skip) for skip in self.skips],
            "skipped_files": self.skipped_files,
        }

    @classmethod
    def from_plain(cls, plain: Mapping[str, Any], names: Sequence[str]) -> Account:
        """Reads ``to_plain``.

        Raises:
            KeyError, TypeError, ValueError: it is not what ``to_plain`` gives.
        """
        told = [{"filtered": 0, **plain["sources"][name]} for name in names]
        sources = tuple(SourceAccount(**{f.name: natural(each[f.name]) for f in _FIELDS}) for each in told)
        skips = tuple(
            Skip(natural(s), str(p), int(group), int(row), int(rows), str(why))
            for s, p, group, row, rows, why in plain["skips"]
        )
        sources = () if all(source == SourceAccount() for source in sources) else sources
        return cls(sources, skips, natural(plain["skipped_files"]))


NOTHING = Account()
_FIELDS = fields(SourceAccount)


def _told(source: SourceAccount) -> dict[str, int]:
    """Plain values; ``filtered`` only where there are any, as positions had none at first."""
    return {name: value for name, value in vars(source).items() if value or name != "filtered"}


def natural(value: Any) -> int:
    """The value, where it is a count.

    Raises:
        ValueError: it is no int from 0 on.
    """
    if type(value) is not int or value < 0:
        raise ValueError(f"{value!r} where a count is due")
    return value
