"""Uploaded files: ownership, concurrent uploads, deletion on a full disk."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor

import pytest

from symbiosis.errors import TooManyRequests
from symbiosis.jobs.database import Database
from symbiosis.jobs.errors import StorageFull, UnknownFile
from symbiosis.jobs.layout import JobsLayout
from symbiosis.jobs.queue import JobLimits
from symbiosis.jobs.uploads import Uploads


@pytest.fixture
def layout(tmp_path):
    return JobsLayout(tmp_path)


@pytest.fixture
def db(layout):
    made = Database(layout.database_path)
    yield made
    made.close()


@pytest.fixture
def uploads(layout, db):
    return Uploads(layout, db, JobLimits())


def store_file(uploads: Uploads, tenant: str = "ann") -> str:
    upload = uploads.open(tenant)
    upload.write(b"{}")
    return upload.commit("data.jsonl").id


def test_a_file_belongs_to_its_tenant(uploads):
    id = store_file(uploads)
    assert uploads.path(id, "ann").read_bytes() == b"{}"
    for do in (uploads.path, uploads.remove):
        with pytest.raises(UnknownFile):
            do(id, "bob")
    uploads.remove(id, "ann")
    with pytest.raises(UnknownFile):
        uploads.path(id, "ann")


def test_concurrent_uploads_are_bounded_across_threads(uploads):
    together = threading.Barrier(16)

    def open_upload(number: int) -> object:
        together.wait(30)
        try:
            return uploads.open("ann")
        except TooManyRequests:
            return None

    with ThreadPoolExecutor(16) as threads:
        opened = [each for each in threads.map(open_upload, range(16)) if each is not None]
    assert len(opened) == 4
    for upload in opened:
        upload.abort()
    store_file(uploads)


def test_a_file_can_be_deleted_on_a_full_disk_because_its_content_is_removed_first(uploads, db, layout, monkeypatch):
    id, remove = store_file(uploads), db.remove_file

    def needs_space(id: str, tenant: str) -> None:
        if layout.file_path(id).exists():
            raise StorageFull("full")
        remove(id, tenant)

    monkeypatch.setattr(db, "remove_file", needs_space)
    uploads.remove(id, "ann")
    assert db.file_ids() == layout.file_ids() == set()


def test_a_half_deleted_file_is_unknown_and_can_be_deleted_again(uploads, db, layout):
    id = store_file(uploads)
    layout.file_path(id).unlink()
    with pytest.raises(UnknownFile, match="being deleted"):
        uploads.path(id, "ann")
    uploads.remove(id, "ann")
    assert db.file_ids() == set()
