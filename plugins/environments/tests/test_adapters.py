"""Environments in the forms of other trainers: small classes of each form, and the packages' own
where they are installed.
"""

import asyncio
import itertools
import json
import socket
import sys
import threading
from dataclasses import replace
from typing import Literal
from urllib.error import URLError

import pytest
import torch
from pydantic import BaseModel
from transformers import AutoTokenizer

from common.config import ConfigError, SamplingConfig
from common.device import hardware
from common.distributed import Context
from common.engine import Completions, Requests
from common.episodes import Turns, check_template, play
from common.episodes.episodes import Replies, Row
from common.episodes.tool_calls import FORMS, Calls
from common.model import Decoder, encode_prompts
from common.parts import open_parts
from common.task import Example, build
from launch import compose
from plugins.environments.adapters import TextSteps, Tools, adapter, schemas, wait
from tests.support.calling import CALL, write_caller

SEED = Example(0, "seed 7", "", {"seed": 7})
ROW = Example(0, "seed 7", "", {"seed": 7, "row": {"prompt": "Add. ", "a": 3}})


def say(text: str, **more):
    return {"role": "assistant", "content": text, **more}


def call(name: str, **arguments):
    return {"type": "function", "function": {"name": name, "arguments": arguments}}


# --- text steps


class Gym:
    def reset(self, seed):
        return f"start {seed}", {"suffix": "Go on."}

    def step(self, text):
        return f"not {text}", 0.25, text == "end", False, {"suffix": "Go on."}


class OldGym:
    def seed(self, s):
        self.start = s

    def reset(self):
        return f"start {self.start}"

    def step(self, text):
        return f"not {text}", 0.25, text == "end", {}


class Skyrl:
    def __init__(self, extras):
        self.a = extras["a"]

    def init(self, prompt):
        return [{"role": "user", "content": prompt}], {}

    def step(self, action):
        right = action == str(self.a)
        observations = [] if right else [{"role": "user", "content": "no"}]
        return {"observations": observations, "reward": right, "done": right, "metadata": {}}


class Result:
    def __init__(self, reward, episode_done, next_messages):
        self.reward, self.episode_done, self.next_messages = reward, episode_done, next_messages


class Tinker:
    async def initial_observation(self, seed):
        self.history = [{"role": "user", "content": f"{seed}?"}]
        return self.history

    async def step(self, message):
        self.history += [message, {"role": "user", "content": "again"}]
        return Result(0.5, message["content"] == "7", self.history)


class Move(BaseModel):
    guess: str
    metadata: dict = {}


class Seen(BaseModel):
    text: str
    done: bool = False
    reward: float | None = None
    metadata: dict = {}


class OpenEnv:
    def reset(self, seed=None, episode_id=None, **more):
        return Seen(text=f"start {seed}")

    def step(self, action: Move, timeout_s=None):
        right = action.guess == "7"
        return Seen(text="no", done=right, reward=1.0 if right else None)


@pytest.mark.parametrize(
    ("environment", "beginning", "answers", "replies", "earned"),
    [
        (Gym(), "start 7\nGo on.", ["a", "end"], ["not a\nGo on.", None], 0.5),
        (OldGym(), "start 7", ["a", "end"], ["not a", None], 0.5),
        (Skyrl({"a": 3}), "Add. ", ["2", "3"], ["no", None], 1.0),
        (Tinker(), "7?", ["1", "7"], ["again", None], 1.0),
        (OpenEnv(), "start 7", ["1", '{"guess": "7"}'], ["no", None], 1.0),
        (OpenEnv(), "start 7", ["1", "2"], ["no", "no"], None),
    ],
    ids=["gymnasium", "old gym", "skyrl", "tinker", "openenv", "no reward"],
)
def test_text_steps_in_each_form(environment, beginning, answers, replies, earned):
    assert adapter(type(environment)) is TextSteps
    episode = TextSteps(environment)
    assert episode.start(ROW, 7) == [{"role": "user", "content": beginning}]
    for answer, reply in zip(answers, replies, strict=True):
        messages = episode.reply(say(answer))
        assert (messages and messages[-1]["content"]) == reply
    assert episode.reward() == earned
    episode.close()


class Keeper:
    """An object with tools, of which one sets the seed."""

    reward = 1.0

    def seed(self, seed=None):
        self.start = seed

    def reset(self):
        return f"start {self.start}"

    def look(self) -> str:
        """Look around."""
        return "nothing"


