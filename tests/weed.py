"""A SeaweedFS S3 server on loopback, for the tests marked ``s3``."""

from __future__ import annotations

import contextlib
import http.client
import json
import shutil
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from pyarrow import fs

KEYS = {"AWS_ACCESS_KEY_ID": "test-access", "AWS_SECRET_ACCESS_KEY": "test-secret"}


def weed() -> str | None:
    """The program, beside the interpreter or in PATH."""
    beside = Path(sys.executable).parent / "weed"
    return str(beside) if beside.exists() else shutil.which("weed")


def free_port() -> int:
    """A port that is free, and so is the one 10,000 above it, which the server takes for its gRPC."""
    while True:
        with socket.socket() as low, socket.socket() as high:
            low.bind(("127.0.0.1", 0))
            port: int = low.getsockname()[1]
            try:
                high.bind(("127.0.0.1", port + 10_000))
            except (OSError, OverflowError):
                continue
            return port


def _ready(port: int) -> bool:
    connection = http.client.HTTPConnection("127.0.0.1", port, timeout=1)
    try:
        connection.request("GET", "/")
        return connection.getresponse().status == 403
    except (OSError, http.client.HTTPException):
        return False
    finally:
        connection.close()


@contextlib.contextmanager
def serving(root: Path) -> Iterator[str]:
    """Runs the server with its files in ``root`` and the bucket ``data`` in it; yields its URL."""
    key = {"accessKey": KEYS["AWS_ACCESS_KEY_ID"], "secretKey": KEYS["AWS_SECRET_ACCESS_KEY"]}
    identity = {"name": "test", "credentials": [key], "actions": ["Admin", "Read", "Write", "List"]}
    (root / "s3.json").write_text(json.dumps({"identities": [identity]}))
    ports = {name: free_port() for name in ("master", "volume", "filer", "s3")}
    command = [str(weed()), "server", f"-dir={root}", "-ip=127.0.0.1", "-ip.bind=127.0.0.1", "-filer", "-s3"]
    command += [f"-{name}.port={port}" for name, port in ports.items()]
    command += [
        f"-s3.config={root}/s3.json",
        "-s3.port.iceberg=0",
        "-s3.port.lance=0",
        "-s3.autoCreateBucket=false",
        "-volume.max=20",
    ]
    command += ["-master.telemetry=false", "-master.volumeSizeLimitMB=64", "-volume.preStopSeconds=0"]
    with (root / "log").open("wb") as log:
        server = subprocess.Popen(command, stdout=log, stderr=log, cwd=root)
        try:
            deadline_s = time.monotonic() + 60
            while not _ready(ports["s3"]):
                assert server.poll() is None, (root / "log").read_text()[-2000:]
                assert time.monotonic() < deadline_s, (root / "log").read_text()[-2000:]
                time.sleep(0.1)
            endpoint = f"127.0.0.1:{ports['s3']}"
            client = fs.S3FileSystem(
                access_key=key["accessKey"],
                secret_key=key["secretKey"],
                endpoint_override=endpoint,
                scheme="http",
                region="us-east-1",
                allow_bucket_creation=True,
            )
            client.create_dir("data")
            yield f"http://{endpoint}"
        finally:
            server.kill()
            server.wait()
