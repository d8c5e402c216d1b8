"""The language model: one class over a Hugging Face causal LM. "Target" and "base" are its roles.

A forward pass takes ids, positions, a mask predicate, a cache and the layers to tap, and returns hidden states and
tapped features; its only side effect is on the cache. Layer ids are 0-based decoder layers: id i is the output of layer
i before the final norm. This module knows no drafter and no decoder.

Legend: B = batch, L = positions, D = model width, F = len(tap ids) * D, V = vocabulary.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal

import torch
import transformers
from safetensors import SafetensorError
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
from dspec.devices import check_bfloat16, local_device
from dspec.errors import UserError
from dspec.models.cache import PackedWindow, PositionCache, Window
from dspec.models.mask_token import choose_mask_token
from dspec.models.ragged import RaggedRows
from dspec.models.rotary import Rotary
from dspec.models.target_model import TargetModel
from dspec.models.xlnet import MODEL_TYPE as XLNET
from dspec.models.xlnet import XLNet
from dspec.spans import span

FAMILIES = ("llama", "qwen2", "qwen3")
DTYPES = ("float32", "bfloat16", "float64")
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
    dspec_mask: Mask | Literal["from transformers"] = _FROM_TRANSFORMERS,
    dspec_rows: RaggedRows | None = None,
    **unused: object,
) -> tuple[Tensor, None]:
    """Implements transformers' attention interface. Its own SDPA copies the key/value heads in every layer with a mask.

    `dspec_mask` is the mask of our own forward pass; transformers' generate does not pass it, and means causal by None.
    `dspec_rows` unpacks the queries of packed rows; keys and values come from the cache, in rows.
    """
    if isinstance(dspec_mask, str) and dspec_mask == _FROM_TRANSFORMERS:
        mask: Mask = masks.CAUSAL if attention_mask is None and query.shape[2] > 1 else attention_mask
    else:
        mask = dspec_mask
    with span("attention"):
        if dspec_rows is not None:
            query = dspec_rows.unpack(query.transpose(1, 2)).transpose(1, 2)
        out = attend(query, key, value, mask, scale=scaling).transpose(1, 2)
        return (out if dspec_rows is None else dspec_rows.pack(out)), None


AttentionInterface.register(_ATTENTION, _attention)
AttentionMaskInterface.register(_ATTENTION, sdpa_mask)


@dataclass(frozen=True)
class ModelOutput:
    hidden_BLD: Tensor  # after the final norm: what the LM head reads
    features_BLF: Tensor  # the tapped layers' outputs, concatenated; width 0 when nothing is tapped


class LanguageModel(TargetModel):
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

    def packed(
        self,
        ids_1N: Tensor,
        rows: RaggedRows,
        *,
        cache: PositionCache,
        start_B: Sequence[int] | None = None,
        taps: Sequence[int] = (),
    ) -> ModelOutput:
        """A causal `forward` over rows of different lengths as one row of all their tokens, without padding: linear
        layers compute N positions, attention alone pads. The output [1, N, ...] is packed, too."""
        if rows.even:
            output = self(rows.unpack(ids_1N), cache=cache, start_B=start_B, taps=taps)
            return ModelOutput(rows.pack(output.hidden_BLD), rows.pack(output.features_BLF))
        starts = list(start_B) if start_B is not None else [0] * len(rows.lengths)
        window = cache.packed_window(starts, rows)
        mask = masks.build_causal(
            starts,
            queries=rows.longest,
            keys=window.end,
            device=ids_1N.device,
            additive_dtype=None if torch.is_autocast_enabled(ids_1N.device.type) else self.dtype,
        )
        return self._layers(ids_1N, window.slot_N[None], mask, window, taps, rows)

    def _layers(
        self,
        ids_BL: Tensor,
        positions_BL: Tensor,
        mask: Mask,
        window: Window | PackedWindow | None,
        taps: Sequence[int],
        rows: RaggedRows | None = None,
    ) -> ModelOutput:
        decoder = self.model.get_decoder()
        x_BLD = decoder.embed_tokens(ids_BL)
        rotation = decoder.rotary_emb(x_BLD, positions_BL)
        tapped: dict[int, Tensor] = {}
        for i, layer in enumerate(decoder.layers):
            x_BLD = layer(x_BLD, position_embeddings=rotation, past_key_values=window, dspec_mask=mask, dspec_rows=rows)
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


def require_causal(model: TargetModel) -> LanguageModel:
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


def load_language_model(*, path: str, name: str, dtype: str, device: str, mask_token: int | str | None) -> TargetModel:
    """A target from a local folder or the Hub, an XLNet included; `dtype` float32 | bfloat16 | float64, `mask_token` as
    in models/mask_token.py. Code in a folder is never run.

    Raises UserError if the model or its tokenizer cannot be loaded.
    """
    local = checked_device(device, dtype=dtype)
    model, tokenizer = read_pretrained(path, dtype=dtype, role="target")
    mask_token_id = choose_mask_token(model, tokenizer, mask_token, name=name)
    kind = XLNet if model.config.model_type == XLNET else LanguageModel
    return kind(model.to(local), tokenizer, name=name, mask_token_id=mask_token_id)


def checkpoint_path(path: str) -> str:
    """A local folder as such (restored where its writer was killed), everything else as the name on the Hub."""
    folder = Path(path).expanduser()
    restore(folder)
    return str(folder) if folder.is_dir() else path


@contextmanager
def one_line_failure(path: str, *, role: str = "target") -> Iterator[None]:
    """Raises UserError with the first line of what transformers says when it cannot load."""
    try:
        yield
    except (OSError, ValueError, SafetensorError) as error:
        reason = str(error).strip().splitlines()[0]
        raise UserError(f"cannot load {role} {path!r} from disk or the Hub ({reason}){_hint(reason)}") from error


def _hint(reason: str) -> str:
    if "custom code" not in reason:
        return ""
    return "; dspec runs none: for models of these families use target=dream, diffucoder or llada with target.path"


def checked_device(device: str, *, dtype: str) -> str:
    """`local_device`; raises UserError for a dtype that is unknown, or that does not work there."""
    if dtype not in DTYPES:
        raise UserError(f"target.dtype={dtype} is unknown; use one of {', '.join(DTYPES)}")
    local = local_device(device)
    if dtype == "bfloat16" and torch.device(local).type == "cpu":
        check_bfloat16()
    return local


def read_pretrained(path: str, *, dtype: str, role: str) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """A causal LM of transformers and its tokenizer, from a local folder or the Hub. Code in a folder is never run.

    Raises UserError, which names its `role`, if they cannot be loaded, or are not those of a language model, as in the
    folder of a drafter: transformers would make up weights that are missing, and leave out what it does not know.
    """
    path = checkpoint_path(path)
    with one_line_failure(path, role=role):
        model, info = AutoModelForCausalLM.from_pretrained(
            path, dtype=getattr(torch, dtype), trust_remote_code=False, output_loading_info=True
        )
        tokenizer = AutoTokenizer.from_pretrained(path, trust_remote_code=False)
    foreign = set(model.config.architectures or ()) - set(dir(transformers))  # a drafter's, such as Qwen3DSparkModel
    if wrong := sorted(info["missing_keys"] or (info["unexpected_keys"] if foreign else ())):
        raise UserError(
            f"the weights of {role} {path!r} are not those of a language model ({wrong[0]} is missing, or no part of "
            "one); a drafter is given by checkpoint="
        )
    check_tokenizer(tokenizer, path, role=role)
    return model, tokenizer


def check_tokenizer(tokenizer: PreTrainedTokenizerBase, path: str, *, role: str = "target") -> None:
    """Raises UserError for an empty one: transformers makes it up for a folder without."""
    if not tokenizer("a", add_special_tokens=False)["input_ids"]:
        raise UserError(f"{role} {path!r} has no tokenizer (text gives no tokens): put its tokenizer's files there")


def embedded_target(*, dtype: str, device: str) -> LanguageModel:
    """The target that ships with dspec (3M parameters, trained by recipe=ar_base)."""
    return _shipped("tiny", dtype=dtype, device=device)


def embedded_any_subset(*, dtype: str, device: str) -> LanguageModel:
    """The any-subset model that ships with dspec: the embedded target after recipe=as_arm."""
    return _shipped("tiny_as_arm", dtype=dtype, device=device)


def embedded_diffusion(*, dtype: str, device: str) -> LanguageModel:
    """The diffusion LM that ships with dspec, the teacher of D2F: the embedded target after recipe=dllm_base."""
    return _shipped("tiny_diffusion", dtype=dtype, device=device)


def _shipped(name: str, *, dtype: str, device: str) -> LanguageModel:
    folder = str(ASSETS / name)
    return require_causal(load_language_model(path=folder, name=name, dtype=dtype, device=device, mask_token=None))


def embedded_tokenizer() -> PreTrainedTokenizerBase:
    return AutoTokenizer.from_pretrained(str(ASSETS / "tiny"))
