"""Is a prefix that another engine has there sooner if it is computed, copied, or both until the two meet?

Two engines in processes of their own. The first computes a prompt: the time of recomputing alone. The second copies its blocks
from the first, without computing: the time of copying alone. Then the second gets the prompt as a request and computes it from
the front while it copies from the back. Reported for each length: seconds until all keys and values are there, the rates, and
the seconds of both ways together as a multiple of n / (recompute rate + copy rate), for the median and each repetition.

A CPU computes so slowly that any link within one machine is much faster. So the link has a limited rate there, at which copying
takes about as long as computing. Both engines share the cores, with one thread for each: what encrypts and copies takes time
from what computes, unless there are more cores than two.

    python -m benchmarks.kv_copies --cpu                 # about 10 minutes on 2 cores: one thread for each engine
    python -m benchmarks.kv_copies 1b_long               # a GPU that both engines share, sockets of one host
    python -m benchmarks.kv_copies 1b_long --link host   # TCP with encryption, as between hosts
    python -m benchmarks.kv_copies --cpu --tiny          # seconds, for the tests
"""

from __future__ import annotations

import asyncio
import random
import statistics
import time
from collections.abc import Sequence
from dataclasses import replace
from multiprocessing.connection import Connection
from typing import Any

from rich.console import Console

from benchmarks.gpu import options
from benchmarks.results import save
from benchmarks.shapes import SHAPES, random_model
from benchmarks.tenants import context_for

QUESTION = str(__doc__).splitlines()[0]
SECRET = "the secret of this benchmark"
LENGTHS = (4096, 8192, 16384, 32768)
BLOCK_SIZE = 16
SPARE_TOKENS = 1024
START_S = 300.0
CPU_MBIT_PER_S = 200.0
PIECE_BYTES = 1 << 15
BURST_S = 0.02  # a busy machine wakes the link late
WAYS = ("recompute", "copy", "both")


class CopyAlone:
    """The blocks of a prompt, copied from another engine to blocks of this one."""

    def __init__(self, service: Any, core: Any, listener: Any) -> None:
        import threading

        from symbiosis.serving.block_exchange.block_client import BlockClient

        memory = core.block_memory
        self._loop, self._blocks, self._memory = service.engine_loop, core.scheduler.block_manager, memory
        self._client = BlockClient(listener, f"{memory.layout} of a model", memory.block_bytes, self)
        self._over, self._left, self._sequence = threading.Event(), 0, None

    def run(self, prompt: list[int], source: Any) -> float:
        """Seconds."""
        from symbiosis.serving.scheduling.sequence import Sampling
        from symbiosis.serving.scheduling.sequence import Sequence as Completion

        self._over.clear()
        self._sequence = Completion(id="copy", tenant="", prompt=prompt, sampling=Sampling(), arrival=0.0)
        self._loop.call(lambda: self._start(source))
        started = time.perf_counter()
        self._over.wait()
        return time.perf_counter() - started

    def _start(self, source: Any) -> None:
        self._blocks.allocate(self._sequence, len(self._sequence.tokens))
        missing = self._blocks.missing_blocks(self._sequence)
        self._left = len(missing)
        self._client.fetch(0, source, self._blocks.hashes(self._sequence, missing)[::-1])

    def receive(self, number: int, piece: Any, content: Any, seconds: float) -> None:
        received = self._memory.stage(content)
        self._loop.call(lambda: self._write(piece, received))

    def _write(self, piece: Any, received: Any) -> None:
        end = self._blocks.missing_blocks(self._sequence).stop - piece.position
        self._memory.write(self._sequence.block_table[end - piece.blocks : end], received)
        self._left -= piece.blocks
        self._client.take(0, piece.blocks)

    def end(self, number: int) -> None:
        self._loop.call(self._finish)

    def _finish(self) -> None:
        assert not self._left, "the source had not all blocks"
        for _ in range(2):
            self._memory.wait_for_last()
        self._blocks.free(self._sequence)
        self._over.set()


