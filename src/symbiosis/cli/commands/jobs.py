"""`symbiosis jobs …` and `symbiosis finetune --hosted`: fine-tuning by a server, over HTTP."""

from __future__ import annotations

import secrets
import shlex
import time
from collections.abc import Callable, Collection, Iterator
from contextlib import contextmanager, nullcontext
from datetime import datetime
from pathlib import Path
from typing import Annotated, Any, NoReturn, TypeAlias

import typer
from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn
from rich.table import Table

from symbiosis.cli.commands.options import DEFAULT_SITE, ConnectSite, Key, check_out
from symbiosis.cli.http_client import HttpClient
from symbiosis.errors import SymbiosisError, Unreachable

_ENDS = ("succeeded", "failed", "cancelled")
_LOOK_S = 0.5
_PATIENCE = 60
"""Looks that may find nobody there, one after the other: a server may be restarting."""
_NUMBERS = ("step", "loss", "tokens/s", "time left")
_COLUMNS = ("job", "of", "status", *_NUMBERS, "adapter")
_SPARED = ("of", "tokens/s", "loss", "time left", "step")
"""Columns that a narrow terminal does without, the first first."""
_ANY_WIDTH = 10_000
_GONE = "not served any more: it was deleted, or the server was started again and had no --uploads to keep it in"
err = Console(stderr=True)

app = typer.Typer(
    name="jobs",
    no_args_is_help=True,
    rich_markup_mode="rich",
    help="The fine-tuning jobs of a server: list, show, watch, cancel, pause, resume, events, plot.",
    epilog="Example: symbiosis jobs list",
)
Show: TypeAlias = Callable[[dict[str, Any]], None]
Id = Annotated[str, typer.Argument(metavar="JOB", help="One of `symbiosis jobs list`.")]


@app.command("list", epilog="Example: symbiosis jobs list")
def list_jobs(
    connect: ConnectSite = DEFAULT_SITE,
    key: Key = None,
    limit: Annotated[int, typer.Option(min=1, help="Most that are shown, newest first.")] = 20,
) -> None:
    """Your jobs; the admin sees everybody's."""
    site = HttpClient(connect, key)
    found, served = site.jobs(limit), _served(site)
    console = Console()
    for less in range(len(_SPARED) + 1):
        table = jobs_table(found, served, without=_SPARED[:less])
        needed = Console(width=_ANY_WIDTH).measure(table).maximum
        if needed <= console.width or not console.is_terminal:
            break
    Console(width=max(console.width, needed)).print(table)


def jobs_table(found: list[dict[str, Any]], served: Collection[str], without: tuple[str, ...] = ()) -> Table:
    """Nothing in it is ever shortened; columns may be left out."""
    table = Table(caption=None if found else "none yet: `symbiosis finetune DATA.jsonl --hosted`")
    for name in (each for each in _COLUMNS if each not in without):
        table.add_column(name, no_wrap=True, justify="right" if name in _NUMBERS else "left")
    for job in found:
        progress, adapter = job["progress"], job["fine_tuned_model"] or ""
        cells = {
            "job": escape(job["id"]),
            "of": escape(job["organization_id"]),
            "status": _status(job),
            "step": f"{progress['step']}/{progress['total_steps']}",
            "loss": _number(progress.get("train_loss"), ".3f"),
            "tokens/s": _number(progress.get("tokens_per_s"), ",.0f"),
            "time left": _left(job),
            "adapter": escape(adapter if not adapter or adapter in served else f"{adapter} (gone)"),
        }
        table.add_row(*(cell for name, cell in cells.items() if name not in without))
    return table


@app.command(epilog="Example: symbiosis jobs show ftjob-…")
def show(id: Id, connect: ConnectSite = DEFAULT_SITE, key: Key = None) -> None:
    """All that is known of a job."""
    site = HttpClient(connect, key)
    job = site.job(id)
    name = job["fine_tuned_model"]
    table = Table(show_header=False)
    rows: dict[str, Any] = {"job": job["id"], "status": _status(job)}
    rows |= {"adapter": name if name is None or name in _served(site) else f"{name} ({_GONE})"}
    rows |= {"model": job["model"], "training file": job["training_file"], "validation file": job["validation_file"]}
    rows |= {"seed": job["seed"], "time left": _left(job), "error": (job["error"] or {}).get("message")}
    rows |= {"created": _time(job["created_at"]), "finished": _time(job["finished_at"])}
    rows |= {name.replace("_", " "): value for name, value in job["progress"].items() if name != "began_at"}
    for name, value in job["method"]["supervised"]["hyperparameters"].items():
        rows.setdefault("PEFT config" if name == "adapter" else name.replace("_", " "), value)
    for name, value in rows.items():
        if value not in (None, ""):
            table.add_row(name, escape(str(value)))
    Console().print(table)


