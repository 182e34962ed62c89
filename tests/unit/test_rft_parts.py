"""RFT in parts: chunks and their store, selection, fine-tuning."""

import itertools
import math
import random
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from common import optim
from common.config import ConfigError
from common.device.precision import Precision
from common.evaluation import pass_at
from common.examples import take_validation
from common.finetune import Tree, micro_batches, token_losses
from common.model import logprobs
from common.report import completions
from common.task import Example
from common.tasks import ExampleOrder
from launch import compose
from rft import models, stages
from rft.finetune import EPOCHS, MORE_EPOCHS, cut_epochs, steps
from rft.folder import RunFolder
from rft.generate import Store, check_same, missing
from rft.journal import Journal
from rft.plan import describe_variables
from rft.select import distinct, diverse, name_share, select
from tests.support.models import ARCHITECTURES, small_model
from tests.support.refusals import refuses

CPU = torch.device("cpu")


def settings(**changes):
    run = compose(["algo=rft", *(f"algo.{key}={value}" for key, value in changes.items())])
    return run.algo


def record(prompt, sample, completion="x", accepted=True, path="", **more):
    return {
        "prompt": prompt,
        "sample": sample,
        "round": "first",
        "completion": completion,
        "parsed": None,
        "finished": True,
        "accepted": accepted,
        "path": path,
        "entropy": 0.5,
        "tokens": [1],
    } | more


# --- chunks and the store


def test_chunks_cover_unsolved_samples_once():
    examples = [Example(i, str(i), "") for i in (7, 3, 5, 9, 1)]
    chosen = settings(
        samples_per_prompt=5,
        second_round_samples=3,
        hint_samples=2,
        prompts_per_batch=2,
        chunk_size=3,
    )
    held, rounds = {}, []
    while todo := missing(examples, held, chosen):
        assert len({chunk.round for chunk in todo}) == 1
        rounds.append(todo[0].round)
        for chunk in todo:
            for key in chunk.keys():  # noqa: SIM118 (not a dict)
                assert key not in held
                held[key] = record(*key, accepted=key in {(7, 4), (3, 6)})
    assert rounds == ["first", "second", "hint"]
    by_prompt = {e.id: sorted(s for p, s in held if p == e.id) for e in examples}
    assert by_prompt == {
        7: list(range(5)),  # solved in the first round
        3: list(range(8)),  # in the second
        5: list(range(10)),
        9: list(range(10)),
        1: list(range(10)),
    }


def test_a_chunk_that_lost_one_sample_is_made_again_whole():
    examples = [Example(i, str(i), "") for i in range(4)]
    chosen = settings(
        samples_per_prompt=4, second_round_samples=0, prompts_per_batch=2, chunk_size=2
    )
    held = {key: record(*key) for chunk in missing(examples, {}, chosen) for key in chunk.keys()}  # noqa: SIM118
    del held[2, 3]
    (again,) = missing(examples, held, chosen)
    assert sorted(again.keys()) == [(2, 2), (2, 3), (3, 2), (3, 3)]


def test_a_file_cut_at_any_byte_is_mended(tmp_path):
    path, header = tmp_path / "samples.jsonl", {"seed": 0, "text": "é"}
    store = Store(path, header, writes=True)
    rows = [record(i, 0, completion="naïve \u2028 line") for i in range(3)]
    for row in rows:
        store.add([row])
    whole = path.read_bytes()
    ends = [i + 1 for i, byte in enumerate(whole) if byte == ord("\n")]
    for length in range(len(whole)):
        path.write_bytes(whole[:length])
        found = Store(path, header, writes=True)
        # A line that only lacks its end is whole.
        held = sum(length >= end - 1 for end in ends[1:])
        assert list(found.held.values()) == rows[:held]
        found.add(rows[held:])
        assert path.read_bytes() == whole


def test_a_damaged_line_and_other_settings_are_errors(tmp_path):
    path = tmp_path / "samples.jsonl"
    store = Store(path, {"seed": 0}, writes=True)
    store.add([record(0, 0), record(1, 0)])
    with pytest.raises(ConfigError, match=r"seed was 0, is 1"):
        Store(path, {"seed": 1}, writes=True)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([lines[0], "{oops", lines[2]]) + "\n")
    with pytest.raises(ConfigError, match=r"samples.jsonl:2 is not a sample"):
        Store(path, {"seed": 0}, writes=True)


