"""The language model: one class over a Hugging Face causal LM. "Target" and "base" are its roles.

A forward pass takes ids, positions, a mask predicate, a cache and the layers to tap, and returns hidden states and
tapped features; its only side effect is on the cache. Layer ids are 0-based decoder layers: id i is the output of layer
i before the final norm. This module knows no drafter and no decoder.

Legend: B = batch, L = positions, D = model width, F = len(tap ids) * D, V = vocabulary.
"""

import os
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Final, Literal

import torch
from torch import Tensor, nn
from transformers import (
    AttentionInterface,
    AttentionMaskInterface,
    AutoModelForCausalLM,
    AutoTokenizer,
    PreTrainedModel,
    PreTrainedTokenizerBase,
)
from transformers.masking_utils import sdpa_mask
from transformers.models.llama.modeling_llama import LlamaRMSNorm
from transformers.models.qwen2.modeling_qwen2 import Qwen2RMSNorm
from transformers.models.qwen3.modeling_qwen3 import Qwen3RMSNorm

from dspec.atomic import restore
from dspec.attention import masks
from dspec.attention.attend import attend
from dspec.attention.masks import Mask, Predicate
from dspec.errors import UserError
from dspec.models.any_subset_model import AnySubsetModel
from dspec.models.cache import PositionCache, Window
from dspec.models.rotary import Rotary
from dspec.models.xlnet import MODEL_TYPE as XLNET
from dspec.models.xlnet import XLNet
from dspec.spans import span

FAMILIES = ("llama", "qwen2", "qwen3")
DTYPES = ("float32", "bfloat16", "float64")
_BF16_PRODUCT = "import torch; x = torch.ones(64, 64, dtype=torch.bfloat16); torch.nn.functional.linear(x, x)"
ASSETS = Path(__file__).resolve().parent.parent / "assets"
_ATTENTION = "dspec"  # attn_implementation name under which our attend is registered
_NORMS = (LlamaRMSNorm, Qwen2RMSNorm, Qwen3RMSNorm)


_FROM_TRANSFORMERS: Final = "from transformers"


def _attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    ours: Mask | Literal["from transformers"] = _FROM_TRANSFORMERS,
    **unused: object,
) -> tuple[Tensor, None]:
    """Implements transformers' attention interface. Its own SDPA copies the key/value heads in every layer with a mask.

    `ours` is the mask of our own forward pass; transformers' generate does not pass it, and means causal by None.
    """
    if isinstance(ours, str) and ours == _FROM_TRANSFORMERS:
        mask: Mask = masks.CAUSAL if attention_mask is None and query.shape[2] > 1 else attention_mask
    else:
        mask = ours
    with span("attention"):
        out = attend(query, key, value, mask, scale=scaling)
    return out.transpose(1, 2), None


AttentionInterface.register(_ATTENTION, _attention)
AttentionMaskInterface.register(_ATTENTION, sdpa_mask)


@dataclass(frozen=True)
class ModelOutput:
    hidden_BLD: Tensor  # after the final norm: what the LM head reads
    features_BLF: Tensor  # the tapped layers' outputs, concatenated; width 0 when nothing is tapped