@app.command(epilog="Example: symbiosis jobs watch ftjob-… --plot loss.png")
def watch(
    id: Id,
    connect: ConnectSite = DEFAULT_SITE,
    key: Key = None,
    plot: Annotated[
        Path | None, typer.Option("--plot", metavar="PNG", show_default=False, help="A picture of the loss.")
    ] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FOLDER", show_default=False, help="Copy the finished adapter to this new or empty folder."
        ),
    ] = None,
) -> None:
    """Follow a job until it ends; one that is paused is waited for. Ctrl-C leaves it as it is."""
    _check_places(plot, out)
    _follow(HttpClient(connect, key), id, connect, plot, out)


@app.command(epilog="Example: symbiosis jobs events ftjob-…")
def events(
    id: Id,
    connect: ConnectSite = DEFAULT_SITE,
    key: Key = None,
    limit: Annotated[int, typer.Option(min=1, help="Most that are shown, of the last.")] = 100,
) -> None:
    """What happened, oldest first."""
    for event in HttpClient(connect, key).events(id, limit):
        typer.echo(f"{_time(event['created_at'])}  {event['level']:5}  {event['message']}")


@app.command(epilog="Example: symbiosis jobs plot ftjob-… loss.png")
def plot(
    id: Id,
    file: Annotated[Path, typer.Argument(metavar="PNG", help="Where the picture is written.")],
    connect: ConnectSite = DEFAULT_SITE,
    key: Key = None,
) -> None:
    """A picture of the loss, step by step."""
    _check_picture(file)
    _plot(HttpClient(connect, key), id, file)


@app.command(epilog="Example: symbiosis jobs cancel ftjob-…")
def cancel(id: Id, connect: ConnectSite = DEFAULT_SITE, key: Key = None) -> None:
    """End a job for good."""
    _say(HttpClient(connect, key).change_job(id, "cancel"))


@app.command(epilog="Example: symbiosis jobs pause ftjob-…")
def pause(id: Id, connect: ConnectSite = DEFAULT_SITE, key: Key = None) -> None:
    """Let a job rest; it keeps where it was."""
    _say(HttpClient(connect, key).change_job(id, "pause"))


@app.command(epilog="Example: symbiosis jobs resume ftjob-…")
def resume(id: Id, connect: ConnectSite = DEFAULT_SITE, key: Key = None) -> None:
    """Let a paused job go on."""
    _say(HttpClient(connect, key).change_job(id, "resume"))


def finetune(
    connect: str,
    key: str | None,
    data: Path,
    validation: Path | None,
    *,
    suffix: str | None,
    seed: int,
    hyperparameters: dict[str, Any],
    out: Path | None,
    plot: Path | None,
) -> None:
    """Upload, create, follow."""
    _check_places(plot, out)
    site = HttpClient(connect, key)
    body: dict[str, Any] = {"model": site.models()[0]["id"], "seed": seed}
    if suffix is not None:
        body["suffix"] = suffix
    body["method"] = {"type": "supervised", "supervised": {"hyperparameters": hyperparameters}}
    files = {"training_file": data} | ({} if validation is None else {"validation_file": validation})
    with _uploaded(site, files) as ids:
        id = _create(site, {**body, **ids}, connect, plot, out)
    _follow(site, id, connect, plot, out)


