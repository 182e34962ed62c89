"""The held-out measurement: pass@k, other tasks, a text, and the scores behind intervals."""

import json
import math
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from common import evaluation, uncertainty
from common.config import ConfigError
from common.distributed.context import Context, put_back
from common.task import Example
from common.tasks.extra_tasks import build_others
from launch import build_early, compose, train
from tests.support import CONF, ROOT, SMALL, SMALL_GRPO, events
from tests.support.letters import Letters
from tests.support.refusals import COLUMNS, refuses

MORE = ["evaluate.samples=3", "evaluate.also=[units,countdown]", f"evaluate.text={ROOT}/LICENSE"]


def read(folder: Path, name: str) -> list[dict]:
    text = (folder / "completions" / f"{name}.jsonl").read_text(encoding="utf-8")
    return [json.loads(line) for line in text.splitlines()]


@pytest.mark.parametrize(
    "small",
    [SMALL, pytest.param(SMALL_GRPO, marks=pytest.mark.thorough)],
    ids=["eggroll", "grpo"],
)
def test_everything_is_measured_before_during_and_after(in_cache, tmp_path, small):
    run = compose([*small, "task=letters", *MORE, "evaluate.every=2", "evaluate.examples=4"], CONF)
    result = train(run, tmp_path)
    names = ["exact", "characters", "pass@1", "pass@2", "pass@3", "units/accuracy"]
    names += ["units/answered", *(f"countdown/{n}" for n in ("solved", "valid", "numbers"))]
    names += ["countdown/answered", "text/bits_per_byte"]
    assert list(result.metrics["before"]) == list(result.metrics["after"]) == names
    (during,) = (event for event in events(tmp_path) if "metrics" in event)
    assert list(during["metrics"]) == names
    saved = json.loads((tmp_path / "result.json").read_text())
    assert list(saved["intervals"]) == names
    for name, sure in saved["intervals"].items():
        low, high = sure["after"]
        assert low - 1e-6 <= saved["metrics"]["after"][name] <= high + 1e-6, name
        assert 0 < sure["p_value"] <= 1
    for row in read(tmp_path, "after"):
        assert set(row["scores"]) == {"exact", "characters", "pass@1", "pass@2", "pass@3"}
    page = (tmp_path / "report.md").read_text()
    assert "| units/accuracy | 0.00 (0.0 to " in page
    assert "| text/bits_per_byte | " in page


def test_shares_of_ranks_are_put_back_in_order():
    for count in range(8):
        for ranks in (1, 2, 3):
            contexts = [SimpleNamespace(rank=rank, world_size=ranks) for rank in range(ranks)]
            shares = [Context.share(one, range(count)) for one in contexts]  # pyright: ignore
            assert put_back(shares) == list(range(count))


@pytest.mark.thorough
def test_pass_at_k_depends_on_neither_rows_nor_ranks(in_cache, tmp_path):
    given = [*SMALL, "task=letters", "task.scoring=smooth", "algo.steps=1", "evaluate.samples=4"]
    given += ["model.tiny.pretrain_steps=50", "evaluate.examples=9", "model.tiny.pretrain_lr=5e-3"]
    given += MORE[1:]
    one = train(compose(given, CONF), tmp_path / "one")
    rows = train(compose([*given, "algo.rollout_rows=3"], CONF), tmp_path / "rows")
    ranks = train(compose([*given, "opt=[ddp]"], CONF), tmp_path / "ranks")
    assert one.metrics["before"] == rows.metrics["before"] == ranks.metrics["before"]
    assert one.intervals == rows.intervals == ranks.intervals


