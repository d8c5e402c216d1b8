"""What a step of a drafter and its target costs on the current device, as a step table that schedulers read.

    python -m eval.profile_steps target=tiny checkpoint=dspec/assets/tiny_dspark

Writes sps.json (dspec/serving/step_table.py), profile.json with what was measured, and a plot to its run folder. Torch
and transformers are imported after the arguments are checked: mistakes in them are reported immediately.
"""

from omegaconf import DictConfig

from dspec.config.compose import entry_point, instantiate
from eval.checkpoints import check_model


def profile(cfg: DictConfig) -> None:
    """One profile in Hydra's run folder."""
    check_model(cfg)
    settings = instantiate(cfg.profile)
    from eval.profile_steps.measure import run

    run(cfg, settings)


main = entry_point(config="profile_steps")(profile)

if __name__ == "__main__":
    main()