def test_samples_of_finished_iterations_count_under_any_settings(tmp_path):
    for index, samples in ((1, 2), (2, 3)):
        store = Store(tmp_path / f"samples-{index}-of-2.jsonl", {"seed": index}, writes=True)
        store.add([record(0, sample, tokens=[5, 6, 7], told=[[1, 2]]) for sample in range(samples)])
    folder: Any = SimpleNamespace(of=lambda iteration: tmp_path)
    assert RunFolder.count_samples(folder, 1) == (5, 10)


def test_settings_are_compared_by_name():
    with pytest.raises(ConfigError, match=r"algo.lr was 0.1, is 0.2"):
        check_same(Path("finetune.json"), {"algo": {"lr": 0.1}}, {"algo": {"lr": 0.2}})


# --- selection


def test_one_sample_a_path_the_most_travelled_first():
    rows = [
        record(0, 0, "a  b", path="1+1"),
        record(0, 1, "c", path="2*1"),
        record(0, 2, "d", path="2*1"),
        record(0, 3, "a b"),
        record(0, 4, "a   b"),
        record(0, 5, "a b"),
    ]
    assert [r["sample"] for r in distinct(rows)] == [3, 1, 0]


def test_the_farthest_texts_are_kept():
    rows = [record(0, i, text) for i, text in enumerate(["aaaa", "aaab", "bbbb", "aabb"])]
    assert [r["completion"] for r in diverse(rows, 2, 0.0)] == ["aaaa", "bbbb"]
    assert [r["completion"] for r in diverse(rows, 4, 0.5)] == ["aaaa", "bbbb", "aabb"]
    assert [r["completion"] for r in diverse(rows, 4, 0.6)] == ["aaaa", "bbbb"]


def test_selection_counts_and_filters():
    rows = [
        *(record(0, i, f"w{i}") for i in range(4)),  # always right
        *(record(1, i, f"w{i}", accepted=i == 0) for i in range(4)),
        *(record(2, i, f"w{i}", accepted=False) for i in range(4)),
    ]
    chosen = settings().select
    found = select(rows, chosen)
    assert {prompt: len(kept) for prompt, kept in found.kept.items()} == {0: 4, 1: 1}
    assert found.stats["accepted"] == 5
    assert found.stats["all_right_share"] == found.stats["all_wrong_share"] == 1 / 3
    assert found.stats["prompts_by_share_right"] == {
        "none": 1, "to 25%": 1, "to 50%": 0, "to 75%": 0, "below all": 0, "all": 1
    }  # fmt: skip
    chosen.drop_all_right, chosen.keep_per_prompt = True, 2
    found = select(rows, chosen)
    assert list(found.kept) == [1]
    assert found.stats["dropped_all_right"] == 1


@pytest.mark.parametrize(("of", "k"), [(8, 1), (8, 3), (8, 8), (5, 4)])
def test_pass_at_k_counts_right_subsets(of, k):
    for right in range(of + 1):
        flags = [i < right for i in range(of)]
        subsets = list(itertools.combinations(flags, k))
        assert math.isclose(
            pass_at(right, of, k), sum(map(any, subsets)) / len(subsets), abs_tol=1e-12
        )


# --- fine-tuning


def some_trees(count=6, vocabulary=97):
    draw = random.Random(0)

    def ids(low, high):
        return [draw.randrange(2, vocabulary) for _ in range(draw.randint(low, high))]

    made = []
    for _ in range(count):
        completions = [ids(1, 7) for _ in range(draw.randint(1, 4))]
        made.append(Tree(ids(1, 9), completions, [[True] * len(c) for c in completions]))
    return made


