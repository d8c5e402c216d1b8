"""What the main job needs of the parts that live outside dspec: their classes are in data/ and eval/, which import
dspec and are named by the config."""

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol

from dspec.models.draft import Draft
from dspec.models.target_model import TargetModel


class TrainingData(Protocol):
    """A LightningDataModule that also knows how prompts are rendered (data/conversations.py)."""

    policy: object  # data.chat.PromptPolicy

    @property
    def prompt_policy(self) -> dict[str, Any]:
        """The policy, JSON-ready."""
        ...

    def encoded(self, split: str) -> Sequence[tuple[str, list[int]]]:
        """(id, prompt ids) of a split. Only calibration asks: PackedCorpus, which trains no drafter, has none."""
        ...


class DecoderSpec(Protocol):
    """A decoder that is built when it is needed (eval/decoders.py)."""

    def check(self, *, target: TargetModel, draft: Draft | None) -> None:
        """Raises UserError for settings that its decoder rejects."""
        ...


class Evaluation(Protocol):
    """Runs decoders over benchmarks (eval/evaluate.py)."""

    def encode_prompts(
        self,
        *,
        target: TargetModel,
        specs: Mapping[str, DecoderSpec],
        benchmarks: Mapping[str, object],
        policy: object,
    ) -> object:
        """Raises UserError if a decoder is missing or a prompt does not fit."""
        ...

    def __call__(
        self,
        *,
        target: TargetModel,
        draft: Draft | None,
        specs: Mapping[str, DecoderSpec],
        benchmarks: Mapping[str, object],
        policy: object,
        stop_ids: Sequence[int],
        folder: Path,
        run: Mapping[str, Any],
        calibration: Mapping[str, Any] | None,
        settings: Mapping[str, Any],
    ) -> dict[str, Any]:
        """The content of results.json."""
        ...


class Report(Protocol):
    """Shows a run's results (eval/reports/report.py)."""

    def __call__(
        self, *, results: dict[str, Any], history: Sequence[dict[str, float]], run_dir: Path, logger: object
    ) -> None: ...

    def card(self, *, target: str, run: dict[str, Any], command: str | None, drafter: bool) -> str:
        """The README.md of an exported checkpoint."""
        ...
