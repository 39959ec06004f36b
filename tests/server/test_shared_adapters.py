"""Adapters in a cluster's store: nothing is left of what failed, and garbage is what no name refers to."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from symbiosis.errors import StoreFull, StoreUnavailable
from symbiosis.server.adapter_store import AdapterUpload, StoreLimits
from symbiosis.server.openai.errors import error_response
from symbiosis.server.shared_adapters import SharedAdapterStore
from symbiosis.store.artifacts import ArtifactStore
from symbiosis.store.store_url import open_object_store
from tests.store.conftest import CLUSTER, make_read_only, open_cache, small_disk, write_files  # noqa: F401 - a fixture

JOB = "ftjob-0123"


def open_store(folder: Path, node: Path) -> SharedAdapterStore:
    ArtifactStore(open_object_store(str(folder))).claim(CLUSTER)
    store = SharedAdapterStore(open_cache(str(folder), node, 4 << 20), StoreLimits())
    store.open()
    return store


@pytest.fixture
def store(tmp_path: Path) -> SharedAdapterStore:
    (tmp_path / "store").mkdir()
    return open_store(tmp_path / "store", tmp_path / "node")


def send(store: SharedAdapterStore, name: str, size: int = 100) -> AdapterUpload:
    upload = store.open_upload("ann", name)
    upload.write("config", b"{}")
    upload.write("weights", bytes(size))
    upload.sync()
    return upload


def names(store: SharedAdapterStore) -> list[tuple[str | None, str, int]]:
    return sorted((each.owner or "", each.name, each.bytes) for each in store.stored)


def test_an_upload_has_a_name_once_it_is_served(store, tmp_path):
    upload = send(store, "../mine")  # a name is content
    assert not names(open_store(tmp_path / "store", tmp_path / "other"))
    upload.commit()
    assert names(open_store(tmp_path / "store", tmp_path / "other")) == [("ann", "../mine", 102)]
    send(store, "../mine", 50).commit()
    assert names(open_store(tmp_path / "store", tmp_path / "other")) == [("ann", "../mine", 52)]
    assert len(store._shared.list_ids("adapters")) == 1
    assert store.remove("ann", "../mine")
    assert not store.remove("ann", "../mine")
    assert not store._shared.list_ids("adapters")


def test_of_two_with_one_name_the_last_counts(store, tmp_path):
    """As a process that was killed before it removed the older one leaves them."""
    for size in (50, 60):
        upload = send(store, "mine", size)
        store._name("ann", "mine", upload.location)
        store.close_upload(upload)
    again = open_store(tmp_path / "store", tmp_path / "other")
    assert names(again) == [("ann", "mine", 62)]
    again.remove_garbage(set)
    assert len(store._shared.list_ids("adapters")) == 1


def test_an_upload_that_fails_leaves_nothing(store):
    upload = send(store, "mine")
    upload.abort()  # the engine rejects it
    assert not store._shared.list_ids("adapters")
    assert not list(store.folders._drafts.rglob("*.safetensors"))
    store.open_upload("ann", "mine").abort()


def test_garbage_is_what_neither_a_name_an_upload_nor_a_job_refers_to(store):
    send(store, "named").commit()
    running = send(store, "running")
    for tag in (f"{JOB}-2", "ftjob-ended-1", "stray"):
        store.folders.publish(write_files(store.folders.draft(store.new_location(tag))))
    store.remove_garbage(lambda: {JOB})
    left = {running.location.rpartition("/")[2], f"{JOB}-2", store.stored[0].location.rpartition("/")[2]}
    assert store._shared.list_ids("adapters") == left


def test_a_provided_folder_is_put_once(store, tmp_path):
    folder = write_files(tmp_path / "given")
    location = store.provide("given", folder)
    store.add_provided("given", location)
    assert store.provide("given", folder) == location
    assert store.provide("same", folder) != location
    (folder / "adapter_config.json").write_text('{"r": 1}')
    other = store.provide("given", folder)
    assert other != location
    store.add_provided("given", other)
    assert not store._shared.has(location.removeprefix("store:"))


def test_a_full_store_is_an_error_of_the_upload(small_disk, tmp_path):  # noqa: F811 - the fixture
    store = open_store(small_disk, tmp_path / "node")
    upload = store.open_upload("ann", "large")
    upload.write("config", b"{}")
    upload.write("weights", bytes(2 << 20))
    with pytest.raises(StoreFull, match="the store is full: nothing was written") as error:
        upload.sync()
    assert error_response(error.value).status_code == 507
    upload.abort()
    assert not store._shared.list_ids("adapters")
    assert not list(store.folders._drafts.rglob("*.safetensors"))
    send(store, "small").commit()


def test_a_read_only_store_is_an_error_of_the_upload(small_disk, tmp_path):  # noqa: F811 - the fixture
    store = open_store(small_disk, tmp_path / "node")
    send(store, "mine").commit()
    make_read_only(small_disk)
    with pytest.raises(StoreUnavailable, match="the store is read-only") as error:
        send(store, "more")
    assert error_response(error.value).status_code == 503
    with pytest.raises(StoreUnavailable):
        store.remove("ann", "mine")
    assert store.get("ann", "mine") is not None  # it is still there


def test_an_adapter_is_not_removed_while_the_store_is_gone(store, tmp_path):
    send(store, "mine").commit()
    shutil.move(tmp_path / "store", tmp_path / "away")
    with pytest.raises(StoreUnavailable):
        send(store, "more")
    shutil.move(tmp_path / "away", tmp_path / "store")
    assert names(open_store(tmp_path / "store", tmp_path / "other")) == [("ann", "mine", 102)]
