"""Fill-in-the-middle: documents cut in three at characters, so that a model learns to write what is missing.

Guarantees: every character of a document is kept. What is drawn for a document depends on (seed, source, epoch, unit,
row) alone, so neither on paths nor on how rows are batched, and it is drawn anew in the next epoch.

Cost: 1 us a document for the draw, and three texts to tokenize instead of one.

Source: Bavarian et al., "Efficient Training of Language Models to Fill in the Middle", arXiv 2207.14255, section 3:
character-level splits, PSM, and SPM in the variant that begins like PSM.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
from pydantic import ConfigDict

from ingest.errors import ConfigError
from ingest.pieces import Piece
from ingest.plan import document_words


@dataclass(frozen=True, kw_only=True)
class FimConfig:
    """How documents are turned around so that a model learns to fill in their middle.

    Args:
        rate: share of the documents; the others stay as they are.
        spm_rate: share of those that give suffix, prefix, middle; the others give prefix, suffix, middle.
        prefix, middle, suffix: special tokens of the tokenizer.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    rate: float = 0.5
    spm_rate: float = 0.5
    prefix: str = "<|fim_prefix|>"
    middle: str = "<|fim_middle|>"
    suffix: str = "<|fim_suffix|>"

    def __post_init__(self) -> None:
        for name, value in (("rate", self.rate), ("spm_rate", self.spm_rate)):
            if not 0 <= value <= 1:
                raise ConfigError(f"fim.{name} must be 0 to 1; got {value}: try 0.5")


def split_middle(text: str, words: Sequence[int], config: FimConfig) -> tuple[str, str, str, bool] | None:
    """Cuts a document in three at characters.

    Args:
        text: the document.
        words: four random words of 64 bits: whether, which form, where to cut twice.
        config: the rates.

    Returns:
        Prefix, middle and suffix, which joined are the text, and whether it is SPM; None leaves the document as it is.
    """
    whether, form, *places = words
    if whether >> 11 >= config.rate * 2**53:
        return None
    begin, end = sorted(word % (len(text) + 1) for word in places)
    return text[:begin], text[begin:end], text[end:], form >> 11 < config.spm_rate * 2**53


@dataclass(frozen=True)
class Fim:
    """Fill-in-the-middle on the documents of one source.

    Args:
        config: the rates.
        prefix_id, middle_id, suffix_id: of the special tokens.
        seed: of the run.
        source: name, which seeds the draws as it seeds the order.
    """

    config: FimConfig
    prefix_id: int
    middle_id: int
    suffix_id: int
    seed: int
    source: str

    def pieces(self, texts: Sequence[str], epoch: int, unit: int, rows: npt.NDArray[np.int64]) -> list[list[Piece]]:
        """The parts of each document; whole ones are a part of their own.

        Args:
            texts: the documents.
            epoch: of the source.
            unit: number in the source's manifest.
            rows: int64 [texts], ascending rows in the unit.
        """
        words_D4 = document_words(self.seed, self.source, epoch, unit, rows).tolist()
        return [self._turned(text, words) for text, words in zip(texts, words_D4, strict=True)]

    def _turned(self, text: str, words: Sequence[int]) -> list[Piece]:
        parts = split_middle(text, words, self.config)
        if parts is None:
            return [Piece(text)]
        prefix, middle, suffix, spm = parts
        order = (
            (self.prefix_id, self.suffix_id, suffix, self.middle_id, prefix, middle)
            if spm
            else (self.prefix_id, prefix, self.suffix_id, suffix, self.middle_id, middle)
        )
        return [Piece(part) for part in order]
