"""lm-evaluation-harness with our decoders: its own command line, one more model.

    python -m eval.lm_eval --model dspec --model_args checkpoint=<run dir>,decoder=speculative --tasks gsm8k
    python -m eval.lm_eval --model dspec --model_args target=smollm2_135m --tasks dspec_gsm8k --limit 20

model_args are keys of conf/eval.yaml (target, checkpoint, decoder, label, seed, ...), plus batch_size. The tasks of
eval/tasks (dspec_*) read $DSPEC_DATA and need no Hub. tpf, tau and nfe land in the results under "dspec". Needs the
extra `lm-eval`. Knows no benchmark: prompts, stops and scores are lm-eval's.
"""

import sys
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from hydra import compose, initialize_config_dir
from rich.progress import track

from data.regenerate import prompt_seed
from dspec.config import CONF, check_keys, instantiate, register
from dspec.decoding.base import Decoder, Generation
from dspec.decoding.sampling import Sampling
from dspec.decoding.stopping import StopStrings
from dspec.errors import UserError
from eval.rows import acceptance, counts
from eval.run import load_subject

try:
    import lm_eval
    from lm_eval.api.model import TemplateLM
    from lm_eval.api.registry import register_model
    from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
except ImportError as error:
    raise SystemExit(f'error: {error}; install the extra: pip install -e ".[lm-eval]"') from error

TASKS = Path(__file__).resolve().parent / "tasks"


