"""The ``ingest`` command: parse, call the library, print.

Figures go to standard output, everything else to standard error. Exit codes: 0 done, 1 failed, 2 the input is at fault
(a setting, a path, a file, a position). An error is one line; ``--traceback`` shows where it came from.
"""

from __future__ import annotations

import argparse
import errno
import json
import sys
import tempfile
import traceback
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from ingest.changes import ACCEPTABLE
from ingest.config import IngestConfig
from ingest.errors import ConfigError, IngestError, ResumeError, StorageError
from ingest.position import MAX_BYTES, Position


def main(arguments: Sequence[str] | None = None) -> int:
    """Runs one command.

    Args:
        arguments: as on the command line; None takes those of the process.

    Returns:
        The exit code.
    """
    options = _parser().parse_args(arguments)
    try:
        return int(options.run(options) or 0)
    except IngestError as error:
        if options.traceback:
            traceback.print_exc()
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    except KeyboardInterrupt:
        print("interrupted", file=sys.stderr)
        return 1


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="ingest", description="Feed LLM training from raw text on a Ray cluster.")
    commands = parser.add_subparsers(required=True, metavar="COMMAND")

    def command(name: str, run: Callable[[Any], int | None], text: str, config: bool = True) -> argparse.ArgumentParser:
        sub = commands.add_parser(name, help=text, description=text)
        if config:
            sub.add_argument("config", metavar="CONFIG", help="run.yaml")
        sub.add_argument(
            "--json", action="store_true", help="print one JSON object and nothing else on standard output"
        )
        sub.add_argument("--quiet", action="store_true", help="no progress on standard error")
        sub.add_argument("--traceback", action="store_true", help="show where an error came from")
        sub.set_defaults(run=run)
        return sub

    sample = command("sample", _sample, "Write a small real corpus, a tokenizer and a run.yaml, offline.", config=False)
    sample.add_argument("directory", metavar="DIR", type=Path)
    sample.add_argument("--packages", action="store_true", help="take the text of all installed packages too")
    sample.add_argument("--vocab-size", type=int, default=8192, metavar="V", help="ids of the tokenizer (default 8192)")
    command("index", _index, "Build and store the manifest; print files, rows, bytes and estimated tokens.")
    plan = command("plan", _plan, "Print windows, steps, padding and what the run demands, before any GPU is booked.")
    plan.add_argument(
        "--step-time", type=float, default=1.0, metavar="S", help="seconds a training step takes (default 1)"
    )
    stream = command("stream", _stream, "Drain the loader with no model and print its rates.")
    stream.add_argument("--world-size", type=int, default=1, metavar="N", help="ranks, all in this process (default 1)")
    stream.add_argument("--steps", type=int, metavar="K", help="stop after K steps")
    stream.add_argument(
        "--resume", type=Path, metavar="FILE", help="go on from a position (--state-out, position.json)"
    )
    accept_help = (
        f"a change to go on with knowingly, recorded in the position: {', '.join(ACCEPTABLE)}; may be repeated"
    )
    stream.add_argument("--accept", action="append", default=[], choices=ACCEPTABLE, help=accept_help)
    stream.add_argument("--state-out", type=Path, metavar="FILE", help="write the position after the last step")
    stream.add_argument(
        "--digests",
        type=Path,
        metavar="FILE",
        help="write one JSON line a step, with the digest of that step alone, the same at every N",
    )
    stream.add_argument(
        "--ceiling", action="store_true", help="also time a bare loop over the tokenizer on the same files"
    )
    inspect = command("inspect", _inspect, "Print which documents are in a step: file, row group, row and text.")
    inspect.add_argument("--step", type=int, metavar="K", help="the step, counted from 1")
    inspect.add_argument("--state", type=Path, metavar="FILE", help="a position: the step it follows, or a start for K")
    pack = command("pack", _pack, "Run the same stages once and write packed Parquet that sources can name.")
    pack.add_argument("out", metavar="OUT", help="a directory or URI without Parquet files")
    return parser


