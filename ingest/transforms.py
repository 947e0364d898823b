"""A user's function that a source's text goes through before it is tokenized.

Guarantees: what cannot be imported, has no source to hash or breaks the contract is refused with the function's name;
what fails, with the row too. The hash of its source is in the fingerprint: of that function, not of what it calls.
"""

from __future__ import annotations

import hashlib
import importlib
import inspect
from collections.abc import Callable
from typing import Any

from ingest.errors import ConfigError
from ingest.pieces import DocumentError

Transform = Callable[[list[str]], list[str | None]]


class UserTransform:
    """A user's function from texts to as many texts or None; imported where it is first needed.

    Args:
        name: ``package.module:function``.

    Raises:
        ConfigError: there is no such function, or its source cannot be read.
    """

    def __init__(self, name: str) -> None:
        self.name = name
        function = _imported(name)
        try:
            source = inspect.getsource(function)
        except (OSError, TypeError) as error:
            step = "define it with def in a module"
            raise ConfigError(f"transform {name} must have source to hash; {error}: {step}") from None
        self.sha256 = hashlib.sha256(source.encode()).hexdigest()
        self._function: Transform | None = function

    def __getstate__(self) -> dict[str, Any]:
        return {**self.__dict__, "_function": None}

    def __call__(self, texts: list[str]) -> list[str | None]:
        """Transforms texts.

        Raises:
            ConfigError: the function gives another number of texts.
            DocumentError: it fails on a text, or gives neither text nor None for it.
        """
        self._function = function = self._function or _imported(self.name)
        try:
            changed = list(function(list(texts)))
        except Exception as error:
            raise self._failed(function, texts, error) from error
        if len(changed) != len(texts):
            rule = f"transform {self.name} must return as many texts as it gets"
            raise ConfigError(f"{rule}; got {len(changed)} for {len(texts)}: return None for those to drop")
        for index, text in enumerate(changed):
            if text is not None and not isinstance(text, str):
                rule = f"transform {self.name} must return texts or None"
                raise DocumentError(f"{rule}; got {type(text).__name__}: return str(...)", index)
        return changed

    def _failed(self, function: Transform, texts: list[str], error: Exception) -> DocumentError:
        """Names the first text on which the function fails alone; the first of all, if on none."""
        for index, text in enumerate(texts):
            try:
                function([text])
            except Exception as found:
                return self._error(found, index)
        return self._error(error, 0)

    def _error(self, error: Exception, index: int) -> DocumentError:
        what = f"{type(error).__name__}, {' '.join(str(error).split())}"
        return DocumentError(f"transform {self.name} must not fail; {what}: mend the function", index)


def _imported(name: str) -> Transform:
    module, _, function = name.partition(":")
    try:
        found = getattr(importlib.import_module(module), function)
    except (ImportError, AttributeError, ValueError) as error:
        step = "write package.module:function and put the package on PYTHONPATH"
        raise ConfigError(f"transform {name} must name a function that can be imported; {error}: {step}") from None
    if not callable(found):
        raise ConfigError(f"transform {name} must name a function; got {type(found).__name__}: name another")
    transform: Transform = found
    return transform
