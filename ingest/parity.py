"""The proof that a fast encoder gives the ids of `tokenizers`: before the run on probes, during it on samples.

``find_difference`` compares the character classes of both regex engines code point by code point, and the ids of texts
that real corpora break tokenizers with: every Unicode category, combining marks, mixed line endings, long runs, emoji
sequences, broken escapes, numbers, indentation, the vocabulary's own words. ``Audit`` goes on sampling the user's data.

Cost: about 1 s before the run; a document in 1,024 is encoded twice during it.
"""

from __future__ import annotations

import itertools
import random
import re
import unicodedata
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np

from ingest.bpe import FastEncoder
from ingest.pieces import DocumentError

TokenArray = np.ndarray[Any, np.dtype[Any]]

_CLASS = re.compile(r"\\p\{[A-Z][a-z]?\}|\\s")


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


class Audit:
    """Encodes one document in ``every`` again, with the reference, and refuses to go on when the ids differ.

    Args:
        encode: the reference, one array of ids a text.
        every: documents from one audit to the next, counted over all calls.
        max_chars: a longer document is passed over, and the next one that is not is taken.
    """

    def __init__(
        self, encode: Callable[[list[str]], list[TokenArray]], *, every: int = 1024, max_chars: int = 1 << 16
    ) -> None:
        self._encode = encode
        self._every = every
        self._max_chars = max_chars
        self._since = 0

    def check(self, texts: list[str], documents: list[TokenArray]) -> None:
        """Audits what is due among these documents.

        Raises:
            DocumentError: the ids of a document are not those of the reference.
        """
        for index, text in enumerate(texts):
            self._since += 1
            if self._since < self._every or len(text) > self._max_chars:
                continue
            self._since = 0
            if not np.array_equal(self._encode([text])[0], documents[index]):
                rule = "tiktoken must give the ids of tokenizers; they differ for a document"
                raise DocumentError(f"{rule} of {len(text)} characters: set tokenizer.backend to tokenizers", index)


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
