"""Admission of a model to a zoo: how it is stored, by what that costs of its loss gain.

Verdicts, cheapest first: the same blocks, a low-rank difference of a base, blocks shared with the base, own blocks. Each
candidate is measured as a whole chain on a calibration text. The first half of the text chooses; the second half must allow the
chosen chain too.
"""

from __future__ import annotations

import math
import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, AutoTokenizer, PreTrainedModel

from symbiosis.zoo.admission.block_sharing import BlockSharing
from symbiosis.zoo.admission.calibration import CalibrationText, ReferenceModel, cut_windows
from symbiosis.zoo.admission.report import AdmissionReport, Candidate, Limit, Verdict
from symbiosis.zoo.checkpoint import Checkpoint, is_adapter
from symbiosis.zoo.differences.difference import Difference, DifferenceFinder, EmbeddingForm
from symbiosis.zoo.differences.difference_adapter import write_adapter
from symbiosis.zoo.differences.recovery import RecoveryConfig, recover
from symbiosis.zoo.errors import NotAdmitted
from symbiosis.zoo.manifest import ModelManifest
from symbiosis.zoo.partition import BlockKind, BlockPlace, partition
from symbiosis.zoo.zoo import Added, Progress, Zoo

SHARES = (0.0025, 0.005, 0.01, 0.02, 0.04, 0.08, 0.16)
"""Of the model's parameters, that the matrices of a difference may have."""
MAX_SERVED_SHARE = 0.04
"""A larger difference slows an engine down: first, training a smaller one is tried."""
RECOVERED_SHARE = 0.025


def _ignore(what: str, done: int, total: int) -> None:
    pass


@dataclass(frozen=True, kw_only=True, slots=True)
class Admission:
    added: Added
    report: AdmissionReport


def check_may_lose(may_lose: float) -> None:
    """Raises `NotAdmitted`."""
    if not math.isfinite(may_lose) or not 0 <= may_lose < 1:
        raise NotAdmitted(f"--may-lose {may_lose}: expected a share of the loss gain from 0 (exact) to below 1, such as 0.05")


def admit(
    zoo: Zoo,
    name: str,
    source: Path,
    *,
    may_lose: float = 0.0,
    text: tuple[str, str] | None = None,
    base: str | None = None,
    recovery: RecoveryConfig | None = None,
    progress: Progress = _ignore,
) -> Admission:
    """Add a model. `may_lose` of its loss gain on `text` (name and content) decides how; 0 is exact and needs no text. With
    `recovery`, a difference that keeps too little is trained on the rest of the text. Raises `NotAdmitted`, changing nothing.
    """
    check_may_lose(may_lose)
    zoo.check_name(name)
    if is_adapter(source) or may_lose == 0:
        added = zoo.add(name, source, base=base, progress=progress)
        verdict = Verdict.OWN if added.new_blocks else Verdict.SAME
        return Admission(added=added, report=AdmissionReport(name=name, base=base or "", verdict=verdict, may_lose=0.0))
    with zoo.opened(source, progress) as folder:
        own_blocks = zoo.describe_blocks(folder)
        stored = {each.object.sha256 for manifest in zoo.manifests() for each in manifest.chain}
        new = {each.sha256: each.size for each in own_blocks.values() if each.sha256 not in stored}
        of_base = zoo.plain_manifest(base) if base is not None else find_base(zoo, folder, own_blocks)
        report = AdmissionReport(name=name, base="", verdict=Verdict.OWN, may_lose=may_lose, own_bytes=sum(new.values()))
        if not new:
            report = replace(report, verdict=Verdict.SAME)
        elif of_base is None:
            report = replace(report, note="the zoo has no model of this architecture to compare it with")
        else:
            if text is None:
                raise NotAdmitted("--may-lose needs a calibration text: name one with --text")
            report = replace(report, base=of_base.name)
            return _Trial(zoo, folder, of_base, report, text, recovery, progress).run(source.name)
        added = zoo.add(name, folder, provenance={"source": source.name, **report.provenance()}, progress=progress)
        return Admission(added=added, report=report)


