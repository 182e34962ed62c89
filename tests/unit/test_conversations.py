"""Prompts that are conversations, and text tasks that converse."""

import json

import pytest

from common.config import ConfigError
from common.model.prompts import encode_prompts
from common.model.tiny import byte_tokenizer
from common.task import build
from launch import compose
from tests.support.calling import CHAT

ASK = [{"role": "user", "content": "2 + 2?"}]
TURNS = [
    {"role": "system", "content": "Calculate."},
    {"role": "user", "content": "1 + 1?"},
    {"role": "assistant", "content": "2"},
    {"role": "user", "content": "2 + 2?"},
]
SHARED = [
    {"from": "human", "value": "2 + 2?"},
    {"from": "gpt", "value": "4"},
]
PARTS = [{"role": "user", "content": [{"type": "text", "text": "2 + 2?"}]}]


@pytest.fixture
def custom(tmp_path):
    """Make a task of rows with this prompt; the number of a row stands in front of the question."""

    def make(prompt, templated=True, answers=("4", "five"), **settings):
        rows = [{"prompt": number_of(prompt, i), "answer": answers[i % 2]} for i in range(10)]
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        node = compose(["algo=grpo", "task=custom"]).task
        fields = {"path": str(path), "prompt_field": "prompt", "answer_field": "answer"}
        task = build({**node, **fields, **settings})
        task.templated = templated
        return task, min(task.examples("train"), key=lambda e: e.question)

    return make


def number_of(prompt, i):
    copied = json.loads(json.dumps(prompt))
    for message in copied:
        for key in ("content", "value"):
            if isinstance(message.get(key), str) and "2 + 2" in message[key]:
                message[key] = message[key].replace("2 + 2", f"{i} + 2 + 2")
            elif isinstance(message.get(key), list) and "text" in message[key][0]:
                message[key][0]["text"] = message[key][0]["text"].replace("2 + 2", f"{i} + 2 + 2")
    return copied


def said(messages):
    return [
        (m["role"], m["content"].replace("0 + ", "").replace("1 + 2 + 2", "2 + 2"))
        for m in messages
    ]


@pytest.mark.parametrize(
    ("prompt", "messages"),
    [
        (ASK, [("user", "2 + 2?")]),
        (TURNS, [(m["role"], m["content"]) for m in TURNS]),
        (PARTS, [("user", "2 + 2?")]),
    ],
)
def test_a_conversation_goes_to_the_template_as_it_is(custom, prompt, messages):
    task, example = custom(prompt)
    assert said(task.prompt(example)) == messages


def test_a_system_text_is_added_where_there_is_none(custom):
    task, example = custom(ASK, system="Be brief.")
    assert said(task.prompt(example)) == [("system", "Be brief."), ("user", "2 + 2?")]
    task, example = custom(TURNS, system="Be brief.")
    assert said(task.prompt(example))[0] == ("system", "Calculate.")


def test_a_conversation_may_be_text_as_csv_has_it(custom, tmp_path):
    task, _ = custom(ASK)
    rows = [f'"{json.dumps(e.extra["messages"])}"' for e in task.examples("train")]
    cells = [row.replace('"', '""')[1:-1] for row in rows]
    lines = [f"{cell},{number}" for number, cell in enumerate(cells)]
    (tmp_path / "rows.csv").write_text("\n".join(["prompt,answer", *lines]) + "\n")
    text, _ = custom(ASK, path=str(tmp_path / "rows.csv"))
    assert text.prompt(text.examples("train")[0])[0]["role"] == "user"


def test_an_answer_may_be_a_message(custom):
    message = [{"role": "assistant", "content": "4"}]
    _, example = custom(ASK, answers=(message, message))
    assert example.answer == "4"


def test_a_conversation_that_ends_with_an_answer_brings_it(custom):
    task, example = custom(SHARED, answer_field=None)
    assert said(task.prompt(example)) == [("user", "2 + 2?")]
    assert example.answer == "4"
    assert task.reward(example, "4") == 1
    with pytest.raises(ConfigError, match=r"ends with an assistant's turn .* line 1"):
        custom(SHARED)


def test_a_conversation_without_an_answer_is_named(custom):
    with pytest.raises(ConfigError, match=r"rows\.jsonl' line 1 ends with a turn of the user"):
        custom(SHARED[:1], answer_field=None)


