"""RFT: chunks, resume, shards, selection, fine-tuning and the whole loop."""

import itertools
import json
import math
import random
import re
import signal
import time
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file

from common import optim
from common.config import ConfigError
from common.precision import Precision
from common.signals import EXIT_SIGNAL
from common.tasks import Example
from launch import compose, train
from rft import finetune
from rft.evaluate import pass_at
from rft.finetune import Tree, lay, micro_batches, steps, token_losses
from rft.generate import Store, check_same, missing
from rft.select import distinct, diverse, select
from tests.support import CONF, SMALL_RFT, events, samples
from tests.support.models import ARCHITECTURES, small_model


def composed(*overrides):
    return compose([*SMALL_RFT, *overrides], CONF)


def settings(**changes):
    run = compose(
        ["algo=rft", "task=countdown", *(f"algo.{key}={value}" for key, value in changes.items())]
    )
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


def test_rounds_ask_only_what_is_unsolved_and_chunks_cover_each_sample_once():
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
def test_pass_at_k_is_the_share_of_subsets_with_a_right_one(of, k):
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

    return [Tree(ids(1, 9), [ids(1, 7) for _ in range(draw.randint(1, 4))]) for _ in range(count)]


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


@pytest.mark.parametrize("packed", [False, True])
@pytest.mark.parametrize("name", ARCHITECTURES)
def test_a_shared_prompt_or_a_packed_row_changes_no_loss_and_no_gradient(name, packed):
    model, trees = small_model(name), some_trees()
    wanted = plain_losses(model, trees)
    wanted.mean().backward()
    gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
    model.zero_grad()
    rows = [trees[:2], trees[2:5], trees[5:]] if packed else [[tree] for tree in trees]
    layout = lay(rows, torch.device("cpu"))
    found = token_losses(model.base_model, model, layout, torch.float32)
    assert torch.allclose(found, wanted, atol=2e-5)
    found.mean().backward()
    for n, p in model.named_parameters():
        assert torch.allclose(p.grad, gradients[n], atol=2e-5), n


def test_a_packed_neighbour_has_no_influence():
    model, trees = small_model("llama"), some_trees()
    one = token_losses(
        model.base_model, model, lay([[trees[0], trees[1]]], torch.device("cpu")), torch.float32
    )
    other = token_losses(
        model.base_model, model, lay([[trees[0], trees[2]]], torch.device("cpu")), torch.float32
    )
    assert torch.allclose(one[: trees[0].targets], other[: trees[0].targets], atol=1e-6)


def test_steps_and_forwards_hold_every_tree_once():
    trees = some_trees(40)
    for epoch in (0, 1):
        cut = steps(trees, 8, epoch, seed=3)
        assert sorted(map(id, itertools.chain(*cut))) == sorted(map(id, trees))
        assert all(sum(len(t.completions) for t in step) >= 8 for step in cut[:-1])
    assert steps(trees, 8, 0, seed=3) != steps(trees, 8, 1, seed=3)
    for packing in (None, 64):
        forwards = micro_batches(trees, 8, packing)
        rows = [row for forward in forwards for row in forward]
        assert sorted(map(repr, itertools.chain(*rows))) == sorted(map(repr, trees))
        if packing:
            assert all(sum(t.tokens for t in row) <= packing or len(row) == 1 for row in rows)
            assert len(rows) < len(trees) / 2
        else:
            assert all(len(row) == 1 for row in rows)


# --- the loop, through launch.py's own functions


def test_a_tree_that_does_not_fit_is_cut_and_loses_nothing():
    trees = some_trees()
    alone = [row for forward in micro_batches(trees, 1, None) for row in forward]
    assert all(len(tree.completions) == 1 for (tree,) in alone)
    assert sorted((t.prompt, t.completions[0]) for (t,) in alone) == sorted(
        (t.prompt, c) for t in trees for c in t.completions
    )


@pytest.fixture
def letters(in_cache, tmp_path):
    """Run RFT on the letters task in this process; returns the result."""

    def run(*overrides, folder="run"):
        return train(composed(*overrides), tmp_path / folder)

    return run


@pytest.fixture
def command(launch):
    """The same with launch.py in a process of its own."""

    def run(*overrides):
        return launch(
            "--config-dir",
            CONF,
            *SMALL_RFT,
            *overrides,
        )

    return run


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def same_weights(one: Path, other: Path) -> bool:
    a, b = weights(one), weights(other)
    return a.keys() == b.keys() and all(torch.equal(a[k], b[k]) for k in a)


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


