"""Collects Jacobi trajectories ahead of training, and prints statistics.

    python -m data.collect recipe=jacobi_forcing                                    the base's
    python -m data.collect recipe=jacobi_forcing target=hf target.path=<run>/target the trained model's, to compare

Resumes after kill -9; the training run reuses what was collected (data/trajectories.py).
"""

from collections.abc import Mapping, Sequence
from typing import Any

from omegaconf import DictConfig

from data.trajectories import Trajectories
from dspec.config.compose import entry_point, instantiate
from dspec.errors import UserError
from dspec.jacobi_forcing.packing import Trajectory

BINS = 8


def statistics(trajectories: Sequence[Trajectory], *, bins: int) -> dict[str, Any]:
    """Statistics over all states of all blocks but their fixed points.

    `passes_per_token`: passes divided by tokens, the prefill's excluded. `noise_ratio`: a histogram of divergent
    suffixes over (0, 1]. `ngram`: mean length of the longest run of correct tokens after the first wrong one.
    `stability`: the fraction of correct tokens after the first wrong one that are also correct in the next state.
    """
    passes = tokens = states = runs = right = stayed = 0
    histogram = [0] * bins
    for trajectory in trajectories:
        tokens += len(trajectory.response_R) - 1
        for block in trajectory.blocks:
            *drafts, clean = block
            passes += len(drafts)
            for draft, following in zip(drafts, block[1:], strict=True):
                hits = [a == b for a, b in zip(draft, clean, strict=True)]
                if all(hits):
                    continue  # its pass verifies the whole block: no noise left
                first = hits.index(False)
                states += 1
                histogram[min(bins - 1, int(bins * (len(clean) - first - 1) / len(clean)))] += 1
                runs += max(map(len, "".join("x" if hit else " " for hit in hits[first:]).split()), default=0)
                later = [i for i in range(first, len(clean)) if hits[i]]
                right += len(later)
                stayed += sum(following[i] == clean[i] for i in later)
    return {
        "trajectories": len(trajectories),
        "tokens": sum(len(s.response_R) for s in trajectories),
        "passes_per_token": passes / max(tokens, 1),
        "noise_ratio": [count / max(states, 1) for count in histogram],
        "ngram": runs / max(states, 1),
        "stability": stayed / max(right, 1),
    }


def describe(stats: Mapping[str, Any]) -> str:
    """The statistics in a few lines."""
    shares = " ".join(f"{100 * share:.0f}" for share in stats["noise_ratio"])
    return (
        f"{stats['trajectories']} trajectories, {stats['tokens']} tokens\n"
        f"passes per token: {stats['passes_per_token']:.3f}\n"
        f"noise ratios, % of states in {len(stats['noise_ratio'])} equal bins of (0, 1]: {shares}\n"
        f"longest correct n-gram after the first wrong token: {stats['ngram']:.2f} tokens per state\n"
        f"stability of correct tokens after it: {100 * stats['stability']:.1f} %"
    )


def _task(cfg: DictConfig) -> None:
    module = instantiate(cfg.data, target=instantiate(cfg.target))
    if not isinstance(module, Trajectories):
        raise UserError("this data has no trajectories: use recipe=jacobi_forcing")
    print(f"{describe(statistics(module.trajectories(), bins=BINS))}\n{module.folder}")


main = entry_point(config="train")(_task)

if __name__ == "__main__":
    main()
