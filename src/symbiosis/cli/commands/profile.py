"""`symbiosis profile`."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from symbiosis.errors import SymbiosisError

err = Console(stderr=True)

app = typer.Typer()


@app.command(epilog="Example: symbiosis profile --out profile.json && symbiosis simulate --profile profile.json")
def profile(
    model: Annotated[str | None, typer.Argument(show_default=False, help="Folder or hub id; none: the default model.")] = None,
    device: Annotated[str, typer.Option(help="cpu or cuda.")] = "cpu",
    dtype: Annotated[
        str | None, typer.Option(show_default=False, help="float32, bfloat16 or float16; none: that of the checkpoint.")
    ] = None,
    cache_gb: Annotated[float, typer.Option(min=0.001, max=10_000, help="KV cache of the engine.")] = 2.0,
    quick: Annotated[bool, typer.Option("--quick", help="Fewer and smaller batches.")] = False,
    out: Annotated[Path | None, typer.Option(metavar="FILE", show_default=False, help="Write JSON here; none: print.")] = None,
) -> None:
    """Measure the steps of the real engine and fit the simulator's cost model to them."""
    if out is not None and (out.is_dir() or not out.absolute().parent.is_dir()):
        raise SymbiosisError(f"cannot write {out}: expected a file in a folder that exists")
    with err.status("Loading") as status:
        import time

        from symbiosis.app.engine_profile import ProfilePlan, profile_engine, profile_to_json, with_start_time
        from symbiosis.models.loading import load_for_hosting
        from symbiosis.serving.engine_core import EngineCore

        started = time.perf_counter()
        loaded, _ = load_for_hosting(model, None, device, dtype)
        core = EngineCore(loaded, cache_bytes=int(cache_gb * 1e9))
        start_s = time.perf_counter() - started
        name = Path(model).name if model else "the default model"
        small = ProfilePlan(batches=(1, 4, 8), contexts=(16, 48), prompts=(16, 48, 96), steps=4)
        made = profile_engine(
            core,
            small if quick else ProfilePlan(),
            source=f"{name} on {device}, {loaded.dtype}",
            progress=lambda text: status.update(f"Measuring {text}"),
        )
        made = with_start_time(made, start_s)
    text = json.dumps(profile_to_json(made), indent=2) + "\n"
    if out is None:
        typer.echo(text, nl=False)
        return
    try:
        out.write_text(text)
    except OSError as error:
        raise SymbiosisError(f"cannot write {out}: {error.strerror}") from None
    cost = made.cost
    typer.echo(
        f"{len(made.steps)} steps, median error {made.terms.median_error:.1%}: {cost.fixed_s * 1e3:.3g} ms a step, "
        f"{cost.row_s * 1e6:.3g} us a decode row, {cost.context_s * 1e9:.3g} ns a token of its context, "
        f"{cost.prefill_s * 1e6:.3g} us a prompt token. Written to {out}"
    )
