"""The main job: train a method, calibrate it, evaluate it against its baselines, and report.

    python -m dspec.train recipe=dspark
    python -m dspec.train resume=runs/dspark/<time>

The work is done in training/stages.py, imported after the config is checked: mistakes are reported before torch loads.
"""

from omegaconf import DictConfig

from dspec.config.compose import entry_point


def _task(cfg: DictConfig) -> None:
    from dspec.training.stages import run_job

    run_job(cfg)


main = entry_point(config="train")(_task)

if __name__ == "__main__":
    main()
