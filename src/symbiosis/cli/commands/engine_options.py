"""Options of the engines of a cluster, for commands that start some."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import typer

from symbiosis.errors import SymbiosisError

_ENGINES = "Engines"


def _engine_option(name: str, help: str, **more: Any) -> Any:
    return typer.Option(name, help=help, rich_help_panel=_ENGINES, **more)


ModelOption = Annotated[
    str | None,
    typer.Option(
        "--model",
        metavar="MODEL",
        show_default=False,
        help="As given to `up`; none: the default model.",
        rich_help_panel=_ENGINES,
    ),
]
Device = Annotated[str, _engine_option("--device", "Device of each engine: cpu, cuda …")]
Dtype = Annotated[
    str | None,
    _engine_option("--dtype", "float32, bfloat16 or float16; none: that of the checkpoint.", show_default=False),
]
Threads = Annotated[
    int | None, _engine_option("--threads", "CPU threads of each engine; none: all.", min=1, show_default=False)
]
NoTraining = Annotated[bool, _engine_option("--no-training", "No fine-tuning jobs.")]
CacheGb = Annotated[
    float | None,
    _engine_option("--cache-gb", "KV cache of each engine. (default: 1024 blocks of 16 tokens)", min=0, show_default=False),
]
HostCacheGb = Annotated[
    float, _engine_option("--host-cache-gb", "Host memory of each engine for KV cache blocks that do not fit.", min=0)
]
AdapterGb = Annotated[float, _engine_option("--adapter-gb", "Device memory of each engine's adapter cache.", min=0)]
AdapterHostGb = Annotated[
    float, _engine_option("--adapter-host-gb", "Host memory of each engine for adapters ready to be copied to a GPU.", min=0)
]
MaxRows = Annotated[int, _engine_option("--max-rows", "Most tokens in one step of an engine.", min=1)]
MaxRunning = Annotated[int, _engine_option("--max-running", "Most sequences running at once on an engine.", min=1)]
StoreCacheGb = Annotated[
    float,
    _engine_option("--store-cache-gb", "Disk space of this host for content of the cluster's store.", min=0),
]
Gpus = Annotated[
    int | None, _engine_option("--gpus", "GPUs of this host for Ray; none: those that it finds.", min=0, show_default=False)
]


def engine_config(
    model: str | None,
    device: str,
    dtype: str | None,
    threads: int | None,
    no_training: bool,
    cache_gb: float | None,
    host_cache_gb: float,
    adapter_gb: float,
    adapter_host_gb: float,
    max_rows: int,
    max_running: int,
) -> dict[str, Any]:
    """Fields of `app.engine_member.MemberConfig`."""
    if model is not None and Path(model).is_dir():
        model = str(Path(model).resolve())  # engines have folders of their own
    return {
        "model": model,
        "device": device,
        "dtype": dtype,
        "threads": threads,
        "training": not no_training,
        "cache_gb": cache_gb,
        "host_cache_gb": host_cache_gb,
        "adapter_gb": adapter_gb,
        "adapter_host_gb": adapter_host_gb,
        "max_rows": max_rows,
        "max_running": max_running,
    }


def choose_launcher(given: str | None) -> str:
    """ray or processes. Raises `SymbiosisError`."""
    if given not in (None, "ray", "processes"):
        raise SymbiosisError(f"--launcher {given}: expected ray or processes")
    if given == "ray":
        from symbiosis.app.cluster.ray_engines import check_installed

        check_installed()
    return given or ("processes" if find_spec("ray") is None else "ray")