def plain_losses(model, trees):
    """Each completion in a row of its own, through the model as it is."""
    losses = []
    for tree in trees:
        for completion in tree.completions:
            whole = torch.tensor([tree.prompt + completion])
            logits = model(input_ids=whole).logits[0, len(tree.prompt) - 1 : -1]
            losses.append(
                torch.nn.functional.cross_entropy(
                    logits, whole[0, len(tree.prompt) :], reduction="none"
                )
            )
    return torch.cat(losses)


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_shared_prompt_changes_no_loss_and_no_gradient(name):
    model, trees = small_model(name), some_trees()
    wanted = plain_losses(model, trees)
    wanted.mean().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    logprobs.prepare(model)
    found = token_losses(model, trees, CPU, torch.float32)
    assert torch.allclose(found, wanted, atol=2e-5)
    found.mean().backward()
    for n, p in model.named_parameters():
        assert torch.allclose(p.grad, gradients[n], atol=2e-5), n


def test_a_neighbour_has_no_influence():
    model, trees = small_model("llama"), some_trees()
    logprobs.prepare(model)
    one, other = (token_losses(model, [trees[0], trees[i]], CPU, torch.float32) for i in (1, 2))
    assert torch.allclose(one[: trees[0].targets], other[: trees[0].targets], atol=1e-6)


def test_steps_and_forwards_hold_every_tree_once():
    trees = some_trees(40)
    for epoch in (0, 1):
        cut = steps(trees, 8, epoch, seed=3)
        assert sorted(map(id, itertools.chain(*cut))) == sorted(map(id, trees))
        assert all(sum(len(t.completions) for t in step) >= 8 for step in cut[:-1])
    assert steps(trees, 8, 0, seed=3) != steps(trees, 8, 1, seed=3)
    epochs = cut_epochs(trees, 8, 2, seed=3)
    assert epochs == [steps(trees, 8, epoch, seed=3) for epoch in (0, 1)]
    few, many = (cut_epochs(trees, rows, None, seed=3) for rows in (64, 1))
    assert (len(few), len(many)) == (MORE_EPOCHS, EPOCHS)
    trees.append(
        Tree([1], [[2]] * 8, [[True]] * 8)
    )  # beside prompts with one completion it would be 8 rows each
    forwards = micro_batches(trees, 8)
    assert sorted(map(repr, itertools.chain(*forwards))) == sorted(map(repr, trees))
    laid = [len(some) * max(len(t.completions) for t in some) for some in forwards]
    assert max(laid) == 8
    assert len(forwards) < len(trees) / 2


def test_a_large_tree_is_cut_without_loss():
    trees = some_trees()
    alone = [tree for forward in micro_batches(trees, 1) for tree in forward]
    assert all(len(tree.completions) == 1 for tree in alone)
    assert sorted((t.prompt, t.completions[0]) for t in alone) == sorted(
        (t.prompt, c) for t in trees for c in t.completions
    )


def test_an_unused_rank_has_a_scaler_with_a_scale():
    """Of two ranks one may have no row in the first step: its gradients are the other's, its scaler
    must still work.
    """
    parameter = torch.nn.Parameter(torch.ones(2))
    config = settings()
    updater = optim.Updater([parameter], config, Precision(torch.float16), torch.device("cpu"))
    updater.clear()
    parameter.grad = torch.full((2,), 65536.0)
    seen = updater.step(0.1, 1.0)
    assert math.isclose(seen["grad_norm"], 2**0.5, rel_tol=1e-5)
    assert seen["overflow"] == 0
    assert parameter.grad is None, "what is sampled next has the memory of the gradients"


def test_momentum_begins_after_an_overflow():
    """A fused SGD fills it in its first step: with what lies in memory, where that is skipped."""
    given = settings(optimizer="{name: SGD, kwargs: {momentum: 0.9}}", grad_clip=10.0)
    parameter = torch.nn.Parameter(torch.ones(2))
    updater = optim.Updater([parameter], given, Precision(torch.float16), CPU)
    for gradient, overflow in ((math.inf, 1.0), (32768.0, 0.0)):
        updater.clear()
        parameter.grad = torch.full((2,), gradient)
        assert updater.step(0.5, 1.0)["overflow"] == overflow
    [momentum] = [state["momentum_buffer"] for state in updater.optimizer.state.values()]
    assert momentum.tolist() == [1.0, 1.0]
    assert parameter.tolist() == [0.5, 0.5]


