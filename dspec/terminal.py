"""Keeps library output off the terminal."""

import logging
import warnings


def quiet() -> None:
    """Silences libraries, so that the terminal shows only our progress bar and tables."""
    from transformers.utils.logging import disable_progress_bar

    for name in ("lightning.pytorch", "lightning.fabric", "transformers", "httpx", "datasets"):
        logging.getLogger(name).setLevel(logging.ERROR)
    for module in ("torchdata", "lightning"):  # deprecations inside the libraries
        warnings.filterwarnings("ignore", module=module)
    disable_progress_bar()  # transformers' bar over weight files
