"""The settings of a run: frozen dataclasses, read from YAML, checked before anything starts.

Everything that decides order is in ``IngestConfig``. What only decides speed is in ``ResourcesConfig`` and may differ
at a resume. Type errors and unknown keys are found by pydantic; rules between values are in each ``__post_init__``, so
that a config built in Python obeys them too.
"""

from __future__ import annotations

import dataclasses
import difflib
import os
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

import yaml
from pydantic import TypeAdapter, ValidationError

from ingest.changes import ACCEPTABLE
from ingest.errors import ConfigError
from ingest.fim import FimConfig
from ingest.packing import PositionIds, Strategy
from ingest.sources import STRICT, OnErrorConfig, SourceConfig, require


@dataclass(frozen=True, kw_only=True)
class StorageConfig:
    """How to reach the object store. Credentials come from the environment only and are never stored.

    Args:
        endpoint: URL of an S3-compatible server; None is the cloud's own.
        region: S3 region; None lets the client find out.
        max_attempts: tries of one request, the first included.
        request_timeout_s: seconds without a byte until a request counts as failed.
        retry_deadline_s: seconds after the first try of a request in which another one may begin.
        max_requests: requests under way at a time, of each actor and of the process that makes the manifest.
    """

    __pydantic_config__ = STRICT

    endpoint: str | None = None
    region: str | None = None
    max_attempts: int = 5
    request_timeout_s: float = 30.0
    retry_deadline_s: float = 120.0
    max_requests: int = 32

    def __post_init__(self) -> None:
        require(1 <= self.max_attempts <= 100, "storage.max_attempts must be 1 to 100", self.max_attempts, "try 5")
        require(self.request_timeout_s > 0, "storage.request_timeout_s must be > 0", self.request_timeout_s, "try 30")
        require(self.retry_deadline_s >= 0, "storage.retry_deadline_s must be >= 0", self.retry_deadline_s, "try 120")
        require(1 <= self.max_requests <= 1024, "storage.max_requests must be 1 to 1024", self.max_requests, "try 32")


@dataclass(frozen=True, kw_only=True)
class TokenizerConfig:
    """Which tokenizer, and which implementation of it.

    Args:
        path: a ``tokenizer.json`` of the `tokenizers` library; local or URI.
        eos_token: the token appended to every document; must be in the vocabulary.
        bos_token: a token put before every document.
        chat_template: a ``.jinja`` file, or a ``tokenizer_config.json`` with that key, for conversations; None looks
            for a ``tokenizer_config.json`` beside ``path``.
        backend: ``tokenizers`` is the reference; ``tiktoken`` is faster and used only where proven identical; ``auto``
            takes tiktoken if it is installed and proven identical, and says so.
    """

    __pydantic_config__ = STRICT

    path: str
    eos_token: str = "<|endoftext|>"  # noqa: S105 - a token of text
    backend: Literal["auto", "tokenizers", "tiktoken"] = "auto"
    bos_token: str | None = None
    chat_template: str | None = None


@dataclass(frozen=True, kw_only=True)
class PackingConfig:
    """How documents become rows.

    Args:
        sequence_length: T, tokens a row.
        strategy: ``concat`` lays documents end to end and cuts at T; ``best_fit`` keeps documents of at most T tokens
            whole and pads what they leave. With both, every token is an input exactly once.
        position_ids: of a document that goes on in another row: ``restart`` counts from 0 there, ``continue`` from
            where it was cut, so that positions grow to the length of the longest document.
    """

    __pydantic_config__ = STRICT

    sequence_length: int = 2048
    strategy: Strategy = "concat"
    position_ids: PositionIds = "restart"

    def __post_init__(self) -> None:
        rule = "packing.sequence_length must be 2 to 16777216 tokens"
        require(2 <= self.sequence_length <= 2**24, rule, self.sequence_length, "try 2048")


@dataclass(frozen=True, kw_only=True)
class ShuffleConfig:
    """How the order is drawn.

    Args:
        seed: any integer from 0 to 2^63-1.
        window_tokens: target size of a window in tokens, the local shuffle buffer; ``auto`` derives it from the data.
        enabled: False keeps the order of files, row groups, documents and rows (evaluation).
    """

    __pydantic_config__ = STRICT

    seed: int = 0
    window_tokens: int | Literal["auto"] = "auto"
    enabled: bool = True

    def __post_init__(self) -> None:
        require(0 <= self.seed < 2**63, "shuffle.seed must be 0 to 2^63-1", self.seed, "try 0")
        if self.window_tokens != "auto":
            require(self.window_tokens >= 1, "shuffle.window_tokens must be >= 1", self.window_tokens, "try auto")


