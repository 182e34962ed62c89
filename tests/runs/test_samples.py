"""The completions of training that a run keeps: what is in them, after a resume, on two ranks."""

import json

import pytest

from common.report import completions, samples
from common.report.samples import Samples, Tokens, read_steps, stride
from launch import compose, train
from tests.support import CONF, MOVING, SMALL_GRPO, SMALL_RFT, events
from tests.support import samples as sampled
from tests.support.letters import Letters
from tests.support.refusals import refuses

ROW = {"id": 3, "group": 0, "prompt": "2 + 2 =", "answer": "4", "completion": "4", "reward": 1.0}


def table(folder):
    """All rows of a run with completions=all."""
    lines = (folder / "completions" / "all.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def test_a_run_of_a_population_keeps_its_members(in_cache, tmp_path):
    train(compose([*MOVING, "completions=all", "algo.samples_per_prompt=2"]), tmp_path)
    kept, rows = read_steps(tmp_path), table(tmp_path)
    assert [line["step"] for line in kept] == [1, 2, 3, 4]
    for line in kept:
        assert [(r["member"], r["sample"]) for r in line["rows"]] == [
            (m, s) for m in range(8) for s in range(2)
        ]
        assert [row["sign"] for row in line["rows"]] == 4 * [1, 1, -1, -1]
    for event in events(tmp_path):
        own = [row for row in rows if row["step"] == event["step"]]
        assert len(own) == 8 * 2 * 2
        assert sum(row["reward"] for row in own) / 32 == pytest.approx(event["reward"])
        assert sum(row["cut_off"] for row in own) / 32 == pytest.approx(event["truncated"])
        fitness = {row["member"]: row["fitness"] for row in own}
        assert sum(fitness.values()) == pytest.approx(0, abs=1e-9)
    steps = [row["step"] for row in rows]
    assert steps == sorted(steps)
    assert not any("token_logprobs" in row for row in rows)


def test_a_completion_without_a_reward_is_kept_without_one(in_cache, tmp_path):
    """What comparisons have in its place is not the task's."""
    run = compose([*SMALL_GRPO, "completions=all", "algo.sampling.temperature=1.0"])
    task = Letters("smooth", unscored=True)
    train(run, tmp_path, task)
    rows = table(tmp_path)
    without = [row for row in rows if sum(map(ord, row["completion"])) % 3 == 0]
    assert 0 < len(without) < len(rows)
    assert {row["reward"] for row in without} == {None}
    assert all(row["reward"] is not None for row in rows if row not in without)
    shown = [row for line in read_steps(tmp_path) for row in line["rows"]]
    assert all(row.get("unscored", False) == (row["reward"] is None) for row in shown)


@pytest.mark.thorough
def test_a_run_of_groups_keeps_advantages_and_probabilities(in_cache, tmp_path):
    train(compose([*SMALL_GRPO, "completions=all"]), tmp_path)
    lines, rows = read_steps(tmp_path), table(tmp_path)
    for event in events(tmp_path):
        own = [row for row in rows if row["step"] == event["step"]]
        assert sum(row["reward"] for row in own) / len(own) == pytest.approx(event["reward"])
        assert sum(row["tokens"] for row in own) / len(own) == pytest.approx(event["length"])
    for row in rows:
        assert len(row["token_logprobs"]) == len(row["token_ends"]) == row["tokens"]
        assert max(row["token_logprobs"]) <= 0
        assert row["token_ends"] == sorted(row["token_ends"])
        assert row["token_ends"][-1] <= len(row["completion"])
    taught = [line for line in lines if "advantage" in line["rows"][0]]
    assert taught
    for line in taught:
        assert sum(row["advantage"] for row in line["rows"]) == pytest.approx(0, abs=1e-9)
        rewards = [row["reward"] for row in line["rows"]]
        best = max(line["rows"], key=lambda row: row["advantage"])
        assert best["reward"] == max(rewards) > min(rewards), "of a group that teaches something"


@pytest.mark.thorough
def test_rejection_sampling_keeps_its_waves(in_cache, tmp_path):
    train(compose([*SMALL_RFT, "completions=all", "algo.iterations=1"], CONF), tmp_path)
    rows = table(tmp_path)
    made = {(r["prompt"], r["sample"]): r for r in map(json.loads, sampled(tmp_path))}
    assert len(rows) == len(made)
    for row in rows:
        record = made[row["prompt_id"], row["sample"]]
        assert (row["completion"], row["reward"]) == (record["completion"], record["reward"])
        assert row["cut_off"] is not record["finished"]
        assert len(row["token_logprobs"]) == len(row["token_ends"]) == row["tokens"]
        entropy = -sum(row["token_logprobs"]) / row["tokens"]
        assert entropy == pytest.approx(record["entropy"], abs=1e-3)
        assert row["token_ends"][-1] <= len(row["completion"])
    waves = {e["step"] for e in events(tmp_path) if e["stage"] == "generate"}
    assert {line["step"] for line in read_steps(tmp_path)} == waves


@pytest.mark.thorough
def test_nothing_is_there_twice_after_a_resume(in_cache, tmp_path):
    settings = [*MOVING, "completions=all", "checkpoint.every=2"]
    train(compose(settings), tmp_path / "whole")
    train(compose([*settings, "algo.steps=2"]), tmp_path / "resumed")
    path = tmp_path / "resumed" / "completions" / "training.jsonl"
    samples_of_a_step = Samples(tmp_path / "resumed", True, 2)  # as a run that was killed leaves it
    samples_of_a_step.add(3, [ROW])
    path.write_text(path.read_text() + '{"step": 4, "ro')
    train(compose([*settings, "resume=auto"]), tmp_path / "resumed")
    assert path.read_text() == (tmp_path / "whole/completions/training.jsonl").read_text()
    assert table(tmp_path / "resumed") == table(tmp_path / "whole")


@pytest.mark.thorough
@pytest.mark.parametrize("settings", [MOVING, SMALL_GRPO], ids=["population", "groups"])
def test_two_ranks_keep_what_one_keeps(settings, launch, tmp_path):
    for name, more in {"one": (), "two": ("opt=[ddp]", "opt.ddp.ranks=2")}.items():
        launch(*settings, "completions=all", *more, f"hydra.run.dir={tmp_path / name}")
    one, two = read_steps(tmp_path / "one"), read_steps(tmp_path / "two")
    assert [line["id"] for line in one] == [line["id"] for line in two]
    assert one[0] == two[0]
    assert len(table(tmp_path / "one")) == len(table(tmp_path / "two"))


def test_a_long_run_keeps_a_sample_of_its_steps(tmp_path, monkeypatch):
    monkeypatch.setattr(samples, "STEPS", 8)
    whole, broken = Samples(tmp_path / "a", False, 0), Samples(tmp_path / "b", False, 0)
    for folder in "ab":
        (tmp_path / folder).mkdir()
    for step in range(1, 101):
        whole.add(step, [{**ROW, "sample": n} for n in range(100)])
        if step <= 60:
            broken.add(step, [{**ROW, "sample": n} for n in range(100)])
        assert len(read_steps(tmp_path / "a")) <= 8
    resumed = Samples(tmp_path / "b", False, 40)
    for step in range(41, 101):
        resumed.add(step, [{**ROW, "sample": n} for n in range(100)])
    assert read_steps(tmp_path / "a") == read_steps(tmp_path / "b")
    kept = [line["step"] for line in read_steps(tmp_path / "a")]
    assert kept == list(range(1, 101, stride(100)))
    assert {len(line["rows"]) for line in read_steps(tmp_path / "a")} == {samples.ROWS}


@pytest.mark.parametrize("torn", ["", '{"step": 3, "completion": "', '{"st'])
def test_a_file_of_rows_is_cut_at_a_step(tmp_path, torn):
    """Also by a run that keeps a sample alone, and behind a line that a kill has torn."""
    kept = Samples(tmp_path, True, 0)
    for step in (1, 2, 3, 12):
        kept.add(step, [ROW | {"completion": "4 \u2028\ud800"}, ROW | {"sample": 1}])
    with (tmp_path / "completions" / "all.jsonl").open("a") as file:
        file.write(torn)
    for resumed, everything in ((12, True), (3, True), (2, False), (0, True)):
        Samples(tmp_path, everything, resumed)
        left = [row["step"] for row in completions.read_all(tmp_path)]
        assert left == [step for step in (1, 2, 3, 12) if step <= resumed for _ in range(2)]


def test_rows_of_every_step_have_the_columns_of_the_docs(tmp_path):
    """What a row does not have is left out, but for its reward."""
    row = ROW | {"member": 2, "sign": 1, "sample": 0, "tokens": 1, "cut": False, "fitness": None}
    row |= {"reward": float("nan"), "components": {"form": 0.5}, "extra": {"tries": "2"}}
    Samples(tmp_path, True, 0).add(4, [row])
    assert table(tmp_path) == [
        {
            **{"step": 4, "prompt_id": 3, "group": 0, "prompt": "2 + 2 =", "answer": "4"},
            **{"member": 2, "sign": 1, "sample": 0, "completion": "4", "tokens": 1},
            **{"cut_off": False, "reward": None, "reward/form": 0.5, "extra/tries": "2"},
        }
    ]


def test_tokens_end_where_their_texts_do():
    class Words:
        """Gives the pieces of a vocabulary; 9 is left out of texts, as an end is."""

        def batch_decode(self, rows):
            return [" ".join({1: "two", 2: " and", 3: "�", 9: ""}[i] for i in row) for row in rows]

    tokens = Tokens(Words())
    assert tokens.find_ends([1, 2, 1, 9], "two and two") == [3, 7, 11, 11]
    assert tokens.find_ends([1, 3, 3, 2], "twoé and") == [3, 3, 3, 8]
    padded = [-0.12345, -2.0, 0.0]
    found = tokens.describe([1, 2], "two and", padded)
    assert found == {"ends": [3, 7], "logprobs": [-0.123, -2.0]}


def test_all_completions_need_completions():
    refuses(
        lambda: compose(["algo=classify", "completions=all"]),
        key="completions",
        value="all",
        try_next="algo=classify",
    )


def test_the_sample_describes_the_tokens_that_the_page_shows(tmp_path):
    """What is beyond them would be read again with every look at a page of a run."""
    row = {"id": 1, "group": 0, "prompt": "?", "answer": "!", "completion": "x" * 9000}
    row |= {"tokens": 3, "ends": [9, 4000, 9000], "logprobs": [-1.0, -2.0, -3.0]}
    row["reward"] = 1.0
    Samples(tmp_path, False, 0).add(1, [row])
    (line,) = read_steps(tmp_path)
    assert line["rows"][0]["ends"] == [9, 4000]
    assert line["rows"][0]["logprobs"] == [-1.0, -2.0]
    assert line["rows"][0]["completion"] == row["completion"]


def test_lines_of_shards_stand_in_the_order_of_their_steps(tmp_path):
    for shard, steps in ((1, (1, 2, 3)), (2, (1, 2))):
        part = tmp_path / f"shard-{shard}-of-2"
        part.mkdir()
        for step in steps:
            row = {"id": shard, "group": 0, "prompt": "?", "answer": "!", "completion": "!"}
            Samples(part, False, step - 1).add(step, [row | {"reward": 1.0}])
    lines = completions.read_training(tmp_path)
    assert [(line["step"], line["id"]) for line in lines] == [
        (1, 1),
        (1, 2),
        (2, 1),
        (2, 2),
        (3, 1),
    ]
