"""SFT runs: what is learnt from, resume, ranks, and the settings that are refused."""

import json
import random
import signal
import time

import pytest
import torch

from common.device import hardware
from common.distributed import Context
from common.episodes import Transcriber
from common.model import Decoder, byte_tokenizer
from launch import compose, train
from sft.train import prepare
from tests.support import CONF, SMALL_SFT, events
from tests.support.calling import CALL, CHAT, TOOLS, write_caller
from tests.support.models import weights
from tests.support.refusals import refuses

ROWS = ["task=custom", "task.prompt_field=question", "task.answer_field=answer"]


def write(folder, rows, name="rows.jsonl"):
    (folder / name).write_text("\n".join(json.dumps(row) for row in rows))
    return f"task.path={folder / name}"


def some_rows(count=20, **more):
    return [{"question": f"{n}?", "answer": f"{n}!"} | more for n in range(count)]


def read(folder, *overrides):
    """The rows of a run, each as (prompt, answer, answer with the parts that carry loss in
    brackets).
    """
    tiny = "model=hf" not in overrides
    own = [text for text in SMALL_SFT if tiny or not text.startswith("model.tiny")]
    run = compose([*own, *overrides], CONF)
    parts, _, _ = prepare(run, Context(0, 1, hardware.find(run.hardware), folder), None)
    return [describe(parts.lm.tokenizer, tree) for tree in parts.examples.trees.values()]


def describe(tokenizer, tree):
    [tokens], [trains] = tree.completions, tree.trains
    return tokenizer.decode(tree.prompt), mark(tokenizer, tokens, trains)


def mark(tokenizer, tokens, trains):
    text, inside = "", False
    for token, own in zip(tokens, trains, strict=True):
        text += ("[" if own else "]") if own != inside else ""
        text, inside = text + tokenizer.decode([token]), own
    return text + ("]" if inside else "")


@pytest.fixture
def chat():
    """A tokenizer with a chat template, and what turns its conversations into tokens."""
    tokenizer = byte_tokenizer()
    tokenizer.split_special_tokens = False
    tokenizer.chat_template = CHAT
    stops = [tokenizer.eos_token_id]
    return tokenizer, Transcriber(Decoder(tokenizer, frozenset(stops)), stops)


# --- which tokens carry loss


CONVERSATION = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "One?"},
    {"role": "assistant", "content": "1"},
    {"role": "user", "content": "Two?"},
    {"role": "assistant", "content": "2"},
]


def test_each_turn_of_the_assistant_carries_loss(chat):
    tokenizer, transcriber = chat
    given = transcriber.converse(CONVERSATION, 2)
    assert tokenizer.decode(given.prompt) == "s:Be brief.<eos>u:One?<eos>a:"
    assert mark(tokenizer, given.tokens, given.trains) == "[1<eos>]u:Two?<eos>a:[2<eos>]"


def test_a_turn_of_weight_0_carries_no_loss(chat):
    tokenizer, transcriber = chat
    light = [*CONVERSATION[:2], CONVERSATION[2] | {"weight": 0}, *CONVERSATION[3:]]
    given = transcriber.converse(light, 2)
    assert mark(tokenizer, given.tokens, given.trains) == "1<eos>u:Two?<eos>a:[2<eos>]"


def test_calls_of_tools_carry_loss_and_replies_do_not(chat):
    tokenizer, transcriber = chat
    call = {"type": "function", "function": {"name": "add", "arguments": {"number": 7}}}
    turns = [
        {"role": "user", "content": "From 2."},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        {"role": "tool", "name": "add", "content": "9"},
        {"role": "assistant", "content": "9"},
        {"role": "user", "content": "Thanks"},
        {"role": "assistant", "content": "done"},
    ]
    given = transcriber.converse(turns, 1, TOOLS)
    assert tokenizer.decode(given.prompt) == "add\nu:From 2.<eos>a:"
    said = mark(tokenizer, given.tokens, given.trains)
    assert said == f"[{CALL}<eos>]t:9<eos>a:[9<eos>]u:Thanks<eos>a:[done<eos>]"


