"""Evaluates a checkpoint of dspec, or any Hugging Face target, with any decoders on any benchmarks.

    python -m eval.run target=smollm2_135m decoder=autoregressive benchmark=gsm8k limit=50
    python -m eval.run checkpoint=runs/dspark/<time> decoder=speculative benchmark=[gsm8k,humaneval]

Writes results.json (in the format of the main job), table.md, table.csv, samples.jsonl and plots to its run folder;
plain AR is included unless all decoders are those of diffusion LMs or all benchmarks have holes to fill.
`resume=<folder>` continues after a kill, and `limit=` may then grow. Torch and transformers are imported after
arguments and benchmarks are checked: mistakes in them are reported immediately.
"""

from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from omegaconf import DictConfig

from dspec.config.compose import entry_point, instantiate
from eval.checkpoints import check_arguments
from eval.ranks import is_first, own_folder


def evaluate(cfg: DictConfig) -> None:
    """One evaluation in Hydra's run folder."""
    check_arguments(cfg)
    benchmarks = instantiate(cfg.benchmark)
    from eval.job import run_evaluation

    run_dir = Path(HydraConfig.get().runtime.output_dir)
    with own_folder(run_dir) as folder:
        done = run_evaluation(cfg, benchmarks, folder)
    if not is_first():
        return
    logger = instantiate(cfg.get("logger"))  # only now: it may be named after the label, which is known by now
    instantiate(cfg.report)(results=done.results, history=[], run_dir=run_dir, logger=logger)


main = entry_point(config="eval")(evaluate)

if __name__ == "__main__":
    main()