def test_stages_one_by_one_end_where_all_of_them_do(letters, tmp_path):
    letters("algo.iterations=1", folder="whole")
    for stage in ("generate", "select", "finetune", "evaluate"):
        assert letters("algo.iterations=1", f"algo.stage={stage}", folder="parts") is None
    assert samples(tmp_path / "whole") == samples(tmp_path / "parts")
    assert same_weights(tmp_path / "whole/iteration-1", tmp_path / "parts/iteration-1")
    name = "iteration-1/evaluation.json"
    assert (tmp_path / "whole" / name).read_text() == (tmp_path / "parts" / name).read_text()


def test_shards_are_merged_only_when_all_are_there_and_whole(letters, tmp_path):
    def shard(index):
        letters("algo.stage=generate", f"algo.shard={index}/3", folder="shards")

    shard(1)
    shard(3)
    with pytest.raises(
        ConfigError,
        match=r"samples-2-of-3.jsonl is missing. Make it: algo.stage=generate algo.shard=2/3",
    ):
        letters("algo.stage=select", folder="shards")
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


def test_a_stage_without_what_it_needs_says_which_is_next(letters):
    with pytest.raises(
        ConfigError, match=r"holds no samples for algo.stage=select. Give the folder of"
    ):
        letters("algo.stage=select")
    letters("algo.stage=generate")
    with pytest.raises(ConfigError, match=r"selected.json is missing. Make it: algo.stage=select"):
        letters("algo.stage=finetune")
    letters("algo.stage=select")
    with pytest.raises(
        ConfigError,
        match=r"selected.json was made with other settings: keep_per_prompt was 4, is 1",
    ):
        letters("algo.stage=finetune", "algo.select.keep_per_prompt=1")


def test_other_settings_do_not_go_on_with_a_run(letters):
    letters("algo.iterations=1")
    with pytest.raises(ConfigError, match="already holds a run"):
        letters("algo.iterations=1")
    with pytest.raises(
        ConfigError,
        match=r"finetune.json was made with other settings: algo.lr was 0.001, is 0.002",
    ):
        letters("algo.lr=0.002", "resume=auto")
    with pytest.raises(ConfigError, match=r"algo.sampling.temperature was 1.0, is 0.9"):
        letters("algo.sampling.temperature=0.9", "resume=auto", "algo.stage=select")


def test_nothing_accepted_is_said_with_numbers(letters):
    with pytest.raises(
        ConfigError, match=r"no completion of iteration 1 was accepted.*algo.samples_per_prompt"
    ):
        letters("task.scoring=smooth")


def test_the_run_stops_when_validation_does_not_rise(letters, tmp_path):
    # One epoch at a vanishing rate changes nothing, so the first iteration is no better than the
    # base.
    result = letters("algo.lr=1e-12", "algo.iterations=4", "algo.patience=2")
    assert result.after == result.before
    assert (
        len(list((tmp_path / "run").glob("iteration-*"))) == 3
    )  # the base and two that did not help


@pytest.mark.parametrize("start", ["base", "last"])
def test_where_an_iteration_starts(letters, tmp_path, start):
    letters(f"algo.start_from={start}", "algo.validation_prompts=0", "algo.lr=1e-9")
    base = tmp_path / "run"
    first, second = weights(base / "iteration-1"), weights(base / "iteration-2")
    assert any(not torch.equal(first[k], second[k]) for k in first)
    assert all(torch.allclose(first[k], second[k], atol=1e-5) for k in first)


def test_micro_batches_packing_and_recomputation_change_rounding_alone(letters, tmp_path):
    letters("algo.iterations=1", "algo.batch_size=32", folder="whole")
    variants = {
        "halved": ["algo.batch_size=32", "algo.train_rows=8"],
        "packed": ["algo.batch_size=32", "algo.packing=true", "algo.pack_tokens=128"],
        "recomputed": ["algo.batch_size=32", "opt=[checkpointing]"],
    }
    wanted = weights(tmp_path / "whole/iteration-1")
    for name, changes in variants.items():
        letters("algo.iterations=1", *changes, folder=name)
        assert samples(tmp_path / name) == samples(tmp_path / "whole")
        found = weights(tmp_path / name / "iteration-1")
        for key in wanted:
            assert torch.allclose(found[key], wanted[key], atol=2e-3), (name, key)


