"""Times whole steps of speculative decoding and fits T = bias + alpha(requests) + theta(tokens) to them.

The lengths vary fastest, then the requests, then the repeats, so that a slow moment of the machine affects all points;
medians are taken over the repeats. Legend: R = requests, M = tokens verified in a step.
"""

import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import torch
from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig, OmegaConf

from dspec.atomic import write_json
from dspec.config.types import check_types
from dspec.decoding.generation import make_requests
from dspec.decoding.proposers import DraftProposer
from dspec.decoding.sampling import Sampling
from dspec.decoding.speculative import Speculative
from dspec.errors import UserError
from dspec.models.draft import Draft
from dspec.models.language_model import LanguageModel, require_causal
from dspec.provenance import provenance
from dspec.serving.policies import ScheduledVerification
from dspec.serving.schedulers import Static
from dspec.serving.step_table import AdditiveSteps, MeasuredSteps
from dspec.spans import Profile
from dspec.terminal import quiet
from eval.checkpoints import checkpoint_of, fill_in
from eval.load import load_model
from eval.profile_steps.settings import ProfileSettings
from eval.reports.serving_plots import plot_steps

Points = Mapping[tuple[int, int], float]  # (requests, drafts verified of each) -> seconds


@torch.inference_mode()
def measure(target: LanguageModel, draft: Draft, settings: ProfileSettings, *, seed: int) -> Points:
    """Median seconds of a step at every point. Raises UserError for lengths above the drafter's, or prompts that do not
    fit."""
    if (longest := settings.lengths[-1]) > draft.config.num_drafts:
        raise UserError(f"profile.lengths up to {longest}: this drafter drafts {draft.config.num_drafts} tokens")
    fixed, clock = Static(0), Profile(target.device)
    policy = ScheduledVerification(fixed, calibration=None)
    # a scheduler reads confidences: their cost is part of drafting
    reads = draft.confidence_head is not None
    decoder = Speculative(target=target, proposer=DraftProposer(draft), policy=policy, record_confidence=reads)
    generator = torch.Generator().manual_seed(seed)
    ids = torch.randint(target.vocab_size, (settings.requests[-1], settings.context), generator=generator).tolist()
    sampling = Sampling(temperature=settings.temperature, top_p=1.0)
    common: dict[str, Any] = {"sampling": sampling, "max_new_tokens": settings.max_new_tokens, "stop_ids": ()}
    states = {R: decoder.start(make_requests(ids[:R], seeds=range(R), **common)) for R in settings.requests}
    times: dict[tuple[int, int], list[float]] = {(R, n): [] for R in settings.requests for n in settings.lengths}
    for _ in range(settings.warmup + settings.repeats):
        for R, state in states.items():
            for length in settings.lengths:
                fixed.length = length
                start = clock.now()
                decoder.step(state)
                times[R, length].append(clock.now() - start)
                if length == 0:  # the next timed step is not to make up for this one's features
                    fixed.length = settings.lengths[1]
                    decoder.step(state)
    return {point: statistics.median(seconds[settings.warmup :]) for point, seconds in times.items()}


def fit(points: Points, *, about: Mapping[str, Any]) -> AdditiveSteps:
    """The additive table nearest to the points, in relative errors; a step at length 0 does not draft. `about` gains
    the errors. Raises UserError if the points do not determine it."""
    requests = sorted({R for R, _ in points})
    tokens = sorted({R * (1 + n) for R, n in points})
    rows = np.zeros((len(points), len(requests) + len(tokens)))
    for row, (R, n) in zip(rows, points, strict=True):
        row[len(requests) + tokens.index(R * (1 + n))] = 1.0
        row[requests.index(R)] = float(n > 0)
    seconds = np.array(list(points.values()))
    weighted = rows / seconds[:, None]
    solution, _, rank, _ = np.linalg.lstsq(weighted, np.ones(len(points)), rcond=None)
    if rank < rows.shape[1]:
        raise UserError(
            f"steps timed with {requests} requests at these lengths do not tell drafting from verifying: some requests "
            "times 1 + length must be equal to others, as with requests [1, 2, 4, 8] and lengths [0, 1, 3, 7]"
        )
    alpha = np.maximum(solution[: len(requests)], 0.0)  # drafting is never a gain
    rest = np.ones(len(points)) - weighted[:, : len(requests)] @ alpha
    theta = np.linalg.lstsq(weighted[:, len(requests) :], rest, rcond=None)[0]
    bias = float(theta.min())
    errors = np.abs(rows @ np.concatenate([alpha, theta]) / seconds - 1)
    return AdditiveSteps(
        about=dict(about) | {"relative_error": {"median": float(np.median(errors)), "max": float(errors.max())}},
        bias_seconds=bias,
        requests=tuple(requests),
        alpha_seconds=tuple(alpha.tolist()),
        tokens=tuple(tokens),
        theta_seconds=tuple((theta - bias).tolist()),
    )


def run(cfg: DictConfig, settings: ProfileSettings) -> None:
    """Measures in Hydra's run folder."""
    quiet()
    torch.set_num_threads(torch.get_num_threads())  # once set, MKL no longer picks its thread count by load
    check_types(cfg)
    run_dir = Path(HydraConfig.get().runtime.output_dir)
    fill_in(cfg)
    loaded = load_model(target=cfg.target, checkpoint=checkpoint_of(cfg), layout=cfg.layout)
    if loaded.draft is None:
        raise UserError("a profile needs a drafter: set checkpoint=<run folder of recipe=dspark or dflash>")
    target = require_causal(loaded.target)
    plain: dict[str, Any] = OmegaConf.to_container(cfg, resolve=True)  # type: ignore[assignment]
    dtype = str(target.dtype).removeprefix("torch.")
    made = provenance(seed=cfg.seed, dtype=dtype, config=plain, prompt_policy={})
    points = measure(target, loaded.draft, settings, seed=cfg.seed)
    about = {name: made[name] for name in ("hardware", "threads", "dtype", "git", "versions")}
    about |= {"context": settings.context, "target": target.name, "drafter": cfg.checkpoint}
    fitted = fit(points, about=about)
    table = MeasuredSteps(about=fitted.about, grid=points, fitted=fitted)
    lines = [{"requests": R, "length": n, "seconds": seconds} for (R, n), seconds in points.items()]
    write_json(run_dir / "profile.json", {"run": made, "points": lines})
    write_json(run_dir / "sps.json", table.to_dict())
    plot_steps(points, fitted.seconds, run_dir / "plots" / "steps.png")
    error = fitted.about["relative_error"]
    print(
        f"{_text(points)}\n\nbias + alpha(requests) + theta(tokens) is {100 * error['median']:.1f} % off at the median"
    )
    print(f"point, {100 * error['max']:.1f} % at most; the table for decoder.scheduled.steps: {run_dir / 'sps.json'}")


def _text(points: Points) -> str:
    """Milliseconds per step: a line for each number of requests, a column for each length."""
    lengths = sorted({n for _, n in points})
    lines = ["milliseconds per step    " + "".join(f"{f'+{n}' if n else 'no drafts':>11}" for n in lengths)]
    for R in sorted({R for R, _ in points}):
        cells = "".join(f"{1000 * points[R, n]:>11.2f}" for n in lengths)
        lines.append(f"{R:>4} request{'s' if R > 1 else ' '}            {cells}")
    return "\n".join(lines)
