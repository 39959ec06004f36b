"""Plots the results of the GPU benchmarks: a PNG next to each JSON. Needs no GPU, so it can run elsewhere than they did.

python -m benchmarks.plots                                   # all there are
python -m benchmarks.plots benchmarks/results/mixed-7b.json
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.policies import plot as plot_policies
from benchmarks.results import FOLDER

COLORS = {
    "plain": "#9aa0a6", "auto": "#1a73e8", "direct": "#34a853", "executor": "#e8710a",
    "none": "#9aa0a6", "lockstep": "#c58af9", "opportunistic": "#1a73e8",
    "eager": "#9aa0a6", "graph": "#1a73e8",
    "Symbiosis": "#1a73e8", "Ray Serve": "#e8710a",
    "zoo": "#1a73e8", "sharing": "#9aa0a6", "provisioned": "#e8710a", "differences": "#34a853",
    "engine": "#9aa0a6", "streamed": "#1a73e8", "whole": "#34a853", "workers": "#e8710a",
}  # fmt: skip
GIB = 2**30


def pyplot() -> Any:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    return pyplot


def bars(axes: Any, groups: Sequence[str], series: dict[str, list[float | None]], unit: str) -> None:
    """For each group a bar of each series that has a figure there, with the figure on top."""
    width = 0.8 / len(series)
    for number, (name, values) in enumerate(series.items()):
        shift = (number - (len(series) - 1) / 2) * width
        there = [(group + shift, value) for group, value in enumerate(values) if value is not None]
        drawn = axes.bar(*zip(*there, strict=True), width, label=name, color=COLORS.get(name))
        axes.bar_label(drawn, [f"{value:.3g}" if value < 1000 else f"{value:.0f}" for _, value in there], fontsize=7)
    axes.set_xticks(range(len(groups)), groups)
    axes.set_ylabel(unit)
    axes.margins(y=0.12)
    axes.legend()


def sharing(record: dict[str, Any], axes: Sequence[Any]) -> None:
    counts = record["tenants"]
    modes = dict.fromkeys(mode for found in counts.values() for mode in found["step_s"])
    shown = {
        "tokens_per_s": (1.0, "tokens/s, all tenants"),
        "step_s": (1e-3, "step, ms"),
        "memory_bytes": (GIB, "memory in all, GiB"),
    }
    for (name, (scale, unit)), each in zip(shown.items(), axes, strict=True):
        series = {
            mode: [found[name][mode]["median"] / scale if mode in found[name] else None for found in counts.values()]
            for mode in modes
        }
        bars(each, list(counts), series, unit)
        each.set_xlabel("fine-tuning tenants")


def deferral(record: dict[str, Any], axes: Sequence[Any]) -> None:
    shown = {case: [each["median"] * 1e3] for case, each in record["step_s"].items()}
    bars(axes[0], [f"{record['batch']} × {record['tokens']} tokens"], shown, "step, ms")


def lora(record: dict[str, Any], axes: Sequence[Any]) -> None:
    settings = record["settings"]
    groups = [f"LoRA {number}\nrank {each['rank']}, {len(each['layers'])} layers" for number, each in settings.items()]
    modes = next(iter(settings.values()))["step_s"]
    series = {mode: [1e3 * each["step_s"][mode]["median"] for each in settings.values()] for mode in modes}
    bars(axes[0], groups, series, "step, ms")


def memory(record: dict[str, Any], axes: Sequence[Any]) -> None:
    runs, plain = record["runs"], {(each["tenants"], each["tokens"]): each["in_all_bytes"] for each in record["plain"]}
    for key, other, each in zip(("tokens", "tenants"), ("tenants", "tokens"), axes, strict=True):
        fixed = min(run[other] for run in runs)
        chosen = {run[key]: run for run in runs if run[other] == fixed}
        values = sorted(chosen)
        places = range(len(values))
        own = [chosen[value]["executor_bytes"] / GIB for value in values]
        each.bar(places, own, 0.4, label="executor", color=COLORS["executor"])
        theirs = [sum(chosen[value]["tenants_bytes"]) / GIB for value in values]
        each.bar(places, theirs, 0.4, bottom=own, label="its tenants", color="#fcd9b6")
        copies = [
            (place, plain.get((fixed, value) if key == "tokens" else (value, fixed))) for place, value in enumerate(values)
        ]
        fitting = [(place + 0.4, size / GIB) for place, size in copies if size is not None]
        if fitting:
            each.bar(*zip(*fitting, strict=True), 0.4, label="private copies, as far as they fit", color=COLORS["plain"])
        each.set_xticks([place + 0.2 for place in places], [str(value) for value in values])
        each.set_xlabel({"tokens": "tokens of each sequence, one tenant", "tenants": f"tenants, {fixed} tokens"}[key])
        each.set_ylabel("GPU memory, GiB")
        each.legend()


def mixed(record: dict[str, Any], axes: Sequence[Any]) -> None:
    modes = record["modes"]
    cases = list(next(iter(modes.values()))["runs"])
    for (name, scale, unit), each in zip(
        [("latency_s", 1e-3, "decode step, ms"), ("tokens_per_s", 1.0, "tokens/s, all")], axes, strict=True
    ):
        bars(each, cases, {mode: [modes[mode][name][case]["median"] / scale for case in cases] for mode in modes}, unit)


def small_and_large(record: dict[str, Any], axes: Sequence[Any]) -> None:
    found = {policy: cases for policy, cases in record["median_s"].items() if policy != "plain alone"}
    pairs = list(next(iter(found.values())))
    series = {policy: [1e3 * cases[pair][0] for pair in pairs] for policy, cases in found.items()}
    bars(axes[0], pairs, series, "time of the first of the pair, ms")


def gpu_serving(record: dict[str, Any], axes: Sequence[Any]) -> None:
    for (name, unit), each in zip(
        [("decode_tokens_per_s", "tokens/s, decoding"), ("prefill_tokens_per_s", "tokens/s of prompts")], axes, strict=True
    ):
        cases = list(record[name])
        bars(each, cases, {"engine": [record[name][case]["median"] for case in cases]}, unit)


def gpu_prefill(record: dict[str, Any], axes: Sequence[Any]) -> None:
    for (prompt, modes), each in zip(record["prefill_tokens_per_s"].items(), axes, strict=True):
        cases = list(next(iter(modes.values())))
        series = {mode: [found[case]["median"] for case in cases] for mode, found in modes.items()}
        bars(each, cases, series, f"tokens/s, prompts of {prompt}")


def gpu_training(record: dict[str, Any], axes: Sequence[Any]) -> None:
    if "scale" in record:
        jobs = [int(count) for count in record["scale"]]
        for name, scale, unit, each in zip(
            ("per_job_s", "tokens_per_s"), (1e3, 1.0), ("step for each job, ms", "tokens/s, all jobs"), axes, strict=True
        ):
            each.plot(jobs, [scale * found[name] for found in record["scale"].values()], "o-", color=COLORS["auto"])
            each.set_xscale("log", base=2)
            each.set_xlabel("jobs")
            each.set_ylabel(unit)
            each.set_ylim(bottom=0)
        return
    if "fair" in record:
        for (rows, found), each in zip(record["fair"].items(), axes, strict=False):
            bars(
                each,
                list(found["jobs"]),
                {f"passes of {rows}": [job["ratio"] for job in found["jobs"].values()]},
                "of its share",
            )
        return
    counts = record["jobs"]
    modes = dict.fromkeys(mode for found in counts.values() for mode in found["tokens_per_s"])
    for (name, scale, unit), each in zip(
        [("tokens_per_s", 1.0, "tokens/s, all jobs"), ("memory_bytes", GIB, "memory in all, GiB")], axes, strict=True
    ):
        bars(each, list(counts), {m: [found[name][m]["median"] / scale for found in counts.values()] for m in modes}, unit)
        each.set_xlabel("jobs")


def gpu_colocation(record: dict[str, Any], axes: Sequence[Any]) -> None:
    shown = {"p99_s": (1e3, "between two tokens, ms, p99"), "trained_per_s": (1.0, "tokens/s trained")}
    for (name, (scale, unit)), each in zip(shown.items(), axes, strict=True):
        found = record["figures"][name]
        bars(each, list(found), {"median": [scale * figures["median"] for figures in found.values()]}, unit)


def http_load(record: dict[str, Any], axes: Sequence[Any]) -> None:
    if "phases" in record:
        phases = record["phases"]
        found = {
            quantile: [1e3 * each["others"][f"gap_{quantile}_s"] for each in phases.values()] for quantile in ("p50", "p99")
        }
        bars(axes[0], list(phases), found, "between tokens of the others, ms")
        start = 0.0
        for name, phase in phases.items():
            memory = phase["memory"]
            for part in ("engine", "workers") if memory else ():
                times = [(start + second) / 60 for second in memory["seconds"]]
                axes[1].plot(times, memory[f"{part}_mib"], color=COLORS[part], label=part if name == "stalled" else None)
            start += phase["seconds"]
        axes[1].set_xlabel("minutes")
        axes[1].set_ylabel("resident memory, MiB")
        axes[1].set_ylim(bottom=0)
        axes[1].legend()
        return
    groups = record["streams"] if "streams" in record else record["rates"]
    shown = {"tokens_per_s": (1.0, "tokens/s"), "gap_p99_s": (1e3, "between tokens, ms, p99")}
    if record["mode"] == "burst":
        shown = {"first_p50_s": (1e3, "to the first token, ms, p50"), "first_p99_s": (1e3, "to the first token, ms, p99")}
    for (name, (scale, unit)), each in zip(shown.items(), axes, strict=True):
        cases = next(iter(groups.values()))[name]
        bars(
            each,
            list(groups),
            {case: [scale * found[name][case]["median"] for found in groups.values()] for case in cases},
            unit,
        )
        each.set_xlabel({"closed": "streams at a time", "burst": "requests at once", "open": "arrivals"}[record["mode"]])


def shard_memory(record: dict[str, Any], axes: Sequence[Any]) -> None:
    """Of the largest shard, against one part in N."""
    (axis,) = axes
    sizes = [result["shards"] for result in record["results"]]
    for key, label in (("share_of_tensors", "tensors"), ("share_of_rss", "growth of RSS")):
        axis.plot(sizes, [result[key] for result in record["results"]], marker="o", label=label)
    axis.plot(sizes, [1 / size for size in sizes], linestyle="--", color="grey", label="1/N")
    axis.set(xlabel="shards", ylabel="memory of the largest shard, of one process", ylim=(0, None), xticks=sizes)
    axis.legend()


def sharding(record: dict[str, Any], axes: Sequence[Any]) -> None:
    """Of the MLP's forward on two shards, at the last shape."""
    result = [each for each in record["results"] if each["shards"] == 2][-1]
    cells = [each for each in result["cells"] if (each["layer"], each["direction"]) == ("mlp", "forward")]
    for (name, scale, unit), each in zip((("seconds", 1e3, "ms"), ("bytes", 1e-6, "MB moved")), axes, strict=True):
        for way in ("tensor", "parameters"):
            each.plot([cell["rows"] for cell in cells], [scale * cell[way][name] for cell in cells], marker="o", label=way)
        each.set_xscale("log", base=2)
        each.set_yscale("log")
        each.set_xlabel(f"rows of a call, MLP of {result['shape']}, 2 shards")
        each.set_ylabel(unit)
        each.legend()


