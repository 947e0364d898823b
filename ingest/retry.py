"""What may be tried again, and how often: bounded exponential backoff around every action on a store.

Guarantee: an action runs at most ``max_attempts`` times and begins no try after ``retry_deadline_s``; only a transient
error earns it another try, which is counted (``ranged.py``) and logged at level INFO. Cost: with 5 attempts a store
that refuses is given up after 4 to 9 seconds of pauses.

Arrow reports what a store says as an OSError whose errno is mostly None, so its text has to be read. Rejected: trying
every error again, which hides a wrong path or a damaged file behind a wait.
"""

from __future__ import annotations

import errno
import logging
import random
import re
import time
from collections.abc import Callable
from typing import Literal, TypeVar

from ingest.config import StorageConfig
from ingest.errors import StorageError

T = TypeVar("T")

_LOG = logging.getLogger(__name__)
_FIRST_PAUSE_S, _PAUSE_GROWTH, _LONGEST_PAUSE_S = 0.1, 4, 8.0

_TRANSIENT_ERRNOS = frozenset({
    errno.EAGAIN, errno.EBUSY, errno.ECONNABORTED, errno.ECONNREFUSED, errno.ECONNRESET, errno.EHOSTUNREACH,
    errno.EINTR, errno.EIO, errno.ENETDOWN, errno.ENETRESET, errno.ENETUNREACH, errno.EPIPE, errno.ESTALE,
    errno.ETIMEDOUT,
})  # fmt: skip
# Names as the AWS SDK prints them (github.com/aws/aws-sdk-cpp, CoreErrors.h), then those of GCS and Azure.
_TRANSIENT_TEXT = re.compile(
    r"AWS Error (NETWORK_CONNECTION|SLOW_DOWN|THROTTLING|REQUEST_TIMEOUT|SERVICE_UNAVAILABLE"
    r"|INTERNAL_FAILURE|UNKNOWN \(HTTP status (408|429|5\d\d)\))"
    r"|HTTP status (408|429|500|502|503|504)\b|curlCode: \d+"
    r"|\b(UNAVAILABLE|DEADLINE_EXCEEDED|RESOURCE_EXHAUSTED|ServerBusy|OperationTimedOut|InternalError|SlowDown)\b"
    r"|\b(timed out|connection reset|connection closed|broken pipe|only got \d+)\b",
    re.IGNORECASE,
)
_DENIED = re.compile(
    r"ACCESS_DENIED|INVALID_ACCESS_KEY|SIGNATURE|TOKEN|CREDENTIALS|PERMISSION_DENIED|HTTP status 40[13]"
)


def classify(error: OSError) -> Literal["transient", "permanent"]:
    """Says whether trying again can help.

    What is not known to be transient is permanent, so that a damaged file or a wrong path is reported at once.
    """
    if error.errno is not None:
        return "transient" if error.errno in _TRANSIENT_ERRNOS else "permanent"
    return "transient" if isinstance(error, TimeoutError) or _TRANSIENT_TEXT.search(str(error)) else "permanent"


def retrying(
    action: Callable[[], T],
    what: str,
    config: StorageConfig,
    sleep: Callable[[float], object] = time.sleep,
    clock: Callable[[], float] = time.monotonic,
) -> T:
    """Runs an action again while it fails with a transient OSError, after 0.1, 0.4, 1.6, 6.4, 8 s, less up to half.

    Args:
        action: must be safe to repeat.
        what: names the action and its path in the error, such as ``open s3://bucket/a.parquet``.
        config: ``max_attempts`` bounds the tries, ``retry_deadline_s`` the seconds until the last one begins.
        sleep: waits that many seconds.
        clock: seconds from any start.

    Raises:
        StorageError: a permanent error, or the last try failed.
    """
    began = clock()
    for attempt in range(1, config.max_attempts + 1):
        try:
            return action()
        except OSError as error:
            longest_s = min(_LONGEST_PAUSE_S, _FIRST_PAUSE_S * _PAUSE_GROWTH ** (attempt - 1))
            pause_s = longest_s * random.SystemRandom().uniform(0.5, 1.0)
            late = clock() - began + pause_s > config.retry_deadline_s
            if classify(error) == "permanent" or attempt == config.max_attempts or late:
                tries = "" if attempt == 1 else f" after {attempt} tries"
                raise StorageError(f"{what} failed{tries}; {one_line(error)}: {_next_step(error)}") from error
            _LOG.info("%s: try %d of %d in %.1f s; %s", what, attempt + 1, config.max_attempts, pause_s, error)
            sleep(pause_s)
    raise AssertionError("max_attempts is at least 1")


def one_line(error: BaseException) -> str:
    """An error's text without line breaks or a final stop, to stand inside a message of ours."""
    return " ".join(str(error).split()).rstrip(".: ")


def _next_step(error: OSError) -> str:
    if isinstance(error, FileNotFoundError) or "NO_SUCH_" in str(error):
        return "check the path, its bucket and its spelling"
    if isinstance(error, PermissionError) or _DENIED.search(str(error)):
        return "check the permissions and the credentials in the environment"
    if classify(error) == "transient":
        return "check the network and storage.endpoint, or raise storage.max_attempts and retry_deadline_s"
    return "check the path and the store"
