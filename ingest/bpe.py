"""The fast backend: a byte-level BPE of the `tokenizers` library as a `tiktoken` encoding with the same ids.

Guarantees: a tokenizer is mapped only if it is understood in full; ``map_tokenizer`` refuses everything else with a
reason, and ``find_difference`` compares both libraries on what real corpora break tokenizers with.

Why the ids agree. Both libraries cut text into pieces with a regex and merge a piece's bytes, best pair first.
`tokenizers` merges the pairs in its list, in that order; `tiktoken` merges every pair that makes a token, lowest id
first. Lowest id first makes a token from one pair of parts only, whatever stands around it: the pair that the token's
bytes end in when merged alone, since nothing outside has touched the parts. So both agree on all text if the list is in
the order of ids and each token comes out of the list's merges of its own bytes. A token that does not come out is never
made by the reference and is left out here; with ``ignore_merges`` a piece that is such a token is that token in both
libraries, and every pair of tokens that makes it must be in the list. The regex engines differ (Oniguruma and
fancy-regex): only syntax that both read alike is taken, and character classes are compared code point by code point.

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
import random
import re
import unicodedata
from collections.abc import Callable, Iterable, Iterator
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
_CLASS = re.compile(r"\\p\{[A-Z][a-z]?\}|\\s")


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


def find_difference(fast: FastEncoder, reference: Any, special_tokens: list[str]) -> str | None:
    """Compares both libraries on character classes and adversarial texts.

    Returns:
        None if nothing differs, else what does, as a reason for a person.
    """
    return _class_difference(fast.pattern) or text_difference(fast, reference, list(_probes(reference, special_tokens)))


def text_difference(fast: FastEncoder, reference: Any, texts: list[str]) -> str | None:
    """The first text, shortened, whose ids differ; None if there is none."""
    expected = reference.encode_batch_fast(texts, add_special_tokens=False)
    for text, ids, encoding in zip(texts, fast.encode(texts), expected, strict=True):
        if ids is not None and ids.tolist() != encoding.ids:
            return f"the ids of {text[:60]!r} differ"
    return None


def _class_difference(pattern: str) -> str | None:
    """Compares what the pattern's classes, and letters whose case is ignored, match in each engine."""
    # Planes 4 to 13 are empty and 15 and 16 private: every 64th stands for them.
    points = itertools.chain(
        range(0xD800), range(0xE000, 0x40000), range(0xE0000, 0xE1000), range(0x40000, 0x110000, 64)
    )
    text = "".join(map(chr, points))
    letters = "".join(sorted(set("".join(re.findall(r"\(\?i:([^)]*)\)", pattern))) - set("'|")))
    checks = [(name, text) for name in dict.fromkeys(_CLASS.findall(pattern))]
    if letters:
        either = "".join(_matches(f"(?i:[{letters}])", text))
        checks += [(f"(?i:{letter})", either) for letter in letters]
    for name, characters in checks:
        oniguruma, fancy = _matches(name, characters)
        if oniguruma != fancy:
            return f"the regex engines know different characters as {name}"
    return None


def _matches(name: str, text: str) -> tuple[str, str]:
    """All characters of a text that a class matches, as Oniguruma and as fancy-regex see it."""
    import tiktoken
    from tokenizers import Regex, pre_tokenizers

    pieces = pre_tokenizers.Split(Regex(f"{name}+"), "removed", invert=True).pre_tokenize_str(text)
    single_bytes = {bytes([byte]): byte for byte in range(256)}
    encoding = tiktoken.Encoding("class", pat_str=f"{name}+", mergeable_ranks=single_bytes, special_tokens={})
    # tiktoken drops what the regex does not match, so the ids are the bytes of the matches.
    found = encoding.encode_to_numpy(text, disallowed_special=()).astype(np.uint8).tobytes()
    return "".join(piece for piece, _ in pieces), found.decode("utf-8")


