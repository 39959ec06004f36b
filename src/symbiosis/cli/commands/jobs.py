"""`symbiosis jobs …` and `symbiosis finetune --hosted`: fine-tuning jobs on a server, over HTTP."""

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

from symbiosis.cli.commands.options import DEFAULT_URL, ConnectServer, Key, check_out
from symbiosis.cli.http_client import HttpClient
from symbiosis.cli.loss_plot import check_plot_file, plot_losses
from symbiosis.cli.loss_trend import training_warning
from symbiosis.cli.tables import print_fitting
from symbiosis.errors import SymbiosisError, Unreachable

_ENDS = ("succeeded", "failed", "cancelled")
_POLL_S = 0.5
_MAX_MISSED_POLLS = 60
"""Failed polls in a row before the command gives up: a server may be restarting."""
_NUMBERS = ("step", "loss", "tokens/s", "time left")
_COLUMNS = ("job", "owner", "status", *_NUMBERS, "adapter")
_OPTIONAL_COLUMNS = ("owner", "tokens/s", "loss", "time left", "step")
"""Columns that a narrow terminal omits, in this order."""
_MAX_CHECKED_STEPS = 5000
"""Longest job whose losses are fetched to warn of a rise: the server returns a hundred in a request."""
_GONE = "no longer served: it was deleted, or the server was restarted without --uploads"
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
    connect: ConnectServer = DEFAULT_URL,
    key: Key = None,
    limit: Annotated[int, typer.Option(min=1, help="Most jobs shown, newest first.")] = 20,
) -> None:
    """List your jobs; the admin sees those of all tenants."""
    client = HttpClient(connect, key)
    found, served = client.jobs(limit), _served(client)
    print_fitting(lambda without: jobs_table(found, served, without), _OPTIONAL_COLUMNS)


def jobs_table(found: list[dict[str, Any]], served: Collection[str], without: tuple[str, ...] = ()) -> Table:
    """Cells are never truncated; columns can be omitted."""
    table = Table(caption=None if found else "none yet: `symbiosis finetune DATA.jsonl --hosted`")
    for name in (each for each in _COLUMNS if each not in without):
        table.add_column(name, no_wrap=True, justify="right" if name in _NUMBERS else "left")
    for job in found:
        progress, adapter = job["progress"], job["fine_tuned_model"] or ""
        cells = {
            "job": escape(job["id"]),
            "owner": escape(job["organization_id"]),
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
def show(id: Id, connect: ConnectServer = DEFAULT_URL, key: Key = None) -> None:
    """Show all fields of a job."""
    client = HttpClient(connect, key)
    job = client.job(id)
    name = job["fine_tuned_model"]
    table = Table(show_header=False)
    table.add_column(no_wrap=True)
    table.add_column(overflow="fold")
    rows: dict[str, Any] = {"job": job["id"], "status": _status(job), "warning": _warning(client, job)}
    rows |= {"adapter": name if name is None or name in _served(client) else f"{name} ({_GONE})"}
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
    connect: ConnectServer = DEFAULT_URL,
    key: Key = None,
    plot: Annotated[Path | None, typer.Option("--plot", metavar="PNG", show_default=False, help="Plot of the loss.")] = None,
    out: Annotated[
        Path | None,
        typer.Option(
            "--out", metavar="FOLDER", show_default=False, help="Copy the finished adapter to this new or empty folder."
        ),
    ] = None,
) -> None:
    """Follow a job until it ends, also while it is paused. Ctrl-C leaves the job running."""
    _check_outputs(plot, out)
    _follow(HttpClient(connect, key), id, connect, plot, out)


@app.command(epilog="Example: symbiosis jobs events ftjob-…")
def events(
    id: Id,
    connect: ConnectServer = DEFAULT_URL,
    key: Key = None,
    limit: Annotated[int, typer.Option(min=1, help="Most events shown, from the newest.")] = 100,
) -> None:
    """List the events of a job, oldest first."""
    for event in HttpClient(connect, key).events(id, limit):
        typer.echo(f"{_time(event['created_at'])}  {event['level']:5}  {event['message']}")


@app.command(epilog="Example: symbiosis jobs plot ftjob-… loss.png")
def plot(
    id: Id,
    file: Annotated[Path, typer.Argument(metavar="PNG", help="File for the plot.")],
    connect: ConnectServer = DEFAULT_URL,
    key: Key = None,
) -> None:
    """Plot the loss over the steps."""
    check_plot_file(file)
    _plot(HttpClient(connect, key), id, file)