def test_a_method_seed_tells_episodes_apart(monkeypatch):
    monkeypatch.setitem(sys.modules, "old", sys.modules[__name__])
    for name in ("OldGym", "Keeper"):
        task = build({**compose(["algo=grpo", "task=environment"]).task, "factory": f"old:{name}"})
        prompts = [task.prompt(example)[0]["content"] for example in task.examples("train")[:2]]
        assert prompts == ["start 0", "start 1"]
    assert [tool["function"]["name"] for tool in task.tools] == ["look"]


class Offline:
    def __init__(self, error):
        self.error = error

    def reset(self, seed):
        raise self.error

    def step(self, text):
        raise NotImplementedError


NLTK = """
*****
  Resource \x1b[93mwords\x1b[0m not found.
  Please use the NLTK Downloader to obtain the resource:

  \x1b[31m>>> import nltk
  >>> nltk.download('words')
*****"""


@pytest.mark.parametrize(
    ("error", "fetch"),
    [
        (LookupError(NLTK), r"NLTK's 'words'.* python -m nltk\.downloader words"),
        (OSError("[E050] Can't find model 'en_core_web_sm'."), "spacy download en_core_web_sm"),
        (URLError(socket.gaierror(-3, "Temporary failure in name resolution")), "no network"),
        (OSError(101, "Network is unreachable"), "no network.*HF_HOME"),
    ],
)
def test_data_that_are_not_there_end_with_what_to_fetch(error, fetch):
    with pytest.raises(ConfigError, match=fetch) as raised:
        TextSteps(Offline(error)).start(SEED, 7)
    assert str(raised.value).startswith("Offline.reset cannot run (")


@pytest.mark.parametrize(
    "error", [LookupError("no key"), ConnectionRefusedError(111, "Connection refused")]
)
def test_other_exceptions_are_said_as_they_are(error):
    with pytest.raises(ConfigError, match=f"Offline.reset raised {type(error).__name__}"):
        TextSteps(Offline(error)).start(SEED, 7)


class Bare(BaseModel):
    metadata: dict = {}


class Called(OpenEnv):
    """As OpenEnv's environments that give tools over MCP: their actions are of a base class."""

    def step(self, action: Bare, timeout_s=None):
        return Seen(text="never")


class McpClient(OpenEnv):
    def list_tools(self):
        return []

    def call_tool(self, name, **arguments):
        return None


class Mute(OpenEnv):
    says = Bare()

    def reset(self, seed=None, **more):
        return self.says


@pytest.mark.parametrize("kind", [Called, McpClient])
def test_environments_without_text_actions_are_refused(kind):
    with pytest.raises(ConfigError, match=f"task.factory: {kind.__name__} takes"):
        adapter(kind)


@pytest.mark.parametrize(
    "says", [Bare(), Seen(text=""), ({}, {}), ("", {}), b"hi", [], "  ", (" ", {})], ids=repr
)
def test_an_environment_that_begins_with_nothing_to_read_is_refused(says, monkeypatch):
    monkeypatch.setattr(Mute, "says", says)
    with pytest.raises(ConfigError, match=r"Mute begins with .*tells a model nothing"):
        TextSteps(Mute()).start(SEED, 7)


class Leaver(Exception):
    def __str__(self):
        raise RuntimeError("no text")


@pytest.mark.parametrize("error", [SystemExit("bye"), GeneratorExit(), Leaver()], ids=repr)
def test_whatever_a_tool_raises_it_has_a_reply(error, monkeypatch):
    def add(self, number: int) -> int:
        """
        Add.

        Args:
            number: what is added
        """
        raise error

    monkeypatch.setattr(Adder, "add", add)
    episode = Tools(Adder())
    function = {"name": "add", "arguments": {"number": 1}}
    [reply] = episode.reply({"tool_calls": [{"function": function}]}) or []
    assert reply["content"].startswith("error: ")
    assert episode.components()["tool_errors"] == 1


def test_a_scale_makes_shares_of_rewards():
    episode = TextSteps(Gym(), [-1.0, 1.0])
    episode.start(SEED, 7)
    episode.reply(say("end"))
    assert episode.reward() == pytest.approx(0.625)


def test_episodes_cut_before_a_step_earn_nothing():
    episode = TextSteps(Gym())
    episode.start(SEED, 7)
    assert episode.reward() == 0.0