@pytest.mark.thorough
def test_samples_are_counted_as_the_estimate_says(in_cache, tmp_path):
    """pass@1 is the share of right samples; the text of a right one earns all."""

    class Half(Letters):
        def reward(self, example: Example, completion: str) -> float:
            return float(len(completion) % 2)

    given = [*SMALL, "algo.steps=1", "evaluate.samples=4", "evaluate.examples=20"]
    result = train(compose(given), tmp_path, Half())
    found = result.metrics["before"]
    assert 0 < found["pass@1"] < found["pass@2"] < found["pass@4"] <= 100
    rows = [row["scores"] for row in read(tmp_path, "before")]
    for row in rows:
        right = round(4 * row["pass@1"] / 100)
        assert math.isclose(row["pass@2"], 100 * evaluation.pass_at(right, 4, 2), abs_tol=1e-5)


def test_a_text_has_the_bits_that_the_model_gives_it(in_cache, tmp_path):
    """Against one plain forward for each window of the saved model."""
    text = (ROOT / "LICENSE").read_text()[:1000] + "äöü €\n"
    (tmp_path / "text.txt").write_text(text, encoding="utf-8")
    path = f"evaluate.text={tmp_path / 'text.txt'}"
    result = train(
        compose([*SMALL_GRPO, "algo.steps=1", "evaluate.examples=64", path]), tmp_path / "run"
    )
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "model")
    tokenizer = AutoTokenizer.from_pretrained(tmp_path / "run" / "model")
    ids = tokenizer(text.rstrip("\n"), add_special_tokens=False)["input_ids"]
    context, bits, foretold = model.config.max_position_embeddings, 0.0, 0
    for at in range(0, len(ids), context - 1):
        window = torch.tensor([ids[max(0, at - 1) : at + context - 1]])
        logp = torch.log_softmax(model(window).logits[0, :-1].detach().double(), 1)
        bits -= float(logp.gather(1, window[0, 1:, None]).sum()) / math.log(2)
        foretold += window.shape[1] - 1
    wanted = bits / foretold * len(ids) / len(text.rstrip("\n").encode())
    assert math.isclose(result.metrics["after"]["text/bits_per_byte"], wanted, rel_tol=1e-4)


# --- mistakes


MISTAKES = {
    "evaluate.also=[countdwn]": "evaluate.also=countdwn is not a choice. Did you mean 'cou",
    "evaluate.also=countdown": "evaluate.also=countdown is not a list of tasks. Use 'evaluate",
    "evaluate.also=[units,units]": "evaluate.also names units twice. Name each task once.",
    "evaluate.also=[topics]": "evaluate.also=topics needs a reward task, and ddp_bench",
    "evaluate.samples=0": "evaluate.samples=0 is too small. Give a value of at least 1, or null.",
    "algo=classify evaluate.text=x": "evaluate.text=x has no effect with algo=classify: it",
}


@pytest.mark.parametrize("given", MISTAKES)
def test_mistakes_are_worded(given):
    with pytest.raises(ConfigError) as caught:
        compose(given.split())
    assert str(caught.value).startswith(MISTAKES[given])


def test_an_own_task_can_be_evaluated_in_addition(tmp_path):
    (tmp_path / "task").mkdir()
    file = tmp_path / "task" / "mine.yaml"
    file.write_text("defaults: [units, _self_]\nlargest_value: 9\n")
    run = compose(["evaluate.also=[mine]"], str(tmp_path))
    assert run.evaluate.also["mine"]["largest_value"] == 9
    assert run.evaluate.also["mine"]["_target_"] == "common.tasks.units.Units"


def test_too_long_prompts_name_their_task(in_cache, tmp_path):
    given = [*SMALL, "model.tiny.context=24", "task=letters", "evaluate.also=[translate]"]
    with pytest.raises(
        ConfigError, match=r"^evaluate\.also, task translate: \d of 8 prompts do not fit"
    ):
        train(compose(given, CONF), tmp_path)


# --- scores


class Overlapping(Letters):
    """A task of one's own that holds out what it trains on."""

    def examples(self, split):
        rows = super().examples("train")
        return rows[:3] + super().examples("test") if split == "test" else rows


def test_what_is_trained_on_and_measured_is_told(in_cache, tmp_path):
    train(
        compose([*SMALL, "task=letters", "evaluate.examples=9", "algo.steps=1"], CONF),
        tmp_path,
        Overlapping(),
    )
    assert "3 of 9 test examples are training examples too" in (tmp_path / "run.log").read_text()


