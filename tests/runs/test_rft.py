"""RFT: chunks, resume, shards, selection, fine-tuning and the whole loop."""

import itertools
import json
import re
import shutil
from dataclasses import replace

import pytest
import torch

import common.finetune
import rft.train
from common.config import ConfigError
from common.sampling import native
from common.system.signals import EXIT_SIGNAL, RunStopped
from common.task import Example
from launch import compose, train
from tests.support import RFT_COMMAND, events, samples
from tests.support.letters import Letters
from tests.support.models import same_weights, weights
from tests.support.refusals import COLUMNS, refuses


def test_two_iterations_teach_the_letters(letters, tmp_path):
    result = letters()
    assert result.after >= result.before + 25
    assert result.metrics["after"]["pass@1"] > result.metrics["before"]["pass@1"]
    folder = tmp_path / "run"
    for iteration in (1, 2):
        found = json.loads((folder / f"iteration-{iteration}" / "selected.json").read_text())
        rows = [
            json.loads(line)
            for line in (
                (folder / f"iteration-{iteration}" / "selected.jsonl").read_text().splitlines()
            )
        ]
        assert len(rows) == found["kept"] > 0
        assert all(row["accepted"] and row["finished"] and row["reward"] == 1 for row in rows)
    assert result.reward_evaluations == len(samples(folder, 1)) + len(samples(folder, 2))
    stages = [event["stage"] for event in events(folder)]
    assert [k for k, _ in itertools.groupby(stages)] == [
        "evaluate",
        *(["generate", "select", "finetune", "evaluate"] * 2),
    ]
    assert [event["step"] for event in events(folder)] == list(range(1, len(stages) + 1))
    model, _ = result.model_and_tokenizer()
    assert torch.equal(
        model.state_dict()["model.norm.weight"], weights(folder)["model.norm.weight"]
    )


@pytest.mark.thorough
def test_samples_do_not_depend_on_the_chunks(letters, tmp_path):
    def drawn(folder):
        return {
            (r["prompt"], r["sample"]): r["completion"]
            for r in map(json.loads, samples(tmp_path / folder))
        }

    one = ["algo.stage=generate", "algo.second_round_samples=0"]
    letters(*one, folder="one")
    letters(
        *one,
        "algo.prompts_per_batch=5",
        "algo.chunk_size=3",
        "algo.rollout_rows=7",
        folder="other",
    )
    assert drawn("one") == drawn("other")


def test_stages_one_by_one_end_where_all_of_them_do(letters, first_iteration, tmp_path):
    for stage in ("generate", "select", "finetune", "evaluate"):
        assert letters("algo.iterations=1", f"algo.stage={stage}", folder="parts") is None
    assert samples(first_iteration) == samples(tmp_path / "parts")
    assert same_weights(first_iteration / "iteration-1", tmp_path / "parts/iteration-1")
    name = "iteration-1/evaluation.json"
    assert (first_iteration / name).read_text() == (tmp_path / "parts" / name).read_text()


@pytest.mark.thorough
def test_samples_of_other_rows_are_not_trained_on(letters):
    """The file was edited between two stages."""

    class Edited(Letters):
        def examples(self, split):
            return [replace(one, question=one.question[::-1]) for one in super().examples(split)]

    letters("algo.stage=generate", folder="edited")
    for stage in ("select", "finetune"):
        with pytest.raises(ConfigError, match="other settings: the rows of the task was"):
            letters(f"algo.stage={stage}", folder="edited", task=Edited())


def test_a_resumed_run_has_no_early_result(letters, tmp_path, monkeypatch):
    letters("algo.iterations=1", folder="on")
    result = tmp_path / "on" / "result.json"
    assert result.exists()

    def stop(work, iteration):
        if iteration == 2:
            raise RunStopped("stopped", EXIT_SIGNAL)

    with monkeypatch.context() as patched:
        patched.setattr(rft.train, "finetune", stop)
        with pytest.raises(RunStopped):
            letters("algo.iterations=2", "resume=auto", folder="on")
    assert not result.exists()
    letters("algo.iterations=2", "resume=auto", folder="on")
    assert result.exists()