def serve(shape: str, device: str, tokens: int, pipe: Connection) -> None:
    """An engine; it copies what the pipe says."""
    import torch

    from symbiosis.models.fuse_projections import fuse_projections
    from symbiosis.serving.engine_core import EngineCore
    from symbiosis.serving.engine_service import EngineService
    from symbiosis.transport.engine_ipc import ClusterKey, EngineAddress, EngineListener

    if device == "cpu":
        torch.set_num_threads(1)
    key = ClusterKey.of(SECRET)
    listener = EngineListener(host="127.0.0.1", clients=key)
    model = random_model(shape, device)
    fuse_projections(model)
    core = EngineCore(model, pages=tokens // BLOCK_SIZE, page_size=BLOCK_SIZE)
    service = EngineService(core, listener, "a model")
    copy_alone = CopyAlone(service, core, listener)
    pipe.send((service.address.to_json(), core.block_memory.block_bytes / BLOCK_SIZE))
    while (asked := pipe.recv()) is not None:
        prompt, source = asked
        pipe.send(copy_alone.run(prompt, EngineAddress.from_json(source)))
    service.rpc.close()


class RunningEngine:
    """In a process of its own."""

    def __init__(self, *arguments: Any) -> None:
        context = context_for(arguments[1])
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=serve, args=(*arguments, theirs), daemon=True)
        self._process.start()

    def start(self) -> None:
        from symbiosis.transport.engine_ipc import EngineAddress

        if not self._pipe.poll(START_S):
            raise RuntimeError(f"the engine did not start within {START_S:.0f} s")
        address, self.token_bytes = self._pipe.recv()
        self.address = EngineAddress.from_json(address)

    async def connect(self) -> None:
        from symbiosis.server.engines.engine_client import EngineClient
        from symbiosis.transport.engine_ipc import ClusterKey, IpcClient

        self.client = EngineClient(IpcClient(self.address, ClusterKey.of(SECRET), timeout_s=60.0))
        await self.client.start()

    async def ask(self, prompt: list[int], source: Any = None) -> float:
        """Seconds to the first token."""
        from symbiosis.serving.engine_messages import GenerateRequest
        from symbiosis.serving.scheduling.sequence import Sampling

        sampling = Sampling(temperature=0, max_tokens=1, ignore_eos=True)
        started = time.perf_counter()
        async with self.client.submit([GenerateRequest(prompt=prompt, sampling=sampling, source=source)]) as active:
            async for events in active.events():
                for _, event in events:
                    assert getattr(event, "error", None) is None, event
        return time.perf_counter() - started

    async def copy(self, prompt: list[int], source: Any) -> float:
        """Seconds of copying alone."""
        self._pipe.send((prompt, source.to_json()))
        while not self._pipe.poll():
            await asyncio.sleep(0.001)
        return float(self._pipe.recv())

    async def count_received(self) -> int:
        """Tokens that requests have received so far."""
        return int((await self.client.ask("stats"))["blocks_fetched"]) * BLOCK_SIZE

    def close(self) -> None:
        self._process.kill()
        self._process.join()


