"""A plot of the loss of a job. Matplotlib is the extra `plot`: nothing else at run time needs it."""

from __future__ import annotations

from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from symbiosis.errors import SymbiosisError

if TYPE_CHECKING:
    from matplotlib.figure import Figure

HOW_TO_INSTALL = "pip install 'symbiosis[plot]', or `pip install matplotlib`"


def can_plot() -> bool:
    """Whether matplotlib is installed."""
    return find_spec("matplotlib") is not None


def check_plot_file(file: Path) -> None:
    """Raises `SymbiosisError` if a plot cannot be written to `file`."""
    if not can_plot():
        raise SymbiosisError(f"cannot plot {file}: matplotlib is not installed; {HOW_TO_INSTALL}")
    from matplotlib.figure import Figure

    kinds = Figure().canvas.get_supported_filetypes()
    if file.suffix.lower().removeprefix(".") not in kinds or file.is_dir():
        raise SymbiosisError(f"cannot write {file}: expected a file such as loss.png, or another format ({', '.join(kinds)})")
    if not file.absolute().parent.is_dir():
        raise SymbiosisError(f"cannot write {file}: there is no folder {file.parent}; choose another file")


def plot_losses(events: list[dict[str, Any]], id: str, file: Path) -> None:
    """Plot the losses in the events of a job over its steps. Raises `SymbiosisError`."""
    from matplotlib.figure import Figure

    points: dict[str, list[tuple[int, float]]] = {"train_loss": [], "valid_loss": []}
    for event in events:
        for name, found in points.items():
            if name in event["data"]:
                found.append((event["data"]["step"], event["data"][name]))
    if not points["train_loss"]:
        raise SymbiosisError(f"the job {id} has no steps yet: there is nothing to plot")
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, label in (("train_loss", "training"), ("valid_loss", "validation")):
        if points[name]:
            axes.plot(*zip(*points[name], strict=True), label=label, marker="." if len(points[name]) < 50 else "")
    axes.set(xlabel="step", ylabel="loss", title=id)
    axes.grid(alpha=0.3)
    axes.legend()
    save_figure(figure, file)


def save_figure(figure: Figure, file: Path) -> None:
    """Raises `SymbiosisError`."""
    try:
        figure.savefig(file, dpi=120)
    except (OSError, ValueError) as error:
        raise SymbiosisError(f"cannot write {file}: {error}") from None