def test_shards_are_merged_only_when_all_are_there_and_whole(letters, tmp_path):
    def shard(index):
        letters("algo.stage=generate", f"algo.shard={index}/3", folder="shards")

    shard(1)
    shard(3)
    refuses(
        lambda: letters("algo.stage=select", folder="shards"),
        key="algo.stage",
        value="generate",
        try_next="algo.shard=2/3",
    )
    shard(2)
    path = tmp_path / "shards/iteration-1/samples-2-of-3.jsonl"
    whole = path.read_text()
    path.write_text("".join(line + "\n" for line in whole.splitlines()[:-1]))
    with pytest.raises(
        ConfigError, match=r"samples-2-of-3.jsonl is not complete. Go on with it: .* resume=auto"
    ):
        letters("algo.stage=select", folder="shards")
    with pytest.raises(ConfigError, match="already holds a run"):
        shard(2)
    letters("algo.stage=generate", "algo.shard=2/3", "resume=auto", folder="shards")
    assert sorted(path.read_text().splitlines()) == sorted(whole.splitlines())
    letters("algo.stage=select", folder="shards")
    letters("algo.stage=generate", folder="whole")

    def drawn(folder):
        return {
            (r["prompt"], r["sample"]): r["completion"]
            for r in map(json.loads, samples(tmp_path / folder))
        }

    assert drawn("shards") == drawn("whole")


@pytest.mark.thorough
def test_a_stage_without_what_it_needs_says_which_is_next(letters):
    refuses(lambda: letters("algo.stage=select"), key="algo.stage", value="select")
    letters("algo.stage=generate")
    refuses(lambda: letters("algo.stage=finetune"), key="algo.stage", value="select")
    letters("algo.stage=select")
    with pytest.raises(
        ConfigError,
        match=r"selected.json was made with other settings: keep_per_prompt was 4, is 1",
    ):
        letters("algo.stage=finetune", "algo.select.keep_per_prompt=1")


@pytest.mark.usefixtures("iterated")
def test_other_settings_do_not_go_on_with_a_run(letters):
    with pytest.raises(ConfigError, match="already holds a run"):
        letters("algo.iterations=1")
    with pytest.raises(
        ConfigError,
        match=r"finetune.json was made with other settings: algo.lr was 0.001, is 0.002",
    ):
        letters("algo.lr=0.002", "resume=auto")
    with pytest.raises(ConfigError, match=r"algo.sampling.temperature was 1.0, is 0.9"):
        letters("algo.sampling.temperature=0.9", "resume=auto", "algo.stage=select")


def test_nothing_accepted_is_said_with_numbers(letters, tmp_path):
    with pytest.raises(
        ConfigError, match=r"no completion of iteration 1 was accepted.*algo.samples_per_prompt"
    ):
        letters("task.scoring=smooth")
    # The file is there, but nothing is in it to train on.
    with pytest.raises(ConfigError, match="no completion of iteration 1 was accepted"):
        letters("task.scoring=smooth", "algo.stage=finetune", "resume=auto")
    assert not (tmp_path / "run" / "iteration-1" / "model").exists()


@pytest.mark.thorough
def test_the_run_stops_when_validation_does_not_rise(letters, tmp_path):
    # One epoch at a vanishing rate changes nothing, so the first iteration is no better than the
    # base.
    result = letters("algo.lr=1e-12", "algo.iterations=4", "algo.patience=2")
    assert result.after == result.before
    assert result.iteration == 0
    assert all(tuple(sure["change"]) == (0, 0) for sure in result.intervals.values())
    assert (
        len(list((tmp_path / "run").glob("iteration-*"))) == 3
    )  # the base and two that did not help


@pytest.mark.thorough
@pytest.mark.parametrize("start", ["base", "last"])
def test_where_an_iteration_starts(letters, tmp_path, start):
    letters(f"algo.start_from={start}", "algo.validation_prompts=0", "algo.lr=1e-9")
    base = tmp_path / "run"
    first, second = weights(base / "iteration-1"), weights(base / "iteration-2")
    assert any(not torch.equal(first[k], second[k]) for k in first)
    assert all(torch.allclose(first[k], second[k], atol=1e-5) for k in first)