class LanguageModel(AnySubsetModel):
    """A decoder-only LM of the Llama, Qwen2 or Qwen3 family with its tokenizer; frozen until a method trains it."""

    def __init__(
        self,
        model: PreTrainedModel,
        tokenizer: PreTrainedTokenizerBase | None,
        *,
        name: str,
        mask_token_id: int | None = None,
    ) -> None:
        """Raises UserError for another family, or for layers that attend through a sliding window."""
        config = model.config
        if config.model_type not in FAMILIES:
            raise UserError(
                f"target {name!r} is a {config.model_type!r} model; dspec runs the families {', '.join(FAMILIES)}"
            )
        if "sliding_attention" in (getattr(config, "layer_types", None) or ()):
            raise UserError(f"target {name!r} has sliding-window layers, which dspec's cache does not model")
        rope = (getattr(config, "rope_parameters", None) or {}).get("rope_type", "default")
        if rope in ("dynamic", "longrope"):
            raise UserError(f"target {name!r} has {rope} rotary embeddings: their frequencies depend on the length")
        super().__init__(model, tokenizer, name=name, mask_token_id=mask_token_id)
        model.set_attn_implementation(_ATTENTION)
        decoder = model.get_decoder()
        # rebuilt from the config: the model may already have been cast
        decoder.rotary_emb = Rotary(type(decoder.rotary_emb)(config)).to(model.device)
        if self.dtype == torch.float64:
            _norms_in_double(model)

    @property
    def max_positions(self) -> int:
        return int(self.model.config.max_position_embeddings)

    def check_taps(self, layer_ids: Sequence[int]) -> None:
        """Raises UserError for layer ids out of range."""
        if bad := [i for i in layer_ids if not 0 <= i < self.num_layers]:
            raise UserError(
                f"target layer ids {bad} are out of range: {self.name!r} has layers 0..{self.num_layers - 1}; "
                "set draft.target_layer_ids accordingly"
            )

    def new_cache(self) -> PositionCache:
        return PositionCache(self.num_layers)

    def forward(
        self,
        ids_BL: Tensor,
        *,
        positions_BL: Tensor | None = None,
        mask: Predicate | None = None,
        cache: PositionCache | None = None,
        start_B: Sequence[int] | None = None,
        taps: Sequence[int] = (),
    ) -> ModelOutput:
        """One forward pass; its only side effect is on the cache.

        With a cache, row b's keys and values are written to slots start_B[b] .. (0 without `start_B`), and queries also
        attend to the slots before. `mask` is a predicate over query indices and cache slots; None is causal.
        `positions_BL`, by default the slots, are for the rotary embedding: they may repeat and have gaps. Rows are
        padded on the right, and outputs past a row's end are garbage. `taps` names the layers whose outputs become the
        features.
        """
        B, L = ids_BL.shape
        starts, device = list(start_B) if start_B is not None else [0] * B, ids_BL.device
        if positions_BL is None:
            positions_BL = torch.arange(L, device=device)[None]
            if any(starts):
                positions_BL = positions_BL + torch.tensor(starts, device=device)[:, None]
        window = cache.window(starts, L) if cache is not None else None
        additive_dtype = None if torch.is_autocast_enabled(device.type) else self.dtype
        if mask is None:
            physical = masks.build_causal(starts, queries=L, device=device, additive_dtype=additive_dtype)
        else:
            keys = L if window is None else window.end
            flex = window is None and device.type == "cuda"  # caches grow: each length would be compiled again
            physical = masks.build(
                mask, batch=B, queries=L, keys=keys, device=device, additive_dtype=additive_dtype, flex=flex
            )
        return self._layers(ids_BL, positions_BL, physical, window, taps)

    def _layers(
        self, ids_BL: Tensor, positions_BL: Tensor, mask: Mask, window: Window | None, taps: Sequence[int]
    ) -> ModelOutput:
        decoder = self.model.get_decoder()
        x_BLD = decoder.embed_tokens(ids_BL)
        rotation = decoder.rotary_emb(x_BLD, positions_BL)
        tapped: dict[int, Tensor] = {}
        for i, layer in enumerate(decoder.layers):
            x_BLD = layer(x_BLD, position_embeddings=rotation, past_key_values=window, ours=mask)
            if i in taps:
                tapped[i] = x_BLD
        features = torch.cat([tapped[i] for i in taps], -1) if taps else x_BLD[..., :0]
        return ModelOutput(decoder.norm(x_BLD), features)

    def any_subset(
        self,
        ids_BL: Tensor,
        *,
        positions_BL: Tensor,
        limit_BL: Tensor,
        query_BL: Tensor,
        cache: PositionCache | None = None,
        start_B: Sequence[int] | None = None,
    ) -> Tensor:
        """A position query is the mask token at its position; it sees itself, too. Raises UserError without one."""
        starts = torch.tensor(start_B if start_B is not None else [0] * len(ids_BL), device=ids_BL.device)
        output = self(
            ids_BL.masked_fill(query_BL, self.required_mask_token()),
            positions_BL=positions_BL,
            mask=masks.any_subset(limit_BL, starts),
            cache=cache,
            start_B=start_B,
        )
        return output.hidden_BLD


def require_causal(model: AnySubsetModel) -> LanguageModel:
    """The model itself. Raises UserError for one that does not write from left to right."""
    if not isinstance(model, LanguageModel):
        raise UserError(
            f"target {model.name!r} is a {model.model.config.model_type!r} model, which only fills holes: use "
            "recipe=as_arm and decoder=[any_subset,assd], or a causal target"
        )
    return model