def long_context(record: dict[str, Any], axes: Sequence[Any]) -> None:
    """Time of a token by context; tokens per second by requests."""
    done = [result for result in record["results"] if "token_s" in result]
    for case in dict.fromkeys(result["case"] for result in done):
        single = [result for result in done if (result["case"], result["sequences"]) == (case, 1)]
        axes[0].plot([each["context"] for each in single], [1e3 * each["token_s"] for each in single], marker="o", label=case)
        several = [result for result in done if result["case"] == case and result["sequences"] > 1]
        axes[1].plot(
            [each["sequences"] for each in several], [each["tokens_per_s"] for each in several], marker="o", label=case
        )
    for each, label, unit in zip(axes, ("tokens of context", "requests"), ("ms per token", "tokens/s"), strict=True):
        each.set_xscale("log", base=2)
        each.set_yscale("log")
        each.set_xlabel(label)
        each.set_ylabel(unit)
        each.legend()


def engine_host_blocks(record: dict[str, Any], axes: Sequence[Any]) -> None:
    phases = ["first question", "second question", "preempted"]
    for (name, unit), each in zip((("seconds", "seconds"), ("rows", "computed rows")), axes, strict=True):
        bars(each, phases, {run: [found[phase][name] for phase in phases] for run, found in record["runs"].items()}, unit)


