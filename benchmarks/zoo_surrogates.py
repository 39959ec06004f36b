"""What does a surrogate of a block cost the whole chain, and what does it save?

Blocks of the default model are pruned to half of their weights and distilled from themselves: the FFN, the attention and the
whole layer, at several layers, a critical one among them. Measured on text that they were not made with: at how many positions
the whole chain has the same next token as the true chain, the loss, and the cosine of the block's output. Each block is timed
alone against its surrogate, in turns in one process, at 1, 16 and 128 rows. The texts are docstrings of Python's standard
library and READMEs of the packages of this environment; held out are those of other modules and packages.

    python -m benchmarks.zoo_surrogates                  # about 15 minutes on 2 cores
    python -m benchmarks.zoo_surrogates --budget-s 250   # stops after the layer that it is at; run it again for the others
    python -m benchmarks.zoo_surrogates --tiny           # seconds, for the tests
"""

from __future__ import annotations

import argparse
import ast
import hashlib
import json
import random
import sysconfig
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from importlib.metadata import distributions
from pathlib import Path
from typing import Any

from benchmarks.plots import pyplot
from benchmarks.results import FOLDER, save

QUESTION = str(__doc__).splitlines()[0]
ZOO = Path("build/zoo-surrogates")
MODEL = "default"
PAPER = {
    "5th Attention": {"pruned": 0.4971, "cosine": 0.70, "speedup": 37.43},
    "5th FFN": {"pruned": 0.4983, "cosine": 0.77, "speedup": 1.71},
    "5th Transformer": {"pruned": 0.4979, "cosine": 0.94, "speedup": 22.91},
    "5th-7th Transformers": {"pruned": 0.4979, "cosine": 0.84, "speedup": 18.55},
}
"""Table 4 of BlockLLM: blocks of LLaMA 7B."""
_MIN_DOCSTRING, _README, _LENGTH, _CHARACTERS = 80, 20_000, 256, 6
"""Least and most characters of a text, tokens of a sequence, characters to read for each token."""
_NOT_READ = {"site-packages", "test", "tests", "idlelib"}


@dataclass(frozen=True, kw_only=True)
class Plan:
    layers: tuple[int, ...] = (12, 20, 1)
    """1 is one of those that zoo.md found critical."""
    kinds: tuple[str, ...] = ("ffn", "attention", "layer")
    keep: float = 0.5
    tokens: int = 32_768
    held_out: int = 3_072
    seconds: float = 40.0
    """Of training, for each surrogate."""
    threads: int = 2
    tiny: bool = False


def texts(plan: Plan) -> dict[str, str]:
    """`used` and `held out`: of different modules and packages. Half of each are docstrings."""
    library = Path(sysconfig.get_paths()["stdlib"])
    modules = sorted(path for path in library.rglob("*.py") if not _NOT_READ & set(path.parts))
    packages = sorted(distributions(), key=lambda each: str(each.metadata["Name"]).lower())
    random.Random(0).shuffle(modules)
    random.Random(0).shuffle(packages)
    found = {}
    for name, is_held_out, tokens in (("used", False, plan.tokens), ("held out", True, plan.held_out)):
        characters, parts = tokens * _CHARACTERS, list[str]()
        for source in (map(_docstrings, _part(modules, is_held_out)), map(_readme, _part(packages, is_held_out))):
            wanted = sum(map(len, parts)) + characters // 2
            while sum(map(len, parts)) < wanted and (text := next(source, None)) is not None:
                parts.append(text)
        random.Random(0).shuffle(parts)
        found[name] = "\n\n".join(each for each in parts if each)
    return found


def _part(items: Sequence[Any], is_held_out: bool) -> list[Any]:
    return [each for number, each in enumerate(items) if (number % 8 == 0) == is_held_out]


def _readme(package: Any) -> str:
    return str(package.metadata.get_payload() or "")[:_README]


def _docstrings(path: Path) -> str:
    try:
        tree = ast.parse(path.read_text())
    except (SyntaxError, ValueError, UnicodeDecodeError):
        return ""
    kinds = (ast.Module, ast.ClassDef, ast.FunctionDef, ast.AsyncFunctionDef)
    found = [ast.get_docstring(node) or "" for node in ast.walk(tree) if isinstance(node, kinds)]
    return "\n\n".join(each for each in found if len(each) >= _MIN_DOCSTRING)


def open_zoo(folder: Path, plan: Plan) -> Any:
    """With the model, which is added on first use."""
    from symbiosis.zoo.zoo import Zoo

    zoo = Zoo(folder, create=True)
    if MODEL not in zoo.names():
        if plan.tiny:
            from benchmarks.shapes import random_model

            random_model("tiny", "cpu").save_pretrained(folder.parent / "model")
            zoo.add(MODEL, folder.parent / "model")
        else:
            from symbiosis.models.default_model import default_model_folder

            zoo.add(MODEL, default_model_folder())
    return zoo


