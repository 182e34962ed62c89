"""The log-probability of answers under each member, against weights that are perturbed one member
after the other.
"""

import pytest
import torch

from common.finetune import Tree
from eggroll.likelihood import Likelihood
from eggroll.noise import Noise
from tests.oracles.test_noise import materialised, noise_config
from tests.support.models import EACH, small_model


def trees() -> list[Tree]:
    draw = torch.Generator().manual_seed(2)
    made = []
    for prompt, answer, between in ((5, 4, 0), (3, 7, 2), (6, 1, 0)):
        ids = torch.randint(2, 90, (prompt + answer,), generator=draw).tolist()
        carries = [True] * answer
        if between:  # a reply inside an episode, which carries no loss
            carries[2 : 2 + between] = [False] * between
        made.append(Tree(ids[:prompt], [ids[prompt:]], [carries]))
    return made


@pytest.mark.parametrize("name", EACH)
@pytest.mark.parametrize("mirrored", [True, False])
@pytest.mark.parametrize("per_token", [True, False])
def test_likelihoods_equal_those_of_materialised_weights(name, mirrored, per_token):
    model, given = small_model(name), trees()
    noise = Noise(model, noise_config(name, vectors="full"), rank=1, mirrored=mirrored, seed=3)
    likelihood = Likelihood(model, noise, 0, per_token)
    found = likelihood.score(given, range(4), 5, 0.05)
    assert found.shape == (4, 3)
    for member in range(4):
        alone = materialised(model, noise, 5, member, 4, 0.05)
        for place, tree in enumerate(given):
            ids = torch.tensor([[*tree.prompt, *tree.completions[0]]])
            with torch.no_grad():
                logp = alone(input_ids=ids).logits.log_softmax(-1)[0, :-1]
            chosen = logp.gather(1, ids[0, 1:, None])[len(tree.prompt) - 1 :, 0]
            marked = chosen[torch.tensor(tree.trains[0])].double()
            expected = marked.mean() if per_token else marked.sum()
            torch.testing.assert_close(found[member, place], expected, rtol=1e-4, atol=1e-4)


def test_the_rows_of_a_forward_follow_from_its_logits():
    model = small_model("llama")
    noise = Noise(model, noise_config("llama"), rank=1, mirrored=True, seed=3)
    likelihood = Likelihood(model, noise, 0, True)
    short, long = trees()[2:], trees()
    assert likelihood.most_rows(short) > likelihood.most_rows(long) > 0
