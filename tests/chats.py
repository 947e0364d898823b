"""A tokenizer with the tokens of a chat, its template, and files of every kind of source."""

from __future__ import annotations

import json
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq

from ingest.config import TokenizerConfig
from ingest.tokenizer import Tokenizer

CHATML = (
    "{% for message in messages %}<|im_start|>{{ message.role }}\n{{ message.content }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)
SPECIAL = (
    *("<|endoftext|>", "<|im_start|>", "<|im_end|>", "<|bos|>"),
    *("<|fim_prefix|>", "<|fim_middle|>", "<|fim_suffix|>"),
)
EOS, START, END, BOS, PREFIX, MIDDLE, SUFFIX = range(len(SPECIAL))
MESSAGES = pa.list_(pa.struct([("role", pa.string()), ("content", pa.string())]))


@cache
def chat_json() -> str:
    """A byte-level BPE of 300 tokens whose first ids are ``SPECIAL``."""
    from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers

    built = Tokenizer(models.BPE())
    built.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    built.decoder = decoders.ByteLevel()
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    trainer = trainers.BpeTrainer(
        vocab_size=300, special_tokens=list(SPECIAL), initial_alphabet=alphabet, show_progress=False
    )
    built.train_from_iterator(["the user asks the assistant", "the assistant answers the user"] * 3, trainer)
    return built.to_str()


def chat_tokenizer(**settings: Any) -> Tokenizer:
    config = TokenizerConfig(path="tokenizer.json", **({"backend": "tokenizers"} | settings))
    return Tokenizer.load(config, lambda _: chat_json().encode())


def turns(*contents: str) -> list[dict[str, str]]:
    """A conversation of user and assistant in turn."""
    return [{"role": ("user", "assistant")[turn % 2], "content": text} for turn, text in enumerate(contents)]


def write(path: Path, row_group_size: int = 4, **columns: Any) -> Path:
    """Writes a file of columns."""
    path.parent.mkdir(parents=True, exist_ok=True)
    pq.write_table(pa.table(columns), path, row_group_size=row_group_size)
    return path


def write_kinds(folder: Path, texts: Sequence[str]) -> dict[str, dict[str, Any]]:
    """The tokenizer, its template, and the same texts as a file of each kind; the settings of a source of each."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "tokenizer.json").write_text(chat_json(), encoding="utf-8")
    (folder / "tokenizer_config.json").write_text(json.dumps({"chat_template": CHATML}), encoding="utf-8")
    tokenizer = chat_tokenizer()
    pairs = list(zip(texts, reversed(texts), strict=True))
    write(folder / "text/a.parquet", text=[*texts, None, ""])
    messages = [turns(*pair, *pair) if number % 2 else turns(*pair) for number, pair in enumerate(pairs)]
    write(folder / "messages/a.parquet", messages=pa.array([*messages, None, []], MESSAGES))
    prompts, responses = zip(*pairs, strict=True)
    write(folder / "prompt/a.parquet", question=[*prompts, None, "q"], answer=[*responses, None, ""])
    ids = [ids.tolist() for ids in tokenizer.encode_plain(list(texts))]
    write(folder / "tokens/a.parquet", ids=pa.array([*ids, None, []], pa.list_(pa.int32())))
    return {
        "text": {"path": "text"},
        "messages": {"path": "messages", "messages": "messages"},
        "prompt": {"path": "prompt", "prompt": "question", "response": "answer"},
        "tokens": {"path": "tokens", "tokens": "ids"},
        "fim": {"path": "text", "fim": {"rate": 0.7}},
        "transform": {"path": "text", "transform": "tests.chats:without_short_texts"},
    }


def without_short_texts(texts: list[str]) -> list[str | None]:
    """A user's transform: upper case, and short documents dropped."""
    return [text.upper() if len(text) > 20 else None for text in texts]
