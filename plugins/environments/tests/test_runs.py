"""Runs in environments: three algorithms, two ranks, a resumed run, and a game of one's own."""

import json
import re
import shutil
from dataclasses import asdict
from types import SimpleNamespace

import pytest
import torch

from common.checkpoint import checkpoint
from common.episodes import STOPS
from common.run import resume
from common.tasks.safe_arithmetic import evaluate
from launch import compose
from tests.support import CONF, ROOT, TINY, events

pytestmark = pytest.mark.run

GUESS = [
    *(text for text in TINY if "pretrain_steps" not in text),
    *("task=guess", "model.tiny.pretrain_steps=150", "task.settings={largest: 7, guesses: 3}"),
    *("task.problems=40", "task.test_problems=8", "evaluate.examples=8"),
]
SIZES = ["algo=grpo", "algo.prompts_per_step=4", "algo.samples_per_prompt=4", "algo.steps=4"]
GRPO = [*GUESS, *SIZES]
EGGROLL = [*GUESS, "algo=eggroll", "algo.members=8", "algo.prompts_per_step=4", "algo.steps=2"]
RFT = [*GUESS, "algo=rft", "algo.iterations=1", "algo.prompts=16", "algo.validation_prompts=4"]


def result(folder):
    return json.loads((folder / "result.json").read_text())


@pytest.mark.parametrize("command", [GRPO, EGGROLL, RFT], ids=["grpo", "eggroll", "rft"])
def test_every_algorithm_plays(command, launch, tmp_path):
    launch(*command, "hydra.run.dir=out")
    came = result(tmp_path / "out")
    assert list(came["metrics"]["after"])[:3] == ["success", "reward", "done"]
    assert came["generated_tokens"] > 0
    text = (tmp_path / "out" / "completions" / "after.jsonl").read_text()
    assert "higher" in text or "lower" in text, "whole conversations are kept"
    stops = next(row["stops"] for row in events(tmp_path / "out") if "stops" in row)
    assert sum(stops.values()) == pytest.approx(1)
    assert set(stops) <= set(STOPS)
    played = launch("out", "--play", "3", module="common.chat").stdout.splitlines()
    assert played[0] == "guess 1 to 7"
    assert re.fullmatch(r"turns [1-3], [a-z_]+, reward [01]", played[-1])
    refused = launch("out", "--play", "8", module="common.chat", code=2)
    assert "--play 8 is out of range. Give 0 to 7." in refused.stderr


@pytest.mark.parametrize("algo", ["grpo", "eggroll", "rft"])
def test_a_row_without_a_reward_is_left_out_and_counted(algo, launch, tmp_path):
    sizes = {
        "grpo": ["algo.samples_per_prompt=8", "algo.prompts_per_step=4", "algo.steps=2"],
        "eggroll": ["algo.members=8", "algo.prompts_per_step=4", "algo.steps=2"],
        "rft": ["algo.iterations=1", "algo.prompts=16", "algo.validation_prompts=4"],
    }
    given = ["--config-dir", CONF, f"algo={algo}", "task=letters", "task.unscored=true", *TINY]
    given += ["algo.sampling.max_new_tokens=6", "algo.sampling.temperature=1.0"]
    launch(*given, *sizes[algo], "task.scoring=smooth", "hydra.run.dir=out", code=None)
    shares = [row["unscored"] for row in events(tmp_path / "out") if "unscored" in row]
    assert shares
    assert 0.05 < shares[0] < 0.8


def test_a_tool_is_called(launch, tmp_path):
    """Its value stands behind the call; a weak model also writes some that nobody computed."""
    settings = [text for text in GRPO if not text.startswith(("task=", "task.settings"))]
    launch(*settings, "task=calculator", "task.settings={digits: 1}", "hydra.run.dir=out")
    lines = (tmp_path / "out" / "completions" / "training.jsonl").read_text().splitlines()
    rows = [row for line in lines for row in json.loads(line)["rows"]]
    played = [row["completion"].split("\n\n") for row in rows]
    calls = [turns for turns in played if turns[0].startswith("=") and len(turns) > 1]
    assert 0 < len(calls) < len(played)
    came = [evaluate(call[1:]) for call, *_ in calls]
    replies = [rest.split("\n")[0] for _, rest, *_ in calls]
    pairs = zip(came, replies, strict=True)
    assert any(reply in (value.problem, str(value.value)) for value, reply in pairs)
    for row in rows:
        asked = row["completion"].startswith("=") and "\n\n" in row["completion"]
        assert row["components"] == {"called": float(asked)}
    assert 0 < events(tmp_path / "out")[0]["components"]["called"] < 1
    settings = [text for text in EGGROLL if not text.startswith(("task=", "task.settings"))]
    launch(*settings, "task=calculator", "task.settings={digits: 1}", "hydra.run.dir=other")
    assert any(0 < one["components"]["called"] < 1 for one in events(tmp_path / "other"))


def test_a_resumed_run_plays_the_same_episodes(launch, tmp_path):
    launch(*GRPO, "hydra.run.dir=whole", "checkpoint.every=2")
    launch(*GRPO, "hydra.run.dir=half", "algo.steps=2")
    launch(*GRPO, "hydra.run.dir=half", "resume=auto")
    one, other = (checkpoint.latest(tmp_path / name / "checkpoints") for name in ("whole", "half"))
    assert one.step == other.step == 4
    assert all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)


