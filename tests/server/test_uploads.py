"""Uploaded adapters: isolation of tenants, quotas, hostile files, durability."""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import resource
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

import openai
import pytest

from symbiosis.errors import QuotaExceeded, SymbiosisError
from symbiosis.jobs.errors import StorageFull
from symbiosis.server.adapter_store import (
    FIELDS,
    METADATA,
    AdapterStore,
    StoreLimits,
    list_stored,
    lock_folder,
    remove_abandoned,
    remove_incomplete,
)
from symbiosis.server.openai.errors import BadRequest
from symbiosis.server.requests.multipart import MultipartForm
from tests.server.conftest import ANN, BOB, CHIEF

FILES = {"config": "adapter_config.json", "weights": "adapter_model.safetensors"}
COUNT = 16


def files(folder: Path) -> dict[str, bytes]:
    return {field: (folder / file).read_bytes() for field, file in FILES.items()}


def put(server, key: str, name: str, parts: dict[str, bytes]):
    form = {field: (FILES.get(field, field), content) for field, content in parts.items()}
    return server.ask("PUT", f"/v1/adapters/{name}", key, files=form)


def delete(server, key: str, name: str, owner: str | None = None):
    return server.ask("DELETE", f"/v1/adapters/{name}", key, params={} if owner is None else {"owner": owner})


def says(server, key: str, model: str, prompt: str = "the") -> str:
    made = server.client(key).completions.create(model=model, prompt=prompt, max_tokens=COUNT, temperature=0)
    return made.choices[0].text


def listed(server, key: str) -> list[tuple[str, str | None]]:
    return [(each["id"], each["owner"]) for each in server.ask("GET", "/v1/adapters", key).json()["data"]]


def test_an_adapter_belongs_to_its_tenant(keyed_server, world):
    made = put(keyed_server, ANN, "mine", files(world.root / "pirate"))
    assert made.status_code == 201, made.text
    assert made.json()["owner"] == "ann"
    assert says(keyed_server, ANN, "mine") == says(keyed_server, ANN, "tiny:mine") == world.says("pirate", "the", COUNT)
    for model in ("mine", "ann:mine", "tiny:ann:mine", "tiny:mine"):
        for key in (BOB, CHIEF):
            with pytest.raises(openai.NotFoundError) as caught:
                says(keyed_server, key, model)
            assert "judge" not in str(caught.value)
        assert keyed_server.ask("GET", f"/v1/models/{model}", BOB).status_code == 404
    assert keyed_server.ask("GET", "/v1/models/tiny:mine", ANN).json()["parent"] == "tiny"
    assert keyed_server.client(ANN).models.retrieve("tiny").parent is None
    assert "mine" in [model.id for model in keyed_server.client(ANN).models.list()]
    assert "mine" not in [model.id for model in keyed_server.client(BOB).models.list()]
    assert listed(keyed_server, ANN) == [("judge", None), ("mine", "ann")]
    assert listed(keyed_server, BOB) == [("judge", None)]
    assert listed(keyed_server, CHIEF) == [("judge", None), ("mine", "ann")]
    assert delete(keyed_server, BOB, "mine").status_code == 404
    # names are per tenant
    assert put(keyed_server, BOB, "mine", files(world.root / "poet")).status_code == 201
    assert says(keyed_server, BOB, "mine") == world.says("poet", "the", COUNT)
    assert says(keyed_server, ANN, "mine") == world.says("pirate", "the", COUNT)
    assert delete(keyed_server, BOB, "mine").json() == {"id": "mine", "object": "adapter", "deleted": True}
    assert says(keyed_server, ANN, "mine") == world.says("pirate", "the", COUNT)
    assert delete(keyed_server, ANN, "judge").status_code == 404  # shared adapters belong to the admin
    assert delete(keyed_server, CHIEF, "mine").status_code == 404
    assert delete(keyed_server, CHIEF, "mine", owner="ann").status_code == 200
    assert listed(keyed_server, CHIEF) == [("judge", None)]


def test_concurrent_uploads_and_removals_stay_consistent(keyed_server, world, uploads):
    parts = files(world.root / "pirate")
    with ThreadPoolExecutor(2) as threads:
        for _ in range(20):
            pending = threads.submit(put, keyed_server, ANN, "mine", parts)
            while not pending.done():
                assert threads.submit(delete, keyed_server, ANN, "mine").result().status_code in (200, 404)
            assert pending.result().status_code == 201
            served = [name for name, owner in listed(keyed_server, ANN) if owner == "ann"]
            assert served == [each.name for each in list_stored(uploads)]
    put(keyed_server, ANN, "mine", parts)
    assert delete(keyed_server, ANN, "mine").status_code == 200
    assert not list(uploads.iterdir())


