"""URLs of stores, and buckets that do not work."""

from __future__ import annotations

import pytest

from symbiosis.errors import BadAddress, StoreUnavailable
from symbiosis.store.artifacts import ArtifactStore
from symbiosis.store.store_url import open_object_store, resolve_url


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("relative/folder", "expected an absolute path"),
        ("s3://", "expected s3://BUCKET/PREFIX"),
        ("s3://key:secret@bucket/prefix", "credentials come from the environment"),
        ("s3://bucket/../other", "expected s3://BUCKET/PREFIX"),
        ("s3://bucket/a?versionId=1", "without a user, a query or spaces"),
        ("s3://bucket::file:///etc", "expected s3://BUCKET/PREFIX"),
        ("https://host/x", "expected a folder, or one of s3://"),
        ("memory://x", "expected a folder, or one of s3://"),
    ],
)
def test_a_wrong_url_is_an_error_without_secrets(url, says):
    with pytest.raises(BadAddress, match=says) as error:
        open_object_store(url)
    assert "secret" not in str(error.value)


def test_a_folder_is_the_same_for_other_processes(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert resolve_url("store") == str(tmp_path / "store")
    assert resolve_url("s3://bucket/prefix") == "s3://bucket/prefix"


def test_a_missing_driver_is_named(monkeypatch):
    import sys

    monkeypatch.setitem(sys.modules, "s3fs", None)
    with pytest.raises(BadAddress, match=r"needs the package s3fs: pip install 'symbiosis\[store\]'"):
        open_object_store("s3://bucket/prefix")


def claim(url: str) -> str:
    with pytest.raises(StoreUnavailable) as error:
        ArtifactStore(open_object_store(url)).claim("a cluster")
    line = str(error.value)
    assert "\n" not in line
    assert "127.0.0.1" not in line  # tenants see it
    return line


@pytest.mark.slow
def test_a_bucket_that_cannot_be_used_is_one_line(s3, monkeypatch, tmp_path):
    url = s3("there")
    assert claim("s3://not-there/prefix") == "the store's bucket does not exist: create it, or name another one"
    with monkeypatch.context() as changed:
        changed.setenv("AWS_ENDPOINT_URL", "http://127.0.0.1:1")
        assert claim(url).startswith("the store cannot be reached (Could not connect to the endpoint URL")
    with monkeypatch.context() as changed:
        for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
            changed.delenv(name)
        changed.setenv("AWS_EC2_METADATA_DISABLED", "true")
        changed.setenv("HOME", str(tmp_path))
        assert claim(url).startswith("the store has no credentials: expected them in the environment of each host")
    ArtifactStore(open_object_store(url)).claim("a cluster")
