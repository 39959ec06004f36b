"""Tenants bring their own adapters: each is its tenant's alone, and what is no adapter harms nobody."""

from __future__ import annotations

import errno
import json
import os
import pickle
import random
import struct
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import openai
import pytest

from symbiosis.errors import QuotaExceeded, SymbiosisError
from symbiosis.server.adapter_store import (
    FIELDS,
    NOTE,
    AdapterStore,
    StoreLimits,
    kept,
    lock,
    remove_deserted,
    remove_left_over,
)
from symbiosis.server.openai.errors import BadRequest
from symbiosis.server.requests.multipart import MultipartForm
from tests.server.conftest import ANN, BOB, CHIEF

FILES = {"config": "adapter_config.json", "weights": "adapter_model.safetensors"}
COUNT = 16


def files(folder: Path) -> dict[str, bytes]:
    return {field: (folder / file).read_bytes() for field, file in FILES.items()}


def put(site, key: str, name: str, parts: dict[str, bytes]):
    form = {field: (FILES.get(field, field), content) for field, content in parts.items()}
    return site.ask("PUT", f"/v1/adapters/{name}", key, files=form)


def delete(site, key: str, name: str, owner: str | None = None):
    return site.ask("DELETE", f"/v1/adapters/{name}", key, params={} if owner is None else {"owner": owner})


def says(site, key: str, model: str, prompt: str = "the") -> str:
    made = site.client(key).completions.create(model=model, prompt=prompt, max_tokens=COUNT, temperature=0)
    return made.choices[0].text


def listed(site, key: str) -> list[tuple[str, str | None]]:
    return [(each["id"], each["owner"]) for each in site.ask("GET", "/v1/adapters", key).json()["data"]]


def test_an_adapter_is_its_tenants_alone(hotel, world):
    made = put(hotel, ANN, "mine", files(world.root / "pirate"))
    assert made.status_code == 201, made.text
    assert made.json()["owner"] == "ann"
    assert says(hotel, ANN, "mine") == says(hotel, ANN, "tiny:mine") == world.says("pirate", "the", COUNT)
    for model in ("mine", "ann:mine", "tiny:ann:mine", "tiny:mine"):
        for key in (BOB, CHIEF):
            with pytest.raises(openai.NotFoundError) as caught:
                says(hotel, key, model)
            assert "judge" not in str(caught.value)
        assert hotel.ask("GET", f"/v1/models/{model}", BOB).status_code == 404
    assert hotel.ask("GET", "/v1/models/tiny:mine", ANN).json()["parent"] == "tiny"
    assert hotel.client(ANN).models.retrieve("tiny").parent is None
    assert "mine" in [model.id for model in hotel.client(ANN).models.list()]
    assert "mine" not in [model.id for model in hotel.client(BOB).models.list()]
    assert listed(hotel, ANN) == [("judge", None), ("mine", "ann")]
    assert listed(hotel, BOB) == [("judge", None)]
    assert listed(hotel, CHIEF) == [("judge", None), ("mine", "ann")]
    assert delete(hotel, BOB, "mine").status_code == 404
    # another's of the same name is another
    assert put(hotel, BOB, "mine", files(world.root / "poet")).status_code == 201
    assert says(hotel, BOB, "mine") == world.says("poet", "the", COUNT)
    assert says(hotel, ANN, "mine") == world.says("pirate", "the", COUNT)
    assert delete(hotel, BOB, "mine").json() == {"id": "mine", "object": "adapter", "deleted": True}
    assert says(hotel, ANN, "mine") == world.says("pirate", "the", COUNT)
    assert delete(hotel, ANN, "judge").status_code == 404  # for everybody, and not hers
    assert delete(hotel, CHIEF, "mine").status_code == 404
    assert delete(hotel, CHIEF, "mine", owner="ann").status_code == 200
    assert listed(hotel, CHIEF) == [("judge", None)]


