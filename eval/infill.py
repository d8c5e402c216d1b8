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

_HOLE = re.compile(r"\[MASK(?::([0-9]+))?\]")
_NO_HOLE = re.compile(r"\[MASK[^\]]{0,20}\]?")  # in a text without its holes
_MOST = 2**20  # tokens of a text: XLNet's context has no end, memory has


def parse(tokenizer: PreTrainedTokenizerBase, text: str, *, task: str | None, room: int) -> EncodedPrompt:
    """`text` with its [MASK:n] as holes; with a `task`, as the response to that user turn. `room`: the model's context.

    Raises UserError for a text without holes, an empty one or one that is not understood, for a text without anything
    visible, and for one that does not fit.
    """
    _check_text(tokenizer, text, task)
    room = min(room, _MOST)
    turn = prompt_ids(tokenizer, task, PromptPolicy(system=None, thinking=False)) if task is not None else []
    ids, seen, holes, at, end = list(turn), list(range(len(turn))), list[int](), len(turn), 0
    for hole in [*_HOLE.finditer(text), None]:
        piece = tokenizer(text[end : hole.start() if hole else None], add_special_tokens=False)["input_ids"]
        ids += piece
        seen += range(at, at + len(piece))
        at += len(piece)
        size = 0 if hole is None else _size(hole)
        if at + size > room:
            raise UserError(f"with its holes the text has more tokens than fit ({room}): shorten it")
        if hole is not None:
            holes += range(at, at + size)
            at, end = at + size, hole.end()
    if not holes:
        raise UserError('the text has no hole: mark holes as [MASK:n], such as "The [MASK:4] sat on the mat"')
    if not ids:
        raise UserError("the text has no visible token: at least one must be given, or a --task")
    return EncodedPrompt(ids=ids, max_new_tokens=len(holes), positions=[*seen, *holes], start=len(turn))


def _check_text(tokenizer: PreTrainedTokenizerBase, text: str, task: str | None) -> None:
    """Raises UserError for text that is not UTF-8, and for what looks like a hole and is none."""
    for given in (text, task or ""):
        try:
            given.encode()
        except UnicodeEncodeError as error:  # how Python hands on bytes of the command line that are none
            raise UserError(f"the text is not UTF-8 (character {error.start}): mend or delete it there") from error
    if wrong := _NO_HOLE.search(_HOLE.sub(" ", text)):
        raise UserError(f"{wrong[0]!r} is no hole: mark holes as [MASK:n], n tokens, such as [MASK:4]")
    if tokenizer.mask_token is not None and tokenizer.mask_token in text:
        raise UserError(f"the text shows the mask token {tokenizer.mask_token}: mark holes as [MASK:n]")


def _size(hole: re.Match[str]) -> int:
    """Raises UserError for a hole of no tokens."""
    digits = "1" if hole[1] is None else hole[1].lstrip("0")
    if not digits:
        raise UserError(f"{hole[0]} is a hole of no tokens: say [MASK:1] or more")
    return int(digits[:9])  # more do not fit anyway


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
        if not -(2**63) <= args.seed < 2**64:
            raise UserError(f"--seed {args.seed} must lie between -2**63 and 2**64 - 1")
        model = _model(args.model)
        prompt = parse(model.tokenizer, args.text, task=args.task, room=model.max_positions)
        config = AnySubsetConfig(num_drafts=args.num_drafts, drafted_by=args.drafted_by, bonus=True, tolerance=0.0)
        sampling = Sampling(temperature=args.temperature, top_p=1.0)
        request = prompt.request(sampling=sampling, seed=args.seed, stop_ids=(), stop=None)
        [generation] = decode(AnySubset(target=model, config=config), [request])
    print(model.tokenizer.decode(prompt.response(generation.tokens)))
    print(f"{prompt.max_new_tokens} tokens in {generation.nfe} forward passes")


if __name__ == "__main__":
    main()
