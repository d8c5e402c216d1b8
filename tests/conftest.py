"""Toys shared by the property tests: tiny targets and drafters of every kind, and proposers whose quality is chosen.

Everything is float64 and seeded. At the end, the main job on a small scale. `toys` is this module's namespace as a
fixture, since test folders import nothing from each other (pytest runs with --import-mode=importlib).
"""

import json
import os
import random
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Qwen2Config,
    Qwen3Config,
    XLNetConfig,
    XLNetLMHeadModel,
    XLNetTokenizer,
)

from dspec.decoding.any_subset.decoder import AnySubset, AnySubsetConfig
from dspec.decoding.any_subset.queries import RowQuery, check_positions, query_logits
from dspec.decoding.autoregressive import Autoregressive
from dspec.decoding.generation import Generation, Request, make_requests
from dspec.decoding.jacobi import Jacobi
from dspec.decoding.jacobi_state import JacobiConfig
from dspec.decoding.loop import Decoder, decode
from dspec.decoding.proposers import Proposal
from dspec.decoding.sampling import GREEDY, Sampling, SamplingBatch, Streams
from dspec.decoding.speculative import Speculative
from dspec.decoding.state import PerRow, Row, State
from dspec.decoding.verification import ConfidenceThreshold, VerificationPolicy, VerifyAll
from dspec.errors import UserError
from dspec.models.cache import PositionCache
from dspec.models.draft import Draft, build_draft
from dspec.models.language_model import LanguageModel
from dspec.models.target_model import TargetModel
from dspec.models.temperatures import Calibration
from dspec.models.xlnet import XLNet
from eval import decoders

FAMILIES = ("llama", "qwen2", "qwen3")
HEADS = (None, "vanilla", "gated", "rnn")
CONFIGS = {"llama": LlamaConfig, "qwen2": Qwen2Config, "qwen3": Qwen3Config}


ALLOWED_SKIPS = ("no CUDA", "no Landlock", "no browser", "no DSPEC_DATA", "no /proc")
REAL_DATA = Path(os.environ.get("DSPEC_DATA") or Path(__file__).resolve().parents[2] / "shared" / "data")


def pytest_sessionfinish(session: pytest.Session) -> None:
    """In CI a skip is a failure unless its reason is on the list."""
    reporter = session.config.pluginmanager.get_plugin("terminalreporter")
    if not os.environ.get("DSPEC_CI") or reporter is None:
        return
    reasons = [str(report.longrepr[2]).removeprefix("Skipped: ") for report in reporter.stats.get("skipped", [])]
    if odd := sorted({reason for reason in reasons if not reason.startswith(ALLOWED_SKIPS)}):
        print(f"\nskipped for reasons that CI does not accept: {odd}")
        session.exitstatus = pytest.ExitCode.TESTS_FAILED


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)


def randomise(module: nn.Module, *, seed: int, scale: float) -> None:
    """Every weight normal with deviation `scale`, biases included; norm weights around 1."""
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, p in sorted(module.named_parameters()):
            noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
            p.copy_(1 + 0.2 * noise if name.endswith("norm.weight") else scale * noise)


def target(
    family: str = "qwen3",
    *,
    seed: int = 0,
    vocab: int = 11,
    layers: int = 3,
    hidden: int = 16,
    scale: float = 0.5,
    dtype: torch.dtype = torch.float64,
    positions: int = 128,
    tie: bool = False,
) -> LanguageModel:
    """A random target with grouped-query attention; its last token id is the mask token."""
    geometry: dict[str, Any] = {
        "vocab_size": vocab,
        "hidden_size": hidden,
        "intermediate_size": hidden + 8,
        "num_hidden_layers": layers,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "max_position_embeddings": positions,
        "tie_word_embeddings": tie,
    }
    if family == "qwen3":
        geometry["head_dim"] = hidden // 2
    model = AutoModelForCausalLM.from_config(CONFIGS[family](**geometry)).to(dtype)
    randomise(model, seed=seed, scale=scale)
    return LanguageModel(model, None, name=f"tiny-{family}", mask_token_id=vocab - 1)


