"""A target with one of our decoders as a model of lm-evaluation-harness 0.4.13. Its command line is eval/lm_eval.py.

Knows no benchmark: prompts, stops and scores are lm-eval's, or those of the tasks in eval/tasks.
"""

import logging
from collections import Counter, defaultdict
from collections.abc import Sequence
from typing import Any

from lm_eval.api.model import TemplateLM
from lm_eval.api.registry import register_model
from lm_eval.utils import get_rolling_token_windows, make_disjoint_window
from rich.progress import track

from data.chat import PromptPolicy
from dspec.config.compose import composed, instantiate, instantiate_decoders
from dspec.decoding.generation import Generation, make_requests
from dspec.decoding.loop import decode
from dspec.decoding.sampling import Sampling
from dspec.decoding.stopping import StopStrings
from dspec.errors import UserError
from dspec.likelihood import Continuation, log_likelihoods, longest
from dspec.seeding import prompt_seed
from eval.checkpoints import checkpoint_of, fill_in
from eval.decoders import built
from eval.load import load_model
from eval.prompts import plain_ids, raw_ids
from eval.rows import acceptance, counts

log = logging.getLogger(__name__)

# keys of conf/eval.yaml that lm-eval sets by other means
_LM_EVALS_OWN = {"benchmark": "--tasks", "limit": "--limit", "evaluation": "--gen_kwargs"}


