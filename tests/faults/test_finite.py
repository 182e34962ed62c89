"""NaN and infinity in rewards, logits, loss and gradients; guards on what drifts."""

import importlib
import json
import math
import random
from dataclasses import replace

import pytest
import torch
import torch.distributed as dist

from common import language_model, optim
from common.checkpoint import checkpoint
from common.config import ConfigError, SamplingConfig
from common.distributed.context import fingerprint
from common.distributed.workers import launch
from common.engine import Requests
from common.sampling.native import Sampler
from common.system.signals import EXIT_NUMBERS, RunStopped
from ddp_bench.step import Stepper
from grpo.train import train as grpo_train
from launch import compose, train
from tests.support import SMALL, TINY, events
from tests.support.letters import Letters
from tests.support.models import small_model
from tests.support.refusals import COLUMNS, refuses

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("in_cache")]
SKIP = ["not_finite.policy=skip", "not_finite.max_skips=2"]
EGGROLL = [
    *SMALL,
    "algo=eggroll",
    "algo.sigma=0.1",
    "algo.sampling.temperature=1.0",
    "checkpoint.every=1",
]
GRPO = [
    *(
        *TINY,
        "algo=grpo",
        "task=translate",
        "algo.prompts_per_step=2",
        "algo.samples_per_prompt=4",
        "algo.steps=4",
    ),
    *(
        "algo.sampling.max_new_tokens=8",
        "algo.resample_rounds=0",
        "evaluate.examples=4",
        "checkpoint.every=1",
    ),
]
RANKS = ["opt=[ddp]", "opt.ddp.ranks=2"]
_ORDER = list(range(len(Letters().examples("train"))))
random.Random("order 0 0").shuffle(_ORDER)  # seed 0, epoch 0
FAULTY = _ORDER[5]  # a row of the third step of two prompts each


def weights(folder, step):
    return checkpoint.load(folder / "checkpoints" / f"step-{step:08d}").tensors


def same(one, other):
    return all(torch.equal(tensor, other[name]) for name, tensor in one.items())


def rows(folder):
    return [json.loads(line) for line in (folder / "not_finite.jsonl").read_text().splitlines()]


class OnRank1(Letters):
    """The reward of one row is not a number, and on rank 1 alone."""

    def reward(self, example, completion):
        if example.id == FAULTY and (not dist.is_initialized() or dist.get_rank() == 1):
            return math.inf
        return super().reward(example, completion)


@pytest.fixture(scope="module")
def two_ranks(tmp_path_factory, cache, warm):
    """What two ranks came to, started once for all: see `on_two_ranks`. The folder, and their
    results.
    """
    folder = tmp_path_factory.mktemp("ranks")
    arguments = (f"{__name__}:on_two_ranks", compose([*EGGROLL, *RANKS]), folder)
    return folder, warm.call(launch, *arguments, CLUTCH_CACHE=str(cache))


def on_two_ranks(run, context, _):
    """Runs in each of two ranks."""
    runs = {
        "eggroll": (EGGROLL, OnRank1("smooth")),
        "grpo": (GRPO, OnRank1("smooth")),
        "loss": (GRPO, BadLossOnRank1("smooth")),
    }
    found = {}
    for name, (arguments, task) in runs.items():
        out = context.out_dir / name
        if context.main:
            out.mkdir()
        context.barrier()
        given = compose([*arguments, *SKIP, *RANKS, "checkpoint.keep=9"])
        train_here = importlib.import_module(f"{given.algo.name}.train").train
        found[name] = train_here(given, replace(context, out_dir=out), task)
    found["drift"] = drift_apart(context)
    with pytest.MonkeyPatch.context() as patch:
        if not context.main:
            patch.delattr(language_model, "load_model")  # rank 0 alone reads
        model, _ = language_model.load_on_all_ranks(run, Letters("smooth"), context, torch.float32)
        found["loaded"] = context.gather_objects(fingerprint(model.parameters()))
        with pytest.raises(ConfigError) as caught:
            language_model.load_on_all_ranks(run, OtherRows("smooth"), context, torch.float32)
        found["rows"] = str(caught.value)
    return found