def xlnet(
    *,
    seed: int = 0,
    vocab: int = 11,
    layers: int = 3,
    hidden: int = 16,
    scale: float = 0.5,
    dtype: torch.dtype = torch.float64,
) -> XLNet:
    """A random XLNet, whose queries come from one vector, so attention must be loud for their tokens to differ; its
    last token id is the mask token."""
    config = XLNetConfig(vocab_size=vocab, d_model=hidden, n_layer=layers, n_head=2, d_inner=hidden + 8)
    model = XLNetLMHeadModel(config).to(dtype)
    randomise(model, seed=seed, scale=scale)
    with torch.no_grad():
        for name, p in model.named_parameters():
            if name.endswith(("rel_attn.o", "rel_attn.q", "rel_attn.r")):
                p.mul_(4)
            elif "bias" in name or "mask_emb" in name:
                p.mul_(0.3)
    return exact_positions(XLNet(model, None, name="tiny-xlnet", mask_token_id=vocab - 1))


def xlnet_tokenizer() -> XLNetTokenizer:
    """Some words and letters. It puts <sep><cls> after a text, as the pretrained one does."""
    special = ["<unk>", "<s>", "</s>", "<cls>", "<sep>", "<pad>", "<mask>", "<eod>", "<eop>"]
    words = "Tom has pens and more How many".split()
    letters = "abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789.,:?"
    scored = [(token, 0.0) for token in special] + [(f"▁{word}", -3.0) for word in words]
    return XLNetTokenizer(vocab=[*scored, ("▁", -6.0), *((letter, -8.0) for letter in letters)])


def draft(
    of: LanguageModel,
    *,
    seed: int = 0,
    block: int = 4,
    layout: str = "anchor_first",
    head: str | None = None,
    rank: int = 4,
    confidence: bool = False,
    with_markov: bool | None = None,
    taps: Sequence[int] = (0, 2),
    layers: int = 2,
    scale: float = 0.5,
) -> Draft:
    """A random drafter; the confidence head reads the Markov feature where there is one, unless told otherwise."""
    made = build_draft(
        target=of,
        num_layers=layers,
        intermediate_size=None,
        block_size=block,
        layout=layout,
        num_taps=len(taps),
        target_layer_ids=taps,
        markov_head_type=head,
        markov_rank=rank,
        confidence_head=confidence,
        confidence_head_with_markov=confidence and (head is not None if with_markov is None else with_markov),
    )
    frozen = {id(p) for p in of.model.parameters()}
    generator = torch.Generator().manual_seed(1000 + seed)
    made = made.to(of.dtype)
    with torch.no_grad():
        for name, p in sorted(made.named_parameters()):
            if id(p) not in frozen:
                noise = torch.randn(p.shape, generator=generator, dtype=torch.float64)
                p.copy_(1 + 0.2 * noise if name.endswith("norm.weight") else scale * noise)
    return made.eval()


def markov_pair(*, noise: float, seed: int = 0, vocab: int = 24, block: int = 4, never: bool = False) -> tuple:
    """A target that is a bigram up to `noise`, and a drafter whose vanilla head is that bigram (or its opposite).

    With noise 0 the drafter always agrees; `never` makes it draft the target's least likely token.
    """
    of = target("qwen3", seed=seed, vocab=vocab, hidden=24, layers=3, scale=0.5)
    made = draft(of, seed=seed, block=block, head="vanilla", rank=24)
    with torch.no_grad():
        of.embed_tokens.weight[of.mask_token_id] = 0
        made.markov_head.markov_w1.weight.copy_(nn.functional.rms_norm(of.embed_tokens.weight, (24,)))
        made.markov_head.markov_w2.weight.copy_(of.lm_head.weight * (-9 if never else 1))
        for model, factor in ((of.model, noise), (made.layers, 0.0)):
            for name, p in model.named_parameters():
                if "o_proj" in name or "down_proj" in name:
                    p.mul_(factor)
        for norm in (of.model.get_decoder().norm, made.norm):
            norm.weight.fill_(1.0)
    return of, made


