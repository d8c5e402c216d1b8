"""eval.run under torchrun, for decoders that divide their work over ranks: all ranks decode, the first one writes."""

import os
import shutil
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory
from types import FrameType

from dspec.errors import UserError


def is_first() -> bool:
    """Whether this process is rank 0, or no rank at all."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def own_folder(run_dir: Path) -> Iterator[Path]:
    """The folder where this process writes samples and results: the run's, or, on the other ranks, a temporary one that
    begins with a copy of what the run is resumed from. torchrun ends the ranks that are left when one has ended: the
    first then raises UserError, the others exit."""
    if "TORCHELASTIC_RUN_ID" in os.environ:

        def stop(number: int, frame: FrameType | None) -> None:
            if not is_first():
                sys.exit(128 + number)
            raise UserError(f"torchrun stops this run: another rank has ended; continue it by resume={run_dir}")

        signal.signal(signal.SIGTERM, stop)
    if is_first():
        yield run_dir
        return
    with TemporaryDirectory() as name:
        for file in ("samples.jsonl", "results.json"):
            if (run_dir / file).is_file():
                shutil.copy(run_dir / file, name)
        yield Path(name)
