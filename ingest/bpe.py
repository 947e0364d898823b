"""The fast backend: a byte-level BPE of the `tokenizers` library as a `tiktoken` encoding with the same ids.

Guarantees: a tokenizer is mapped only if it is understood in full; ``map_tokenizer`` refuses everything else with a
reason. What the reasoning below leaves to the libraries, ``parity.py`` compares.

Why the ids agree. Both libraries cut text into pieces with a regex and merge a piece's bytes, best pair first.
`tokenizers` merges the pairs in its list, in that order; `tiktoken` merges every pair that makes a token, lowest id
first. Lowest id first makes a token from one pair of parts only, whatever stands around it: the pair that the token's
bytes end in when merged alone, since nothing outside has touched the parts. So both agree on all text if the list is in
the order of ids and each token comes out of the list's merges of its own bytes. A token that does not come out is never
made by the reference and is left out here; with ``ignore_merges`` a piece that is such a token is that token in both
libraries, and every pair of tokens that makes it must be in the list. The regex engines differ (Oniguruma and
fancy-regex): only syntax that both read alike is taken.

fancy-regex hands to a finite automaton what needs no look-around, one alternative at a time. Put into one group, all
alternatives before the first look-around become one automaton, and ``a|b|c`` is ``(?:a|b)|c``: 1.75 times the tokens/s
with GPT-2's regex, 1.3 times with those of Llama 3, Qwen 2 and o200k.

Cost: 6 to 8 times the tokens/s of the reference on one core. Mapping and comparing take about 1 s with 8 k ids and
GPT-2's regex, 2 s with 32 k and Llama 3's. A piece of any length takes under 0.4 us a byte. A run of a million spaces
overflows tiktoken's regex stack, which it reports, and the document goes to the reference. Versions before the oldest
one that was tested on such pieces are refused.

Rejected: tokie, faster still, which differed in 0.1-0.4 % of documents; and threads: the pipeline scales by
actors.
"""

from __future__ import annotations

import importlib.metadata
import itertools
import json
import re
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np

TokenArray = np.ndarray[Any, np.dtype[Any]]

_OLDEST_TIKTOKEN = (0, 14)
_MAX_MATCHED_TOKENS = 64  # each costs one substring search a document

# Source: transformers, models/gpt2; `tokenizers` compiles the same into ByteLevel(use_regex=True).
_GPT2_PATTERN = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+|\s+(?!\S)|\s+"

# What both regex engines read alike. Not {1,3}+: possessive in fancy-regex, a repeated repetition in Oniguruma.
_SYNTAX = re.compile(
    r"(?:\\p\{[A-Z][a-z]?\}|\\[sSrn]|\[\^?|\]|\(\?i:|\(\?!|\(\?:|\)|\||[+*?]|\{\d+(?:,\d*)?\}(?![+?])|[A-Za-z0-9' /])+"
)


class UnmappableError(Exception):
    """A tokenizer is not proven to give the same ids in tiktoken; the message is the reason."""


@dataclass(frozen=True)
class FastEncoder:
    """A tiktoken encoding and what it must not be asked to read.

    Args:
        encoding: the ``tiktoken.Encoding``.
        pattern: the regex that cuts text into pieces.
        normalize: the tokenizer's own normalizer, applied to text that is not ASCII; None leaves text as it is.
        matched_tokens: added tokens that the reference matches inside text.
    """

    encoding: Any
    pattern: str
    normalize: Callable[[str], str] | None
    matched_tokens: tuple[str, ...]

    def encode(self, texts: Iterable[str]) -> list[TokenArray | None]:
        """Ids of each text in uint32, with no end-of-document id; None where the reference must encode it.

        That is: a text that holds an added token, one with a run of spaces too long for tiktoken's regex, and one that
        is no valid Unicode.
        """
        return [self._encode(text) for text in texts]

    def _encode(self, text: str) -> TokenArray | None:
        if self.matched_tokens and any(token in text for token in self.matched_tokens):
            return None
        try:
            if self.normalize is not None and not text.isascii():
                text = self.normalize(text)
                if any(token in text for token in self.matched_tokens):
                    return None
            ids: TokenArray = self.encoding.encode_to_numpy(text, disallowed_special=())
        except (ValueError, TypeError):
            return None
        return ids


def versions() -> str:
    """The versions of both libraries, with their Unicode tables, that a proof holds for."""
    return " ".join(importlib.metadata.version(name) for name in ("tokenizers", "tiktoken"))


def map_tokenizer(content: bytes, reference: Any) -> FastEncoder:
    """Maps a ``tokenizer.json`` onto tiktoken.

    Args:
        content: the file.
        reference: the `tokenizers.Tokenizer` of the same file.

    Raises:
        UnmappableError: tiktoken is missing or too old, or something in the file is not understood.
    """
    try:
        import tiktoken
    except ImportError:
        raise UnmappableError("tiktoken is not installed") from None
    version = importlib.metadata.version("tiktoken")
    if tuple(int(part) for part in re.findall(r"\d+", version)[:2]) < _OLDEST_TIKTOKEN:
        raise UnmappableError(f"tiktoken {version} is older than {'.'.join(map(str, _OLDEST_TIKTOKEN))}")
    settings = json.loads(content)
    pattern = _pattern(settings["pre_tokenizer"])
    normalize = _normalize(settings.get("normalizer"), reference)
    matched = _matched_tokens(settings)
    ranks = _ranks(settings["model"], reference.model)
    if any(bytes([byte]) not in ranks for byte in range(256)):
        raise UnmappableError("a byte is missing from the vocabulary")
    # Never allowed, so never used; without any, tiktoken matches an empty regex at every character: 30 % slower.
    unused = {"\uffff<|unused|>\uffff": 2**32 - 1}
    encoding = tiktoken.Encoding("ingest", pat_str=grouped(pattern), mergeable_ranks=ranks, special_tokens=unused)
    return FastEncoder(encoding, pattern, normalize, matched)


