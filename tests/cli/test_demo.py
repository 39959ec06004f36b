"""The demo: it tells the truth when something did not hold, and it holds on the real model."""

from __future__ import annotations

import json
import os
import subprocess
import sys

import pytest
from rich.console import Console

from symbiosis.cli.demo import _DATA, TENANTS
from symbiosis.cli.demo_report import DemoFailed, Run, plot, report, view, write
from symbiosis.cli.local_finetune import read_samples


def finished() -> Run:
    """A run as it should be."""
    run = Run(TENANTS, steps=4)
    for tenant in TENANTS:
        run.take({"who": tenant.name, "what": "before", "text": "plain"})
    for number, loss in enumerate((4.0, 3.0, 2.0, 1.0)):
        for tenant in TENANTS:
            figures = {"loss": loss, "tokens_per_s": 9.0, "step": number + 1}
            run.take({"who": tenant.name, "what": "step", "at": run.started + number, **figures})
    for number in range(3):
        counts = {"calls": 30 * number, "batches": 20 * number, "tokens": 50 * number, "uptime_s": float(number)}
        figures = {"mean_batch": 1.5, "mean_rows": 7.0, "bytes_held": 400_000_000}
        run.poll({**counts, **figures}, {"executor": os.getpid(), **dict.fromkeys((t.name for t in TENANTS), os.getpid())})
    for tenant in TENANTS:
        run.take({"who": tenant.name, "what": "after", "text": "tuned", "tokens_per_s": 9.0, "weights": 1000})
        run.take({"who": "plain", "what": "text", "tenant": tenant.name, "text": "tuned"})
    run.take({"who": "plain", "what": "copy", "runtime": 1, "weights": 500_000_000, "rss": 900_000_000, "file": 600_000_000})
    run.take({"who": "chatter", "what": "said", "question": "why?", "text": "so", "answers": 2})
    return run


def broken(run: Run) -> list[str]:
    return [what for passed, what in run.checks() if not passed]


def test_a_run_as_it_should_be_holds():
    assert broken(finished()) == []
    assert len(finished().checks()) == 9


def test_a_loss_that_did_not_fall_is_reported():
    run = finished()
    run.losses["kettle"] = [(0.0, 2.0), (1.0, 2.5)]
    assert broken(run) == ["kettle: loss fell (2.00 → 2.50)"]


def test_an_answer_that_did_not_change_is_reported():
    run = finished()
    run.before["pirate"] = "tuned"
    assert broken(run) == ["pirate: the answer changed"]


def test_a_text_that_differs_without_symbiosis_is_reported():
    run = finished()
    run.plain["gardener"] = "something else"
    assert [what.partition(" with")[0] for what in broken(run)] == ["gardener: plain transformers + PEFT gives the same text"]


def test_a_tenant_that_failed_ends_the_demo():
    with pytest.raises(DemoFailed, match="pirate failed: out of rum"):
        finished().take({"who": "pirate", "what": "failed", "reason": "out of rum"})


def test_the_figures_can_be_seen_live_at_the_end_as_json_and_as_a_plot(tmp_path):
    console, run = Console(width=160, record=True, file=open(os.devnull, "w")), finished()  # noqa: SIM115
    console.print(view(Run(TENANTS, steps=4)), view(run), report(run))
    shown = console.export_text()
    assert "mean batch 1.50" in shown
    assert "1,500 MB" in shown  # three copies of 500 MB
    assert "2,700 MB" in shown  # three processes of 900 MB …
    assert "900 MB" in shown  # … of which 300 MB each are their own
    assert run.polls[0]["mean_batch"] == 1.5
    write(run, tmp_path / "results.json")
    assert json.loads((tmp_path / "results.json").read_text())["tenants"]["pirate"]["after"] == "tuned"
    plot(run, tmp_path / "demo.png")
    assert (tmp_path / "demo.png").read_bytes().startswith(b"\x89PNG")


@pytest.mark.parametrize("tenant", TENANTS, ids=lambda tenant: tenant.name)
def test_the_data_is_sound_and_does_not_hold_the_question(tenant):
    samples = read_samples(_DATA / f"{tenant.name}.jsonl")
    assert len(samples) >= 12
    assert all(tenant.question != message.content for sample in samples for message in sample.messages)


@pytest.mark.slow
@pytest.mark.real
@pytest.mark.timeout(900)
def test_the_demo_holds_on_the_real_model(tmp_path):
    """Losses fell, answers changed, adapters speak alike in plain transformers + PEFT: else it exits with 1."""
    # the tests' own cache is empty: the real model is kept in the user's
    environment = {name: value for name, value in os.environ.items() if name != "SYMBIOSIS_CACHE"}
    done = subprocess.run(
        [sys.executable, "-m", "symbiosis", "demo", "--out", str(tmp_path), "--steps", "6"],
        capture_output=True,
        text=True,
        env={**environment, "COLUMNS": "160"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    results = json.loads((tmp_path / "results.json").read_text())
    assert all(verdict["held"] for verdict in results["verdicts"])
    assert results["chat_answers"] >= 1
    assert (tmp_path / "demo.png").stat().st_size > 10_000
