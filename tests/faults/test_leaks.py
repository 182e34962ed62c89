"""Memory is flat over a run: no tensor, no object and no resident page more after many steps than
after a few.
"""

import gc
import os

import pytest
import torch

from common.report.tracker import Tracker
from launch import compose, train
from tests.support import SMALL, TINY
from tests.support.letters import Letters

pytestmark = [pytest.mark.faults, pytest.mark.usefixtures("in_cache")]
WARM = 20  # steps, after which allocators and caches have what they keep
SHORT, LONG = 40, 1000

# With {steps} steps; the events of RFT are also chunks of samples, whose records it keeps until the
# iteration is done.
RUNS = {
    "eggroll": [*SMALL, "algo=eggroll", "algo.steps={steps}", "algo.sampling.temperature=1.0"],
    "grpo": [
        *(
            *TINY,
            "algo=grpo",
            "task=translate",
            "algo.steps={steps}",
            "algo.prompts_per_step=2",
            "evaluate.examples=2",
        ),
        *(
            "algo.samples_per_prompt=2",
            "algo.sampling.max_new_tokens=4",
            "algo.resample_rounds=0",
            "algo.kl.beta=0.1",
        ),
    ],
    "rft": [
        *(
            *TINY,
            "algo=rft",
            "task=translate",
            "algo.prompts=8",
            "algo.validation_prompts=0",
            "algo.epochs={steps}",
        ),
        *(
            "algo.samples_per_prompt=4",
            "algo.second_round_samples=0",
            "algo.prompts_per_batch=8",
            "algo.batch_size=64",
        ),
        *(
            "algo.iterations=1",
            "evaluate.samples=null",
            "evaluate.examples=2",
            "algo.sampling.max_new_tokens=4",
        ),
        *("algo.select.accept=0.01", "model.tiny.pretrain_steps=40"),
    ],
    "classify": [
        *(
            "algo=classify",
            "hardware=cpu",
            "task.rows=80",
            "task.test_rows=10",
            "algo.batch_size=40",
            "algo.patience=null",
        ),
        *(
            "algo.model.size=16",
            "algo.model.feedforward=16",
            "algo.model.heads=2",
            "algo.tokenizer.vocabulary=400",
        ),
        *("algo.epochs={epochs}", "algo.validation_share=0"),  # two steps each
    ],
}


def resident() -> float:
    """MB of this process."""
    with open("/proc/self/statm", encoding="ascii") as file:
        return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE") / 2**20


@pytest.mark.parametrize("steps", [SHORT, pytest.param(LONG, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "algo", [pytest.param(a, marks=[pytest.mark.thorough] * (a != "eggroll")) for a in RUNS]
)
def test_memory_is_flat(algo, steps, tmp_path, monkeypatch):
    write, seen, found = Tracker.write, [], {}

    def watched(self, event):
        write(self, event)
        seen.append(event["step"])
        if len(seen) in (WARM, steps):
            gc.collect()
            objects = gc.get_objects()
            tensors = sum(
                issubclass(type(value), torch.Tensor) for value in objects
            )  # isinstance asks lazy modules
            found[len(seen)] = (tensors, len(objects), resident())

    monkeypatch.setattr(Tracker, "write", watched)
    arguments = [text.format(steps=steps, epochs=steps // 2) for text in RUNS[algo]]
    train(
        compose([*arguments, "checkpoint.every=7"]),
        tmp_path,
        Letters("smooth") if algo != "classify" else None,
    )
    (tensors, objects, megabytes), (more_tensors, more_objects, more_megabytes) = (
        found[WARM],
        found[steps],
    )
    print(
        f"{algo}: {tensors} -> {more_tensors} tensors, {objects} -> {more_objects} objects",
        end=", ",
    )
    print(f"{megabytes:.1f} -> {more_megabytes:.1f} MB from step {WARM} to {steps}")
    assert more_tensors - tensors <= 8
    assert more_objects - objects <= 400
    assert more_megabytes - megabytes <= (4 if steps == SHORT else 12)
