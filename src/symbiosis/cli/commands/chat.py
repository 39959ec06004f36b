"""`symbiosis chat` and `symbiosis generate`."""

from __future__ import annotations

import socket
import sys
from collections.abc import Iterator
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated
from urllib.parse import urlsplit

import typer
from rich.console import Console

from symbiosis.cli.commands.options import DEFAULT_ADDRESS, DEFAULT_URL, ConnectExecutor, Key, Name, Token, is_given, is_url
from symbiosis.errors import SymbiosisError, Unreachable

if TYPE_CHECKING:
    from symbiosis.cli.chat import ChatBackend, ChatSampling, Write

_PROBE_TIMEOUT_S = 1.0
err = Console(stderr=True)

app = typer.Typer()
Adapter = Annotated[
    Path | None, typer.Option("--adapter", metavar="FOLDER", show_default=False, help="A saved PEFT adapter to generate with.")
]
Temperature = Annotated[float, typer.Option("--temperature", help="0: greedy decoding.")]
MaxNewTokens = Annotated[int, typer.Option("--max-new-tokens", help="Most tokens of one reply.")]
Seed = Annotated[int | None, typer.Option("--seed", show_default=False, help="Makes sampling repeatable.")]


@app.command(epilog="Example: symbiosis chat --adapter pirate --system 'Answer in one sentence.'")
def chat(
    ctx: typer.Context,
    connect: Annotated[
        str | None,
        typer.Option(
            "--connect",
            metavar="ADDRESS",
            show_default=False,
            help=f"A server's http://HOST:PORT, or where an executor listens. (default: {DEFAULT_URL}; {DEFAULT_ADDRESS} with "
            "--split, for an adapter's folder, or if nothing serves HTTP)",
        ),
    ] = None,
    split: Annotated[
        bool, typer.Option("--split", help="Through the executor: attention and your adapter run in this process.")
    ] = False,
    token: Token = None,
    key: Key = None,
    name: Name = "chat",
    adapter: Annotated[
        str | None,
        typer.Option(
            "--adapter",
            metavar="NAME",
            show_default=False,
            help="An adapter of the server; or the folder of one of your own, which implies --split.",
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(show_default=False, help="System message.")] = None,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.0,
    seed: Seed = None,
) -> None:
    """Chat with the model. Lines come from the terminal, or from a pipe.

    A server (`symbiosis serve --http`) computes everything and holds the adapters.

    With --split, attention and your adapter run in this process, which takes seconds to start.
    """
    from symbiosis.cli import chat

    sampling = _sampling(max_new_tokens, temperature)
    if adapter == "":
        raise SymbiosisError("--adapter is empty: expected a name or a folder; leave it out to chat with the base model")
    if adapter is not None and adapter.startswith((".", "/", "~")) and not Path(adapter).is_dir():
        raise SymbiosisError(f"there is no folder {adapter}: expected a folder, or the name of an adapter of the server")
    is_folder = adapter is not None and Path(adapter).is_dir()
    if connect is None:
        split = split or is_folder or is_given(ctx, "token")
        connect = _default_address(split, has_adapter=adapter is not None)
    over_http = is_url(connect)
    if over_http and split:
        raise SymbiosisError(f"{connect} is the address of a server: --split expects that of an executor (tcp:// or shm://)")
    if not over_http and adapter is not None and not is_folder:
        raise SymbiosisError(
            f"there is no folder {adapter}: {connect} is an executor, which expects the folder of an adapter; "
            "names are those of a server (--connect http://HOST:PORT)"
        )
    if is_given(ctx, "token" if over_http else "key"):
        raise SymbiosisError(f"{connect} takes {'--key, not --token' if over_http else '--token, not --key'}")
    if adapter is not None and not over_http:
        chat.check_adapter_files(Path(adapter))
    with ExitStack() as stack:
        with err.status(f"Connecting to {connect}"):
            backend: ChatBackend
            if over_http:
                from symbiosis.cli.http_client import HttpClient, HttpError

                try:
                    backend = chat.HttpChat(HttpClient(connect, key), adapter, seed)
                except HttpError as error:
                    hint = f". For the folder {adapter}: `symbiosis adapters add NAME {adapter}`" if is_folder else ""
                    raise HttpError(f"{error}{hint}") from None
            else:
                from symbiosis.cli import local_chat

                folder = None if adapter is None else Path(adapter)
                opened = local_chat.open_local_chat(connect, token=token, name=name, adapter=folder, seed=seed)
                backend = stack.enter_context(opened)
        chat.chat(_WithSpinner(backend), _lines(), sampling, _write, system)


@app.command(epilog="Example: symbiosis generate 'Why is the sky blue?' --max-new-tokens 60")
def generate(
    prompts: Annotated[list[str], typer.Argument(metavar="PROMPT...", help="Each prompt is a chat of its own.")],
    connect: ConnectExecutor = DEFAULT_ADDRESS,
    token: Token = None,
    name: Name = "generate",
    adapter: Adapter = None,
    max_new_tokens: MaxNewTokens = 128,
    temperature: Temperature = 0.0,
    seed: Seed = None,
    raw: Annotated[bool, typer.Option("--raw", help="Complete the text without a chat template.")] = False,
) -> None:
    """Generate replies and exit. Only the text goes to stdout."""
    from symbiosis.cli.chat import check_adapter_files
    from symbiosis.transport.addresses import address_scheme, not_an_address

    sampling = _sampling(max_new_tokens, temperature)
    if not address_scheme(connect) or is_url(connect):
        raise not_an_address(connect)
    if adapter is not None:
        check_adapter_files(adapter)
    with err.status("Starting"):
        from symbiosis.cli import local_chat
    with ExitStack() as stack:
        with err.status(f"Connecting to {connect}"):
            opened = local_chat.open_local_chat(connect, token=token, name=name, adapter=adapter, seed=seed)
            backend = stack.enter_context(opened)
        for prompt in prompts:
            if raw:
                backend.complete(prompt, sampling, _write)
            else:
                backend.reply([{"role": "user", "content": prompt}], sampling, _write)
            _write("\n")


def _default_address(split: bool, *, has_adapter: bool) -> str:
    """Where to chat without --connect: over HTTP where it is served. Raises `Unreachable`."""
    if split or _is_listening(DEFAULT_URL):
        return DEFAULT_ADDRESS if split else DEFAULT_URL
    if not has_adapter and _is_listening(DEFAULT_ADDRESS):
        err.print(
            f"nothing serves HTTP at {DEFAULT_URL}: chatting through the executor at {DEFAULT_ADDRESS}",
            highlight=False,
            soft_wrap=True,
        )
        return DEFAULT_ADDRESS
    raise Unreachable(
        f"no server at {DEFAULT_URL}: start one with `symbiosis serve --http` (or `make serve`) in another terminal, "
        "or give its address with --connect"
    )


def _is_listening(address: str) -> bool:
    at = urlsplit(address)
    with suppress(OSError), socket.create_connection((at.hostname, at.port), timeout=_PROBE_TIMEOUT_S):
        return True
    return False


class _WithSpinner:
    """Shows a spinner until the first text of a reply."""

    def __init__(self, backend: ChatBackend) -> None:
        self._backend = backend

    def reply(self, messages: list[dict[str, str]], sampling: ChatSampling, write: Write | None = None) -> str:
        with err.status("Waiting for the first token") as spinner:

            def stop_and_write(text: str) -> None:
                if text:
                    spinner.stop()
                if write is not None:
                    write(text)

            return self._backend.reply(messages, sampling, stop_and_write)


def _sampling(max_new_tokens: int, temperature: float) -> ChatSampling:
    from symbiosis.cli.chat import ChatSampling

    return ChatSampling(max_new_tokens=max_new_tokens, temperature=temperature)


def _lines() -> Iterator[str]:
    """Lines of input: a prompt at a terminal, plain lines otherwise."""
    if not sys.stdin.isatty():
        yield from sys.stdin
        return
    import readline  # noqa: F401  # adds history and line editing to input()

    err.print("[dim]/exit or Ctrl-D ends the chat[/dim]")
    with suppress(EOFError):
        while True:
            yield input("> ")


def _write(text: str) -> None:
    sys.stdout.write(text)
    sys.stdout.flush()