def test_whoever_uploads_and_deletes_at_once_what_is_kept_is_what_is_served(hotel, world, uploads):
    parts = files(world.root / "pirate")
    with ThreadPoolExecutor(2) as threads:
        for _ in range(20):
            coming = threads.submit(put, hotel, ANN, "mine", parts)
            while not coming.done():
                assert threads.submit(delete, hotel, ANN, "mine").result().status_code in (200, 404)
            assert coming.result().status_code == 201
            served = [name for name, owner in listed(hotel, ANN) if owner == "ann"]
            assert served == [each.name for each in kept(uploads)]
    put(hotel, ANN, "mine", parts)
    assert delete(hotel, ANN, "mine").status_code == 200
    assert not list(uploads.iterdir())


def test_the_admins_are_for_everybody_and_a_tenants_own_goes_before(hotel, world):
    assert put(hotel, CHIEF, "house", files(world.root / "cook")).json()["owner"] is None
    assert says(hotel, BOB, "house") == world.says("cook", "the", COUNT)
    assert put(hotel, BOB, "house", files(world.root / "poet")).status_code == 201
    assert says(hotel, BOB, "house") == world.says("poet", "the", COUNT)
    assert says(hotel, ANN, "house") == world.says("cook", "the", COUNT)
    assert put(hotel, BOB, "house", files(world.root / "pirate")).status_code == 201  # replaces
    assert says(hotel, BOB, "house") == world.says("pirate", "the", COUNT)
    assert delete(hotel, BOB, "house").status_code == delete(hotel, CHIEF, "house").status_code == 200
    with pytest.raises(openai.NotFoundError):
        says(hotel, BOB, "house")


def test_a_tenant_has_so_much_room_and_no_more(hotel, world, uploads):
    parts = files(world.root / "judge")
    assert [put(hotel, ANN, name, parts).status_code for name in ("one", "two", "one", "three")] == [201, 201, 201, 403]
    answer = put(hotel, ANN, "two", files(world.root / "judge") | {"weights": bytes(300_000)})
    assert (answer.status_code, answer.json()["error"]["code"]) == (403, "quota_exceeded")
    assert put(hotel, ANN, "two", parts | {"weights": bytes(3 << 20)}).status_code == 413
    assert put(hotel, BOB, "three", parts).status_code == 201  # his room is his own
    assert len(kept(uploads)) == len(list(uploads.iterdir())) == 3  # of what was refused nothing is left
    for key, name in ((ANN, "one"), (ANN, "two"), (BOB, "three")):
        assert delete(hotel, key, name).status_code == 200
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
def test_what_is_no_adapter_is_refused_and_nothing_is_left_of_it(hotel, world, uploads, kind):
    answer = put(hotel, ANN, "bad", HOSTILE[kind](files(world.root / "pirate")))
    assert answer.status_code in (400, 413), answer.text
    assert len(answer.json()["error"]["message"]) > 20
    assert str(uploads) not in answer.text
    assert not list(uploads.iterdir())
    assert says(hotel, ANN, "judge") == world.says("judge", "the", COUNT)


@pytest.mark.parametrize("name", ["..", "%2e%2e", "a:b", "a%2Fb", "-x", "x" * 200, "tiny", "%00", "é"])
def test_a_name_is_no_path(hotel, world, uploads, name):
    answer = put(hotel, ANN, name, files(world.root / "judge"))
    assert answer.status_code in (400, 403, 404, 405), answer.text
    assert not list(uploads.iterdir())


def test_a_file_name_in_the_form_leads_nowhere(hotel, world, uploads):
    parts = files(world.root / "judge")
    form = {"config": ("../../evil", parts["config"]), "weights": ("/etc/passwd", parts["weights"])}
    assert hotel.ask("PUT", "/v1/adapters/tricky", ANN, files=form).status_code == 201
    (folder,) = uploads.iterdir()
    assert sorted(file.name for file in folder.iterdir()) == sorted([*FILES.values(), NOTE])
    assert delete(hotel, ANN, "tricky").status_code == 200


def test_what_was_uploaded_is_there_after_a_restart(world, start, tmp_path):
    first = start(world.folder, keys={"ann": ANN, "bob": BOB}, uploads=tmp_path)
    assert put(first, ANN, "mine", files(world.root / "pirate")).status_code == 201
    with pytest.raises(SymbiosisError, match="another server"):
        lock(tmp_path)
    first.hosting.close()
    (tmp_path / "upload-left-over").mkdir()
    second = start(world.folder, keys={"ann": ANN, "bob": BOB}, uploads=tmp_path)
    assert says(second, ANN, "mine") == world.says("pirate", "the", COUNT)
    assert listed(second, BOB) == []
    assert not (tmp_path / "upload-left-over").exists()
    second.hosting.close()


