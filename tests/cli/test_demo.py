"""The demo: its report names every claim that did not hold, and all hold on the real model."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from symbiosis.cli.demo import TENANTS
from symbiosis.cli.demo_data import DATA_SETS, find_data
from symbiosis.cli.demo_report import DemoFailed, Run, plot, report, view, write
from symbiosis.cli.local_finetune import read_samples
from symbiosis.cli.process_memory import ProcessMemory
from symbiosis.errors import SymbiosisError

MB = 1_000_000


def job(status: str = "succeeded", **more: object) -> dict[str, object]:
    return {"status": status, "progress": {"step": 4, "train_loss": 1.0, "tokens_per_s": 9.0}, "error": None, **more}


def finished() -> Run:
    """A run as it should be."""
    run = Run(TENANTS, steps=4, seconds=30.0, training_s=6.0)
    run.take_jobs({tenant.name: job() for tenant in TENANTS})
    for tenant in TENANTS:
        run.before[tenant.name], run.after[tenant.name] = "plain", "tuned"
        run.losses[tenant.name] = [4.0, 3.0, 2.0, 1.0]
        run.adapter_bytes[tenant.name] = 2 * MB
        run.take_plain({"what": "text", "who": tenant.name, "text": "tuned"})
    for own in (700, 900, 800):
        run.measure_server(ProcessMemory(own * MB, 600 * MB))
    run.measure_plain(ProcessMemory(300 * MB, 600 * MB))
    run.take_plain({"what": "chat"})
    run.measure_plain(ProcessMemory(500 * MB, 600 * MB))
    run.take_plain({"what": "plain", "steps_per_s": 1.25})
    run.measure_plain(ProcessMemory(9000 * MB, 600 * MB))  # while texts are compared: not counted
    run.replies.append({"question": "why?", "text": "so", "first_s": 0.3, "total_s": 1.5})
    return run


def broken(run: Run) -> list[str]:
    return [what for passed, what in run.checks() if not passed]


def test_a_run_as_it_should_be_holds():
    assert finished().has_trained
    assert broken(finished()) == []
    assert len(finished().checks()) == 10


def test_a_loss_that_did_not_fall_is_reported():
    run = finished()
    run.losses["kettle"] = [2.0, 2.5]
    assert broken(run) == ["kettle: loss fell (2.00 → 2.50)"]


def test_an_answer_that_did_not_change_is_reported():
    run = finished()
    run.before["pirate"] = "tuned"
    assert broken(run) == ["pirate: the answer changed"]


def test_a_text_that_differs_without_symbiosis_is_reported():
    run = finished()
    run.plain["gardener"] = "something else"
    assert [what.partition(" with")[0] for what in broken(run)] == ["gardener: plain transformers + PEFT gives the same text"]


def test_a_server_that_needs_more_memory_than_plain_processes_is_reported():
    run = finished()
    run.measure_server(ProcessMemory(1801 * MB, 600 * MB))
    assert broken(run) == ["memory: one server needs less than 4 plain processes"]


def test_a_job_a_chat_or_a_plain_process_that_failed_ends_the_demo():
    with pytest.raises(DemoFailed, match="pirate failed: out of rum"):
        finished().take_jobs({"pirate": job("failed", error={"message": "out of rum"})})
    with pytest.raises(DemoFailed, match="plain failed: out of memory"):
        finished().take_plain({"what": "failed", "who": "plain", "reason": "out of memory"})
    run = finished()
    run.failure = "chatter failed: refused"
    with pytest.raises(DemoFailed, match="chatter failed: refused"):
        run.take_jobs(run.jobs)


def test_the_figures_can_be_seen_live_at_the_end_as_json_and_as_a_plot(tmp_path):
    console, run = Console(width=160, record=True, file=open(os.devnull, "w")), finished()  # noqa: SIM115
    console.print(view(Run(TENANTS, steps=4)), view(run), report(run))
    shown = console.export_text()
    assert "1,500 MB" in shown  # the peak of the server: 900 of its own and 600 of files
    assert "2,400 MB" in shown  # plain processes: three of 500, one of 300, and the files once
    assert "2.00 optimizer steps/s of 3 tenants together" in shown
    assert "1.25 of one plain process" in shown
    write(run, tmp_path / "results.json")
    figures = json.loads((tmp_path / "results.json").read_text())
    assert figures["tenants"]["pirate"]["after"] == "tuned"
    assert figures["memory_bytes"]["plain_processes"] == {"own": 1800 * MB, "files": 600 * MB}
    plot(run, tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("tenant", TENANTS, ids=lambda tenant: tenant.name)
def test_the_data_is_sound_and_does_not_hold_the_question(tenant):
    samples = read_samples(find_data(Path(tenant.name)))
    assert len(samples) >= 12
    assert all(tenant.question != message.content for sample in samples for message in sample.messages)


def test_a_data_set_is_found_by_its_name_and_a_file_comes_first(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert all(find_data(Path(name)).is_file() for name in DATA_SETS)
    (tmp_path / "pirate").write_text("{}")
    assert find_data(Path("pirate")) == Path("pirate")
    with pytest.raises(SymbiosisError, match=r"there is no file chats.jsonl.*pirate, kettle, gardener"):
        find_data(Path("chats.jsonl"))


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.timeout(900)
def test_the_demo_holds_on_the_real_model(tmp_path):
    """Losses fell, answers changed, adapters give the same text in plain transformers + PEFT: else it exits with 1."""
    # the tests' own cache is empty: the real model is kept in the user's
    environment = {name: value for name, value in os.environ.items() if name != "SYMBIOSIS_CACHE"}
    done = subprocess.run(
        [sys.executable, "-m", "symbiosis", "demo", "--out", str(tmp_path), "--steps", "8"],
        capture_output=True,
        text=True,
        env={**environment, "COLUMNS": "160"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert all(verdict["held"] for verdict in results["verdicts"])
    assert results["chat_replies"]
    assert (tmp_path / "demo.png").stat().st_size > 10_000