THINKING = CHAT.replace("a:{% endif %}", "a:<think>\n{% endif %}")
EMPTY = CHAT.replace("a:{% endif %}", "a:<think></think>{% endif %}")
BOXED = "{% for m in messages %}<{{ m['role'] }}>{{ m['content'] | trim }}</{{ m['role'] }}>\n\
{% endfor %}{% if add_generation_prompt %}<assistant>{% endif %}"


@pytest.mark.parametrize(
    ("template", "wanted"),
    [
        # An answer without thoughts closes those that its prompt has begun.
        (
            THINKING,
            "[\n</think>\n\n1<eos>]u:Two?<eos>a:<think>\n[\n</think>\n\n2<eos>]",
        ),
        (EMPTY, "[1<eos>]u:Two?<eos>a:<think></think>[2<eos>]"),
        # The end of a turn is text, so that the end of text tells sampling to stop.
        (
            BOXED,
            "[1</assistant>\n<eos>]</assistant>\n<user>Two?</user>\n<assistant>"
            "[2</assistant>\n<eos>]",
        ),
    ],
    ids=["thoughts", "no thoughts", "no end"],
)
def test_turns_are_found_in_any_template(chat, template, wanted):
    tokenizer, transcriber = chat
    tokenizer.chat_template = template
    given = transcriber.converse(CONVERSATION, 2)
    assert mark(tokenizer, given.tokens, given.trains) == wanted


def test_a_call_that_the_template_leaves_out_is_refused(chat):
    tokenizer, transcriber = chat
    tokenizer.chat_template = BOXED
    call = {"type": "function", "function": {"name": "add", "arguments": {}}}
    turns = [CONVERSATION[1], {"role": "assistant", "content": "", "tool_calls": [call]}]
    refuses(lambda: transcriber.converse(turns, 1), key="add", try_next="another model")


def test_rows_of_conversations_are_learnt_whole(tmp_path, in_cache):
    settings = [text for text in write_caller(tmp_path) if text.startswith("model")]
    path = write(tmp_path, [{"messages": CONVERSATION}, *[{"messages": CONVERSATION[1:]}] * 9])
    given = ["task=custom", path, "task.prompt_field=messages", *settings]
    assert set(read(tmp_path, *given)) <= {
        ("s:Be brief.<eos>u:One?<eos>a:", "[1<eos>]u:Two?<eos>a:[2<eos>]"),
        ("u:One?<eos>a:", "[1<eos>]u:Two?<eos>a:[2<eos>]"),
    }
    light = [CONVERSATION[1], CONVERSATION[2] | {"weight": 0}, *CONVERSATION[3:]]
    given[1] = write(tmp_path, [{"messages": light}, *[{"messages": CONVERSATION}] * 9], "w.jsonl")
    learnt = {answer for _, answer in read(tmp_path, *given)}
    assert learnt <= {"1<eos>u:Two?<eos>a:[2<eos>]", "[1<eos>]u:Two?<eos>a:[2<eos>]"}
    light = [*CONVERSATION[1:4], CONVERSATION[4] | {"weight": 0}]
    others = [{"messages": [{"role": "user", "content": f"{n}?"}, *light[1:]]} for n in range(9)]
    given[1] = write(tmp_path, others, "last.jsonl")
    assert {answer for _, answer in read(tmp_path, *given)} == {"[1<eos>]u:Two?<eos>a:2<eos>"}
    none = [{"messages": [row["messages"][0], light[-1]]} for row in others]
    given[1] = write(tmp_path, none, "none.jsonl")
    refuses(lambda: read(tmp_path, *given), key="weight 0", try_next="Leave the row out")
    # With an answer of its own a conversation is a prompt.
    asked = [[*CONVERSATION[:3], {"role": "user", "content": f"{n}?"}] for n in range(9)]
    rows = [{"messages": turns, "answer": "yes"} for turns in asked]
    given[1] = write(tmp_path, rows, "prompts.jsonl")
    found = read(tmp_path, *given, "task.answer_field=answer")
    assert all(answer.startswith("[") and answer.count("[") == 1 for _, answer in found)