def decode_attention(record: dict[str, Any], axes: Sequence[Any]) -> None:
    groups = [f"{each['heads'][0]}x{each['heads'][1]} {each['dtype']}" for each in record["cases"]]
    names = ("read", "kernel", "torch", "reference")
    bars(axes[0], groups, {name: [each["gb_per_s"].get(name) for each in record["cases"]] for name in names}, "GB/s")


def token_draw(record: dict[str, Any], axes: Sequence[Any]) -> None:
    for spread, each in zip((3.0, 0.1), axes, strict=True):
        cells = [cell for cell in record["results"] if cell["spread"] == spread]
        names = list(cells[0]["samplings"])
        series = {
            f"{cell['rows']} x {cell['vocabulary']}, {case}": [cell["samplings"][name][case]["median"] * 1e3 for name in names]
            for cell in cells[-2:]
            for case in ("kernel", "reference")
        }
        bars(each, names, series, f"ms, logits of deviation {spread:g}")


def network(record: dict[str, Any], axes: Sequence[Any]) -> None:
    short = [cell for cell in record["runs"] if cell["tokens"] == record["plan"]["tokens"]]
    panels = ((("step", "micro_batches"), 1.0, "fine-tuning step, s"), (("decode",), 1e-3, "decode, ms per token"))
    for each, (works, scale, unit) in zip(axes, panels, strict=True):
        lines: dict[str, dict[float, float]] = {}
        for cell in short:
            if cell["work"] in works:
                micro = ", micro-batches" if cell["work"] == "micro_batches" else ""
                name = f"{cell['gbit_per_s']:g} Gbit/s, {cell['wire']}{micro}"
                lines.setdefault(name, {})[cell["round_trip_ms"]] = median(cell["seconds"]) / scale
        for name, points in lines.items():
            each.plot(list(points), list(points.values()), marker="o", label=name, linestyle="--" if "bf16" in name else "-")
        local = [value for cell in short if cell["work"] == works[0] for value in cell["local_seconds"]]
        each.axhline(median(local) / scale, color="#9aa0a6", linestyle=":", label="local TCP")
        each.set_xscale("symlog", linthresh=1)
        each.set_xlabel("round trip, ms")
        each.set_ylabel(unit)
        each.set_ylim(bottom=0)
        each.legend(fontsize=7)


