"""From a step back to its documents: which file, row group and row every piece of its rows came from, and the text.

A window is a pure function, so nothing has to be recorded while training: the windows of a step are made again. Cost:
with a state one or two windows; with a step number alone all windows up to it, since only making a window tells its
rows. No Ray, no torch.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from itertools import islice

import numpy as np

from ingest.errors import ConfigError
from ingest.lanes import Lanes, steps
from ingest.pieces import NO_LABEL_BIT
from ingest.position import Position
from ingest.run import Run
from ingest.slab import Slab
from ingest.window import Window, document_address


@dataclass(frozen=True)
class Piece:
    """A document's part in a row.

    Args:
        source: its name.
        epoch: of the source, from 0.
        file, row_group, row: where the document lies.
        tokens: input tokens of the piece.
        text: of those tokens.
    """

    source: str
    epoch: int
    file: str
    row_group: int
    row: int
    tokens: int
    text: str


@dataclass(frozen=True)
class Row:
    """One row of a step: its address and its pieces, none for a row of padding."""

    window: int
    row: int
    lane: int
    pieces: tuple[Piece, ...]


def replay_step(run: Run, step: int, start: Position) -> list[Row]:
    """The rows of a step, lane by lane, made again from a position before it.

    Args:
        run: the prepared run.
        step: K, counted from 1 as in ``--digests``.
        start: a position of this run before the step.

    Raises:
        ConfigError: the step is not behind ``start``, or the stream ends before it.
        ResumeError: the data or settings are not those of ``start``.
    """
    if step <= start.step:
        raise ConfigError(
            f"step must come after the state; got {step} and {start.step}: name an earlier state, or none"
        )
    start = run.require(start)
    config, windows, before = run.config, dict[int, Window](), start

    def slabs() -> Iterator[Slab]:
        for spec in run.specs(start.cursors):
            windows[spec.cursors.window] = run.maker(spec)
            yield from windows[spec.cursors.window].slabs(1)

    lanes = Lanes(config.lanes, config.global_batch_rows)
    for made in steps(slabs(), start, lanes, run.tokenizer.eos_id, config.total_tokens):
        if made.position.step == step:
            places = zip(made.window_B.tolist(), made.index_B.tolist(), strict=True)
            return [_row(run, windows.get(window), window, index) for window, index in places]
        before = made.position
        for ordinal in [ordinal for ordinal in windows if ordinal < before.window]:
            del windows[ordinal]
    raise ConfigError(f"step must be in the stream; got {step}, it ends after step {before.step}: name an earlier one")


def replay_state(run: Run, state: Position) -> list[Row]:
    """The rows of the step that a state was taken after, lane by lane.

    Raises:
        ConfigError: the state was taken before the first step.
        ResumeError: the data or settings are not those of the state.
    """
    if state.step == 0:
        raise ConfigError("state must be taken after a step; got one before the first: name --step 1")
    state = run.require(state)
    config = run.config
    window = run.maker(next(run.specs(state.cursors)))
    state.verify(window.prefix)
    if window.spec.last and state.offset == window.prefix.rows:  # padding may fill the last step: count from the start
        _require_unchanged(state)
        return replay_step(run, state.step, run.start())
    needed, end, by_lane = config.global_batch_rows // config.lanes, state.offset, dict[int, list[Row]]()
    while True:
        taken = min(needed, end)
        for lane in range(config.lanes):
            indexes = [offset * config.lanes + lane for offset in range(end - taken, end)]
            rows = [_row(run, window, window.spec.cursors.window, index) for index in indexes]
            by_lane[lane] = rows + by_lane.get(lane, [])
        needed -= taken
        if not needed:
            return [row for lane in range(config.lanes) for row in by_lane[lane]]
        _require_unchanged(state)
        ordinal = window.spec.cursors.window - 1
        window = run.maker(run.spec(next(islice(run.plan.windows(run.plan.start()), ordinal, None))))
        end = window.prefix.rows


def _require_unchanged(state: Position) -> None:
    """Refuses to count windows from the start, which was made with other data or settings."""
    if state.accepted:
        raise ConfigError(
            f"step {state.step} must lie within its state's window where changes were accepted; got one that begins "
            f"before it, and {state.accepted[-1]}: name an earlier state and --step {state.step}"
        )


def _row(run: Run, window: Window | None, ordinal: int, index: int) -> Row:
    if window is None:
        return Row(-1, -1, -1, ())
    lanes, lane_rows = window.lanes, window.prefix.rows
    place = index % lanes * lane_rows + index // lanes
    counts = window.rows.counts_B
    first = int(counts[:place].sum())
    pieces, begin, eos_id = [], 0, run.tokenizer.eos_id
    for number in range(first, first + int(counts[place])):
        end = begin + int(window.rows.lengths_L[number])
        length = (
            end
            - begin
            - _goes_on(window, number, int(window.rows.tokens_BX[place, end - 1]) & (NO_LABEL_BIT - 1) == eos_id)
        )
        unit, row = document_address(window, int(window.piece_document_L[number]))
        text = run.tokenizer.decode(window.rows.tokens_BX[place, begin : begin + length])
        source = run.config.sources[unit.source].name
        pieces.append(Piece(source, unit.epoch, unit.path, unit.row_group, row, length, text))
        begin = end
    return Row(ordinal, index, index % lanes, tuple(pieces))


def _goes_on(window: Window, number: int, ends_in_eos: bool) -> bool:
    """Whether a piece's last token is only a look-ahead: the end of its document lies in the next row."""
    pieces = np.flatnonzero(window.piece_document_L == window.piece_document_L[number])
    if not ends_in_eos or len(pieces) == 1:
        return not ends_in_eos
    lengths = window.rows.lengths_L
    return int(lengths[number]) > 1 and 1 in lengths[pieces]  # the end of document alone is the last piece
