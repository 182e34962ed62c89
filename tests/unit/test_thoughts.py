"""task.after: answers stand behind the thoughts of a model that reasons."""

import json
import pickle

import pytest

from common.config import ConfigError, TinyConfig
from common.model.tiny import byte_tokenizer, train_from_scratch
from common.scoring import score_parts
from common.task import build
from common.tasks.thoughts import MARKS, Answering, Behind, find
from launch import compose

THINK = Behind("</think>", "<think>", begun=False)
END = b"\xff"  # common.model.tiny: <eos> in a row
CHAT = (
    "{% for m in messages %}{{ m['role'][0] }}:{{ m['content'].split('</think>')[-1] }}<eos>"
    "{% endfor %}{% if add_generation_prompt %}a:{% endif %}"
)


@pytest.mark.parametrize(
    ("text", "answer"),
    [
        ("<think>It is 3.</think> 4", " 4"),
        ("<think>3</think>4<think>5</think>6", "6"),
        ("<think>3</think>4<think>or 5", "4"),
        ("<think>It is 3", ""),
        ("It is 3</think>4", "4"),
        ("4", "4"),
        ("", ""),
    ],
)
def test_the_answer_stands_behind_the_last_thoughts(text, answer):
    assert THINK(text) == answer


def test_a_missing_required_mark_gives_no_answer():
    for behind in (Behind("</think>", "<think>"), find("</think>", "", "")):
        assert behind is not None
        assert behind("It is 3") == ""
        assert behind("It is 3</think>4") == "4"


@pytest.mark.parametrize(("begin", "end"), MARKS.items())
def test_auto_looks_for_marks_in_the_template_and_in_prompts(begin, end):
    wanted = Behind(end, begin, begun=False)
    assert find("auto", f"{{{{ content.split('{end}') }}}}", "Q: ?\nA:") == wanted
    assert find("auto", "", f"Think between {begin} and {end}, then answer. 2 + 2 =") == wanted
    assert find("auto", f"{{{{ '{begin}\n' }}}} {end}", f"2 + 2 = {begin}\n") == Behind(end, begin)
    assert find("auto", "{{ content }}", "2 + 2 =") is None
    assert find(None, end, end) is None


@pytest.mark.parametrize("after", ["", " ", 3, True, ["</think>"]])
def test_what_is_no_mark_is_an_error(after):
    with pytest.raises(ConfigError, match=r"task\.after="):
        find(after, "", "")


# --- the tasks of this package


def answers_of(name, right, **settings):
    """Return a task with answers behind </think>, its first row, and a right answer to it."""
    task = build({**compose(["algo=grpo", f"task={name}"]).task, **settings})
    example = task.examples("test")[0]
    return Answering(task, THINK), example, right(example)


@pytest.mark.parametrize(
    ("name", "right", "settings"),
    [
        ("translate", lambda e: e.answer, {}),
        ("units", lambda e: f"<answer>{e.answer}</answer>", {"problems": 8, "test_problems": 8}),
        ("chess", lambda e: e.answer, {"positions": 8, "test_positions": 8}),
    ],
)
def test_thoughts_earn_nothing_and_cost_nothing(name, right, settings):
    task, example, text = answers_of(name, right, **settings)
    plain = score_parts(task.own, [example], [text])
    thought = score_parts(task, [example], [f"<think>one <answer>1</answer> 2 + 3</think>{text}"])
    assert thought.rewards == plain.rewards == [pytest.approx(1.0)]
    assert task.reward(example, f"<think>?</think>{text}") == pytest.approx(1.0)
    assert task.rewards([example], [f"<think>{text}"]) != plain.rewards, "no answer"
    measured = task.metrics([example], [f"<think>12</think>{text}"])
    assert measured == task.own.metrics([example], [text])
    assert next(iter(measured.values())) == pytest.approx(100.0)


@pytest.fixture
def rows(tmp_path):
    path = tmp_path / "rows.jsonl"
    path.write_text("".join(f'{{"q": "{i} and 1", "a": "{i + 1}"}}\n' for i in range(10)))
    return path


