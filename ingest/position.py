"""Where a run stands: a small frozen value, written as readable JSON, the same on every rank.

A position speaks of the last batch handed out, never of what was read ahead. It holds the plan's cursors and the
counts at the start of the window it stands in, the rows of each lane consumed since, and the counts in total. A
position at the end of a window names that window, not the next, so that a resume always re-makes one window and can
compare digests.

The fingerprint is everything that decides order and content. A position is refused where it differs, field by field,
unless the difference is accepted knowingly, which the position then records; see ``changes.py``.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from ingest.account import NOTHING, Account, natural
from ingest.changes import ACCEPTABLE, MAX_CHANGES, Change, name_of, refused
from ingest.errors import ResumeError
from ingest.plan import Cursors
from ingest.slab import Counts, Prefix, cursors_from_json, cursors_to_json

VERSION = 2
MAX_BYTES = 1 << 20

Fingerprint = Mapping[str, Any]


_OMITTED = {"packing.position_ids": "restart"}  # what a fingerprint does not say, as it is the default


@dataclass(frozen=True)
class Position:
    """A place between two steps.

    Args:
        step: steps handed out so far; the next batch is number ``step`` counted from 0.
        offset: rows of each lane consumed in the window ``cursors.window``.
        cursors: the plan before that window.
        base: counts before that window.
        counts: counts in total.
        fingerprint: nested plain values, with ``packing.sequence_length`` and ``global_batch_rows`` among them.
        accepted: changes that the run went on with, the last ``MAX_CHANGES``.
    """

    step: int
    offset: int
    cursors: Cursors
    base: Counts
    counts: Counts
    fingerprint: Fingerprint
    accepted: tuple[Change, ...] = ()

    @classmethod
    def start(cls, cursors: Cursors, fingerprint: Fingerprint, account: Account = NOTHING) -> Position:
        """The position before the first step; ``account`` names the files that the manifest leaves out."""
        nothing = replace(Counts.zero(len(cursors.sources)), account=account)
        return cls(0, 0, cursors, nothing, nothing, fingerprint)

    @property
    def window(self) -> int:
        """Ordinal of the window the position stands in."""
        return self.cursors.window

    @property
    def tokens(self) -> int:
        """Input tokens handed out, padding apart."""
        return self.counts.tokens

    @property
    def rows(self) -> int:
        """Rows handed out, padding rows of the last step included."""
        return self.step * int(self.fingerprint["global_batch_rows"])

    @property
    def padding(self) -> int:
        """Padding tokens handed out."""
        return self.rows * int(self.fingerprint["packing"]["sequence_length"]) - self.counts.tokens

    @property
    def digest(self) -> str:
        """Digest of everything handed out, 16 hexadecimal digits."""
        return format(self.counts.digest, "016x")

    def to_dict(self) -> dict[str, Any]:
        """Plain values; ``from_dict`` takes them back."""
        names = _source_names(self.fingerprint)
        return {
            "version": VERSION,
            "step": self.step,
            "rows": self.rows,
            "padding": self.padding,
            **_counts_to_json(self.counts, names),
            "window": self.window,
            "offset": self.offset,
            "cursors": cursors_to_json(self.cursors),
            "window_start": _counts_to_json(self.base, names),
            "fingerprint": dict(self.fingerprint),
            **({"accepted": [list(change) for change in self.accepted]} if self.accepted else {}),
        }

    @classmethod
    def from_dict(cls, value: Any) -> Position:
        """Reads what ``to_dict`` gave.

        Raises:
            ResumeError: a field is missing, of the wrong type, negative, of another version, or contradicts another.
        """
        try:
            if value["version"] != VERSION:
                raise ResumeError(
                    f"position version must be {VERSION}; got {value['version']}: use the release that wrote it"
                )
            names = _source_names(_plain(value["fingerprint"]))
            position = cls(
                step=natural(value["step"]),
                offset=natural(value["offset"]),
                cursors=_cursors_from_json(value["cursors"]),
                base=_counts_from_json(value["window_start"], names),
                counts=_counts_from_json(value, names),
                fingerprint=value["fingerprint"],
                accepted=tuple(
                    Change(natural(step), str(field), str(then), str(now))
                    for step, field, then, now in value.get("accepted", ())
                ),
            )
            consistent = position._consistent() and all(value[name] == own for name, own in position.to_dict().items())
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            what = f"{type(error).__name__} {error}"
            raise ResumeError(
                f"position must have the fields that state_dict() writes; got {what}: use another checkpoint"
            ) from None
        if not consistent:
            raise ResumeError(
                f"position must agree with itself; got fields at step {position.step} that contradict each other: "
                "use another checkpoint"
            )
        return position

    def _consistent(self) -> bool:
        """Whether the counts can be those of one stream of these sources."""
        num_sources = len(self.fingerprint["sources"])
        weights = self.cursors.weights
        fits = len(self.cursors.sources) == num_sources and self.padding >= 0 and len(self.accepted) <= MAX_CHANGES
        fits = fits and (weights is None or (len(weights) == num_sources and min(weights) >= 1))
        return fits and all(
            counts.tokens == sum(counts.source_tokens) and counts.account.balanced
            for counts in (self.base, self.counts)
        )

    def to_json(self) -> str:
        """Indented JSON."""
        return json.dumps(self.to_dict(), indent=1)

    @classmethod
    def from_json(cls, text: str) -> Position:
        """Reads ``to_json``.

        Raises:
            ResumeError: not JSON, larger than 1 MiB, or not a position.
        """
        if len(text) > MAX_BYTES:
            raise ResumeError(f"position must be under {MAX_BYTES} bytes; got {len(text)}: use another checkpoint")
        try:
            value = json.loads(text)
        except (ValueError, RecursionError) as error:
            raise ResumeError(f"position must be JSON; got {error}: use another checkpoint") from None
        return cls.from_dict(value)

    def require(
        self,
        fingerprint: Fingerprint,
        explain: Callable[[str], str] = lambda _: "",
        accept: tuple[str, ...] = (),
    ) -> Position:
        """Refuses to go on with other data or settings.

        Args:
            fingerprint: of the run that wants to resume here.
            explain: given the field of a difference, what is known about it (a list of changed files, say), or "".
            accept: names of ``changes.ACCEPTABLE``.

        Returns:
            The position of that run: this one, or one that records what was accepted.

        Raises:
            ResumeError: names every field that differs and is not accepted, with both values.
        """
        then, now = _flat(self.fingerprint), _flat(fingerprint)
        fields = [field for field in sorted({*then, *now}) if then.get(field) != now.get(field)]
        wrong = refused(fields, accept)
        if wrong:
            before, after = ({**_OMITTED, **side} for side in (then, now))
            lines = [f"{field}: {before.get(field)} then, {after.get(field)} now{explain(field)}" for field in wrong]
            names = {name_of(field) for field in fields} & {*ACCEPTABLE}
            known = all(name_of(field) for field in fields) and names
            way = f", accept it knowingly with accept_changes: [{', '.join(sorted(map(str, names)))}]" if known else ""
            raise ResumeError(
                f"position at step {self.step} belongs to another run; {'; '.join(lines)}: "
                f"restore what changed{way}, or start from step 0 under another name"
            )
        changes = [Change.of(self.step, field, then.get(field), now.get(field)) for field in fields]
        return replace(self, fingerprint=fingerprint, accepted=(*self.accepted, *changes)[-MAX_CHANGES:])

    def entered(self, prefix: Prefix) -> Position:
        """The position in its window as that is made again.

        Returns:
            This one; or the window's start, where its rows are others by a change that was accepted at this step.

        Raises:
            ResumeError: the window's content is not what it was, and no such change was accepted.
        """
        try:
            self.verify(prefix)
        except ResumeError:
            if not any(change.step == self.step and change.of_content for change in self.accepted):
                raise
            return replace(self, offset=0, base=self.counts)
        return self

    def verify(self, prefix: Prefix) -> None:
        """Compares the re-made window with what was consumed of it.

        Raises:
            ResumeError: the window's content is not what it was.
        """
        now = "too few rows"
        if self.offset <= prefix.rows:
            again = self.base + prefix.at(self.offset)
            then = (
                self.counts
            )  # skipped documents are booked at a window's end, which an empty window has at its start too
            if (again.digest, again.documents, again.source_tokens) == (
                then.digest,
                then.documents,
                then.source_tokens,
            ):
                return
            now = format(again.digest, "016x")
        raise ResumeError(
            f"window {self.window} must be made again as it was at step {self.step}; digest {self.digest} then, "
            f"{now} now: the text behind an unchanged footer, a library version or the tokenizer's behaviour changed"
        )


def _counts_to_json(counts: Counts, names: list[str]) -> dict[str, Any]:
    return {
        "tokens": counts.tokens,
        "documents": counts.documents,
        "documents_cut": counts.documents_cut,
        "skipped": counts.skipped,
        "source_tokens": dict(zip(names, counts.source_tokens, strict=True)),
        "digest": format(counts.digest, "016x"),
        "account": counts.account.to_plain(names),
    }


def _source_names(fingerprint: Fingerprint) -> list[str]:
    """In the config's order, which a store that sorts the keys of JSON loses."""
    sources = fingerprint["sources"]
    return sorted(sources, key=lambda name: natural(sources[name]["index"]))