@register_model("dspec")
class DspecLM(TemplateLM):
    """A target with one of our decoders, as lm-eval sees a model."""

    def __init__(self, *, batch_size: int | str = 1, device: object = None, **args: Any) -> None:
        """`args` are overrides of conf/eval.yaml. `device` is always lm-eval's default and ignored, since --device is
        rejected (eval/lm_eval.py): the target's config sets the device."""
        super().__init__()
        if wrong := [key for key in args if key.partition(".")[0] in _LM_EVALS_OWN]:
            instead = _LM_EVALS_OWN[wrong[0].partition(".")[0]]
            raise UserError(f"model_args has {wrong[0]}, which lm-eval sets: use {instead} instead")
        if not str(batch_size).isdecimal() or int(batch_size) < 1:
            raise UserError(f"batch_size={batch_size} must be a number of prompts, at least 1")
        decoder = args.pop("decoder", "autoregressive")
        cfg = composed("eval", [f"{key}={value}" for key, value in {"decoder": decoder, **args}.items()])
        fill_in(cfg)
        loaded = load_model(target=cfg.target, checkpoint=checkpoint_of(cfg), layout=cfg.layout)
        self.policy: PromptPolicy = loaded.policy or instantiate(cfg.policy)
        key, self._spec = next(iter(instantiate_decoders(cfg).items()))
        self.target, self.tokenizer, self.seed = loaded.target, loaded.target.tokenizer, int(cfg.seed)
        self.batch_size = int(batch_size)
        self._generations: dict[str, list[Generation]] = defaultdict(list)  # by task
        self._decoder = built(key, self._spec, target=self.target, draft=loaded.draft)

    @property
    def eot_token_id(self) -> int:
        return int(self.tokenizer.eos_token_id)

    @property
    def prefix_token_id(self) -> int:
        """The token before a text without context; the same as in lm-eval's Hugging Face model class."""
        bos = self.tokenizer.bos_token_id
        return self.eot_token_id if bos is None else int(bos)

    @property
    def max_length(self) -> int:
        return self.target.max_positions

    @property
    def tokenizer_name(self) -> str:
        return self.target.name

    def tok_encode(self, string: str, add_special_tokens: bool | None = None, **kwargs: Any) -> list[int]:
        """A chat template has already added the BOS token: it is not added twice."""
        bos = self.tokenizer.bos_token
        special = not (bos and string.startswith(bos)) if add_special_tokens is None else add_special_tokens
        return (raw_ids if special else plain_ids)(self.tokenizer, string)

    def apply_chat_template(self, chat_history: list[dict[str, str]], add_generation_prompt: bool = True) -> str:
        policy = self.policy
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

    @staticmethod
    def _sampling(wanted: dict[str, Any]) -> Sampling:
        sampled = wanted.get("do_sample", wanted.get("temperature", 0.0) > 0)
        temperature = float(wanted.get("temperature", 1.0)) if sampled else 0.0
        return Sampling(temperature=temperature, top_p=float(wanted.get("top_p", 1.0)))

    def generate_until(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[str]:
        """Answers up to the first stop string, in the order of the requests."""
        answers = [""] * len(requests)
        seeds = self._seeds(requests)
        groups: dict[str, list[int]] = defaultdict(list)
        for i, request in enumerate(requests):
            groups[repr(sorted(request.args[1].items()))].append(i)
        batches = []
        for group in groups.values():
            group.sort(key=lambda i: len(requests[i].args[0]))
            batches += [group[start : start + self.batch_size] for start in range(0, len(group), self.batch_size)]
        for batch in track(batches, "generating", disable=disable_tqdm):
            texts = self._answer([requests[i] for i in batch], [seeds[i] for i in batch])
            for i, text in zip(batch, texts, strict=True):
                answers[i] = text
                self.cache_hook.add_partial("generate_until", requests[i].args, text)
        return answers

    def _seeds(self, requests: Sequence[Any]) -> list[int]:
        """One per request: lm-eval requests k samples of a prompt by repeating the request k times."""
        asked: Counter[str] = Counter()
        seeds = []
        for prompt in (request.args[0] for request in requests):
            seeds.append(prompt_seed(self.seed, f"{prompt}/{asked[prompt]}"))
            asked[prompt] += 1
        return seeds

    def _answer(self, requests: Sequence[Any], seeds: Sequence[int]) -> list[str]:
        wanted = dict(requests[0].args[1])
        until = wanted.get("until") or []
        strings = StopStrings(self.tokenizer, [until] if isinstance(until, str) else until)
        new = int(wanted.get("max_gen_toks", 256))
        room = self.max_length - new
        if room < 1:
            raise UserError(f"max_gen_toks={new} leaves no room for a prompt in {self.max_length} positions")
        prompts = [self.tok_encode(r.args[0]) for r in requests]
        if longest := max((n for p in prompts if (n := len(p)) > room), default=0):
            log.warning("a prompt of %d tokens is cut on the left to %d: the context is full", longest, room)
        asked = make_requests(
            [p[-room:] for p in prompts],
            seeds=seeds,
            sampling=self._sampling(wanted),
            max_new_tokens=new,
            stop_ids=self.target.stop_ids,
            should_stop=strings,
        )
        generations = decode(self._decoder, asked)
        for request, generation in zip(requests, generations, strict=True):
            self._generations[request.task_name].append(generation)
        return [strings.cut(self.tokenizer.decode(g.tokens, skip_special_tokens=True)) for g in generations]

    def _loglikelihood_tokens(
        self, requests: Sequence[tuple[Any, list[int], list[int]]], disable_tqdm: bool = False, **kwargs: Any
    ) -> list[tuple[float, bool]]:
        """By the decoder's distribution: causal, or an any-subset model's joint density."""
        found = [(0.0, False)] * len(requests)
        room, joint = self.max_length, self._spec.infills
        if too_long := max((len(tokens) for *_, tokens in requests if len(tokens) > room - joint), default=0):
            raise UserError(f"{too_long} tokens to score do not fit the {room} positions")
        texts = [
            Continuation(context[len(tokens) - longest(self.target, any_subset=joint) :], tokens)
            for _, context, tokens in requests
        ]
        order = sorted(range(len(texts)), key=lambda i: len(texts[i].context) + len(texts[i].tokens))
        batches = [order[start : start + self.batch_size] for start in range(0, len(order), self.batch_size)]
        for batch in track(batches, "scoring", disable=disable_tqdm):
            scored = log_likelihoods(self.target, [texts[i] for i in batch], any_subset=joint)
            for i, one in zip(batch, scored, strict=True):
                found[i] = (one.total, one.greedy)
                if requests[i][0] is not None:
                    self.cache_hook.add_partial("loglikelihood", requests[i][0], found[i])
        return found

    def loglikelihood_rolling(self, requests: Sequence[Any], disable_tqdm: bool = False) -> list[float]:
        """Log-likelihood of whole texts, in disjoint windows of the model's context."""
        found = []
        for request in requests:
            windows = get_rolling_token_windows(
                token_list=self.tok_encode(request.args[0], add_special_tokens=False),
                prefix_token=self.prefix_token_id,
                max_seq_len=longest(self.target, any_subset=self._spec.infills) - 1,
                context_len=1,
            )
            parts = [(None, *make_disjoint_window(window)) for window in windows]
            found.append(sum(value for value, _ in self._loglikelihood_tokens(parts, disable_tqdm=True)))
        return found

    def get_model_info(self) -> dict[str, Any]:
        """Counts of all generations so far, task by task, for lm-eval's results."""
        decoder = {"method": self._spec.label, **self._decoder.settings(self._sampling({}))}
        tasks = {
            task: {"n": len(done), **counts(done), "acceptance": acceptance(done)}
            for task, done in self._generations.items()
        }
        return {"dspec": {"target": self.target.name, "decoder": decoder, "tasks": tasks}}
