"""Training curves for the report."""

from typing import Any

import lightning as L


class History(L.Callback):
    """Logged metrics by step, stored in the checkpoint so that a resumed run plots its whole curve."""

    def __init__(self) -> None:
        self.rows: list[dict[str, float]] = []

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        step, every = trainer.global_step, int(trainer.log_every_n_steps)  # type: ignore[attr-defined]
        if step % every == 0 and (not self.rows or self.rows[-1]["step"] < step):
            metrics = {name: float(v) for name, v in trainer.callback_metrics.items() if name.startswith("train/")}
            self.rows.append({"step": step, **metrics})

    def on_validation_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if not trainer.sanity_checking:
            metrics = {name: float(v) for name, v in trainer.callback_metrics.items() if name.startswith("val/")}
            self.rows.append({"step": trainer.global_step, **metrics})

    def state_dict(self) -> dict[str, Any]:
        return {"rows": self.rows}

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self.rows = list(state_dict["rows"])