def cycle_target(*, vocab: int = 32) -> LanguageModel:
    """Greedily steps x -> x + 1 (mod vocab) whatever the context, so that all tokens of a text differ."""
    of = target("llama", vocab=vocab, hidden=vocab, layers=2, positions=256)
    with torch.no_grad():
        for name, p in of.model.named_parameters():
            if "o_proj" in name or "down_proj" in name:
                p.zero_()
        of.embed_tokens.weight.copy_(torch.eye(vocab))
        of.lm_head.weight.copy_(torch.eye(vocab).roll(1, 0))
        of.model.get_decoder().norm.weight.fill_(1.0)
    return of


def prompts(rng: random.Random, batch: int, *, vocab: int, longest: int = 9) -> list[list[int]]:
    """Ragged random prompts without the mask token."""
    return [[rng.randrange(vocab - 1) for _ in range(rng.randint(1, longest))] for _ in range(batch)]


class Bound:
    """A decoder, and the sampling of all requests that are put to it."""

    def __init__(self, decoder: Decoder, sampling: Sampling) -> None:
        self.decoder, self.sampling = decoder, sampling

    def decode(
        self,
        prompts: Sequence[Sequence[int]],
        *,
        seeds: Sequence[int],
        in_flight: int | None = None,
        observe: Callable[[State], None] | None = None,
        **common: Any,
    ) -> list[Generation]:
        requests = make_requests(prompts, seeds=seeds, sampling=self.sampling, **common)
        return decode(self.decoder, requests, in_flight=in_flight, observe=observe)

    def settings(self) -> dict[str, Any]:
        return self.decoder.settings(self.sampling)


def autoregressive(*, target: LanguageModel, sampling: Sampling) -> Bound:
    return Bound(Autoregressive(target=target), sampling)


def speculative(
    *,
    target: LanguageModel,
    proposer: Any,
    sampling: Sampling,
    confidence_threshold: float = 0.0,
    calibration: Calibration | None = None,
    record_confidence: bool = False,
) -> Bound:
    policy: VerificationPolicy = VerifyAll()
    if confidence_threshold:
        policy = ConfidenceThreshold(confidence_threshold, calibration=calibration)
    decoder = Speculative(target=target, proposer=proposer, policy=policy, record_confidence=record_confidence)
    return Bound(decoder, sampling)


def jacobi(*, target: LanguageModel, sampling: Sampling, config: JacobiConfig) -> Bound:
    return Bound(Jacobi(target=target, config=config), sampling)


def any_subset(
    *, target: LanguageModel, num_drafts: int, drafted_by: str = "model", bonus: bool = False, tolerance: float = 0.0
) -> AnySubset:
    config = AnySubsetConfig(num_drafts=num_drafts, drafted_by=drafted_by, bonus=bonus, tolerance=tolerance)
    return AnySubset(target=target, config=config)


@torch.inference_mode()
def joint_log_density(model: TargetModel, ids: Sequence[int], positions: Sequence[int], prompt_length: int) -> Tensor:
    """Log probability of each token after the prompt given the tokens at all places before it, in one pass (eq. 6):
    [len(ids) - prompt_length]. `ids` and `positions` are by place. Raises UserError as
    decoding does."""
    if not 1 <= prompt_length < len(ids):
        raise UserError(
            f"a prompt of {prompt_length} among {len(ids)} tokens: at least one must be visible, one scored"
        )
    check_positions(model, 0, ids[:prompt_length], len(ids) - prompt_length, positions)
    scored = range(prompt_length, len(ids))
    tokens = ids[:-1]  # no query depends on the last token
    row = RowQuery(tokens=tokens, start=0, prompt=prompt_length, positions=positions, queried=scored, limits=scored)
    wide = torch.promote_types(model.dtype, torch.float32)
    log_probs_QV = query_logits(model, [row])[0].to(wide).log_softmax(-1)
    return log_probs_QV[torch.arange(len(scored)), torch.tensor(list(ids[prompt_length:]))]


def infilling(
    rng: random.Random, count: int, *, vocab: int, longest: int = 12, samplings: Sequence[Sampling], **common: Any
) -> list[Request]:
    """Requests that show some tokens of a text, in order or not, and ask for the others; some texts have gaps."""
    made = []
    for _ in range(count):
        length = rng.randint(2, longest)
        places = sorted(rng.sample(range(length + rng.choice([0, 0, 5])), length))
        shown = rng.sample(places, rng.randint(1, length - 1))
        holes = [place for place in places if place not in shown]
        made.append(
            Request(
                ids=[rng.randrange(vocab - 1) for _ in shown],
                positions=[*shown, *holes],
                max_new_tokens=len(holes),
                sampling=rng.choice(samplings),
                seed=rng.randrange(1000),
                **{"stop_ids": ()} | common,
            )
        )
    return made