def drift_apart(context):
    """Move a weight of rank 1 alone in the third step. Return what each rank stops with."""
    inner, out = optim.Updater.step, context.out_dir / "drift"
    out.mkdir(exist_ok=True)

    def step(self, *arguments):
        found, self.made = inner(self, *arguments), getattr(self, "made", 0) + 1
        if context.rank == 1 and self.made == 3:
            self.parameters[0].data[0, 0] += 1e-6
        return found

    given = compose([*GRPO, *RANKS])
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(optim.Updater, "step", step)
        with pytest.raises(RunStopped) as stop:
            grpo_train(given, replace(context, out_dir=out), Letters("smooth"))
    return context.gather_objects((stop.value.code, str(stop.value)))


@pytest.mark.parametrize("algo", ["eggroll", "grpo"])
def test_a_nan_reward_on_one_rank_skips_everywhere(algo, two_ranks):
    folder, result = two_ranks[0] / algo, two_ranks[1][algo]
    assert (result.steps, result.skipped_steps) == (4, 1)
    assert json.loads((folder / "result.json").read_text())["skipped_steps"] == 1
    assert [event["skipped_steps"] for event in events(folder)] == [0, 0, 1, 1]
    assert [event["reward"] is None for event in events(folder)] == [False, False, True, False]
    moved = [not same(weights(folder, step), weights(folder, step + 1)) for step in (1, 2, 3)]
    assert moved == [True, False, True]
    kept = rows(folder)
    assert {(row["step"], row["rank"], row["id"], row["what"]) for row in kept} == {
        (3, 1, FAULTY, "NaN or infinity in a reward or logits")
    }
    assert {(row["reward"], row["logits"]) for row in kept} == {("inf", "finite")}
    assert all(row["prompt"].endswith("=>") and isinstance(row["completion"], str) for row in kept)


def test_a_nan_loss_on_one_rank_skips_everywhere(two_ranks):
    folder, result = two_ranks[0] / "loss", two_ranks[1]["loss"]
    assert (result.steps, result.skipped_steps) == (4, 1)
    assert [event["loss"] is None for event in events(folder)] == [False, False, True, False]
    assert same(weights(folder, 2), weights(folder, 3))
    assert not same(weights(folder, 3), weights(folder, 4))
    assert {row["what"] for row in rows(folder)} == {"loss nan, gradient norm nan"}


def test_other_data_on_a_rank_are_found_before_the_first_step(two_ranks):
    assert two_ranks[1]["rows"].startswith(
        "the rows of the task on rank 1 are not those of rank 0, so the ranks would train apart."
        " Give all ranks the same files"
    )


def test_one_rank_reads_the_model_and_all_have_its_weights(two_ranks):
    first, second = two_ranks[1]["loaded"]
    assert first == second
    assert any(first)


def test_ranks_whose_weights_have_drifted_apart_stop_at_the_next_checkpoint(two_ranks):
    """The checkpoints before it are kept, and say where to go on."""
    folder, stops = two_ranks[0] / "drift", two_ranks[1]["drift"]
    for code, text in stops:
        assert code == EXIT_NUMBERS
        assert text == (
            "step 3: the weights of rank 1 are no longer those of rank 0, so the ranks train"
            " apart. Use devices of one kind, or opt=fsdp."
            f" Last good checkpoint: {folder}/checkpoints/step-00000002."
        )
    assert not (folder / "checkpoints/step-00000003").exists()


@pytest.mark.parametrize(
    "arguments",
    [EGGROLL, pytest.param(GRPO, marks=pytest.mark.thorough)],
    ids=["eggroll", "grpo"],
)
def test_a_resumed_run_meets_a_skipped_step_again(arguments, tmp_path):
    given = [*arguments, *SKIP, "checkpoint.keep=9"]
    train(compose(given), tmp_path, OnRank1("smooth"))
    kept, end = rows(tmp_path), weights(tmp_path, 4)
    assert (
        f"step 3 is left out (1 of 2): NaN or infinity in a reward or logits on example {FAULTY}."
        f" The rows are in {tmp_path}" in (tmp_path / "run.log").read_text()
    )
    for step in (3, 4):
        (tmp_path / "checkpoints" / f"step-{step:08d}" / "manifest.json").unlink()
    again = train(compose([*given, "resume=auto"]), tmp_path, OnRank1("smooth"))
    assert (again.skipped_steps, rows(tmp_path)) == (1, kept)
    assert same(weights(tmp_path, 4), end)


class Never(Letters):
    def reward(self, example, completion):
        return math.nan


