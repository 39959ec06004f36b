"""What `symbiosis top` prints, at any width."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from symbiosis.cli.views.statistics_view import format_bytes, format_count, render, sparkline

ROW = {
    "calls": 12_345_678, "rows": 99_999_999, "training_rows": 7_654_321, "tokens": 1_234_567, "errors": 12,
    "mean_wait_ms": 12.3456,
    "sessions": 128, "last_seen_s": 0.1, "requests": 123_456, "prompt_tokens": 98_765_432, "generated_tokens": 87_654_321,
    "training_steps": 54_321, "trained_tokens": 765_432_109, "jobs": {"running": 3, "succeeded": 12}, "adapters": ["own"],
}  # fmt: skip
SPLIT = {
    "model": "/models/a-model-with-a-long-name", "policy": "opportunistic", "uptime_s": 123_456.7, "busy_s": 2345.6,
    "calls": 12_345_678, "batches": 2_345_678, "mean_batch": 5.26, "mean_rows": 43.2, "rows": 1, "tokens": 2, "layers": 224,
    "bytes_held": 14_567_890_123, "queued": 17, "sessions": 129, "graphs": 3,
}  # fmt: skip
HOSTED = {
    "device": "cuda:0",
    "serving": {
        "running": 256, "waiting": 4096, "blocks": 123_456, "blocks_free": 23_456, "steps": 9_876_543, "rows": 99_876_543,
        "tokens": 1, "adapters": {f"tenant-{number}:an-adapter": "hash" for number in range(40)},
        "adapter_cache": {"device": 40, "device_bytes": 2_000_000_000, "host": 40, "loads": 123_456, "device_evictions": 1234},
    },
    "http": {"has_keys": True},
    "jobs": {"validating_files": 1, "queued": 20, "running": 8, "paused": 0, "succeeded": 400, "failed": 3, "cancelled": 2},
    "training": {"passes": {"passes": 123_456, "sessions": 654_321, "steps": 234_567}},
    "memory": {
        "cuda:0": {
            "base_weights": 14_567_890_123, "kv_cache": 60_000_000_000, "adapters": 2_000_000_000, "training": 3_456_789_012,
            "other": 12_345_678_901, "total": 92_370_358_036,
        },
        "cpu": {"base_weights": 0, "kv_cache": 0, "adapters": 4_000_000_000, "training": 0, "other": 3_210_000_000, "total": 7},
    },
    "history": {
        name: [float(number * number) for number in range(600)]
        for name in (
            *("uptime_s", "generated_tokens_per_s", "prompt_tokens_per_s", "trained_tokens_per_s", "split_tokens_per_s"),
            *("running", "waiting", "kv_blocks_used", "memory_bytes"),
        )
    },
}  # fmt: skip
NAMES = ("ann", "a-tenant-with-a-name-of-sixty-four-characters-and-not-one-fewer-x")


def printed(stats, width: int, before=None) -> str:
    out = io.StringIO()
    console = Console(file=out, width=width)
    console.print(render(stats, before, width))
    return out.getvalue()


@pytest.mark.parametrize("width", [80, 99, 100, 200])
@pytest.mark.parametrize("stats", [SPLIT, {**SPLIT, **HOSTED}], ids=["split", "hosted"])
def test_nothing_is_cut(stats, width):
    shown = printed({**stats, "tenants": dict.fromkeys(NAMES, ROW)}, width)
    assert max(len(line) for line in shown.splitlines()) <= width
    assert "…" not in shown
    first_column = "".join(line.split(" ")[0] for line in shown.splitlines())
    assert NAMES[1] in first_column
    for number in ("12.3M", "1.23M", *(("87.7M", "765M", "54.3k") if "http" in stats else ())):
        assert number in shown


def test_every_part_is_shown():
    shown = printed({**SPLIT, **HOSTED, "tenants": {"ann": ROW}}, 80)
    for part in (
        "split:",
        "serving: 256 running",
        "KV 100,000/123,456 blocks",
        "jobs: 1 validating_files, 20 queued, 8 running",
    ):
        assert part in shown
    for part in ("packed passes of 5.30 jobs", "adapters: 40 served", "and 20 more", "cuda:0", "KV cache", "60.0 GB", "█"):
        assert part in shown


def test_a_tenants_own_view_has_its_jobs_and_adapters():
    shown = printed({**SPLIT, "tenants": {"ann": ROW}}, 80)
    assert "jobs: 3 running, 12 succeeded" in shown
    assert "adapters: own" in shown
    assert "memory" not in shown


def test_rates_are_since_the_last_refresh():
    before = {**SPLIT, "uptime_s": 10.0, "tenants": {"ann": {**ROW, "tokens": 100, "generated_tokens": 0}}}
    now = {**SPLIT, "uptime_s": 12.0, "tenants": {"ann": {**ROW, "tokens": 120, "generated_tokens": 40}}}
    assert printed(now, 80, before).split("tokens/s")[1].splitlines()[1].split()[-1] == "30"


def test_the_observer_is_hidden_until_it_does_something():
    idle = dict.fromkeys(ROW, 0) | {"jobs": {}, "adapters": [], "sessions": 1}
    shown = printed({**SPLIT, "tenants": {"top": idle, "provider": idle, "eve": idle}}, 80)
    assert "eve" in shown
    assert "provider" not in shown
    assert "top" not in shown
    assert "provider" in printed({**SPLIT, "tenants": {"provider": {**idle, "calls": 1}}}, 80)


def test_a_tenants_name_is_no_markup():
    assert "[bold]" in printed({**SPLIT, "tenants": {"[bold]": ROW}}, 80)


def test_a_sparkline_keeps_peaks():
    assert sparkline([0, 0, 8, 4]) == "▁▁█▅"
    assert sparkline([]) == ""
    assert sparkline([0.0, 0.0]) == "▁▁"
    many = sparkline([1.0] * 300 + [100.0] + [1.0] * 299)
    assert len(many) <= 32
    assert many.count("█") == 1


@pytest.mark.parametrize(
    ("value", "shown"),
    [
        (0, "0"),
        (2.56, "2.6"),
        (999, "999"),
        (1000, "1.00k"),
        (99_960, "100k"),
        (999_950, "1.00M"),
        (12_345_678, "12.3M"),
        (4e15, "4000T"),
    ],
)
def test_counts_are_short(value, shown):
    assert format_count(value) == shown


@pytest.mark.parametrize(
    ("size", "shown"), [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (123_456_789, "123 MB"), (5e12, "5.0 TB")]
)
def test_bytes_are_short(size, shown):
    assert format_bytes(size) == shown
