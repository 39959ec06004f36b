"""What a zoo of fine-tunes of one model takes on disk, and what low-rank differences and shared blocks cost in loss.

(a) The zoo of 20: eight LoRA adapters, six fine-tunes of the last 8 layers, four of the last 10, two of all weights: its
    bytes against 20 copies, by hashes alone (every model is compared to the bit) and with low-rank differences.
(b) Three full fine-tunes of different text and length as differences: the share of the loss gain that they keep.
(c) What admission predicts on one half of a text against what it measures on the other; and whether sharing that keeps too
    little on a third text is refused.

python -m benchmarks.zoo_admission --build FOLDER [--minutes 5] [--tiny]

It runs in pieces: with --minutes it stops after that time, and goes on when it is started again with the same folder.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from benchmarks.results import FOLDER, save
from benchmarks.zoo_fine_tunes import FULL, TINY_FULL, TINY_ZOO, ZOO, FineTune, make, texts
from symbiosis.models.default_model import NAME, default_model_folder
from symbiosis.zoo.admission.admission import Admission, ChainJudge, admit, tokenize
from symbiosis.zoo.admission.block_sharing import BlockSharing
from symbiosis.zoo.admission.calibration import ReferenceModel
from symbiosis.zoo.admission.report import predict_loss
from symbiosis.zoo.differences.recovery import RecoveryConfig
from symbiosis.zoo.manifest import ModelManifest
from symbiosis.zoo.zoo import Zoo

QUESTION = "What does a zoo of fine-tunes take on disk, and what do differences and shared blocks cost in loss?"
BASE = "base"
_EXCERPT = 1000
_SHORT, _LONG = 7_000, 60_000
"""Characters of a calibration text: about 2,000 and 18,000 tokens, of which 6,000 measure."""
_CASE = 24_000
_MAY_LOSE = 0.05
_CASE_PARTS = (0.15, 0.3, 0.5, 0.75)
"""Of the blocks, that a chain shares with the base."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    build: Path
    minutes: float | None = None
    partial: bool = False
    tiny: bool = False

    @property
    def zoo(self) -> tuple[FineTune, ...]:
        return TINY_ZOO if self.tiny else ZOO

    @property
    def full(self) -> tuple[FineTune, ...]:
        return TINY_FULL if self.tiny else FULL


