"""Artifacts: whole or absent, verified, never another cluster's. In a folder and in a bucket."""

from __future__ import annotations

import json
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from symbiosis.errors import BadArtifact, StoreFull, StoreUnavailable
from symbiosis.store import artifacts
from symbiosis.store.artifacts import ArtifactStore
from symbiosis.store.store_url import open_object_store
from tests.store.conftest import CLUSTER, FILES, make_read_only, put_adapter, write_files


def read(store: ArtifactStore, name: str, folder: Path) -> dict[str, bytes]:
    store.fetch(name, folder)
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def test_what_was_put_is_fetched(store, tmp_path):
    name = put_adapter(store, tmp_path, "one")
    assert store.has(name)
    assert not store.has("adapters/two")
    assert read(store, name, tmp_path / "copy") == FILES
    assert store.manifest(name).size == sum(map(len, FILES.values()))
    empty = put_adapter(store, tmp_path, "empty", {"adapter_config.json": b""})
    assert read(store, empty, tmp_path / "empty") == {"adapter_config.json": b""}


def test_a_file_of_many_parts_is_fetched(store, tmp_path, monkeypatch):
    from symbiosis.store import folder_store, remote_store

    for module in (folder_store, remote_store, artifacts):
        monkeypatch.setattr(module, "PART_BYTES", 1000)
    files = {"adapter_model.safetensors": bytes(range(256)) * 20}
    assert read(store, put_adapter(store, tmp_path, "one", files), tmp_path / "copy") == files


def test_removed_artifacts_are_gone(store, tmp_path):
    one = put_adapter(store, tmp_path, "one")
    for step in (2, 4):
        store.put(f"jobs/ftjob-1/try-1/step-{step}", write_files(tmp_path / f"step-{step}"))
    assert sorted(store.list_artifacts("jobs/ftjob-1")) == ["jobs/ftjob-1/try-1/step-2", "jobs/ftjob-1/try-1/step-4"]
    assert store.list_ids("jobs") == {"ftjob-1"}
    store.remove("jobs/ftjob-1/try-1/step-2")
    assert store.list_artifacts("jobs/ftjob-1") == ["jobs/ftjob-1/try-1/step-4"]
    store.remove("jobs/ftjob-1")
    store.remove("jobs/ftjob-1")  # a second time has no effect
    assert (store.list_ids("jobs"), store.list_ids("adapters")) == (set(), {"one"})
    store.remove(one)
    with pytest.raises(BadArtifact, match="the store does not have adapters/one"):
        store.fetch(one, tmp_path / "gone")


def test_an_artifact_without_its_manifest_is_not_there(store, tmp_path):
    """As a killed process leaves it."""
    name = put_adapter(store, tmp_path, "half")
    store._objects.remove(f"{name}/manifest.json")
    assert not store.has(name)
    assert store.list_artifacts("adapters") == []
    assert store.list_ids("adapters") == {"half"}  # garbage is found


def test_a_corrupt_object_is_found(store, tmp_path):
    name = put_adapter(store, tmp_path, "one")
    weights = FILES["adapter_model.safetensors"]
    for content in (weights[:-1], b"x" + weights[1:], b""):
        store._objects.remove(f"{name}/adapter_model.safetensors")
        store._objects.write(f"{name}/adapter_model.safetensors", content)
        with pytest.raises(
            BadArtifact, match=r"adapters/one/adapter_model.safetensors of the store is corrupt: expected 7000 bytes"
        ):
            store.fetch(name, tmp_path / f"copy-{len(content)}-{content[:1]!r}")
    store._objects.remove(f"{name}/adapter_model.safetensors")
    with pytest.raises(BadArtifact, match=r"the store has no adapters/one/adapter_model\.safetensors"):
        store.fetch(name, tmp_path / "copy")


@pytest.mark.parametrize(
    "manifest",
    [
        b"",
        b"[]",
        b"{" * 5000,
        b'{"../../x.json": ["' + b"0" * 64 + b'", 1]}',
        b'{"manifest.json": ["' + b"0" * 64 + b'", 1]}',
        b'{"weights.bin": ["' + b"0" * 64 + b'", 1]}',
        b'{"a.json": ["' + b"0" * 64 + b'", 1e30]}',
        b'{"a.json": ["' + b"0" * 64 + b'", 99999999999999]}',
        b'{"a.json": ["zz", 1]}',
        b'{"a.json": 1}',
    ],
)
def test_a_hostile_manifest_is_rejected(store, tmp_path, manifest):
    store._objects.write("adapters/bad/manifest.json", manifest)
    with pytest.raises(BadArtifact):
        store.fetch("adapters/bad", tmp_path / "copy")
    assert not (tmp_path / "copy").exists()


@pytest.mark.parametrize(
    "name", ["", "adapters", "adapters/..", "adapters/a/b", "../x", "jobs/a/b/../c", "adapters/a\n", "/etc", "x/y"]
)
def test_names_do_not_leave_the_store(store, tmp_path, name):
    for operation in (store.has, store.manifest, store.remove):
        with pytest.raises(BadArtifact):
            operation(name if operation != store.remove or name != "adapters/a/b" else "adapters")
    with pytest.raises(BadArtifact):
        store.put(name, write_files(tmp_path / "source"))


def test_only_files_of_artifacts_are_put(store, tmp_path):
    for number, file in enumerate(("weights.bin", "manifest.json", "label.json", ".hidden.json", "A.json")):
        with pytest.raises(BadArtifact, match="is not the name of a file"):
            store.put("adapters/one", write_files(tmp_path / str(number), {file: b"x"}))
    assert not store.list_ids("adapters")