@dataclass(frozen=True, kw_only=True)
class ResourcesConfig:
    """What the job may use. Nothing here changes the order, so everything here may differ at a resume.

    Args:
        tokenize_actors: fewest and most tokenization actors; one number means exactly that many.
        cpus_per_actor: logical CPUs that Ray reserves for each.
        label_selector: labels of the nodes that may tokenize, as Ray writes them: ``{pool: tokenize}``, or
            ``{ray.io/accelerator-type: "!in(H100)"}``; empty takes every node that has free CPUs, GPU nodes too.
        prefetch_windows: windows of which a rank holds its slab ready, beyond the open one.
        prefetch_batches: batches on or on their way to the device beyond the one in use.
        cluster_wait_s: seconds to wait for an autoscaler to bring the CPUs; 0 refuses at once what does not fit.
        stall_timeout_s: seconds without a slab after which the loader gives up and says which stage is short.
    """

    __pydantic_config__ = STRICT

    tokenize_actors: tuple[int, int] | int = (1, 8)
    cpus_per_actor: float = 1.0
    label_selector: dict[str, str] = field(default_factory=dict)
    prefetch_windows: int = 2
    prefetch_batches: int = 2
    cluster_wait_s: float = 0.0
    stall_timeout_s: float = 600.0

    def __post_init__(self) -> None:
        low, high = self.min_actors, self.max_actors
        require(1 <= low <= high, "resources.tokenize_actors must be 1 <= min <= max", [low, high], "try [1, 8]")
        require(
            1e-4 <= self.cpus_per_actor <= 1e6,
            "resources.cpus_per_actor must be 0.0001 to 1000000",
            self.cpus_per_actor,
            "try 1",
        )
        whole = self.cpus_per_actor < 1 or float(self.cpus_per_actor).is_integer()
        rule = "resources.cpus_per_actor must be whole or below 1 (Ray's rule)"
        require(whole, rule, self.cpus_per_actor, "round it")
        require(
            1 <= self.prefetch_windows <= 1024,
            "resources.prefetch_windows must be 1 to 1024",
            self.prefetch_windows,
            "try 2",
        )
        require(
            1 <= self.prefetch_batches <= 1024,
            "resources.prefetch_batches must be 1 to 1024",
            self.prefetch_batches,
            "try 2",
        )
        require(self.cluster_wait_s >= 0, "resources.cluster_wait_s must be >= 0", self.cluster_wait_s, "try 300")
        require(self.stall_timeout_s > 0, "resources.stall_timeout_s must be > 0", self.stall_timeout_s, "try 600")

    @property
    def min_actors(self) -> int:
        """Fewest tokenization actors."""
        return self.tokenize_actors if isinstance(self.tokenize_actors, int) else self.tokenize_actors[0]

    @property
    def max_actors(self) -> int:
        """Most tokenization actors."""
        return self.tokenize_actors if isinstance(self.tokenize_actors, int) else self.tokenize_actors[1]