def _progress(options: Any) -> Callable[[str], None]:
    def say(line: str) -> None:
        if not options.quiet:
            print(line, file=sys.stderr, flush=True)

    return say


def _print(options: Any, figures: dict[str, Any]) -> None:
    """Figures as one JSON object, or one aligned line each; a value that is a list or mapping gets lines of its own."""
    if options.json:
        print(json.dumps(figures))
        return
    for name, value in figures.items():
        if isinstance(value, list | tuple):
            for item in value:
                print(f"{name:<20} {_words(item)}")
        else:
            print(f"{name:<20} {_words(value)}")


def _words(value: Any) -> str:
    if isinstance(value, dict):
        return "  ".join(f"{name} {_words(item)}" for name, item in value.items())
    if isinstance(value, float):
        return f"{value:,.4g}" if abs(value) < 1000 else f"{value:,.0f}"
    return f"{value:,}" if isinstance(value, int) and not isinstance(value, bool) else str(value)


def _sample(options: Any) -> None:
    from ingest.sample import write_sample

    paths = write_sample(
        options.directory, vocab_size=options.vocab_size, packages=options.packages, progress=_progress(options)
    )
    next_step = f"ingest stream {paths.config}"
    _print(options, {"config": str(paths.config), "corpus": str(paths.corpus), "next": next_step})


def _index(options: Any) -> None:
    from ingest.run import Run

    config = IngestConfig.from_yaml(options.config)
    _print(options, describe_manifest(Run.prepare(config, _progress(options), rebuild=True)))


def _plan(options: Any) -> None:
    from ingest.forecast import forecast
    from ingest.run import Run

    _require_positive("--step-time", options.step_time)
    _print(
        options, forecast(Run.prepare(IngestConfig.from_yaml(options.config), _progress(options)), options.step_time)
    )


def _stream(options: Any) -> None:
    from ingest.ceiling import ceiling
    from ingest.drain import drain
    from ingest.lanes import require_world_size
    from ingest.run import Run

    _require_positive("--steps", options.steps)
    if options.state_out is not None:
        _require_writable(options.state_out)
    config = IngestConfig.from_yaml(options.config)
    config = replace(config, accept_changes=(*config.accept_changes, *options.accept))
    position = None if options.resume is None else read_position(options.resume)
    require_world_size(options.world_size, config.lanes)
    run = Run.prepare(config, _progress(options))
    if position is not None:
        position = run.require(position)  # before the files that it might overwrite are opened
        for change in position.accepted:
            _progress(options)(f"accepted at {change}")
    with _Lines(options.digests) as lines:
        figures, end = drain(
            run,
            options.world_size,
            position=position,
            steps=options.steps,
            record=lines.write,
            progress=_progress(options),
        )
    if options.ceiling:
        figures |= ceiling(run, figures["tokens_per_s"])
    if options.state_out is not None:
        run.storage.write_bytes(str(options.state_out.absolute()), end.to_json().encode())
    _print(options, figures)


def _inspect(options: Any) -> None:
    from ingest.replay import replay_state, replay_step
    from ingest.run import Run

    _require_positive("--step", options.step)
    if options.step is None and options.state is None:
        raise ConfigError("inspect must be told a step; got neither --step nor --state: name one")
    run = Run.prepare(IngestConfig.from_yaml(options.config), _progress(options))
    state = run.start() if options.state is None else read_position(options.state)
    step = state.step if options.step is None else options.step
    rows = replay_state(run, state) if step == state.step else replay_step(run, step, state)
    if options.json:
        changes = {"accepted": [str(change) for change in state.accepted]} if state.accepted else {}
        print(json.dumps({"step": step, "rows": [asdict(row) for row in rows], **changes}))
        return
    print(f"step {step}")
    for change in state.accepted:
        print(f"accepted at {change}")
    for row in rows:
        print(f"window {row.window} row {row.row} lane {row.lane}" if row.pieces else "padding")
        for piece in row.pieces:
            where = f"{piece.file} row group {piece.row_group} row {piece.row}"
            print(f"  {where} ({piece.source}, epoch {piece.epoch}), {piece.tokens} tokens: {piece.text[:60]!r}")


