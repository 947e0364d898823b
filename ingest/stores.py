"""Paths and URIs to filesystems: which client a store gets, and with which options.

Guarantees: a path is taken as it is written, so names with spaces, ``%``, ``#`` and Unicode work; one that carries a
credential is refused, and no message repeats it. A store has two clients: one that repeats no request, since
``ranged.py`` does and counts, and a patient one for listings and writes, which are many requests in one call.

Rejected: fsspec, one more dependency with a client of its own per store; ``pyarrow.fs.FileSystem.from_uri`` on whole
paths, which decodes ``%20`` and refuses spaces.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from datetime import timedelta
from typing import Any
from urllib.parse import urlsplit

import pyarrow as pa
from pyarrow import fs

from ingest.config import StorageConfig
from ingest.errors import ConfigError, StorageError
from ingest.retry import one_line, retrying

_URI = re.compile(r"([A-Za-z][A-Za-z0-9+.-]*)://([^/]*)/*(.*)", re.DOTALL)
_SECRET = re.compile(r"://[^/@]*:[^/@]*@|[?&](sig|password|secret_key|access_key|account_key)=")


@dataclass(frozen=True)
class Place:
    """A path inside its filesystem; ``prefix + path[skip:]`` is what the user calls it.

    ``patient`` is the same filesystem for listings and writes.
    """

    filesystem: Any
    patient: Any
    path: str
    prefix: str
    skip: int

    def name(self, path: str) -> str:
        """What the user calls a path of this filesystem."""
        return self.prefix + path[self.skip :]


class Stores:
    """The filesystems of this process, each connected when a path first needs it.

    Args:
        config: endpoint, region, retries and timeouts. Credentials come from the environment.
    """

    def __init__(self, config: StorageConfig) -> None:
        self._config = config
        self._filesystems: dict[tuple[str, str], tuple[Any, Any, str]] = {}

    def place(self, path: str) -> Place:
        """Where a path lies.

        Raises:
            ConfigError: a scheme or the endpoint is wrong, or the path holds a credential.
            StorageError: the client of its store is missing.
        """
        require_no_credential("path", path)
        uri = _URI.fullmatch(path)
        if uri is None or uri[1].lower() == "file":
            local = path if uri is None else "/" + uri[3]
            if uri is not None and uri[2] not in ("", "localhost"):
                raise ConfigError(f"file:// must have no host; got {path}: write file:///{uri[3]}")
            filesystem, patient, _ = self._filesystem("file", "")
            return Place(filesystem, patient, os.path.abspath(local), "", 0)
        scheme, authority, rest = uri[1].lower(), uri[2], uri[3].rstrip("/")
        filesystem, patient, root = self._filesystem(scheme, authority)
        inside = root + rest if rest else root.rstrip("/") or "/"
        return Place(filesystem, patient, inside, f"{uri[1]}://{authority}/", len(root))

    def _filesystem(self, scheme: str, authority: str) -> tuple[Any, Any, str]:
        """The filesystem of a scheme and authority, the same for listings and writes, and what its paths start with."""
        key = (scheme, authority)
        if key not in self._filesystems:
            *filesystems, root = self._connect(scheme, authority)
            self._filesystems[key] = filesystems[0], filesystems[-1], root
        return self._filesystems[key]

    def _connect(self, scheme: str, authority: str) -> tuple[Any, ...]:
        if scheme == "file":
            return fs.LocalFileSystem(), ""
        if not authority and scheme != "hdfs":
            raise ConfigError(f"path must name a bucket; got {scheme}:///: write {scheme}://BUCKET/PATH")
        if scheme in ("s3", "s3a", "s3n"):
            return *_s3(self._config, authority), authority + "/"
        if scheme in ("gs", "gcs"):
            limit = timedelta(seconds=self._config.request_timeout_s * self._config.max_attempts)
            return fs.GcsFileSystem(retry_time_limit=limit), authority + "/"
        try:
            filesystem, root = fs.FileSystem.from_uri(f"{scheme}://{authority}/")
        except pa.ArrowInvalid as error:
            rule = "path must have a scheme that Arrow opens (s3, gs, abfs, abfss, hdfs, file)"
            raise ConfigError(f"{rule}; {scheme}://{authority}, {one_line(error)}: correct it") from error
        except OSError as error:
            raise StorageError(
                f"connect to {scheme}://{authority} failed; {one_line(error)}: install its client"
            ) from error
        return filesystem, root.rstrip("/") + "/"


def _s3(config: StorageConfig, bucket: str) -> tuple[Any, Any]:
    """An S3 client that repeats no request, and one that does.

    The region is found from the bucket where neither a setting nor the environment gives it.
    """
    endpoint = config.endpoint or os.environ.get("AWS_ENDPOINT_URL_S3") or os.environ.get("AWS_ENDPOINT_URL")
    options: dict[str, Any] = {}
    region = config.region or os.environ.get("AWS_REGION") or os.environ.get("AWS_DEFAULT_REGION")
    if endpoint:
        parts = urlsplit(endpoint)
        if "@" in parts.netloc:
            raise ConfigError("storage.endpoint must not hold a credential; got one: put it in the environment")
        if parts.scheme not in ("http", "https") or not parts.netloc or parts.path.strip("/"):
            raise ConfigError(f"storage.endpoint must be http(s)://HOST[:PORT]; got {endpoint}: correct it")
        options = {"endpoint_override": parts.netloc, "scheme": parts.scheme}
        region = region or "us-east-1"
    elif region is None:
        region = retrying(lambda: fs.resolve_s3_region(bucket), f"find the region of s3://{bucket}", config)
    options |= {"region": region, "request_timeout": config.request_timeout_s}
    options["connect_timeout"] = min(10.0, config.request_timeout_s)
    retries = (0, config.max_attempts - 1)  # Arrow says attempts, the SDK takes retries: seen at a counting server
    once, often = (
        fs.S3FileSystem(retry_strategy=fs.AwsDefaultS3RetryStrategy(max_attempts=n), **options) for n in retries
    )
    return once, often


def require_no_credential(name: str, path: str) -> None:
    """Refuses a path that would carry a credential into logs, positions and manifests.

    Raises:
        ConfigError: names the setting, never the path.
    """
    if _SECRET.search(path):
        shown = path.split("://")[0]
        raise ConfigError(
            f"{name} must not hold a credential; got a {shown}:// path that does: put it in the environment"
        )