def token_ids(zoo: Any, plan: Plan, written: dict[str, str]) -> dict[str, Any]:
    """Sequences of both texts, [S, T]."""
    import torch

    from symbiosis.zoo.surrogates.surrogate import load_tokenizer

    counts, found = {"used": plan.tokens, "held out": plan.held_out}, {}
    for name, count in counts.items():
        text = written[name]
        ids = torch.tensor(list(text.encode()) if plan.tiny else load_tokenizer(zoo, MODEL)(text)["input_ids"])
        assert len(ids) >= count, "enough text"
        found[name] = ids[:count].view(-1, min(_LENGTH, count // 8))
    return found


def run_layer(zoo: Any, plan: Plan, model: Any, ids: dict[str, Any], layer: int) -> dict[str, Any]:
    from symbiosis.zoo.surrogates.block_modules import Piece
    from symbiosis.zoo.surrogates.distillation import Training
    from symbiosis.zoo.surrogates.surrogate import make_surrogates, store_surrogate

    pieces = [Piece.parse(f"{kind} {layer}") for kind in plan.kinds]
    training = Training(seconds=plan.seconds, epochs=2 if plan.tiny else 100)
    made = make_surrogates(model, pieces, ids["used"], ids["held out"], keep=plan.keep, training=training)
    for piece, each in made.items():
        store_surrogate(zoo, MODEL, piece, each)
    return {str(piece): asdict(each.report) for piece, each in made.items()}


def run(plan: Plan, folder: Path = FOLDER, zoo_folder: Path = ZOO, budget_s: float = float("inf")) -> dict[str, Any]:
    import torch

    started, path = time.monotonic(), folder / "zoo_surrogates.json"
    figures: dict[str, Any] = {
        "script": "zoo_surrogates",
        "plan": asdict(plan),
        "paper": PAPER,
        "surrogates": {},
        "seconds": {},
    }
    if path.is_file() and (before := json.loads(path.read_text()))["plan"] == json.loads(json.dumps(asdict(plan))):
        figures |= {"surrogates": before["surrogates"], "seconds": before["seconds"]}
    torch.set_num_threads(plan.threads)
    zoo, written = open_zoo(zoo_folder, plan), texts(plan)
    figures["texts"] = {
        name: {"characters": len(text), "sha256": hashlib.sha256(text.encode()).hexdigest()} for name, text in written.items()
    }
    ids, model = token_ids(zoo, plan, written), zoo.load(MODEL).requires_grad_(False)
    made = 0
    for layer in plan.layers:
        if str(layer) in figures["seconds"] or (made and time.monotonic() - started > budget_s):
            continue
        began, made = time.monotonic(), made + 1
        figures["surrogates"] |= run_layer(zoo, plan, model, ids, layer)
        figures["seconds"][str(layer)] = time.monotonic() - began
        show({name: each for name, each in figures["surrogates"].items() if name.endswith(f" {layer}")})
        path = save("zoo_surrogates", QUESTION, figures, folder)  # a run that is stopped leaves what it has
    draw(figures, path)
    return figures


def show(surrogates: dict[str, Any]) -> None:
    for name, each in surrogates.items():
        times = ", ".join(f"{rows} rows {found['ratio']:.2f}" for rows, found in each["times"].items())
        print(
            f"{name}: {each['parameters']:.2f} of the weights, same token {each['pruned']['top1']:.3f} pruned, "
            f"{each['trained']['top1']:.3f} trained, loss {each['trained']['loss']:.3f} ({each['trained']['true_loss']:.3f}), "
            f"output cosine {each['cosine']:.3f}, chain cosine {each['trained']['cosine']:.3f}, time: {times}",
            flush=True,
        )


def draw(figures: dict[str, Any], path: Path) -> None:
    plot, surrogates = pyplot(), figures["surrogates"]
    figure, (left, right) = plot.subplots(1, 2, figsize=(11, 4))
    names = list(surrogates)
    for shift, (state, color) in enumerate((("pruned", "#9aa0a6"), ("trained", "#1a73e8"))):
        values = [surrogates[name][state]["top1"] for name in names]
        drawn = left.bar([at + 0.4 * shift for at in range(len(names))], values, 0.4, label=state, color=color)
        left.bar_label(drawn, [f"{value:.2f}" for value in values], fontsize=7)
    left.set_xticks(range(len(names)), names, rotation=45, ha="right")
    left.set_ylim(0.5, 1.0)
    left.set_ylabel("same next token, whole chain")
    left.legend()
    for rows in next(iter(surrogates.values()))["times"] if surrogates else ():
        right.plot(names, [each["times"][rows]["ratio"] for each in surrogates.values()], "o", label=f"{rows} rows")
    right.axhline(0.6, color="#9aa0a6", linewidth=1)
    right.tick_params(axis="x", rotation=45)
    right.set_ylabel("time, share of the true block's")
    right.legend()
    figure.tight_layout()
    figure.savefig(path.with_suffix(".png"), dpi=110)
    plot.close(figure)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--tiny", action="store_true", help="a random toy model, for the tests")
    parser.add_argument("--budget-s", type=float, default=float("inf"), help="start no further layer after so long")
    parser.add_argument("--zoo", type=Path, default=ZOO, help="where the surrogates are kept")
    parser.add_argument("--out", type=Path, default=FOLDER)
    chosen = parser.parse_args(arguments)
    small = {"layers": (1,), "tokens": 1_024, "held_out": 256, "seconds": 0.2, "threads": 1, "tiny": True}
    run(Plan(**small) if chosen.tiny else Plan(), chosen.out, chosen.zoo, chosen.budget_s)  # type: ignore[arg-type]


if __name__ == "__main__":
    main()