def adapter_loads(record: dict[str, Any], axes: Sequence[Any]) -> None:
    """Loads a request, and engines that hold the hottest adapter."""
    rows = record["rows"]
    groups = [f"Zipf {row['exponent']:g}\n{row['streams']} streams" for row in rows]
    systems = {"symbiosis": "Symbiosis", "ray_serve": "Ray Serve"}
    shown = {name: label for name, label in systems.items() if name in rows[0]}
    bars(
        axes[0],
        groups,
        {label: [row[name]["loads_per_request"] for row in rows] for name, label in shown.items()},
        "loads a request",
    )
    hottest = {label: [row[name]["engines_of_hottest"][0] for row in rows] for name, label in shown.items()}
    bars(axes[1], groups, hottest, "engines that hold the hottest adapter")


def zoo_serving(record: dict[str, Any], axes: Sequence[Any]) -> None:
    mixes = record["medians"]
    systems = dict.fromkeys(system for found in mixes.values() for system in found)
    for key, unit, each in (("tokens_per_s", "tokens/s", axes[0]), ("p95_s", "95th percentile of a request, s", axes[1])):
        series = {system: [found[system][key] if system in found else None for found in mixes.values()] for system in systems}
        bars(each, list(mixes), series, unit)


PLOTS: dict[str, tuple[Callable[[dict[str, Any], Sequence[Any]], None], int]] = {
    "sharing": (sharing, 3),
    "deferral": (deferral, 1),
    "lora": (lora, 1),
    "gpu_memory": (memory, 2),
    "mixed": (mixed, 2),
    "gpu_serving": (gpu_serving, 2),
    "gpu_prefill": (gpu_prefill, 2),
    "zoo_serving": (zoo_serving, 2),
    "gpu_colocation": (gpu_colocation, 2),
    "gpu_training": (gpu_training, 2),
    "small_and_large": (small_and_large, 1),
    "http_load": (http_load, 2),
    "sharding": (sharding, 2),
    "shard_memory": (shard_memory, 1),
    "long_context": (long_context, 2),
    "engine_host_blocks": (engine_host_blocks, 2),
    "decode_attention": (decode_attention, 1),
    "token_draw": (token_draw, 2),
    "network": (network, 2),
    "adapter_loads": (adapter_loads, 2),
}


def draw(path: Path) -> Path | None:
    """The PNG of one JSON; None if nothing here draws it."""
    record, target = json.loads(path.read_text()), path.with_suffix(".png")
    if record.get("script") == "gpu_policies":
        plot_policies(record, target)
        return target
    if record.get("script") not in PLOTS:
        return None
    plot, panels = PLOTS[record["script"]]
    figure, axes = pyplot().subplots(1, panels, figsize=(6 * panels, 4), squeeze=False)
    plot(record, axes[0])
    figure.suptitle(f"{record['question']} ({record.get('shape', 'all shapes')}{', MPS' if record.get('mps') else ''})")
    figure.tight_layout()
    figure.savefig(target, dpi=120)
    pyplot().close(figure)
    return target


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="*", default=sorted(FOLDER.glob("*.json")))
    for path in parser.parse_args(arguments).files:
        drawn = draw(path)
        if drawn:
            print(drawn)


if __name__ == "__main__":
    main()
