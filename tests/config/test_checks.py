"""Checks of a composed config before torch is imported: ranges of the decoders of diffusion LMs."""

import pytest

from dspec.config.checks import check
from dspec.config.compose import composed
from dspec.errors import UserError

COMMON = ["target=tiny", "decoder=[diffusion,confidence_threshold,d2f,lopa]", "benchmark=tiny"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["decoder.d2f.threshold=1.5"], r"decoder\.d2f\.threshold=1\.5 .*must lie in \[0, 1\]"),
        (["decoder.lopa.append_ratio=-0.1"], r"decoder\.lopa\.append_ratio=-0\.1"),
        (["decoder.d2f.activate_ratio=2"], r"decoder\.d2f\.activate_ratio=2"),
        (["decoder.confidence_threshold.threshold=-1"], r"decoder\.confidence_threshold\.threshold=-1"),
        (["decoder.diffusion.tokens_per_step=0"], r"decoder\.diffusion\.tokens_per_step=0 .*at least 1"),
        (["decoder.lopa.branches=-1"], r"decoder\.lopa\.branches=-1 .*at least 0"),
        (["decoder.lopa.segment=0"], r"decoder\.lopa\.segment=0 .*at least 1"),
        (["decoder.d2f.block_size=0"], r"decoder\.d2f\.block_size=0 .*at least 1"),
        (
            ["benchmark.functions.max_new_tokens=31"],
            r"block_size=32 is larger than benchmark\.functions\.max_new_tokens=31: lower it, or set it to null",
        ),
        (["decoder.diffusion.block_size=300"], r"decoder\.diffusion\.block_size=300 is larger than benchmark\."),
    ],
)
def test_out_of_range(arguments: list[str], words: str) -> None:
    with pytest.raises(UserError, match=words):
        check(composed("eval", [*COMMON, *arguments]), config="eval")


def test_in_range() -> None:
    edges = ["decoder.d2f.threshold=0", "decoder.lopa.append_ratio=1.0", "decoder.lopa.branches=0"]
    sizes = ["decoder.lopa.block_size=null", "benchmark.functions.max_new_tokens=32"]
    check(composed("eval", [*COMMON, *edges, *sizes]), config="eval")
    of_its_own = ["decoder=[autoregressive,jacobi_single]", "decoder.jacobi_single.block_size=300"]
    check(composed("eval", ["target=tiny", "benchmark=tiny", *of_its_own]), config="eval")  # Jacobi's block may be
