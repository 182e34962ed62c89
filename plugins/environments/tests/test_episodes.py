"""Episodes of several turns against one forward, against episodes played alone, and templates."""

import gc
import json
import pickle
import time
from dataclasses import replace
from threading import Barrier, Event

import numpy as np
import pytest
import torch
from transformers import AutoTokenizer

from common.config import ConfigError
from common.device import hardware
from common.distributed import Context
from common.engine import Population, Requests
from common.episodes import Played, Turns, check_template, episodes
from common.episodes.episodes import MOST_LATE
from common.examples import fit_prompts
from common.finetune import Tree, token_losses
from common.memory import FITTED, RolloutMemory, cache_bytes, count_state
from common.memory.fitting import EPISODES
from common.model import Decoder, byte_tokenizer, context_length
from common.parts import open_parts
from common.sampling import TurnCache
from common.system import RunStopped
from common.task import build, digest
from common.tasks import SideBySide, timeouts
from eggroll.noise import Noise
from grpo.loss import Counts, policy_loss
from launch import compose
from plugins.environments.adapters import scaled
from plugins.environments.games import Guess
from rft.generate import find_runs, find_written
from tests.support import SMALL_GRPO

SETTINGS = ["task=guess", "model.tiny.pretrain_steps=0", "algo.sampling.max_new_tokens=12"]


@pytest.fixture
def parts(in_cache, tmp_path):
    """A random model whose answers are short: most tokens end one."""
    run = compose([*SMALL_GRPO, *SETTINGS, "algo.sampling.temperature=1.0"])
    opened = open_parts(run, Context(0, 1, hardware.find(run.hardware), tmp_path))
    opened.engine.stop_ids = torch.arange(150)
    yield opened
    opened.close()


def play(parts, count: int = 6, **asked):
    examples = parts.examples.order.take(0, count)
    return parts.rollouter.roll_out(
        examples, parts.rollouter.request(examples, logprobs=True, **asked)
    )


