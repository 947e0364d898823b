"""Documents as pieces of text and special tokens, and their tokens, with those that are no label marked.

A token that is no label carries bit 31 of its uint32 from here to the batch, which takes it off: so a loss mask
travels, is hashed, packed and shuffled with its token, and needs no array of its own. Ids are below 2^31.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from ingest.errors import DataError

NO_LABEL_BIT = 1 << 31

EncodePieces = Callable[[list[str]], list[npt.NDArray[Any]]]


class DocumentError(DataError):
    """One document of a batch cannot be tokenized, or not provably right.

    Args:
        message: what is wrong and what to do.
        index: place of the document in the batch, from 0.
        skippable: the fault is the row's own, so ``on_error`` may leave it out.
    """

    def __init__(self, message: str, index: int, *, skippable: bool = False) -> None:
        super().__init__(message)
        self.index = index
        self.skippable = skippable

    def at(self, index: int) -> DocumentError:
        """The same fault of the document in another place."""
        return DocumentError(str(self), index, skippable=self.skippable)

    def __reduce__(self) -> tuple[Any, ...]:
        return _document_error, (str(self), self.index, self.skippable)  # the default would forget the place


def _document_error(message: str, index: int, skippable: bool) -> DocumentError:
    return DocumentError(message, index, skippable=skippable)


class Piece(NamedTuple):
    """A part of a document: text, or the id of a special token; and whether its tokens are labels."""

    content: str | int
    trained: bool = True


def encode_pieces(
    documents: Sequence[Sequence[Piece]], encode: EncodePieces, dtype: npt.DTypeLike
) -> tuple[npt.NDArray[Any], npt.NDArray[np.int64]]:
    """Tokenizes documents piece by piece.

    Args:
        documents: their pieces; a document without any has no tokens.
        encode: texts to the ids of each, nothing added.
        dtype: uint32 where a piece is not trained, else the tokenizer's.

    Returns:
        All tokens end to end in ``dtype``, and the lengths, int64 [documents].

    Raises:
        DocumentError: a text cannot be encoded.
    """
    pieces = [piece for document in documents for piece in document]
    owners = [index for index, document in enumerate(documents) for _ in document]
    places = [place for place, piece in enumerate(pieces) if isinstance(piece.content, str)]
    try:
        encoded = iter(encode([str(pieces[place].content) for place in places]))
    except DocumentError as error:
        raise error.at(owners[places[error.index]]) from None
    arrays = [np.zeros(0, dtype)]
    for piece in pieces:
        ids = next(encoded) if isinstance(piece.content, str) else np.array([piece.content])
        ids = ids.astype(dtype)
        arrays.append(ids if piece.trained else ids | np.uint32(NO_LABEL_BIT))
    sizes = np.array([len(array) for array in arrays[1:]], np.int64)
    lengths = np.bincount(np.array(owners, np.int64), sizes, len(documents)).astype(np.int64)
    return np.concatenate(arrays), lengths