@pytest.mark.thorough
def test_micro_batches_and_recomputation_change_rounding_alone(letters, tmp_path):
    letters("algo.iterations=1", "algo.batch_size=32", folder="whole")
    variants = {
        "halved": ["algo.batch_size=32", "algo.train_rows=8"],
        "recomputed": ["algo.batch_size=32", "opt=[checkpointing]"],
    }
    wanted = weights(tmp_path / "whole/iteration-1")
    for name, changes in variants.items():
        letters("algo.iterations=1", *changes, folder=name)
        assert samples(tmp_path / name) == samples(tmp_path / "whole")
        found = weights(tmp_path / name / "iteration-1")
        for key in wanted:
            assert torch.allclose(found[key], wanted[key], atol=2e-3), (name, key)


def test_two_ranks_make_the_samples_and_the_weights_of_one(launch, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    launch(*RFT_COMMAND, "algo.iterations=1", f"hydra.run.dir={one}")
    launch(
        *RFT_COMMAND, "algo.iterations=1", "opt=[ddp]", "opt.ddp.ranks=2", f"hydra.run.dir={two}"
    )
    assert samples(one) == samples(two)
    a, b = weights(one), weights(two)
    assert all(torch.allclose(a[k], b[k], atol=2e-3) for k in a)
    assert json.loads((two / "result.json").read_text())["world_size"] == 2


@pytest.mark.thorough
def test_an_optimizer_that_is_not_there_is_named(letters):
    refuses(
        lambda: letters("algo.optimizer.name=Foo", "algo.lr=1e-4"),
        key="algo.optimizer.name",
        value="Foo",
    )


@pytest.mark.thorough
@pytest.mark.usefixtures("iterated")
def test_an_evaluation_of_other_settings_is_made_again(letters, tmp_path):
    before = json.loads((tmp_path / "run/iteration-0/evaluation.json").read_text())
    with (tmp_path / "run/metrics.jsonl").open("a") as log:
        log.write('{"step": 99}\n')  # no line of RFT
    result = letters(
        "algo.iterations=1", "resume=auto", "evaluate.examples=8", "evaluate.samples=3"
    )
    after = json.loads((tmp_path / "run/iteration-0/evaluation.json").read_text())
    assert (len(before["completions"]), len(after["completions"])) == (16, 8)
    assert set(result.metrics["after"]) == {"exact", "characters", "pass@1", "pass@2", "pass@3"}


@pytest.mark.thorough
@pytest.mark.usefixtures("iterated")
def test_a_folder_of_another_algorithm_is_left_alone(letters, tmp_path):
    other = [
        "algo=grpo",
        "hardware=cpu",
        "model.tiny.pretrain_steps=0",
        "algo.steps=1",
        "task=translate",
    ]
    refuses(
        lambda: train(compose(other), tmp_path / "run"),
        key="algo",
        value="rft",
        try_next="another hydra.run.dir",
    )
    (tmp_path / "run/tracker.json").write_text("")  # cut short by a kill
    letters("algo.iterations=1", "resume=auto")


@pytest.mark.thorough
def test_complete_shards_are_not_sampled_again(letters, tmp_path):
    for index in (1, 2):
        letters("algo.stage=generate", f"algo.shard={index}/2")
    result = letters("algo.iterations=1", "resume=auto")
    assert result.reward_evaluations == len(samples(tmp_path / "run"))
    assert not (tmp_path / "run/iteration-1/samples-1-of-1.jsonl").exists()
    letters("algo.stage=generate", "algo.shard=1/2", folder="half")
    with pytest.raises(ConfigError, match=r"samples-2-of-2.jsonl is missing"):
        letters("algo.iterations=1", "resume=auto", folder="half")


@pytest.mark.thorough
def test_what_shards_took_is_counted_once(letters, tmp_path):
    for index in (1, 2):
        letters("algo.stage=generate", f"algo.shard={index}/2", "algo.iterations=1")
    logs = [events(tmp_path / "run" / f"shard-{index}-of-2") for index in (1, 2)]
    tokens = sum(log[-1]["generated_tokens"] for log in logs)
    seconds = sum(event["seconds"] for log in logs for event in log)
    letters("algo.stage=select", "algo.iterations=1")
    letters("algo.stage=select", "algo.iterations=1")
    result = letters("algo.iterations=1", "resume=auto")
    of_shards = [e for e in events(tmp_path / "run") if e["stage"] == "generate"]
    assert [(e["generated_tokens"], e["seconds"]) for e in of_shards] == [(tokens, seconds)]
    assert result.generated_tokens == tokens
    assert result.seconds > seconds
    spent = letters("algo.iterations=2", "resume=auto", f"budget.tokens={tokens}")
    assert spent.ended_by == f"budget.tokens={tokens}"


@pytest.mark.thorough
@pytest.mark.usefixtures("iterated")
def test_evaluating_again_leaves_the_run_unchanged(letters, tmp_path):
    names = ("result.json", "run.yaml", "completions/after.jsonl")
    before = {name: (tmp_path / "run" / name).read_text() for name in names}
    letters("algo.iterations=1", "algo.stage=evaluate", "evaluate.samples=2")
    assert {name: (tmp_path / "run" / name).read_text() for name in names} == before
    letters("algo.iterations=1", "algo.stage=generate")  # the next iteration begins
    assert not (tmp_path / "run/result.json").exists()
    assert not (tmp_path / "run/completions/after.jsonl").exists()


@pytest.mark.thorough
def test_a_model_that_is_made_again_is_measured_again(letters, iterated):
    shutil.rmtree(iterated / "iteration-1/model")
    (iterated / "iteration-1/finetune.json").unlink()
    result = letters("algo.iterations=1", "resume=auto", "algo.lr=1e-9")
    assert abs(result.after - result.before) < 10  # of a model that learnt nothing
    assert result.intervals["exact"]["p_value"] == 1


@pytest.mark.thorough
def test_a_run_goes_on_under_another_recipe(letters, iterated):
    """A newer version may have more in it; its values stand in `algo`, which is compared."""
    for path in (
        iterated / "iteration-1/samples-1-of-1.jsonl",
        *iterated.glob("*/evaluation.json"),
    ):
        text = path.read_text()
        assert '"recipe": {' in text
        path.write_text(text.replace('"recipe": {', '"recipe": {"other": {"lr": 1}, '))
    logged = len(events(iterated))
    letters("algo.iterations=1", "resume=auto")
    assert len(events(iterated)) == logged, "nothing was made again"


@pytest.mark.thorough
def test_muon_trains_the_matrices_of_an_adapter(letters):
    adapter = ["algo.iterations=1", "model.adapter.rank=2", "algo.optimizer.name=Muon"]
    assert letters(*adapter, "algo.lr=1e-3").steps > 0
    refuses(
        lambda: letters("algo.optimizer.name=Muon", "algo.lr=1e-3", folder="all"),
        key="algo.optimizer.kwargs",
        value="{}",
    )


@pytest.mark.thorough
def test_dropout_repeats_after_running_out_of_memory(letters, tmp_path, monkeypatch):
    """Dropout is drawn anew with fewer rows, as if there had been so few from the start."""
    plain, failed = common.finetune.token_losses, []

    def losses(model, trees, device, dtype):
        found = plain(model, trees, device, dtype)
        if sum(len(tree.completions) for tree in trees) > 2:
            failed.append(found)
            raise torch.OutOfMemoryError
        return found

    monkeypatch.setattr(common.finetune, "token_losses", losses)
    small = ["algo.iterations=1", "model.adapter.rank=2", "model.adapter.dropout=0.2"]
    small += ["algo.lr=1e-2", "algo.epochs=1"]
    letters(*small, "algo.train_rows=4", folder="halved")
    assert failed
    letters(*small, "algo.train_rows=2", folder="two")
    halved, two = (
        [e["loss"] for e in events(tmp_path / name) if e["stage"] == "finetune"]
        for name in ("halved", "two")
    )
    assert halved == two


@pytest.mark.thorough
def test_odd_line_ends_in_a_question_lose_nothing(letters, tmp_path):
    class Odd(Letters):
        def examples(self, split):
            return [
                Example(e.id, e.question + "\u2028\x85", e.answer) for e in super().examples(split)
            ]

        def prompt(self, example):
            return f"{example.question[:2]} =>"

    result = letters("algo.iterations=1", task=Odd())
    assert result is not None
    assert result.reward_evaluations > 240


@pytest.mark.thorough
def test_compilation_is_told_apart_from_sampling(letters, first_iteration, tmp_path, monkeypatch):
    """What is rehearsed leaves no sample and no trace in those that follow."""
    monkeypatch.setattr(native, "compiled", lambda part, mode: part)
    letters("algo.iterations=1", "opt=[compile]")
    assert samples(tmp_path / "run") == samples(first_iteration)
    told = [
        (e["stage"], "compile_seconds" in e) for e in events(tmp_path / "run") if "seconds" in e
    ]
    assert told[:2] == [("generate", True), ("generate", False)]
    assert not any(compiled for _, compiled in told[1:])


def test_evaluation_prompts_are_reported_and_never_trained_on(letters, tmp_path):
    class Leaky(Letters):
        def prompt(self, example):
            spaces = "  " if example.id >= 80 else " "
            return f"{example.question}{spaces}=>"

        def examples(self, split):
            rows = list(super().examples(split))[:80]
            if split == "train":
                leaked = [
                    Example(len(rows) + i, e.question, e.answer)
                    for i, e in enumerate(super().examples("test"))
                ]
                rows += leaked
            return rows

    few = ["algo.samples_per_prompt=1", "algo.second_round_samples=0", "algo.epochs=1"]
    few += ["model.tiny.pretrain_steps=0", "algo.select.accept=0.01"]
    letters("algo.iterations=1", "algo.prompts=null", *few, task=Leaky("smooth"))
    log = (tmp_path / "run/run.log").read_text()
    assert "rft, 1 iteration, from the base weights" in log
    assert re.search(r"engine +native\n", log)
    assert log.index("40 training prompts are evaluation prompts too: left out") < log.index(
        "base: held-out"
    )
    held_out = {example.question for example in Leaky().examples("test")}
    drawn = {json.loads(line)["question"] for line in samples(tmp_path / "run")}
    assert len(drawn) == 80 - 20
    assert not drawn & held_out


@pytest.mark.thorough
def test_hinted_samples_train_without_the_hint(letters, tmp_path):
    class Hinting(Letters):
        def hint(self, example):
            return f"{example.question} =>"

        def reward(self, example, completion):
            return 0.0 if example.id % 2 else super().reward(example, completion)

    changes = ["algo.hint_samples=2", "algo.iterations=1"]
    letters(*changes, task=Hinting())
    rounds = {r["round"] for r in map(json.loads, samples(tmp_path / "run"))}
    assert rounds == {"first", "second", "hint"}
    with pytest.raises(ConfigError, match=r"Letters has no method `hint"):
        letters(*changes, folder="none", task=Letters())


MISTAKES = [
    ("algo.stage=train", "algo.stage", "train", "generate"),
    ("algo.stage=generate algo.shard=9/8", "algo.shard", "9/8", "I/N"),
    ("algo.shard=1/2", "algo.shard", "1/2", "algo.stage=all"),
    ("algo.sampling.temperature=0", "algo.sampling.temperature", 0, None),
    ("algo.select.accept=.inf", "algo.select.accept", ".inf", None),
]


@pytest.mark.parametrize(COLUMNS, MISTAKES)
def test_mistakes_are_refused(overrides, key, value, try_next):
    given = f"algo=rft task=countdown {overrides}"
    refuses(given, key=key, value=value, try_next=try_next)