def custom(rows, **settings):
    node = compose(["algo=grpo", "task=custom"]).task
    fields = {"path": str(rows), "prompt_field": "q", "answer_field": "a"}
    return Answering(build({**node, **fields, **settings}), THINK)


def test_numbers_in_thoughts_are_no_answers(rows):
    task = custom(rows, reward="numeric")
    example = task.examples("test")[0]
    said = f"<think>I say {example.answer}.</think> The answer is"
    assert task.answer(f"{said} -9.") == "-9"
    assert task.reward(example, f"{said} -9.") < 1
    assert task.reward(example, f"<think>-9</think> {example.answer}") == 1
    measured = task.metrics([example] * 2, [f"{said} {example.answer}.", f"{said[:20]}"])
    assert measured == {"accuracy": 50.0, "answered": 50.0, "unread": 0.0}
    assert task.path_key("<think>2*3=6</think> 7") == "2*3=6", "the way counts as a whole"


def test_functions_of_the_user_get_the_thoughts_too(rows, tmp_path, monkeypatch):
    (tmp_path / "forms.py").write_text(
        "def thinks(completion):\n    return float(completion.startswith('<think>'))\n"
        "def all_think(completions, **columns):\n    return [thinks(c) for c in completions]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    task = custom(rows, rewards={"forms.thinks": 1.0, "forms.all_think": 2.0}, partial=0.0)
    task = pickle.loads(pickle.dumps(task))
    example = task.examples("test")[0]
    texts = [f"<think>?</think>{example.answer}", example.answer, "<think>?</think>no", "no"]
    scored = score_parts(task, [example] * 4, texts)
    assert scored.components["exact"] == [1, 1, 0, 0]
    assert scored.components["forms.thinks"] == scored.components["forms.all_think"] == [1, 0, 1, 0]
    assert scored.rewards == pytest.approx([1, 0.25, 0.75, 0])
    assert task.rewards([example] * 4, texts) == pytest.approx(scored.rewards)
    assert task.reward(example, texts[2]) == pytest.approx(0.75)


# --- a run


def test_answers_are_read_after_thoughts(tmp_path, launch):
    tokenizer = byte_tokenizer()
    tokenizer.split_special_tokens = False
    tokenizer.chat_template = CHAT
    said = [("one", "eins"), ("two", "zwei"), ("three", "drei"), ("four", "vier")]
    rows = [(b"u:" + q.encode() + END + b"a:", f"<think>{q}?</think>{a}".encode()) for q, a in said]
    shape = {"hidden_size": 64, "layers": 2, "heads": 2, "intermediate_size": 128, "context": 128}
    recipe = {"pretrain_steps": 150, "pretrain_rows": 8, "pretrain_lr": 4e-3, "pretrain_seed": 0}
    train_from_scratch(TinyConfig(**shape, **recipe), rows * 300, False).save_pretrained(
        tmp_path / "m"
    )
    tokenizer.save_pretrained(tmp_path / "m")
    asked = [{"q": [{"role": "user", "content": q}], "a": [a, f"{a}!"]} for q, a in said]
    lines = list(map(json.dumps, asked))
    (tmp_path / "rows.jsonl").write_text("\n".join(lines))
    run = ["algo=grpo", "model=hf", f"model.path={tmp_path}/m", "hardware=cpu", "task=custom"]
    run += [f"task.path={tmp_path}/rows.jsonl", f"task.test_path={tmp_path}/held_out.jsonl"]
    (tmp_path / "held_out.jsonl").write_text(lines[3])
    run += ["task.prompt_field=q", "task.answer_field=a", "algo.sampling.max_new_tokens=40"]
    run += ["algo.steps=1", "algo.prompts_per_step=1", "algo.samples_per_prompt=2"]
    for after, exact in (("auto", 100.0), ("</think>", 100.0), ("null", 0.0)):
        folder = tmp_path / f"run {exact} {after[:2]}"
        done = launch(
            *run,
            f"task.after={after if after == 'null' else repr(after)}",
            f"hydra.run.dir='{folder}'",
        )
        assert ("behind </think>" in done.stdout) == (exact == 100.0), done.stdout
        result = json.loads((folder / "result.json").read_text())
        assert result["before"] == exact