def test_two_ranks_make_the_samples_and_the_weights_of_one(command, tmp_path):
    one, two = tmp_path / "one", tmp_path / "two"
    command("algo.iterations=1", f"hydra.run.dir={one}")
    command("algo.iterations=1", "opt=[ddp]", "opt.ddp.ranks=2", f"hydra.run.dir={two}")
    assert samples(one) == samples(two)
    a, b = weights(one), weights(two)
    assert all(torch.allclose(a[k], b[k], atol=2e-3) for k in a)
    assert json.loads((two / "result.json").read_text())["world_size"] == 2


@pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning")
def test_lora_trains_adapters_that_peft_loads(letters, tmp_path):
    peft = pytest.importorskip("peft")
    from transformers import AutoModelForCausalLM

    result = letters("algo.lora.rank=8", "algo.lr=5e-3", "algo.iterations=1", "opt=[checkpointing]")
    assert result.after > result.before
    folder = tmp_path / "run/iteration-1"
    assert (folder / "adapter/adapter_model.safetensors").is_file()
    letters("algo.lora.rank=8", "algo.lr=1e-12", "algo.iterations=1", folder="base")
    base = AutoModelForCausalLM.from_pretrained(tmp_path / "base/iteration-1/model")
    merged = peft.PeftModel.from_pretrained(base, folder / "adapter").merge_and_unload()
    wanted = weights(folder)
    found = merged.state_dict()
    assert all(torch.allclose(found[key], value, atol=1e-5) for key, value in wanted.items())


@pytest.mark.parametrize(
    ("override", "text"),
    [
        (
            "algo.lora.alpha=16",
            "algo.lora.alpha=16 has no effect with algo.lora.rank=0: all weights are trained. Set",
        ),
        (
            "algo.lora.targets=q_proj",
            "algo.lora.targets=q_proj has no effect with algo.lora.rank=0",
        ),
        (
            "algo.pack_tokens=64",
            "algo.pack_tokens=64 has no effect with algo.packing=false. Add algo.packing=true,",
        ),
    ],
)
def test_settings_without_effect(override, text):
    with pytest.raises(ConfigError, match="^" + re.escape(text)):
        compose(["algo=rft", override])


def test_lora_targets_that_are_not_there_are_named(letters):
    pytest.importorskip("peft")
    with pytest.raises(
        ConfigError,
        match=r"algo.lora.targets='nothing': the model has no module 'nothing'. Modules: down",
    ):
        letters("algo.lora.rank=4", "algo.lora.targets=nothing", "algo.iterations=1")
    with pytest.raises(ConfigError, match=r"algo.optimizer.name='Foo' is not in torch.optim"):
        letters("algo.optimizer.name=Foo", folder="other")


def test_an_evaluation_of_other_settings_is_made_again(letters, tmp_path):
    letters("algo.iterations=1")
    before = json.loads((tmp_path / "run/iteration-0/evaluation.json").read_text())
    result = letters(
        "algo.iterations=1", "resume=auto", "evaluate.examples=8", "algo.pass_samples=3"
    )
    after = json.loads((tmp_path / "run/iteration-0/evaluation.json").read_text())
    assert (len(before["completions"]), len(after["completions"])) == (16, 8)
    assert set(result.metrics["after"]) == {"exact", "characters", "pass@1", "pass@3"}


def test_a_folder_of_another_algorithm_is_left_alone(letters, tmp_path):
    letters("algo.iterations=1")
    other = [
        "algo=grpo",
        "hardware=cpu",
        "model.tiny.pretrain_steps=0",
        "algo.steps=1",
        "task=translate",
    ]
    with pytest.raises(ConfigError, match=r"holds a run of algo=rft. Use another hydra.run.dir"):
        train(compose(other), tmp_path / "run")
    (tmp_path / "run/tracker.json").write_text("")  # cut short by a kill
    letters("algo.iterations=1", "resume=auto")