def _counts_from_json(value: Any, names: list[str]) -> Counts:
    per_source = tuple(natural(value["source_tokens"][name]) for name in names)
    digest = value["digest"]
    if not re.fullmatch("[0-9a-f]{16}", digest):
        raise ValueError(f"digest {digest!r}")
    tokens, documents, cut, skipped = (
        natural(value[name]) for name in ("tokens", "documents", "documents_cut", "skipped")
    )
    account = Account.from_plain(value["account"], names)
    return Counts(tokens, documents, cut, skipped, per_source, int(digest, 16), account)


def _cursors_from_json(value: Any) -> Cursors:
    cursors = cursors_from_json(value)
    for number in (
        cursors.window,
        *(cursors.weights or ()),
        *(n for c in cursors.sources for n in (c.epoch, c.unit, c.served)),
    ):
        natural(number)
    return cursors


def _plain(value: Any, depth: int = 8) -> Any:
    """The value, refused where it is not shallow mappings of plain values, as every fingerprint is."""
    if isinstance(value, Mapping) and depth:
        for item in value.values():
            _plain(item, depth - 1)
    elif not isinstance(value, str | int | float | None):
        raise ValueError(f"a fingerprint that holds {type(value).__name__}")
    return value


def _flat(value: Any, key: str = "") -> dict[str, Any]:
    if not isinstance(value, Mapping):
        return {key: value}
    return {
        path: leaf
        for name, item in value.items()
        for path, leaf in _flat(item, f"{key}.{name}" if key else name).items()
    }