@register_model("dspec")
class DspecLM(TemplateLM):
    """A target with one of our decoders, as lm-eval sees a model."""

    def __init__(self, *, batch_size: int | str = 1, device: object = None, **args: Any) -> None:
        """`args` are overrides of conf/eval.yaml. lm-eval's `device` (cuda by default) is passed over: the target's
        config says where it runs (target.device=...)."""
        super().__init__()
        register()
        decoder = args.pop("decoder", "autoregressive")
        overrides = [f"{key}={value}" for key, value in {"decoder": f"[{decoder}]", **args}.items()]
        with initialize_config_dir(str(CONF), version_base="1.3"):
            cfg = compose("eval", overrides=overrides)
        check_keys(cfg, base="eval")
        self.subject = load_subject(cfg)
        cfg.label = self.subject.label
        self._contender = next(iter(instantiate(cfg.decoder).values()))
        self.target, self.tokenizer, self.seed = self.subject.target, self.subject.target.tokenizer, int(cfg.seed)
        self.batch_size = int(batch_size)
        self._generations: list[Generation] = []
        self._decoder({})  # a decoder that this model cannot run is refused now

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def max_length(self) -> int:
        return self.target.max_positions

    @property
    def tokenizer_name(self) -> str:
        return self.target.name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """A chat template has put the BOS token there already: it is not added twice."""
        bos = self.tokenizer.bos_token
        special = not (bos and string.startswith(bos)) if add_special_tokens is None else add_special_tokens
        return list(self.tokenizer(string, add_special_tokens=special)["input_ids"])

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        policy = self.subject.policy
        if policy.system is not None and chat_history[0]["role"] != "system":
            chat_history = [{"role": "system", "content": policy.system}, *chat_history]
        return str(
            self.tokenizer.apply_chat_template(
                chat_history,
                tokenize=False,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=not add_generation_prompt,
                enable_thinking=policy.thinking,
            )
        )

    def _decoder(self, wanted: dict[str, Any]) -> Decoder:
        sampled = wanted.get("do_sample", wanted.get("temperature", 0.0) > 0)
        temperature = float(wanted.get("temperature", 1.0)) if sampled else 0.0
        sampling = Sampling(temperature=temperature, top_p=float(wanted.get("top_p", 1.0)))
        return self._contender.build(target=self.target, draft=self.subject.draft, sampling=sampling)

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers up to the first stop string, in the order of the requests."""
        answers = [""] * len(requests)
        groups: dict[str, list[int]] = defaultdict(list)
        for i, request in enumerate(requests):
            groups[repr(sorted(request.args[1].items()))].append(i)
        batches = []
        for group in groups.values():
            group.sort(key=lambda i: len(requests[i].args[0]))
            batches += [group[start : start + self.batch_size] for start in range(0, len(group), self.batch_size)]
        for batch in track(batches, "generating", disable=disable_tqdm):
            for i, text in zip(batch, self._answer([requests[i] for i in batch]), strict=True):
                answers[i] = text
                self.cache_hook.add_partial("generate_until", requests[i].args, text)
        return answers

    def _answer(self, requests: Sequence[Any]) -> list[str]:
        wanted = dict(requests[0].args[1])
        until = wanted.get("until") or []
        strings = StopStrings(self.tokenizer, [until] if isinstance(until, str) else until)
        new = int(wanted.get("max_gen_toks", 256))
        room = self.max_length - new
        if room < 1:
            raise UserError(f"max_gen_toks={new} leaves no room for a prompt in {self.max_length} positions")
        with torch.inference_mode():
            generations = self._decoder(wanted).decode(
                [self.tok_encode(r.args[0])[-room:] for r in requests],
                max_new_tokens=new,
                stop_ids=self.target.stop_ids,
                seeds=[prompt_seed(self.seed, f"{r.args[0]}/{r.idx}") for r in requests],
                ends=strings,
            )
        self._generations += generations
        return [strings.cut(self.tokenizer.decode(g.tokens, skip_special_tokens=True)) for g in generations]

    @torch.inference_mode()
    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        found = []
        for key, context, continuation in track(requests, "scoring", disable=disable_tqdm):
            ids = torch.tensor([[*context, *continuation][-(self.max_length + 1) :]], device=self.target.device)
            n = len(continuation)
            logits = self.target.logits(self.target(ids[:, :-1]).hidden_BLD)[0, -n:].float()
            label = ids[0, -n:]
            total = logits.log_softmax(-1).gather(-1, label[:, None]).sum()
            found.append((float(total), bool((logits.argmax(-1) == label).all())))
            if key is not None:
                self.cache_hook.add_partial("loglikelihood", key, found[-1])
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, in disjoint windows of the model's context."""
        found = []
        for request in requests:
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0], add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=self.max_length,
                context_len=1,
            )
            parts = [(None, *make_disjoint_window(window)) for window in windows]
            found.append(sum(value for value, _ in self._loglikelihood_tokens(parts, disable_tqdm=True)))
        return found

    def get_model_info(self) -> dict[str, Any]:
        """Counts of all generations so far, for lm-eval's results."""
        decoder = {"method": self._contender.method, **self._decoder({}).settings()}
        if not self._generations:
            return {"dspec": {"decoder": decoder}}
        totals = counts(self._generations) | {"acceptance": acceptance(self._generations)}
        return {"dspec": {"decoder": decoder, "n": len(self._generations), **totals}}


def installed_tasks(folder: Path) -> Path:
    """Our tasks with the place of lm-eval's own filled in: they include its prompts instead of repeating them."""
    own = str(Path(lm_eval.__file__).parent / "tasks")
    for path in TASKS.glob("*.*"):
        (folder / path.name).write_text(path.read_text("utf-8").replace("LM_EVAL_TASKS", own), encoding="utf-8")
    return folder


def main() -> None:
    """lm-eval's command line with our model and our tasks."""
    from lm_eval.__main__ import cli_evaluate

    with tempfile.TemporaryDirectory() as folder:
        if "--tasks" in sys.argv and "--include_path" not in sys.argv:
            sys.argv += ["--include_path", str(installed_tasks(Path(folder)))]
        try:
            cli_evaluate()
        except UserError as error:
            print(f"error: {error}", file=sys.stderr)
            sys.exit(2)


if __name__ == "__main__":
    main()
