"""`symbiosis chat` and `symbiosis generate`."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer
from rich.console import Console

from symbiosis.cli.commands.options import DEFAULT_ADDRESS, DEFAULT_URL, ConnectExecutor, Key, Name, Token, is_given
from symbiosis.errors import SymbiosisError

if TYPE_CHECKING:
    from symbiosis.cli.chat import ChatSampling

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
            help=f"Where the executor listens, or a server's http://HOST:PORT. (default: {DEFAULT_ADDRESS}; {DEFAULT_URL} if "
            "--adapter is a name)",
        ),
    ] = None,
    token: Token = None,
    key: Key = None,
    name: Name = "chat",
    adapter: Annotated[
        str | None,
        typer.Option(
            "--adapter",
            metavar="NAME",
            show_default=False,
            help="An adapter of the server; or, with an executor, the folder of one of your own.",
        ),
    ] = None,
    system: Annotated[str | None, typer.Option(show_default=False, help="System message.")] = None,
    max_new_tokens: MaxNewTokens = 256,
    temperature: Temperature = 0.2,
    seed: Seed = None,
) -> None:
    """Chat with the model. Lines come from the terminal, or from a pipe.

    A server (`symbiosis serve --http`) computes everything and holds the adapters; with an executor,
    attention and your adapter run in this process.
    """
    from symbiosis.cli import chat

    sampling = _sampling(max_new_tokens, temperature)
    if adapter == "":
        raise SymbiosisError("--adapter is empty: expected a name or a folder; leave it out to chat with the base model")
    if adapter is not None and adapter.startswith((".", "/", "~")) and not Path(adapter).is_dir():
        raise SymbiosisError(f"there is no folder {adapter}: expected a folder, or the name of an adapter of the server")
    if connect is None:
        connect = DEFAULT_ADDRESS if adapter is None or Path(adapter).is_dir() else DEFAULT_URL
    over_http = connect.startswith(("http://", "https://"))
    if is_given(ctx, "token" if over_http else "key"):
        raise SymbiosisError(f"{connect} takes {'--key, not --token' if over_http else '--token, not --key'}")
    if over_http:
        from symbiosis.cli.http_client import HttpClient

        chat.chat(chat.HttpChat(HttpClient(connect, key), adapter, seed), _lines(), sampling, _write, system)
        return
    from symbiosis.cli import local_chat

    folder = None if adapter is None else Path(adapter)
    with local_chat.open_local_chat(connect, token=token, name=name, adapter=folder, seed=seed) as backend:
        chat.chat(backend, _lines(), sampling, _write, system)


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
    from symbiosis.cli import local_chat

    sampling = _sampling(max_new_tokens, temperature)
    with local_chat.open_local_chat(connect, token=token, name=name, adapter=adapter, seed=seed) as backend:
        for prompt in prompts:
            if raw:
                backend.complete(prompt, sampling, _write)
            else:
                backend.reply([{"role": "user", "content": prompt}], sampling, _write)
            _write("\n")


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
