"""What admission measured, for the owner of a model and for its manifest."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from enum import StrEnum
from typing import Any

from symbiosis.zoo import manifest
from symbiosis.zoo.admission.calibration import Measurement

MIN_GAIN = 0.05
"""Nats per token. A smaller gain cannot be told from none on a text of some thousand tokens."""


class Verdict(StrEnum):
    """How a model is stored, cheapest first."""

    SAME = "same blocks"
    DIFFERENCE = manifest.DIFFERENCE
    SHARED = "shared blocks"
    OWN = "own blocks"


@dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """How much of a model a chain may lose on a text."""

    may_lose: float
    loss_of_base: float
    loss_of_model: float

    @property
    def gain(self) -> float:
        """Of the model over its base, nats per token."""
        return self.loss_of_base - self.loss_of_model

    @property
    def has_gain(self) -> bool:
        return self.gain >= MIN_GAIN

    def kept(self, found: Measurement) -> float | None:
        """The share of the gain that a chain keeps; None without a gain."""
        return (self.loss_of_base - found.loss) / self.gain if self.has_gain else None

    def allows(self, found: Measurement) -> bool:
        """With a gain, the chain keeps at least 1 − `may_lose` of it. Without, its divergence is at most `may_lose` nats."""
        kept = self.kept(found)
        return found.divergence <= self.may_lose if kept is None else kept >= 1 - self.may_lose


def predict_loss(known: Limit, found: Measurement, other: Limit) -> float:
    """The loss of a chain on another text, of which only the base's and the model's are known: it keeps the same share of the
    gain. Without a gain, its loss rises by as much.
    """
    kept = known.kept(found)
    return other.loss_of_model + found.loss - known.loss_of_model if kept is None else other.loss_of_base - kept * other.gain


@dataclass(frozen=True, kw_only=True, slots=True)
class Candidate:
    """A chain that was measured on the whole."""

    verdict: Verdict
    what: str
    new_bytes: int
    predicted: Measurement
    """On the first half of the text, by which the chain is chosen."""
    kept: float | None
    confirmed: Measurement | None = None
    """On the second half; only of chains that the first half allows."""
    is_admitted: bool = False
    refusal: str = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class AdmissionReport:
    """The verdict on a model, and how it came about."""

    name: str
    base: str
    verdict: Verdict
    may_lose: float
    text: str = ""
    text_sha256: str = ""
    tokens: int = 0
    """That each half predicts."""
    predict: Limit | None = None
    confirm: Limit | None = None
    candidates: tuple[Candidate, ...] = ()
    lens_cosines: tuple[tuple[str, float], ...] = ()
    """Of each block with the same input as the base's."""
    own_bytes: int = 0
    """New bytes with all its own blocks."""
    note: str = ""

    @property
    def admitted(self) -> Candidate | None:
        return next((each for each in self.candidates if each.is_admitted), None)

    @property
    def predicted_loss(self) -> float | None:
        """Of the chain on the second half, before it ran there."""
        if self.admitted is None or self.predict is None or self.confirm is None:
            return None
        return predict_loss(self.predict, self.admitted.predicted, self.confirm)

    def provenance(self) -> dict[str, str]:
        """For the manifest."""
        found = {"verdict": str(self.verdict), "may_lose": f"{self.may_lose:g}"}
        if self.base:
            found["base"] = self.base
        if self.confirm is not None:
            found |= {
                "text": f"{self.text}, {self.tokens} tokens measured, SHA-256 {self.text_sha256[:12]}",
                "loss_of_base": f"{self.confirm.loss_of_base:.4f}",
                "loss_of_model": f"{self.confirm.loss_of_model:.4f}",
            }
        chosen = self.admitted
        if chosen is not None and chosen.confirmed is not None and self.confirm is not None:
            kept = self.confirm.kept(chosen.confirmed)
            found |= {
                "stored_as": chosen.what,
                "loss_of_chain": f"{chosen.confirmed.loss:.4f}",
                "loss_predicted": f"{self.predicted_loss:.4f}",
                "gain_kept": "no gain on this text" if kept is None else f"{kept:.4f}",
                "divergence": f"{chosen.confirmed.divergence:.4f}",
                "cosine": f"{chosen.confirmed.cosine:.4f}",
                "top1": f"{chosen.confirmed.top1:.4f}",
            }
        return found

    def as_json(self) -> dict[str, Any]:
        return {**asdict(self), "predicted_loss": self.predicted_loss}