def _pack(options: Any) -> None:
    from ingest.loader import Loader
    from ingest.pack import pack, packing_run
    from ingest.run import Run

    say = _progress(options)
    run = Run.prepare(IngestConfig.from_yaml(options.config), say)
    if run.config.num_epochs != 1:
        ends = f"epochs: {run.config.epochs}" if run.config.epochs else f"total_tokens: {run.config.total_tokens}"
        say(f"warning: {ends} is packed as it is, documents that come again too; epochs: 1 packs each document once")
    out = options.out.rstrip("/") if "://" in options.out else str(Path(options.out).absolute())
    rows = packing_run(run)
    with Loader(rows.config, run=rows) as loader:
        figures = pack(loader.steps(), run.packed_format, run.storage, out, lanes=run.config.lanes, progress=say)
    packing = run.config.packing
    say("to train on it, with the same tokenizer:")
    say(f"sources:\n  - {{name: packed, path: {json.dumps(out)}}}")
    say(f"packing: {{sequence_length: {packing.sequence_length}, position_ids: {packing.position_ids}}}")
    _print(options, figures)


def _require_positive(option: str, value: float | None) -> None:
    if value is not None and not value > 0:
        raise ConfigError(f"{option} must be > 0; got {value}: set it to 1 or more")


def _require_writable(path: Path) -> None:
    """Tries the place of a file that is written at the end of a run, when it would be too late to find out."""
    try:
        if path.is_dir():
            raise IsADirectoryError(errno.EISDIR, "it is a directory")
        path.parent.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise StorageError(f"{path} must be writable; {error}: name another file") from None


def read_position(path: Path) -> Position:
    """Reads a position file, or the one in a checkpoint directory.

    Raises:
        ResumeError: there is none, or it is not a position.
    """
    try:
        file = path / "position.json" if path.is_dir() else path
        with file.open(encoding="utf-8") as text:
            return Position.from_json(text.read(MAX_BYTES + 1))
    except ResumeError as error:
        raise ResumeError(f"position {path}: {str(error).removeprefix('position ')}") from None
    except (OSError, UnicodeDecodeError) as error:
        raise ResumeError(
            f"position {path} cannot be read; {error}: name a file that --state-out or a checkpoint wrote"
        ) from None


class _Lines:
    """JSON lines to a file, or nowhere; on disk line by line, so that a killed run leaves what it had."""

    def __init__(self, path: Path | None) -> None:
        self._path = path

    def __enter__(self) -> _Lines:
        try:
            self._file = None if self._path is None else self._path.open("w", encoding="utf-8", buffering=1)
        except OSError as error:
            raise StorageError(f"{self._path} must be writable; {error}: name another file") from None
        return self

    def write(self, line: dict[str, Any]) -> None:
        if self._file is not None:
            self._file.write(json.dumps(line) + "\n")

    def __exit__(self, *error: object) -> None:
        if self._file is not None:
            self._file.close()


def describe_manifest(run: Any) -> dict[str, Any]:
    """What ``ingest index`` prints."""
    sources = [
        {
            "name": source.name,
            "files": len(source.files),
            "row_groups": len(source.unit_rows),
            "rows": int(source.unit_rows.sum()),
            "text_bytes": int(source.unit_text_bytes.sum()),
            "estimated_tokens": int(source.unit_tokens.sum()),
        }
        for source in run.manifest.sources
    ]
    totals = {key: sum(source[key] for source in sources) for key in list(sources[0])[1:]}
    warnings = [f"{source.name}: {warning}" for source in run.manifest.sources for warning in source.warnings]
    return {**totals, "manifest": run.manifest.hash, "sources": sources, "warnings": warnings}


if __name__ == "__main__":
    sys.exit(main())