def _create(site: HttpClient, body: dict[str, Any], connect: str, plot: Path | None, out: Path | None) -> str:
    """The new job's id. Who does not wait for it hears it too: the server checks the data and makes the job all the same."""
    key = secrets.token_hex(16)
    try:
        with err.status("Checking the data"):
            id = str(site.create_job(body, key)["id"])
    except KeyboardInterrupt:
        _tell("the server goes on checking the data, and then makes the job: asking for its id (Ctrl-C once more: leave)")
        try:
            id = str(site.create_job(body, key)["id"])  # the same key: the same job
        except (KeyboardInterrupt, Unreachable):
            _tell(f"the job may be there by now: `symbiosis jobs list{_at(connect)}` shows it")
            raise typer.Exit(130) from None
        _leave(id, connect, plot, out)
    _tell(f"the job is {id}")  # before what was uploaded is deleted, which may be interrupted too
    return id


@contextmanager
def _uploaded(site: HttpClient, files: dict[str, Path]) -> Iterator[dict[str, str]]:
    """Ids of files on the server, by field. A job that was accepted has copies of its own, so they are deleted in the end."""
    ids: dict[str, str] = {}
    try:
        with err.status("Uploading"):
            for field, path in files.items():
                ids[field] = site.upload(path)["id"]
        yield ids
    finally:
        for id in ids.values():
            try:
                site.remove_file(id)
            except SymbiosisError as error:
                err.print(f"{id} is left on the server: {error}", soft_wrap=True, highlight=False)


def _check_places(plot: Path | None, out: Path | None) -> None:
    """Before anything is trained: whether that can be written."""
    if out is not None:
        check_out(out)
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SymbiosisError(f"cannot write to {out}: {error.strerror}; choose another folder with --out") from None
    if plot is not None:
        _check_picture(plot)


def _check_picture(file: Path) -> None:
    from matplotlib.figure import Figure

    kinds = Figure().canvas.get_supported_filetypes()
    if file.suffix.lower().removeprefix(".") not in kinds or file.is_dir():
        raise SymbiosisError(f"cannot write {file}: expected a file such as loss.png, or of another kind ({', '.join(kinds)})")
    if not file.absolute().parent.is_dir():
        raise SymbiosisError(f"cannot write {file}: there is no folder {file.parent}; choose another file")


def _follow(site: HttpClient, id: str, connect: str, plot: Path | None, out: Path | None) -> None:
    try:
        job = _watch(site, id, connect)
    except Unreachable as error:
        raise Unreachable(f"{error}. The job may go on there: look with `{_again(id, connect, plot, out)}`") from None
    except KeyboardInterrupt:
        _leave(id, connect, plot, out)
    name = job["fine_tuned_model"]
    if job["status"] == "succeeded":
        served = f"is served: symbiosis chat --adapter {name} --connect {connect}" if name in _served(site) else f"is {_GONE}"
        typer.echo(f"{name} {served}")
    if out is not None and job["status"] == "succeeded":
        site.download_adapter(name, out)
        typer.echo(f"adapter written to {out}")
    if plot is not None:
        _plot(site, id, plot)
    if job["status"] != "succeeded":
        why = f": {job['error']['message']}" if job["error"] else ""
        raise SymbiosisError(f"the job {id} is {job['status']}{why}")


def _leave(id: str, connect: str, plot: Path | None, out: Path | None) -> NoReturn:
    """After Ctrl-C."""
    again = _again(id, connect, plot, out)
    _tell(f"the job stays with the server. Come back with `{again}`, or end it with `symbiosis jobs cancel {id}{_at(connect)}`")
    raise typer.Exit(130) from None


def _again(id: str, connect: str, plot: Path | None, out: Path | None) -> str:
    """What to type to follow a job as before."""
    more = "".join(f" {name} {shlex.quote(str(path))}" for name, path in (("--out", out), ("--plot", plot)) if path is not None)
    return f"symbiosis jobs watch {id}{_at(connect)}{more}"


def _at(connect: str) -> str:
    """Part of a command to type."""
    return "" if connect == DEFAULT_SITE else f" --connect {connect}"


