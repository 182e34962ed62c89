"""Chat templates as models ship them: those that TRL has in its package, and small ones of a form.

Which models call tools, in which form, and that an episode in it is exact to the token.
"""

import json
import re
from importlib.util import find_spec
from pathlib import Path

import pytest
from transformers import AutoTokenizer

from common.config import ConfigError, SamplingConfig
from common.engine import Requests
from common.episodes import Turns, check_template, play
from common.episodes.tool_calls import FORMS, Calls, find_anchor, render_chat
from common.model import Decoder, encode_prompts
from common.sampling import Sampler
from common.task import Conversation
from tests.support.calling import TOOLS
from tests.support.models import small_model

FORM = {
    "qwen2_5": "JSON in <tool_call>",
    "qwen3": "JSON in <tool_call>",
    "qwen3_instruct_2507": "JSON in <tool_call>",
    "qwen3_5_think": "<function=NAME> in <tool_call>",
    "qwen3_5_nothink": "<function=NAME> in <tool_call>",
    "nemotron_3_nano": "<function=NAME> in <tool_call>",
    "glm4moe": "<arg_key> in <tool_call>",
    "llama3_1": "an object with name and parameters",
    "llama3_2": "an object with name and parameters",
    "gptoss": "<|channel|>commentary",
    "gemma4_v5": "<|tool_call>call:NAME",
}
# Templates that show a model no tools, or write no calls.
WITHOUT = ("llama3", "gemma", "gemma3", "phi3", "deepseekv3", "deepseek_r1_distill", "smolvlm")
ENDS = ("<|im_end|>", "<|eot_id|>", "<turn|>", "<|tool_response>", "<|call|>", "<|observation|>")
MARKS = r"<\|?[a-z_]+\|?>|</think>|</tool_call>"


def template(name: str) -> str:
    spec = find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("TRL, whose package has templates of models, is not installed: .[peers]")
    file = Path(spec.origin).parent / "chat_templates" / f"{name}.jinja"
    if not file.is_file():
        pytest.skip(f"this TRL has no {file.name}")
    return file.read_text(encoding="utf-8")


# As Mistral and DeepSeek write calls.
MISTRAL = """{{ bos_token }}{% if tools %}[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]\
{% endif %}{% for m in messages %}{% if m.role == 'user' %}[INST]{{ m.content }}[/INST]\
{% elif m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}\
{"name": {{ c.function.name | tojson }}, "arguments": {{ c.function.arguments | tojson }}, \
"id": {{ c.id | tojson }}}\
{{ ", " if not loop.last }}{% endfor %}]</s>{% elif m.role == 'tool' %}\
{% if m.tool_call_id | length != 9 %}{{ raise_exception('an id has nine characters') }}{% endif %}\
[TOOL_RESULTS]{{ m.content | tojson }}[/TOOL_RESULTS]{% else %}{{ m.content }}</s>{% endif %}\
{% endfor %}"""
DEEPSEEK = """{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}\
{% if m.role == 'user' %}<｜User｜>{{ m.content }}{% elif m.role == 'tool' %}\
<｜tool▁outputs▁begin｜>{{ m.content }}<｜tool▁outputs▁end｜>{% else %}\
<｜Assistant｜>{{ m.content }}\
{% for c in m.tool_calls or [] %}<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>\
{{ c.function.name + '\\n```json\\n' + c.function.arguments + '\\n```' }}<｜tool▁call▁end｜>\
<｜tool▁calls▁end｜>{% endfor %}<｜end▁of▁sentence｜>{% endif %}{% endfor %}\
{% if add_generation_prompt %}<｜Assistant｜>{% endif %}"""
OWN = {
    "[TOOL_CALLS] and a list": (MISTRAL, "</s>"),
    "<｜tool▁call▁begin｜>": (DEEPSEEK, "<｜end▁of▁sentence｜>"),
}


@pytest.fixture
def bare(shared_data):
    """A tokenizer of bytes and words to which a template and its tokens are given."""
    return AutoTokenizer.from_pretrained(shared_data / "smollm2-135m-instruct")


def prepared(tokenizer, text: str, *ends: str):
    """The tokenizer with a template, and the ids of the tokens that end a turn."""
    tokenizer.chat_template = text
    ends = ends or tuple(mark for mark in ENDS if mark in text)
    marks = sorted({*re.findall(MARKS, text), *ends} - {"<|im_start|>", "<|im_end|>"})
    tokenizer.add_special_tokens({"extra_special_tokens": marks})
    return tokenizer, [tokenizer.convert_tokens_to_ids(end) for end in ends]


def check_round_trip(tokenizer, stops: list[int], form: str) -> None:
    """Calls are found in the form, read again as they were written, and answered."""
    check_template(tokenizer, stops, TOOLS)
    calls = Calls.find(tokenizer, TOOLS)
    assert calls.template["fields"]["tool_calls"] is FORMS[form]
    asked = render_chat(tokenizer, [{"role": "user", "content": "?"}], calls.tools)
    for value in (7, "seven {2}"):
        whole = calls.render([calls.message(value=value)])
        answer = whole.removeprefix(asked + find_anchor(tokenizer, calls.tools))
        begun = asked + find_anchor(tokenizer, calls.tools)
        ids, before = (tokenizer(t, add_special_tokens=False)["input_ids"] for t in (answer, begun))
        (call,) = calls.read(ids, before)["tool_calls"]
        assert call["function"]["name"] == "add"
        assert str(call["function"]["arguments"]["x"]) == str(value)
    said = tokenizer("It is 7.", add_special_tokens=False)["input_ids"]
    assert calls.read(said, []) == {}


