"""The cache of a node: bounded, atomic, shared by processes, and patient where a job writes."""

from __future__ import annotations

import logging
import os
import shutil
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

from symbiosis.errors import BadArtifact, DoesNotFit, StoreUnavailable
from symbiosis.store.artifact_cache import ArtifactCache
from symbiosis.store.artifacts import ArtifactStore
from symbiosis.store.store_url import open_object_store
from tests.store.conftest import CLUSTER, FILES, open_cache, put_adapter, write_files

KB = 1 << 10


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Of a store."""
    (tmp_path / "store").mkdir()
    ArtifactStore(open_object_store(str(tmp_path / "store"))).claim(CLUSTER)
    return tmp_path / "store"


def cached(cache: ArtifactCache) -> set[str]:
    return {cache.locate(file.parent).removeprefix("store:") for _, _, file in cache._entries()}


def read(cache: ArtifactCache, location: str) -> dict[str, bytes]:
    with cache.hold(cache.find(location)) as held:
        return {file: (held / file).read_bytes() for file in FILES}


def test_an_artifact_is_fetched_once_and_stays(folder, tmp_path):
    one, two = (open_cache(str(folder), tmp_path / name) for name in ("node-1", "node-2"))
    put_adapter(one.store, tmp_path, "one")
    assert read(one, "store:adapters/one") == FILES
    assert (cached(one), cached(two)) == ({"adapters/one"}, set())
    one.store.remove("adapters/one")
    assert read(one, "store:adapters/one") == FILES  # from this node
    with pytest.raises(BadArtifact, match="the store does not have adapters/one"):
        read(two, "store:adapters/one")
    assert cached(two) == set()


def test_locations_are_those_of_all_nodes(folder, tmp_path):
    one, two = (open_cache(str(folder), tmp_path / name) for name in ("node-1", "node-2"))
    draft = one.draft("store:jobs/ftjob-1/try-1") / "step-2"
    published = one.publish(write_files(draft))
    assert not draft.exists()
    assert one.locate(published) == "store:jobs/ftjob-1/try-1/step-2"
    assert cached(one) == {"jobs/ftjob-1/try-1/step-2"}  # nothing is fetched that was written here
    assert read(two, one.locate(published)) == FILES
    with two.hold(two.find("store:jobs/ftjob-1/try-1/step-2/adapter_config.json")) as file:
        assert file.read_bytes() == FILES["adapter_config.json"]


@pytest.mark.parametrize(
    "name", ["../x", "adapters/../../x", "adapters", "adapters/a/../b", "adapters/a/../../x.json", "jobs//data", ""]
)
def test_locations_do_not_leave_the_cache(folder, tmp_path, name):
    cache = open_cache(str(folder), tmp_path / "node")
    with pytest.raises(BadArtifact):
        cache.find(f"store:{name}")
    with pytest.raises(BadArtifact):
        cache.publish(cache.draft(f"store:{name}") / "x" / ".." / "y")


def test_the_least_recently_used_leave(folder, tmp_path):
    cache = open_cache(str(folder), tmp_path / "node", 25 * KB)
    for id in "abc":
        put_adapter(cache.store, tmp_path, id)
        read(cache, f"store:adapters/{id}")
        os.utime(cache.find(f"store:adapters/{id}") / "manifest.json", (ord(id), ord(id)))
    read(cache, "store:adapters/a")
    put_adapter(cache.store, tmp_path, "d")
    read(cache, "store:adapters/d")
    assert cached(cache) == {"adapters/a", "adapters/c", "adapters/d"}


def test_what_is_in_use_does_not_leave(folder, tmp_path):
    cache, same = (open_cache(str(folder), tmp_path / "node", 10 * KB) for _ in range(2))  # of two processes
    for id in "ab":
        put_adapter(cache.store, tmp_path, id)
    with cache.hold(cache.find("store:adapters/a")) as held:
        read(same, "store:adapters/b")
        assert (held / "adapter_config.json").read_bytes() == FILES["adapter_config.json"]
        assert cached(cache) == {"adapters/a", "adapters/b"}
    put_adapter(cache.store, tmp_path, "c")
    read(same, "store:adapters/c")
    assert cached(cache) == {"adapters/c"}


def test_an_artifact_larger_than_the_cache_is_an_error(folder, tmp_path):
    cache = open_cache(str(folder), tmp_path / "node", 5 * KB)
    put_adapter(cache.store, tmp_path, "one")
    with pytest.raises(DoesNotFit, match="an artifact needs 7002: raise --store-cache-gb"):
        read(cache, "store:adapters/one")
    published = cache.publish(write_files(cache.draft("store:adapters/two")))
    assert cache.store.has("adapters/two")
    assert not published.exists()
    assert cached(cache) == set()


def test_an_artifact_that_lost_bytes_is_fetched_again(folder, tmp_path):
    """As a host that lost power leaves it."""
    cache = open_cache(str(folder), tmp_path / "node")
    put_adapter(cache.store, tmp_path, "one")
    read(cache, "store:adapters/one")
    (cache.find("store:adapters/one") / "adapter_model.safetensors").write_bytes(b"")
    assert read(cache, "store:adapters/one") == FILES


def test_a_corrupt_artifact_is_not_cached(folder, tmp_path):
    cache = open_cache(str(folder), tmp_path / "node")
    put_adapter(cache.store, tmp_path, "one")
    (folder / "adapters/one/adapter_model.safetensors").write_bytes(b"x" * 7000)
    with pytest.raises(BadArtifact, match="is corrupt"):
        read(cache, "store:adapters/one")
    assert not any(cache._root.iterdir())
    assert not any(path.is_dir() for path in cache._drafts.iterdir())


def test_a_full_disk_of_the_host_is_one_line(folder, tmp_path, small_disk):
    cache = open_cache(str(folder), small_disk, 1 << 30)
    put_adapter(cache.store, tmp_path, "large", {"adapter_model.safetensors": bytes(2 << 20)})
    with pytest.raises(StoreUnavailable, match="the disk of this host is full: expected space for the cache of the store"):
        with cache.hold(cache.find("store:adapters/large")):
            pass
    put_adapter(cache.store, tmp_path, "one")
    assert read(cache, "store:adapters/one") == FILES


def test_drafts_of_killed_processes_are_removed(folder, tmp_path):
    script = (
        "import sys, time\nfrom pathlib import Path\nfrom tests.store.conftest import open_cache\n"
        "cache = open_cache(sys.argv[1], Path(sys.argv[2]))\nprint(cache._drafts, flush=True)\ntime.sleep(60)"
    )
    process = subprocess.Popen([sys.executable, "-c", script, folder, tmp_path / "node"], stdout=subprocess.PIPE, text=True)
    left = Path(process.stdout.readline().strip())
    one = open_cache(str(folder), tmp_path / "node")
    assert left.is_dir()  # in use
    process.kill()
    process.wait()
    two = open_cache(str(folder), tmp_path / "node")
    assert not left.exists()
    assert one._drafts.is_dir()
    for cache in (one, two):
        cache.close()
        assert not cache._drafts.exists()


def test_processes_share_a_cache_under_eviction(folder, tmp_path):
    """Four processes read artifacts of which three fit; each reading is whole."""
    store = ArtifactStore(open_object_store(str(folder)))
    for number in range(8):
        put_adapter(store, tmp_path, f"n{number}", {name: bytes([number]) + content for name, content in FILES.items()})
    script = (
        "import random, sys\nfrom pathlib import Path\nfrom tests.store.conftest import FILES, open_cache\n"
        f"cache = open_cache(sys.argv[1], Path(sys.argv[2]), {25 * KB})\nrandom.seed(sys.argv[3])\n"
        "for _ in range(150):\n"
        "    number = random.randrange(8)\n"
        "    with cache.hold(cache.find(f'store:adapters/n{number}')) as held:\n"
        "        for name, content in FILES.items():\n"
        "            assert (held / name).read_bytes() == bytes([number]) + content\n"
        "cache.close()"
    )
    processes = [subprocess.Popen([sys.executable, "-c", script, folder, tmp_path / "node", str(seed)]) for seed in range(4)]
    assert [process.wait(120) for process in processes] == [0] * 4
    cache = open_cache(str(folder), tmp_path / "node", 25 * KB)
    assert sum(size for _, size, _ in cache._entries()) <= 4 * 25 * KB  # each process makes room for its own
    assert not [path for path in (tmp_path / "node").glob("draft-*") if path != cache._drafts]


def test_a_job_waits_for_a_store_that_is_gone_for_a_moment(folder, tmp_path, caplog, monkeypatch):
    monkeypatch.setattr("symbiosis.store.artifact_cache._RETRY_S", 0.05)
    cache, interrupt = open_cache(str(folder), tmp_path / "node"), threading.Event()
    draft = write_files(cache.draft("store:jobs/ftjob-1/try-1/step-2"))
    shutil.move(folder, tmp_path / "unmounted")
    threading.Timer(0.5, lambda: shutil.move(tmp_path / "unmounted", folder)).start()
    with caplog.at_level(logging.WARNING):
        cache.publish(draft, interrupt)
    assert cache.store.has("jobs/ftjob-1/try-1/step-2")
    (line,) = [record.getMessage() for record in caplog.records]
    assert line.startswith("jobs/ftjob-1/try-1/step-2 waits for the store: the store's folder is not there")


def test_a_job_that_is_stopped_waits_no_longer(folder, tmp_path):
    cache, interrupt = open_cache(str(folder), tmp_path / "node"), threading.Event()
    draft = write_files(cache.draft("store:jobs/ftjob-1/try-1/step-2"))
    shutil.move(folder, tmp_path / "unmounted")
    threading.Timer(0.3, interrupt.set).start()
    started = time.monotonic()
    with pytest.raises(StoreUnavailable):
        cache.publish(draft, interrupt)
    assert time.monotonic() - started < 5