class Echo:
    """It keeps a connection, which belongs to the loop that it was opened in."""

    async def reset(self, seed):
        async def echo(reader, writer):
            writer.write(await reader.readline())
            await writer.drain()
            await reader.read()  # until the other side closes
            writer.close()
            await writer.wait_closed()
            self.closed.set()

        self.closed = asyncio.Event()
        self.server = await asyncio.start_server(echo, "127.0.0.1", 0)
        port = self.server.sockets[0].getsockname()[1]
        self.reader, self.writer = await asyncio.open_connection("127.0.0.1", port)
        return "Say hello.", {}

    async def step(self, text):
        self.writer.write(f"{text}\n".encode())
        said = (await self.reader.readline()).decode().strip()
        return said, float(said == "hello"), True, False, {}

    async def close(self):
        self.writer.close()
        await self.writer.wait_closed()
        await self.closed.wait()
        self.server.close()
        await self.server.wait_closed()


def test_a_connection_outlives_a_call():
    episode = TextSteps(Echo())
    episode.start(SEED, 7)
    assert episode.reply(say("hello")) is None
    assert episode.reward() == 1.0
    episode.close()


def test_environments_are_spread_over_the_loops():
    async def find_loop():
        return id(asyncio.get_running_loop())

    environments = [Skyrl({"a": 1}) for _ in range(200)]
    loops = {wait(find_loop(), one) for one in environments}
    assert len(loops) > 20, "one that does not return holds up those of its loop alone"


# --- tools


class Adder:
    """As TRL's environment_factory has it."""

    reward = 0.0
    met = threading.Barrier(2, timeout=5)  # which nobody else comes to

    def reset(self, a, **more):
        self.sum = a
        return f"The number is {a}."

    def add(self, number: int) -> int:
        """
        Add to the number.

        Args:
            number: what is added
        """
        if number == 13:
            raise ConnectionResetError("gone")
        if number == 14:
            raise ValueError("Game over.")
        self.sum += number
        self.reward = float(self.sum == 10)
        return self.sum

    def meet(self, who: str) -> str:
        """
        Wait for the calls beside this one.

        Args:
            who: who waits
        """
        self.met.wait()
        return f"{who} met"


@pytest.fixture
def adder():
    episode = Tools(Adder())
    episode.prompt = episode.start(ROW, 7)
    return episode


def test_an_object_is_asked_by_its_methods(adder):
    assert adder.prompt == [{"role": "user", "content": "Add. The number is 3."}]
    assert [one["function"]["name"] for one in adder.prompt.tools] == ["add", "meet"]
    replies = adder.reply(say("", tool_calls=[call("add", number=7), call("sub"), call("add")]))
    assert [reply["content"] for reply in replies] == [
        "10",
        "error: there is no tool 'sub'. Call one of add, meet.",
        "error: add: missing a required argument: 'number'",
    ]
    assert adder.reply(say("done")) is None
    assert adder.reward() == 1.0


def test_arguments_of_another_type_go_back_to_the_model(adder):
    wanted = {"number": "four"}, {"number": "4"}, {"number": [4]}
    replies = adder.reply(say("", tool_calls=[call("add", **given) for given in wanted]))
    first, second, third = (reply["content"] for reply in replies)
    assert first.startswith("error: add: number='four': Input should be a valid integer")
    assert second == "7"
    assert third.startswith("error: add: number=[4]: ")
    assert adder.environment.sum == 7


def test_a_tool_takes_what_it_would_take_without_checks():
    class Kinds(Adder):
        def show(self, a: float, b: int = None, c: str = "", d: "Literal[1, 2]" = 1, **more):  # noqa: RUF013
            """
            Show.

            Args:
                a: first
                b: second
                c: third
                d: fourth
            """
            return repr((a, b, c, d, more))

    episode = Tools(Kinds())
    given = [{"a": 3, "b": None}, {"a": "3.5", "b": "4"}, {"a": 1, "c": 2024, "e": [1]}]
    given += [{"a": 1, "d": 3}, {"a": []}]
    replies = episode.reply(say("", tool_calls=[call("show", **one) for one in given]))
    texts = [reply["content"] for reply in replies]
    assert texts[:3] == [
        "(3, None, '', 1, {})",
        "(3.5, 4, '', 1, {})",
        "(1, None, '2024', 1, {'e': [1]})",
    ]
    assert texts[3].startswith("error: show: d=3: Input should be 1 or 2")
    assert texts[4].startswith("error: show: a=[]: Input should be a valid number")