def test_a_hint_stands_in_the_last_question(custom):
    task, example = custom(TURNS)
    hinted = task.hint(example)
    assert hinted[:-1] == task.prompt(example)[:-1]
    assert hinted[-1]["content"].endswith(f"(The answer is {example.answer}.)")


@pytest.mark.parametrize(
    ("prompt", "why"),
    [
        ([{"role": "user", "content": ""}], "message 1 is empty in .* line 1"),
        ([{"role": "user", "content": 3}], "message 1 is not a text in .* line 1"),
        ([{"role": "", "content": "a"}], "message 1 has no role in .* line 1"),
        ([{"role": "usr", "content": "a"}], "message 1 has the role 'usr' in .* line 1"),
        (
            [*ASK, {"role": "assistant", "content": "", "tool_calls": [{"function": {}}]}],
            "message 2 calls a tool without a name in .* line 1",
        ),
        (
            [
                *ASK,
                {
                    "role": "assistant",
                    "tool_calls": [{"name": "f", "arguments": "{"}],
                    "content": "",
                },
            ],
            "message 2 calls f with arguments that are no object in .* line 1",
        ),
        (
            [*ASK, {"role": "assistant", "content": "", "tool_calls": [{"name": "f"}]}],
            "ends with a call of a tool in .* line 1",
        ),
        (
            [{"from": "human", "value": "?"}, {"from": "function_call", "value": "f"}],
            "message 2 is no call of a tool",
        ),
        (
            [{"role": "user", "content": [{"type": "image", "url": "a.png"}]}],
            "message 1 is not a text in .* line 1",
        ),
    ],
)
def test_a_message_that_is_no_text_is_named(custom, prompt, why):
    with pytest.raises(ConfigError, match=why):
        custom(prompt)


@pytest.mark.parametrize(("templated", "settings"), [(False, {}), (True, {"chat": False})])
def test_without_a_template_conversations_are_refused(custom, templated, settings):
    task, example = custom(ASK, templated, **settings)
    with pytest.raises(ConfigError, match="holds conversations, which need a chat template"):
        task.prompt(example)


def test_functions_of_lists_get_the_conversations(custom, tmp_path, monkeypatch):
    (tmp_path / "seen_turns.py").write_text(
        "def f(prompts, completions, **rest):\n"
        "    return [float(len(p)) + float(c[0]['content'] == 'yes')"
        " for p, c in zip(prompts, completions)]\n"
    )
    monkeypatch.syspath_prepend(str(tmp_path))
    task, example = custom(TURNS, rewards={"seen_turns.f": 1.0}, reward=None)
    assert [task.reward(example, text) for text in ("yes", "no")] == [5, 4]


# --- several answers


def test_any_of_several_answers_is_right(custom):
    both = (["4", "four"], ["5", "five"])
    task, example = custom(ASK, answers=both)
    first, second = example.answer, example.extra["others"][0]["answer"]
    assert task.reward(example, first) == task.reward(example, second) == 1
    assert task.reward(example, f"{second}s") > task.reward(example, "none of them")
    assert task.metrics([example] * 3, [first, second, "?"])["exact"] == pytest.approx(200 / 3)


def test_any_of_several_numbers_is_right(custom):
    task, example = custom(ASK, answers=([4, "1/3"], [4, "1/3"]), reward="numeric")
    texts = ["It is 4.", "x = 1/3", "5", "?"]
    assert [task.reward(example, text) == 1 for text in texts] == [True, True, False, False]
    assert task.metrics([example] * 4, texts)["accuracy"] == 50
    with pytest.raises(ConfigError, match="line 2"):
        custom(ASK, answers=([4], ["4", "none"]), reward="numeric")


# --- the other text tasks


@pytest.mark.parametrize(
    ("name", "settings"),
    [
        ("translate", {}),
        ("chess", {"positions": 8, "test_positions": 8}),
    ],
)
def test_text_tasks_converse_where_there_is_a_template(name, settings):
    node = {**compose(["algo=grpo", f"task={name}"]).task, **settings}
    task = build(node)
    example = task.examples("test")[0]
    plain = task.prompt(example)
    assert isinstance(plain, str), "no template"
    task.templated = True
    assert task.prompt(example) == [{"role": "user", "content": plain}]
    task = build({**node, "system": "Be brief."})
    task.templated = True
    assert [m["role"] for m in task.prompt(example)] == ["system", "user"]
    task = build({**node, "chat": False})
    task.templated = True
    assert task.prompt(example) == plain
    with pytest.raises(ConfigError, match=r"task\.system"):
        build({**node, "chat": False, "system": "Be brief."})