def _norms_in_double(model: nn.Module) -> None:
    """Replaces transformers' RMS norms, which round to float32 internally: exactness in float64 forbids that."""
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, _NORMS):
                norm = nn.RMSNorm(child.weight.shape[0], eps=child.variance_epsilon, dtype=torch.float64)
                norm.weight = child.weight
                setattr(parent, name, norm)


@cache
def check_bfloat16() -> None:
    """Raises UserError if a bfloat16 matmul crashes the process (CPUs that report AMX but may not use it)."""
    if subprocess.run([sys.executable, "-c", _BF16_PRODUCT], stderr=subprocess.DEVNULL).returncode < 0:
        raise UserError(
            "bfloat16 crashes on this CPU (illegal instruction in oneDNN): set the environment variable "
            "ONEDNN_MAX_CPU_ISA=AVX512_CORE_BF16, or use target.dtype=float32 trainer.precision=32-true"
        )


def load_language_model(*, path: str, name: str, dtype: str, device: str, mask_token_id: int | None) -> AnySubsetModel:
    """A target from a local folder or the Hub, an XLNet included; `dtype` float32 | bfloat16 | float64.

    Raises UserError if the model or its tokenizer cannot be loaded.
    """
    if dtype not in DTYPES:
        raise UserError(f"target.dtype={dtype} is unknown; use one of {', '.join(DTYPES)}")
    place = local_device(device)
    if dtype == "bfloat16" and torch.device(place).type == "cpu":
        check_bfloat16()
    folder = Path(path).expanduser()
    restore(folder)
    if folder.is_dir():
        path = str(folder)
    try:
        model = AutoModelForCausalLM.from_pretrained(path, dtype=getattr(torch, dtype))
        tokenizer = AutoTokenizer.from_pretrained(path)
    except (OSError, ValueError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"cannot load target {path!r} from disk or the Hub ({reason})") from error
    kind = XLNet if model.config.model_type == XLNET else LanguageModel
    return kind(model.to(place), tokenizer, name=name, mask_token_id=mask_token_id)


def local_device(device: str) -> str:
    """`device`, with "cuda" replaced by this process's own GPU: by its local rank among those that it sees (schedulers
    may make only one GPU visible to each process).

    Raises UserError for a device that torch does not know or cannot use here.
    """
    try:
        asked = torch.device(device)
    except (RuntimeError, TypeError) as error:
        named = "null" if device is None else device
        raise UserError(f"target.device={named} is unknown to torch: use cpu, cuda or cuda:<number>") from error
    if asked.type != "cuda":
        return _usable(device)
    if not torch.cuda.is_available():
        raise UserError(f"target.device={device}: torch sees no CUDA GPU here; use target.device=cpu")
    count = torch.cuda.device_count()
    if asked.index is None:
        rank = os.environ.get("LOCAL_RANK", os.environ.get("SLURM_LOCALID", "0"))
        return f"cuda:{int(rank) % count}"
    if asked.index >= count:
        raise UserError(
            f"target.device={device}: torch sees {count} GPU(s) here, numbered from 0; use target.device=cuda"
        )
    return device


def _usable(device: str) -> str:
    """`device` if a tensor can be made and read there; torch says only then what it was built for."""
    try:
        torch.zeros(1, device=device).item()
    except (RuntimeError, AssertionError, ImportError) as error:
        raise UserError(f"target.device={device}: torch cannot use it here; use cpu, cuda or cuda:<number>") from error
    return device


def embedded_target(*, dtype: str, device: str) -> LanguageModel:
    """The target that ships with dspec (3M parameters, trained by recipe=ar_base)."""
    return _shipped("tiny", dtype=dtype, device=device)


def embedded_any_subset(*, dtype: str, device: str) -> LanguageModel:
    """The any-subset model that ships with dspec: the embedded target after recipe=as_arm."""
    return _shipped("tiny_as_arm", dtype=dtype, device=device)


def _shipped(name: str, *, dtype: str, device: str) -> LanguageModel:
    folder = str(ASSETS / name)
    return require_causal(load_language_model(path=folder, name=name, dtype=dtype, device=device, mask_token_id=None))


def embedded_tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(str(ASSETS / "tiny"))