def test_tools_get_numbers_of_their_type():
    """JSON has 4.0 for 4, and models write numbers as text."""

    class Counts(Adder):
        def dots(self, n: int, more: list[int]):
            """
            Draw.

            Args:
                n: how many
                more: others
            """
            return "." * n + "," * sum(more)

    episode = Tools(Counts())
    given = call("dots", n=4.0, more=["1", "2"])
    (reply,) = episode.reply(say("", tool_calls=[given]))
    assert reply["content"] == "....,,,"


def test_calls_run_in_parallel_and_answer_in_order(adder):
    adder.environment.met = threading.Barrier(
        3, timeout=60
    )  # one behind the other would never meet
    replies = adder.reply(say("", tool_calls=[call("meet", who=who) for who in "abc"]))
    assert [reply["content"] for reply in replies] == ["a met", "b met", "c met"]


def test_a_tool_that_raises_answers_the_model(tokenizer, tmp_path):
    """As TRL's and OpenEnv's games do it; how often it happened is shown."""
    episode = Tools(Adder())
    episode.start(ROW, 7)
    numbers = (14, 14, 7)
    replies = [episode.reply(say("", tool_calls=[call("add", number=n)])) for n in numbers]
    assert [reply[0]["content"] for reply in replies] == ["error: Game over."] * 2 + ["10"]
    assert episode.reward() == 1.0
    assert episode.components() == {"tool_errors": pytest.approx(2 / 3)}
    (tmp_path / "rows.jsonl").write_text('{"a": 1}\n{"a": 2}\n')
    path = str(tmp_path / "rows.jsonl")
    assert "tool_errors" in build_task(f"{__name__}:Adder", {}, path=path).shown


class Limits:
    call_seconds, max_turns, reply_tokens, overlap = 0.3, 5, 99, False


def test_a_crash_and_a_hang_end_their_episodes_alone(tokenizer):
    written = [
        '<tool_call>{"name": "add", "arguments": {"number": 13}}</tool_call>',
        '<tool_call>{"name": "meet", "arguments": {"who": "a"}}</tool_call>',
        '<tool_call>{"name": "add", "arguments": {"number": 1}}</tool_call>',
        '<tool_call>{"name": "add", "arg</tool_call>',
        "Done.",
    ]
    rows = []
    for text in written:
        episode = Tools(Adder())
        episode.start(ROW, 7)
        ids = tokenizer(f"{text}<|im_end|>")["input_ids"]
        rows.append(Row(0, 0, 0, episode, ids, [0.0] * len(ids), [True] * len(ids), turns=1))
    turns = Turns(Limits, Decoder(tokenizer), (), Calls.find(tokenizer, schemas(Adder)))
    Replies(rows, turns, Requests(prompts=[[1]])).add(200)
    assert [row.stop for row in rows] == ["tool_error", "tool_timeout", None, None, "completed"]
    assert "Adder.add raised ConnectionResetError: gone" in str(rows[0].error)
    added = [
        tokenizer.decode([t for t, drawn in zip(row.tokens, row.written, strict=True) if not drawn])
        for row in rows
    ]
    assert added[0] == added[1] == added[4] == ""
    assert "<|im_start|>tool\n4<|im_end|>" in added[2]
    assert "<|im_start|>tool\nerror: the call cannot be read: " in added[3]


class Undescribed:
    reward = 0.0

    def reset(self, seed):
        return ""

    def move(self, where):
        return where


def test_a_tool_without_a_description_is_refused():
    with pytest.raises(ConfigError, match="needs types and a docstring in Google's style"):
        schemas(Undescribed)


def test_an_object_without_a_reward_is_refused():
    free = type("Free", (), {"reset": Adder.reset, "add": Adder.add})
    episode = adapter(free)(free())
    with pytest.raises(
        ConfigError, match=r"Free has neither get_reward\(\) nor an attribute reward"
    ):
        episode.reward()
    episode.environment.reward = 0.5  # as where reset sets it
    assert episode.reward() == 0.5


def test_a_reward_that_is_no_number_is_an_error():
    episode = Tools(Adder(), (0.0, 1.0))
    episode.environment.get_reward = lambda: "good"
    with pytest.raises(ConfigError, match=r"Adder\.get_reward raised ValueError"):
        episode.reward()