def conditional(
    model: TargetModel, tokens: Sequence[int], positions: Sequence[int], *, prompt: int, place: int
) -> Tensor:
    """Logits of an any-subset model for `place` given all of `tokens`, which are in order of generation: one query and
    no cache. Of a causal LM by a mask written out, of an XLNet by transformers' own pass over the whole text."""
    n, mask_token = len(tokens), torch.tensor([model.mask_token_id])
    if isinstance(model, XLNet):
        logits = two_stream_logits(model, tokens, positions, prompt=prompt, at=positions[place])
        return logits.index_fill(-1, mask_token, -torch.inf)
    sees = torch.tensor([[k < max(prompt, q + 1) for k in range(n + 1)] for q in range(n + 1)])
    at = torch.tensor([[*positions[:n], positions[place]]])
    hidden = model(
        torch.tensor([[*tokens, model.mask_token_id]]), positions_BL=at, mask=lambda b, h, q, kv: sees[q, kv]
    ).hidden_BLD
    return model.logits(hidden[0, -1]).index_fill(-1, mask_token, -torch.inf)


def two_stream_logits(of: XLNet, tokens: Sequence[int], positions: Sequence[int], *, prompt: int, at: int) -> Tensor:
    """XLNetLMHeadModel's logits for position `at`, by perm_mask and target_mapping."""
    length, n = max(*positions, at) + 1, len(tokens)
    ids = torch.tensor([position % of.vocab_size for position in range(length)])  # what stands in holes must not matter
    ids[list(positions[:n])] = torch.tensor(list(tokens))
    rank = torch.full(
        (length,), n
    )  # the prompt's tokens are 0, then in order of generation; holes see all known tokens
    rank[list(positions[:n])] = (torch.arange(n) - prompt + 1).clamp(min=0)
    forbidden = (rank[None] >= rank[:, None]) & ((rank[None] > 0) | (rank[:, None] > 0))
    target = torch.nn.functional.one_hot(torch.tensor([[at]]), length)
    return of.model(ids[None], perm_mask=forbidden[None].to(of.dtype), target_mapping=target.to(of.dtype)).logits[0, 0]


def exact_positions(of: XLNet) -> XLNet:
    """Lets transformers' own pass compute its position encodings in double: it rounds them to float32."""

    def encoding(qlen: int, klen: int, bsz: int | None = None, device: Any = None) -> Tensor:
        frequency = 10000 ** -(torch.arange(0, of.hidden_size, 2, dtype=torch.float64) / of.hidden_size)
        angle = torch.arange(klen, -qlen, -1.0, dtype=torch.float64)[:, None] * frequency
        return torch.cat([angle.sin(), angle.cos()], -1)[:, None].expand(-1, bsz or 1, -1)

    of.model.transformer.relative_positional_encoding = encoding
    return of


def joined(decoder: Any, requests: Sequence[Request], steps: int) -> list[Row]:
    """The rows of the third and first of three requests, as an engine decodes them: the third joins after `steps`
    steps, the second is then cancelled."""
    first, second, third = requests
    state = decoder.start([first, second])
    for _ in range(steps):
        decoder.step(state)
    state.join(decoder.start([third]))
    state.select([2, 0])
    rows = list(state.rows)
    while any(not row.done for row in rows):
        decoder.step(state)
    return rows


def finished(asked: Sequence[Request], generations: Sequence[Generation]) -> State:
    """What a decoder's `start` gives back whose answers are done with it."""
    rows = [Row(r, [*r.ids, *g.tokens], replace(g, stopped=True)) for r, g in zip(asked, generations, strict=True)]
    return State(rows, PositionCache(0), Streams([r.seed for r in asked], torch.device("cpu")))