@app.command(epilog="Example: symbiosis jobs cancel ftjob-…")
def cancel(id: Id, connect: ConnectServer = DEFAULT_URL, key: Key = None) -> None:
    """Cancel a job. It cannot be resumed."""
    _print_status(HttpClient(connect, key).change_job(id, "cancel"))


@app.command(epilog="Example: symbiosis jobs pause ftjob-…")
def pause(id: Id, connect: ConnectServer = DEFAULT_URL, key: Key = None) -> None:
    """Pause a job at its last checkpoint."""
    _print_status(HttpClient(connect, key).change_job(id, "pause"))


@app.command(epilog="Example: symbiosis jobs resume ftjob-…")
def resume(id: Id, connect: ConnectServer = DEFAULT_URL, key: Key = None) -> None:
    """Resume a paused job."""
    _print_status(HttpClient(connect, key).change_job(id, "resume"))


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
    """Upload the data, create the job and follow it."""
    _check_outputs(plot, out)
    client = HttpClient(connect, key)
    body: dict[str, Any] = {"model": client.models()[0]["id"], "seed": seed}
    if suffix is not None:
        body["suffix"] = suffix
    body["method"] = {"type": "supervised", "supervised": {"hyperparameters": hyperparameters}}
    files = {"training_file": data} | ({} if validation is None else {"validation_file": validation})
    with _uploaded(client, files) as ids:
        id = _create(client, {**body, **ids}, connect, plot, out)
    _follow(client, id, connect, plot, out)


def _create(client: HttpClient, body: dict[str, Any], connect: str, plot: Path | None, out: Path | None) -> str:
    """Create the job and return its id. Ctrl-C does not stop the server from creating it, so the id is fetched and printed."""
    key = secrets.token_hex(16)
    try:
        with err.status("Checking the data"):
            id = str(client.create_job(body, key)["id"])
    except KeyboardInterrupt:
        _print_hint("the server still checks the data and creates the job: fetching its id (Ctrl-C again to quit)")
        try:
            id = str(client.create_job(body, key)["id"])  # the same key: the same job
        except (KeyboardInterrupt, Unreachable):
            _print_hint(f"the job may exist: `symbiosis jobs list{_at(connect)}` shows it")
            raise typer.Exit(130) from None
        _leave(id, connect, plot, out)
    _print_hint(f"the job is {id}")  # before the uploads are deleted, which can be interrupted
    return id


@contextmanager
def _uploaded(client: HttpClient, files: dict[str, Path]) -> Iterator[dict[str, str]]:
    """Upload files; yields their ids by field. They are deleted at the end, since an accepted job has its own copy."""
    ids: dict[str, str] = {}
    try:
        with err.status("Uploading"):
            for field, path in files.items():
                ids[field] = client.upload(path)["id"]
        yield ids
    finally:
        for id in ids.values():
            try:
                client.remove_file(id)
            except SymbiosisError as error:
                err.print(f"{id} was not deleted from the server: {error}", soft_wrap=True, highlight=False)


def _check_outputs(plot: Path | None, out: Path | None) -> None:
    """Check the output paths before training."""
    if out is not None:
        check_out(out)
        try:
            out.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise SymbiosisError(f"cannot write to {out}: {error.strerror}; choose another folder with --out") from None
    if plot is not None:
        check_plot_file(plot)


def _follow(client: HttpClient, id: str, connect: str, plot: Path | None, out: Path | None) -> None:
    try:
        job = _watch(client, id, connect)
    except Unreachable as error:
        raise Unreachable(f"{error}. The job may still run: follow it with `{_again(id, connect, plot, out)}`") from None
    except KeyboardInterrupt:
        _leave(id, connect, plot, out)
    name = job["fine_tuned_model"]
    if job["status"] == "succeeded":
        served = f"is served: symbiosis chat --adapter {name} --connect {connect}" if name in _served(client) else f"is {_GONE}"
        typer.echo(f"{name} {served}")
        if (warning := _warning(client, job)) is not None:
            _print_hint(f"warning: {warning}")
    if out is not None and job["status"] == "succeeded":
        client.download_adapter(name, out)
        typer.echo(f"adapter written to {out}")
    if plot is not None:
        _plot(client, id, plot)
    if job["status"] != "succeeded":
        why = f": {job['error']['message']}" if job["error"] else ""
        raise SymbiosisError(f"the job {id} is {job['status']}{why}")


