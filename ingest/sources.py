"""The settings of one source: which files, what in them is a document, and what may be left out of them."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal

from pydantic import ConfigDict

from ingest.columns import SETTINGS, Columns, Kind
from ingest.errors import ConfigError
from ingest.filter import Filter
from ingest.fim import FimConfig

STRICT = ConfigDict(extra="forbid", strict=False)


def require(holds: bool, rule: str, value: object, step: str) -> None:
    """Refuses a setting.

    Raises:
        ConfigError: it does not hold; says the rule, the value and the next step.
    """
    if not holds:
        raise ConfigError(f"{rule}; got {value}: {step}")


@dataclass(frozen=True, kw_only=True)
class OnErrorConfig:
    """How much of a source may be left out because it cannot be read; what is more ends the run.

    Args:
        skip_rows: rows a pass, on average, that are not UTF-8 or lie where a row group cannot be decoded.
        skip_files: files that are not Parquet, damaged, or without the text column when the manifest is made.

    Both from 1 on are numbers, below 1 shares of the source.
    """

    __pydantic_config__ = STRICT

    skip_rows: float = 0.0
    skip_files: float = 0.0

    def __post_init__(self) -> None:
        for name, value in (("skip_rows", self.skip_rows), ("skip_files", self.skip_files)):
            rule = f"on_error.{name} must be a number from 1 on, a share from 0 to 1, or 0"
            require(value >= 0 and (value < 1 or float(value).is_integer()), rule, value, "try 0.001")

    def rows(self, of: int) -> int:
        """The rows a pass of a source of so many."""
        return int(self.skip_rows if self.skip_rows >= 1 else self.skip_rows * of)

    def files(self, of: int) -> int:
        """The files of a source of so many."""
        return int(self.skip_files if self.skip_files >= 1 else self.skip_files * of)


@dataclass(frozen=True, kw_only=True)
class SourceConfig:
    """A named set of Parquet files and its share of the tokens.

    Args:
        name: unique; appears in counts, errors and positions.
        path: a file, a directory (searched for ``*.parquet``), a glob (``**`` allowed), or a list of these; a local
            path or a URI (``s3://``, ``gs://``, ``abfs://``, ``hdfs://``, ``file://``).
        text_column: the column that holds one document a row; not read where one of the next four is named.
        messages: a column of conversations, list<struct<role, content>>, for the chat template; answers are trained.
        prompt, response: two columns of text, of which the response is trained.
        tokens: a column of lists of ids, documents that are tokenized already.
        transform: ``package.module:function``, applied to texts before anything else.
        fim: fill-in-the-middle on the text of this source.
        filter: which rows count, such as ``language == "en" and score > 0.7``; a row for which it is null does not. See
            ``filter.py``.
        weight: share of the tokens, relative to the other sources' weights. None, for all sources or for none: as
            large as the source is.
        on_error: ``raise`` ends the run at the first row or file that cannot be read; ``{skip_rows: 100, skip_files:
            0.01}`` goes on without it, counts and records it. It may differ at a resume.
    """

    __pydantic_config__ = STRICT

    name: str
    path: str | tuple[str, ...]
    text_column: str = "text"
    messages: str | None = None
    prompt: str | None = None
    response: str | None = None
    tokens: str | None = None
    transform: str | None = None
    fim: FimConfig | None = None
    filter: str | None = None
    weight: float | None = None
    on_error: Literal["raise"] | OnErrorConfig = "raise"

    def __post_init__(self) -> None:
        require(bool(self.name), "sources.name must not be empty", repr(self.name), "name every source")
        require(bool(self.path), f"source {self.name}: path must not be empty", repr(self.path), "name its files")
        if self.weight is not None:
            rule = f"source {self.name}: weight must be between 0.000001 and 1000000"
            require(1e-6 <= self.weight <= 1e6, rule, self.weight, "set a share such as 0.7, or leave it out")
        self._require_one_kind()
        assert self.columns  # a filter that is none is refused

    def _require_one_kind(self) -> None:
        kinds: list[Kind] = ["messages", "prompt", "tokens"]
        named = [name for kind in kinds for name in SETTINGS[kind] if getattr(self, name)]
        one = any(named == list(SETTINGS[kind]) for kind in kinds) and self.text_column == "text"
        rule = f"source {self.name}: documents must come from one of text_column, messages, prompt and response, tokens"
        require(not named or one, rule, ", ".join(named), "name one of them")
        only_text = [name for name in ("transform", "fim") if getattr(self, name) is not None]
        rule = f"source {self.name}: transform and fim must stand beside a text_column"
        require(not (named and only_text), rule, ", ".join(only_text + named), "leave them out")

    @cached_property
    def columns(self) -> Columns:
        """What documents are read from, and which rows."""
        filter_ = None if self.filter is None else Filter.parse(self.filter, self.name)
        for kind, settings in SETTINGS.items():
            names = tuple(getattr(self, name) for name in settings)
            if kind != "text" and all(names):
                return Columns(kind, names, filter_)
        return Columns("text", (self.text_column,), filter_)

    @property
    def masked(self) -> bool:
        """Whether some of its tokens are no labels."""
        return self.columns.kind in ("messages", "prompt")

    @property
    def plain(self) -> bool:
        """Whether its documents are text that is tokenized as it is, all of it."""
        return self.columns.kind == "text" and self.transform is None and self.fim is None and self.filter is None

    @property
    def allowed(self) -> OnErrorConfig:
        """What may be left out, nothing where ``on_error`` is ``raise``."""
        return OnErrorConfig() if self.on_error == "raise" else self.on_error

    @property
    def paths(self) -> tuple[str, ...]:
        """``path`` as a tuple."""
        return (self.path,) if isinstance(self.path, str) else self.path
