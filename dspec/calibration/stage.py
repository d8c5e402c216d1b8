"""The calibration stage: decode held-out prompts, fit STS on some of them, report on the others.

Traces come from speculative decoding with the sampling for which the temperatures are fitted. It is not greedy: the
head predicts 1 - TV, the probability that a sampled draft is accepted. The fitting is in dspec/calibration/sts.py.
"""

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from dspec.atomic import write_json
from dspec.calibration.sts import (
    Traces,
    calibration_report,
    cross_validated_gain,
    fit_sts,
    temperature_grid,
)
from dspec.decoding.generation import Generation, make_requests
from dspec.decoding.loop import decode
from dspec.decoding.proposers import DraftProposer
from dspec.decoding.sampling import Sampling
from dspec.decoding.speculative import Speculative
from dspec.decoding.verification import VerifyAll
from dspec.errors import UserError
from dspec.models.draft import Draft
from dspec.models.language_model import LanguageModel
from dspec.models.temperatures import Calibration
from dspec.progress import with_progress
from dspec.provenance import fingerprint
from dspec.seeding import calibration_seed


class CalibrateSTS:
    """Fits one temperature per slot; all numbers come from the config."""

    def __init__(
        self,
        *,
        sampling: Sampling,
        max_new_tokens: int,
        batch_size: int,
        fit_share: float,
        bins: int,
        grid_low: float,
        grid_high: float,
        grid_points: int,
        folds: int,
        min_gain: float,
        seed: int,
    ) -> None:
        """A fraction `fit_share` of the prompts is for fitting, the rest for the report. The grid of temperatures is
        log-spaced and contains 1.

        If cross-validation over `folds` of the fitting prompts lowers the mean ECE by at most `min_gain`, the head is
        already calibrated up to noise and all temperatures stay 1.
        """
        if sampling.greedy:
            raise UserError("calibration.sampling.temperature must be above 0: STS is fitted on sampled traces")
        self.sampling, self.max_new_tokens, self.batch_size = sampling, max_new_tokens, batch_size
        self.fit_share, self.bins, self.seed = fit_share, bins, seed
        self.folds, self.min_gain = folds, min_gain
        self.grid = temperature_grid(low=grid_low, high=grid_high, points=grid_points)

    def check(self, draft: Draft | None) -> None:
        """Raises UserError for a drafter without a confidence head, or answers too short to reach its last slot."""
        if draft is None or draft.confidence_head is None:
            raise UserError("calibration needs draft.confidence_head=true; without that head use calibration=null")
        if self.max_new_tokens <= (slots := draft.config.num_drafts):
            raise UserError(
                f"calibration.max_new_tokens={self.max_new_tokens} ends answers before the last of {slots} draft "
                f"slots; use at least {slots + 1}, better hundreds"
            )

    def check_prompts(self, target: LanguageModel, draft: Draft, prompts: Sequence[list[int]]) -> None:
        """Raises UserError for too few prompts, or one that leaves no room for an answer in target or drafter."""
        if not self.folds <= round(len(prompts) * self.fit_share) < len(prompts):
            raise UserError(
                f"{len(prompts)} calibration prompts are too few for fit_share={self.fit_share} and {self.folds} "
                "folds: raise the data source's calibration count"
            )
        longest = max(map(len, prompts))
        room = min(target.max_positions, draft.config.transformer.max_position_embeddings)
        if longest + self.max_new_tokens > room:
            raise UserError(
                f"a calibration prompt of {longest} tokens and calibration.max_new_tokens={self.max_new_tokens} exceed "
                f"{room} positions; lower it, or shorten the prompt"
            )

    def __call__(
        self,
        *,
        target: LanguageModel,
        draft: Draft,
        prompts: Sequence[list[int]],
        stop_ids: Sequence[int],
        artefact: Path | None = None,
    ) -> dict[str, Any]:
        """Stores the temperatures in the drafter's metadata and returns the report.

        `artefact` is a JSON file that caches the result; it is reused if weights, prompts and settings are the same.
        Raises UserError if there are too few prompts or rounds, or the artefact is damaged.
        """
        self.check(draft)
        key = self._key(target, draft, prompts, stop_ids) if artefact is not None else None
        if artefact is not None and (cached := _cached(artefact, key)) is not None:
            draft.metadata.calibration, report = cached
            return report
        report = self._fit(target, draft, prompts, stop_ids)
        if artefact is not None and draft.metadata.calibration is not None:
            write_json(artefact, {"key": key, "calibration": draft.metadata.calibration.to_dict(), "report": report})
        return report

    def _key(self, target: LanguageModel, draft: Draft, prompts: Sequence[list[int]], stop_ids: Sequence[int]) -> str:
        """A digest of everything the result depends on."""
        settings = {name: value for name, value in vars(self).items() if name not in ("sampling", "grid")}
        settings |= {"sampling": self.sampling.to_dict(), "grid": self.grid.tolist(), "stop_ids": list(stop_ids)}
        weights = [fingerprint(target.model), fingerprint(draft)]
        return hashlib.sha256(json.dumps([settings, weights, list(prompts)]).encode()).hexdigest()[:16]

    def _fit(
        self, target: LanguageModel, draft: Draft, prompts: Sequence[list[int]], stop_ids: Sequence[int]
    ) -> dict[str, Any]:
        self.check_prompts(target, draft, prompts)
        decoder = Speculative(target=target, proposer=DraftProposer(draft), policy=VerifyAll(), record_confidence=True)
        generations: list[Generation] = []
        batches = [list(prompts[i : i + self.batch_size]) for i in range(0, len(prompts), self.batch_size)]
        for batch in with_progress("calibration traces", batches):
            seeds = [calibration_seed(self.seed, len(generations) + i) for i in range(len(batch))]
            batch_requests = make_requests(
                batch, seeds=seeds, sampling=self.sampling, max_new_tokens=self.max_new_tokens, stop_ids=stop_ids
            )
            generations += decode(decoder, batch_requests)
        traces, prompt_N = gather(generations)
        shares = [self.fit_share / self.folds] * self.folds + [1 - self.fit_share]
        *folds, report = traces.split(fractions=shares, seed=self.seed, group_N=prompt_N)
        self._check_rounds(folds, report)
        gain = cross_validated_gain(folds, grid=self.grid, bins=self.bins)
        temperatures = fit_sts(fit := Traces.cat(folds), grid=self.grid, bins=self.bins)
        if gain <= self.min_gain:
            temperatures = torch.ones_like(temperatures)
        draft.metadata.calibration = Calibration(
            tuple(temperatures.tolist()), self.sampling.temperature, self.sampling.top_p
        )
        return {
            "temperatures": temperatures.tolist(),
            "cross_validated_gain": gain,
            "sampling": self.sampling.to_dict(),
            "fitting_rounds": len(fit.valid_N),
            **calibration_report(report, temperatures, bins=self.bins),
        }

    def _check_rounds(self, folds: Sequence[Traces], report: Traces) -> None:
        """Each slot must be valid in at least two folds (one may be held out), and each part needs a valid round."""
        slot_K = torch.arange(report.logits_NK.shape[1])
        counts = torch.stack([(part.valid_N[:, None] > slot_K).sum(0) for part in (*folds, report)])
        few = ((counts[:-1] > 0).sum(0) < 2).nonzero()[:, 0] + 1
        if len(few) or not (counts[:, 0] > 0).all():
            where = f"at draft slots {few.tolist()}" if len(few) else "in some of its parts"
            raise UserError(
                f"too few calibration rounds {where}: the answers end too early. Raise "
                f"calibration.max_new_tokens={self.max_new_tokens} or the data source's calibration count, or use "
                "calibration=null"
            )


def _cached(path: Path, key: str | None) -> tuple[Calibration, dict[str, Any]] | None:
    """The calibration and the report in `path` if they were stored under the same key. Raises UserError for a damaged
    file."""
    if not path.is_file():
        return None
    try:
        stored = json.loads(path.read_text(encoding="utf-8"))
        if stored["key"] != key:
            return None
        return Calibration.from_dict(stored["calibration"]), dict(stored["report"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise UserError(f"{path} is damaged ({error!r}): delete it to calibrate again") from error


def gather(generations: Sequence[Generation]) -> tuple[Traces, torch.Tensor]:
    """The rounds of all generations as Traces, and each round's prompt index [N].

    Raises UserError if there are no rounds: all answers ended with their first token.
    """
    rounds = [(i, r) for i, g in enumerate(generations) for r in g.rounds]
    if not rounds:
        raise UserError("no calibration rounds: all answers ended with their first token; use other prompts")
    return (
        Traces(
            torch.tensor([r.confidence for _, r in rounds], dtype=torch.float64),
            torch.tensor([r.accepted for _, r in rounds]),
            torch.tensor([r.valid for _, r in rounds]),
        ),
        torch.tensor([i for i, _ in rounds]),
    )
