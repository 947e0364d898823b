"""The exception tree is the one drawn in the docstring, and every error reaches the driver from a worker."""

from __future__ import annotations

import inspect
import pickle
import re

import pytest

import ingest
from ingest import errors
from ingest.tokenizer import DocumentError

EXIT_CODES = {
    "IngestError": 1,
    "ConfigError": 2,
    "StorageError": 2,
    "DataError": 2,
    "ResumeError": 2,
    "ResourceError": 2,
    "OrderError": 1,
}
DEFINED = {
    name: kind for name, kind in vars(errors).items() if inspect.isclass(kind) and kind.__module__ == errors.__name__
}


def drawn() -> dict[str, str]:
    """Class to parent, as the docstring draws them."""
    parents: dict[str, str] = {}
    above: list[str] = []
    for line in (errors.__doc__ or "").splitlines():
        found = re.match(r"^((?:    |│   )*)(├── |└── )?(\w+Error)\b", line)
        if found:
            depth = len(found[1]) // 4 + bool(found[2])
            above = [*above[: depth - 1], found[3]]
            parents[found[3]] = above[-2] if len(above) > 1 else "Exception"
    return parents


def test_the_tree_in_the_docstring_is_the_tree_of_the_classes() -> None:
    assert drawn() == {name: kind.__bases__[0].__name__ for name, kind in DEFINED.items()}
    assert len(DEFINED) == 7


@pytest.mark.parametrize(("name", "code"), EXIT_CODES.items())
def test_the_exit_code_is_2_where_the_input_is_at_fault(name: str, code: int) -> None:
    assert DEFINED[name].exit_code == code


def test_every_error_has_an_exit_code_in_the_table() -> None:
    assert DEFINED.keys() == EXIT_CODES.keys()


@pytest.mark.parametrize("name", DEFINED)
def test_an_error_survives_pickling_with_its_class_and_words(name: str) -> None:
    error = pickle.loads(pickle.dumps(DEFINED[name]("lanes must be 1; got 2: set it")))
    assert type(error) is DEFINED[name]
    assert str(error) == "lanes must be 1; got 2: set it"


def test_the_error_of_one_document_is_a_data_error() -> None:
    error = DocumentError("no", 3)
    assert isinstance(error, errors.DataError)
    assert (str(error), error.index, error.exit_code) == ("no", 3, 2)


def test_every_error_of_the_package_is_in_the_public_names() -> None:
    assert [name for name in DEFINED if name not in ingest.__all__] == []


def test_a_document_error_survives_pickling_with_its_index() -> None:
    error = pickle.loads(pickle.dumps(DocumentError("a document must be a string; got int: name a text column", 3)))
    assert (type(error), error.index) == (DocumentError, 3)
    assert str(error) == "a document must be a string; got int: name a text column"