class SlowLink:
    """TCP to an engine's blocks at a limited rate."""

    def __init__(self, address: str, bytes_per_s: float) -> None:
        self._host, self._port = address.removeprefix("tcp://").rsplit(":", 1)
        self._bytes_per_s = bytes_per_s

    async def start(self) -> str:
        """Its own address."""
        self._server = await asyncio.start_server(self._forward, "127.0.0.1", 0)
        return f"tcp://127.0.0.1:{self._server.sockets[0].getsockname()[1]}"

    async def _forward(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        far_reader, far_writer = await asyncio.open_connection(self._host, int(self._port))
        try:
            await asyncio.gather(self._pump(reader, far_writer), self._pump(far_reader, writer))
        except ConnectionError:
            pass
        finally:
            writer.close()
            far_writer.close()

    async def _pump(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        free_s = 0.0
        while content := await reader.read(PIECE_BYTES):
            free_s = max(free_s, time.perf_counter() - BURST_S) + len(content) / self._bytes_per_s
            await asyncio.sleep(max(0.0, free_s - time.perf_counter()))
            writer.write(content)
            await writer.drain()
        writer.close()


async def measure(
    engines: Sequence[RunningEngine],
    lengths: Sequence[int],
    warm_up: Sequence[int],
    vocabulary: int,
    repetitions: int,
    link: str,
    bytes_per_s: float,
    console: Console,
) -> list[dict[str, Any]]:
    source, target = engines
    for engine in engines:
        await engine.connect()
    if link == "host":
        source.address = replace(source.address, local="")
    if bytes_per_s:
        source.address = replace(source.address, blocks=await SlowLink(source.address.blocks, bytes_per_s).start())
    rng, rows = random.Random(0), []

    def prompt_of(length: int) -> list[int]:
        return [rng.randrange(vocabulary) for _ in range(length)]

    for length in warm_up:
        prompt = prompt_of(length)
        await source.ask(prompt)
        await target.ask(prompt, source.address)
    for length in lengths:
        runs: dict[str, list[float]] = {way: [] for way in WAYS}
        copied = []
        for _ in range(repetitions):
            prompt = prompt_of(length)
            runs["recompute"].append(await source.ask(prompt))
            runs["copy"].append(await target.copy(prompt, source.address))
            before = await target.count_received()
            runs["both"].append(await target.ask(prompt, source.address))
            copied.append(await target.count_received() - before)
        rows.append(row := summary(length, runs, copied))
        console.print(
            f"{length} tokens: " + ", ".join(f"{way} {row['seconds'][way]:.3f} s" for way in WAYS),
            f"copied {row['copied']:.0f}, {row['ratio']:.2f} x n / (sum of rates)",
        )
    for engine in engines:
        await engine.client.close()
    return rows


def summary(length: int, runs: dict[str, list[float]], copied: list[int]) -> dict[str, Any]:
    seconds = {way: statistics.median(values) for way, values in runs.items()}
    ratios = [
        both / (1 / (1 / recompute + 1 / copy))
        for recompute, copy, both in zip(runs["recompute"], runs["copy"], runs["both"], strict=True)
    ]
    return {
        "tokens": length,
        "seconds": seconds,
        "tokens_per_s": {way: length / seconds[way] for way in WAYS},
        "copied": statistics.median(copied),
        "ratio": statistics.median(ratios),
        "ratios": ratios,
        "runs": runs,
    }


def main(arguments: Sequence[str] | None = None) -> dict[str, Any]:
    parser = options(str(__doc__), shapes=["small_long", "1b_long", "7b_long"], shape="small_long")
    parser.add_argument("--link", choices=("local", "host"), help="within one host, or between hosts (default host on a CPU)")
    parser.add_argument("--lengths", type=int, nargs="+", default=LENGTHS, help="of prefixes, in tokens")
    parser.add_argument("--repetitions", type=int, default=5)
    parser.add_argument("--tiny", action="store_true", help="for the tests")
    parser.add_argument("--mbit-per-s", type=float, help=f"of the link; 0: no limit (default {CPU_MBIT_PER_S:g} on a CPU)")
    chosen = parser.parse_args(arguments)
    is_cpu, mbit_per_s = chosen.device == "cpu", chosen.mbit_per_s
    link = chosen.link or ("host" if is_cpu else "local")
    if mbit_per_s is None:
        mbit_per_s = CPU_MBIT_PER_S if is_cpu and link == "host" else 0.0
    shape, lengths = ("tiny", [256, 512]) if chosen.tiny else (chosen.shape, list(chosen.lengths))
    console = Console(width=160)
    engines = [RunningEngine(shape, chosen.device, max(lengths) + SPARE_TOKENS) for _ in range(2)]
    try:
        with console.status("engines start"):
            for engine in engines:
                engine.start()
        vocabulary = SHAPES[shape].config["vocab_size"]
        repetitions = 1 if chosen.tiny else chosen.repetitions
        warm_up = lengths[:2] if is_cpu else 4 * lengths  # rates that the target measures; CUDA graphs of several sizes
        rows = asyncio.run(measure(engines, lengths, warm_up, vocabulary, repetitions, link, mbit_per_s * 1e6 / 8, console))
    finally:
        for engine in engines:
            engine.close()
    figures = {"script": "kv_copies", "shape": shape, "device": chosen.device, "link": link, "rows": rows}
    figures["mbit_per_s"], figures["token_bytes"] = mbit_per_s, engines[0].token_bytes
    name = "tiny" if chosen.tiny else f"{shape}-{link}"
    console.print(save(f"kv-copies-{name}", QUESTION, figures, chosen.out))
    return figures


if __name__ == "__main__":
    main()
