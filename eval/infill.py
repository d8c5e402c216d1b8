"""Fills the holes of a text with an any-subset model, several tokens per forward pass.

    python -m eval.infill "The [MASK:4] sat on the mat"                          with the small model that ships
    python -m eval.infill "3 + 4 = [MASK:1].[MASK:5]" --task "Tom has 3 pens and buys 4. How many has he?"
    python -m eval.infill "The [MASK:4] sat on the mat" --model runs/as_arm/<time>

[MASK:n] stands for n tokens (how many is given, not found out); prints the text, and how many passes it took.
"""

import argparse
import re
from pathlib import Path

from transformers import PreTrainedTokenizerBase

from data.chat import PromptPolicy, prompt_ids
from dspec.config.compose import one_line_errors
from dspec.decoding.any_subset.decoder import AnySubset, AnySubsetConfig
from dspec.decoding.loop import decode
from dspec.decoding.sampling import Sampling
from dspec.errors import UserError
from dspec.models.language_model import embedded_any_subset, load_language_model
from dspec.models.target_model import TargetModel
from dspec.terminal import quiet
from eval.checkpoints import has_target
from eval.prompts import EncodedPrompt

_HOLE = re.compile(r"\[MASK(?::(\d+))?\]")


def parse(tokenizer: PreTrainedTokenizerBase, text: str, *, task: str | None) -> EncodedPrompt:
    """`text` with its [MASK:n] as holes; with a `task`, as the response to that user turn.

    Raises UserError for a text without holes, an empty one, and a text without anything visible.
    """
    turn = prompt_ids(tokenizer, task, PromptPolicy(system=None, thinking=False)) if task is not None else []
    ids, seen, holes, at, end = list(turn), list(range(len(turn))), list[int](), len(turn), 0
    for hole in [*_HOLE.finditer(text), None]:
        piece = tokenizer(text[end : hole.start() if hole else None], add_special_tokens=False)["input_ids"]
        ids += piece
        seen += range(at, at + len(piece))
        at += len(piece)
        if hole is not None:
            size = int(hole[1] or 1)
            if not size:
                raise UserError(f"{hole[0]} is a hole of no tokens: say [MASK:1] or more")
            holes += range(at, at + size)
            at, end = at + size, hole.end()
    if not holes:
        raise UserError('the text has no hole: mark holes as [MASK:n], such as "The [MASK:4] sat on the mat"')
    if not ids:
        raise UserError("the text has no visible token: at least one must be given, or a --task")
    return EncodedPrompt(ids=ids, max_new_tokens=len(holes), positions=[*seen, *holes], start=len(turn))


def _model(folder: str | None) -> TargetModel:
    """The shipped model, that of a run's folder, or any language model's."""
    if folder is None:
        return embedded_any_subset(dtype="float32", device="cpu")
    if has_target(Path(folder).expanduser()):
        folder = str(Path(folder).expanduser() / "target")
    return load_language_model(path=folder, name=folder, dtype="float32", device="cpu", mask_token=None)


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m eval.infill", description=(__doc__ or "").split("\n")[0])
    parser.add_argument("text", help="with [MASK:n] where n tokens are to be filled in")
    parser.add_argument(
        "--model", help="folder of a run of recipe=as_arm, or its target/ (default: the small one that ships)"
    )
    parser.add_argument("--task", help="a user turn that the text answers")
    parser.add_argument("--num-drafts", type=int, default=5, help="tokens drafted at a time (default: 5)")
    parser.add_argument("--drafted-by", choices=("model", "bigrams"), default="model", help="(default: model)")
    parser.add_argument("--temperature", type=float, default=0.0, help="0: greedy (default)")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args()
    with one_line_errors():
        quiet()
        model = _model(args.model)
        prompt = parse(model.tokenizer, args.text, task=args.task)
        config = AnySubsetConfig(num_drafts=args.num_drafts, drafted_by=args.drafted_by, bonus=True, tolerance=0.0)
        sampling = Sampling(temperature=args.temperature, top_p=1.0)
        request = prompt.request(sampling=sampling, seed=args.seed, stop_ids=(), stop=None)
        [generation] = decode(AnySubset(target=model, config=config), [request])
    print(model.tokenizer.decode(prompt.response(generation.tokens)))
    print(f"{prompt.max_new_tokens} tokens in {generation.nfe} forward passes")


if __name__ == "__main__":
    main()