def _probes(reference: Any, special_tokens: list[str]) -> Iterator[str]:
    """Texts that find disagreements: every category, and what real corpora break tokenizers with."""
    yield from _FIXED_PROBES
    for token in special_tokens:
        yield f"a{token}b {token}\n{token[:-1]}"
    for run in _RUNS:
        for length in (*range(2, 36), 63, 64, 65, 255, 256, 257, 499, 500, 501, 4099):
            yield f"x{run * length}y"
    by_category: dict[str, list[str]] = {}
    for point in itertools.chain(range(0xD800), range(0xE000, 0x110000, 7)):
        by_category.setdefault(unicodedata.category(chr(point)), []).append(chr(point))
    for found in by_category.values():
        for character in {*found[:12], *found[-12:], *found[:: max(1, len(found) // 12)]}:
            around = "a{0}b {0} {0}{0}1{0}2\n{0}\n '{0} '{0}s{0}'S  {0}\u0301e{0}.{0}/"
            yield around.format(character)
    draw = random.Random(0)  # noqa: S311 - a fixed sequence is the point
    atoms = [*_ATOMS, *(found[len(found) // 2] for found in by_category.values())]
    for _ in range(2000):
        yield "".join(draw.choices(atoms, k=40))
    words = [reference.decode([number]) for number in range(reference.get_vocab_size())]
    for start in range(0, len(words), 50):
        yield "".join(words[start : start + 50])


_RUNS = (*"aA0-=é日\u0301🙂 \n\t\u00a0", "\r\n", " \n", "ab", "'s")

_WORDS = """
the The THE don't DON'T we'll 're '\u017f '\ufb06 ß İ \u0131 e\u0301 é Å \u212a 1 12 123 1234 1.5 ٣ ½ Ⅷ 一 日本語 한국어
ไทย हिन्दी العربية עברית _ __init__ ( ) // /* -> :: ... — “ ' " \\ \\ud83d \x00 \x7f 🙂 👩‍👩‍👧 🇩🇪 👍🏽 ❤️
\U000e0067 \U0001f1e6 \ue000 \U0010ffff \ufffd
"""
_SPACES = (" ", " ", "  ", "    ", "\t", "\n", "\n\n", "\r\n", "\r", "\u00a0", "\u2028", "\u3000", "\u200b", "\u200d")
_ATOMS = (*_WORDS.split(), *_SPACES, *_SPACES)

_FIXED_PROBES = (
    "",
    "def f(x):\n    if x:\n\treturn [1, 22, 333, 4444]  # note\r\n\r\n\n        pass\n",
    "line\rline\nline\r\nline\n\rline\u0085line\u2028line\u2029line\x0bline\x0cline",
    "I'm you're he'll WE'VE it'S 'tis rock'n'roll '' 's 'S '\u017f 'll 'LL 'lL o\u2019clock",
    "100000 1,234,567.89 0x1F 1e-9 ١٢٣٤ ²³¹ ½¾ ⅷ 一二三 1st 2nd 3½",
    "e\u0301 é \u0301 a\u0300\u0301\u0302 \u1100\u1161\u11a8 각 क\u094d\u0937 \u212a \u212b \u037e \u0344 \u0958",
    "👩‍👩‍👧‍👦 👍🏽 🏳️‍🌈 🇩🇪🇫🇷 #️⃣ ❤️ \u200d\u200d 🏴\U000e0067\U000e0062\U000e007f",
    "\\ud83d\\ude00 \\u0000 \ufffd\ufffe\uffff \ue000 \U000f0000 \x00\x01\x1b[0m\x7f\x80\x9f",
    "<|endoftext|> <|im_start|>user <s> </s> [INST] <pad> <|fim_prefix|>",
    "http://example.org/a/b?c=d&e=%20#f user@example.org C:\\path\\file ~/.bashrc",
    "  leading\n trailing  \n\n\n   \n\t\t\n end   ",
)