def test_a_checkpoint_holds_the_episodes_that_are_under_way(launch, tmp_path):
    """As a run leaves it that is killed between its second step and its last."""
    overlapping = [*GRPO, "algo.overlap=1", "scoring.kind=threads", "checkpoint.every=2"]
    launch(*overlapping, "hydra.run.dir=whole")
    shutil.copytree(tmp_path / "whole", tmp_path / "half")
    shutil.rmtree(tmp_path / "half" / "checkpoints" / "step-00000004")
    (tmp_path / "half" / "result.json").unlink()
    launch(*overlapping, "hydra.run.dir=half", "resume=auto")
    one, other = (checkpoint.latest(tmp_path / name / "checkpoints") for name in ("whole", "half"))
    assert one.step == other.step == 4
    assert all(torch.equal(one.tensors[name], other.tensors[name]) for name in one.tensors)


@pytest.mark.parametrize("command", [GRPO, pytest.param(RFT, marks=pytest.mark.thorough)])
def test_a_killed_run_of_an_unforeseeable_environment_resumes(command, launch, tmp_path):
    """Also in a run folder with the log of replies that earlier versions wrote."""
    sizes = [text for text in command if text.startswith("algo")]
    tiny = [text for text in GUESS if text.startswith(("hardware", "model"))]
    sizes += ["algo.select.accept=0.5"] if "algo=rft" in sizes else []
    chance = [*tiny, *sizes, "task=environment", "task.factory=tests.support.chance:Chance"]
    chance += ["task.problems=40", "task.test_problems=4", "evaluate.examples=4"]
    chance += ["algo.sampling.max_new_tokens=24", "algo.sampling.temperature=1.0"]
    chance += ["task.reply_tokens=60", "checkpoint.every=1", "hydra.run.dir=out"]
    environment, out = {"PYTHONPATH": str(ROOT)}, tmp_path / "out"
    launch(*chance, fresh=True, env=environment | {"CHANCE_KILL": "140"}, code=137)
    earlier = [line for line in events(out) if "reward" in line]
    log = out / "replies" / "step-00000001-1-rank-0.jsonl"
    log.parent.mkdir()
    log.write_text('{"key": "torn')
    launch(*chance, "resume=auto", fresh=True, env=environment)
    again = {line["step"]: line for line in events(out) if "reward" in line}
    assert all(again[line["step"]] == line for line in earlier), "steps that were saved"
    assert result(out)["steps"] > 0
    assert log.exists()


def test_settings_with_numbers_for_names_are_those_of_the_checkpoint():
    given = ["algo=grpo", "task=environment", "task.factory=nim:Nim"]
    run = compose([*given, "task.settings={prices: {1: 0.5}}"])
    saved = SimpleNamespace(step=0, state={"config": json.loads(json.dumps(asdict(run)))})
    assert resume.list_changes(run, saved) == []
    saved.state["config"]["task"]["settings"]["prices"]["1"] = 0.6
    assert resume.list_changes(run, saved) == ["task.settings.prices.1 was 0.6, is 0.5"]


@pytest.mark.thorough
@pytest.mark.parametrize("command", [GRPO, EGGROLL, RFT], ids=["grpo", "eggroll", "rft"])
def test_two_ranks_play_what_one_plays(command, launch, tmp_path):
    launch(*command, "hydra.run.dir=one")
    launch(*command, "hydra.run.dir=two", "opt=[ddp]", "opt.ddp.ranks=2")
    one, two = tmp_path / "one", tmp_path / "two"
    rewards = [
        [row["reward"] for row in events(folder) if "reward" in row] for folder in (one, two)
    ]
    assert rewards[0] == pytest.approx(rewards[1], abs=1e-6)
    assert result(one)["generated_tokens"] == result(two)["generated_tokens"]


def test_a_game_of_ones_own(launch, tmp_path):
    own = [*TINY, *SIZES, "task=environment", "task.factory=nim:Nim", "task.settings={most: 9}"]
    own += ["task.test_problems=8", "evaluate.examples=8", "task.reply_tokens=100"]
    own += ["algo.sampling.max_new_tokens=12"]
    path = {"PYTHONPATH": str(ROOT / "examples" / "own_game")}
    launch(*own, "hydra.run.dir=out", fresh=True, env=path)
    assert result(tmp_path / "out")["task"] == "nim"
    taught = [*own, "model.tiny.pretrain_steps=9", "hydra.run.dir=other"]
    done = launch(*taught, code=2, fresh=True, env=path)
    assert "Nim has no method teach. Use a trained model" in done.stderr


@pytest.mark.parametrize(
    ("command", "changed", "refused"),
    [
        (GRPO, [], (16, "algo.prompts_per_step or algo.samples_per_prompt")),
        (GRPO, ["algo.prompts_per_step=1", "algo.steps=1"], (8, "evaluate.examples")),
        (GRPO, ["algo.prompts_per_step=1", "algo.steps=2", "evaluate.examples=4"], None),
        (EGGROLL, [], (32, "algo.members, algo.prompts_per_step or algo.rollout_rows")),
        (RFT, [], (256, "algo.prompts_per_batch or algo.chunk_size")),
    ],
)
def test_servers_with_few_sessions_are_refused(command, changed, refused, launch):
    pytest.importorskip("openenv.core.env_server", reason="needs pip install openenv==0.10.0")
    from tests.support.serving import serving

    with serving(4) as url:
        given = [text for text in command if not text.startswith("task.settings=")]
        given = [text.replace("task=guess", "task=environment") for text in given]
        given += [
            "task.factory=tests.support.serving:Client",
            f"task.settings={{base_url: '{url}'}}",
        ]
        given += ["model.tiny.pretrain_steps=0", "algo.sampling.max_new_tokens=6", *changed]
        done = launch(*given, "task.max_turns=2", "task.reply_tokens=64", code=2 if refused else 0)
    if refused:
        plays, sizes = refused
        assert (
            f"base_url={url} has 4 free sessions, and this run plays {plays} episodes at a time."
            f" Start it with max_concurrent_envs={plays} or more, or lower {sizes}." in done.stderr
        )
        assert "before: held-out" not in done.stderr
