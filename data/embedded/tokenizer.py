"""The embedded tokenizer: byte-level BPE with single digits and runs of indentation as tokens."""

from collections.abc import Iterable

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

SPECIAL = ("<|pad|>", "<|user|>", "<|assistant|>", "<|end|>", "<|mask|>")
# A newline with its indentation, a word or a run of punctuation with its leading space, one digit, other whitespace.
_PIECES = r"\n *| ?[A-Za-z]+|[0-9]| ?[^\sA-Za-z0-9]+| +|\s+"
_CHAT = (
    "{%- set system = namespace(text='') -%}"
    "{%- for message in messages -%}"
    "{%- if message['role'] == 'system' -%}{%- set system.text = message['content'] + '\n' -%}"
    "{%- elif message['role'] == 'user' -%}"
    "{{- '<|user|>' + system.text + message['content'] + '<|end|>' -}}{%- set system.text = '' -%}"
    "{%- elif message['role'] == 'assistant' -%}"
    "{{- '<|assistant|>' -}}{%- generation -%}{{- message['content'] + '<|end|>' -}}{%- endgeneration -%}"
    "{%- endif -%}"
    "{%- endfor -%}"
    "{%- if add_generation_prompt -%}{{- '<|assistant|>' -}}{%- endif -%}"
)


def build_tokenizer(texts: Iterable[str], *, vocab_size: int) -> PreTrainedTokenizerFast:
    """Trains on `texts`; every byte is in the vocabulary, so any string round-trips."""
    bpe = Tokenizer(models.BPE())
    bpe.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    bpe.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=list(SPECIAL),
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    bpe.train_from_iterator(texts, trainer)
    pad, _, _, end, mask = SPECIAL
    tokenizer = PreTrainedTokenizerFast(
        tokenizer_object=bpe,
        pad_token=pad,
        eos_token=end,
        mask_token=mask,
        extra_special_tokens=list(SPECIAL[1:3]),
        clean_up_tokenization_spaces=False,
        model_max_length=1024,
    )
    tokenizer.chat_template = _CHAT
    return tokenizer