@pytest.mark.parametrize("name", FORM)
def test_models_that_call_tools_do(name, bare):
    tokenizer, stops = prepared(bare, template(name))
    check_round_trip(tokenizer, stops, FORM[name])


@pytest.mark.parametrize("form", OWN)
def test_templates_that_want_ids_or_texts_of_arguments(form, bare):
    text, end = OWN[form]
    check_round_trip(*prepared(bare, text, end), form)


@pytest.mark.parametrize("name", WITHOUT)
def test_models_that_know_no_tools_are_refused(name, bare):
    tokenizer, _ = prepared(bare, template(name))
    with pytest.raises(ConfigError, match="cannot call tools"):
        Calls.find(tokenizer, TOOLS)


def dictate(model, tokens: list[int]) -> None:
    """Have a model write these tokens, one each time that its output layer is asked."""
    coming = iter(tokens)

    def prefer(_module, _given, logits):
        logits[..., next(coming)] += 1e4
        return logits

    model.get_output_embeddings().register_forward_hook(prefer)


@pytest.mark.parametrize("name", ["qwen2_5", "qwen3", "llama3_1", "gptoss"])
def test_an_episode_of_three_calls_is_exact_to_the_token(name, bare, tmp_path):
    """What the model wrote is never rendered again, replies stand behind it as the template writes
    them, and only the model's tokens are trained.
    """
    from plugins.environments.tests.test_adapters import build_task

    tokenizer, stops = prepared(bare, template(name))
    rows = [{"prompt": "Make it ten.", "a": a} for a in (3, 4)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path, factory = str(tmp_path / "rows.jsonl"), "tests.support.calling:Adder"
    task = build_task(factory, {}, path=path, reply_tokens=300, max_turns=4)
    (example,) = task.examples("train")
    prompt = task.prompt(example)
    assert isinstance(prompt, Conversation)
    calls = Calls.find(tokenizer, task.tools)
    asked, anchor = calls.render([]), find_anchor(tokenizer, task.tools)
    (stop, *_) = [s for s in stops if tokenizer.decode([s]) in calls.render([calls.message()])]

    def ids(text: str) -> list[int]:
        return tokenizer(text, add_special_tokens=False)["input_ids"]

    def ask(number: int):
        message = calls.message()
        message["tool_calls"][0]["function"]["arguments"] = {"number": number}
        return message

    def write(number: int) -> list[int]:
        message = ask(number)
        text = calls.render([message]).removeprefix(asked + anchor)
        return [*ids(text.partition(tokenizer.decode([stop]))[0]), stop]

    written = [write(2), write(4), write(1), [*ids("It is ten."), stop]]
    model = small_model("llama", len(tokenizer))
    model.config.max_position_embeddings = 2048
    dictate(model, [token for text in written for token in text])
    sampler = Sampler(model, pad_id=tokenizer.pad_token_id, stop_ids=(stop,), rows=1)
    turns = Turns.of(task, Decoder(tokenizer, frozenset(stops)), [example])
    prompts = encode_prompts(tokenizer, [prompt])
    most = sum(map(len, written))
    made = play(
        sampler,
        Requests(prompts=prompts, episodes=turns),
        SamplingConfig.uncut(most, 1.0),
    )
    (played,) = made.played
    assert (played.stop, played.reward, played.turns) == ("completed", 1.0, 4)
    tokens, written = made.tokens[0].tolist(), made.written[0].tolist()
    replies = [
        turns.render([{"role": "tool", "name": "add", "content": str(sum_)}], stop)
        for sum_ in (5, 9, 10)
    ]
    expected, own = [], []
    for turn, text in enumerate(written):
        reply = replies[turn] if turn < len(replies) else []
        expected += [*text, *reply]
        own += [True] * len(text) + [False] * len(reply)
    length = int(made.lengths[0])
    assert tokens[:length] == expected
    assert written[:length] == own
    # The conversation that the template renders at once is the same text; Qwen3's leaves out what
    # it puts where the thoughts of a last answer would be.
    sums = {2: 5, 4: 9, 1: 10}
    said = [
        [ask(number), {"role": "tool", "name": "add", "content": str(sum_)}]
        for number, sum_ in sums.items()
    ]
    conversation = [*prompt, *(message for pair in said for message in pair)]
    whole = render_chat(tokenizer, conversation, calls.tools, begin=True)
    played = re.sub(r"<think>\s*</think>\s*", "", tokenizer.decode([*prompts[0], *expected]))
    assert played.startswith(whole)


# --- tags that are special tokens


def test_special_tokens_reach_rewards_as_text(bare):
    tags = ["<think>", "</think>", "<answer>", "</answer>"]
    bare.add_special_tokens({"extra_special_tokens": tags})
    bare.pad_token = "<|endoftext|>"
    ends = frozenset(bare.convert_tokens_to_ids(["<|im_end|>", "<|endoftext|>"]))
    written = "<think>2 + 2</think><answer>4</answer><|im_end|><|endoftext|>"
    (text,) = Decoder(bare, ends)([bare(written)["input_ids"]])
    assert text == "<think>2 + 2</think><answer>4</answer>"


def test_what_ends_a_turn_by_the_template_is_no_text(bare):
    """Also where the model stops at another token, as base models do."""
    model = small_model("llama", len(bare))
    bare.eos_token = "<|endoftext|>"
    (text,) = Decoder.of(model, bare)([bare("4<|im_end|><repo_name>x")["input_ids"]])
    assert text == "4<repo_name>x"


def test_no_row_has_no_text(bare):
    assert Decoder(bare)([]) == []