def test_a_tenants_adapter_hides_a_shared_one(keyed_server, world):
    assert put(keyed_server, CHIEF, "house", files(world.root / "cook")).json()["owner"] is None
    assert says(keyed_server, BOB, "house") == world.says("cook", "the", COUNT)
    assert put(keyed_server, BOB, "house", files(world.root / "poet")).status_code == 201
    assert says(keyed_server, BOB, "house") == world.says("poet", "the", COUNT)
    assert says(keyed_server, ANN, "house") == world.says("cook", "the", COUNT)
    assert put(keyed_server, BOB, "house", files(world.root / "pirate")).status_code == 201  # replaces
    assert says(keyed_server, BOB, "house") == world.says("pirate", "the", COUNT)
    assert delete(keyed_server, BOB, "house").status_code == delete(keyed_server, CHIEF, "house").status_code == 200
    with pytest.raises(openai.NotFoundError):
        says(keyed_server, BOB, "house")


def test_quotas_are_per_tenant(keyed_server, world, uploads):
    parts = files(world.root / "judge")
    assert [put(keyed_server, ANN, name, parts).status_code for name in ("one", "two", "one", "three")] == [201, 201, 201, 403]
    answer = put(keyed_server, ANN, "two", files(world.root / "judge") | {"weights": bytes(300_000)})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "quota_exceeded")
    assert put(keyed_server, ANN, "two", parts | {"weights": bytes(3 << 20)}).status_code == 413
    assert put(keyed_server, BOB, "three", parts).status_code == 201  # its own quota
    assert len(list_stored(uploads)) == len(list(uploads.iterdir())) == 3  # rejected uploads leave nothing
    for key, name in ((ANN, "one"), (ANN, "two"), (BOB, "three")):
        assert delete(keyed_server, key, name).status_code == 200
    assert not list(uploads.iterdir())


def _poisoned(parts: dict[str, bytes]) -> bytes:
    """The same tensors, one of them with a NaN."""
    size = struct.unpack("<Q", parts["weights"][:8])[0]
    return parts["weights"][: 8 + size] + struct.pack("<f", float("nan")) + parts["weights"][12 + size :]


def _renamed(parts: dict[str, bytes]) -> bytes:
    size = struct.unpack("<Q", parts["weights"][:8])[0]
    return (
        parts["weights"].replace(b"base_model.model.model", b"../../../../model/etcp", 1)[: 8 + size]
        + parts["weights"][8 + size :]
    )


HOSTILE = {
    "pickle": lambda parts: parts | {"weights": pickle.dumps({"x": os.system})},
    "nan": lambda parts: parts | {"weights": _poisoned(parts)},
    "huge header": lambda parts: parts | {"weights": struct.pack("<Q", 1 << 60) + parts["weights"][8:]},
    "cut off": lambda parts: parts | {"weights": parts["weights"][:-7]},
    "empty": lambda parts: parts | {"weights": b""},
    "wrong tensor names": lambda parts: parts | {"weights": _renamed(parts)},
    "another model": lambda parts: parts | {"config": parts["config"].replace(b"q_proj", b"nosuch")},
    "config is no JSON": lambda parts: parts | {"config": b"\xff\xfe{"},
    "config is deep": lambda parts: parts | {"config": b"[" * 100_000},
    "config is large": lambda parts: parts | {"config": b" " * (2 << 20)},
    "no weights": lambda parts: {"config": parts["config"]},
    "no config": lambda parts: {"weights": parts["weights"]},
    "another file": lambda parts: parts | {"adapter_model.bin": b"x"},
}


@pytest.mark.parametrize("kind", HOSTILE)
def test_an_invalid_adapter_is_rejected_and_leaves_nothing(keyed_server, world, uploads, kind):
    answer = put(keyed_server, ANN, "bad", HOSTILE[kind](files(world.root / "pirate")))
    assert answer.status_code in (400, 413), answer.text
    assert len(answer.json()["error"]["message"]) > 20
    assert str(uploads) not in answer.text
    assert not list(uploads.iterdir())
    assert says(keyed_server, ANN, "judge") == world.says("judge", "the", COUNT)


@pytest.mark.parametrize("name", ["..", "%2e%2e", "a:b", "a%2Fb", "-x", "x" * 200, "tiny", "%00", "é"])
def test_a_name_is_not_a_path(keyed_server, world, uploads, name):
    answer = put(keyed_server, ANN, name, files(world.root / "judge"))
    assert answer.status_code in (400, 403, 404, 405), answer.text
    assert not list(uploads.iterdir())