def test_components_that_cannot_be_shown_are_one_warning_each(caplog):
    class Shows(Adder):
        components = {"part": 0.0, "odd": 0.0}  # noqa: RUF012

    for _ in range(2):
        episode = Tools(Shows())
        episode.environment.components = {"part": 0.5, "odd": float("nan"), "other": 1.0}
        assert episode.components() == {"part": 0.5, "tool_errors": 0.0}
    assert caplog.text.count("the component 'odd' is no finite number and is left out") == 1
    assert caplog.text.count("does not declare the component 'other'") == 1


class Hits:
    components = {"hit": 0.0}  # noqa: RUF012 (as people write it)

    def reset(self, seed):
        return f"go {seed}", {}

    def step(self, text):
        if text == "hit":
            self.components["hit"] = 1.0
        return "on", 0.0, True, False, {}


def test_an_episode_does_not_begin_with_the_components_of_another():
    seen = []
    for text in ("hit", "miss"):
        episode = TextSteps(Hits())
        episode.start(SEED, 7)
        episode.reply(say(text))
        seen.append(episode.components())
    assert seen == [{"hit": 1.0}, {"hit": 0.0}]
    assert Hits.components == {"hit": 0.0}


def test_an_environment_that_cannot_be_closed_is_one_warning(caplog):
    def close():
        raise OSError("busy")

    episode = Tools(Adder())
    episode.environment.close = close
    episode.close()
    episode.close()
    assert [record.getMessage() for record in caplog.records] == [
        "Adder.close raised OSError: busy"
    ]


# --- what a model writes

HERMES_CHAT = """{% if tools %}<|im_start|>system
{% for tool in tools %}{{ tool | tojson }}
{% endfor %}<|im_end|>
{% endif %}{% for m in messages %}<|im_start|>{{ m['role'] }}
{{ m['content'] }}{% for call in m['tool_calls'] or [] %}<tool_call>
{{ call['function'] | tojson }}
</tool_call>{% endfor %}<|im_end|>
{% endfor %}{% if add_generation_prompt %}<|im_start|>assistant
{% endif %}"""


@pytest.fixture
def tokenizer(shared_data):
    tokenizer = AutoTokenizer.from_pretrained(shared_data / "smollm2-135m-instruct")
    tokenizer.chat_template = HERMES_CHAT
    return tokenizer


def test_the_form_of_calls_follows_the_template(tokenizer):
    tools = schemas(Adder)
    found = Calls.find(tokenizer, tools).template["fields"]["tool_calls"]
    assert found is FORMS["JSON in <tool_call>"]
    tokenizer.response_template = {"fields": {"content": {}}}
    assert Calls.find(tokenizer, tools).template == {"fields": {"content": {}}}
    tokenizer.response_template = None
    tokenizer.chat_template = HERMES_CHAT.replace("tool | tojson", "''")
    with pytest.raises(ConfigError, match="cannot call tools"):
        Calls.find(tokenizer, tools)
    tokenizer.chat_template = None
    with pytest.raises(ConfigError, match="tools need a chat template"):
        Calls.find(tokenizer, tools)


@pytest.mark.parametrize(
    ("text", "calls"),
    [
        ("It is 7.", None),
        ('Well.<tool_call>\n{"name": "add", "arguments": {"number": 7}}\n</tool_call>', [7]),
        (
            '<tool_call>{"name": "add", "arguments": {"number": "1"}}</tool_call>\n'
            '<tool_call>{"name": "add", "arguments": {"number": 2}}</tool_call>',
            [1, 2],
        ),
        ('<tool_call>{"name": "add", "argu</tool_call>', "error"),
        ('<tool_call>{"arguments": {}}</tool_call>', "error"),
        ("<tool_call>[1]</tool_call>", "error"),
        ('<tool_call>{"name": "add", "arguments": [1]}</tool_call>', "error"),
        ("<tool_call>" * 50, "error"),
        (
            '<think>Perhaps <tool_call>{"name": "add", "arguments": {"number": 1}}</tool_call>'
            '</think><tool_call>{"name": "add", "arguments": {"number": 2}}</tool_call>',
            [2],
        ),
        ('<think><tool_call> or not?</think><tool_call>{"name": "add", "argu', "error"),
        (
            "<think>I could use <tool_call>.</think>"
            '<tool_call>{"name": "add", "arguments": {"number": 3}}</tool_call>',
            [3],
        ),
        ('<think><tool_call>{"name": "add", "arguments": {"number": 1}}</tool_call>', None),
    ],
)
def test_calls_are_read_or_said_to_be_malformed(tokenizer, text, calls):
    message = Calls.find(tokenizer, schemas(Adder)).read(tokenizer(text)["input_ids"], [])
    if calls == "error":
        assert message["error"].startswith("the call cannot be read: ")
    else:
        numbers = [one["function"]["arguments"]["number"] for one in message.get("tool_calls", [])]
        assert numbers == (calls or [])
        assert "error" not in message


