"""Rows of a source to tokens: one encoder for each kind of source, chosen by the settings.

    text                  -> Text      the tokenizer's own call; a transform before it, pieces where there is fim
    messages              -> Messages  rendered by the chat template
    prompt and response   -> Prompt    the same with two turns, or as two plain texts without a template
    tokens                -> Tokens    as they are

Each is a picklable function of rows and their address that gives all tokens end to end and the tokens of each row; 0
tokens mean that the row is dropped. What a row does wrong is a DocumentError with its place.

Cost: plain text goes straight to the tokenizer. Tokens are checked and copied with numpy, nothing is done for each.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import asdict, dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
import pyarrow.compute as pc

from ingest.chat import Chat, ChatTemplate, conversation
from ingest.columns import SETTINGS
from ingest.config import IngestConfig
from ingest.errors import ConfigError
from ingest.fim import Fim, FimConfig
from ingest.pieces import DocumentError, Piece, encode_pieces
from ingest.sources import SourceConfig
from ingest.spec import UnitSpec
from ingest.storage import Storage
from ingest.tokenizer import Tokenizer
from ingest.transforms import UserTransform

IntArray = npt.NDArray[np.int64]
Encoded = tuple[npt.NDArray[Any], IntArray]
Encoder = Callable[[pa.Array, UnitSpec, IntArray], Encoded]
EncodeTexts = Callable[[list[str]], Encoded]


@dataclass(frozen=True)
class Text:
    """Documents that are text.

    Args:
        encode: of the tokenizer.
        transform: a user's function, first.
        fim: fill-in-the-middle, behind it.
        tokenizer: for the pieces of fim.
    """

    encode: EncodeTexts
    transform: UserTransform | None = None
    fim: Fim | None = None
    tokenizer: Tokenizer | None = None

    def __call__(self, rows: pa.Array, unit: UnitSpec, numbers: IntArray) -> Encoded:
        """Encodes rows of text."""
        texts = rows.to_pylist()
        if self.transform is None:
            return self._encode(texts, unit, numbers)
        changed = self.transform(texts)
        kept = np.array([index for index, text in enumerate(changed) if text], np.int64)
        lengths = np.zeros(len(rows), np.int64)
        try:
            flat, lengths[kept] = self._encode([text for text in changed if text], unit, numbers[kept])
        except DocumentError as error:
            raise error.at(int(kept[error.index])) from None
        return flat, lengths

    def _encode(self, texts: list[str], unit: UnitSpec, numbers: IntArray) -> Encoded:
        if self.fim is None or self.tokenizer is None:
            return self.encode(texts)
        documents = self.fim.pieces(texts, unit.epoch, unit.number, numbers)
        return _encode(self.tokenizer, documents, self.tokenizer.token_dtype)


@dataclass(frozen=True)
class Messages:
    """Conversations, of which the answers are labels."""

    tokenizer: Tokenizer
    chat: Chat

    def __call__(self, rows: pa.Array, *_: object) -> Encoded:
        """Encodes rows of messages."""
        return self.encode([conversation(row, index) for index, row in enumerate(rows.to_pylist())])

    def encode(self, conversations: Iterable[list[dict[str, str]]]) -> Encoded:
        """Encodes conversations that were checked; one without an answer has no tokens."""
        documents = []
        for index, messages in enumerate(conversations):
            try:
                documents.append(self.chat.pieces(messages))
            except ValueError as error:
                raise DocumentError(f"{error}: mend the row or the template", index, skippable=True) from None
        return _encode(self.tokenizer, documents, np.uint32)


@dataclass(frozen=True)
class Prompt:
    """Prompts and responses, of which the responses are labels.

    Args:
        tokenizer: of the run.
        messages: renders them as two turns; None takes both as plain text, one after the other.
    """

    tokenizer: Tokenizer
    messages: Messages | None

    def __call__(self, rows: pa.Array, *_: object) -> Encoded:
        """Encodes rows of prompt and response."""
        pairs = list(zip(*(rows.field(index).to_pylist() for index in (0, 1)), strict=True))
        for index, (prompt, _) in enumerate(pairs):
            if prompt is None:
                rule = "a response must have a prompt"
                raise DocumentError(f"{rule}; got null: mend the row or leave it out", index, skippable=True)
        if self.messages is not None:
            turns = ("user", "assistant")
            return self.messages.encode(
                [{"role": role, "content": text} for role, text in zip(turns, pair, strict=True)] for pair in pairs
            )
        documents = [[Piece(prompt, trained=False), Piece(response)] for prompt, response in pairs]
        return _encode(self.tokenizer, documents, np.uint32)


@dataclass(frozen=True)
class Tokens:
    """Documents that are tokenized already.

    Args:
        vocab_size: every id is below it.
        eos_id: put behind each document, unless it is there.
        bos_id: put before each document, unless it is there; None puts none.
        dtype: of the tokens.
    """

    vocab_size: int
    eos_id: int
    bos_id: int | None
    dtype: np.dtype[Any]

    def __call__(self, rows: pa.Array, *_: object) -> Encoded:
        """Encodes rows that hold at least one id each."""
        lengths = np.asarray(pc.list_value_length(rows)).astype(np.int64)
        column = rows.flatten()
        ends = np.cumsum(lengths)
        ids = np.asarray(pc.fill_null(column, self.eos_id)) if column.null_count else np.asarray(column)
        wrong = (ids < 0) | (ids >= self.vocab_size) | np.asarray(pc.is_null(column))
        if wrong.any():
            place = int(np.argmax(wrong))
            row = int(np.searchsorted(ends, place, side="right"))
            rule = f"a token must be an id from 0 to {self.vocab_size - 1}"
            at = place - int(ends[row] - lengths[row])
            step = "tokenize with this tokenizer"
            raise DocumentError(f"{rule}; got {column[place]} at {at}: {step}", row, skippable=True)
        head = np.zeros(len(rows), np.int64) if self.bos_id is None else ids[ends - lengths] != self.bos_id
        tail = ids[ends - 1] != self.eos_id
        whole = head + lengths + tail
        begins = np.cumsum(whole) - whole
        flat = np.full(int(whole.sum()), self.eos_id, self.dtype)
        flat[np.arange(len(ids)) + np.repeat(begins + head - (ends - lengths), lengths)] = ids
        if self.bos_id is not None:
            flat[begins[head.astype(bool)]] = self.bos_id
        return flat, whole


def _encode(tokenizer: Tokenizer, documents: list[list[Piece]], dtype: npt.DTypeLike) -> Encoded:
    """Encodes pieces with what begins and ends a document, where it is not there; documents without pieces stay so.

    The end is a label where what stands before it is one and no special token has ended it yet.
    """

    def whole(pieces: list[Piece]) -> list[Piece]:
        if not pieces:
            return pieces
        last = pieces[-1]
        end = (
            []
            if last.content == tokenizer.eos_id
            else [Piece(tokenizer.eos_id, last.trained and isinstance(last.content, str))]
        )
        first = tokenizer.bos_id
        begin = [] if first is None or pieces[0].content == first else [Piece(first, trained=pieces[0].trained)]
        return [*begin, *pieces, *end]

    return encode_pieces([whole(pieces) for pieces in documents], tokenizer.encode_plain, dtype)


@dataclass(frozen=True, eq=False)
class SourceEncoder:
    """The encoder of one source.

    Args:
        encode: rows to tokens.
        identity: what decides its tokens beside the rows and the tokenizer, for the fingerprint.
        plain: whether it is the tokenizer's own call on text.
    """

    encode: Encoder
    identity: dict[str, Any]
    plain: bool


def source_encoders(config: IngestConfig, tokenizer: Tokenizer, storage: Storage) -> tuple[SourceEncoder, ...]:
    """The encoders of all sources, in the order of the settings.

    Raises:
        ConfigError: a chat template is missing or is none; fim names a token that is not special; a transform cannot be
            imported.
        StorageError: the chat template cannot be read.
    """
    kinds = {source.columns.kind for source in config.sources}
    template = None
    if kinds & {"messages", "prompt"}:
        template = _template(config, storage, required="messages" in kinds)
    return tuple(_source_encoder(source, config.shuffle.seed, tokenizer, template) for source in config.sources)


def _source_encoder(
    source: SourceConfig, seed: int, tokenizer: Tokenizer, template: ChatTemplate | None
) -> SourceEncoder:
    columns = source.columns
    identity: dict[str, Any] = dict(zip(SETTINGS[columns.kind], columns.names, strict=True))
    if columns.filter is not None:
        identity["filter"] = columns.filter.text
    if columns.kind == "text":
        transform = None if source.transform is None else UserTransform(source.transform)
        fim = None if source.fim is None else _fim(source, source.fim, seed, tokenizer)
        if transform is not None:
            identity |= {"transform": transform.name, "transform_sha256": transform.sha256}
        if source.fim is not None:
            identity["fim"] = asdict(source.fim)
        return SourceEncoder(Text(tokenizer.encode, transform, fim, tokenizer), identity, source.plain)
    if columns.kind == "tokens":
        tokens = Tokens(tokenizer.vocab_size, tokenizer.eos_id, tokenizer.bos_id, tokenizer.token_dtype)
        return SourceEncoder(tokens, identity, plain=False)
    messages = None if template is None else Messages(tokenizer, Chat(template, tokenizer.special))
    if template is not None:
        identity["chat_template"] = template.sha256
    if columns.kind == "messages":
        assert messages is not None, "messages need a template"
        return SourceEncoder(messages, identity, plain=False)
    return SourceEncoder(Prompt(tokenizer, messages), identity, plain=False)


def _fim(source: SourceConfig, fim: FimConfig, seed: int, tokenizer: Tokenizer) -> Fim:
    for name, token in (("prefix", fim.prefix), ("middle", fim.middle), ("suffix", fim.suffix)):
        if token not in tokenizer.special:
            rule = f"source {source.name}: fim.{name} must be a special token of the tokenizer"
            known = ", ".join(list(tokenizer.special)[:8])
            raise ConfigError(f"{rule}; got {token!r}: name one of its special tokens, such as {known}")
    prefix, middle, suffix = (tokenizer.special[token].id for token in (fim.prefix, fim.middle, fim.suffix))
    return Fim(fim, prefix, middle, suffix, seed, source.name)


def _template(config: IngestConfig, storage: Storage, *, required: bool) -> ChatTemplate | None:
    """The chat template of the settings, or beside the tokenizer; None where none is required and there is none."""
    settings = config.tokenizer
    path = settings.chat_template
    if path is None:
        folder, slash, _ = settings.path.rpartition("/")
        path = f"{folder}{slash}tokenizer_config.json"
        there = storage.info(path) is not None
        if not there and not required:
            return None
        if not there:
            step = "set it to a .jinja file or a tokenizer_config.json"
            raise ConfigError(f"tokenizer.chat_template must be set for messages; got nothing, and no {path}: {step}")
    content = storage.read_bytes(path)
    if not required and settings.chat_template is None and b'"chat_template"' not in content:
        return None
    variables = {"eos_token": settings.eos_token, "bos_token": settings.bos_token or ""}
    return ChatTemplate.parse(path, content, variables)