def test_extra_tasks_are_read_again_per_run(tmp_path):
    """A notebook has several."""
    row = {"question": "9 + 9?", "answer": "#### 18"}
    (tmp_path / "train.jsonl").write_text(f"{json.dumps(row)}\n{json.dumps(row)}")
    (tmp_path / "test.jsonl").write_text(json.dumps(row))
    node = compose(["task=gsm8k", f"task.path={tmp_path}"]).task
    run = compose([*SMALL, "model.tiny.pretrain_steps=0"])
    run.evaluate.also = {"sums": node}
    for count in (3, 1):
        lines = [json.dumps({"question": f"{n} + 1?", "answer": "#### 2"}) for n in range(count)]
        (tmp_path / "test.jsonl").write_text("\n".join(lines))
        build_early(run)
        assert len(build_others(run.evaluate.also)["sums"].examples("test")) == count


class Spread:
    """A task with a mean, a measure of the set that has one value for one example, and one that a
    single example has not.
    """

    def metrics(self, examples, completions):
        lengths = [len(text) for text in completions]
        mean = sum(lengths) / len(lengths)
        if len(lengths) == 1 and self.strict:
            raise ConfigError("too few")
        return {"mean": mean, "range": max(lengths) - min(lengths)}

    strict = False


def test_per_example_scores_come_from_metrics_calls():
    examples = [Example(i, "", "") for i in range(60)]
    texts = ["x" * (i % 7) for i in range(60)]
    task = Spread()
    metrics = task.metrics(examples, texts)
    found = evaluation.score(task, examples, texts, metrics)
    assert found["mean"] == [len(text) for text in texts]
    assert len(found["range"]) == evaluation.BATCHES
    assert math.isclose(sum(found["range"]) / evaluation.BATCHES, metrics["range"])
    task.strict = True
    found = evaluation.score(task, examples, texts, metrics)
    assert [len(values) for values in found.values()] == [evaluation.BATCHES] * 2
    assert evaluation.score(task, examples[:9], texts[:9], metrics) == {}, "too few for batches"


def test_scores_that_contradict_the_measure_are_refused():
    class Wrong(Spread):
        def scores(self, examples, completions):
            return {"mean": [0.0] * len(examples)}

    examples = [Example(i, "", "") for i in range(4)]
    task, texts = Wrong(), ["a", "b", "c", "d"]
    with pytest.raises(
        ConfigError, match=r"^Wrong\.scores returned 4 values for 'mean' with a mean"
    ):
        evaluation.score(task, examples, texts, task.metrics(examples, texts))


SAMPLED = ["evaluate.sampling=training", "evaluate.repeats=4", "algo.sampling.temperature=1.0"]


def test_repeats_are_averaged_and_give_pass_at_k(in_cache, tmp_path):
    settings = [*SMALL_GRPO, "evaluate.examples=6", "evaluate.every=2", *SAMPLED]
    task = Letters("smooth")
    result = train(compose(settings), tmp_path, task)
    names = ["exact", "characters", "pass@1", "pass@2", "pass@4"]
    assert list(result.metrics["before"]) == list(result.metrics["after"]) == names
    rows = read(tmp_path, "after")
    assert all(len(row["repeats"]) == 4 for row in rows)
    assert all(row["completion"] == row["repeats"][0] for row in rows)
    assert len({text for row in rows for text in row["repeats"]}) > 4
    # a naive reading of what was saved
    mean = sum(len(text) for row in rows for text in row["repeats"]) / 24
    assert result.metrics["after"]["characters"] == pytest.approx(mean)
    for row in rows:
        each = sum(map(len, row["repeats"])) / 4
        assert row["scores"]["characters"] == pytest.approx(each)
    low, high = result.intervals["characters"]["after"]
    assert low <= mean <= high


