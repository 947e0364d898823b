"""Positions: readable JSON there and back, and a refusal in words for everything that does not fit."""

from __future__ import annotations

import copy
import json
from dataclasses import replace

import numpy as np
import pytest

from ingest.errors import ResumeError
from ingest.plan import Cursors, SourceCursor
from ingest.position import MAX_BYTES, Position
from ingest.slab import Counts, Prefix
from tests.tiny import Tiny

FINGERPRINT = {
    "plan": 1,
    "sources": {"web": {"index": 0, "weight": 0.7}, "code": {"index": 1, "weight": None}},
    "packing": {"sequence_length": 8},
    "lanes": 4,
    "global_batch_rows": 4,
}
POSITION = Position(
    step=3,
    offset=1,
    cursors=Cursors(2, (SourceCursor(0, 5, 17), SourceCursor(1, 0, 0))),
    base=Counts(60, 9, 4, 1, (40, 20), 0xFFFFFFFFFFFFFFF0),
    counts=Counts(90, 12, 5, 1, (60, 30), 0xAB),
    fingerprint=FINGERPRINT,
)
PREFIX = Prefix(
    tokens_O=np.array([0, 30, 50]),
    documents_O=np.array([0, 3, 4]),
    documents_cut_O=np.array([0, 1, 1]),
    source_tokens_OK=np.array([[0, 0], [20, 10], [30, 20]]),
    digest_O=np.array([0, 0xAB + 0x10, 7], np.uint64),
    skipped=2,
)


NOTHING = {"read": 0, "documents": 0, "empty": 0, "bad": 0, "tokens": 0}
ACCOUNT = {"sources": {"web": NOTHING, "code": NOTHING}, "skips": [], "skipped_files": 0}


def changed(path: str, value: object) -> dict:
    """The position's plain values with one of them changed; ``...`` removes it."""
    plain = copy.deepcopy(POSITION.to_dict())
    inside = plain
    *folders, name = path.split(".")
    for folder in folders:
        inside = inside[int(folder) if isinstance(inside, list) else folder]
    key = int(name) if isinstance(inside, list) else name
    if value is ...:
        del inside[key]
    else:
        inside[key] = value
    return plain


def test_golden_json() -> None:
    assert POSITION.to_dict() == {
        "version": 2,
        "step": 3,
        "rows": 12,
        "padding": 6,
        "tokens": 90,
        "documents": 12,
        "documents_cut": 5,
        "skipped": 1,
        "source_tokens": {"web": 60, "code": 30},
        "digest": "00000000000000ab",
        "account": ACCOUNT,
        "window": 2,
        "offset": 1,
        "cursors": {"window": 2, "sources": [[0, 5, 17], [1, 0, 0]]},
        "window_start": {
            "tokens": 60,
            "documents": 9,
            "documents_cut": 4,
            "skipped": 1,
            "source_tokens": {"web": 40, "code": 20},
            "digest": "fffffffffffffff0",
            "account": ACCOUNT,
        },
        "fingerprint": FINGERPRINT,
    }


def test_a_position_survives_json() -> None:
    assert Position.from_json(POSITION.to_json()) == POSITION
    assert Position.from_dict(POSITION.to_dict()) == POSITION


def test_a_position_survives_a_store_that_sorts_keys() -> None:
    text = json.dumps(json.loads(POSITION.to_json()), sort_keys=True)
    restored = Position.from_json(text)
    assert restored == POSITION
    assert restored.to_dict()["source_tokens"] == {"web": 60, "code": 30}


def test_fields_of_a_later_release_are_passed_over() -> None:
    assert Position.from_dict({**POSITION.to_dict(), "note": "x"}) == POSITION


def test_the_digest_is_sixteen_hexadecimal_digits() -> None:
    assert POSITION.digest == "00000000000000ab"
    assert Position.start(Cursors(0, ()), {}).digest == "0" * 16


def test_rows_tokens_and_padding_are_those_handed_out() -> None:
    assert (POSITION.rows, POSITION.tokens, POSITION.padding, POSITION.window) == (12, 90, 6, 2)


def test_the_start_has_consumed_nothing() -> None:
    start = Position.start(POSITION.cursors, FINGERPRINT)
    assert (start.step, start.offset, start.rows, start.tokens, start.padding) == (0, 0, 0, 0, 0)
    assert start.counts == start.base == Counts(0, 0, 0, 0, (0, 0), 0)


@pytest.mark.parametrize("field", sorted(POSITION.to_dict()))
def test_a_missing_field_is_refused_by_name(field: str) -> None:
    with pytest.raises(ResumeError, match=rf"position must have the fields that state_dict\(\) writes; got .*{field}"):
        Position.from_dict(changed(field, ...))


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("step", -1),
        ("step", True),
        ("step", 1.0),
        ("step", "3"),
        ("step", None),
        ("offset", -1),
        ("tokens", [90]),
        ("digest", 171),
        ("digest", "ab"),
        ("digest", "-0000000000000ab"),
        ("digest", "00000000000000AB"),
        ("digest", "0x000000000000ab"),
        ("source_tokens", [60, 30]),
        ("source_tokens.web", -1),
        ("source_tokens.web", ...),
        ("window_start", None),
        ("window_start.digest", ...),
        ("window_start.documents", -9),
        ("cursors", []),
        ("cursors.sources", None),
        ("cursors.sources.0", [0, 5]),
        ("cursors.sources.0.1", -5),
        ("cursors.sources.0.2", 1.5),
        ("cursors.window", True),
        ("fingerprint", None),
        ("fingerprint", {}),
        ("fingerprint.sources", ["web"]),
        ("fingerprint.sources.web.index", ...),
        ("fingerprint.packing", 8),
        ("fingerprint.global_batch_rows", [4]),
        ("fingerprint.lanes", [4]),
    ],
)
def test_a_field_of_the_wrong_kind_is_refused(path: str, value: object) -> None:
    with pytest.raises(ResumeError, match=r"position must have the fields .* use another checkpoint") as caught:
        Position.from_dict(changed(path, value))
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("step", 4),
        ("rows", 13),
        ("padding", 7),
        ("window", 3),
        ("tokens", 91),
        ("tokens", 10**9),
        ("source_tokens.code", 31),
        ("source_tokens", {"web": 60, "code": 30, "more": 0}),
        ("window_start.tokens", 61),
        ("cursors.sources", [[0, 5, 17]]),
        ("cursors.window", 9),
        ("fingerprint.packing.sequence_length", 4),
        ("fingerprint.global_batch_rows", 8),
    ],
)
def test_fields_that_contradict_each_other_are_refused(path: str, value: object) -> None:
    with pytest.raises(ResumeError, match=r"position must agree with itself; got fields at step [34] that contradict"):
        Position.from_dict(changed(path, value))


