"""The loss of fine-tuning on given answers beside a plain loop over rows, and SFT beside TRL's
SFTTrainer: the same rows, order and batches.
"""

import json
import random
import warnings

import pytest
import torch

from common.device import hardware
from common.distributed import Context
from common.finetune import Tree, token_losses
from common.model import byte_tokenizer, logprobs
from launch import compose, train
from sft.train import prepare
from tests.support import events
from tests.support.calling import CHAT
from tests.support.models import EACH, small_model

STEPS, ROWS = 20, 4


def draw_trees(count=5):
    draw = random.Random(0)

    def ids(least, most):
        return [draw.randrange(2, 90) for _ in range(draw.randint(least, most))]

    trees = []
    for _ in range(count):
        completion = ids(4, 20)
        trees.append(Tree(ids(1, 12), [completion], [[draw.random() < 0.6 for _ in completion]]))
    return trees


def loop(model, trees):
    """-log p of the tokens that carry loss, one row after the other."""
    found = []
    for tree in trees:
        ids = torch.tensor([[*tree.prompt, *tree.completions[0]]])
        logp = model(input_ids=ids).logits[0, :-1].float().log_softmax(-1)
        own = logp.gather(1, ids[0, 1:, None]).flatten()[len(tree.prompt) - 1 :]
        found.append(-own[torch.tensor(tree.trains[0])])
    return torch.cat(found)


@pytest.mark.parametrize("name", EACH)
def test_losses_and_gradients_equal_a_loop_over_rows(name):
    model, trees = small_model(name), draw_trees()
    wanted = loop(model, trees)
    gradients = torch.autograd.grad(wanted.mean(), list(model.parameters()))
    logprobs.prepare(model)
    found = token_losses(model, trees, torch.device("cpu"), torch.float32)
    torch.testing.assert_close(found.sort().values, wanted.sort().values, rtol=0, atol=1e-5)
    for ours, theirs in zip(
        torch.autograd.grad(found.mean(), list(model.parameters())), gradients, strict=True
    ):
        torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-6)


def settings(folder, rows):
    return compose(
        [
            *("algo=sft", "hardware=cpu", "model=hf", f"model.path={folder}"),
            *("task=custom", f"task.path={rows}", "task.prompt_field=messages"),
            *(f"algo.steps={STEPS}", f"algo.prompts_per_step={ROWS}", "algo.lr=1e-3"),
            *("algo.lr_schedule={kind: constant, end: 1.0}", "algo.warmup_steps=0"),
            *("algo.optimizer.kwargs={weight_decay: 0.0}", "algo.sampling.max_new_tokens=4"),
            *("evaluate.examples=2", "evaluate.every=0"),
        ]
    )


@pytest.fixture
def conversations(tmp_path):
    """A small model with a chat template, and rows of one to three turns."""
    folder, rows = tmp_path / "model", tmp_path / "rows.jsonl"
    tokenizer = byte_tokenizer()
    tokenizer.chat_template = CHAT
    tokenizer.save_pretrained(folder)
    model = small_model("llama", len(tokenizer))
    model.config.eos_token_id = model.generation_config.eos_token_id = tokenizer.eos_token_id
    model.save_pretrained(folder)
    draw = random.Random(0)
    words = ["blue", "red", "far", "seven", "no"]
    lines = []
    for number in range(60):
        turns = [{"role": "user", "content": f"row {number}"}]
        for _ in range(draw.randint(1, 3)):
            turns.append({"role": "assistant", "content": draw.choice(words)})
            turns.append({"role": "user", "content": draw.choice(words)})
        lines.append(json.dumps({"messages": turns[:-1]}))
    rows.write_text("\n".join(lines))
    return folder, rows


def train_with_trl(trl, model, data, folder):
    """The losses of TRL's SFTTrainer."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        arguments = trl.SFTConfig(
            output_dir=str(folder / "trl"),
            per_device_train_batch_size=ROWS,
            max_steps=STEPS,
            learning_rate=1e-3,
            lr_scheduler_type="constant",
            weight_decay=0.0,
            max_grad_norm=1.0,
            logging_steps=1,
            logging_nan_inf_filter=False,
            bf16=False,
            report_to=[],
            save_strategy="no",
            use_cpu=True,
            train_sampling_strategy="sequential",
            dataset_kwargs={"skip_prepare_dataset": True},
        )
        trainer = trl.SFTTrainer(model=str(model), args=arguments, train_dataset=data)
        trainer.train()
    return [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]


@pytest.mark.run
def test_losses_equal_trl_over_twenty_steps(conversations, tmp_path, in_cache):
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trl = pytest.importorskip("trl", reason="TRL is not installed: pip install -e .[peers]")
        datasets = pytest.importorskip("datasets", reason="pip install -e .[peers]")
    run = settings(*conversations)
    train(run, tmp_path / "run")
    ours = [event["loss"] for event in events(tmp_path / "run")]
    parts, _, _ = prepare(run, Context(0, 1, hardware.find(run.hardware), tmp_path / "again"), None)
    trees = [
        parts.examples.trees[example.id] for example in parts.examples.order.take(0, STEPS * ROWS)
    ]
    data = [
        {
            "input_ids": [*tree.prompt, *tree.completions[0]],
            "labels": [-100] * len(tree.prompt)
            + [
                token if trains else -100
                for token, trains in zip(tree.completions[0], tree.trains[0], strict=True)
            ],
        }
        for tree in trees
    ]
    theirs = train_with_trl(trl, conversations[0], datasets.Dataset.from_list(data), tmp_path)
    assert len(ours) == len(theirs) == STEPS
    assert max(abs(a - b) for a, b in zip(ours, theirs, strict=True)) < 1e-5
    assert ours[-1] < ours[0]
