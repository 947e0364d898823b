"""A prepared run: config, manifest and tokenizer joined into a plan, window specs and a fingerprint. No Ray, no torch.

Preparing reads every footer once (or a stored manifest) and the tokenizer; everything after it is arithmetic.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from itertools import islice
from typing import Any

import numpy as np

from ingest.account import MAX_SKIPS, Account, Bad, Skip
from ingest.columns import documents as of_documents
from ingest.columns import texts as texts_of
from ingest.config import IngestConfig
from ingest.encoding import SourceEncoder, source_encoders
from ingest.errors import ConfigError, DataError, ResumeError
from ingest.index import require_files
from ingest.maker import Maker
from ingest.manifest import Manifest, find_manifest, load_manifest
from ingest.packed import PackedFormat
from ingest.parquet import read_documents
from ingest.plan import PLAN_VERSION, Cursors, Plan, PlanSource, WindowPlan, auto_window_tokens
from ingest.position import Position
from ingest.spec import UnitSpec, WindowSettings, WindowSpec
from ingest.storage import Storage
from ingest.tokenizer import Tokenizer

VERIFY_CHARS = 1 << 18  # of each source, for the parity check when a run is prepared: 0.2 s with the reference
WEIGHT_UNIT = 1_000_000  # weights become integers of this resolution, so that the mixture is exact


@dataclass(frozen=True, eq=False)
class Run:
    """Everything that decides order, ready to use."""

    config: IngestConfig
    storage: Storage
    tokenizer: Tokenizer
    encoders: tuple[SourceEncoder, ...]
    manifest: Manifest

    @classmethod
    def prepare(
        cls, config: IngestConfig, progress: Callable[[str], None] | None = None, *, rebuild: bool = False
    ) -> Run:
        """Loads the tokenizer and the manifest, which is built where there is none.

        Args:
            config: the run.
            progress: called with one line about every two seconds while footers are read.
            rebuild: read every footer again even where there is a stored manifest, and store what was found.

        Raises:
            ConfigError, StorageError, DataError: a path, a column or the tokenizer is not what the config says, or
                packed files were made with other settings.
        """
        storage = Storage(config.storage)
        tokenizer = Tokenizer.load(config.tokenizer, storage.read_bytes)
        encoders = source_encoders(config, tokenizer, storage)
        own = {source.name: each for source, each in zip(config.sources, encoders, strict=True) if not each.plain}
        manifest = load_manifest(
            config, storage, tokenizer.encode, progress, rebuild=rebuild, tokenizer=tokenizer.identity, encoders=own
        )
        run = cls(config, storage, tokenizer, encoders, manifest)
        for source, settings in zip(manifest.sources, config.sources, strict=True):
            require_files(source, settings)
            if source.packed is not None:
                if settings.filter is not None:
                    rule = f"source {source.name}: filter must stand beside documents that are not packed yet"
                    step = "filter the sources of `ingest pack`, and leave it out here"
                    raise ConfigError(f"{rule}; got packed rows, each of several documents: {step}")
                source.packed.require(run.packed_format, source.files[0].path)
                if source.name in own:
                    rule = f"source {source.name}: packed files must be read as they are"
                    raise ConfigError(f"{rule}; got {', '.join(own[source.name].identity)}: leave these settings out")
                if settings.allowed.skip_rows:
                    rule = f"source {source.name}: on_error.skip_rows must be 0 where rows are packed"
                    why = "nobody knows which documents a damaged one held, so they could not be counted"
                    raise ConfigError(f"{rule}; got {settings.allowed.skip_rows:g}, and {why}: leave it out")
        tokenizer.verify(run.first_documents())
        if progress and config.tokenizer.backend == "auto" and tokenizer.backend_name != "tiktoken":
            progress(f"tokenizer backend: {tokenizer.backend_name}, as {tokenizer.backend_reason}")
        return run

    def first_documents(self) -> list[str]:
        """The first documents of every text source, for the parity check of the fast tokenizer on the user's text."""
        texts: list[str] = []
        for source, settings in zip(self.manifest.sources, self.config.sources, strict=True):
            if source.packed is not None:
                continue
            unit = source.unit(int(np.argmax(source.unit_text_bytes > 0)))  # the first one that the filter leaves
            expect = (unit.size_bytes, unit.footer_hash)
            skip = settings.allowed.skip_rows > 0
            documents = read_documents(
                self.storage,
                unit.path,
                unit.row_group,
                settings.columns,
                expect,
                batch_rows=64,
                request_bytes=1 << 18,
                skip=skip,
            )
            left = VERIFY_CHARS
            first = next(of_documents(islice(documents, 64)), ())
            for text in texts_of(first) if len(first) else ():
                if left > 0:
                    texts.append(text[:left])
                    left -= len(text)
        return texts

    @cached_property
    def token_dtype(self) -> np.dtype[Any]:
        """The tokenizer's, or uint32 where some tokens are no labels."""
        packed = [source.packed for source in self.manifest.sources if source.packed is not None]
        widest = max((np.dtype(form.token_dtype).itemsize for form in packed), default=0)
        masked = any(source.masked for source in self.config.sources)
        return np.dtype(np.uint32) if widest == 4 or masked else self.tokenizer.token_dtype

    @cached_property
    def packed_format(self) -> PackedFormat:
        """What a packed file must say of itself to stand among the sources, and what ``ingest pack`` writes."""
        config, tokenizer = self.config, self.tokenizer
        return PackedFormat(
            sequence_length=config.packing.sequence_length,
            token_dtype=str(self.token_dtype),
            tokenizer=tokenizer.sha256,
            eos_token=config.tokenizer.eos_token,
            strategy=config.packing.strategy,
            bos_token=config.tokenizer.bos_token,
            position_ids=config.packing.position_ids,
        )

    @cached_property
    def window_tokens(self) -> int:
        """Target size of a window in estimated tokens, ``auto`` resolved."""
        target = self.config.shuffle.window_tokens
        if target != "auto":
            return target
        total = sum(int(source.unit_tokens.sum()) for source in self.manifest.sources)
        return auto_window_tokens(total, self.config.packing.sequence_length, self.config.lanes)

    @property
    def largest_window_tokens(self) -> int:
        """No window has more, as estimated: it closes with the unit that reaches the target, or takes a tail along."""
        largest_unit = max(int(source.unit_tokens.max()) for source in self.manifest.sources)
        return self.window_tokens * 3 // 2 + largest_unit

    @cached_property
    def plan(self) -> Plan:
        """The order of units."""
        weights = self._weights([source.weight for source in self.config.sources])
        pairs = zip(self.manifest.sources, weights, strict=True)
        sources = [PlanSource(source.name, source.unit_tokens, weight) for source, weight in pairs]
        shuffle = self.config.shuffle
        return Plan(
            sources,
            seed=shuffle.seed,
            shuffle=shuffle.enabled,
            window_tokens=self.window_tokens,
            num_epochs=self.config.num_epochs,
        )

    @cached_property
    def maker(self) -> Maker:
        """What actors need."""
        config = self.config
        settings = WindowSettings(
            columns=tuple(source.columns for source in config.sources),
            sequence_length=config.packing.sequence_length,
            lanes=config.lanes,
            seed=config.shuffle.seed,
            shuffle=config.shuffle.enabled,
            eos_id=self.tokenizer.eos_id,
            token_dtype=str(self.token_dtype),
            strategy=config.packing.strategy,
            position_ids=config.packing.position_ids,
            skips=tuple(source.allowed.skip_rows > 0 for source in config.sources),
        )
        return Maker(settings, self.tokenizer, self.storage, tuple(each.encode for each in self.encoders))

    @cached_property
    def fingerprint(self) -> dict[str, Any]:
        """All that decides order and content, as nested plain values; see ``position.py``."""
        config = self.config
        sources = {
            source.name: {
                "index": index,
                "data": source.hash,
                "files": len(source.files),
                "rows": int(source.unit_rows.sum()),
                "tokens_per_mib": source.tokens_per_mib,
                "bytes_per_row": source.bytes_per_row,
                **({"text_column": None} if source.packed else encoder.identity),
                "weight": settings.weight,
            }
            for index, (source, settings, encoder) in enumerate(
                zip(self.manifest.sources, config.sources, self.encoders, strict=True)
            )
        }
        bos = {} if config.tokenizer.bos_token is None else {"bos_token": config.tokenizer.bos_token}
        packing = asdict(config.packing)
        if config.packing.position_ids == "restart":
            del packing["position_ids"]
        return {
            "plan": PLAN_VERSION,
            "manifest": self.manifest.hash,
            "sources": sources,
            "tokenizer": {"sha256": self.tokenizer.sha256, "eos_token": config.tokenizer.eos_token, **bos},
            "packing": packing,
            "shuffle": {
                "seed": config.shuffle.seed,
                "enabled": config.shuffle.enabled,
                "window_tokens": self.window_tokens,
            },
            "lanes": config.lanes,
            "global_batch_rows": config.global_batch_rows,
            # With several sources the end of one changes the mix of the others.
            "epochs": config.num_epochs if len(config.sources) > 1 else "any",
        }

    def start(self) -> Position:
        """The position before the first step."""
        skips = [
            Skip.of(index, path, -1, Bad(0, 0, reason))
            for index, source in enumerate(self.manifest.sources)
            for path, reason in source.skipped
        ]
        account = Account((), tuple(skips[:MAX_SKIPS]), len(skips))
        return Position.start(self.plan.start(), self.fingerprint, account)

    def check(self, position: Position) -> None:
        """Ends the run where more rows were skipped than ``on_error`` allows; the same on every rank.

        Args:
            position: any; skips are booked at the end of their window.

        Raises:
            DataError: names the source, the rows and the first of them.
        """
        account, cursors = position.counts.account, position.cursors.sources
        for index, (counted, cursor) in enumerate(zip(account.sources, cursors, strict=bool(account.sources))):
            source, settings = self.manifest.sources[index], self.config.sources[index]
            passes, allowed = cursor.epoch + 1, settings.allowed.rows(int(source.unit_rows.sum()))
            if counted.bad > allowed * passes:
                first = next((str(skip) for skip in account.skips if skip.source == index), "none recorded")
                raise DataError(
                    f"source {source.name}: on_error.skip_rows must cover the rows that cannot be read; got "
                    f"{counted.bad} in pass {passes}, {allowed} a pass allowed, the first is {first}: mend the "
                    "files, or raise it and resume"
                )

    def require(self, position: Position) -> Position:
        """Refuses a position of other data or settings, but for what the config's ``accept_changes`` names.

        Returns:
            The position that this run goes on from: the same, or with what was accepted recorded.

        Raises:
            ResumeError: lists every field that differs, and for data the files; or the position lies beyond the data.
        """
        then, position = (
            position,
            position.require(self.fingerprint, self._explain(position), self.config.accept_changes),
        )
        for source, cursor in zip(self.plan.sources, position.cursors.sources, strict=True):
            if cursor.unit >= len(source.unit_tokens):
                raise ResumeError(
                    f"position must lie within the data; got unit {cursor.unit} of source {source.name}, which has "
                    f"{len(source.unit_tokens)}: use another checkpoint"
                )

        limit = self.config.num_epochs
        if limit is not None and all(cursor.epoch >= limit for cursor in position.cursors.sources):
            raise ResumeError(
                f"position must lie within the epochs; got epoch {position.cursors.sources[0].epoch}, counted from 0, "
                f"and epochs: {limit}: set epochs to {position.cursors.sources[0].epoch + 1} or more"
            )
        return self._ending_as_begun(position, then)

    def _ending_as_begun(self, position: Position, then: Position) -> Position:
        """With the weights that its window was begun with, where they are others now."""
        before, now = (
            [each.fingerprint["sources"][source.name].get("weight") for source in self.config.sources]
            for each in (then, position)
        )
        if before == now or position.cursors.weights is not None:
            return position
        if not all(weight is None or (type(weight) in (int, float) and 1e-6 <= weight <= 1e6) for weight in before):
            raise ResumeError(
                f"position must hold weights between 0.000001 and 1000000; got {before}: use another checkpoint"
            )
        return replace(position, cursors=replace(position.cursors, weights=self._weights(before)))

    def _weights(self, weights: Sequence[float | None]) -> tuple[int, ...]:
        """As integers; a source without one is as heavy as it is large."""
        sizes = (int(source.unit_tokens.sum()) for source in self.manifest.sources)
        pairs = zip(weights, sizes, strict=True)
        return tuple(size if weight is None else round(weight * WEIGHT_UNIT) for weight, size in pairs)

    def specs(self, cursors: Cursors) -> Iterator[WindowSpec]:
        """What actors need for each window from ``cursors`` on."""
        return map(self.spec, self.plan.windows(cursors))

    def spec(self, window: WindowPlan) -> WindowSpec:
        """What an actor needs for one window."""
        units = []
        for unit in window.units:
            source = self.manifest.sources[unit.source]
            info = source.unit(unit.number)
            units.append(
                UnitSpec(
                    source=unit.source,
                    epoch=unit.epoch,
                    path=info.path,
                    row_group=info.row_group,
                    size_bytes=info.size_bytes,
                    footer_hash=info.footer_hash,
                    packed=source.packed is not None,
                    number=unit.number,
                )
            )
        return WindowSpec(window.cursors, tuple(units), window.last)

    def _explain(self, position: Position) -> Callable[[str], str]:
        """What is known of a difference: files that differ, if the manifest of then is still there; what auto chose."""

        def explain(field: str) -> str:
            if field == "shuffle.window_tokens" and self.config.shuffle.window_tokens == "auto":
                return ", by auto from other sizes, so set it to what it was"
            then = find_manifest(str(position.fingerprint.get("manifest"))) if field == "manifest" else None
            lines = then.diff(self.manifest) if then else []
            return f" ({', '.join(lines)})" if lines else ""

        return explain