def test_file_names_of_the_form_are_ignored(keyed_server, world, uploads):
    parts = files(world.root / "judge")
    form = {"config": ("../../evil", parts["config"]), "weights": ("/etc/passwd", parts["weights"])}
    assert keyed_server.ask("PUT", "/v1/adapters/tricky", ANN, files=form).status_code == 201
    (folder,) = uploads.iterdir()
    assert sorted(file.name for file in folder.iterdir()) == sorted([*FILES.values(), METADATA])
    assert delete(keyed_server, ANN, "tricky").status_code == 200


def test_uploads_survive_a_restart(world, start, tmp_path):
    first = start(world.folder, keys={"ann": ANN, "bob": BOB}, uploads=tmp_path)
    assert put(first, ANN, "mine", files(world.root / "pirate")).status_code == 201
    with pytest.raises(SymbiosisError, match="another server"):
        lock_folder(tmp_path)
    first.hosting.close()
    (tmp_path / "upload-left-over").mkdir()
    second = start(world.folder, keys={"ann": ANN, "bob": BOB}, uploads=tmp_path)
    assert says(second, ANN, "mine") == world.says("pirate", "the", COUNT)
    assert listed(second, BOB) == []
    assert not (tmp_path / "upload-left-over").exists()
    second.hosting.close()


def test_an_unusable_folder_is_an_error_with_its_option(world, start, tmp_path, monkeypatch):
    first = start(world.folder, uploads=tmp_path / "up")
    at, used = "cannot store", "it is in use by another server: stop it, or choose another"
    for options, said in (
        ({"uploads": tmp_path / "up"}, f"up {at} adapters: {used} with --uploads FOLDER"),
        ({"jobs": tmp_path / "up-jobs"}, f"up-jobs {at} fine-tuning jobs: {used} with --jobs FOLDER"),
        ({"uploads": tmp_path / "new", "jobs": tmp_path / "new"}, "--uploads and --jobs are both .*new: give each a folder"),
        ({"jobs": Path("/dev/null/x")}, "/x cannot store fine-tuning jobs: Not a directory; choose another with --jobs FOLDER"),
    ):
        with pytest.raises(SymbiosisError, match=said):
            first.executor.host("127.0.0.1:0", **options)
    first.hosting.close()

    def flock(handle: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(SymbiosisError, match="it cannot be locked: No locks available; choose another with --uploads FOLDER"):
        lock_folder(tmp_path / "new")


def test_folders_of_killed_servers_are_removed(tmp_path):
    for name in ("up-1", "up-2", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "up-link").symlink_to(tmp_path / "other")
    held = lock_folder(tmp_path / "up-2")
    remove_abandoned(tmp_path, "up-*")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "up-2", "up-link"]
    os.close(held)


def test_concurrent_uploads_are_bounded(tmp_path):
    store = AdapterStore(tmp_path, StoreLimits())
    uploads = [store.open_upload("ann", name) for name in "ab"]
    for name in "ac":
        with pytest.raises(SymbiosisError, match="Try again"):
            store.open_upload("ann", name)
    store.open_upload("bob", "a").abort()
    uploads[0].abort()
    store.open_upload("ann", "c").abort()
    remove_incomplete(tmp_path)
    assert not list(tmp_path.iterdir())


def _form(parts: list[tuple[str, bytes]], boundary: str = "xyz") -> bytes:
    made = b""
    for name, content in parts:
        made += (
            f'--{boundary}\r\nContent-Disposition: form-data; name="{name}"; filename="a"\r\n\r\n'.encode() + content + b"\r\n"
        )
    return made + f"--{boundary}--\r\n".encode()


def _parsed(body: bytes, cuts: list[int]) -> dict[str, bytes]:
    form, found = MultipartForm("multipart/form-data; boundary=xyz", ["config", "weights"]), {"config": b"", "weights": b""}
    for start, end in zip([0, *cuts], [*cuts, len(body)], strict=True):
        for name, piece in form.feed(body[start:end]):
            found[name] += piece
    form.finish()
    return found


def test_a_form_parses_equally_in_any_chunks():
    rng = random.Random(5)
    content = {"config": b"{}\r\n--xy", "weights": bytes(rng.choices(b"\r\n-xyz", k=400)).replace(b"--xyz", b"")}
    body = _form(list(content.items()))
    for _ in range(300):
        assert _parsed(body, sorted(rng.choices(range(len(body)), k=rng.randrange(12)))) == content


