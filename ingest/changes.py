"""Differences between a position and a run that may be accepted knowingly, and the record of those that were.

    weights     sources.*.weight                            a window that was begun ends as it began, the next ones
                                                            are mixed anew: no unit comes twice or is lost
    manifest    manifest, sources.*.data, .files, .rows     ┐ the window is made again; where its rows are the same it
    tokenizer   tokenizer.*, sources.*.chat_template        │ goes on exactly, else it starts over, so that rows of one
    filter      sources.*.filter                            ┘ window at most come again

Estimates of tokens follow any of them. Everything else fixes shapes or the order of an epoch and is never accepted.
With another number of row groups the epoch under way goes on at the same place of another permutation, so some of its
units come again or not at all; later epochs are whole.
"""

from __future__ import annotations

from typing import Any, NamedTuple

ACCEPTABLE = ("manifest", "tokenizer", "weights", "filter")
MAX_CHANGES = 32
_MAX_VALUE = 64  # characters
_ESTIMATES = "estimates"
_OF_SOURCES = {
    "data": "manifest",
    "files": "manifest",
    "rows": "manifest",
    "chat_template": "tokenizer",
    "weight": "weights",
    "filter": "filter",
    "tokens_per_mib": _ESTIMATES,
    "bytes_per_row": _ESTIMATES,
}


class Change(NamedTuple):
    """A difference that was accepted, at the step after which the run went on with it."""

    step: int
    field: str
    then: str
    now: str

    @classmethod
    def of(cls, step: int, field: str, then: Any, now: Any) -> Change:
        """An entry of bounded length; what identifies data and tokenizers is a hash already."""
        return cls(step, field, str(then)[:_MAX_VALUE], str(now)[:_MAX_VALUE])

    @property
    def of_content(self) -> bool:
        """Whether a window may hold other rows with it."""
        return name_of(self.field) != "weights"

    def __str__(self) -> str:
        return f"step {self.step}: {self.field} was {self.then}, is {self.now}"


def name_of(field: str) -> str | None:
    """By which name a difference in a field of the fingerprint is accepted; None where it is never."""
    group, _, rest = field.partition(".")
    if group == "sources":
        return _OF_SOURCES.get(rest.rpartition(".")[2])
    return group if group in ("manifest", "tokenizer") else None


def refused(fields: list[str], accept: tuple[str, ...]) -> list[str]:
    """The fields that differ and are not accepted."""
    names = {*accept, _ESTIMATES} if accept else set()
    return [field for field in fields if name_of(field) not in names]