def test_what_the_model_drew_has_the_probabilities_of_one_forward(parts):
    rollout = play(parts, samples=2)
    turns = {text.turns for text in rollout.texts}
    assert max(turns) > 1, "some episodes have several turns"
    assert rollout.tokens.shape[1] == 12 + parts.examples.reply_tokens
    for row in range(len(rollout.texts)):
        prompt = rollout.requests.prompts[row // 2]
        length = int(rollout.lengths[row])
        ids = torch.tensor([[*prompt, *rollout.tokens[row, :length].tolist()]])
        logp = parts.lm.model(input_ids=ids).logits[0, len(prompt) - 1 : -1].float().log_softmax(-1)
        wanted = logp.gather(1, ids[0, len(prompt) :, None])[:, 0].detach()
        written = rollout.written[row, :length]
        assert torch.allclose(rollout.logprobs[row, :length][written], wanted[written], atol=1e-5)
        assert not rollout.logprobs[row][~rollout.written[row]].any()
        assert written.sum() <= 12
        replies = rollout.texts[row].turns - 1
        # "higher" or "lower", two line breaks before it and one behind it
        assert 8 * replies <= int((~written).sum()) <= 9 * replies


def test_an_episode_does_not_depend_on_its_neighbours(parts):
    together = play(parts, samples=3, draw=2)
    parts.engine.row_limit.rows = 2
    few = play(parts, samples=3, draw=2)
    assert torch.equal(together.tokens, few.tokens)
    alone = play(parts, 1, samples=1, first_sample=2, draw=2)
    assert torch.equal(alone.tokens[0], together.tokens[2])
    assert torch.equal(alone.written[0], together.written[2])


def test_halves_that_take_turns_play_the_same_episodes(parts):
    one = play(parts, samples=3, draw=2)
    parts.task.own.overlap = True
    two = play(parts, samples=3, draw=2)
    assert torch.equal(one.tokens, two.tokens)
    assert one.texts == two.texts
    assert [text.stop for text in one.texts] == [text.stop for text in two.texts]
    asked = parts.rollouter.request(parts.examples.order.take(0, 6), samples=3, draw=2)
    members = parts.rollouter.sample(replace(asked, population=Population(members=2)))
    assert members.played == one.texts * 2


def forwards(parts, monkeypatch):
    """Note [rows, width] of each prefill from now on."""
    seen = []

    def note(_, args, kwargs):
        if kwargs["input_ids"].shape[1] > 1:
            seen.append(tuple(kwargs["input_ids"].shape))

    parts.lm.model.register_forward_pre_hook(note, with_kwargs=True)
    return seen


@pytest.mark.parametrize("members", [1, 2])
@pytest.mark.parametrize("rows", [2, 64])
def test_a_turn_prefills_what_is_new(parts, members, rows, monkeypatch):
    """In few slots and in many; the samples are those of whole prefills."""
    seen, played = forwards(parts, monkeypatch), {}
    parts.engine.row_limit.rows = rows
    examples = parts.examples.order.take(0, 6)
    asked = parts.rollouter.request(examples, samples=2, logprobs=True)
    if members > 1:
        asked = replace(asked, population=Population(members=members))
    longest = max(map(len, asked.prompts))
    for kept in (12 * members, 12 * members - 1):  # one too few: nothing is kept
        parts.engine.row_limit.cached_episodes = kept
        seen.clear()
        played[kept] = parts.rollouter.sample(asked)
        widest = max(width for _, width in seen)
        assert (widest > longest) == (kept < 12 * members)
    one, other = played.values()
    assert max(text.turns for text in one.played) > 2
    assert torch.equal(one.tokens, other.tokens)
    assert torch.allclose(one.logprobs, other.logprobs, rtol=0, atol=1e-5)


def test_kept_turns_contain_the_members_noise(parts):
    """Members play apart, and as they do with whole prefills, where lower blocks have no noise."""
    config = compose(["algo=eggroll", "hardware=cpu"]).algo.noise
    noise = Noise(
        parts.lm.model, replace(config, patterns={"lower": "frozen"}), rank=1, mirrored=True, seed=3
    )
    assert noise.trunk
    parts.engine.stop_ids = torch.arange(40)  # some answers fill max_new_tokens in their first turn
    asked = parts.rollouter.request(parts.examples.order.take(0, 6), samples=2)
    played = []
    for kept in (48, 0):
        parts.engine.row_limit.cached_episodes = kept
        with noise.members(1, range(4), 3.0) as population:
            played.append(parts.rollouter.sample(replace(asked, population=population)))
    one, other = played
    assert torch.equal(one.tokens, other.tokens)
    assert len(one.tokens.view(4, -1).unique(dim=0)) == 4, "members differ"


def test_what_is_kept_goes_when_memory_runs_out(parts, monkeypatch):
    """The turn is sampled once more, with whole prefills, and so are those that follow."""
    wanted, row_limit = play(parts, samples=2), parts.engine.row_limit
    seen, write, fails = forwards(parts, monkeypatch), TurnCache.write, [False, False, True]

    def run_out(*given):
        if fails and fails.pop(0):
            raise torch.OutOfMemoryError("planted")
        write(*given)

    monkeypatch.setattr(TurnCache, "write", run_out)
    rows = row_limit.rows
    made = play(parts, samples=2)
    assert not fails
    assert torch.equal(made.tokens, wanted.tokens)
    assert (row_limit.rows, row_limit.cached_episodes) == (rows // 2, 0)
    assert max(width for _, width in seen) > max(map(len, made.requests.prompts))


def test_a_plan_counts_the_keys_that_are_kept(parts, monkeypatch):
    """So many episodes keep theirs as there is memory for, on a small device none."""
    state = count_state(parts, True)
    memory = RolloutMemory(parts, state, each=12)
    assert parts.engine.row_limit.cached_episodes >= 12
    whole = memory.sampling_bytes(12, 1)
    parts.engine.row_limit.cached_episodes = 11
    tokens = parts.examples.longest_prompt + 12 + parts.examples.reply_tokens
    one = cache_bytes(parts.lm.model.config, 4)
    assert whole - memory.sampling_bytes(12, 1) == 12 * tokens * one
    enough = (memory.fixed + memory.sampling_bytes(12, 1)) / FITTED / 2**30
    monkeypatch.setattr(Context, "memory_gb", property(lambda _: enough))
    RolloutMemory(parts, state, each=12)
    assert parts.engine.row_limit.cached_episodes < 12


def test_a_plan_counts_the_keys_of_what_is_measured_beside(in_cache, tmp_path, monkeypatch):
    run = compose([*SMALL_GRPO, "evaluate.also=[guess]"])
    parts = open_parts(run, Context(0, 1, hardware.find(run.hardware), tmp_path))
    state = count_state(parts, True)
    memory = RolloutMemory(parts, state, each=12)
    assert parts.engine.row_limit.cached_episodes <= EPISODES, (
        "as many as fit, and not as many as there are"
    )
    enough = (memory.fixed + memory.sampling_bytes(12, 1)) / FITTED / 2**30
    monkeypatch.setattr(Context, "memory_gb", property(lambda _: enough))
    RolloutMemory(parts, state, each=12)
    assert parts.engine.row_limit.cached_episodes < len(parts.extras.others[0].examples)
    parts.close()


def test_members_come_to_prompts_of_their_own(parts):
    """Two members that are the same model play the same episodes, however many turns each has."""
    one = play(parts, samples=2)
    examples = parts.examples.order.take(0, 6)
    asked = parts.rollouter.request(examples, samples=2, logprobs=True)
    two = parts.rollouter.sample(replace(asked, population=Population(members=2)))
    for half in (two.tokens[:12], two.tokens[12:]):
        assert torch.equal(half.cpu(), one.tokens)
    assert two.played == one.texts * 2


def test_prompts_of_members_are_sampled_apart(parts):
    prompts = [[65, 66], [67, 68, 69], [70], [71, 72]]
    keys = {"ids": [3, 1, 4, 1], "begun": [(0, 0), (1, 5), (2, 3), (3, 0)], "logprobs": True}
    sampling = parts.run.algo.sampling
    together = parts.engine.generate(
        Requests(prompts=prompts, population=Population(members=2), apart=True, **keys), sampling
    )
    for row, prompt in enumerate(prompts):
        one = {key: value[row : row + 1] for key, value in keys.items() if key != "logprobs"}
        alone = parts.engine.generate(Requests(prompts=[prompt], **one), sampling)
        assert torch.equal(together.tokens[row], alone.tokens[0])


def test_replies_have_no_gradient(parts):
    rollout = play(parts)
    mask = rollout.written
    logp = torch.randn(mask.shape, requires_grad=True)
    counts = Counts(len(mask), int(mask.sum()), 1)
    advantage = torch.randn(len(mask))
    loss, _ = policy_loss(logp, logp.detach() - 0.1, advantage, mask, counts, parts.run.algo)
    loss.backward()
    assert (logp.grad[~mask] == 0).all()
    assert (logp.grad[mask] != 0).any()


def test_fine_tuning_has_the_losses_of_the_models_tokens_alone(parts):
    rollout = play(parts, 3, samples=2)
    trees, wanted = [], []
    for prompt in range(3):
        rows = (2 * prompt, 2 * prompt + 1)
        ids = [rollout.tokens[row, : rollout.lengths[row]].tolist() for row in rows]
        told = [find_runs(~rollout.written[row, : rollout.lengths[row]]) for row in rows]
        records = [{"tokens": t, "told": r} for t, r in zip(ids, told, strict=True)]
        masks = [find_written(record) for record in records]
        for row, mask in zip(rows, masks, strict=True):
            assert mask == rollout.written[row, : len(mask)].tolist()
            wanted.append(-rollout.logprobs[row][rollout.written[row]])
        trees.append(Tree(rollout.requests.prompts[prompt], ids, masks))
    losses = token_losses(parts.lm.model, trees, parts.lm.device, torch.float32)
    assert torch.allclose(losses, torch.cat(wanted), atol=1e-5)
    assert sum(tree.targets for tree in trees) == len(losses) == rollout.generated


def test_episodes_end_with_a_reason_and_a_reward(parts):
    rollout = play(parts, 6, samples=4)
    stops = {text.stop for text in rollout.texts}
    assert "max_tokens" in stops
    assert [text.stop == "environment_done" for text in rollout.texts] == rollout.finished.tolist()
    assert rollout.scored.rewards == [text.reward for text in rollout.texts]
    sent = pickle.loads(pickle.dumps(rollout.texts))
    assert [(t, t.reward, t.stop, t.turns) for t in sent] == [
        (t, t.reward, t.stop, t.turns) for t in rollout.texts
    ]


def test_replies_that_do_not_fit_end_an_episode(parts):
    parts.task.own.reply_tokens = 9
    texts = play(parts, 6, samples=4).texts
    assert all(text.turns <= 2 for text in texts)
    assert "reply_tokens" in {text.stop for text in texts}
    parts.task.own.reply_tokens, parts.task.own.max_turns = 48, 1
    assert {text.stop for text in play(parts, 6, samples=4).texts} <= {
        "max_turns",
        "max_tokens",
        "environment_done",
    }


# --- templates


CHAT = (
    "{% for m in messages %}<|im_start|>{{ m['role'] }}\n{{ m['content'] }}<|im_end|>\n{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
)


@pytest.fixture
def smollm2(shared_data):
    tokenizer = AutoTokenizer.from_pretrained(shared_data / "smollm2-135m-instruct")
    tokenizer.chat_template = tokenizer.chat_template or CHAT
    return tokenizer


def test_turns_have_the_tokens_of_the_whole_conversation(smollm2):
    (stop,) = smollm2("<|im_end|>")["input_ids"]
    check_template(smollm2, [stop])
    turns = Turns(None, Decoder(smollm2), ())
    reply = [{"role": "user", "content": " 7 + 8?\n"}]
    text = smollm2.decode(turns.render(reply, stop))
    assert text == "\n<|im_start|>user\n 7 + 8?\n<|im_end|>\n<|im_start|>assistant\n"
    assert turns.render(reply, None)[0] == stop


def test_a_template_that_changes_earlier_turns_is_refused(smollm2):
    first = "{% if loop.last and m['role'] == 'user' %}!{% endif %}"
    smollm2.chat_template = CHAT.replace("{{ m['content'] }}", first + "{{ m['content'] }}")
    stops = smollm2("<|im_end|>")["input_ids"]
    with pytest.raises(ConfigError, match="cannot be used for several turns"):
        check_template(smollm2, stops)
    smollm2.chat_template = "{{ raise_exception('one turn only') }}"
    with pytest.raises(ConfigError, match=r"cannot be used for several turns: .*one turn only"):
        check_template(smollm2, stops)


def test_plain_text_has_replies_between_line_breaks():
    turns = Turns(None, Decoder(byte_tokenizer()), ())
    ids = turns.render([{"role": "user", "content": "lower"}], 257)
    assert bytes(ids) == b"\n\nlower\n"


def test_an_environment_is_measured_beside_a_task_of_one_turn(in_cache, tmp_path):
    run = compose([*SMALL_GRPO, "evaluate.also=[guess]"])
    parts = open_parts(run, Context(0, 1, hardware.find(run.hardware), tmp_path))
    assert {"guess/success", "guess/reward", "guess/done"} <= set(parts.evaluate().metrics)
    parts.close()


# --- environments


class Odd:
    """An environment with one thing that is wrong."""

    def __init__(self, wrong: str = "") -> None:
        self.wrong, self.resets = wrong, 0

    count = closed = 0
    go_on = Event()

    def reset(self, seed: int):
        Odd.count += 1
        self.number = Odd.count
        if self.wrong == "starts" and Odd.count > 10:
            raise OSError("no route to host")
        if self.wrong == "waits" and Odd.count > 10:
            Odd.go_on.wait()
        if self.wrong == "nothing":
            return None, {}
        return f"go {Odd.count if self.wrong == 'chance' else seed}", {}

    def step(self, text: str):
        if self.wrong == "raises":
            raise KeyError("no such move")
        if self.wrong in ("three values", "text"):
            return "on" if self.wrong == "text" else ("on", 0.5, True)
        said = {"half a character": "\ud800", "megabytes": "on " * 1_000_000}.get(self.wrong, "on")
        goes_on = self.wrong in ("never", "half a character", "megabytes")
        return said, {"large": 2.0}.get(self.wrong, 0.5), not goes_on, False, {}

    @property
    def components(self):
        if self.wrong == "hangs":
            time.sleep(2)
        if self.wrong == "components" and self.number % 2:
            raise KeyError("a")
        return {}

    def close(self):
        Odd.closed += 1


class Seedless:
    def reset(self):
        return "", {}

    def step(self, text):
        return "", 0.0, True, False, {}


SETTING = {"_target_": "plugins.environments.task.Environment", "settings": {}, "problems": 4}
SETTING |= {"test_problems": 2, "max_turns": 3, "reply_tokens": 30, "factory": f"{__name__}:Odd"}


def test_held_out_rows_are_hashed_not_trained(tmp_path):
    path = tmp_path / "rows.jsonl"

    def read(*prompts: str):
        path.write_text("".join(json.dumps({"prompt": text}) + "\n" for text in prompts))
        return build(SETTING | {"path": str(path), "test_problems": 1})

    task = read("a", "b", "c", "b")
    assert [one.extra["row"]["prompt"] for one in task.examples("train")] == ["a", "c"]
    assert [one.extra["row"]["prompt"] for one in task.examples("test")] == ["b"]
    assert task.dropped == 1
    assert digest(task) == digest(read("a", "b", "c", "b")) != digest(read("a", "b", "d", "b"))


def test_where_all_rows_are_alike_seeds_are_held_out(tmp_path):
    """As in TRL's scripts, whose rows are one prompt a thousand times."""
    path = tmp_path / "rows.jsonl"
    for rows in (1, 1000):
        path.write_text('{"prompt": "a"}\n' * rows)
        task = build(SETTING | {"path": str(path)})
        seeds = {split: [e.extra["seed"] for e in task.examples(split)] for split in task.seeds}
        assert (len(seeds["train"]), len(seeds["test"])) == (4, 2)
        assert set(seeds["train"]).isdisjoint(seeds["test"])
        assert all(e.extra["row"] == {"prompt": "a"} for e in task.examples("test"))


@pytest.mark.parametrize(
    ("changed", "words"),
    [
        ({"factory": None}, "task.factory is not set. Give MODULE:CLASS"),
        ({"factory": "tests.support.leaving:Thing"}, "cannot be imported: SystemExit: 3."),
        ({"factory": "no.such:Thing"}, "task.factory='no.such:Thing' cannot be imported"),
        ({"factory": "json:JSONDecoder"}, "has neither reset(seed) and step(text)"),
        ({"factory": f"{__name__}:Seedless"}, "it begins without a seed and there are no rows"),
        ({"settings": {"rwong": ""}}, "task.settings={'rwong': ''} is not what Odd takes"),
        ({"problems": 0}, "task.problems=0 is too small."),
        ({"max_turns": 0}, "task.max_turns=0 is too small."),
    ],
)
def test_mistakes_of_an_environment_are_worded(changed, words):
    with pytest.raises(ConfigError) as caught:
        build(SETTING | changed)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("wrong", "words"),
    [
        ("raises", "Odd.step raised KeyError: 'no such move'"),
        ("chance", "begins with another prompt each time, although its seed is"),
        ("half a character", "a reply of Odd raised UnicodeEncodeError"),
        ("three values", "Odd.step returned ('on', 0.5, True). Return observation, reward,"),
        ("nothing", "Odd begins with None. Let it return a text, or messages."),
        ("text", "Odd.step returned 'on'. Return observation, reward,"),
    ],
)
def test_mistakes_of_an_episode_are_worded(wrong, words, parts):
    settings = {name: value for name, value in SETTING.items() if name != "_target_"}
    parts.task.own.__init__(**settings | {"settings": {"wrong": wrong}, "reply_tokens": 48})
    with pytest.raises(ConfigError) as caught:
        play(parts, 2, samples=8).scored  # noqa: B018
    assert words in str(caught.value)


def test_rewards_outside_the_scale_warn(parts, caplog):
    settings = {name: value for name, value in SETTING.items() if name != "_target_"}
    parts.task.own.__init__(**settings | {"settings": {"wrong": "large"}, "reply_tokens": 48})
    with caplog.at_level("WARNING", logger="clutch"):
        assert max(play(parts, 2, samples=8).scored.rewards) == 2
    assert caplog.text.count("Odd: an episode earned 2, outside task.scale=[0.0, 1.0]") == 1


def test_sums_of_float32_end_where_a_scale_does():
    for parts, share in (([0.1] * 10, 1.0), ([0.9, 0.1], 1.0), ([0.1, -0.1], 0.0)):
        earned = sum(np.float32(part) for part in parts)
        assert scaled("Odd", earned, [0.0, 1.0]) == share
    assert scaled("Odd", 1.0001, [0.0, 1.0]) == 1.0001


def test_a_prompt_alone_may_be_one_bad_row(parts, caplog):
    """As when the group of a prompt is replaced, or a rank has no other."""
    settings = {name: value for name, value in SETTING.items() if name != "_target_"}
    parts.task.own.__init__(**settings | {"settings": {"wrong": "raises"}, "reply_tokens": 48})
    assert set(play(parts, 1, samples=8).stops) == {"tool_error"}
    assert "8 of 8 episodes ended because their environment failed" in caplog.text


def test_an_episode_that_cannot_say_what_it_earned_ends_alone(parts, caplog):
    settings = {name: value for name, value in SETTING.items() if name != "_target_"}
    parts.task.own.__init__(**settings | {"settings": {"wrong": "components"}, "reply_tokens": 48})
    rollout = play(parts, 2, samples=8)
    failed = [stop == "tool_error" for stop in rollout.stops]
    assert sum(failed) == 8
    assert rollout.scored.unscored == failed
    assert "8 of 16 episodes ended because their environment failed" in caplog.text
    assert "the reward of Odd raised KeyError" in caplog.text


def test_an_episode_that_cannot_begin_ends_alone(parts, caplog, monkeypatch):
    monkeypatch.setattr(Odd, "count", 0)
    monkeypatch.setattr(Odd, "closed", 0)
    settings = {name: value for name, value in SETTING.items() if name != "_target_"}
    parts.task.own.__init__(**settings | {"settings": {"wrong": "starts"}, "reply_tokens": 48})
    rollout = play(parts, 2, samples=8)
    failed = [False] * 8 + [True] * 8  # 2 resets are for the prompts
    assert [stop == "tool_error" for stop in rollout.stops] == failed
    assert rollout.scored.unscored == failed
    assert "8 of 16 episodes ended because their environment failed" in caplog.text
    assert "Odd.reset raised OSError: no route to host" in caplog.text
    assert Odd.closed == 18, "those that did not begin, too"


@pytest.mark.thorough
def test_an_episode_that_does_not_begin_in_time_ends_alone(parts, caplog, monkeypatch):
    monkeypatch.setattr(Odd, "count", 0)
    monkeypatch.setattr(Odd, "closed", 0)
    monkeypatch.setattr(Odd, "go_on", Event())
    settings = {name: value for name, value in SETTING.items() if name != "_target_"}
    changed = {"settings": {"wrong": "waits"}, "reply_tokens": 48, "call_seconds": 2.0}
    parts.task.own.__init__(**settings | changed)
    held = count_kept()
    rollout = play(parts, 2, samples=8)
    late = [False] * 8 + [True] * 8
    assert [stop == "tool_timeout" for stop in rollout.stops] == late
    assert rollout.scored.unscored == late
    assert "did not begin within task.call_seconds=2" in caplog.text
    assert Odd.count == 10 + MOST_LATE, "the others are not waited for one by one"
    closed = Odd.closed
    Odd.go_on.set()
    until = time.monotonic() + 60
    while Odd.closed < closed + MOST_LATE and time.monotonic() < until:
        time.sleep(0.01)
    assert Odd.closed == closed + MOST_LATE, "each is closed once it has begun"
    assert count_kept() == held, "no error holds the rollout's keys and values"


def count_kept():
    gc.collect()
    return sum(isinstance(one, TurnCache) for one in gc.get_objects())


def test_an_episode_of_one_turn_needs_no_room_for_replies(parts):
    settings = {name: value for name, value in SETTING.items() if name != "_target_"}
    assert parts.examples.reply_tokens == 48
    parts.task.own.__init__(**settings | {"max_turns": 1})
    assert parts.examples.reply_tokens == 0
    rollout = play(parts, 2, samples=2)
    assert rollout.tokens.shape[1] == parts.run.algo.sampling.max_new_tokens
    assert set(rollout.stops) <= {"environment_done", "max_tokens"}
    room = context_length(parts.lm.model) - max(map(len, rollout.requests.prompts))
    fit_prompts(
        parts.run,
        parts.lm,
        parts.task.prompt,
        {"test": rollout.examples},
        room,
        parts.examples.turns,
    )


def test_environments_close_side_by_side(parts, monkeypatch, caplog):
    met = Barrier(24, timeout=60)  # one behind the other would never meet
    monkeypatch.setattr(episodes, "CLOSING", 100)
    monkeypatch.setattr(Guess, "close", lambda _: met.wait(), raising=False)
    play(parts, samples=4)
    assert not met.broken
    assert "have not closed" not in caplog.text


def test_environments_that_hang_as_they_close_are_left_to_themselves(parts, monkeypatch, caplog):
    monkeypatch.setattr(episodes, "CLOSING", 0.2)
    monkeypatch.setattr(Guess, "close", lambda _: Event().wait(), raising=False)
    play(parts, samples=4)
    assert "24 of 24 environments have not closed within 0 seconds" in caplog.text


def test_a_reward_that_hangs_is_unknown(parts):
    settings = {name: value for name, value in SETTING.items() if name != "_target_"}
    changed = {"settings": {"wrong": "hangs"}, "reply_tokens": 48, "call_seconds": 0.2}
    parts.task.own.__init__(**settings | changed)
    rollout = play(parts, 2, samples=2)
    assert set(rollout.stops) == {"tool_timeout"}
    assert rollout.scored.unscored == [True] * 4


def test_a_call_that_hangs_takes_no_other_with_it(monkeypatch):
    monkeypatch.setattr(timeouts, "REPLYING", 2)
    release, begun = Event(), []

    def call(number):
        begun.append(number)
        return release.wait() if number in (1, 2) else number

    calls = SideBySide([(call, 0), None, (call, 1), (call, 2), (call, 3)], 0.1)
    assert calls.result(0) == 0
    with pytest.raises(TimeoutError):
        calls.result(2)
    calls.close()
    release.set()
    time.sleep(0.1)
    assert sorted(begun) == [0, 1, 2], "what has not begun never does"


def test_a_reply_of_megabytes_is_not_turned_into_tokens(parts):
    settings = {name: value for name, value in SETTING.items() if name != "_target_"}
    parts.task.own.__init__(**settings | {"settings": {"wrong": "megabytes"}, "reply_tokens": 48})
    rollout = play(parts, 2, samples=8)
    assert set(rollout.stops) <= {"reply_tokens", "max_tokens"}
    assert "reply_tokens" in rollout.stops
    assert rollout.tokens.shape[1] == parts.run.algo.sampling.max_new_tokens + 48


def test_measures_count_what_is_earned_and_ended():
    task = build(SETTING)
    played = [
        Played("", 1.0, "environment_done", 1),
        Played("", 1.0, "max_turns", 3),
        Played("", 0.5, "completed", 2),
    ]
    rows = task.examples("train")[:3]
    assert task.metrics(rows, played) == pytest.approx(
        {"success": 100 / 3, "reward": 250 / 3, "done": 200 / 3}
    )
    with pytest.raises(RunStopped, match=r"an episode of Odd earned nan \(example 0, seed 0\)"):
        task.metrics(rows[:1], [Played("", float("nan"), "completed", 1)])
    assert [task.reward(row, text) for row, text in zip(rows, played, strict=True)] == [1, 1, 0.5]
    both = [{row.extra["seed"] for row in task.examples(split)} for split in ("train", "test")]
    assert not both[0] & both[1]
