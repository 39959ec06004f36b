"""Stores of real parts: a folder, a small file system, and a server that speaks S3."""

from __future__ import annotations

import os
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from importlib.util import find_spec
from pathlib import Path

import pytest

from symbiosis.store.artifact_cache import ArtifactCache
from symbiosis.store.artifacts import ArtifactStore
from symbiosis.store.store_url import open_object_store

CLUSTER = "a cluster"
FILES = {"adapter_config.json": b"{}", "adapter_model.safetensors": b"weights" * 1000}


def write_files(folder: Path, files: dict[str, bytes] | None = None) -> Path:
    folder.mkdir(parents=True)
    for name, content in (files or FILES).items():
        (folder / name).write_bytes(content)
    return folder


def put_adapter(store: ArtifactStore, folder: Path, id: str, files: dict[str, bytes] | None = None) -> str:
    store.put(f"adapters/{id}", write_files(folder / f"source-{id}", files))
    return f"adapters/{id}"


def open_cache(url: str, folder: Path, max_bytes: int = 1 << 20) -> ArtifactCache:
    return ArtifactCache(ArtifactStore(open_object_store(url)), folder, max_bytes)


@pytest.fixture(scope="session")
def s3_server() -> Iterator[str]:
    """The endpoint of a server with S3's protocol, in a process of its own."""
    missing = [name for name in ("s3fs", "moto", "flask") if find_spec(name) is None]
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)}. pip install s3fs 'moto[server,s3]'")
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    process = subprocess.Popen(
        [sys.executable, "-m", "moto.server", "-p", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    deadline = time.monotonic() + 60
    while True:
        try:
            socket.create_connection(("127.0.0.1", port), 1).close()
            break
        except OSError:
            assert process.poll() is None
            assert time.monotonic() < deadline
            time.sleep(0.1)
    yield f"http://127.0.0.1:{port}"
    process.terminate()
    process.wait(10)


def make_bucket(endpoint: str, environment: pytest.MonkeyPatch, bucket: str) -> str:
    """The URL of a store in a new bucket, whose credentials are in the environment."""
    import s3fs

    values = {"AWS_ACCESS_KEY_ID": "id", "AWS_SECRET_ACCESS_KEY": "key", "AWS_DEFAULT_REGION": "us-east-1"}
    for name, value in {**values, "AWS_ENDPOINT_URL": endpoint}.items():
        environment.setenv(name, value)
    s3fs.S3FileSystem(skip_instance_cache=True).mkdir(bucket)
    return f"s3://{bucket}/stores/one"


@pytest.fixture
def s3(s3_server: str, monkeypatch: pytest.MonkeyPatch) -> Callable[[str], str]:
    """Makes a bucket. Returns the URL of a store in it."""
    return partial(make_bucket, s3_server, monkeypatch)


@pytest.fixture(params=["folder", pytest.param("s3", marks=pytest.mark.slow)])
def url(request: pytest.FixtureRequest, tmp_path: Path) -> str:
    """Of an empty store."""
    if request.param == "folder":
        (tmp_path / "store").mkdir()
        return str(tmp_path / "store")
    return request.getfixturevalue("s3")(f"bucket-{os.urandom(4).hex()}")


@pytest.fixture
def store(url: str) -> ArtifactStore:
    made = ArtifactStore(open_object_store(url))
    made.claim(CLUSTER)
    return made


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of 1 MB."""
    folder = tmp_path / "disk"
    folder.mkdir()
    made = subprocess.run(["mount", "-t", "tmpfs", "-o", "size=1m", "tmpfs", folder], capture_output=True, text=True)
    if made.returncode:
        pytest.skip(f"a small file system cannot be mounted here: {made.stderr.strip()}")
    yield folder
    subprocess.run(["umount", "-l", folder], check=True)


def make_read_only(disk: Path) -> None:
    subprocess.run(["mount", "-o", "remount,ro", disk], check=True)
