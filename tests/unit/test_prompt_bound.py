"""Many prompts: a bound in place of an encoding, and the same examples as if all were encoded."""

import random
from types import SimpleNamespace
from typing import Any

import pytest
from tokenizers import Tokenizer, decoders, models, normalizers, pre_tokenizers
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast

from common import examples
from common.examples import fit_prompts
from common.model.prompts import PromptBound, encode_prompts
from common.model.tiny import byte_tokenizer
from common.task import Example

TEXTS = (
    "plain words",
    "  two  spaces  ",
    "\ufdfa\u3392\ufb03",  # NFKC makes 18, 3 and 3 characters of one
    "\U0001d160\u1e9b\u0323",  # NFC makes three of one, or one of two
    "中文 한국어 é",
    "\N{GRINNING FACE}" * 9,
    "x",
    " ",
)
TEMPLATE = (
    "{% for m in messages %}<{{ m.role }}>{{ m.content }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<assistant>{% endif %}"
)
ODD = "{% for m in messages %}{{ m.content }}{{ m.content }}{% endfor %}"  # twice the texts


def make_tokenizer(normalizer: Any, template: str | None) -> PreTrainedTokenizerFast:
    """Bytes, behind a normalizer."""
    letters = sorted(pre_tokenizers.ByteLevel.alphabet())
    bare = Tokenizer(models.BPE({letter: i for i, letter in enumerate(letters)}, []))
    bare.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    bare.decoder = decoders.ByteLevel()
    if normalizer is not None:
        bare.normalizer = normalizer
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=bare)
    tokenizer.chat_template = template
    return tokenizer


NORMALIZERS = {
    "none": None,
    "NFC": normalizers.NFC(),
    "NFKC": normalizers.NFKC(),
    "sentences": normalizers.Sequence([normalizers.NFC(), normalizers.Replace(" ", "\u2581")]),
}


@pytest.mark.parametrize("template", [None, TEMPLATE, ODD])
@pytest.mark.parametrize("name", NORMALIZERS)
def test_no_prompt_is_longer_than_its_bound(name, template):
    tokenizer = make_tokenizer(NORMALIZERS[name], template)
    bound, draw = PromptBound(tokenizer), random.Random(0)
    for _ in range(300):
        texts = ["".join(draw.choices(TEXTS, k=draw.randint(1, 4))) for _ in range(3)]
        roles = draw.choice([["user"], ["system", "user"], ["user", "assistant", "user"]])
        turns = [{"role": r, "content": t} for r, t in zip(roles, texts, strict=False)]
        for prompt in (texts[0], turns):
            [ids] = encode_prompts(tokenizer, [prompt])
            assert len(ids) <= bound(prompt), (texts, roles)


def test_the_bound_of_plain_text_is_close():
    bound = PromptBound(make_tokenizer(None, TEMPLATE))
    assert bound("twelve bytes") == 12
    assert bound([{"role": "user", "content": "ab"}]) == len("<user>ab</s><assistant>")


def subject(context: int) -> tuple[Any, Any]:
    config = LlamaConfig(
        vocab_size=300, hidden_size=8, intermediate_size=8, num_hidden_layers=1,
        num_attention_heads=1, max_position_embeddings=context,
    )  # fmt: skip
    run = SimpleNamespace(
        algo=SimpleNamespace(sampling=SimpleNamespace(max_new_tokens=4)),
        prompts=SimpleNamespace(too_long="skip"),
    )
    lm = SimpleNamespace(
        model=LlamaForCausalLM(config),
        tokenizer=byte_tokenizer(),
        context=SimpleNamespace(main=False),
    )
    return run, lm


@pytest.mark.parametrize("limit", [20, 50, 900])
def test_of_many_prompts_the_same_are_kept(limit, monkeypatch):
    """limit: of the longest sequence; some or all of the prompts fit."""
    draw, (run, lm) = random.Random(limit), subject(limit + 40)
    opening = "the same instructions for each one: "
    rows = [
        Example(
            id=i, question=opening + "".join(draw.choices(TEXTS, k=draw.randint(1, 3))), answer=""
        )
        for i in range(500)
    ]
    splits = {"train": rows, "test": rows[:7]}
    whole = fit_prompts(run, lm, lambda one: one.question, splits)
    encoded = []
    monkeypatch.setattr(examples, "MANY", 100)
    monkeypatch.setattr(examples, "SAMPLED", 5)
    real = examples.encode_prompts
    monkeypatch.setattr(
        examples, "encode_prompts", lambda t, given, ids: encoded.extend(ids) or real(t, given, ids)
    )
    some = fit_prompts(run, lm, lambda one: one.question, splits)
    assert some.splits == whole.splits
    assert some.skipped == whole.skipped
    measured, wanted = map(examples.measure_prompts, (some.prompts, whole.prompts))
    assert measured["opening"] == wanted["opening"]
    assert measured["longest_prompt"] <= wanted["longest_prompt"]
    if not whole.skipped:
        assert measured == wanted
        assert len(encoded) < 100
