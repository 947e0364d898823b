"""Conversations to pieces: rendered with the model's own chat template, and only the answers are labels.

The template is rendered on growing parts of the conversation. Before an answer with what opens it
(``add_generation_prompt``), and with the answer: the difference is the answer and what the template puts after it. It
is trained up to the first special token behind the content, the end of the turn; without one, all of it. Each rendering
must begin with the one before, else tokens could not be told apart, and the template is refused with the turn.

Guarantees: special tokens come from the template only. In roles and contents their text is replaced before rendering
and put back as plain text behind it, so that a document cannot forge a turn. The template runs in jinja2's immutable
sandbox, without the clock. Pieces end at special tokens and at the borders of answers, as at inference.

Cost: two renderings an answer, each of the whole conversation so far; three where an answer holds several special
tokens.

Source: the variables, options and functions that templates expect are those of transformers,
``utils/chat_template_utils.py``.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from ingest.errors import ConfigError
from ingest.pieces import DocumentError, Piece
from ingest.tokenizer import SpecialToken

Message = Mapping[str, str]

_MARK = "\U0010f8ff"  # private use: stands around the number of a special token in a content
_STAND_IN = f"{_MARK}content{_MARK}"


@dataclass(frozen=True)
class ChatTemplate:
    """A jinja2 template as a value.

    Args:
        path: names it in errors.
        source: the template.
        variables: what it can print beside the messages: ``bos_token``, ``eos_token`` and so on.
    """

    path: str
    source: str
    variables: Mapping[str, str] = field(default_factory=dict)

    @classmethod
    def parse(cls, path: str, content: bytes, variables: Mapping[str, str]) -> ChatTemplate:
        """Reads a ``.jinja`` file, or the key ``chat_template`` of a ``tokenizer_config.json``.

        Args:
            path: of the file; what ends in ``.json`` is JSON.
            content: of the file.
            variables: as for the class; tokens that a ``tokenizer_config.json`` names go before them.

        Raises:
            ConfigError: no template, or none that jinja2 can read.
        """
        step = "name a .jinja file or a tokenizer_config.json that has the key chat_template"
        try:
            text = content.decode("utf-8")
            plain = json.loads(text) if path.endswith(".json") else {"chat_template": text}
            named = plain["chat_template"]
            if isinstance(named, list):
                named = {each["name"]: each["template"] for each in named}["default"]
            tokens = {name: _token(value) for name, value in plain.items() if name.endswith("_token")}
        except (ValueError, KeyError, TypeError) as error:
            found = f"{type(error).__name__}, {error}"
            raise ConfigError(f"tokenizer.chat_template {path} must hold a template; {found}: {step}") from None
        if not isinstance(named, str):
            raise ConfigError(f"tokenizer.chat_template {path} must hold a template; got {named!r}: {step}")
        template = cls(path, named, {**variables, **{name: token for name, token in tokens.items() if token}})
        template._compiled  # noqa: B018 - a fault is to be seen now
        return template

    @property
    def sha256(self) -> str:
        """Hash of the template and its variables, in hexadecimal."""
        return hashlib.sha256(json.dumps([self.source, dict(self.variables)], sort_keys=True).encode()).hexdigest()

    def __getstate__(self) -> dict[str, Any]:
        return {name: self.__dict__[name] for name in ("path", "source", "variables")}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    @cached_property
    def _compiled(self) -> Any:
        from jinja2 import TemplateError  # here, so that runs without chats do not import it
        from jinja2.sandbox import ImmutableSandboxedEnvironment

        environment = ImmutableSandboxedEnvironment(
            trim_blocks=True, lstrip_blocks=True, extensions=["jinja2.ext.loopcontrols"]
        )
        environment.filters["tojson"] = _to_json
        environment.globals["raise_exception"] = _raise
        try:
            return environment.from_string(self.source)
        except TemplateError as error:
            rule = f"tokenizer.chat_template {self.path} must be a jinja2 template"
            raise ConfigError(f"{rule}; {error}: mend it") from None

    def render(self, messages: Sequence[Message], *, opened: bool) -> str:
        """The text of messages; ``opened``: with what opens an answer behind them.

        Raises:
            Exception: whatever the template raises.
        """
        return str(self._compiled.render(messages=messages, add_generation_prompt=opened, **self.variables))


@dataclass(frozen=True)
class Chat:
    """Conversations of one run to pieces.

    Args:
        template: renders them.
        special: the tokenizer's special tokens by their text.
    """

    template: ChatTemplate
    special: Mapping[str, SpecialToken]

    def __getstate__(self) -> dict[str, Any]:
        return {"template": self.template, "special": self.special}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)

    def pieces(self, messages: Sequence[Message]) -> list[Piece]:
        """The pieces of a conversation; none where it holds no answer.

        Args:
            messages: each with a role and a content; answers are those of the role ``assistant``.

        Raises:
            ConfigError: a rendering does not begin with the one before it.
            ValueError: the template refuses the messages.
        """
        spans = list(self._spans([{name: self._hide(text) for name, text in each.items()} for each in messages]))
        joined: list[tuple[str, bool]] = []
        for text, trained in spans:
            if joined and joined[-1][1] == trained:
                joined[-1] = joined[-1][0] + text, trained
            elif text:
                joined.append((text, trained))
        if not any(trained for _, trained in joined):
            return []
        return [piece for text, trained in joined for piece in self._split(text, trained)]

    def _spans(self, messages: list[dict[str, str]]) -> Iterator[tuple[str, bool]]:
        """The rendering in order, as text that is trained and text that is not."""
        done = ""
        for turn, message in enumerate(messages):
            if message["role"] == "assistant":
                opened = self._grown(done, messages[:turn], turn, opened=True)
                closed = self._grown(opened, messages[: turn + 1], turn, opened=False)
                answer = closed[len(opened) :]
                end = self._end_of_turn(answer, messages, turn)
                yield opened[len(done) :], False
                yield answer[:end], True
                yield answer[end:], False
                done = closed
        if done:
            yield self._grown(done, messages, len(messages) - 1, opened=False)[len(done) :], False

    def _grown(self, before: str, messages: list[dict[str, str]], turn: int, *, opened: bool) -> str:
        try:
            text = self.template.render(messages, opened=opened)
        except Exception as error:
            what = f"{type(error).__name__}, {' '.join(str(error).split())}"
            raise ValueError(f"chat template {self.template.path} must render turn {turn}; {what}") from None
        if not text.startswith(before):
            rule = f"chat template {self.template.path} must only add text as a conversation grows"
            raise ConfigError(
                f"{rule}; turn {turn}, counted from 0, changes what was rendered before it: "
                "use a template for training, which keeps earlier turns as they are"
            )
        return text

    def _end_of_turn(self, answer: str, messages: list[dict[str, str]], turn: int) -> int:
        """Where the first special token behind the content ends; where the answer ends if there is none.

        If it is not plain which one that is, the content's end is found with another content in its place.
        """
        ends = [match.end() for match in self._pattern.finditer(answer)]
        if len(ends) > 1 or any(answer[end:].strip() for end in ends):
            other = {**messages[turn], "content": _STAND_IN}
            tail = self._grown("", [*messages[:turn], other], turn, opened=False).rpartition(_STAND_IN)[2]
            if answer.endswith(tail):
                ends = [end for end in ends if end > len(answer) - len(tail)]
        return ends[0] if ends else len(answer)

    def _split(self, text: str, trained: bool) -> Iterator[Piece]:
        """Text and special tokens in turn, what was hidden shown again."""
        start = 0
        for match in self._pattern.finditer(text):
            if match.start() > start:
                yield Piece(self._show(text[start : match.start()]), trained)
            token = match.group() if match.group() in self.special else match.group().strip()
            yield Piece(self.special[token].id, trained)
            start = match.end()
        if start < len(text):
            yield Piece(self._show(text[start:]), trained)

    def _hide(self, text: str) -> str:
        return self._hidden.sub(lambda match: f"{_MARK}{self._texts.index(match.group())}{_MARK}", text)

    def _show(self, text: str) -> str:
        return re.sub(f"{_MARK}(\\d+){_MARK}", lambda match: self._texts[int(match.group(1))], text)

    @cached_property
    def _texts(self) -> list[str]:
        """Longest first, as the library matches, and the mark itself, so that no content can hold one."""
        return [*sorted(self.special, key=lambda text: (-len(text), text)), _MARK]

    @cached_property
    def _pattern(self) -> re.Pattern[str]:
        def one(text: str) -> str:
            token = self.special[text]
            space = r"\s*"
            return space * token.lstrip + re.escape(text) + space * token.rstrip

        return re.compile("|".join(map(one, self._texts[:-1])) or "(?!)")

    @cached_property
    def _hidden(self) -> re.Pattern[str]:
        return re.compile("|".join(map(re.escape, self._texts)))


def conversation(row: Any, index: int) -> list[dict[str, str]]:
    """The messages of a row, checked.

    Raises:
        DocumentError: a message, a role or a content is null.
    """
    for turn, message in enumerate(row):
        for name in ("role", "content"):
            value = message and message.get(name)
            if not isinstance(value, str):
                rule = f"message {turn} must have a {name} that is text"
                got = repr(value if message else message)
                raise DocumentError(f"{rule}; got {got}: mend it or leave it out", index, skippable=True)
    return list(row)


def _token(value: Any) -> str | None:
    """A token as a ``tokenizer_config.json`` names it: text, or an object with its content."""
    token: str | None = value["content"] if isinstance(value, dict) else value
    return token


def _raise(message: str) -> None:
    raise ValueError(message)


def _to_json(value: Any, indent: int | None = None) -> str:
    return json.dumps(value, ensure_ascii=False, indent=indent)
