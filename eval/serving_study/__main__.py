"""Does calibrating the confidence head pay for scheduling, and how much is left on the table?

    python -m eval.serving_study recipe=sweeps/serving_calibration target=tiny checkpoint=dspec/assets/tiny_dspark

Records traces and measures a step table (or reads both), simulates schedulers with estimators of acceptance on them,
and writes results.json, results.md and plots to its run folder. Torch and transformers are imported only after
arguments and benchmarks are checked.
"""

from pathlib import Path

from omegaconf import DictConfig

from dspec.config.compose import entry_point, instantiate
from dspec.errors import UserError
from eval.checkpoints import check_model


def study(cfg: DictConfig) -> None:
    """One study, in Hydra's run folder."""
    if "study" not in cfg:
        raise UserError("nothing to study: use recipe=sweeps/serving_calibration")
    settings, profile = instantiate(cfg.study), instantiate(cfg.profile)
    if missing := [
        path for path in [*settings.traces, settings.steps] if path and not Path(path).expanduser().exists()
    ]:
        raise UserError(f"no file at {missing[0]}: leave it out to record or measure anew")
    if not settings.traces or settings.steps is None:
        check_model(cfg)
    benchmarks = {} if settings.traces else instantiate(cfg.benchmark) if "benchmark" in cfg else {}
    if not settings.traces and not benchmarks:
        raise UserError("no prompts to record: choose a benchmark, such as benchmark=[tiny,tiny_stories]")
    from eval.serving_study.run import run

    run(cfg, benchmarks, settings, profile)


main = entry_point(config="serving_study")(study)

if __name__ == "__main__":
    main()