def _pattern(pre_tokenizer: dict[str, Any] | None) -> str:
    """The regex of ByteLevel, or of Split followed by ByteLevel."""
    steps = [pre_tokenizer or {"type": "none"}]
    if steps[0]["type"] == "Sequence":
        steps = steps[0]["pretokenizers"]
    kinds = [step["type"] for step in steps]
    if kinds not in (["ByteLevel"], ["Split", "ByteLevel"]):
        raise UnmappableError(f"the pre-tokenizer is {'+'.join(kinds)}, not ByteLevel or Split+ByteLevel")
    split, byte_level = steps[0], steps[-1]
    if byte_level.get("add_prefix_space", True):
        raise UnmappableError("the pre-tokenizer puts a space before each document (add_prefix_space)")
    if byte_level.get("use_regex", True) == (len(steps) == 2):
        raise UnmappableError("the pre-tokenizer splits twice, or not at all (use_regex)")
    if len(steps) == 1:
        return _GPT2_PATTERN
    pattern = split["pattern"].get("Regex")
    if pattern is None or split["behavior"] != "Isolated" or split.get("invert"):
        raise UnmappableError("the pre-tokenizer's Split is not a regex with behavior Isolated")
    if not _SYNTAX.fullmatch(pattern):
        raise UnmappableError(f"the regex uses syntax that the two engines may read differently: {pattern}")
    return str(pattern)


def grouped(pattern: str) -> str:
    """The same regex with its alternatives before the first look-around in one group, which fancy-regex runs faster.

    Args:
        pattern: of the syntax in ``_SYNTAX``: no escaped bracket, parenthesis or bar.
    """
    cuts, depth, in_class = [], 0, False
    for place, character in enumerate(pattern):
        in_class = character == "[" or (in_class and character != "]")
        depth += 0 if in_class else (character == "(") - (character == ")")
        if character == "|" and depth == 0 and not in_class:
            cuts.append(place)
    look = pattern.find("(?!")
    last = max((cut for cut in cuts if cut < look), default=None)
    return pattern if last is None else f"(?:{pattern[:last]}){pattern[last:]}"


def _normalize(normalizer: dict[str, Any] | None, reference: Any) -> Callable[[str], str] | None:
    """NFC leaves ASCII alone, and the library's own code runs on the rest, so no two Unicode tables can disagree."""
    if normalizer is None:
        return None
    if normalizer["type"] != "NFC":
        raise UnmappableError(f"the normalizer is {normalizer['type']}, not NFC or none")
    normalize: Callable[[str], str] = reference.normalizer.normalize_str
    return normalize


def _matched_tokens(settings: dict[str, Any]) -> tuple[str, ...]:
    tokens = tuple(token["content"] for token in settings.get("added_tokens", []) if not token["special"])
    if len(tokens) > _MAX_MATCHED_TOKENS:
        raise UnmappableError(f"{len(tokens)} added tokens are matched in text, more than {_MAX_MATCHED_TOKENS}")
    if any(token.isspace() for token in tokens):
        raise UnmappableError("an added token that is matched in text is white space, so most documents hold it")
    if settings.get("normalizer") and not all(token.isascii() for token in tokens):
        raise UnmappableError("an added token that is matched in normalized text is not ASCII")
    return tokens


def _ranks(model: dict[str, Any], reference_model: Any) -> dict[bytes, int]:
    """Bytes and id of every token that merges can make; see the module's docstring for the reasoning."""
    if model.get("type") != "BPE":
        raise UnmappableError(f"the model is {model.get('type')}, not BPE")
    for name in ("dropout", "continuing_subword_prefix", "end_of_word_suffix", "byte_fallback"):
        if model.get(name):
            raise UnmappableError(f"the model sets {name}")
    vocab: dict[str, int] = model["vocab"]
    pairs = [tuple(pair.split(" ", 1)) if isinstance(pair, str) else tuple(pair) for pair in model["merges"]]
    made: dict[int, None] = dict.fromkeys(vocab[left + right] for left, right in pairs)
    if any(later < earlier for earlier, later in itertools.pairwise(made)):
        raise UnmappableError("the merges are not in the order of their ids")
    ignore_merges = bool(model.get("ignore_merges"))
    reference_model.ignore_merges = False
    lost = [token for token, number in vocab.items() if not _comes_out(reference_model, token, number)]
    reference_model.ignore_merges = ignore_merges
    if ignore_merges:
        listed = set(pairs)
        for token in lost:
            parts = ((token[:cut], token[cut:]) for cut in range(1, len(token)))
            if any(left in vocab and right in vocab and (left, right) not in listed for left, right in parts):
                raise UnmappableError(f"token {token!r} is not made by the merges of its own bytes")
    to_byte = {character: byte for byte, character in enumerate(byte_characters())}
    skipped = set() if ignore_merges else set(lost)
    try:
        return {bytes(map(to_byte.__getitem__, token)): rank for token, rank in vocab.items() if token not in skipped}
    except KeyError as error:
        raise UnmappableError(f"the vocabulary holds {error}, which stands for no byte") from None


def _comes_out(model: Any, token: str, number: int) -> bool:
    return [made.id for made in model.tokenize(token)] == [number]


def byte_characters() -> list[str]:
    """The character that stands for each byte in a byte-level vocabulary.

    Source: GPT-2, src/encoder.py, bytes_to_unicode.
    """
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    spare = itertools.count(0x100)
    return [chr(byte) if byte in printable else chr(next(spare)) for byte in range(256)]