def test_a_resumed_optimizer_follows_the_runs_fused_setting():
    given = settings(optimizer="{name: SGD, kwargs: {momentum: 0.9, fused: false}}")
    plain = optim.Updater([torch.nn.Parameter(torch.ones(2))], given, Precision(torch.float32), CPU)
    given = settings(optimizer="{name: SGD, kwargs: {momentum: 0.9}}")
    fused = optim.Updater([torch.nn.Parameter(torch.ones(2))], given, Precision(torch.float32), CPU)
    plain.load(fused.state())
    assert plain.optimizer.param_groups[0]["fused"] is False


@pytest.mark.parametrize("name", ["Adam", "AdamW"])
def test_early_optimizer_state_equals_the_first_steps(name):
    """Weight decay, which Adam adds to gradients, is no part of it."""
    given = settings(optimizer=f"{{name: {name}, kwargs: {{weight_decay: 0.5}}}}")
    parameter = torch.nn.Parameter(torch.ones(2))
    updater = optim.Updater([parameter], given, Precision(torch.float32), CPU)
    state = updater.optimizer.state[parameter]
    assert not any(state[key].any() for key in ("step", "exp_avg", "exp_avg_sq"))
    assert updater.optimizer.param_groups[0]["weight_decay"] == 0.5


def test_every_optimizer_makes_its_state_early():
    """Rprop has no weight decay."""
    parameter = torch.nn.Parameter(torch.ones(2))
    optim.step_nowhere(torch.optim.Rprop([parameter], lr=0.5))
    assert parameter.tolist() == [1, 1]


def test_environment_variables_of_the_first_scripts_are_defaults(monkeypatch):
    monkeypatch.setenv("MICRO_BATCH_SIZE", "96")
    monkeypatch.setenv("CHUNK_SIZE", "3")
    monkeypatch.setenv("A100_BATCH_SIZE", "16")
    monkeypatch.setenv("A100_GRAD_ACCUM", "2")
    found = settings(train_rows=24)
    assert (found.rollout_rows, found.chunk_size) == (96, 3)
    assert (found.train_rows, found.batch_size) == (24, 32)
    names = ("CHUNK_SIZE=3", "A100_BATCH_SIZE=16 (overridden: 24)", "A100_GRAD_ACCUM=2")
    assert describe_variables(found) == ["MICRO_BATCH_SIZE=96", *names]
    monkeypatch.delenv("A100_BATCH_SIZE")
    assert (settings().train_rows, settings().batch_size) == (None, 64)
    assert describe_variables(settings())[-1] == "A100_GRAD_ACCUM=2"
    assert describe_variables(settings(batch_size=32))[-1] == "A100_GRAD_ACCUM=2 (overridden: 32)"
    monkeypatch.setenv("CHUNK_SIZE", "many")
    refuses(lambda: settings(), key="CHUNK_SIZE", value="many")


@pytest.mark.parametrize("name", ["MICRO_BATCH_SIZE", "A100_BATCH_SIZE"])
def test_a_variable_that_is_zero_is_refused_not_passed_over(name, monkeypatch):
    monkeypatch.setenv(name, "0")
    with pytest.raises(ConfigError, match="=0 is too small"):
        compose(["algo=rft"])


def test_ranks_number_events_like_rank_0(tmp_path):
    """Replies of environments are found again by the number of the event that they belong to."""
    folder = SimpleNamespace(
        finished=lambda _: False, begin=lambda _: None, sampling_cut=lambda _: False
    )
    context: Any = SimpleNamespace(main=False, gather_objects=lambda step: [8, step])
    work = SimpleNamespace(folder=folder, parts=SimpleNamespace(context=context))
    work.journal = journal = Journal.__new__(Journal)
    journal.step, journal.context = 7, context
    journal.count_shards = lambda _: None
    work.select = lambda _: SimpleNamespace(kept={0: []}, stats={})
    assert stages.select_samples(work, 1) is None
    assert journal.step == 8


