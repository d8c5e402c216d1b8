"""Rotary frequencies under casts and moves, of targets, drafters and bases."""

from types import SimpleNamespace

import pytest
import torch
from torch import nn

from dspec.models.language_model import LanguageModel, embedded_target
from dspec.models.rotary import Rotary
from eval.decoders import on_base


def _rotaries(module: nn.Module) -> list[Rotary]:
    return [m for m in module.modules() if isinstance(m, Rotary)]


def _off(rotary: Rotary, exact: torch.Tensor, distance: int) -> float:
    """Radians by which the angle at `distance` is off."""
    return float(((rotary.inv_freq.double() - exact.double()) * distance).abs().max())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_frequencies_stay_float32_under_any_cast(toys: SimpleNamespace, dtype: torch.dtype) -> None:
    target = toys.target("qwen3", hidden=64, positions=8192, dtype=torch.float32)
    draft = toys.draft(target)
    width = target.model.config.head_dim
    exact = 1 / (10000.0 ** (torch.arange(0, width, 2, dtype=torch.float64) / width))
    for module in (target, draft):
        for cast in (module.to(dtype), module.half(), module.bfloat16(), module.to(torch.float32), module.to(dtype)):
            (rotary,) = _rotaries(cast)
            assert rotary.inv_freq.dtype == torch.float32
            assert _off(rotary, exact, 4000) < 1e-3
        cos, _ = rotary(torch.zeros(1, dtype=dtype), torch.tensor([[1000]]))
        assert cos.dtype == dtype
        torch.testing.assert_close(cos[0, 0, : width // 2].double(), (1000 * exact).cos(), rtol=0, atol=5e-3)


def test_they_move_with_their_model(toys: SimpleNamespace) -> None:
    (rotary,) = _rotaries(toys.target().to(device="meta", dtype=torch.bfloat16))
    assert (rotary.inv_freq.device.type, rotary.inv_freq.dtype) == ("meta", torch.float32)


def test_a_model_that_was_cast_before_gets_exact_frequencies() -> None:
    model = embedded_target(dtype="float32", device="cpu").model
    exact = model.get_decoder().rotary_emb.inv_freq.clone()
    config = model.config
    model.get_decoder().rotary_emb = type(_hf_rotary(config))(config).to(torch.bfloat16)
    again = LanguageModel(model, None, name="again", mask_token_id=0)
    assert torch.equal(_rotaries(again)[0].inv_freq, exact)


def _hf_rotary(config: object) -> nn.Module:
    from transformers.models.qwen3.modeling_qwen3 import Qwen3RotaryEmbedding

    return Qwen3RotaryEmbedding(config)


def test_the_base_of_a_bfloat16_target_rotates_exactly(toys: SimpleNamespace) -> None:
    base, target = toys.target(dtype=torch.float32), toys.target(dtype=torch.bfloat16)
    seen: list[LanguageModel] = []
    on_base(target=target, draft=None, base=lambda: base, build=lambda **a: seen.append(a["target"]))
    assert seen[0].dtype == torch.bfloat16
    assert _rotaries(seen[0])[0].inv_freq.dtype == torch.float32