def test_a_folder_that_cannot_be_had_is_told_with_what_it_is_for_and_its_option(world, start, tmp_path, monkeypatch):
    first = start(world.folder, uploads=tmp_path / "up")
    at = "is in use by another server: stop that one, or keep"
    for options, said in (
        ({"uploads": tmp_path / "up"}, f"up {at} adapters in another folder with --uploads FOLDER"),
        ({"jobs": tmp_path / "up-jobs"}, f"up-jobs {at} fine-tuning jobs in another folder with --jobs FOLDER"),
        ({"uploads": tmp_path / "new", "jobs": tmp_path / "new"}, "--uploads and --jobs are both .*new: give each a folder"),
        ({"jobs": Path("/dev/null/x")}, "/x cannot keep fine-tuning jobs: Not a directory; choose another with --jobs FOLDER"),
    ):
        with pytest.raises(SymbiosisError, match=said):
            first.executor.host("127.0.0.1:0", **options)
    first.hosting.close()

    def flock(handle: int, how: int) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", flock)
    with pytest.raises(SymbiosisError, match="it cannot be locked: No locks available; choose another with --uploads FOLDER"):
        lock(tmp_path / "new")


def test_folders_of_servers_that_were_killed_are_removed(tmp_path):
    for name in ("up-1", "up-2", "other"):
        (tmp_path / name).mkdir()
    (tmp_path / "up-link").symlink_to(tmp_path / "other")
    held = lock(tmp_path / "up-2")
    remove_deserted(tmp_path, "up-*")
    assert sorted(path.name for path in tmp_path.iterdir()) == ["other", "up-2", "up-link"]
    os.close(held)


def test_two_uploads_at_once_are_enough(tmp_path):
    store = AdapterStore(tmp_path, StoreLimits())
    uploads = [store.begin("ann", name) for name in "ab"]
    for name in "ac":
        with pytest.raises(SymbiosisError, match="Try again"):
            store.begin("ann", name)
    store.begin("bob", "a").drop()
    uploads[0].drop()
    store.begin("ann", "c").drop()
    remove_left_over(tmp_path)
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


def test_a_form_is_the_same_however_it_is_cut():
    rng = random.Random(5)
    content = {"config": b"{}\r\n--xy", "weights": bytes(rng.choices(b"\r\n-xyz", k=400)).replace(b"--xyz", b"")}
    body = _form(list(content.items()))
    for _ in range(300):
        assert _parsed(body, sorted(rng.choices(range(len(body)), k=rng.randrange(12)))) == content


def test_a_form_that_is_none_is_refused():
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


def test_a_client_that_leaves_in_mid_upload_leaves_nothing(hotel, uploads):
    import socket

    host, port = hotel.url.removeprefix("http://").split(":")
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
    assert json.loads(hotel.ask("GET", "/health").text) == {"status": "ok"}


def test_what_is_kept_is_on_the_disk_with_the_folders_it_lies_in(tmp_path, monkeypatch):
    """A job is recorded to have succeeded after this: its adapter must be there after a loss of power."""
    reached = []
    to_disk = os.fsync
    monkeypatch.setattr(os, "fsync", lambda handle: (reached.append(os.readlink(f"/proc/self/fd/{handle}")), to_disk(handle)))
    kept = AdapterStore(tmp_path, StoreLimits(bytes=10))
    folder = kept.place("made")
    folder.mkdir()
    for file in FIELDS.values():
        (folder / file).write_text("12345")
    kept.check_bytes("ann")
    kept.keep("ann", "mine", folder)
    assert [Path(path).name for path in reached] == ["served.json.new", "upload-made", tmp_path.name]
    with pytest.raises(QuotaExceeded):
        kept.check_bytes("ann")  # so no job of hers is begun until she removes one
    kept.check_bytes("bob")
