"""Globs over the names that a listing returned, the same for a local directory and an object store.

Rejected: ``glob`` and ``fnmatch`` of the standard library: the first walks local directories only, and to the second
``*`` crosses ``/``.
"""

from __future__ import annotations

import re

_MAGIC = frozenset("*?[")


def is_glob(path: str) -> bool:
    """True where a path holds ``*``, ``?`` or ``[``."""
    return not _MAGIC.isdisjoint(path)


def split_glob(path: str) -> tuple[str, str]:
    """``a/b/c*/d`` is ``a/b`` and ``c*/d``."""
    parts = path.split("/")
    first = next(index for index, part in enumerate(parts) if is_glob(part))
    return "/".join(parts[:first]) or "/", "/".join(parts[first:])


def glob_regex(pattern: str) -> re.Pattern[str]:
    r"""A regex for what a glob stands for: the files it matches, and the Parquet files in the directories it matches.

    ``*`` and ``?`` stop at ``/``; ``**`` as a whole part is any number of directories. To ``*`` and ``**`` everything
    may be a directory, so a last part of that kind takes Parquet names only. ``a?/*.pq`` becomes ``a[^/]/[^/]*\.pq``
    with the tail ``(/.*\.parquet)?``.
    """
    *parents, last = pattern.split("/")
    regex = "".join("(?:.*/)?" if part == "**" else _part_regex(part) + "/" for part in parents)
    parquet = r"(?:.*\.[pP][aA][rR][qQ][uU][eE][tT])"
    if last in ("*", "**"):
        return re.compile(regex + parquet, re.DOTALL)
    return re.compile(f"{regex}{_part_regex(last)}(?:/{parquet})?", re.DOTALL)


def _part_regex(part: str) -> str:
    token = re.compile(r"\*+|\?|\[(!?)([^\]]+)\]|.", re.DOTALL)

    def one(match: re.Match[str]) -> str:
        text = match[0]
        if text[0] == "*":
            return "[^/]*"
        if text == "?":
            return "[^/]"
        if match[2]:
            inside = re.sub(r"([\\\[\]^&~|])", r"\\\1", match[2])
            return f"[{'^/' if match[1] else ''}{inside}]"
        return re.escape(text)

    return token.sub(one, part)
