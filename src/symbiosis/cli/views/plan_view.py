"""A plan as tables of at most 80 columns."""

from __future__ import annotations

from rich import box
from rich.console import Console
from rich.table import Table

from symbiosis.app.planning.plan import Plan
from symbiosis.planning.devices import describe
from symbiosis.planning.estimates import ProcessEstimate
from symbiosis.planning.quantities import format_bytes, format_seconds, format_tokens
from symbiosis.planning.tenants import Workload

_WIDTH = 80


def print_plan(plan: Plan) -> None:
    console = Console(width=_WIDTH, highlight=False)
    size = plan.size
    console.print(
        f"{plan.model}, {plan.dtype}: {size.split.parameters / 1e6:,.1f} M parameters, {format_bytes(size.weights)}; "
        f"base layers {format_bytes(size.hosted)}, client part {format_bytes(size.client_part)}"
    )
    console.print(_memory_table(plan))
    console.print(_device_table(plan))
    if plan.kv_cache:
        lengths = ", ".join(f"{format_tokens(length)} {format_bytes(held)}" for length, held in plan.kv_cache.items())
        console.print(f"KV cache of a sequence: {lengths}")
    console.print(_time_table(plan))
    console.print(
        "Times follow from the operations and bytes of a step and the speed of the devices (a roofline):\n"
        "overheads and other tenants come on top.\n"
    )
    for note in plan.placement.notes:
        console.print(f"note: {note}")
    console.print("\nRun it:")
    for line in plan.commands():
        console.print(f"  {line}", soft_wrap=True)


def _table(title: str, *columns: str) -> Table:
    table = Table(title=title, box=box.SIMPLE, title_justify="left", pad_edge=False)
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", overflow="fold")
    return table


def _memory_table(plan: Plan) -> Table:
    table = _table("Memory by process", "process", "on", "part", "memory each")
    for process in _distinct(plan.placement.processes):
        name = f"{process.count} x {process.role}" if process.count > 1 else process.role
        where = f"{process.device}{' (remote)' if process.remote else ''}"
        rows = [(where, part, held) for part, held in process.parts.items() if held]
        rows += [("host", part, held) for part, held in process.host_parts.items() if held]
        rows += [("host", "while loading", process.loading)] if process.loading else []
        for index, (on, part, held) in enumerate(rows):
            table.add_row(name if index == 0 else "", on, part, format_bytes(held))
        table.add_row("", where, "total", format_bytes(process.total), style="bold", end_section=True)
    return table


def _distinct(processes: tuple[ProcessEstimate, ...]) -> list[ProcessEstimate]:
    """Equal shards are shown once, as a count of them."""
    shards = [each for each in processes if each.role == "shard" or (each.loading and each.role == "executor")]
    if len(shards) < 2:
        return list(processes)
    first = shards[0]
    devices = first.device if len({each.device for each in shards}) == 1 else f"{first.device} …"
    merged = ProcessEstimate(
        role="shard",
        device=devices,
        parts=first.parts,
        host_parts=first.host_parts,
        count=len(shards),
        loading=first.loading,
    )
    return [merged, *(each for each in processes if each not in shards)]


def _device_table(plan: Plan) -> Table:
    table = _table("Devices", "device", "planned", "free after")
    for device in plan.devices:
        used = plan.used(device)
        table.add_row(describe(device), format_bytes(used), format_bytes(device.memory - used))
    return table


def _time_table(plan: Plan) -> Table:
    table = _table("Time of one tenant alone, at best", "tenant", "part on", "step", "tokens/s", "calls", "traffic")
    for (load, device), time in zip(plan.placement.loads, plan.times, strict=True):
        unit = {Workload.TRAIN: "step", Workload.JOB: "pass"}.get(load.workload, "token")
        table.add_row(
            load.describe(),
            device.name,
            f"{format_seconds(time.seconds)}/{unit}",
            f"{time.tokens_per_s:,.0f}",
            str(time.calls) if time.calls else "",
            format_bytes(time.bytes) if time.bytes else "",
        )
    return table
