"""A child process for ``test_hostile``: reads damaged copies of a Parquet file and says what came of each.

A crash of a decoder ends this process and not the tests. Standard input has one line a copy, a JSON list of
``[offset, mask]``; standard output answers each with a line: ``same``, the name of an ``IngestError``, or
what is wrong.

    python -m tests.fuzzed FILE
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from ingest.columns import Columns
from ingest.config import StorageConfig
from ingest.errors import IngestError
from ingest.footer import read_footer
from ingest.index import index_file
from ingest.parquet import read_documents
from ingest.storage import FileInfo, Storage

ONCE = Storage(StorageConfig(max_attempts=1))
TEXT = Columns("text", ("text",))


def documents(path: str, expect: tuple[int, str] | None) -> list[str | None]:
    """All documents of a file."""
    groups = read_footer(ONCE, path).metadata.num_row_groups
    arrays = (array for group in range(groups) for array in read_documents(ONCE, path, group, "text", expect))
    return [text for array in arrays for text in array.to_pylist()]


def outcome(path: str, expect: tuple[int, str] | None, original: list[str | None]) -> str:
    """What reading a damaged file gives, by the manifest of the whole one; None: by its own."""
    try:
        indexed = index_file(ONCE, FileInfo(path, Path(path).stat().st_size, ""), TEXT)
        expect = expect or indexed.entry.content
        return "same" if documents(path, expect) == original else "WRONG TEXT"
    except IngestError as error:
        return type(error).__name__


def main(path: str) -> None:
    """Answers lines until there are no more."""
    whole = Path(path)
    data, copy = whole.read_bytes(), whole.with_suffix(".damaged")
    footer, original = read_footer(ONCE, path), documents(path, None)
    for line in sys.stdin:
        damaged = bytearray(data)
        for offset, mask in json.loads(line):
            damaged[offset] ^= mask
        copy.write_bytes(damaged)
        print(outcome(str(copy), (footer.size_bytes, footer.hash), original), flush=True)


if __name__ == "__main__":
    main(sys.argv[1])