class Remembering:
    """A proposer together with what it remembers of one batch."""

    def __init__(self, proposer: Any) -> None:
        self.proposer, self.num_drafts, self.tap_ids = proposer, proposer.num_drafts, proposer.tap_ids

    def begin(self, features_BLF: Tensor) -> None:
        self.memory = self.proposer.start(features_BLF)

    def propose(self, text_B: Sequence[Sequence[int]], *, sampling: Sampling, **how: Any) -> Proposal:
        return self.proposer.propose(self.memory, text_B, samplings=SamplingBatch([sampling] * len(text_B)), **how)

    def extend(self, features_BLF: Tensor, start_B: Sequence[int]) -> None:
        self.proposer.extend(self.memory, features_BLF, start_B)

    def select(self, rows: Sequence[int]) -> None:
        self.memory.select(rows)


def ar(of: LanguageModel, texts: Sequence[Sequence[int]], new: int) -> list[list[int]]:
    result = autoregressive(target=of, sampling=GREEDY).decode(
        texts, max_new_tokens=new, stop_ids=(), seeds=[0] * len(texts)
    )
    return [g.tokens for g in result]


def cut(tokens: Sequence[int], stops: Sequence[int], limit: int) -> list[int]:
    """Tokens up to and including the first stop, at most `limit`."""
    at = [i for i, token in enumerate(tokens) if token in stops]
    return list(tokens[: min([limit, *(i + 1 for i in at)])])


class OracleProposer:
    """Knows each text's continuation and gets each draft token right with probability `accuracy`.

    Checks what a decoder tells it: history must be a prefix of a known text, features must be the target's.
    """

    tap_ids: tuple[int, ...] = (0, 2)
    max_positions: int | None = None

    def __init__(
        self,
        of: LanguageModel,
        texts: Sequence[Sequence[int]],
        *,
        drafts: int,
        accuracy: float,
        seed: int,
        ragged: bool = False,
    ) -> None:
        self.num_drafts, self.accuracy, self.ragged = drafts, accuracy, ragged
        self.texts, self.vocab, self.rng = [list(t) for t in texts], of.vocab_size, random.Random(seed)
        self.truth = [of(torch.tensor([t]), taps=self.tap_ids).features_BLF[0] for t in self.texts]
        self.started = 0

    def start(self, features_BLF: Tensor) -> PerRow[tuple[int, dict[int, Tensor]]]:
        """Each row's text by number, and the features it was told."""
        memory = PerRow((self.started + i, {}) for i in range(len(features_BLF)))
        self.started += len(features_BLF)
        self.extend(memory, features_BLF, [0] * len(memory))
        return memory

    def extend(self, memory: PerRow, features_BLF: Tensor, start_B: Sequence[int]) -> None:
        for (_, seen), features, start in zip(memory, features_BLF, start_B, strict=True):
            seen.update({start + i: f.clone() for i, f in enumerate(features)})

    def settings(self) -> dict[str, Any]:
        return {}

    def _check(self, row: int, told: dict[int, Tensor], history: Sequence[int]) -> None:
        assert list(history) == self.texts[row][: len(history)]
        seen = torch.stack([told[i] for i in range(len(history) - 1)])
        torch.testing.assert_close(seen, self.truth[row][: len(history) - 1], rtol=0, atol=1e-10)

    def propose(
        self,
        memory: PerRow,
        text_B: Sequence[Sequence[int]],
        *,
        samplings: SamplingBatch,
        uniform_BJ: Tensor | None,
        confidence: bool,
    ) -> Proposal:
        J, tokens, counts = self.num_drafts, [], []
        for (row, told), text in zip(memory, text_B, strict=True):
            self._check(row, told, text)
            known = (self.texts[row][len(text) :] + [0] * J)[:J]
            drafts = [t if self.rng.random() < self.accuracy else (t + 1) % self.vocab for t in known]
            tokens.append(drafts)
            counts.append(self.rng.randint(0, J) if self.ragged else J)
        return Proposal(torch.tensor(tokens).view(len(text_B), J), torch.tensor(counts))


def build_decoder(kind: str, *, target: Any, draft: Draft | None = None, **settings: Any) -> Any:
    """What a config's `decoder.<kind>` with these keys builds."""
    spec = getattr(decoders, kind)(label=kind, weights="trained", base=lambda: target, **settings)
    return spec.build(target=target, draft=draft)


