"""What only a GPU shows: `pytest -m gpu -n 0`. Elsewhere each test is skipped with "no CUDA"."""

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dspec.attention import masks
from dspec.attention.attend import attend
from dspec.decoding.proposers import DraftProposer
from dspec.models.checkpoint import from_pretrained
from dspec.models.language_model import embedded_target

pytestmark = [pytest.mark.gpu, pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA")]
SHIPPED = Path(__file__).parents[1] / "dspec" / "assets" / "tiny_dspark"
ON_GPU = ("trainer.accelerator=cuda", "target.device=cuda")


@pytest.mark.parametrize(
    "settings",
    [("target.dtype=float32", "trainer.precision=32-true"), ("target.dtype=bfloat16", "trainer.precision=bf16-mixed")],
    ids=["float32", "bf16-mixed"],
)
@pytest.mark.parametrize("recipe", ["dspark", "dflash"])
def test_the_main_job(recipe: str, settings: tuple[str, ...], small_job: Any, tmp_path: Path) -> None:
    without = ("calibration",) if recipe == "dflash" else ()
    out = small_job.run(tmp_path / "run", *ON_GPU, *settings, recipe=recipe, without=without)
    results = json.loads((out / "results.json").read_text())
    assert results["run"]["hardware"]["gpu"]
    assert {row["n"] for row in results["rows"]} == {2}
    exact = settings[0].endswith("float32")
    if exact:
        assert all(row["mismatches"] == 0 for row in results["rows"] if row["decoder"]["temperature"] == 0)
    assert (out / "draft" / "model.safetensors").is_file()


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_a_target_on_either_device_is_trained_on_the_gpu(device: str, small_job: Any, tmp_path: Path) -> None:
    """After Lightning's teardown the drafter must be back on the GPU."""
    small_job.run(tmp_path / "run", "trainer.accelerator=cuda", f"target.device={device}")


def test_jacobi_forcing_runs(small_job: Any, tmp_path: Path) -> None:
    few = ["decoder=[base_autoregressive,autoregressive,jacobi_single]", "evaluation.temperatures=[0.0]"]
    own = ["data.row_length=130", "data.batch_size=2", "target.dtype=bfloat16", "trainer.precision=bf16-mixed"]
    without = ("calibration", "data.batch_size", "data.source.calibration")
    small_job.run(tmp_path / "run", *ON_GPU, *few, *own, recipe="jacobi_forcing", without=without)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_flex_masks_equal_dense_ones_in_value_and_gradient(dtype: torch.dtype) -> None:
    device, B, N, K, L, W = torch.device("cuda"), 2, 24, 7, 160, 64
    generator = torch.Generator(device).manual_seed(0)
    anchors = torch.randint(1, L, (B, N), generator=generator, device=device).sort(1).values
    predicate = masks.draft_blocks(anchors, torch.full((B,), L, device=device), block=K)
    shape = {"batch": B, "queries": N * K, "keys": L + N * K, "device": device}
    q = torch.randn(B, 4, N * K, W, generator=generator, device=device, dtype=dtype, requires_grad=True)
    k, v = (
        torch.randn(B, 2, L + N * K, W, generator=generator, device=device, dtype=dtype, requires_grad=True)
        for _ in range(2)
    )
    weight = torch.randn(q.shape, generator=generator, device=device, dtype=dtype)
    results = []
    for mask in (masks.dense(predicate, **shape), masks.training_blocks(anchors, context=L, block=K)):
        out = attend(q, k, v, mask)
        results.append([out, *torch.autograd.grad((out * weight).sum(), (q, k, v))])
    close = {"rtol": 2e-3, "atol": 2e-3} if dtype == torch.float32 else {"rtol": 5e-2, "atol": 5e-2}
    for dense, flex in zip(*results, strict=True):
        torch.testing.assert_close(flex, dense, **close)


def test_training_attention_takes_mixed_dtypes_under_autocast() -> None:
    """Queries and keys leave a float32 norm in float32, values leave a linear layer in bfloat16."""
    device = torch.device("cuda")
    predicate = masks.causal(torch.zeros(1, dtype=torch.long, device=device))
    mask = masks.block_mask(predicate, batch=1, queries=128, keys=128, device=device)
    q, k = (torch.randn(1, 2, 128, 64, device=device, requires_grad=True) for _ in range(2))
    v = torch.randn(1, 2, 128, 64, device=device, dtype=torch.bfloat16, requires_grad=True)
    with torch.autocast("cuda", torch.bfloat16):
        attend(q, k, v, mask).sum().backward()
    assert v.grad is not None


def test_decoding_is_lossless(toys: SimpleNamespace) -> None:
    target = embedded_target(dtype="float64", device="cuda")
    draft = from_pretrained(SHIPPED, target=target)
    text = [{"role": "user", "content": "Tom has 3 boxes with 4 pens in each. How many pens does Tom have?"}]
    prompt = list(target.tokenizer.apply_chat_template(text, add_generation_prompt=True, return_dict=False))
    how: dict[str, Any] = {"max_new_tokens": 100, "stop_ids": target.stop_ids}
    plain = toys.autoregressive(target=target, sampling=toys.GREEDY).decode([prompt], seeds=[0], **how)
    decoder = toys.speculative(target=target, proposer=DraftProposer(draft), sampling=toys.GREEDY)
    for batch in (1, 3):
        for generation in decoder.decode([prompt] * batch, seeds=[0] * batch, **how):
            assert generation.tokens == plain[0].tokens