def test_replies_of_tools_are_rendered_behind_what_was_sampled(tokenizer):
    tools = schemas(Adder)
    (stop,) = tokenizer("<|im_end|>")["input_ids"]
    check_template(tokenizer, [stop], tools)
    turns = Turns(None, Decoder(tokenizer), (), Calls.find(tokenizer, tools))
    reply = [{"role": "tool", "name": "add", "content": "10"}]
    said = tokenizer.decode(turns.render(reply, stop))
    assert said == "\n<|im_start|>tool\n10<|im_end|>\n<|im_start|>assistant\n"
    tokenizer.chat_template = HERMES_CHAT.replace(
        "{{ m['content'] }}", "{% if m['role'] != 'tool' %}{{ m['content'] }}{% endif %}"
    )
    with pytest.raises(ConfigError, match="cannot be used for several turns"):
        check_template(tokenizer, [stop], tools)


class Scripted:
    """An engine that writes what it is told to."""

    separate = False

    def __init__(self, tokenizer, turns):
        self.tokenizer, self.turns = tokenizer, iter(turns)

    def generate(self, requests, sampling, watch=None):
        self.asked = requests.prompts
        rows = [self.tokenizer(f"{text}<|im_end|>")["input_ids"] for text in next(self.turns)]
        length = max(map(len, rows))
        return Completions(
            tokens=torch.tensor([ids + [0] * (length - len(ids)) for ids in rows]),
            lengths=torch.tensor([len(ids) for ids in rows]),
            finished=torch.tensor([True] * len(rows)),
            logprobs=None,
            broken=torch.tensor([False] * len(rows)),
        )


