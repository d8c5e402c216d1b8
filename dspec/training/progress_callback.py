"""The progress bar of a training run (dspec/progress.py) as a Lightning callback."""

from typing import Any

import lightning as L

from dspec.progress import progress_bar


class StepProgress(L.Callback):
    """One bar over all optimizer steps, with the loss and the method's `shown` metrics."""

    def __init__(self) -> None:
        self._bar = progress_bar("training", details="{task.fields[shown]}")
        self._task = self._bar.add_task("training", shown="")

    def on_train_start(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        if trainer.is_global_zero:
            self._bar.update(self._task, total=trainer.estimated_stepping_batches, completed=trainer.global_step)
            self._bar.start()

    def on_train_batch_end(self, trainer: L.Trainer, *args: Any, **kwargs: Any) -> None:
        values = {k.removeprefix("train/"): float(v) for k, v in trainer.progress_bar_metrics.items()}
        shown = " ".join(f"{name} {value:.2f}" for name, value in values.items())
        self._bar.update(self._task, completed=trainer.global_step, shown=shown)

    def on_train_end(self, trainer: L.Trainer, module: L.LightningModule) -> None:
        self._bar.stop()

    def on_exception(self, trainer: L.Trainer, module: L.LightningModule, exception: BaseException) -> None:
        self._bar.stop()
