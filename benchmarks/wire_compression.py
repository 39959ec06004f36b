"""Does lossless compression of rows pay on a network?

Rows of the default model (512 tokens of text, one layer in the middle) are compressed with the codecs of the standard
library: as they are, byte plane by byte plane, and the plane of the exponents alone by a Huffman code. Reported are the
share of the bytes left, the time to compress and decompress, and the time that the missing bytes take at 1 and 10 Gbit/s.

    python -m benchmarks.wire_compression           # about 10 seconds
    python -m benchmarks.wire_compression --tiny    # on random rows, for the tests
"""

from __future__ import annotations

import argparse
import statistics
import time
import zlib
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from benchmarks.results import FOLDER, save

QUESTION = str(__doc__).splitlines()[0]
TOKENS, REPETITIONS = 512, 5
_Parts = list[bytes]


def rows_of_default_model() -> dict[str, Any]:
    """What a tenant sends and receives at one layer, forward and backward, in float32."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    from symbiosis.models.default_model import default_model_folder

    torch.set_num_threads(1)
    folder, found = default_model_folder(), dict[str, Any]()
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).requires_grad_(False)
    text = (Path(__file__).parent.parent / "docs" / "architecture.md").read_text()
    ids = AutoTokenizer.from_pretrained(folder)(text, return_tensors="pt").input_ids[:, :TOKENS]
    attention = model.model.layers[len(model.model.layers) // 2].self_attn
    attention.q_proj.register_forward_hook(lambda _, given, made: found.update(normed=given[0], query=made))
    attention.o_proj.register_forward_hook(lambda _, given, made: found.update(attention=given[0]))
    attention.q_proj.register_full_backward_hook(lambda _, grads, made: found.update(gradient=made[0]))
    embedded = model.get_input_embeddings()(ids).requires_grad_()
    model(inputs_embeds=embedded, labels=ids).loss.backward()
    return {name: rows.detach()[0].contiguous().numpy() for name, rows in found.items()}


def planes(rows: np.ndarray[Any, Any]) -> _Parts:
    """First bytes of all numbers, then second bytes, and so on. The last plane has the exponents."""
    by_number = rows.view(np.uint8).reshape(-1, rows.itemsize)
    return [np.ascontiguousarray(by_number[:, place]).tobytes() for place in range(rows.itemsize)]


def huffman(plane: bytes) -> bytes:
    codec = zlib.compressobj(1, zlib.DEFLATED, 15, 9, zlib.Z_HUFFMAN_ONLY)
    return codec.compress(plane) + codec.flush()


CODECS: dict[str, tuple[Callable[[Any], _Parts], Callable[[_Parts], object]]] = {
    "zlib": (lambda rows: [zlib.compress(rows.tobytes(), 1)], lambda parts: zlib.decompress(parts[0])),
    "planes, zlib": (
        lambda rows: [zlib.compress(plane, 1) for plane in planes(rows)],
        lambda parts: np.stack([np.frombuffer(zlib.decompress(part), np.uint8) for part in parts], axis=1),
    ),
    "planes, exponents by Huffman": (
        lambda rows: [*planes(rows)[:-1], huffman(planes(rows)[-1])],
        lambda parts: np.stack([np.frombuffer(p, np.uint8) for p in (*parts[:-1], zlib.decompress(parts[-1]))], axis=1),
    ),
}


def timed(run: Callable[[], Any]) -> tuple[Any, float]:
    """Its result, and the median of its CPU seconds."""
    seconds = []
    for _ in range(REPETITIONS):
        started = time.thread_time()
        result = run()
        seconds.append(time.thread_time() - started)
    return result, statistics.median(seconds)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="random rows, for the tests")
    parser.add_argument("--out", type=Path, default=FOLDER)
    chosen = parser.parse_args(arguments)
    random = {"random": np.random.default_rng(0).standard_normal((16, 64), dtype=np.float32)}
    console, runs = Console(width=160), []
    for name, rows in (random if chosen.tiny else rows_of_default_model()).items():
        for codec, (compress, decompress) in CODECS.items():
            parts, compress_s = timed(lambda rows=rows, compress=compress: compress(rows))
            _, decompress_s = timed(lambda parts=parts, decompress=decompress: decompress(parts))
            left = sum(len(part) for part in parts)
            saved = {f"saved_s_{gbit}_gbit": 8 * (rows.nbytes - left) / (gbit * 1e9) for gbit in (1, 10)}
            times = {"compress_s": compress_s, "decompress_s": decompress_s}
            runs.append({"rows": name, "codec": codec, "bytes": rows.nbytes, "share": left / rows.nbytes, **times, **saved})
            console.print(
                f"{name}, {codec}: {left / rows.nbytes:.3f} of {rows.nbytes / 1e6:.2f} MB, "
                f"{1e3 * (compress_s + decompress_s):.1f} ms, saves {1e3 * saved['saved_s_1_gbit']:.2f} ms at 1 Gbit/s"
            )
    save("wire-compression", QUESTION, {"script": "wire_compression", "runs": runs}, chosen.out)


if __name__ == "__main__":
    main()