def test_complete_shards_are_used_and_incomplete_ones_are_not_sampled_again(letters, tmp_path):
    for index in (1, 2):
        letters("algo.stage=generate", f"algo.shard={index}/2")
    result = letters("algo.iterations=1", "resume=auto")
    assert result.reward_evaluations == len(samples(tmp_path / "run"))
    assert not (tmp_path / "run/iteration-1/samples-1-of-1.jsonl").exists()
    letters("algo.stage=generate", "algo.shard=1/2", folder="half")
    with pytest.raises(ConfigError, match=r"samples-2-of-2.jsonl is missing"):
        letters("algo.iterations=1", "resume=auto", folder="half")


def test_odd_line_ends_in_a_question_lose_nothing(in_cache, tmp_path):
    from tests.support.letters import Letters

    class Odd(Letters):
        def examples(self, split):
            return [
                Example(e.id, e.question + "\u2028\x85", e.answer) for e in super().examples(split)
            ]

        def prompt(self, example):
            return f"{example.question[:2]} =>"

    result = train(composed("algo.iterations=1"), tmp_path / "run", Odd())
    assert result is not None
    assert result.reward_evaluations > 240


def test_an_unused_rank_has_a_scaler_with_a_scale():
    """Of two ranks one may have no row in the first step: its gradients are the other's, its scaler
    must still work.
    """
    parameter = torch.nn.Parameter(torch.ones(2))
    config = settings()
    updater = optim.Updater(
        [parameter], config, Precision(torch.float16, scaler=True), torch.device("cpu")
    )
    updater.clear()
    parameter.grad = torch.full((2,), 65536.0)
    seen = updater.step(0.1, 1.0)
    assert math.isclose(seen["grad_norm"], 2**0.5, rel_tol=1e-5)
    assert seen["overflow"] == 0


@pytest.mark.faults
def test_memory_that_runs_out_halves_the_rows_for_good(letters, tmp_path, monkeypatch):
    letters("algo.iterations=1", folder="whole")
    real = finetune.lay

    def scarce(rows, device):
        if sum(len(tree.completions) for row in rows for tree in row) > 12:
            raise torch.OutOfMemoryError("out of memory")
        return real(rows, device)

    monkeypatch.setattr(finetune, "lay", scarce)
    letters("algo.iterations=1", folder="scarce")
    assert json.loads((tmp_path / "scarce/sizes.json").read_text())["train_rows"] == 8
    wanted, found = weights(tmp_path / "whole"), weights(tmp_path / "scarce")
    assert all(torch.allclose(found[k], wanted[k], atol=2e-3) for k in wanted)


def test_evaluation_prompts_are_reported_and_never_trained_on(in_cache, tmp_path):
    from tests.support.letters import Letters

    class Leaky(Letters):
        def prompt(self, example):
            spaces = "  " if example.id > 600 else " "
            return f"{example.question}{spaces}=>"

        def examples(self, split):
            rows = list(super().examples(split))
            if split == "train":
                leaked = [
                    Example(len(rows) + i, e.question, e.answer)
                    for i, e in enumerate(super().examples("test"))
                ]
                rows += leaked
            return rows

    few = ["algo.samples_per_prompt=1", "algo.second_round_samples=0", "algo.epochs=1"]
    train(composed("algo.iterations=1", "algo.prompts=null", *few), tmp_path / "run", Leaky())
    log = (tmp_path / "run/run.log").read_text()
    assert log.index("40 training prompts are evaluation prompts too: left out") < log.index(
        "base: held-out"
    )
    held_out = {example.question for example in Leaky().examples("test")}
    drawn = {json.loads(line)["question"] for line in samples(tmp_path / "run")}
    assert len(drawn) == 610 - 20
    assert not drawn & held_out


def test_hints_are_marked_and_the_prompt_without_them_is_trained_on(in_cache, tmp_path):
    from tests.support.letters import Letters

    class Hinting(Letters):
        def hint(self, example):
            return f"{example.question} =>"

        def reward(self, example, completion):
            return 0.0 if example.id % 2 else super().reward(example, completion)

    changes = ["algo.hint_samples=2", "algo.iterations=1"]
    train(composed(*changes), tmp_path / "run", Hinting())
    rounds = {r["round"] for r in map(json.loads, samples(tmp_path / "run"))}
    assert rounds == {"first", "second", "hint"}
    with pytest.raises(ConfigError, match=r"Letters has no method `hint"):
        train(composed(*changes), tmp_path / "none", Letters())