@pytest.mark.parametrize("name", ["rows.jsonl", "rows.csv"])
def test_answers_of_rows(tmp_path, in_cache, name):
    path = write(tmp_path, some_rows())
    if name.endswith("csv"):
        lines = ["question,answer", *(f"{n}?,{n}!" for n in range(20))]
        (tmp_path / name).write_text("\n".join(lines))
        path = f"task.path={tmp_path / name}"
    found = read(tmp_path, *ROWS, path)
    assert len(found) == 16
    assert all(answer == f"[{prompt[:-2]}!<eos>]" for prompt, answer in found)


def test_worked_solutions_replace_answers(tmp_path, in_cache):
    path = write(tmp_path, [row | {"how": f"so {row['answer']}"} for row in some_rows()])
    given = [*ROWS, path, "task.solution_field=how"]
    assert all(answer.startswith("[so ") for _, answer in read(tmp_path, *given))
    found = read(tmp_path, *given, "algo.answers=answer")
    assert not any(answer.startswith("[so ") for _, answer in found)


def test_games_that_a_task_teaches(tmp_path, in_cache):
    found = read(tmp_path, "task=guess")
    assert all(prompt == "guess 1 to 31\n" for prompt, _ in found)
    assert any("]\n\nhigher\n[" in answer or "higher" in answer for _, answer in found)
    for _, answer in found:
        loss = "".join(part.partition("]")[0] for part in answer.split("[")[1:])
        assert not any(word in loss for word in ("higher", "lower", "right"))
    assert found == read(tmp_path, "task=guess"), "a function of the seed and the example"
    assert found != read(tmp_path, "task=guess", "seed=1")


# --- whole runs


def test_it_learns_from_random_weights(tmp_path, in_cache):
    """Where no sample is right, a reward teaches nothing."""
    path = write(tmp_path, [{"question": f"{n}?", "answer": "yes"} for n in range(40)])
    result = train(compose([*SMALL_SFT, *ROWS, path, "algo.steps=30"]), tmp_path / "out")
    assert (result.before, result.after) == (0, 100)
    logged = events(tmp_path / "out")
    assert logged[-1]["loss"] < logged[0]["loss"]
    assert all(event["trained_tokens"] == 16 for event in logged)


def test_micro_batches_and_checkpointing_change_nothing(tmp_path, in_cache):
    for name, changes in {
        "whole": [],
        "split": ["algo.train_rows=1"],
        "recomputed": ["opt=checkpointing"],
    }.items():
        train(compose([*SMALL_SFT, *changes]), tmp_path / name)
    for name in ("split", "recomputed"):
        for one, whole in zip(events(tmp_path / name), events(tmp_path / "whole"), strict=True):
            assert one["grad_norm"] == pytest.approx(whole["grad_norm"], rel=1e-4)
            assert one["loss"] == pytest.approx(whole["loss"], rel=1e-4)


@pytest.mark.run
@pytest.mark.parametrize("how", ["ddp", "fsdp"])
def test_two_ranks_end_where_one_ends(launch, tmp_path, how):
    launch(*SMALL_SFT, "hydra.run.dir=one")
    launch(*SMALL_SFT, f"opt=[{how}]", f"opt.{how}.ranks=2", "hydra.run.dir=two")
    one, two = (weights(tmp_path / name) for name in ("one", "two"))
    for name, value in one.items():
        torch.testing.assert_close(two[name], value, rtol=1e-3, atol=2e-5)
    for first, second in zip(events(tmp_path / "one"), events(tmp_path / "two"), strict=True):
        assert first["loss"] == pytest.approx(second["loss"], rel=1e-4)


