"""The exception tree.

    IngestError
    ├── ConfigError     a setting is wrong, or two settings contradict each other
    ├── StorageError    a path cannot be listed, opened, read or written
    ├── DataError       a file opened, but what is in it is not what was promised
    ├── ResumeError     a position does not fit the data or the settings it is resumed on
    ├── ResourceError   the cluster cannot run this job, or the stream stands still
    └── OrderError      a slab arrived out of order: the delivery is broken, not the data

Every message names the thing, the rule, the value and the next step, in one line. Catch ``IngestError`` to catch them
all. ``exit_code`` is what the command line returns: 2 where the user's input is at fault, 1 otherwise.
"""

from __future__ import annotations


class IngestError(Exception):
    """Base of every error that this package raises on purpose."""

    exit_code = 1


class ConfigError(IngestError):
    """A setting is wrong, unknown, or contradicts another one."""

    exit_code = 2


class StorageError(IngestError):
    """A path cannot be listed, opened, read or written, after the retries that made sense."""

    exit_code = 2


class DataError(IngestError):
    """A file was read, but its content is not what the settings or the manifest promise."""

    exit_code = 2


class ResumeError(IngestError):
    """A position was refused: it belongs to other data or other settings. The message lists each difference."""

    exit_code = 2


class ResourceError(IngestError):
    """The cluster lacks what the job needs, or a stage has not produced anything for longer than it may."""

    exit_code = 2


class OrderError(IngestError):
    """A slab is missing, repeated or misrouted, so the stream stops before a wrong batch can leave it."""
