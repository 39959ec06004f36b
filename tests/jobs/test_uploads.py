"""Uploaded files: whose they are, how many come at once, and what a full disk leaves of them."""

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
def folder(tmp_path):
    return JobsLayout(tmp_path)


@pytest.fixture
def records(folder):
    made = Database(folder.database)
    yield made
    made.close()


@pytest.fixture
def files(folder, records):
    return Uploads(folder, records, JobLimits())


def kept(files: Uploads, tenant: str = "ann") -> str:
    incoming = files.begin(tenant)
    incoming.write(b"{}")
    return incoming.keep("data.jsonl").id


def test_a_file_is_its_owners(files):
    id = kept(files)
    assert files.path(id, "ann").read_bytes() == b"{}"
    for do in (files.path, files.remove):
        with pytest.raises(UnknownFile):
            do(id, "bob")
    files.remove(id, "ann")
    with pytest.raises(UnknownFile):
        files.path(id, "ann")


def test_no_more_come_at_once_than_may_however_many_threads_ask(files):
    together = threading.Barrier(16)

    def begin(number: int) -> object:
        together.wait(30)
        try:
            return files.begin("ann")
        except TooManyRequests:
            return None

    with ThreadPoolExecutor(16) as threads:
        begun = [each for each in threads.map(begin, range(16)) if each is not None]
    assert len(begun) == 4
    for each in begun:
        each.drop()
    kept(files)


def test_on_a_full_disk_a_file_can_be_deleted_since_its_content_goes_first(files, records, folder, monkeypatch):
    id, remove = kept(files), records.remove_file

    def needs_room(id: str, tenant: str) -> None:
        if folder.file(id).exists():
            raise StorageFull("full")
        remove(id, tenant)

    monkeypatch.setattr(records, "remove_file", needs_room)
    files.remove(id, "ann")
    assert records.file_ids() == folder.file_ids() == set()


def test_a_file_that_was_half_deleted_is_no_file_and_can_be_deleted_again(files, records, folder):
    id = kept(files)
    folder.file(id).unlink()
    with pytest.raises(UnknownFile, match="being deleted"):
        files.path(id, "ann")
    files.remove(id, "ann")
    assert records.file_ids() == set()
