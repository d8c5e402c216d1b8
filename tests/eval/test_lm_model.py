"""The model that lm-eval sees: log-likelihoods against naive forwards, stops, order, batches, seeds."""

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from dspec.errors import UserError

pytest.importorskip("lm_eval")

WINDOW = 24


@pytest.fixture
def lm(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The embedded target in fp64 as lm-eval's model, with a context of 24 tokens where a test asks for it."""
    from eval.lm_model import DspecLM

    return DspecLM(**{"target": "tiny", "target.dtype": "float64", "batch_size": 2})


def request(kind: str, *arguments: Any, task: str = "t") -> Any:
    from lm_eval.api.instance import Instance

    return Instance(request_type=kind, doc={}, arguments=arguments, idx=0, metadata=(task, 0, 1))


def naive(lm: Any, context: list[int], scored: list[int]) -> tuple[float, bool]:
    """One forward of transformers' own model a token, on the last WINDOW tokens before the last one scored."""
    total, greedy = 0.0, True
    whole = [*context, *scored]
    start = max(0, len(whole) - 1 - lm.max_length)
    for i in range(len(context), len(whole)):
        with torch.no_grad():
            law = lm.target.model(torch.tensor([whole[start:i]])).logits[0, -1].double().log_softmax(-1)
        total += float(law[whole[i]])
        greedy &= int(law.argmax()) == whole[i]
    return total, greedy


def test_loglikelihood(lm: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = lm.tokenizer
    story = "Tom has 4 apples and buys 3 more. He eats 2 of them. How many apples are left? "
    ids = tokenizer(story)["input_ids"]
    (written,) = lm.generate_until([request("generate_until", story, {"until": [], "max_gen_toks": 6})])
    assert written
    pairs = [("A fox", " ran away"), ("", "A fox ran away"), ("A fox ", "ran"), (story * 3, "Five."), (story, written)]
    found = lm.loglikelihood([request("loglikelihood", *pair) for pair in pairs])
    expected = []
    for context, continuation in pairs:
        kept = context.rstrip()
        before = tokenizer(kept)["input_ids"] if kept else [lm.prefix_token_id]
        after = tokenizer(context + continuation)["input_ids"][len(before) if kept else 0 :]
        expected.append(naive(lm, before, after))
    assert [greedy for _, greedy in found] == [greedy for _, greedy in expected]
    assert [value for value, _ in found] == pytest.approx([value for value, _ in expected], abs=1e-9)
    passes: list[int] = []
    forward = type(lm.target).forward

    def counted(self: Any, ids_BL: torch.Tensor, **how: Any) -> Any:
        passes.append(len(ids_BL))
        return forward(self, ids_BL, **how)

    monkeypatch.setattr(type(lm.target), "forward", counted)
    assert lm.loglikelihood([request("loglikelihood", *pair) for pair in pairs]) == found
    assert passes == [2, 2, 1]  # batch_size rows a pass
    monkeypatch.setattr(lm.target.model.config, "max_position_embeddings", WINDOW)
    assert len(ids) > WINDOW  # the context is cut on the left
    (cut,) = lm._loglikelihood_tokens([(None, ids, ids[:5])])
    assert cut == pytest.approx(naive(lm, ids, ids[:5]), abs=1e-9)
    assert abs(cut[0] - naive(lm, ids[1:][-WINDOW + 5 :], ids[:5])[0]) > 1e-6  # one token less of context is seen
    with pytest.raises(UserError, match="do not fit"):
        lm._loglikelihood_tokens([(None, ids[:1], ids[: WINDOW + 1])])


def test_an_any_subset_decoder_scores_by_its_joint_density(
    toys: SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    from eval.lm_model import DspecLM

    lm = DspecLM(**{"target": "tiny", "target.dtype": "float64", "decoder": "any_subset"})
    ids = lm.tokenizer("Tom has 4 apples and buys 3 more. He has 7 apples.")["input_ids"]
    assert len(ids) < WINDOW

    def joint(context: list[int], tokens: list[int]) -> float:
        length = len(context) + len(tokens)
        return float(toys.joint_log_density(lm.target, [*context, *tokens], range(length), len(context)).sum())

    ((value, _),) = lm._loglikelihood_tokens([(None, ids[:10], ids[10:])])
    assert value == pytest.approx(joint(ids[:10], ids[10:]), abs=1e-9)
    assert abs(value - naive(lm, ids[:10], ids[10:])[0]) > 1e-3
    monkeypatch.setattr(lm.target.model.config, "max_position_embeddings", WINDOW)
    ((value, _),) = lm._loglikelihood_tokens([(None, ids * 2, ids[:5])])
    assert value == pytest.approx(joint((ids * 2)[-WINDOW + 5 :], ids[:5]), abs=1e-9)
    with pytest.raises(UserError, match="do not fit"):
        lm._loglikelihood_tokens([(None, ids[:1], (ids * 2)[:WINDOW])])
    long = lm.tokenizer.decode(ids * 3)
    ((total),) = lm.loglikelihood_rolling([request("loglikelihood_rolling", long)])
    assert total < 0


def test_is_greedy(lm: Any) -> None:
    prompt = lm.tokenizer("Once upon a time")["input_ids"]
    lm.generate_until([request("generate_until", "Once upon a time", {"until": [], "max_gen_toks": 5})])
    best = lm._generations["t"][0].tokens
    ((value, greedy),) = lm._loglikelihood_tokens([(None, prompt, best)])
    assert greedy
    for i in range(len(best)):  # one token off anywhere
        other = [*best[:i], (best[i] + 1) % lm.target.vocab_size, *best[i + 1 :]]
        ((worse, greedy),) = lm._loglikelihood_tokens([(None, prompt, other)])
        assert not greedy
        assert worse != value


@pytest.mark.parametrize("tokens", [1, WINDOW - 1, WINDOW, WINDOW + 1, 2 * WINDOW, 2 * WINDOW + 7])
def test_loglikelihood_rolling(lm: Any, monkeypatch: pytest.MonkeyPatch, tokens: int) -> None:
    """Every token is scored once; a window holds WINDOW inputs, the last one reaches back as far as it can."""
    monkeypatch.setattr(lm.target.model.config, "max_position_embeddings", WINDOW)
    text = "The lion and the mouse were walking by the river when a hunter came, and the mouse ran into the grass. " * 4
    ids = lm.tokenizer(text)["input_ids"][:tokens]
    text = lm.tokenizer.decode(ids)
    assert lm.tok_encode(text, add_special_tokens=False) == ids
    expected = 0.0
    for i in range(tokens):
        end = min((i // WINDOW + 1) * WINDOW, tokens)
        context = [lm.prefix_token_id, *ids[:i]] if i < WINDOW else ids[end - WINDOW - 1 : i]
        expected += naive(lm, context, [ids[i]])[0]
    ((found),) = lm.loglikelihood_rolling([request("loglikelihood_rolling", text)])
    assert found == pytest.approx(expected, abs=1e-8)


def test_stop_strings_cut_text_and_tokens_alike(lm: Any) -> None:
    prompts = ["Tom has 4 apples and buys 3 more. How many has he?", "Write a function that adds two numbers."]
    free = lm.generate_until([request("generate_until", p, {"until": [], "max_gen_toks": 40}) for p in prompts])
    lm._generations.clear()
    for prompt, text in zip(prompts, free, strict=True):
        stop = text[len(text) // 2 :][:4]
        until = ["never in it", stop]
        (cut,) = lm.generate_until([request("generate_until", prompt, {"until": until, "max_gen_toks": 40})])
        assert cut == text[: text.index(stop)]
        (generation,) = lm._generations.pop("t")
        assert stop in lm.tokenizer.decode(generation.tokens)
        assert stop not in lm.tokenizer.decode(generation.tokens[:-1])
        assert generation.stopped


def test_order_batches_and_settings(lm: Any) -> None:
    """Answers come in the order asked whatever the batches; each request has its own budget and stop strings."""
    asked = [
        request("generate_until", "The fox said: " * n, {"until": until, "max_gen_toks": budget}, task=task)
        for n, until, budget, task in [
            (3, [], 6, "a"),
            (1, ["e"], 9, "b"),
            (2, [], 6, "a"),
            (1, [], 6, "b"),
            (4, "o", 9, "b"),
        ]
    ]
    together = lm.generate_until(asked)
    assert {task: len(done) for task, done in lm._generations.items()} == {"a": 2, "b": 3}
    assert together == [text for one in asked for text in lm.generate_until([one])]
    assert len(set(together)) > 2


def test_long_prompts_lose_their_beginning(
    lm: Any, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """As lm-eval has it: the answer's budget stays whole."""
    monkeypatch.setattr(lm.target.model.config, "max_position_embeddings", WINDOW)
    text = "The lion and the mouse were walking by the river when a hunter came, and the mouse ran into the grass."
    how = {"until": [], "max_gen_toks": 4}
    end = lm.tokenizer.decode(lm.tokenizer(text)["input_ids"][-(WINDOW - 4) :])
    assert lm.tok_encode(end) == lm.tok_encode(text)[-(WINDOW - 4) :]
    assert lm.generate_until([request("generate_until", end, how)]) != [""]
    assert not caplog.records
    lm.generate_until([request("generate_until", text, how)])
    first, second = lm._generations["t"]
    assert (first.tokens, len(caplog.records)) == (second.tokens, 1)
    with pytest.raises(UserError, match="leaves no room"):
        lm.generate_until([request("generate_until", text, how | {"max_gen_toks": WINDOW})])


def test_a_text_without_context_follows_the_bos_token(lm: Any) -> None:
    assert lm.prefix_token_id == lm.tokenizer.eos_token_id  # the embedded target has no other
    lm.tokenizer.bos_token = lm.tokenizer.convert_ids_to_tokens(9)
    assert lm.prefix_token_id == 9


def test_no_continuation_follows_the_end_of_a_document(lm: Any, toys: SimpleNamespace) -> None:
    """XLNet's tokenizer puts <sep><cls> after every text."""
    lm.tokenizer = toys.xlnet_tokenizer()
    assert lm.tokenizer.convert_ids_to_tokens(lm.tok_encode("Tom has more")) == ["▁Tom", "▁has", "▁more"]


def test_repeated_samples_differ_and_seeds_repeat(lm: Any) -> None:
    how = {"until": [], "max_gen_toks": 12, "do_sample": True, "temperature": 1.0}
    asked = [request("generate_until", "Once upon a time", how)] * 3  # lm-eval repeats the very request
    first = lm.generate_until(asked)
    assert len(set(first)) == 3
    assert lm.generate_until(asked) == first
    lm.seed += 1
    assert lm.generate_until(asked) != first