def test_a_run_ends_when_all_prompts_are_solved():
    """In its first iteration it is an error, as nothing at all was learnt."""
    folder = SimpleNamespace(
        finished=lambda _: False, begin=lambda _: None, sampling_cut=lambda _: False
    )
    context = SimpleNamespace(main=False)
    work = SimpleNamespace(folder=folder, parts=SimpleNamespace(context=context))
    work.journal = SimpleNamespace(agree=lambda: None, count_shards=lambda _: None)
    chosen = settings().select
    chosen.drop_all_right = True
    always = [record(prompt, number) for prompt in (0, 1) for number in (0, 1)]
    work.select = lambda _: select(always, chosen)
    assert stages.select_samples(work, 2) == "algo.select.drop_all_right=true"
    refuses(
        lambda: stages.select_samples(work, 1),
        key="drop_all_right",
        value="true",
        try_next="2 prompts",
    )


def test_samples_that_are_all_cut_off_need_more_tokens():
    folder = SimpleNamespace(
        finished=lambda _: False, begin=lambda _: None, sampling_cut=lambda _: False
    )
    context = SimpleNamespace(main=False)
    parts = SimpleNamespace(context=context, task=SimpleNamespace())
    work = SimpleNamespace(folder=folder, parts=parts, cfg=settings())
    work.journal = SimpleNamespace(agree=lambda: None, count_shards=lambda _: None)
    stats = {"answered_share": None, "unscored_share": 0.0, "dropped_all_right": 0}
    for cut, advice in ((1.0, "algo.sampling.max_new_tokens="), (0.2, "algo.samples_per_prompt")):
        found = SimpleNamespace(kept={}, stats=stats | {"truncated_share": cut})
        work.select = lambda _, found=found: found
        with pytest.raises(ConfigError) as caught:
            stages.select_samples(work, 1)
        assert advice in str(caught.value)


def test_both_tables_of_prompts_have_the_same_columns():
    """That of the stage `select`, and that of the report's page."""
    columns = ["none", "to 25%", "to 50%", "to 75%", "below all", "all"]
    for of in (4, 7, 8):
        for right in range(of + 1):
            assert completions.find_column(right / of) == columns.index(name_share(right, of))


# --- the engine between two iterations


class Keeping:
    """An engine that records what happens to it."""

    separate = True

    def __init__(self) -> None:
        self.seen: list[Any] = []

    def rest(self) -> None:
        self.seen.append("rest")

    def refresh(self) -> None:
        self.seen.append("refresh")

    def close(self) -> None:
        self.seen.append("close")


class Given(Keeping):
    """An engine that can be given another model."""

    def use(self, model: Any) -> None:
        self.seen.append(model)


@dataclass(frozen=True)
class FewParts:
    lm: Any
    engine: Any


def test_an_engine_is_given_the_model_of_an_iteration():
    old, new = (SimpleNamespace(adapter=None, model=name) for name in ("old", "new"))
    parts: Any = models.without_sampler(FewParts(old, Given()))  # type: ignore[arg-type]
    assert parts.engine.seen == ["rest", None], "the old model can be freed"
    models.with_sampler(replace(parts, lm=new))
    assert parts.engine.seen == ["rest", None, "new", "refresh"]


def test_an_engine_with_a_fixed_model_is_closed():
    engine = Keeping()
    parts: Any = FewParts(SimpleNamespace(adapter=None, model="old"), engine)
    assert models.without_sampler(parts).engine is None
    assert engine.seen == ["close"]


def test_copies_of_validation_examples_are_not_trained_on():
    rows = [Example(id=n, question=f"{n % 10}?", answer=str(n)) for n in range(40)]
    rest, validation = take_validation(rows, 3, 0, lambda one: one.question, "algo.n")
    asked = {one.question for one in validation}
    assert validation == ExampleOrder(rows, 0).take(0, 3)
    assert rest == [one for one in rows if one.question not in asked]
    rest, validation = take_validation(rows, 3, 0, lambda _: None, "algo.n")
    assert (len(rest), len(validation)) == (37, 3)
    assert take_validation(rows, 0, 0, lambda _: "", "algo.n") == (rows, [])
    with pytest.raises(ConfigError, match=r"algo\.n=3 leaves none of the 40"):
        take_validation(rows, 3, 0, lambda _: "", "algo.n")
