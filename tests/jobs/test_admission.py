"""Admission of jobs: idempotency keys, names, inline validation."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import pytest

from symbiosis.errors import TooManyRequests
from symbiosis.jobs import admission as admission_module
from symbiosis.jobs import data_preparation
from symbiosis.jobs.admission import Admission, JobRequest
from symbiosis.jobs.errors import BadTrainingFile, KeyReused
from symbiosis.jobs.layout import result_file_id
from symbiosis.jobs.plan import Hyperparameters
from symbiosis.jobs.states import JobState
from tests.jobs.environment import ASKED, PLAN, World, run_async, until


def make_admission(world: World) -> Admission:
    preparer, store = world.supervisor._preparer, world.store
    return Admission(world.db, world.layout, preparer, world.supervisor, store, world.limits)


def make_request(world: World, key: str | None = None, digest: str = "", text: str = '{"text": "x y z"}\n') -> JobRequest:
    source = world.layout.files / "file-1"
    source.write_text(text * 20)
    fields = {"training_file": "file-1", "validation_file": None, "suffix": None, "metadata": None}
    sources = {"training_file": source}
    return JobRequest(
        tenant="ann", owner="ann", sources=sources, fields=fields, seed=1, params=Hyperparameters(), key=key, digest=digest
    )


@run_async
async def test_a_repeated_request_returns_the_result_of_the_first(world):
    """Also while the tenant is at its limit of concurrent admissions."""
    await world.start()
    admission, released, prepare = make_admission(world), asyncio.Event(), world.supervisor._preparer.prepare

    async def held(*args, **options):
        await released.wait()
        return await prepare(*args, **options)

    world.supervisor._preparer.prepare = held
    requests = [make_request(world, key) for key in "abcd"]
    pending = [asyncio.create_task(admission.admit(each)) for each in requests for _ in range(3)]
    await until(lambda: admission.count_expected_adapters("ann") == 4)  # each will add an adapter
    with pytest.raises(TooManyRequests):
        await admission.admit(make_request(world, "e"))
    with pytest.raises(KeyReused):
        await admission.admit(make_request(world, "a", "another"))
    released.set()
    created = [job.id for job in await asyncio.gather(*pending)]
    assert (admission.count_expected_adapters("ann"), admission.count_expected_adapters("bob")) == (4, 0)
    assert [created.count(id) for id in dict.fromkeys(created)] == [3] * 4
    assert (await admission.admit(requests[0])).id == (await admission.find_existing("ann", "a", "")).id == created[0]
    assert await admission.find_existing("ann", "e", "") is None, "a rejected request may be repeated"
    bad = make_request(world, "f", text="nonsense\n")
    errors = await asyncio.gather(*(admission.admit(bad) for _ in range(3)), return_exceptions=True)
    assert [str(each) for each in errors] == [str(errors[0])] * 3
    assert isinstance(errors[0], BadTrainingFile)


@run_async
async def test_a_job_gets_an_unused_name(world, monkeypatch):
    await world.start()
    world.store.added["ann", "ft-aaaaaaaa"] = Path()
    world.db.add_job("ftjob-b", "ann", "ann", "ft-bbbbbbbb", JobState.CANCELLED, ASKED, PLAN)
    tokens = iter(["a" * 24, "b" * 24, "c" * 24])
    monkeypatch.setattr(admission_module.secrets, "token_hex", lambda _: next(tokens, "d"))
    assert (await make_admission(world).admit(make_request(world))).name == "ft-cccccccc"


@pytest.mark.parametrize("timeout_s", [60.0, 0.0])
def test_slow_data_is_tokenized_after_the_job_is_accepted(world, monkeypatch, timeout_s):
    """Other requests do not wait for it."""
    monkeypatch.setattr(data_preparation, "_INLINE_TIMEOUT_S", timeout_s)

    async def play() -> None:
        _, engine = await world.start()
        job = await make_admission(world).admit(make_request(world))
        assert job.state is (JobState.QUEUED if timeout_s else JobState.VALIDATING)
        await until(lambda: engine.requests)
        assert [file.suffix for file in world.layout.job_folder(job.id).iterdir() if file.is_file()] == [".safetensors"]

    asyncio.run(play())


@run_async
async def test_a_result_file_is_removed_with_the_record_of_its_job(world):
    await world.start()
    for id in ("ftjob-old", "ftjob-new"):
        world.db.add_job(id, "ann", "ann", f"ft-{id}", JobState.SUCCEEDED, ASKED, PLAN)
        world.db.add_file(result_file_id(id), "ann", "step_metrics.csv", 4)
        world.layout.file_path(result_file_id(id)).write_text("step")
    world.limits = replace(world.limits, tenant_ended=1)
    await make_admission(world).admit(make_request(world))
    assert world.db.file_ids() == {"file-ftjob-new"}
    assert world.layout.file_ids() == {"file-ftjob-new", "file-1"}