def test_an_invalid_form_is_rejected():
    good = _form([("config", b"{}"), ("weights", b"w")])
    rng = random.Random(6)
    for _ in range(2000):
        bad = bytearray(good)
        for _ in range(rng.randrange(1, 4)):
            at = rng.randrange(len(bad))
            bad[at : at + rng.randrange(3)] = rng.randbytes(rng.randrange(3))
        try:
            _parsed(bytes(bad), [])
        except BadRequest:
            continue
    for bad in (
        b"",
        b"x" + good,
        good + b"x",
        good[:-5],
        _form([("config", b"")] * 2),
        _form([("other", b"")]),
        b"--xyz" + b"h" * 9000,
    ):
        with pytest.raises(BadRequest):
            _parsed(bad, [])
    for kind in ("", "application/json", "multipart/form-data", f"multipart/form-data; boundary={'x' * 99}"):
        with pytest.raises(BadRequest):
            MultipartForm(kind, ["config"])


def test_a_disconnect_during_an_upload_leaves_nothing(keyed_server, uploads):
    import socket

    host, port = keyed_server.url.removeprefix("http://").split(":")
    with socket.create_connection((host, int(port))) as raw:
        head = f"PUT /v1/adapters/x HTTP/1.1\r\nHost: h\r\nAuthorization: Bearer {ANN}\r\nContent-Length: 99999\r\n"
        raw.sendall(
            head.encode() + b"Content-Type: multipart/form-data; boundary=xyz\r\n\r\n" + _form([("config", b"{}")])[:-9]
        )
        wait = threading.Event()
        for _ in range(600):
            if list(uploads.iterdir()) or wait.wait(0.05):
                break
        assert list(uploads.iterdir())
    for _ in range(600):
        if not list(uploads.iterdir()) or wait.wait(0.05):
            break
    assert not list(uploads.iterdir())
    assert json.loads(keyed_server.ask("GET", "/health").text) == {"status": "ok"}


@contextmanager
def full_disk(server):
    """No file of an HTTP process may have more than a few bytes: its writes fail as on a full disk."""
    pids = server.hosting._door.processes.pids
    before = [resource.prlimit(pid, resource.RLIMIT_FSIZE) for pid in pids]
    try:
        for pid, (_, hard) in zip(pids, before, strict=True):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, (1000, hard))
        yield
    finally:
        for pid, limits in zip(pids, before, strict=True):
            resource.prlimit(pid, resource.RLIMIT_FSIZE, limits)


def test_a_full_disk_ends_uploads_and_blocks_none_after_it(keyed_server, world, uploads):
    made = files(world.root / "pirate")
    with full_disk(keyed_server):
        for _ in range(4):
            refused = put(keyed_server, ANN, "mine", made)
            assert (refused.status_code, refused.json()["error"]["code"]) == (507, "storage_full"), refused.text
    assert ("mine", "ann") not in listed(keyed_server, ANN)
    assert not list(uploads.glob("upload-*"))
    assert put(keyed_server, ANN, "mine", made).status_code == 201
    assert delete(keyed_server, ANN, "mine").status_code == 200


def test_an_adapter_that_cannot_be_stored_is_not_served(tmp_path):
    store = AdapterStore(tmp_path, StoreLimits())
    upload = store.open_upload("ann", "mine")
    for field in FIELDS:
        upload.write(field, b"12345")
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10, hard))
    try:
        with pytest.raises(StorageFull):
            upload.sync()  # before the engine is asked to serve it
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    upload.abort()
    assert not list(tmp_path.iterdir())
    store.open_upload("ann", "mine").abort()


def test_a_stored_adapter_is_synced_with_its_folders(tmp_path, monkeypatch):
    """A job succeeds after this: its adapter must survive a power loss."""
    synced = []
    fsync = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (synced.append(os.readlink(f"/proc/self/fd/{handle}")), fsync(handle)))
    store = AdapterStore(tmp_path, StoreLimits(bytes=10))
    folder = Path(store.new_location("made"))
    folder.mkdir()
    for file in FIELDS.values():
        (folder / file).write_text("12345")
    store.check_bytes("ann")
    store.add("ann", "mine", str(folder))
    metadata, *folders = [Path(path).name for path in synced]
    assert metadata.startswith(".served.json.")
    assert folders == ["upload-made", "upload-made", tmp_path.name]
    with pytest.raises(QuotaExceeded):
        store.check_bytes("ann")
    store.check_bytes("bob")