def test_another_version_is_refused_with_both_versions() -> None:
    with pytest.raises(ResumeError, match="position version must be 2; got 1: use the release that wrote it"):
        Position.from_dict(changed("version", 1))


@pytest.mark.parametrize("value", [None, 3, "position", [], (), {"version": 2}])
def test_something_else_than_a_position_is_refused(value: object) -> None:
    with pytest.raises(ResumeError, match="position must have the fields"):
        Position.from_dict(value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "position must be JSON"),
        ("step: 3", "position must be JSON"),
        (POSITION.to_json()[:-40], "position must be JSON"),
        ("[" * 100_000, "position must be JSON"),
        ('{"a":' * 100_000, "position must be JSON"),
        ("1" * 5000, "position must be JSON"),
        ("null", "position must have the fields"),
        (" " * (MAX_BYTES + 1), f"position must be under {MAX_BYTES} bytes; got {MAX_BYTES + 1}"),
    ],
    ids=["empty", "YAML", "cut", "deep lists", "deep mappings", "a huge number", "null", "large"],
)
def test_text_that_is_no_position_is_refused(text: str, words: str) -> None:
    with pytest.raises(ResumeError, match=words) as caught:
        Position.from_json(text)
    assert len(str(caught.value)) < 300


@pytest.mark.parametrize("kind", ["mapping", "list"])
def test_a_deep_fingerprint_is_refused(kind: str) -> None:
    deep: object = 1
    for _ in range(300):
        deep = {"a": deep} if kind == "mapping" else [deep]
    with pytest.raises(ResumeError, match="a fingerprint that holds"):
        Position.from_json(json.dumps(changed("fingerprint.deep", deep)))


def test_the_same_fingerprint_is_accepted() -> None:
    POSITION.require(copy.deepcopy(FINGERPRINT))


def test_every_field_that_differs_is_named_with_both_values_in_one_line() -> None:
    now = copy.deepcopy(FINGERPRINT)
    now["lanes"], now["sources"]["code"]["weight"], now["packing"]["strategy"] = 8, 0.3, "best_fit"
    del now["plan"]
    with pytest.raises(ResumeError) as caught:
        POSITION.require(now)
    assert str(caught.value) == (
        "position at step 3 belongs to another run; lanes: 4 then, 8 now; "
        "packing.strategy: None then, best_fit now; plan: 1 then, None now; "
        "sources.code.weight: None then, 0.3 now: restore what changed, or start from step 0 under another name"
    )


def test_what_is_known_about_a_difference_stands_beside_it() -> None:
    with pytest.raises(ResumeError, match=r"lanes: 4 then, 8 now \(lanes are fixed\): restore"):
        POSITION.require({**FINGERPRINT, "lanes": 8}, lambda field: f" ({field} are fixed)")


def test_the_same_window_is_verified() -> None:
    POSITION.verify(PREFIX)


@pytest.mark.parametrize(
    ("position", "now"),
    [
        (replace(POSITION, counts=replace(POSITION.counts, digest=0xAC)), "00000000000000ab"),
        (replace(POSITION, counts=replace(POSITION.counts, source_tokens=(50, 40))), "00000000000000ab"),
        (replace(POSITION, offset=2), "fffffffffffffff7"),
        (replace(POSITION, offset=0), "fffffffffffffff0"),
        (replace(POSITION, offset=3), "too few rows"),
    ],
    ids=["digest", "mixture", "further", "before", "beyond the window"],
)
def test_a_window_that_is_not_what_it_was_is_refused(position: Position, now: str) -> None:
    words = f"window 2 must be made again as it was at step 3; digest {position.digest} then, {now} now"
    with pytest.raises(ResumeError, match=words):
        position.verify(PREFIX)


def test_a_position_of_ten_sources_is_under_16_kib_in_every_spelling() -> None:
    position = Tiny([[["a"]]] * 10).start()
    names = [f"a source with a name of forty letters, {i}" for i in range(10)]
    facts = {"data": "f" * 32, "files": 10**6, "rows": 10**12, "tokens_per_mib": 10**6, "text_column": "text"}
    sources = {name: {"index": index, **facts, "weight": 0.123456789} for index, name in enumerate(names)}
    large = 10**15
    position = replace(
        position,
        fingerprint={**position.fingerprint, "sources": sources},
        cursors=Cursors(large, tuple(SourceCursor(large, large, 2**64) for _ in names)),
        base=Counts(large * 10, large, large, large, (large,) * 10, 2**64 - 1),
        counts=Counts(large * 10, large, large, large, (large,) * 10, 2**64 - 1),
    )
    assert len(position.to_json().encode()) < 16 * 1024