def test_an_object_has_a_bound(store, tmp_path, monkeypatch):
    monkeypatch.setattr(artifacts, "MAX_FILE_BYTES", 100)
    with pytest.raises(BadArtifact, match="more than the 100 bytes allowed"):
        put_adapter(store, tmp_path, "one")


def test_a_store_belongs_to_one_cluster(url, store):
    store.claim(CLUSTER)  # it is the same after a restart
    store.check(CLUSTER)
    with pytest.raises(StoreUnavailable, match="belongs to another cluster"):
        store.claim("another")
    assert store._objects.list("") == ["store.json"]  # probes leave nothing


def test_a_store_with_other_content_is_not_taken(url, tmp_path):
    made = ArtifactStore(open_object_store(url))
    with pytest.raises(StoreUnavailable, match=r"has no store\.json: expected the one of `symbiosis cluster up`"):
        made.check(CLUSTER)
    made._objects.write("adapters/mine/weights.bin", b"mine")
    with pytest.raises(StoreUnavailable, match="expected an empty folder or prefix"):
        made.claim(CLUSTER)
    assert made._objects.list("") == ["adapters/mine/weights.bin"]


def test_labels_are_read_together(store, tmp_path):
    for id in ("one", "two", "three"):
        put_adapter(store, tmp_path, id)
    store.label("adapters/one", {"name": "../../etc", "owner": "ann"})  # a tenant's name is content
    store.label("adapters/two", {"name": "b"})
    store._objects.write("adapters/three/label.json", b"not json")
    assert store.labels("adapters") == {"adapters/one": {"name": "../../etc", "owner": "ann"}, "adapters/two": {"name": "b"}}


def test_concurrent_writers_and_readers_see_whole_artifacts(store, tmp_path):
    failures = []

    def work(number: int) -> None:
        try:
            files = {"adapter_config.json": bytes([number]) * 5000}
            name = put_adapter(store, tmp_path, f"id-{number}", files)
            assert read(store, name, tmp_path / f"copy-{number}") == files
        except BaseException as error:
            failures.append(error)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not failures


# Folders that do not work


def folder_store(folder: Path) -> ArtifactStore:
    return ArtifactStore(open_object_store(str(folder)))


def test_a_full_store_says_so_and_keeps_nothing(small_disk, tmp_path):
    store = folder_store(small_disk)
    store.claim(CLUSTER)
    kept = put_adapter(store, tmp_path, "kept")
    with pytest.raises(StoreFull, match="the store is full: nothing was written"):
        put_adapter(store, tmp_path, "large", {"adapter_config.json": b"{}", "adapter_model.safetensors": bytes(2 << 20)})
    assert [path.name for path in (small_disk / "adapters").iterdir()] == ["kept"]
    assert read(store, kept, tmp_path / "copy") == FILES
    put_adapter(store, tmp_path, "next")


def test_a_read_only_store_says_so(small_disk, tmp_path):
    store = folder_store(small_disk)
    store.claim(CLUSTER)
    name = put_adapter(store, tmp_path, "one")
    make_read_only(small_disk)
    with pytest.raises(StoreUnavailable, match="the store is read-only for this process"):
        store.check(CLUSTER)
    with pytest.raises(StoreUnavailable, match="read-only"):
        put_adapter(store, tmp_path, "two")
    assert read(store, name, tmp_path / "copy") == FILES


def test_a_folder_that_is_not_mounted_is_not_made(tmp_path):
    store = folder_store(tmp_path / "missing")
    with pytest.raises(StoreUnavailable, match="the store's folder is not there"):
        store.claim(CLUSTER)
    with pytest.raises(StoreUnavailable, match=r"has no store\.json"):
        store.check(CLUSTER)
    assert not (tmp_path / "missing").exists()


def test_a_file_where_a_folder_is_expected(tmp_path):
    (tmp_path / "store").write_text("x")
    with pytest.raises(StoreUnavailable, match="the store's folder is not there"):
        folder_store(tmp_path / "store").claim(CLUSTER)


def test_links_and_pipes_in_a_folder_are_not_read(tmp_path):
    (tmp_path / "store").mkdir()
    store = folder_store(tmp_path / "store")
    store.claim(CLUSTER)
    name = put_adapter(store, tmp_path, "one")
    file = tmp_path / "store" / name / "adapter_config.json"
    (tmp_path / "secret").write_bytes(FILES["adapter_config.json"])
    file.unlink()
    file.symlink_to(tmp_path / "secret")
    with pytest.raises(BadArtifact, match="the store has no"):
        store.fetch(name, tmp_path / "copy")


_KILLED = """
import sys
from pathlib import Path
from symbiosis.store.artifacts import ArtifactStore
from symbiosis.store.store_url import open_object_store
store = ArtifactStore(open_object_store(sys.argv[1]))
for number in range(1000):
    store.put(f"adapters/a{number}", Path(sys.argv[2]))
    print(number, flush=True)
"""


def test_a_killed_writer_leaves_whole_artifacts_or_none(tmp_path):
    (tmp_path / "store").mkdir()
    store = folder_store(tmp_path / "store")
    store.claim(CLUSTER)
    source = write_files(tmp_path / "source")
    with subprocess.Popen(
        [sys.executable, "-c", _KILLED, tmp_path / "store", source], stdout=subprocess.PIPE, text=True
    ) as process:
        for _ in range(20):
            process.stdout.readline()
        process.kill()
    complete = store.list_artifacts("adapters")
    assert len(complete) >= 20
    for number, name in enumerate(complete):
        assert read(store, name, tmp_path / f"copy-{number}") == FILES
    assert json.loads((tmp_path / "store" / "store.json").read_text())["cluster"] == CLUSTER
