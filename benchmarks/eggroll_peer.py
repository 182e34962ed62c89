"""Make steps with another package of EGGROLL for `python -m benchmarks eggroll --peers PYTHON`, in
the environment of that Python.

    PYTHON eggroll_peer.py {eggroll-es,torcheggroll} MODEL

Every line on standard input is a step, {"members": 32, "prompts": [[id, ...], ...], "new_tokens":
32, "threads": 2}: noise of rank 1, greedy completions of each member for each prompt, a fitness per
member, and the update. The answer is the number of sampled tokens.
"""

import json
import os
import sys
from collections.abc import Callable
from typing import Any

sys.path.pop(0)  # this folder, where `eggroll` is a benchmark; eggroll-es has that name, too

import torch
from transformers import AutoModelForCausalLM

SIGMA, LR = 0.005, 0.01


def sample(model: Any, prompts: list[list[int]], new_tokens: int) -> torch.Tensor:
    """Return greedy completions, int64 [prompts, new tokens]."""
    ids = torch.tensor(prompts)
    made = model.generate(
        ids,
        attention_mask=torch.ones_like(ids),
        do_sample=False,
        max_new_tokens=new_tokens,
        min_new_tokens=new_tokens,
        pad_token_id=0,
    )
    return made[:, ids.shape[1] :]


def score(tokens: torch.Tensor) -> float:
    """Return a fitness that differs from member to member."""
    return (tokens % 97).float().mean().item()


def evolve_es(model: Any, work: dict[str, Any]) -> int:
    """Make a step of eggroll-es. Its `population_size` counts mirrored pairs."""
    from eggroll import EggrollConfig, EggrollTrainer  # type: ignore[attr-defined]

    sampled = 0

    def reward(model: Any, prompts: Any) -> float:
        nonlocal sampled
        tokens = sample(model, prompts, work["new_tokens"])
        sampled += tokens.numel()
        return score(tokens)

    config = EggrollConfig(
        population_size=work["members"] // 2, rank=1, sigma=SIGMA, lr=LR, generations=1
    )
    EggrollTrainer(model, config, reward).evolve([work["prompts"]])
    return sampled


def evolve_torch(model: Any, work: dict[str, Any]) -> int:
    """Make a step of torcheggroll. Its forward of a whole population cannot generate, so members
    are sampled one after the other.
    """
    from torcheggroll import TorchEggrollES  # type: ignore[import-not-found]

    es = TorchEggrollES(model, pop_size=work["members"], sigma=SIGMA, lr=LR, rank=1)
    kept = {name: value.detach().clone() for name, value in model.state_dict().items()}
    sampled, fitnesses = 0, []
    for weights in es.prepare_population():
        model.load_state_dict(weights, strict=False)
        tokens = sample(model, work["prompts"], work["new_tokens"])
        sampled += tokens.numel()
        fitnesses.append(score(tokens))
    model.load_state_dict(kept)
    es.apply_fitness_scores(torch.tensor(fitnesses))
    return sampled


PACKAGES: dict[str, Callable[[Any, dict[str, Any]], int]] = {
    "eggroll-es": evolve_es,
    "torcheggroll": evolve_torch,
}


def main() -> None:
    """Load the model, then answer until the input ends."""
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # what packages print is no answer
    step, folder = PACKAGES[sys.argv[1]], sys.argv[2]
    model: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval()
    model.generation_config.eos_token_id = None
    print("ready", file=answers, flush=True)
    for line in sys.stdin:
        work = json.loads(line)
        torch.set_num_threads(work["threads"])
        with torch.no_grad():
            print(step(model, work), file=answers, flush=True)


if __name__ == "__main__":
    main()