def find_base(zoo: Zoo, model: Path, blocks: Mapping[BlockPlace, object]) -> ModelManifest | None:
    """The model of a zoo whose weights are nearest: by the FFNs of the first, the middle and the last layer."""
    layers = sorted(place.layer for place in blocks if place.kind is BlockKind.FFN)
    if not layers:
        return None
    places = {BlockPlace(BlockKind.FFN, layers[at]) for at in (0, len(layers) // 2, -1)}
    with Checkpoint(model) as checkpoint:
        names = partition(checkpoint.names)
        own = {place: {name: checkpoint.tensor(each) for name, each in names[place].items()} for place in places}
    nearest, least = None, math.inf
    for manifest in zoo.manifests():
        if manifest.adapter or {each.place for each in manifest.chain} != blocks.keys():
            continue
        distance = 0.0
        for block in manifest.chain:
            if block.place in places:
                distance += _distance(own[block.place], zoo.block_tensors(block.object))
        if distance < least:
            nearest, least = manifest, distance
    return nearest


def _distance(own: Mapping[str, Tensor], other: Mapping[str, Tensor]) -> float:
    if {name: each.shape for name, each in own.items()} != {name: each.shape for name, each in other.items()}:
        return math.inf
    return sum(float((own[name].float() - other[name].float()).norm()) for name in own)


class _Trial:
    """Candidates for one model against one base, measured one after the other."""

    def __init__(
        self, zoo: Zoo, folder: Path, base: ModelManifest, report: AdmissionReport, text: tuple[str, str],
        recovery: RecoveryConfig | None, progress: Progress,
    ) -> None:  # fmt: skip
        self._zoo, self._folder, self._manifest, self._report = zoo, folder, base, report
        self._recovery, self._progress = recovery, progress
        zoo.check_content(base)
        self._text = tokenize(zoo, folder, base, *text)
        self._base = zoo.load_chain(base).float()
        self._own: PreTrainedModel = AutoModelForCausalLM.from_pretrained(
            folder, dtype=torch.float32, local_files_only=True
        ).eval()
        theirs, mine = ({name: each.shape for name, each in model.named_parameters()} for model in (self._base, self._own))
        if theirs != mine:
            raise NotAdmitted(f"{folder.name} has weights of other shapes than {base.name}: expected a fine-tune of it")
        self._judge = ChainJudge(self._base, self._own, self._text, report.may_lose)
        self._candidates: list[Candidate] = []
        self._difference: Difference | None = None
        self._shared: frozenset[BlockPlace] = frozenset()

    def run(self, source: str) -> Admission:
        finder = DifferenceFinder(self._base, self._own, self._text.predict)
        self._find_difference(finder)
        verdict, cosines = Verdict.DIFFERENCE, {}
        if self._difference is None:
            verdict = Verdict.SHARED
            cosines = self._find_sharing()
        if self._difference is None and not self._shared:
            verdict = Verdict.OWN
        report = replace(
            self._report,
            verdict=verdict,
            text=self._text.name,
            text_sha256=self._text.sha256,
            tokens=self._judge.tokens,
            predict=self._judge.predict,
            confirm=self._judge.confirm,
            candidates=tuple(self._candidates),
            lens_cosines=tuple((str(place), cosine) for place, cosine in cosines.items()),
        )
        return Admission(added=self._store(report, finder, {"source": source, **report.provenance()}), report=report)

    def _store(self, report: AdmissionReport, finder: DifferenceFinder, provenance: dict[str, str]) -> Added:
        if self._difference is not None:
            with tempfile.TemporaryDirectory() as scratch:
                write_adapter(self._difference, finder.facts, self._manifest.name, Path(scratch))
                return self._zoo.add_difference(report.name, Path(scratch), self._folder, self._manifest, provenance)
        if self._shared:
            return self._zoo.add_sharing(report.name, self._folder, self._shared, self._manifest, provenance)
        return self._zoo.add(report.name, self._folder, provenance=provenance)

    # Verdicts

    def _find_difference(self, finder: DifferenceFinder) -> None:
        """The smallest difference that keeps enough: one that an engine serves fast, else a trained one, else a larger one."""
        forms = [form for form in finder.embedding_forms() if self._can_keep_with(form, finder)]
        served = [form for form in forms if form is not EmbeddingForm.WHOLE]
        small, large = ([share for share in SHARES if (share <= MAX_SERVED_SHARE) is it] for it in (True, False))
        self._find_in(small, served, finder)
        if self._difference is None and self._recovery is not None and served:
            self._difference = self._recover(finder, served[-1], self._recovery)
        if self._difference is None:
            self._find_in(large, served, finder)
            self._find_in(list(SHARES), [form for form in forms if form is EmbeddingForm.WHOLE], finder)
        self._mark_admitted(Verdict.DIFFERENCE)

    def _find_in(self, shares: Sequence[float], forms: Sequence[EmbeddingForm], finder: DifferenceFinder) -> None:
        for form in forms:
            least_bytes = self._report.own_bytes if self._difference is None else self._difference.bytes
            self._difference = self._smallest_of(shares, form, finder, least_bytes) or self._difference

    def _recover(self, finder: DifferenceFinder, form: EmbeddingForm, config: RecoveryConfig) -> Difference | None:
        start = finder.at(RECOVERED_SHARE, form)
        if not start.factors or start.bytes >= self._report.own_bytes or not len(self._text.rest_NT):
            return None
        trained = recover(
            finder, start, self._text.rest_NT, config, lambda done, total: self._progress("training", done, total)
        )
        candidate = self._try_difference(trained, finder)
        is_kept = not candidate.refusal and self._confirm(candidate, self._base, finder.weights(trained))
        return trained if is_kept else None

    def _smallest_of(
        self, shares: Sequence[float], form: EmbeddingForm, finder: DifferenceFinder, below_bytes: int
    ) -> Difference | None:
        fitting = [each for share in shares if (each := finder.at(share, form)).factors and each.bytes < below_bytes]
        tried: dict[int, Candidate] = {}

        def keeps_enough(at: int) -> bool:
            if at not in tried:
                tried[at] = self._try_difference(fitting[at], finder)
            return not tried[at].refusal

        if not fitting or not keeps_enough(len(fitting) - 1):
            return None
        for at in range(first_true(len(fitting), keeps_enough), len(fitting)):
            if keeps_enough(at) and self._confirm(tried[at], self._base, finder.weights(fitting[at])):
                return fitting[at]
        return None

    def _try_difference(self, difference: Difference, finder: DifferenceFinder) -> Candidate:
        what = difference.describe(finder.parameters)
        return self._try(Verdict.DIFFERENCE, what, difference.bytes, self._base, finder.weights(difference))

    def _can_keep_with(self, form: EmbeddingForm, finder: DifferenceFinder) -> bool:
        """Whether all own layers with the base's embedding keep enough. A limit for differences, and no candidate itself."""
        if form is not EmbeddingForm.BASE or not finder.changed_rows:
            return True
        weights = {f"{finder.facts.embedding}.weight": self._base.get_input_embeddings().weight.detach()}
        return self._judge.predict.allows(self._judge.measure_first(self._own, weights))

    def _find_sharing(self) -> dict[BlockPlace, float]:
        """As many blocks of the base as may be shared, the most similar first."""
        sharing = BlockSharing(self._base, self._own)
        cosines = sharing.cosines(self._text.predict)
        ranked, sizes = list(cosines), {each.place: each.object.size for each in self._manifest.chain}
        tried: dict[int, Candidate] = {}

        def keeps_too_little(count: int) -> bool:
            places = ranked[:count]
            if count and count not in tried:
                what = (
                    f"{count} of {len(ranked)} changed blocks are the base's, with a cosine from {cosines[places[-1]]:.4f} on"
                )
                own_bytes = max(self._report.own_bytes - sum(sizes[place] for place in places), 0)
                tried[count] = self._try(Verdict.SHARED, what, own_bytes, self._own, sharing.weights(places))
            return bool(count and tried[count].refusal)

        count = first_true(len(ranked) + 1, keeps_too_little) - 1
        while count > 0:
            if not keeps_too_little(count) and self._confirm(tried[count], self._own, sharing.weights(ranked[:count])):
                self._shared = frozenset(ranked[:count])
                break
            count -= max(1, count // 8)
        self._mark_admitted(Verdict.SHARED)
        return cosines

    # Measurements

    def _try(
        self, verdict: Verdict, what: str, new_bytes: int, model: PreTrainedModel, weights: Mapping[str, Tensor]
    ) -> Candidate:
        self._progress(f"{verdict} {len(self._candidates) + 1}", 0, 1)
        predicted = self._judge.measure_first(model, weights)
        limit = self._judge.predict
        candidate = Candidate(
            verdict=verdict, what=what, new_bytes=new_bytes, predicted=predicted, kept=limit.kept(predicted),
            refusal="" if limit.allows(predicted) else "keeps too little",
        )  # fmt: skip
        self._candidates.append(candidate)
        return candidate

    def _confirm(self, candidate: Candidate, model: PreTrainedModel, weights: Mapping[str, Tensor]) -> bool:
        confirmed = self._judge.measure_second(model, weights)
        is_allowed = self._judge.confirm.allows(confirmed)
        at = self._candidates.index(candidate)
        self._candidates[at] = replace(
            candidate, confirmed=confirmed, refusal="" if is_allowed else "keeps too little on the second half"
        )
        return is_allowed

    def _mark_admitted(self, verdict: Verdict) -> None:
        """The smallest that both halves allow."""
        allowed = [each for each in self._candidates if each.verdict is verdict and each.confirmed and not each.refusal]
        if allowed:
            best = min(allowed, key=lambda each: each.new_bytes)
            self._candidates[self._candidates.index(best)] = replace(best, is_admitted=True)


class ChainJudge:
    """Measures chains against a model, on the two halves of a text."""

    def __init__(self, base: PreTrainedModel, own: PreTrainedModel, text: CalibrationText, may_lose: float) -> None:
        self._first, self._second = ReferenceModel(own, text.predict), ReferenceModel(own, text.confirm)
        self.tokens = self._second.tokens
        self.predict, self.confirm = (
            Limit(may_lose=may_lose, loss_of_base=half.measure(base).loss, loss_of_model=half.loss)
            for half in (self._first, self._second)
        )
        self.measure_first, self.measure_second = self._first.measure, self._second.measure


def first_true(count: int, is_true: Callable[[int], bool]) -> int:
    """The first number below `count` for which it is true, by bisection; `count` if for none. What is true of a number should
    be true of all later ones.
    """
    low, high = 0, count
    while low < high:
        middle = (low + high) // 2
        if is_true(middle):
            high = middle
        else:
            low = middle + 1
    return low


def tokenize(zoo: Zoo, folder: Path, base: ModelManifest, name: str, text: str) -> CalibrationText:
    """With the model's tokenizer, or the base's. Raises `NotAdmitted`."""
    with tempfile.TemporaryDirectory() as scratch:
        files = {each: zoo.path(stored) for each, stored in base.files.items()}
        with Checkpoint(folder) as checkpoint:
            if checkpoint.tokenizer_file:
                files = dict(checkpoint.other_files)
        for each, path in files.items():
            (Path(scratch) / each).symlink_to(path.resolve())
        try:
            tokenizer = AutoTokenizer.from_pretrained(scratch, local_files_only=True, trust_remote_code=False)
            ids = tokenizer(text, verbose=False, add_special_tokens=False)["input_ids"]
        except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
            raise NotAdmitted(
                f"{folder.name} has no tokenizer that can be loaded: a calibration text needs one ({type(error).__name__})"
            ) from None
    return cut_windows(name, text, ids)
