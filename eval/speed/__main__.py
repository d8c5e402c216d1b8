"""Where a round's time goes, and the cost of passes of other sizes, on the current device.

    python -m eval.speed checkpoint=runs/dspark/<time>

Writes speed.json, results.json and plots to its run folder. Torch and transformers are imported after arguments and
benchmarks are checked: mistakes in them are reported immediately.
"""

from omegaconf import DictConfig

from dspec.config.compose import entry_point, instantiate
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