def excerpts(text: str, characters: int) -> str:
    """Evenly spaced pieces of a text."""
    count = max(1, characters // _EXCERPT)
    step = max(_EXCERPT, len(text) // count)
    return "\n\n".join(text[start : start + _EXCERPT] for start in range(0, min(len(text), count * step), step))


class Bench:
    """The pieces, and what those that ran have found: `state.json` of the build folder."""

    def __init__(self, plan: Plan) -> None:
        self._plan, self._build = plan, plan.build
        self._build.mkdir(parents=True, exist_ok=True)
        self._file = self._build / "state.json"
        self.found: dict[str, Any] = json.loads(self._file.read_text()) if self._file.is_file() else {}
        self.base = _make_tiny(self._build / "tiny-base") if plan.tiny else default_model_folder()
        self.exact, self.smaller = (Zoo(self._build / each, create=True) for each in ("exact", "smaller"))
        for zoo in (self.exact, self.smaller):
            if BASE not in zoo.names():
                zoo.add(BASE, self.base)

    @property
    def pieces(self) -> dict[str, Callable[[], dict[str, Any]]]:
        plan, made = self._plan, dict[str, Callable[[], dict[str, Any]]]()
        for each in plan.full:
            made[f"train {each.name}"] = lambda each=each: self._train(each)
        for each in plan.zoo:
            made[f"zoo {each.name}"] = lambda each=each: self._zoo(each)
        for each in plan.full:
            made[f"full {each.name}"] = lambda each=each: self._full(each)
            made[f"cases {each.name}"] = lambda each=each: self._cases(each)
        for each in plan.zoo:
            if each.is_admitted and each not in plan.full:
                made[f"admit {each.name}"] = lambda each=each: self._admit(each, _SHORT, None)
        return made

    def run(self) -> bool:
        """Whether all pieces are done."""
        started = time.monotonic()
        for name, piece in self.pieces.items():
            if name in self.found:
                continue
            if self._plan.minutes is not None and time.monotonic() - started > 60 * self._plan.minutes:
                return False
            begun = time.monotonic()
            self.found[name] = piece() | {"seconds": round(time.monotonic() - begun, 1)}
            scratch = self._file.with_suffix(".part")
            scratch.write_text(json.dumps(self.found, indent=1))
            scratch.replace(self._file)
            print(f"{name}: {self.found[name]['seconds']} s", file=sys.stderr, flush=True)
        return True

    def _train(self, fine_tune: FineTune) -> dict[str, Any]:
        folder, losses = self._build / fine_tune.name, self._build / f"{fine_tune.name}.losses.json"
        if not folder.exists():
            losses.write_text(json.dumps(make(self.base, fine_tune, folder)))
        return {"losses": json.loads(losses.read_text()), "text": texts(fine_tune.kind)[2]}

    # (a)

    def _zoo(self, fine_tune: FineTune) -> dict[str, Any]:
        folder, name, is_full = self._build / fine_tune.name, fine_tune.name, fine_tune in self._plan.full
        found = {} if is_full else self._train(fine_tune)
        if name in self.exact.names():  # of a piece that was stopped
            self.exact.remove(name)
        is_lora = fine_tune.layers == 0
        added = self.exact.add(name, folder, base=BASE if is_lora else None)
        is_equal = _is_adapter_equal(self.exact, added.manifest, folder) if is_lora else _is_equal(self.exact, name, folder)
        if not fine_tune.is_admitted:
            shutil.rmtree(folder)
        return found | {"equal_to_the_bit": is_equal, "bytes_by_hash": added.new_bytes, "bytes_as_copy": added.manifest.size}

    def _admit(self, fine_tune: FineTune, characters: int, recovery: RecoveryConfig | None) -> dict[str, Any]:
        name, held = fine_tune.name, texts(fine_tune.kind)[1]
        if name in self.smaller.names():
            self.smaller.remove(name)
        text = (f"held-out {fine_tune.kind}", excerpts(held, characters))
        admission = admit(
            self.smaller, name, self._build / name, may_lose=_MAY_LOSE, text=text, base=BASE, recovery=recovery
        )  # fmt: skip
        return _summary(admission)

    # (b)

    def _full(self, fine_tune: FineTune) -> dict[str, Any]:
        found = self._admit(fine_tune, _LONG, RecoveryConfig(steps=4 if self._plan.tiny else 24))
        return found | {"steps": fine_tune.steps, "kind": fine_tune.kind}

    # (c)

    def _cases(self, fine_tune: FineTune) -> dict[str, Any]:
        base, own = (
            AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
            for folder in (self.base, self._build / fine_tune.name)
        )
        held = texts(fine_tune.kind)[1]
        manifest, folder = self.exact.manifest(BASE), self._build / fine_tune.name
        parts = (held[: len(held) * 2 // 3], held[len(held) * 2 // 3 :])
        text = tokenize(self.exact, folder, manifest, "held-out", excerpts(parts[0], _CASE))
        other = tokenize(self.exact, folder, manifest, "third", excerpts(parts[1], _CASE // 2)).windows_NT[:8]
        judge, third = ChainJudge(base, own, text, _MAY_LOSE), ReferenceModel(own, other)
        base_on_third = third.measure(base).loss
        sharing = BlockSharing(base, own)
        cosines = sharing.cosines(text.predict)
        cases = []
        for part in _CASE_PARTS:
            weights = sharing.weights(list(cosines)[: max(1, round(part * len(cosines)))])
            first, second = judge.measure_first(own, weights), judge.measure_second(own, weights)
            truth = third.measure(own, weights)
            cases.append({
                "chain": f"{max(1, round(part * len(cosines)))} of {len(cosines)} blocks shared",
                "predicted": predict_loss(judge.predict, first, judge.confirm), "measured": second.loss,
                "kept_predicted": judge.predict.kept(first), "kept_measured": judge.confirm.kept(second),
                "kept_on_third_text": (base_on_third - truth.loss) / (base_on_third - third.loss),
                "cosine": second.cosine, "top1": second.top1, "divergence": second.divergence,
                "admitted": judge.predict.allows(first) and judge.confirm.allows(second),
            })  # fmt: skip
        return {
            "cases": cases,
            "predict": asdict(judge.predict),
            "confirm": asdict(judge.confirm),
            "third": {"loss_of_base": base_on_third, "loss_of_model": third.loss, "tokens": third.tokens},
            "tokens_of_each_half": judge.tokens,
            "lens_cosines": {str(place): cosine for place, cosine in cosines.items()},
        }

    def summary(self) -> dict[str, Any]:
        """Of the pieces that are done."""
        plan, found = self._plan, self.found
        record: dict[str, Any] = {
            "model": "tiny" if plan.tiny else NAME,
            "may_lose": _MAY_LOSE,
            "missing": [name for name in self.pieces if name not in found],
            "full": {each.name: found[f"full {each.name}"] for each in plan.full if f"full {each.name}" in found},
            "fine_tunes": [asdict(each) for each in dict.fromkeys((*plan.full, *plan.zoo))],
            "pieces": found,
        }
        if all(f"zoo {each.name}" in found for each in plan.zoo):
            record["zoo"] = self._sizes()
        cases = [
            case | {"model": each.name} for each in plan.full for case in found.get(f"cases {each.name}", {}).get("cases", [])
        ]
        for name, each in record["full"].items():
            if each["predicted_loss"] is not None:
                loss = float(each["loss_of_chain"])
                cases.append({"model": name, "chain": each["verdict"], "predicted": each["predicted_loss"], "measured": loss})
        short = [case for case in cases if case.get("kept_on_third_text", 1.0) < 1 - _MAY_LOSE]
        errors = [abs(case["predicted"] - case["measured"]) for case in cases]
        record["cases"] = cases
        record["prediction"] = {
            "cases": len(cases), "largest_error": max(errors, default=None), "within_0.02": sum(e <= 0.02 for e in errors),
        }  # fmt: skip
        record["refusal"] = {"keep_too_little": len(short), "refused": sum(not case["admitted"] for case in short)}
        return record

    def _sizes(self) -> dict[str, Any]:
        """Bytes of the zoo of 20."""
        plan, stored = self._plan, set(self.smaller.names())
        exact = {each.name: self.exact.manifest(each.name) for each in plan.zoo}
        admitted = {
            each.name: self.smaller.manifest(each.name) for each in plan.zoo if each.is_admitted and each.name in stored
        }
        full = {each.name for each in plan.zoo if each.layers is None}
        copies = sum(each.size for each in exact.values())
        zoos = {"by hash": exact}
        if full <= stored:
            zoos["full fine-tunes as admitted"] = exact | {name: each for name, each in admitted.items() if name in full}
        if all(each.name in stored for each in plan.zoo if each.is_admitted):
            zoos["and those of the last 10 layers"] = exact | admitted
        sizes = {name: _union_bytes(models.values()) for name, models in zoos.items()}
        return {
            "models": len(exact), "bytes_as_copies": copies, "bytes": sizes,
            "saved": {name: 1 - size / copies for name, size in sizes.items()},
            "equal_to_the_bit": sum(self.found[f"zoo {name}"]["equal_to_the_bit"] for name in exact),
        }  # fmt: skip


def _summary(admission: Admission) -> dict[str, Any]:
    report = admission.report
    found = {"verdict": str(report.verdict), **report.provenance(), "candidates": [asdict(each) for each in report.candidates]}
    halves = {"predict": report.predict, "confirm": report.confirm}
    found |= {name: asdict(half) for name, half in halves.items() if half is not None}
    return found | {"predicted_loss": report.predicted_loss, "note": report.note, "bytes": admission.added.new_bytes}


def _union_bytes(manifests: Any) -> int:
    objects = {each.sha256: each.size for manifest in manifests for each in manifest.objects}
    return sum(objects.values())


def _is_equal(zoo: Zoo, name: str, folder: Path) -> bool:
    found, expected = zoo.tensors(zoo.manifest(name)), load_file(folder / "model.safetensors")
    return found.keys() == expected.keys() and all(
        torch.equal(found[each].view(torch.int32), tensor.view(torch.int32)) for each, tensor in expected.items()
    )


def _is_adapter_equal(zoo: Zoo, manifest: ModelManifest, folder: Path) -> bool:
    """The chain is the base's, and the files are the same bytes."""
    is_same = all(zoo.path(each).read_bytes() == (folder / name).read_bytes() for name, each in manifest.adapter.items())
    return is_same and manifest.chain == zoo.manifest(BASE).chain


def _make_tiny(folder: Path) -> Path:
    from tokenizers import Tokenizer
    from tokenizers.models import BPE
    from tokenizers.pre_tokenizers import ByteLevel

    if not folder.exists():
        torch.manual_seed(0)
        config = LlamaConfig(
            hidden_size=32, intermediate_size=48, num_hidden_layers=4, num_attention_heads=4, num_key_value_heads=2,
            vocab_size=256, tie_word_embeddings=True,
        )  # fmt: skip
        LlamaForCausalLM(config).save_pretrained(folder)
        tokenizer = Tokenizer(BPE({letter: at for at, letter in enumerate(sorted(ByteLevel.alphabet()))}, []))
        tokenizer.pre_tokenizer = ByteLevel(add_prefix_space=False)
        PreTrainedTokenizerFast(tokenizer_object=tokenizer).save_pretrained(folder)
    return folder


def plot(record: dict[str, Any], path: Path) -> None:
    from benchmarks.plots import bars, pyplot

    plt = pyplot()
    figure, (left, right) = plt.subplots(1, 2, figsize=(11, 4.5), layout="constrained")
    if "zoo" in record:
        sizes = {"copies": record["zoo"]["bytes_as_copies"], **record["zoo"]["bytes"]}
        labels = [name.replace(" as ", "\nas ").replace(" of ", "\nof ") for name in sizes]
        bars(left, labels, {f"{record['zoo']['models']} models": [each / 1e9 for each in sizes.values()]}, "GB")
    for model in dict.fromkeys(case["model"] for case in record["cases"]):
        cases = [case for case in record["cases"] if case["model"] == model]
        right.scatter([each["predicted"] for each in cases], [each["measured"] for each in cases], label=model)
    losses = [each["measured"] for each in record["cases"]] or [0.0]
    right.plot([min(losses), max(losses)], [min(losses), max(losses)], "--", color="#9aa0a6")
    right.set(xlabel="loss that admission predicts", ylabel="measured loss of the chain")
    if record["cases"]:
        right.legend()
    figure.savefig(path, dpi=110)
    plt.close(figure)


def run(plan: Plan, folder: Path = FOLDER) -> bool:
    """Whether it is done; results are written then, or with `partial` of what is done."""
    bench = Bench(plan)
    is_done = bench.run()
    if not is_done:
        print(f"not done yet: run it again with --build {plan.build}", file=sys.stderr)
    if not is_done and not plan.partial:
        return False
    record = bench.summary()
    path = save("zoo-admission-tiny" if plan.tiny else "zoo-admission", QUESTION, record, folder)
    plot(record, path.with_suffix(".png"))
    for name, share in record.get("zoo", {}).get("saved", {}).items():
        print(f"{name}: {share:.1%} less than copies")
    if "zoo" in record:
        print(f"equal to the bit: {record['zoo']['equal_to_the_bit']} of {record['zoo']['models']}")
    for name, each in record["full"].items():
        print(f"{name}: {each['verdict']}, {each.get('stored_as')}: {each.get('gain_kept')} kept, cosine {each.get('cosine')}")
    print(f"predictions: {record['prediction']}")
    print(f"sharing that keeps too little on the third text: {record['refusal']}")
    return is_done


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--build", type=Path, help="folder of the checkpoints and zoos, about 15 GB (default: a temporary one)")
    parser.add_argument("--minutes", type=float, help="stop after this time")
    parser.add_argument("--partial", action="store_true", help="write the results of the pieces that are done, if not all are")
    parser.add_argument("--tiny", action="store_true")
    parser.add_argument("--out", type=Path, default=FOLDER)
    options = parser.parse_args(arguments)
    with tempfile.TemporaryDirectory() as scratch:
        build = options.build or Path(scratch)
        plan = Plan(build=build, minutes=options.minutes, partial=options.partial, tiny=options.tiny)
        run(plan, options.out)


if __name__ == "__main__":
    main()