def _leave(id: str, connect: str, plot: Path | None, out: Path | None) -> NoReturn:
    """Exit after Ctrl-C."""
    again = _again(id, connect, plot, out)
    _print_hint(
        f"the job continues on the server. Follow it with `{again}`, or stop it with `symbiosis jobs cancel {id}{_at(connect)}`"
    )
    raise typer.Exit(130) from None


def _again(id: str, connect: str, plot: Path | None, out: Path | None) -> str:
    """The command that follows the job with the same options."""
    more = "".join(f" {name} {shlex.quote(str(path))}" for name, path in (("--out", out), ("--plot", plot)) if path is not None)
    return f"symbiosis jobs watch {id}{_at(connect)}{more}"


def _at(connect: str) -> str:
    """The --connect option of a suggested command."""
    return "" if connect == DEFAULT_URL else f" --connect {connect}"


def _watch(client: HttpClient, id: str, connect: str) -> dict[str, Any]:
    """Poll until the job has ended: a progress bar at a terminal, else one line per tenth of the steps."""
    with _bar() if err.is_terminal else nullcontext(_lines()) as show:
        missed, was_paused = 0, False
        while True:
            try:
                job = client.job(id)
            except Unreachable:
                missed += 1  # a restarted server resumes its jobs
                if missed > _MAX_MISSED_POLLS:
                    raise
            else:
                missed = 0
                show(job)
                if job["status"] in _ENDS:
                    return job
                is_paused = job["status"] == "paused"
                if is_paused and not was_paused:
                    _print_hint(f"the job is paused: `symbiosis jobs resume {id}{_at(connect)}` resumes it")
                was_paused = is_paused
            time.sleep(_POLL_S)


@contextmanager
def _bar() -> Iterator[Show]:
    columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.fields[status]}"))
    with Progress(*columns, console=err) as bar:
        task = bar.add_task("", total=None, status="")

        def show(job: dict[str, Any]) -> None:
            done, total = job["progress"]["step"], job["progress"]["total_steps"]
            bar.update(task, description=_status(job), completed=done, total=total or None, status=_progress(job))

        yield show


def _lines() -> Show:
    """Print a line for each new status and each tenth of the steps."""
    shown: tuple[str, int] | None = None

    def show(job: dict[str, Any]) -> None:
        nonlocal shown
        done, total = job["progress"]["step"], job["progress"]["total_steps"]
        now = (_status(job), 10 * done // (total or 1))
        if now != shown:
            shown = now
            err.print(f"{now[0]}  {done}/{total}  {_progress(job)}".rstrip(), soft_wrap=True, highlight=False)

    return show


def _progress(job: dict[str, Any]) -> str:
    progress = job["progress"]
    shown = {
        "loss": _number(progress.get("train_loss"), ".3f"),
        "validation": _number(progress.get("valid_loss"), ".3f"),
        "lr": _number(progress.get("learning_rate"), ".1e"),
        "tokens/s": _number(progress.get("tokens_per_s"), ",.0f"),
        "left": _left(job),
    }
    return "  ".join(f"{name} {value}" for name, value in shown.items() if value)


def _warning(client: HttpClient, job: dict[str, Any]) -> str | None:
    """A warning if a finished job was very short, or its loss rose."""
    if job["status"] != "succeeded" or job["progress"]["total_steps"] > _MAX_CHECKED_STEPS:
        return None
    return training_warning(
        [event["data"]["train_loss"] for event in client.events(job["id"]) if "train_loss" in event["data"]]
    )


def _plot(client: HttpClient, id: str, file: Path) -> None:
    plot_losses(client.events(id), id, file)
    typer.echo(f"loss plotted in {file}")


def _served(client: HttpClient) -> set[str]:
    """Names of the adapters that are served. A job keeps the name of its adapter after the adapter is deleted."""
    return {each["id"] for each in client.adapters()}


def _print_hint(line: str) -> None:
    """Print to stderr without wrapping, so that commands can be copied."""
    err.print(line, soft_wrap=True, highlight=False, markup=False)


def _print_status(job: dict[str, Any]) -> None:
    typer.echo(f"{job['id']} is {job['status']}")


def _status(job: dict[str, Any]) -> str:
    place = job["queue_position"]
    return str(job["status"]) if place is None else f"{job['status']} (position {place})"


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
