"""Where a round's time goes, and what passes of other sizes cost, on whatever device runs it.

    python -m eval.speed checkpoint=runs/dspark/<time>

Leaves speed.json, results.json and plots in its run folder. Torch and transformers are imported once arguments and
benchmarks have been looked at: a mistake in them is answered at once.
"""

from omegaconf import DictConfig

from dspec.config import entry_point, instantiate
from eval.checkpoints import check_arguments


def report(cfg: DictConfig) -> None:
    """One speed report in Hydra's run folder."""
    check_arguments(cfg)
    settings, benchmarks = instantiate(cfg.speed), instantiate(cfg.benchmark)
    from eval.speed.speed_report import run

    run(cfg, benchmarks, settings)


main = entry_point(config="speed")(report)

if __name__ == "__main__":
    main()
