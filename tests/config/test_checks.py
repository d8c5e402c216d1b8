"""Checks of a composed config before torch is imported: parts, and ranges of the decoders of diffusion LMs."""

import pytest

import eval.decoders
from dspec.config.checks import OF_DIFFUSION, check
from dspec.config.compose import composed
from dspec.errors import UserError

COMMON = ["target=tiny", "decoder=[diffusion,fast_dllm,d2f,lopa]", "benchmark=tiny"]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["decoder.d2f.threshold=1.5"], r"decoder\.d2f\.threshold=1\.5 .*must lie in \[0, 1\]"),
        (["decoder.lopa.append_ratio=-0.1"], r"decoder\.lopa\.append_ratio=-0\.1"),
        (["decoder.d2f.activate_ratio=2"], r"decoder\.d2f\.activate_ratio=2"),
        (["decoder.fast_dllm.threshold=-1"], r"decoder\.fast_dllm\.threshold=-1"),
        (["decoder.diffusion.tokens_per_step=0"], r"decoder\.diffusion\.tokens_per_step=0 .*at least 1"),
        (["decoder.lopa.branches=-1"], r"decoder\.lopa\.branches=-1 .*at least 0"),
        (["decoder.lopa.segment=0"], r"decoder\.lopa\.segment=0 .*at least 1"),
        (["decoder.d2f.block_size=0"], r"decoder\.d2f\.block_size=0 .*at least 1"),
        (
            ["benchmark.functions.max_new_tokens=31"],
            r"block_size=32 is larger than benchmark\.functions\.max_new_tokens=31: lower it, or set it to null",
        ),
        (["+benchmark.stories_40.count=9"], r"benchmark\.stories_40 is no benchmark of this run: choose it too"),
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


def test_decoders_with_checked_blocks_exist() -> None:
    """They are named by strings, which a renaming does not reach."""
    names = [path.rpartition(".")[2] for path in OF_DIFFUSION]
    assert all(callable(getattr(eval.decoders, name)) for name in names)
    blocks = [name for name, node in composed("eval", [*COMMON]).decoder.items() if "block_size" in node]
    assert sorted(names) == sorted(blocks)


def test_blocks_of_a_training_run_are_checked_before_it() -> None:
    """The decoders' blocks refer to those of training."""
    arguments = ["recipe=d2f", "benchmark.functions.max_new_tokens=15"]
    with pytest.raises(UserError, match=r"block_size=16 is larger than benchmark\.functions\.max_new_tokens=15"):
        check(composed("train", arguments), config="train")


def test_branches_are_divided_in_an_evaluation_alone() -> None:
    """A training run evaluates in its first rank: the others would not come, and all would end after the training."""
    timeout = ["decoder=[diffusion,lopa]", "decoder.lopa.process_timeout_s=5"]
    with pytest.raises(UserError, match=r"decoder\.lopa\.process_timeout_s=5: .*eval\.run checkpoint="):
        check(composed("train", ["recipe=d2f", *timeout]), config="train")
    check(composed("eval", ["target=tiny", "benchmark=tiny", *timeout]), config="eval")


def test_d2f_has_no_full_fine_tuning() -> None:
    """Not a word of the page's keys, such as rank, which stay."""
    with pytest.raises(UserError, match=r"^recipe=d2f needs method/tuning=lora"):
        check(composed("train", ["recipe=d2f", "method/tuning=full"]), config="train")
    for fits in (["recipe=d2f", "method/tuning=lora"], ["recipe=dllm_base", "method/tuning=full"]):
        check(composed("train", fits), config="train")