def test_samples_of_an_evaluation_are_the_same_at_every_one(in_cache, tmp_path):
    """Common random numbers: weights that do not move have the same samples."""
    settings = [*SMALL_GRPO, "evaluate.examples=6", *SAMPLED, "algo.lr=1e-12"]
    train(compose(settings), tmp_path, Letters("smooth"))
    before, after = read(tmp_path, "before"), read(tmp_path, "after")
    assert [row["repeats"] for row in before] == [row["repeats"] for row in after]


def test_ranks_draw_the_same_samples(launch, tmp_path):
    settings = ["--config-dir", CONF, *SMALL_GRPO, "task=letters", *SAMPLED, "evaluate.every=0"]
    settings += ["evaluate.examples=6"]
    for name, more in {"one": [], "two": ["opt=[ddp]", "opt.ddp.ranks=2"]}.items():
        launch(*settings, *more, f"hydra.run.dir={tmp_path / name}")
    one, two = (read(tmp_path / name, "before") for name in ("one", "two"))
    assert one == two


def test_a_sampling_of_its_own(in_cache, tmp_path):
    """Nearly no temperature is greedy."""
    greedy = compose([*SMALL_GRPO, "evaluate.examples=6"])
    train(greedy, tmp_path / "greedy", Letters("smooth"))
    cold = compose([*SMALL_GRPO, "evaluate.examples=6", "evaluate.sampling={temperature: 1e-6}"])
    train(cold, tmp_path / "cold", Letters("smooth"))
    texts = [
        [row["completion"] for row in read(tmp_path / n, "before")] for n in ("greedy", "cold")
    ]
    assert texts[0] == texts[1]
    log = (tmp_path / "cold" / "run.log").read_text()
    assert "temperature 1e-06" in log


@pytest.mark.parametrize(
    COLUMNS,
    [
        ("evaluate.sampling=gredy", "evaluate.sampling", "gredy", "greedy"),
        ("evaluate.repeats=4", "evaluate.repeats", 4, "evaluate.sampling"),
        (["evaluate.sampling={temprature: 1}"], "evaluate.sampling", "temprature", "temperature"),
        (["evaluate.sampling={temperature: 0}"], "evaluate.sampling.temperature", 0, "above 0"),
        (["evaluate.sampling={top_p: 2}"], "evaluate.sampling.top_p", 2, "Give"),
        (
            ["evaluate.sampling=training", "evaluate.repeats=4", "evaluate.samples=8"],
            ["evaluate.samples", "evaluate.repeats"],
            8,
            "evaluate.repeats",
        ),
    ],
)
def test_samplings_that_cannot_work(overrides, key, value, try_next):
    refuses(overrides, key=key, value=value, try_next=try_next)


def test_repeats_agree_with_measuring_each_alone():
    """Measures and scores of several completions are means over those of each."""
    task = Letters()
    examples = list(task.examples("test"))[:6]
    completions = [[one.answer, "x", one.answer, one.answer[:2]] for one in examples]
    metrics, scores = evaluation.measure_repeats(task, examples, completions)
    alone = [task.metrics(examples, [texts[k] for texts in completions]) for k in range(4)]
    for name, value in metrics.items():
        assert value == pytest.approx(sum(one[name] for one in alone) / 4)
        assert sum(scores[name]) / 6 == pytest.approx(value)


@pytest.mark.thorough
def test_the_interval_of_repeats_covers_as_often_as_it_says():
    """Prompts differ in difficulty; the truth is the mean over all prompts there could be."""
    draw = np.random.default_rng(0)
    for low, high in ((0.4, 0.6), (2.0, 1.0)):  # mostly easy or hopeless; mostly in between
        truth, covered, runs = 100 * low / (low + high), 0, 2000
        for _ in range(runs):
            right = draw.binomial(4, draw.beta(low, high, 100))
            interval = uncertainty.find_interval(100.0 * right / 4)
            assert interval is not None
            covered += interval[0] <= truth <= interval[1]
        assert 0.93 <= covered / runs <= 0.97