@pytest.mark.faults
@pytest.mark.parametrize(
    "changes",
    [[], ["model.adapter={rank: 4, dropout: 0.1}", "model.quantize=int8"]],
    ids=["weights", "quantised"],
)
def test_killed_and_resumed_equals_unbroken(launch, begin, tmp_path, changes):
    arguments = [*SMALL_SFT, *changes, "algo.steps=40", "checkpoint.every=2"]
    launch(*arguments, "hydra.run.dir=whole")
    process = begin(*arguments, "hydra.run.dir=broken")
    metrics = tmp_path / "broken" / "metrics.jsonl"
    deadline = time.monotonic() + 120
    while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 3):
        assert process.poll() is None, process.said()[0]
        assert time.monotonic() < deadline
        time.sleep(0.02)
    process.send_signal(signal.SIGKILL)
    process.communicate()
    launch(*arguments, "hydra.run.dir=broken", "resume=auto")
    one, other = (
        next((tmp_path / name).glob("[am]*/*model.safetensors")).read_bytes()
        for name in ("broken", "whole")
    )
    assert one == other
    kept = ("step", "loss", "grad_norm", "lr", "epoch", "trained_tokens")
    broken, whole = (events(tmp_path / name) for name in ("broken", "whole"))
    assert [[e[k] for k in kept] for e in broken] == [[e[k] for k in kept] for e in whole]


def test_the_best_model_on_validation_is_exported(tmp_path, in_cache):
    path = write(tmp_path, [{"question": f"{n}?", "answer": "yes"} for n in range(40)])
    given = [*SMALL_SFT, *ROWS, path, "algo.steps=60", "evaluate.every=2", "algo.patience=3"]
    given += ["evaluate.validation_examples=8", "evaluate.stop_at=100"]
    result = train(compose(given), tmp_path / "out")
    assert result.after == 100
    assert result.ended_by == "evaluate.stop_at=100"


def test_epochs_are_passes_over_the_rows(tmp_path, in_cache):
    path = write(tmp_path, some_rows())
    given = [text for text in SMALL_SFT if not text.startswith("algo.steps")]
    result = train(compose([*given, *ROWS, path, "algo.epochs=1.5"]), tmp_path / "out")
    assert result.steps == 6
    assert events(tmp_path / "out")[-1]["epoch"] == 1.5


# --- what cannot work


def start(folder):
    return lambda given: train(compose(given), folder / "out")


def test_a_row_without_an_answer_is_refused(tmp_path, in_cache, monkeypatch):
    monkeypatch.syspath_prepend(tmp_path)
    (tmp_path / "my_rewards.py").write_text("def short(completion):\n    return 1.0\n")
    path = write(tmp_path, some_rows())
    refuses(
        [
            *(*SMALL_SFT, "task=custom", path, "task.prompt_field=question"),
            *("task.reward=null", "task.rewards={my_rewards.short: 1.0}"),
        ],
        key="training example 0",
        try_next="task.answer_field",
        start=start(tmp_path),
    )


@pytest.mark.parametrize("what", ["solution", "teach"])
def test_answers_that_a_task_lacks_are_refused(tmp_path, in_cache, what):
    given = [*SMALL_SFT, *ROWS, write(tmp_path, some_rows()), f"algo.answers={what}"]
    refuses(given, key="algo.answers", value=what, try_next="algo.answers", start=start(tmp_path))


def test_rows_longer_than_the_context(tmp_path, in_cache):
    long = {"question": "long?", "answer": "".join(random.Random(0).choices("abc", k=90))}
    path = write(tmp_path, [*some_rows(60), *[long | {"question": f"{n}?!"} for n in range(9)]])
    given = [*SMALL_SFT, *ROWS, path, "model.tiny.context=40"]
    refuses(given, key="example", value=40, try_next="prompts.too_long=skip", start=start(tmp_path))
    found = read(tmp_path, *given, "prompts.too_long=skip")
    assert not any(len(answer) > 40 for _, answer in found)


def test_settings_without_effect_are_refused(tmp_path, in_cache):
    tokens = [*SMALL_SFT, "budget.tokens=100"]
    refuses(tokens, key="budget.tokens", try_next="budget.seconds", start=start(tmp_path))
    refuses([*SMALL_SFT, "opt=offload"], key="opt=offload", start=start(tmp_path))
    refuses([*SMALL_SFT, "algo.answers=reply"], key="algo.answers", value="reply")
    refuses([*SMALL_SFT, "algo.epochs=2"], key="algo.epochs", value=2, try_next="algo.steps")
