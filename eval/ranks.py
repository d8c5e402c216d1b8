"""eval.run under torchrun, for decoders that divide their work over ranks: all ranks decode, the first one writes."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from tempfile import TemporaryDirectory


def is_first() -> bool:
    """Whether this process is rank 0, or no rank at all."""
    return os.environ.get("RANK", "0") == "0"


@contextmanager
def own_folder(run_dir: Path) -> Iterator[Path]:
    """The folder where this process writes samples and results: the run's, or, on the other ranks, a temporary one that
    begins with a copy of what the run is resumed from."""
    if is_first():
        yield run_dir
        return
    with TemporaryDirectory() as name:
        for file in ("samples.jsonl", "results.json"):
            if (run_dir / file).is_file():
                shutil.copy(run_dir / file, name)
        yield Path(name)