@pytest.mark.parametrize(
    "arguments",
    [pytest.param(EGGROLL, marks=pytest.mark.thorough), GRPO],
    ids=["eggroll", "grpo"],
)
def test_after_max_skips_the_run_stops(arguments, tmp_path):
    with pytest.raises(
        RunStopped, match=r"^step 3: .* not_finite\.max_skips=2 allows\. Last good ch"
    ) as stop:
        train(compose([*arguments, *SKIP]), tmp_path, Never("smooth"))
    assert stop.value.code == EXIT_NUMBERS
    assert {row["step"] for row in rows(tmp_path)} == {1, 2, 3}


class BadLossOnRank1(Letters):
    """The loss of rank 1 is not finite in one forward of the third step."""

    def examples(self, split):
        from grpo import train as module

        whole, calls = module.policy_loss, []

        def bad(*arguments, **options):
            loss, sums = whole(*arguments, **options)
            calls.append(loss)
            return (loss * math.nan if len(calls) == 3 else loss), sums

        if (
            split == "test"
            and dist.is_initialized()
            and dist.get_rank() == 1
            and "bad" not in whole.__name__
        ):
            module.policy_loss = bad
        return super().examples(split)


def test_rft_counts_a_sample_without_a_finite_reward_as_wrong(tmp_path, monkeypatch):
    from common import finetune

    whole, calls = finetune.token_losses, []

    def bad(*arguments):
        calls.append(arguments)
        return whole(*arguments) * (math.nan if len(calls) == 2 else 1)

    monkeypatch.setattr(finetune, "token_losses", bad)
    sizes = [
        "algo.prompts=8",
        "algo.validation_prompts=0",
        "algo.samples_per_prompt=4",
        "algo.prompts_per_batch=4",
    ]
    more = [
        "algo.second_round_samples=0",
        "algo.epochs=2",
        "algo.batch_size=8",
        "evaluate.samples=null",
        "algo.iterations=1",
    ]
    rft = [
        *TINY,
        "algo=rft",
        "task=translate",
        *sizes,
        *more,
        "algo.select.accept=0.1",
        "algo.sampling.max_new_tokens=8",
    ]
    chosen = []

    class Faulty(Letters):
        def reward(self, example, completion):
            chosen.append(example.id)
            return math.inf if example.id == chosen[0] else 0.5 + len(completion) / 100

        def examples(self, split):
            return super().examples(split)[:12]

    with pytest.raises(
        RunStopped,
        match=r"^step 2: NaN or infinity in a reward or logits on example \d+\. The rows are in",
    ) as stop:
        train(compose(rft), tmp_path / "stop", Faulty())
    assert stop.value.code == EXIT_NUMBERS
    chosen.clear()
    calls.clear()
    tiny = [
        "model.tiny.pretrain_steps=40",
        "evaluate.examples=4",
    ]  # so that it learns to end its answers
    result = train(compose([*rft, *SKIP, *tiny]), tmp_path / "skip", Faulty())
    samples = [
        json.loads(line)
        for line in (tmp_path / "skip/iteration-1/samples-1-of-1.jsonl").read_text().splitlines()
    ]
    of_faulty = [s for s in samples[1:] if s["prompt"] == chosen[0]]
    assert [(s["accepted"], s["reward"]) for s in of_faulty] == [(False, 0.0)] * 4
    assert any(s["accepted"] for s in samples[1:])
    kinds = {row["what"].split()[0] for row in rows(tmp_path / "skip")}
    assert kinds == {"NaN", "loss"}
    trained = [event for event in events(tmp_path / "skip") if event["stage"] == "finetune"]
    assert [event["loss"] is None for event in trained].count(True) == 1
    assert result.skipped_steps == trained[-1]["skipped_steps"] == 2
    for shard in (1, 2):  # each keeps its own rows
        chosen.clear()
        part = ["algo.stage=generate", f"algo.shard={shard}/2"]
        train(compose([*rft, *SKIP, *tiny, *part]), tmp_path / "parts", Faulty())
        kept = rows(tmp_path / f"parts/shard-{shard}-of-2")
        assert {row["id"] for row in kept} == {chosen[0]}