@dataclass(frozen=True, kw_only=True)
class IngestConfig:
    """A whole run.

    Args:
        sources: at least one, names unique.
        lanes: S, the number of fixed logical streams; every world size that divides it can train and resume.
        global_batch_rows: G, rows a step over all ranks; a multiple of ``lanes``.
        epochs: passes over every source; 1 if neither this nor ``total_tokens`` is given.
        total_tokens: stop after the step that reaches this many tokens, padding apart; sources repeat as needed.
        accept_changes: what a position may differ in at a resume, of ``manifest``, ``tokenizer``, ``weights`` and
            ``filter``; it is recorded in the position. See ``changes.py``.
        manifest: where ``ingest index`` stores the manifest and where it is read from; None uses the cache directory.

    Raises:
        ConfigError: a rule between the values is broken.
    """

    __pydantic_config__ = STRICT

    sources: tuple[SourceConfig, ...]
    tokenizer: TokenizerConfig
    storage: StorageConfig = field(default_factory=StorageConfig)
    packing: PackingConfig = field(default_factory=PackingConfig)
    shuffle: ShuffleConfig = field(default_factory=ShuffleConfig)
    lanes: int = 8
    global_batch_rows: int = 64
    epochs: int | None = None
    total_tokens: int | None = None
    resources: ResourcesConfig = field(default_factory=ResourcesConfig)
    manifest: str | None = None
    accept_changes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        names = [source.name for source in self.sources]
        require(bool(names), "sources must name at least one source", names, "add one with a name and a path")
        require(len(set(names)) == len(names), "sources.name must be unique", names, "rename one")
        weights = [source.weight for source in self.sources]
        mixed = None in weights and any(weight is not None for weight in weights)
        rule = "sources.weight must be set for every source or for none"
        require(not mixed, rule, weights, "a share has no meaning beside a size: set the missing ones")
        require(1 <= self.lanes <= 65536, "lanes must be 1 to 65536", self.lanes, "try 8")
        multiple = self.global_batch_rows >= 1 and self.global_batch_rows % self.lanes == 0
        rule = "global_batch_rows must be at most 16777216"
        require(self.global_batch_rows <= 2**24, rule, self.global_batch_rows, "try 64")
        near = max(1, round(self.global_batch_rows / self.lanes)) * self.lanes
        rule = "global_batch_rows must be a multiple of lanes"
        require(multiple, rule, f"{self.global_batch_rows} and {self.lanes}", f"set global_batch_rows to {near}")
        both = self.epochs is not None and self.total_tokens is not None
        require(not both, "only one of epochs and total_tokens may be set", "both", "remove one")
        unknown = [name for name in self.accept_changes if name not in ACCEPTABLE]
        rule = f"accept_changes must be names of {', '.join(ACCEPTABLE)}"
        require(not unknown, rule, ", ".join(unknown), "nothing else can be accepted")
        for name, value in (("epochs", self.epochs), ("total_tokens", self.total_tokens)):
            require(value is None or value >= 1, f"{name} must be >= 1", value, "set it to 1 or more")

    @property
    def num_epochs(self) -> int | None:
        """Passes over every source; None where ``total_tokens`` ends the stream."""
        return None if self.total_tokens is not None else (self.epochs or 1)

    @classmethod
    def from_dict(cls, settings: Any, *, base: str | os.PathLike[str] | None = None) -> IngestConfig:
        """Builds a config from plain values.

        Args:
            settings: nested mappings and lists, as YAML gives them.
            base: directory that relative local paths start from; None leaves them as they are.

        Raises:
            ConfigError: unknown key, wrong type, or a broken rule; the message names the key and the value.
        """
        if not isinstance(settings, dict):
            raise ConfigError(f"a config must be a mapping of settings; got {type(settings).__name__}: see README")
        try:
            config = TypeAdapter(cls).validate_python(settings)
        except ValidationError as error:
            raise ConfigError(_first_problem(error)) from None
        return config if base is None else _rebase(config, Path(base))

    @classmethod
    def from_yaml(cls, path: str | os.PathLike[str]) -> IngestConfig:
        """Reads a config; relative local paths in it start from the directory that the file is in.

        Raises:
            ConfigError: the file is missing, is not YAML, or breaks a rule.
        """
        try:
            text = Path(path).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(
                f"config {path} cannot be read; {error}: name a YAML file; {Path.cwd()} is where it was looked for"
            ) from None
        try:
            settings = yaml.safe_load(text)
        except (yaml.YAMLError, ValueError, RecursionError) as error:  # ValueError: a date such as 2024-99-99
            where = " ".join(str(error).split())
            raise ConfigError(f"config {path} must be YAML; {where}: mend that line") from None
        try:
            return cls.from_dict(settings, base=Path(path).resolve().parent)
        except ConfigError as error:
            raise ConfigError(f"config {path}: {error}") from None

    def to_dict(self) -> dict[str, Any]:
        """The config as plain values that ``from_dict`` takes back unchanged."""
        plain: dict[str, Any] = _plain(dataclasses.asdict(self))
        return plain

    def to_yaml(self) -> str:
        """The config as YAML text."""
        return yaml.safe_dump(self.to_dict(), sort_keys=False)


def _plain(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _plain(item) for key, item in value.items() if item is not None}
    return [_plain(item) for item in value] if isinstance(value, tuple | list) else value


def _rebase(config: IngestConfig, base: Path) -> IngestConfig:
    def absolute(path: str) -> str:
        return path if "://" in path else str(base / os.path.expanduser(path))

    sources = tuple(
        dataclasses.replace(
            source, path=tuple(map(absolute, source.paths)) if len(source.paths) > 1 else absolute(source.paths[0])
        )
        for source in config.sources
    )
    tokenizer = config.tokenizer
    template = None if tokenizer.chat_template is None else absolute(tokenizer.chat_template)
    tokenizer = dataclasses.replace(tokenizer, path=absolute(tokenizer.path), chat_template=template)
    manifest = None if config.manifest is None else absolute(config.manifest)
    return dataclasses.replace(config, sources=sources, tokenizer=tokenizer, manifest=manifest)


def _first_problem(error: ValidationError) -> str:
    """One line for pydantic's first complaint: the key's path, the rule, the value, and the nearest known key."""
    problems = error.errors(include_url=False)
    word = problems[0]["type"] == "literal_error" and isinstance(problems[0]["input"], dict)  # meant for the next one
    problem = problems[min(word, len(problems) - 1)]
    members = ("tuple[", "literal[", "OnErrorConfig")
    where = [part for part in problem["loc"] if not str(part).startswith(members)]
    where = where[:-1] if where[-1:] in (["str"], ["int"]) else where  # which member of a union was tried first
    key = ".".join(map(str, where)) or "config"
    if problem["type"] in ("unexpected_keyword_argument", "extra_forbidden"):
        known = [item.name for owner in _OWNERS for item in dataclasses.fields(owner)]
        near = difflib.get_close_matches(str(where[-1]), known, n=1)
        return f"{key} is not a setting; got {problem['input']!r}: " + (
            f"did you mean {near[0]}?" if near else "remove it"
        )
    if problem["type"] in ("missing", "missing_argument"):
        return f"{key} is required; got nothing: add it"
    return f"{key}: {problem['msg'][0].lower()}{problem['msg'][1:]}; got {problem['input']!r}: correct it"


_OWNERS: tuple[type, ...] = (
    IngestConfig, SourceConfig, FimConfig, OnErrorConfig, StorageConfig, TokenizerConfig, PackingConfig,
    ShuffleConfig,
    ResourcesConfig,
)  # fmt: skip