def test_environment_variables_of_the_first_scripts_are_defaults(monkeypatch):
    monkeypatch.setenv("MICRO_BATCH_SIZE", "96")
    monkeypatch.setenv("CHUNK_SIZE", "3")
    monkeypatch.setenv("A100_BATCH_SIZE", "16")
    monkeypatch.setenv("A100_GRAD_ACCUM", "2")
    found = settings(train_rows=24)
    assert (found.rollout_rows, found.chunk_size) == (96, 3)
    assert (found.train_rows, found.batch_size) == (24, 32)
    monkeypatch.delenv("A100_BATCH_SIZE")
    assert (settings().train_rows, settings().batch_size) == (None, 64)
    monkeypatch.setenv("CHUNK_SIZE", "many")
    with pytest.raises(ConfigError, match=r"environment variable CHUNK_SIZE='many' is no number"):
        settings()


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (["algo.stage=train"], "algo.stage='train' is not a choice."),
        (
            ["algo.stage=generate", "algo.shard=9/8"],
            "algo.shard='9/8' is no shard. Give one of I/N with I from 1 to N",
        ),
        (["algo.shard=1/2"], "algo.shard=1/2 has no effect with algo.stage=all"),
        (
            ["algo.sampling.temperature=0"],
            "algo.sampling.temperature=0 makes all samples of a prompt equal",
        ),
        (["algo.select.accept=1.5"], "algo.select.accept=1.5 is out of range"),
    ],
)
def test_mistakes_are_named(overrides, text):
    with pytest.raises(ConfigError) as error:
        compose(["algo=rft", "task=countdown", *overrides])
    assert str(error.value).startswith(text)


# --- killed and resumed, as processes


@pytest.fixture
def start(begin):
    """`command` that does not wait."""

    def run(*overrides):
        return begin(
            "--config-dir",
            CONF,
            *SMALL_RFT,
            *overrides,
        )

    return run


def wait_for(what, process, seconds=120):
    deadline = time.monotonic() + seconds
    while not what():
        assert process.poll() is None, process.said()[0]
        assert time.monotonic() < deadline
        time.sleep(0.005)


def lines_of(path: Path) -> int:
    return path.read_bytes().count(b"\n") if path.exists() else 0


@pytest.mark.faults
def test_killed_at_several_points_and_resumed_it_ends_the_same(start, command, tmp_path):
    whole, killed = tmp_path / "whole", tmp_path / "killed"
    command(f"hydra.run.dir={whole}")
    path = killed / "iteration-1/samples-1-of-1.jsonl"
    points = [
        lambda: lines_of(path) > 40,
        lambda: any((killed / "iteration-1/checkpoints").glob("step-*")),
        lambda: lines_of(killed / "iteration-2/samples-1-of-1.jsonl") > 40,
    ]
    for number, point in enumerate(points):
        process = start(f"hydra.run.dir={killed}", *(["resume=auto"] if number else []))
        wait_for(point, process)
        process.send_signal(signal.SIGKILL)
        process.communicate()
        if number == 0:  # and at a byte in the middle of a line
            with path.open("r+b") as file:
                file.truncate(path.stat().st_size - 7)
    command(f"hydra.run.dir={killed}", "resume=auto")
    for iteration in (1, 2):
        assert samples(killed, iteration) == samples(whole, iteration)
    assert same_weights(killed, whole)
    assert [e["step"] for e in events(killed)] == list(range(1, len(events(killed)) + 1))
    trained = [
        (e["iteration"], e["train_step"]) for e in events(killed) if e["stage"] == "finetune"
    ]
    assert trained == [
        (e["iteration"], e["train_step"]) for e in events(whole) if e["stage"] == "finetune"
    ]


@pytest.mark.faults
def test_sigterm_saves_and_says_how_to_go_on(start, command, tmp_path):
    folder = tmp_path / "run"
    process = start("algo.iterations=1", "algo.epochs=12", f"hydra.run.dir={folder}")
    wait_for(lambda: any((folder / "iteration-1/checkpoints").glob("step-*")), process)
    process.send_signal(signal.SIGTERM)
    output = process.communicate()[0]
    assert process.returncode == EXIT_SIGNAL, output
    assert "resume=auto" in output
    command("algo.iterations=1", "algo.epochs=12", f"hydra.run.dir={folder}", "resume=auto")
    assert (folder / "result.json").is_file()
