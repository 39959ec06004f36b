"""Two nodes that share a store, and no folder: each has its own cache, and engines find there what others have written."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from symbiosis.app.cluster.cluster_host import ClusterHost
from symbiosis.errors import StoreUnavailable
from symbiosis.store.artifacts import ArtifactStore
from symbiosis.store.store_url import open_object_store
from tests.app.cluster.running_cluster import ADMIN, KEYS, RunningCluster, engine_config
from tests.app.cluster.test_cluster import complete, save_lora, upload
from tests.store.conftest import make_bucket, s3_server  # noqa: F401 - a fixture

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]
STEPS = 400
SECRET = "a secret of this test"


class Nodes:
    """A front door with one engine, and a second node with another."""

    def __init__(self, folder: Path, url: str) -> None:
        self.folder, self.url = folder, url
        self.store = ArtifactStore(open_object_store(url))
        self.caches = {name: folder / f"cache-{name}" for name in ("one", "two")}
        before = os.environ.get("SYMBIOSIS_CACHE")
        os.environ["SYMBIOSIS_CACHE"] = str(self.caches["one"])
        try:
            self.first = RunningCluster(folder, 1, host={"store": url, "secret": SECRET, "uploads": folder / "local"})
        finally:
            os.environ.pop("SYMBIOSIS_CACHE")
            if before is not None:
                os.environ["SYMBIOSIS_CACHE"] = before
        self.secret = folder / "secret"
        self.secret.write_text(SECRET)
        self.secret.chmod(0o600)
        self.joined = self.join()
        self.is_closed = False

    def join(self) -> subprocess.Popen[bytes]:
        """`symbiosis cluster join`, as on another host: with a cache of its own. It learns of the store from the director."""
        where = [self.first.host.director.messages.removeprefix("tcp://"), "--secret-file", str(self.secret), "--engines", "1"]
        options = ["--model", str(self.first.model), "--threads", "1", "--adapter-gb", "0.01", "--adapter-host-gb", "0.01"]
        environment = {**os.environ, "SYMBIOSIS_CACHE": str(self.caches["two"])}
        process = subprocess.Popen([sys.executable, "-m", "symbiosis", "cluster", "join", *where, *options], env=environment)
        self.first.until(lambda: len(self.first.engines()) == 2 or process.poll() is not None)
        assert process.poll() is None
        return process

    @property
    def own(self) -> str:
        """The engine of the first node."""
        (name,) = self.first.host.launcher.pids
        return name

    @property
    def other(self) -> str:
        (name,) = self.first.engines().keys() - self.first.host.launcher.pids.keys()
        return name

    def cached(self, node: str, part: str) -> list[str]:
        found = self.caches[node].glob(f"store/*/artifacts/{part}+*/manifest.json")
        return [str(path.parent) for path in found]

    def close(self) -> None:
        if not self.is_closed:
            self.is_closed = True
            self.joined.terminate()
            self.joined.wait(60)
            self.first.close()


@pytest.fixture(scope="module", params=["folder", pytest.param("s3", marks=pytest.mark.slow)])
def nodes(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Nodes]:
    folder = tmp_path_factory.mktemp("nodes")
    with pytest.MonkeyPatch.context() as environment:
        if request.param == "s3":
            url = make_bucket(request.getfixturevalue("s3_server"), environment, "nodes")
        else:
            url = str(folder / "store")
            Path(url).mkdir()
        made = Nodes(folder, url)
        yield made
        made.close()


def start_job(nodes: Nodes, key: str, **more: object):
    client = nodes.first.client(key)
    lines = [json.dumps({"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo" * 8}]})] * 12
    data = client.files.create(file=("chats.jsonl", "\n".join(lines).encode()), purpose="fine-tune")
    return client.fine_tuning.jobs.create(
        model="tiny",
        training_file=data.id,
        validation_file=data.id,
        suffix="tuned",
        hyperparameters={"n_steps": STEPS, "checkpoint_every": 5, "batch_size": 4, **more},
    )


def wait_for_step(nodes: Nodes, job: str, step: int) -> None:
    client = nodes.first.client(KEYS["ann"])
    nodes.first.until(lambda: len(client.fine_tuning.jobs.checkpoints.list(job).data) >= step)


def finish(nodes: Nodes, id: str):
    client = nodes.first.client(KEYS["ann"])
    nodes.first.until(lambda: client.fine_tuning.jobs.retrieve(id).status in ("succeeded", "failed"))
    job = client.fine_tuning.jobs.retrieve(id)
    assert job.status == "succeeded", job.error
    events = list(client.fine_tuning.jobs.list_events(id, limit=100))  # all pages
    steps = [event.data["step"] for event in events if event.type == "metrics" and "train_loss" in event.data]
    assert sorted(steps) == list(range(1, STEPS + 1))  # none is lost or repeated
    return job, [event.message for event in events]


def test_an_upload_appears_on_each_node_that_needs_it(nodes, tmp_path):
    save_lora(nodes.first.model, tmp_path / "one", seed=1)
    ann = nodes.first.client(KEYS["ann"])
    base = complete(ann, "tiny", "Hello")
    upload(nodes.first, KEYS["ann"], tmp_path / "one", "mine")
    first = complete(ann, "mine", "Hello")
    assert first != base
    assert len(nodes.store.list_artifacts("adapters")) == 1
    registry = json.loads((nodes.folder / "state" / "adapters.json").read_text())
    assert registry["ann:mine"]["folder"].startswith("store:adapters/")
    file = nodes.first.ask("GET", "/v1/adapters/mine/adapter_model.safetensors", KEYS["ann"])
    assert file.content == (tmp_path / "one" / "adapter_model.safetensors").read_bytes()
    name = nodes.own
    os.kill(nodes.first.host.launcher.pids[name], signal.SIGKILL)  # the other node answers meanwhile
    nodes.first.until(lambda: name not in nodes.first.engines())
    assert complete(ann, "mine", "Hello") == first
    assert nodes.cached("two", "adapters")
    nodes.first.until(lambda: len(nodes.first.engines()) == 2)
    assert nodes.first.ask("DELETE", "/v1/adapters/mine", KEYS["ann"]).status_code == 200
    assert nodes.store.list_artifacts("adapters") == []


def test_a_job_whose_node_died_resumes_on_the_other(nodes):
    """The first run is on the second node, which is killed with its engine; the first node goes on."""
    first = nodes.first
    while True:
        job = start_job(nodes, KEYS["ann"])
        first.until(lambda: any(engine["jobs"] for engine in first.engines().values()))
        if first.engines()[nodes.other]["jobs"]:
            break
        first.client(KEYS["ann"]).fine_tuning.jobs.cancel(job.id)
        first.until(lambda: not any(engine["jobs"] for engine in first.engines().values()))
    wait_for_step(nodes, job.id, 2)
    nodes.joined.kill()  # its engine ends with it
    nodes.joined.wait()
    assert first.client(KEYS["ann"]).fine_tuning.jobs.retrieve(job.id).status == "running"
    first.until(lambda: len(first.engines()) == 1)
    done, messages = finish(nodes, job.id)
    assert any("resumed after step" in message for message in messages), messages
    nodes.joined = nodes.join()
    ann = first.client(KEYS["ann"])
    assert len({complete(ann, done.fine_tuned_model, "hi") for _ in range(6)}) == 1
    first.until(lambda: nodes.store.list_artifacts("jobs") == [])  # data sets and checkpoints are gone
    assert len(nodes.store.list_artifacts("adapters")) == 1


def test_a_job_waits_while_the_store_is_gone(nodes):
    if nodes.url.startswith("s3://"):
        pytest.skip("a folder can be moved away")
    job = start_job(nodes, KEYS["ann"])
    wait_for_step(nodes, job.id, 2)
    away = nodes.folder / "away"
    shutil.move(nodes.url, away)  # as a mount that is lost
    time.sleep(3)
    refused = nodes.first.ask("PUT", "/v1/adapters/late", KEYS["ann"], files=_files(nodes))
    shutil.move(away, nodes.url)
    assert refused.status_code == 503
    assert refused.json()["error"]["code"] == "store_unavailable"
    assert "the store's folder is not there" in refused.json()["error"]["message"]
    _, messages = finish(nodes, job.id)
    assert not any("resumed" in message for message in messages)  # it waited, and lost nothing
    assert nodes.first.ask("PUT", "/v1/adapters/late", KEYS["ann"], files=_files(nodes)).status_code == 201


def _files(nodes: Nodes) -> dict[str, bytes]:
    folder = nodes.folder / "late"
    if not folder.exists():
        save_lora(nodes.first.model, folder, seed=5)
    names = {"config": "adapter_config.json", "weights": "adapter_model.safetensors"}
    return {field: (folder / file).read_bytes() for field, file in names.items()}


def test_the_store_of_another_cluster_is_refused(nodes, tmp_path):
    with pytest.raises(StoreUnavailable, match=r"--store .*: the store belongs to another cluster"):
        ClusterHost("127.0.0.1:0", engine=engine_config(tmp_path), engines=1, state=tmp_path / "state", store=nodes.url)


def test_a_new_front_door_with_an_empty_disk_serves_stored_adapters(nodes, tmp_path):
    save_lora(nodes.first.model, tmp_path / "one", seed=2)
    upload(nodes.first, KEYS["ann"], tmp_path / "one", "lasting")
    expected = complete(nodes.first.client(KEYS["ann"]), "lasting", "Hello")
    nodes.close()
    save_lora(nodes.first.model, tmp_path / "given", seed=3)
    second = RunningCluster(
        tmp_path / "second",
        1,
        host={"store": nodes.url, "secret": SECRET, "uploads": tmp_path / "local", "adapters": {"given": tmp_path / "given"}},
    )
    try:
        assert complete(second.client(KEYS["ann"]), "lasting", "Hello") == expected
        listed = second.ask("GET", "/v1/adapters", ADMIN).json()["data"]
        assert {"lasting", "given"} <= {each["id"] for each in listed}
        assert complete(second.client(KEYS["bob"]), "given", "Hello")
    finally:
        second.close()