def test_classify_leaves_out_a_step_without_a_finite_gradient(tmp_path, monkeypatch):
    whole, calls = Stepper.backward, []

    def bad(self, *arguments):
        loss = whole(self, *arguments)
        calls.append(loss)
        if len(calls) == 2:
            next(self.model.parameters()).grad.fill_(math.inf)
        return loss

    monkeypatch.setattr(Stepper, "backward", bad)
    small = [
        "algo.model.size=32",
        "algo.model.feedforward=64",
        "algo.tokenizer.vocabulary=600",
        "task.rows=120",
    ]
    given = [
        "algo=classify",
        "hardware=cpu",
        *small,
        "task.test_rows=20",
        "algo.batch_size=33",
        "algo.epochs=1",
    ]
    result = train(compose([*given, *SKIP]), tmp_path / "skip")
    assert (result.steps, result.skipped_steps) == (4, 1)
    second = events(tmp_path / "skip")[1]["rows"]
    assert len(rows(tmp_path / "skip")) == second, (
        "which of the batch it was cannot be told, so all are kept"
    )
    calls.clear()
    with pytest.raises(
        RunStopped,
        match=r"^step 2: loss \S+, gradient norm inf on example .* and \d+ more\. The rows",
    ):
        train(compose(given), tmp_path / "stop")


def test_logits_that_are_not_finite_are_noticed(tmp_path):
    model = small_model("llama")
    sampler = Sampler(model, pad_id=0, stop_ids=[], rows=4)
    for temperature in (0.0, 1.0):
        sampling = SamplingConfig.uncut(3, temperature)
        assert not sampler.generate(Requests(prompts=[[1, 2], [3]]), sampling).broken.any()
        with torch.no_grad():
            before = model.model.embed_tokens.weight[3].clone()
            model.model.embed_tokens.weight[3] = math.nan
        assert sampler.generate(Requests(prompts=[[1, 2], [3]]), sampling).broken.tolist() == [
            False,
            True,
        ]
        with torch.no_grad():
            model.model.embed_tokens.weight[3] = before
    with pytest.raises(
        RunStopped, match="step 1: NaN or infinity in a reward or logits on example"
    ) as stop:
        train(compose([*EGGROLL, "algo.sigma=1e30"]), tmp_path, Letters("smooth"))
    assert stop.value.code == EXIT_NUMBERS
    assert {(row["reward"] == "nan", row["logits"]) for row in rows(tmp_path)} == {
        (False, "not finite")
    }


GUARDS = {
    "drift": (
        [*EGGROLL, "algo.stop_at.drift=1e-9"],
        r"^step 1: drift \S+ is above algo\.stop_at\.drift=1e-09\. Lower",
    ),
    "kl": (
        [*GRPO, "algo.kl.beta=0.1", "algo.stop_at.kl=1e-12", "algo.lr=0.01"],
        (
            r"^step 2: kl \S+ is above algo\.stop_at\.kl=1e-12\. Lower algo\.lr or raise"
            r" algo\.kl\.beta"
        ),
    ),
    "ratio": (
        [*GRPO, "algo.num_iterations=2", "algo.stop_at.approx_kl=1e-12", "algo.lr=0.01"],
        (
            r"^step 2: approx_kl \S+ is above algo\.stop_at\.approx_kl=1e-12\. Lower algo\.lr, or"
            r" algo\.num_iterations or algo\.minibatches"
        ),
    ),
    "entropy": (
        [*GRPO, "algo.stop_at.entropy_below=99"],
        r"^step 1: entropy \S+ is below algo\.stop_at\.entropy_below",
    ),
}


@pytest.mark.parametrize("name", GUARDS)
def test_a_guard_stops_the_run_after_logging_the_step(name, tmp_path):
    arguments, text = GUARDS[name]
    with pytest.raises(RunStopped, match=text) as stop:
        train(compose([*arguments, "evaluate.every=1"]), tmp_path, Letters("smooth"))
    assert stop.value.code == EXIT_NUMBERS
    log = events(tmp_path)
    assert len(log) == int(str(stop.value)[5])
    assert "metric" not in log[-1]


MISTAKES = [
    ("not_finite.max_skips=3", "not_finite.max_skips", 3, "not_finite.policy=stop"),
    ("not_finite.policy=skip", "not_finite.policy", "skip", "not_finite.max_skips"),
    ("not_finite.policy=skp", "not_finite.policy", "skp", "'skip'"),
    ("algo=grpo algo.stop_at.kl=1", "algo.stop_at.kl", 1, "algo.kl.beta"),
    ("algo.stop_at.drift=-1", "algo.stop_at.drift", -1, "above 0"),
]


@pytest.mark.parametrize(COLUMNS, MISTAKES)
def test_mistakes_are_refused(overrides, key, value, try_next):
    refuses(overrides, key=key, value=value, try_next=try_next)


class OtherRows(Letters):
    def examples(self, split):
        found = super().examples(split)
        return found[::-1] if split == "test" and dist.get_rank() == 1 else found