@pytest.fixture
def real_data(monkeypatch: pytest.MonkeyPatch) -> Path:
    """$DSPEC_DATA with the benchmarks' files: the variable's, or, where it is unset, a folder beside the clone."""
    if not REAL_DATA.is_dir():
        pytest.skip("no DSPEC_DATA: set it to a folder with the benchmarks' files")
    monkeypatch.setenv("DSPEC_DATA", str(REAL_DATA))
    return REAL_DATA


@pytest.fixture(scope="session")
def toys() -> SimpleNamespace:
    names = (
        "FAMILIES HEADS GREEDY randomise target draft markov_pair cycle_target prompts ar cut OracleProposer "
        "finished joined Remembering Bound autoregressive speculative jacobi any_subset infilling conditional xlnet "
        "xlnet_tokenizer two_stream_logits build_decoder joint_log_density"
    ).split()
    return SimpleNamespace(**{name: globals()[name] for name in names})


SMALL_JOB = [
    "data.source.train={problems: 16, functions: 8, stories: 0}",
    "data.source.calibration={problems: 6, functions: 2}",
    "data.regeneration.max_new_tokens=64",
    "data.validation=4",
    "data.batch_size=4",
    "trainer.max_steps=6",
    "trainer.val_check_interval=3",
    "trainer.log_every_n_steps=1",
    "callbacks.checkpoint.every_n_train_steps=3",
    "calibration.max_new_tokens=48",
    "benchmark.problems.count=2",
    "benchmark.functions.count=2",
    "benchmark.problems.max_new_tokens=64",
    "benchmark.functions.max_new_tokens=64",
    "evaluation.generate_prompts=2",
    "evaluation.generate_floor=0",
    "evaluation.warmup=1",
    "callbacks.progress=null",
]


class SmallJob:
    """`recipe=dspark` in half a minute; one cache for all its runs."""

    def __init__(self, cache: Path) -> None:
        self.cache = cache

    def run(self, out: Path, *args: str, recipe: str = "dspark", without: Sequence[str] = ()) -> Path:
        """Runs the job in this process, without the settings that begin with one of `without`; returns its folder."""
        from dspec.train import main

        settings = [a for a in SMALL_JOB if not a.startswith(tuple(without))] if without else SMALL_JOB

        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("DSPEC_CACHE", str(self.cache))
            patch.setattr(sys, "argv", ["dspec.train", f"recipe={recipe}", *settings, *args, f"hydra.run.dir={out}"])
            main()
        return out

    def start(self, *args: str, launcher: Sequence[str] = (sys.executable,), **popen: Any) -> subprocess.Popen[bytes]:
        """Starts the job in a process of its own, on one thread as in this one."""
        environment = os.environ | {"DSPEC_CACHE": str(self.cache), "OMP_NUM_THREADS": "1"}
        command = [*launcher, "-m", "dspec.train", "recipe=dspark", *SMALL_JOB, *args]
        return subprocess.Popen(command, env=environment, stdout=subprocess.DEVNULL, **popen)

    def kill_when(self, reached: Callable[[], bool], *args: str) -> bool:
        """Starts the job and sends SIGKILL once `reached`; False if it ended before."""
        process = self.start(*args)
        deadline = time.monotonic() + 300
        while process.poll() is None and not reached():
            assert time.monotonic() < deadline
            time.sleep(0.005)
        process.send_signal(signal.SIGKILL)
        return process.wait() == -signal.SIGKILL

    @staticmethod
    def stable(path: Path) -> dict[str, Any]:
        """results.json without what a clock decides and where it lies."""
        results = json.loads((path / "results.json").read_text())
        for row in results["rows"]:
            for name in ("tokens_per_second", "speedup", "speedup_vs_base_ar"):
                del row[name]
            del row["interval_95"]["speedup"]
        del results["run"]["ar_check"], results["run"]["config"]["logger"], results["run"]["config"]["callbacks"]
        return dict(results)


@pytest.fixture(scope="session")
def small_job(tmp_path_factory: pytest.TempPathFactory) -> SmallJob:
    return SmallJob(tmp_path_factory.mktemp("cache"))


@pytest.fixture(scope="session")
def dspark_run(small_job: SmallJob, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return small_job.run(tmp_path_factory.mktemp("runs") / "dspark")