# --- calls of tools

ADD = {"type": "function", "function": {"name": "add", "parameters": {"type": "object"}}}
OF_OPENAI = [
    {"role": "user", "content": "2 + 2?", "tool_calls": None},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "c1", "type": "function", "function": {"name": "add", "arguments": '{"a": 2}'}}
        ],
    },
    {"role": "tool", "tool_call_id": "c1", "name": "add", "content": "4"},
]
OF_SHAREGPT = [
    {"from": "human", "value": "2 + 2?"},
    {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 2}}'},
    {"from": "observation", "value": "4"},
]


@pytest.fixture
def tooled(tmp_path):
    """Make a task of rows with a conversation and further columns."""

    def make(messages, **columns):
        rows = [{"prompt": number_of(messages, i), "answer": "4"} | columns for i in range(10)]
        path = tmp_path / "rows.jsonl"
        path.write_text("\n".join(map(json.dumps, rows)))
        node = compose(["algo=grpo", "task=custom"]).task
        fields = {"path": str(path), "prompt_field": "prompt", "answer_field": "answer"}
        task = build({**node, **fields})
        task.templated = True
        return task, task.examples("train")[0]

    return make


@pytest.fixture(scope="module")
def tokenizer():
    found = byte_tokenizer()
    found.chat_template = CHAT
    return found


@pytest.mark.parametrize("messages", [OF_OPENAI, OF_SHAREGPT], ids=["openai", "sharegpt"])
@pytest.mark.parametrize("tools", [[ADD], json.dumps([ADD])], ids=["objects", "text"])
def test_calls_of_tools_go_through_the_template(tooled, tokenizer, messages, tools):
    task, example = tooled(messages, tools=tools)
    prompt = task.prompt(example)
    assert [message["role"] for message in prompt] == ["user", "assistant", "tool"]
    text = tokenizer.decode(encode_prompts(tokenizer, [prompt])[0])
    assert text.startswith("add\n")
    assert '<tool_call>{"name": "add", "arguments": {"a": 2}}</tool_call>' in text
    assert "t:4" in text
    assert task.hint(example).tools == [ADD]


def test_a_template_that_wants_texts_as_arguments_gets_them(tooled, tokenizer, monkeypatch):
    form = "{% for m in messages %}{{ m['content'] }}{% for c in m['tool_calls'] or [] %}"
    form += "{{ c['function']['name'] + c['function']['arguments'] }}{% endfor %}{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", form)
    task, example = tooled(OF_OPENAI)
    assert 'add{"a": 2}' in tokenizer.decode(encode_prompts(tokenizer, [task.prompt(example)])[0])


@pytest.mark.parametrize(
    ("messages", "tools", "what"),
    [
        (OF_OPENAI, [], "a call of 'add'"),
        (ASK, [ADD], "the tool 'add'"),
        ([{"role": "user", "content": "add 2 + 2?"}], [ADD], "the tool 'add'"),
    ],
)
def test_a_template_that_leaves_out_calls_is_refused(
    tooled, tokenizer, monkeypatch, messages, tools, what
):
    form = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    monkeypatch.setattr(tokenizer, "chat_template", form)
    task, example = tooled(messages, tools=tools)
    with pytest.raises(ConfigError, match=f"leaves out {what}"):
        encode_prompts(tokenizer, [task.prompt(example)])


def test_the_column_system_of_sharegpt_is_a_turn(tooled):
    asked = [{"from": "human", "value": "2 + 2?"}]
    task, example = tooled(asked, system="Calculate.")
    assert [message["role"] for message in task.prompt(example)] == ["system", "user"]
    task, example = tooled([{"from": "system", "value": "Own."}, *asked], system="Calculate.")
    assert task.prompt(example)[0]["content"] == "Own."
    task, example = tooled(ASK, system="Calculate.")
    assert [message["role"] for message in task.prompt(example)] == ["user"]