def test_an_episode_with_tools(tokenizer, tmp_path):
    """One answer calls two tools, one calls what cannot be read and then gives up, one says it at
    once.
    """
    rows = [{"prompt": "Make it ten. ", "a": 3 + row} for row in range(6)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    path = str(tmp_path / "rows.jsonl")
    task = build_task(f"{__name__}:Adder", {}, path=path, reply_tokens=80)
    examples = task.examples("train")
    assert task.prompt(examples[2])[-1]["content"] == "Make it ten. The number is 5."
    prompts = encode_prompts(tokenizer, [task.prompt(example) for example in examples])
    assert "Add to the number." in tokenizer.decode(prompts[0]), "the model sees the tools"
    add = '<tool_call>{"name": "add", "arguments": {"number": %d}}</tool_call>'
    engine = Scripted(tokenizer, [[add % 4 + add % 3, add % 1 + "<tool_call>{", "10"], ["10", "?"]])
    requests = Requests(prompts=prompts, episodes=Turns.of(task, Decoder(tokenizer), examples))
    sampling = SamplingConfig.uncut(90, 1.0)
    completions = play(engine, requests, sampling)
    assert [text.stop for text in completions.played] == ["completed"] * 3
    assert [text.reward for text in completions.played] == [1.0, 0.0, 0.0]
    assert [text.turns for text in completions.played] == [2, 2, 1]
    first = tokenizer.decode(engine.asked[0])
    assert first.endswith(
        "<|im_start|>tool\n7<|im_end|>\n<|im_start|>tool\n10<|im_end|>\n<|im_start|>assistant\n"
    )
    for row, text in enumerate(completions.played):
        ids = completions.tokens[row, : completions.lengths[row]]
        drawn = tokenizer.decode(ids[completions.written[row, : len(ids)]])
        assert "tool\n" not in drawn
        assert "error: the call cannot be read" not in drawn
        assert ("error: the call cannot be read" in text) == (row == 1)


def test_a_model_calls_a_tool(tmp_path):
    settings = write_caller(tmp_path)
    run = compose(["algo=grpo", "algo.prompts_per_step=2", *settings])
    parts = open_parts(run, Context(0, 1, hardware.find(run.hardware), tmp_path))
    examples = parts.task.examples("train")
    rollouter = replace(parts.rollouter, sampling=SamplingConfig.uncut(90, 0.0))
    played = rollouter.roll_out(examples, rollouter.request(examples))
    assert [text.stop for text in played.texts] == ["completed"] * 2
    assert played.scored.rewards == [0.0, 1.0]
    assert list(played.texts) == [f"{CALL}t:{a + 7}a:done" for a in (2, 3)]
    drawn = [ids[written] for ids, written in zip(played.tokens, played.written, strict=True)]
    assert [parts.lm.tokenizer.decode(ids) for ids in drawn] == [f"{CALL}<eos>done<eos>"] * 2
    parts.close()


# --- the packages


def build_task(factory: str, settings: dict, **more):
    return build(
        {
            "_target_": "plugins.environments.task.Environment",
            "factory": factory,
            "settings": settings,
            "problems": 3,
            "test_problems": 2,
            "max_turns": 3,
            "reply_tokens": 30,
            **more,
        }
    )


def test_a_game_of_gem():
    pytest.importorskip("gem")
    task = build_task("gem:make", {"env_id": "game:GuessTheNumber-v0-easy"}, scale=[-0.1, 1.0])
    for example in task.examples("train"):
        plays = [task.episode(example) for _ in range(2)]
        for episode in plays:
            assert episode.start(example, example.extra["seed"]) == task.prompt(example)
        numbers = {episode.environment.unwrapped.game_number for episode in plays}
        assert len(numbers) == 1, "it follows from the seed"
        assert plays[0].reply(say("I do not know")) is None
        assert plays[0].reward() == 0.0
        assert plays[1].reply(say(f"\\boxed{{{numbers.pop()}}}")) is None
        assert plays[1].reward() == pytest.approx(1.0)


def test_environments_get_rows_unchanged(tmp_path):
    rest = {"info": {}, "deep": {"x": [1], "y": {"z": None}}}
    rows = [{"a": number, **rest} for number in (3, 5, 7, 9)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    (tmp_path / "rows.csv").write_text("a,a.b\n3,4\n5,6\n7,8\n9,10\n")
    for name, row in (("rows.jsonl", rows[0]), ("rows.csv", {"a": "3", "a.b": "4"})):
        task = build_task(f"{__name__}:Skyrl", {}, path=str(tmp_path / name))
        assert task.examples("train")[0].extra["row"] == row


def test_one_row_leaves_none_to_hold_out(tmp_path):
    for rows in (1, 9):
        (tmp_path / "rows.jsonl").write_text('{"a": 3}\n' * rows)
        with pytest.raises(
            ConfigError, match=r"no row is left to train on.* begins without a seed"
        ):
            build_task(f"{__name__}:Skyrl", {}, path=str(tmp_path / "rows.jsonl"))


def test_an_environment_of_skyrl_gym(tmp_path):
    pytest.importorskip("skyrl_gym")
    prompt = [{"role": "user", "content": "3 + 4?"}]
    row = {"prompt": prompt, "reward_spec": {"ground_truth": "7"}}
    rows = [json.dumps(row | {"number": number}) for number in range(4)]
    (tmp_path / "rows.jsonl").write_text("\n".join(rows) + "\n")
    path = str(tmp_path / "rows.jsonl")
    task = build_task("skyrl_gym.envs.gsm8k.env:GSM8kEnv", {}, path=path)
    (example, *_) = task.examples("train")
    assert task.prompt(example) == prompt
    for answer, earned in (("#### 7", 1.0), ("#### 8", 0.0)):
        episode = task.episode(example)
        episode.start(example, 0)
        assert episode.reply(say(answer)) is None
        assert episode.reward() == earned


def test_an_environment_of_tinker():
    message_env = pytest.importorskip("tinker_cookbook.rl.message_env")

    class Count(message_env.MessageEnv):
        async def initial_observation(self):
            self.history = [{"role": "user", "content": "Count to two."}]
            return self.history

        async def step(self, message):
            over = message["content"] == "2"
            self.history = [*self.history, message, {"role": "user", "content": "Go on."}]
            return message_env.MessageStepResult(float(over), over, self.history)

    episode = TextSteps(Count())
    assert episode.start(SEED, 7) == [{"role": "user", "content": "Count to two."}]
    assert episode.reply(say("1")) == [{"role": "user", "content": "Go on."}]
    assert episode.reply(say("2")) is None
    assert episode.reward() == 1.0


@pytest.fixture
def task_sets(monkeypatch):
    """Task sets of verifiers, as attributes of this module."""
    vf = pytest.importorskip("verifiers.v1", reason="needs pip install verifiers==0.4.0")

    class Sum(vf.TaskData):
        answer: str

    class Config(vf.TasksetConfig):
        most: int = 3

    class Add(vf.Task[Sum]):
        @vf.reward(weight=0.75)
        async def right(self, task, trace) -> float:
            return float(trace.last_reply == task.answer)

        @vf.reward(weight=0.25)
        async def short(self, trace) -> float:
            return float(len(trace.messages[-1].content) < 3)

        @vf.reward
        async def ran(self, trace, runtime) -> float:
            raise AssertionError("there is no runtime")

        @vf.metric
        async def digits(self, trace) -> float:
            return float(trace.last_reply.isdigit())

    class Sums(vf.Taskset[Add, Config]):
        INFINITE = True

        def load(self):
            for number in itertools.count(1):
                prompt = f"{self.config.most} + {number}?"
                told = "Be short." if number == 1 else None
                answer = str(self.config.most + number)
                yield Add(Sum(prompt=prompt, system_prompt=told, answer=answer))

    def of_one(**members):
        task = type("One", (vf.Task,), members)
        data = vf.TaskData(prompt=members.get("prompt", "?"), image=members.get("image"))
        return type("Ones", (vf.Taskset,), {"load": lambda self: [task(data)]})

    async def score(self, trace):
        return 1.0

    async def score_in(self, trace, runtime):
        return 1.0

    async def set_up(self, trace, runtime):
        return None

    reward, in_runtime = vf.reward(score), vf.reward(score_in)
    sets = {
        "Sums": Sums,
        "Contained": of_one(reward=reward, NEEDS_CONTAINER=True),
        "Prepared": of_one(reward=reward, setup=set_up),
        "Unscored": of_one(reward=in_runtime),
        "Served": of_one(reward=reward, toolsets=classmethod(lambda cls, config: ["search"])),
        "Silent": of_one(reward=reward, prompt=None),
        "Empty": type("Ones", (vf.Taskset,), {"load": lambda self: []}),
    }
    for name, task_set in sets.items():
        monkeypatch.setattr(sys.modules[__name__], name, task_set, raising=False)


def test_a_task_set_of_verifiers(task_sets, caplog):
    task = build_task(f"{__name__}:Sums", {"most": 5})
    assert "Sums: left out, as they need a runtime: ran" in caplog.text
    train, test = (task.examples(split) for split in ("train", "test"))
    assert [task.prompt(one)[-1]["content"] for one in train] == ["5 + 1?", "5 + 2?", "5 + 3?"]
    assert [task.prompt(one)[-1]["content"] for one in test] == ["5 + 4?", "5 + 5?"]
    assert [one["role"] for one in task.prompt(train[0])] == ["system", "user"]
    assert task.shown == ("digits",)
    for answer, earned, digits in (("6", 1.0, 1.0), ("It is 6", 0.0, 0.0), ("7", 0.25, 1.0)):
        episode = task.episode(train[0])
        assert episode.start(train[0], 0) == task.prompt(train[0])
        assert episode.reply(say(answer)) is None
        assert episode.reward() == earned
        assert episode.components() == {"digits": digits}
    cut = task.episode(train[0])
    assert cut.reward() == 0.0, "an answer that was cut off is not scored"


@pytest.mark.parametrize(
    ("name", "why"),
    [
        ("Contained", "needs a container"),
        ("Prepared", r"needs a runtime, for setup\(\) or finalize\(\)"),
        ("Unscored", "needs a runtime, for all of its rewards"),
        ("Served", "needs a server of tools"),
        ("Silent", "needs a prompt that is text"),
        ("Empty", "is empty"),
    ],
)
def test_a_task_set_that_needs_more_is_refused(task_sets, name, why):
    with pytest.raises(ConfigError, match=f"the task set Ones {why}. Give one whose tasks score"):
        build_task(f"{__name__}:{name}", {})


def test_an_environment_of_openenv_here_and_behind_a_url():
    pytest.importorskip("openenv.core.env_server", reason="needs pip install openenv==0.10.0")
    from tests.support.serving import Client, Numbers, serving

    with serving(1) as url:
        for environment in (Numbers(), Client(base_url=url)):
            episode = TextSteps(environment)
            assert episode.start(SEED, 7) == [{"role": "user", "content": "Which number?"}]
            assert episode.reply(say("6")) == [{"role": "user", "content": "Another one."}]
            assert episode.reply(say('{"number": "7"}')) is None
            assert episode.reward() == 1.0
            episode.close()
