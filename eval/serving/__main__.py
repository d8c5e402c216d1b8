"""An engine under load: every variant measured, and predicted from traces recorded at one concurrency.

    python -m eval.serving recipe=sweeps/serving_load target=tiny checkpoint=dspec/assets/tiny_dspark

Writes traces.jsonl, sps.json, results.json, report.md and plots to its run folder. Torch and transformers are imported
after the arguments are checked: mistakes in them are reported immediately.
"""

from omegaconf import DictConfig

from dspec.config.compose import entry_point, instantiate
from dspec.errors import UserError
from eval.checkpoints import check_model


def serve(cfg: DictConfig) -> None:
    """One report in Hydra's run folder."""
    if "benchmark" not in cfg:
        raise UserError("nothing to serve: use recipe=sweeps/serving_load")
    check_model(cfg)
    settings, benchmarks = instantiate(cfg.serving), instantiate(cfg.benchmark)
    from eval.serving.load_report import run

    run(cfg, benchmarks, settings)


main = entry_point(config="serving")(serve)

if __name__ == "__main__":
    main()