def _watch(site: HttpClient, id: str, connect: str) -> dict[str, Any]:
    """Until the job has ended: a live line at a terminal, and else now and then one that stays."""
    with _bar() if err.is_terminal else nullcontext(_lines()) as show:
        missed, was_paused = 0, False
        while True:
            try:
                job = site.job(id)
            except Unreachable:
                missed += 1  # a server that was killed is started again, and its jobs go on
                if missed > _PATIENCE:
                    raise
            else:
                missed = 0
                show(job)
                if job["status"] in _ENDS:
                    return job
                is_paused = job["status"] == "paused"
                if is_paused and not was_paused:
                    _tell(f"the job is paused, and waited for: `symbiosis jobs resume {id}{_at(connect)}` lets it go on")
                was_paused = is_paused
            time.sleep(_LOOK_S)


@contextmanager
def _bar() -> Iterator[Show]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[figures]}"))
    with Progress(*columns, console=err) as bar:
        task = bar.add_task("", total=None, figures="")

        def show(job: dict[str, Any]) -> None:
            done, total = job["progress"]["step"], job["progress"]["total_steps"]
            bar.update(task, description=_status(job), completed=done, total=total or None, figures=_figures(job))

        yield show


def _lines() -> Show:
    """A line for each new status and each tenth of the way."""
    shown: tuple[str, int] | None = None

    def show(job: dict[str, Any]) -> None:
        nonlocal shown
        done, total = job["progress"]["step"], job["progress"]["total_steps"]
        now = (_status(job), 10 * done // (total or 1))
        if now != shown:
            shown = now
            err.print(f"{now[0]}  {done}/{total}  {_figures(job)}".rstrip(), soft_wrap=True, highlight=False)

    return show


def _figures(job: dict[str, Any]) -> str:
    progress = job["progress"]
    shown = {
        "loss": _number(progress.get("train_loss"), ".3f"),
        "validation": _number(progress.get("valid_loss"), ".3f"),
        "lr": _number(progress.get("learning_rate"), ".1e"),
        "tokens/s": _number(progress.get("tokens_per_s"), ",.0f"),
        "left": _left(job),
    }
    return "  ".join(f"{name} {value}" for name, value in shown.items() if value)


def _plot(site: HttpClient, id: str, file: Path) -> None:
    from matplotlib.figure import Figure

    points: dict[str, list[tuple[int, float]]] = {"train_loss": [], "valid_loss": []}
    for event in site.events(id):
        for name, found in points.items():
            if name in event["data"]:
                found.append((event["data"]["step"], event["data"][name]))
    if not points["train_loss"]:
        raise SymbiosisError(f"the job {id} has done no step yet: there is nothing to draw")
    figure = Figure(figsize=(8, 4.5), layout="constrained")
    axes = figure.subplots()
    for name, label in (("train_loss", "training"), ("valid_loss", "validation")):
        if points[name]:
            axes.plot(*zip(*points[name], strict=True), label=label, marker="." if len(points[name]) < 50 else "")
    axes.set(xlabel="step", ylabel="loss", title=id)
    axes.grid(alpha=0.3)
    axes.legend()
    try:
        figure.savefig(file, dpi=120)
    except (OSError, ValueError) as error:
        raise SymbiosisError(f"cannot write {file}: {error}") from None
    typer.echo(f"loss drawn in {file}")


def _served(site: HttpClient) -> set[str]:
    """Names of adapters. A job names its own for ever, also when it was deleted, or went with a server that keeps none."""
    return {each["id"] for each in site.adapters()}


def _tell(line: str) -> None:
    """Beside the output; a command in it can be copied, however narrow the terminal."""
    err.print(line, soft_wrap=True, highlight=False, markup=False)


def _say(job: dict[str, Any]) -> None:
    typer.echo(f"{job['id']} is {job['status']}")


def _status(job: dict[str, Any]) -> str:
    place = job["queue_position"]
    return str(job["status"]) if place is None else f"{job['status']} (number {place})"


def _number(value: float | None, form: str) -> str:
    return "" if value is None else format(value, form)


def _left(job: dict[str, Any]) -> str:
    if job["estimated_finish"] is None:
        return ""
    seconds = max(0, round(job["estimated_finish"] - time.time()))
    minutes, rest = divmod(seconds, 60)
    return f"{minutes // 60}:{minutes % 60:02}:{rest:02}" if minutes >= 60 else f"{minutes}:{rest:02}"


def _time(stamp: int | None) -> str:
    return "" if stamp is None else datetime.fromtimestamp(stamp).astimezone().strftime("%Y-%m-%d %H:%M:%S")
