"""Scores benchmarks by the exact log-likelihood of their answers: LAMBADA, HellaSwag. Nothing is decoded.

    python -m eval.score checkpoint=runs/as_arm/<time> decoder=[base_autoregressive,any_subset] benchmark=lambada
    python -m eval.score target=smollm2_135m benchmark=[lambada,hellaswag] limit=100

`decoder` names the distributions: `autoregressive` is a causal model's, `any_subset` an any-subset model's joint
density; `base_*` those of the weights before training. Writes results.json (in the format of eval.run), table.md and
samples.jsonl with each answer's verdicts and scores; `resume=<folder>` continues after a kill.
"""

from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from dspec.config.compose import entry_point, instantiate
from dspec.errors import UserError
from eval.benchmarks.likelihood import LikelihoodBenchmark
from eval.checkpoints import check_arguments


def score(cfg: DictConfig) -> None:
    """One scoring run in Hydra's run folder."""
    check_arguments(cfg)
    benchmarks = instantiate(cfg.benchmark)
    if others := [name for name, one in benchmarks.items() if not isinstance(one, LikelihoodBenchmark)]:
        raise UserError(f"{others[0]} is decoded, not scored by log-likelihood: use python -m eval.run")
    from eval.likelihood.run import run_scoring

    run_scoring(cfg, benchmarks, Path(HydraConfig.get().runtime.output_dir))


main = entry_point(config="score")(score)

if __name__ == "__main__":
    main()
