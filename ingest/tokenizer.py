"""Text to token ids: one tokenizer, the same ids on every machine.

Guarantees: ids are those of the `tokenizers` library for the given ``tokenizer.json``, with truncation, padding and
templates off and with text that looks like a special token left as text, so that a document cannot forge an end of
document. One end-of-document id follows every document; with ``bos_token`` one precedes it. A pickled ``Tokenizer``
carries the file's bytes and nothing that a process has built from them; each process builds its encoder at the first
use, once.

Two backends give these ids: the library itself, and tiktoken, which is 6 to 8 times faster, where ``bpe`` proves that
both agree. The proof is made at loading and travels with the pickle; a process with other versions of the libraries
makes it again. One document in 1,024 is encoded with both, and a difference is an error.

Cost: ``encode`` adds 5 % to a bare ``encode_batch_fast`` loop, most of it the library's own making of lists of ids,
and 4 % to a bare tiktoken loop, half of it the audit. Its memory beyond the result is that of
``_CHUNK_CHARS`` of text, about 100 bytes a token.

Encoding is single-threaded, because the pipeline runs one tokenizer an actor and scales by actors: the environment
variable ``TOKENIZERS_PARALLELISM`` is set to ``false`` in a process that encodes, unless it is set already.

Rejected: transformers' AutoTokenizer, which takes seconds to import and adds a Python layer around the same library.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Callable, Iterator, Sequence
from typing import Any, NamedTuple

import numpy as np

from ingest import bpe, parity
from ingest.config import TokenizerConfig
from ingest.errors import ConfigError
from ingest.pieces import NO_LABEL_BIT, DocumentError

TokenArray = np.ndarray[Any, np.dtype[Any]]

_CHUNK_CHARS = 1 << 20  # one call of the library holds ids, token strings and offsets of all its texts at once


class SpecialToken(NamedTuple):
    """A special token: its id, and whether it takes the white space on its sides with it."""

    id: int
    lstrip: bool = False
    rstrip: bool = False


class Tokenizer:
    """A tokenizer as a value: load it once, pickle it, encode anywhere.

    Attributes:
        eos_id: id of the end-of-document token.
        bos_id: id of the token before every document; None without one.
        special: the special tokens by their text.
        vocab_size: 1 + the highest id, added tokens included; every id is below it.
        sha256: hash of the file's bytes, in hexadecimal.
        token_dtype: uint16 if ``vocab_size`` is at most 65536, else uint32.
    """

    def __init__(self, config: TokenizerConfig, content: bytes) -> None:
        self._config = config
        self._content = content
        self._refusal = "tokenizer.backend asks for it" if config.backend == "tokenizers" else ""
        self._proven = ""  # versions for which both backends are known to agree
        self._forget()
        self.sha256 = hashlib.sha256(content).hexdigest()
        vocabulary = self._reference().get_vocab(with_added_tokens=True)
        self.special = _special_tokens(content)
        self.eos_id = self._special_id("eos_token", config.eos_token, vocabulary)
        bos = config.bos_token
        self.bos_id = None if bos is None else self._special_id("bos_token", bos, vocabulary)
        self.vocab_size = 1 + max(vocabulary.values())
        if self.vocab_size > NO_LABEL_BIT:
            raise ConfigError(f"{config.path}: ids must be below 2^31; got {self.vocab_size - 1}: renumber its tokens")
        self.token_dtype: np.dtype[Any] = np.dtype(np.uint16 if self.vocab_size <= 65536 else np.uint32)
        self._fast()

    @classmethod
    def load(cls, config: TokenizerConfig, read_bytes: Callable[[str], bytes]) -> Tokenizer:
        """Reads and checks a ``tokenizer.json``, and decides on the backend.

        Args:
            config: which file, which end-of-document token, which backend.
            read_bytes: whole content of a path or URI; ``Storage.read_bytes``.

        Raises:
            StorageError: ``read_bytes`` cannot read the file.
            ConfigError: the file is not a tokenizer, ``eos_token`` is not in its vocabulary, or the backend is
                ``tiktoken`` and is not installed or not proven to give the same ids.
        """
        return cls(config, read_bytes(config.path))

    @property
    def backend_name(self) -> str:
        """``tokenizers`` or ``tiktoken``: what encodes in this process."""
        return "tokenizers" if self._fast() is None else "tiktoken"

    @property
    def backend_reason(self) -> str:
        """Why that backend, for a person to read; the caller says it once."""
        return "gives the same ids and is faster" if self._fast() is not None else self._refusal

    @property
    def identity(self) -> str:
        """What its ids depend on, as text."""
        return f"{self.sha256} {self._config.bos_token}"

    def verify(self, texts: list[str]) -> None:
        """Compares both backends on the user's own text; on a difference ``auto`` falls back to the reference.

        Args:
            texts: the first documents of the data.

        Raises:
            ConfigError: the ids of a text differ and the backend is ``tiktoken``.
            DocumentError: a text is no valid Unicode.
        """
        fast = self._fast()
        if fast is None:
            return
        try:
            difference = parity.text_difference(fast, self._reference(), texts)
        except TypeError:
            raise _first_invalid(texts) from None
        if difference:
            self._refuse(difference)

    def encode(self, texts: list[str]) -> tuple[TokenArray, TokenArray]:
        """Tokenizes documents.

        Args:
            texts: one string a document; an empty one gives its end-of-document id alone.

        Returns:
            All ids end to end in ``token_dtype``, ``bos_id`` before and ``eos_id`` after every document; and the
            lengths [len(texts)] in int64, both included.

        Raises:
            DocumentError: a text is not a string, or no valid Unicode (it holds a lone surrogate); or the audit found
                that the fast backend gives other ids than the reference.
        """
        documents = self.encode_plain(texts)
        head = 0 if self.bos_id is None else 1
        lengths = np.fromiter((head + len(ids) + 1 for ids in documents), dtype=np.int64, count=len(documents))
        flat = np.full(int(lengths.sum()), self.eos_id, dtype=self.token_dtype)
        start = 0
        for ids, length in zip(documents, lengths.tolist(), strict=True):
            flat[start + head : start + length - 1] = ids
            start += length
        if head:
            flat[np.cumsum(lengths) - lengths] = self.bos_id
        return flat, lengths

    def encode_plain(self, texts: list[str]) -> list[TokenArray]:
        """The ids of each text in an array of its own, with nothing before or after them.

        Raises:
            DocumentError: as for ``encode``.
        """
        try:
            return self._encode_documents(texts)
        except TypeError:
            raise _first_invalid(texts) from None

    def bare_loop(self) -> Callable[[list[str]], int]:
        """The library's own call and nothing else, as the ceiling to measure against.

        Returns:
            A function from texts to the number of their tokens, what begins and ends each document included.
        """
        extra = 1 if self.bos_id is None else 2
        fast = self._fast()
        if fast is not None:
            encode = fast.encoding.encode_to_numpy
            return lambda texts: sum(len(encode(text, disallowed_special=())) + extra for text in texts)
        encode_batch = self._reference().encode_batch_fast
        return lambda texts: sum(len(ids) + extra for ids in encode_batch(texts, add_special_tokens=False))

    def decode(self, ids: Sequence[int] | TokenArray) -> str:
        """The text of ids, special tokens included, whether or not they are labels (see ``pieces.py``)."""
        plain = np.asarray(ids, dtype=np.int64) & (NO_LABEL_BIT - 1)
        return str(self._reference().decode(plain.tolist(), skip_special_tokens=False))

    def __getstate__(self) -> dict[str, Any]:
        kept = ("_config", "_content", "_refusal", "_proven", "sha256", "eos_id", "bos_id", "special", "vocab_size")
        return {name: self.__dict__[name] for name in (*kept, "token_dtype")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self._forget()

    def _forget(self) -> None:
        self._built_reference: Any = None
        self._built_fast: bpe.FastEncoder | None = None
        self._audit = parity.Audit(self._encode_reference)

    def _reference(self) -> Any:
        if self._built_reference is None:
            self._built_reference = build_reference(self._content, self._config.path)
        return self._built_reference

    def _fast(self) -> bpe.FastEncoder | None:
        if self._refusal or self._built_fast is not None:
            return self._built_fast
        try:
            fast = bpe.map_tokenizer(self._content, self._reference())
            self._prove(fast)
        except bpe.UnmappableError as error:
            self._refuse(str(error))
        else:
            self._built_fast = fast
        return self._built_fast

    def _prove(self, fast: bpe.FastEncoder) -> None:
        versions = bpe.versions()
        if self._proven != versions:
            difference = parity.find_difference(fast, self._reference(), list(self.special))
            if difference:
                raise bpe.UnmappableError(difference)
            self._proven = versions

    def _special_id(self, setting: str, token: str, vocabulary: dict[str, int]) -> int:
        """The id of a token that text cannot contain."""
        path, special = self._config.path, list(self.special)
        if token not in vocabulary:
            step = f"set tokenizer.{setting} to one of its special tokens, such as {', '.join(special[:8])}"
            if not special:
                step = f"set tokenizer.{setting} to a token that it has; it has no special tokens"
            raise ConfigError(f"tokenizer.{setting} must be in the vocabulary of {path}; got {token!r}: {step}")
        if vocabulary[token] in self._reference().encode(token, add_special_tokens=False).ids:
            raise ConfigError(
                f"tokenizer.{setting} must be a special token of {path}; got {token!r}, which text can contain: "
                'set "special": true for it in added_tokens, or name another'
            )
        return vocabulary[token]

    def _refuse(self, reason: str) -> None:
        if self._config.backend == "tiktoken":
            rule = f"tokenizer.backend tiktoken must give the ids of {self._config.path}"
            raise ConfigError(f"{rule}; {reason}: set tokenizer.backend to auto or tokenizers")
        self._refusal, self._built_fast = reason, None

    def _encode_documents(self, texts: list[str]) -> list[TokenArray]:
        fast = self._fast()
        if fast is None:
            return [ids for chunk in _chunks(texts) for ids in self._encode_reference(texts[chunk])]
        documents = [
            self._encode_reference([text])[0] if ids is None else ids
            for text, ids in zip(texts, fast.encode(texts), strict=True)
        ]
        self._audit.check(texts, documents)
        return documents

    def _encode_reference(self, texts: list[str]) -> list[TokenArray]:
        encodings = self._reference().encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=self.token_dtype) for encoding in encodings]


def build_reference(content: bytes, path: str) -> Any:
    """The `tokenizers.Tokenizer` of a file, set to encode plain text only.

    Raises:
        ConfigError: the content is not a tokenizer; the message names ``path`` and the reason.
    """
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    import tokenizers  # here, so that importing this module costs nothing where nothing is encoded

    try:
        reference = tokenizers.Tokenizer.from_str(content.decode("utf-8"))
    except Exception as error:  # the library raises bare Exception
        step = "name a tokenizer.json of the tokenizers library"
        raise ConfigError(f"tokenizer {path} must be a tokenizer.json; {error}: {step}") from None
    reference.no_truncation()
    reference.no_padding()
    reference.encode_special_tokens = True
    return reference


def _special_tokens(content: bytes) -> dict[str, SpecialToken]:
    added = (token for token in json.loads(content).get("added_tokens", []) if token.get("special"))
    return {
        token["content"]: SpecialToken(token["id"], token.get("lstrip", False), token.get("rstrip", False))
        for token in added
    }


def _chunks(texts: list[str]) -> Iterator[slice]:
    """Slices of about ``_CHUNK_CHARS`` characters; a longer text is a slice of its own."""
    start = chars = 0
    for index, text in enumerate(texts):
        if chars and chars + len(text) > _CHUNK_CHARS:
            yield slice(start, index)
            start, chars = index, 0
        chars += len(text)
    if start < len(texts):
        yield slice(start, len(texts))


def _first_invalid(texts: Sequence[object]) -> DocumentError:
    for index, text in enumerate(texts):
        if not isinstance(text, str):
            kind = type(text).__name__
            return DocumentError(f"a document must be a string; got {kind}: name a column that holds text", index)
        try:
            text.encode("utf-8")
        except UnicodeEncodeError as error:
            found = f"{error.reason} at character {error.start}"
            return DocumentError(f"a document must be valid Unicode; {found}: repair or drop it", index)
    raise AssertionError("the library refused texts that are all valid Unicode")
