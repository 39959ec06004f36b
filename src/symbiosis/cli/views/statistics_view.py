"""Statistics of a server as text: what `symbiosis top` prints."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.console import Group, RenderableType
from rich.markup import escape
from rich.table import Table
from rich.text import Text

_BARS = "▁▂▃▄▅▆▇█"
_MAX_BARS = 32
_WIDE = 100
"""Columns of a terminal that has room for all columns of the table."""
_MAX_ADAPTERS = 20
_OBSERVERS = ("top", "provider")
"""Tenants with the session of this command."""
_OWNERS = {
    "base_weights": "base weights",
    "packed_weights": "packed weights",
    "kv_cache": "KV cache",
    "adapters": "adapters",
    "training": "training",
    "other": "other",
}
_SERIES = {
    "generated_tokens_per_s": "generated tokens/s",
    "prompt_tokens_per_s": "prompt tokens/s",
    "trained_tokens_per_s": "trained tokens/s",
    "split_tokens_per_s": "split tokens/s",
    "running": "running",
    "waiting": "waiting",
    "kv_blocks_used": "KV blocks used",
    "memory_bytes": "memory",
}
_TOKENS = ("tokens", "prompt_tokens", "generated_tokens", "trained_tokens")
"""Tokens of a tenant over all ways in."""
Stats = Mapping[str, Any]


def render(stats: Stats, before: Stats | None, width: int) -> RenderableType:
    """Rates are since `before`, or since the start. `width` is that of the terminal."""
    summary = (Text(line) for line in _summary(stats))
    return Group(*summary, Text(), tenant_table(stats, before, width), Text(), *_details(stats))


def _summary(stats: Stats) -> Iterator[str]:
    yield " · ".join(
        [
            Path(stats["model"]).name,
            *([stats["device"]] if "device" in stats else []),
            *([stats["policy"]] if "policy" in stats else []),
            f"up {stats['uptime_s']:,.0f} s",
            *([f"{format_bytes(stats['bytes_held'])} held"] if "bytes_held" in stats else []),
        ]
    )
    if "batches" in stats:
        errors = sum(row["errors"] for row in stats["tenants"].values())
        yield f"split: {stats['calls']:,} calls in {stats['batches']:,} batches, mean batch {stats['mean_batch']:.2f}"
        busy = 100 * stats["busy_s"] / max(1e-9, stats["uptime_s"])
        yield f"       {stats['mean_rows']:,.0f} rows each · {stats['queued']} queued · busy {busy:.0f} % · {errors} errors"
    if serving := stats.get("serving"):
        used, rows = serving["blocks"] - serving["blocks_free"], serving["rows"] / max(1, serving["steps"])
        yield f"serving: {serving['running']} running · {serving['waiting']} waiting · KV {used:,}/{serving['blocks']:,} blocks"
        if host := serving.get("host_blocks"):
            moved = f"{serving['host_blocks_stored']:,} stored, {serving['host_blocks_restored']:,} restored"
            yield f"         host {serving['host_blocks_used']:,}/{host:,} blocks · {moved}"
        yield f"         {serving['steps']:,} steps, {rows:,.1f} rows each"


def tenant_table(stats: Stats, before: Stats | None, width: int) -> Table:
    """One row for each tenant, over the ways in. A narrow terminal gets fewer columns, and names are folded."""
    seconds = max(1e-9, stats["uptime_s"] - (before["uptime_s"] if before else 0.0))
    rows = {tenant: row for tenant, row in sorted(stats["tenants"].items()) if tenant not in _OBSERVERS or _is_active(row)}
    is_hosted = bool(stats.get("http")) or any(row.get("requests") or row.get("jobs") for row in rows.values())
    is_wide = width >= _WIDE or not is_hosted
    table = Table(box=None, padding=(0, 1, 0, 0), pad_edge=False)
    table.add_column("tenant", overflow="fold", min_width=6, vertical="bottom")
    for header in _headers(is_hosted, is_wide):
        table.add_column(header, justify="right", overflow="fold")
    for tenant, row in rows.items():
        old = (before or {}).get("tenants", {}).get(tenant, {})
        rate = sum(row.get(name, 0) - old.get(name, 0) for name in _TOKENS) / seconds
        table.add_row(escape(tenant) or "(no key)", *_cells(row, is_hosted, is_wide), format_count(rate))
    return table


def _is_active(row: Stats) -> bool:
    return any(row.get(name) for name in ("calls", "errors", "requests", "jobs"))


def _headers(is_hosted: bool, is_wide: bool) -> list[str]:
    split = ["split\nsessions", "\ncalls", "\ntokens", "\nwait ms", "\nerrors"] if is_wide else ["split\ncalls", "\ntokens"]
    hosted = ["HTTP\nrequests", "\nprompt", "\ngenerated", "jobs\nopen", "\nsteps", "\ntrained"]
    return [*split, *(hosted if is_hosted else ["\ntraining rows"]), "all\ntokens/s"]


def _cells(row: Stats, is_hosted: bool, is_wide: bool) -> list[str]:
    cells = [format_count(row["calls"]), format_count(row["tokens"])]
    if is_wide:
        cells = [str(row["sessions"]), *cells, f"{row['mean_wait_ms']:.2f}", format_count(row["errors"])]
    if not is_hosted:
        return [*cells, format_count(row["training_rows"])]
    is_open = ("validating_files", "queued", "running", "paused")
    jobs = sum(count for state, count in row["jobs"].items() if state in is_open)
    hosted = ("requests", "prompt_tokens", "generated_tokens")
    return [
        *cells,
        *(format_count(row[name]) for name in hosted),
        format_count(jobs),
        *(format_count(row[name]) for name in ("training_steps", "trained_tokens")),
    ]


def _details(stats: Stats) -> Iterator[RenderableType]:
    rows = stats["tenants"].values()
    counts = stats["jobs"] if "jobs" in stats else next((row.get("jobs", {}) for row in rows), {})  # a tenant's own
    if "engines" in stats:
        yield engine_table(stats)
        yield Text()
    if jobs := [f"{count} {state}" for state, count in counts.items() if count]:
        yield Text(f"jobs: {', '.join(jobs)}")
    if training := stats.get("training"):
        passes = training["passes"]
        sessions = passes["sessions"] / max(1, passes["passes"])
        yield Text(f"training: {passes['steps']:,} steps in {passes['passes']:,} packed passes of {sessions:.2f} jobs")
    if serving := stats.get("serving"):
        for name, model in serving.get("models", {}).items():
            yield Text(f"model {name}: {model['requests']:,} completions · {model['tokens']:,} tokens")
        yield from _adapters(serving)
    elif names := [name for row in rows for name in row.get("adapters", ())]:
        yield _list_names("adapters: ", names)
    if memory := stats.get("memory"):
        yield Text()
        yield memory_table(memory)
    if history := stats.get("history"):
        yield from _history(history)


def engine_table(stats: Stats) -> Table:
    """One row for each engine of a cluster."""
    cluster = stats["cluster"]
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False, caption_justify="left")
    table.add_column("engine", overflow="fold")
    for header in ("status", "running", "waiting", "KV blocks", "adapters", "jobs", "tokens"):
        table.add_column(header, justify="right")
    for name, row in sorted(stats["engines"].items()):
        used = f"{row['blocks'] - row['blocks_free']:,}/{row['blocks']:,}"
        counts = (format_count(row[field]) for field in ("running", "waiting"))
        more = (format_count(row[field]) for field in ("adapters", "jobs", "tokens"))
        table.add_row(escape(name), row["status"], *counts, used, *more)
    table.caption = f"{cluster['waiting']} requests wait for an engine · {cluster['migrations']} went on at another one"
    return table


def _adapters(serving: Stats) -> Iterator[RenderableType]:
    cache = serving["adapter_cache"]
    yield Text(
        f"adapters: {len(serving['adapters'])} served · {cache['device']} on the device "
        f"({format_bytes(cache['device_bytes'])}) · {cache['host']} on the host\n"
        f"          {cache['loads']} loads · {cache['device_evictions']} evictions"
    )
    if serving["adapters"]:
        yield _list_names("          ", sorted(serving["adapters"]))


def _list_names(head: str, names: Sequence[str]) -> Text:
    more = f" and {len(names) - _MAX_ADAPTERS} more" if len(names) > _MAX_ADAPTERS else ""
    return Text(f"{head}{', '.join(names[:_MAX_ADAPTERS])}{more}", overflow="fold")


def memory_table(memory: Mapping[str, Mapping[str, int]]) -> Table:
    """Bytes by device and owner."""
    table = Table(box=None, padding=(0, 2, 0, 0), pad_edge=False)
    table.add_column("memory")
    found = [owner for owner in _OWNERS if any(owners.get(owner) for owners in memory.values())]
    for header in (*(_OWNERS[owner] for owner in found), "total"):
        table.add_column(header, justify="right", overflow="fold")
    for device, owners in memory.items():
        table.add_row(device, *(format_bytes(owners.get(owner, 0)) for owner in (*found, "total")))
    return table


def _history(history: Mapping[str, Sequence[float]]) -> Iterator[RenderableType]:
    times = history["uptime_s"]
    if len(times) < 2:
        return
    lines = [f"\nlast {times[-1] - times[0]:,.0f} s"]
    for name, label in _SERIES.items():
        values = history[name]
        if any(values):
            show = format_bytes if name == "memory_bytes" else format_count
            lines.append(f"{label:18} {sparkline(values)} now {show(values[-1])}, peak {show(max(values))}")
    yield Text("\n".join(lines))


def sparkline(values: Sequence[float], max_bars: int = _MAX_BARS) -> str:
    """A bar for each value, relative to the largest; of more values than bars, a bar shows the largest of several."""
    per_bar = max(1, -(-len(values) // max_bars))
    peaks = [max(values[start : start + per_bar]) for start in range(0, len(values), per_bar)]
    top = max(peaks, default=0.0) or 1.0
    return "".join(_BARS[min(len(_BARS) - 1, int(peak / top * len(_BARS)))] for peak in peaks)


def format_count(value: float) -> str:
    """At most six characters: 999, 12.3k, 4.56M."""
    if value < 1000:
        return f"{value:.0f}" if value == int(value) else f"{value:.1f}"
    for unit in "kMGT":
        value /= 1000
        if value < 999.95 or unit == "T":
            break
    return f"{value:.{2 if value < 9.995 else 1 if value < 99.95 else 0}f}{unit}"


def format_bytes(size: float) -> str:
    for unit in ("B", "kB", "MB", "GB", "TB"):
        if size < 999.5 or unit == "TB":
            break
        size /= 1000
    return f"{size:.0f} {unit}" if unit == "B" or size >= 100 else f"{size:.1f} {unit}"
