"""Feeds LLM training from raw text on a Ray cluster: tokenized and packed on the fly, with exact, elastic resume.

Names are imported when first used, so that an actor which only tokenizes does not load torch.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from ingest.attention import block_mask, document_mask, transformers_arguments, varlen_arguments
    from ingest.batch import Batch
    from ingest.config import (
        IngestConfig,
        PackingConfig,
        ResourcesConfig,
        ShuffleConfig,
        StorageConfig,
        TokenizerConfig,
    )
    from ingest.errors import (
        ConfigError,
        DataError,
        IngestError,
        OrderError,
        ResourceError,
        ResumeError,
        StorageError,
    )
    from ingest.loader import Loader
    from ingest.position import Position
    from ingest.sources import SourceConfig
    from ingest.train import restore_checkpoint, save_checkpoint, train_loader

_HOME = {
    "attention": ("block_mask", "document_mask", "transformers_arguments", "varlen_arguments"),
    "batch": ("Batch",),
    "config": (
        "IngestConfig", "PackingConfig", "ResourcesConfig", "ShuffleConfig", "StorageConfig", "TokenizerConfig",
    ),
    "errors": (
        "ConfigError", "DataError", "IngestError", "OrderError", "ResourceError", "ResumeError", "StorageError",
    ),
    "loader": ("Loader",),
    "position": ("Position",),
    "sources": ("SourceConfig",),
    "train": ("restore_checkpoint", "save_checkpoint", "train_loader"),
}  # fmt: skip
_MODULE = {name: f"ingest.{module}" for module, names in _HOME.items() for name in names}

__all__ = [
    "Batch",
    "ConfigError",
    "DataError",
    "IngestConfig",
    "IngestError",
    "Loader",
    "OrderError",
    "PackingConfig",
    "Position",
    "ResourceError",
    "ResourcesConfig",
    "ResumeError",
    "ShuffleConfig",
    "SourceConfig",
    "StorageConfig",
    "StorageError",
    "TokenizerConfig",
    "block_mask",
    "document_mask",
    "restore_checkpoint",
    "save_checkpoint",
    "train_loader",
    "transformers_arguments",
    "varlen_arguments",
]


def __getattr__(name: str) -> Any:
    if name not in _MODULE:
        raise AttributeError(f"module 'ingest' has no attribute {name!r}")
    return getattr(importlib.import_module(_MODULE[name]), name)


def __dir__() -> list[str]:
    return __all__
