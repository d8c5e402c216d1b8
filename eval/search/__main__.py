"""Searches for the fastest configuration of Jacobi decoding on this machine: block size x candidates x K x r.

    python -m eval.search recipe=sweeps/jacobi_config checkpoint=runs/jacobi_forcing/<time>
    python -m eval.search recipe=sweeps/jacobi_config target=tiny search.block_sizes=[8,16]

It prints and writes (search.json, plots/roofline.png) tokens per pass, tokens per second and the share of the device's
measured roofline for each configuration, and names the fastest one and the fastest near the ridge point. Torch and
transformers are imported only after arguments and benchmarks are checked.
"""

from omegaconf import DictConfig

from dspec.config.compose import entry_point, instantiate
from dspec.errors import UserError
from eval.checkpoints import check_model


def search(cfg: DictConfig) -> None:
    """Runs one search, in Hydra's run folder."""
    if "benchmark" not in cfg or "search" not in cfg:
        raise UserError("nothing to search: use recipe=sweeps/jacobi_config")
    check_model(cfg)
    settings, benchmarks = instantiate(cfg.search), instantiate(cfg.benchmark)
    from eval.search.grid import run

    run(cfg, benchmarks, settings)


main = entry_point(config="search")(search)

if __name__ == "__main__":
    main()
