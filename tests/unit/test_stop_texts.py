"""Texts that end a completion: as cutting what was sampled without them."""

import dataclasses
import json
import subprocess
import sys

import pytest
import torch

from common.engine import Population, Requests
from common.sampling.native import Sampler
from common.sampling.schedule import LOOK_EVERY
from common.sampling.stops import StopTexts
from tests.support import ROOT, SMALL_GRPO
from tests.support.models import prompts, sampling, small_model

STOPS = StopTexts(["ab", "xyz", "q"], lambda rows: ["".join(map(letters, row)) for row in rows])


def letters(token):
    """A token is one to three letters."""
    return "abxyzqcdefg"[token % 11] + "bzya"[token % 4] * (token % 3)


def cut(made, row):
    """Token by token, from the beginning."""
    tokens = made.tokens[row, : made.lengths[row]].tolist()
    for count in range(1, len(tokens) + 1):
        [text] = STOPS.decode([tokens[:count]])
        if any(stop in text for stop in STOPS.texts):
            return tokens[:count], True
    return tokens, bool(made.finished[row])


@pytest.mark.parametrize("name", ["llama", "gpt2"])
@pytest.mark.parametrize("rows", [1, 3, 64])
@pytest.mark.parametrize("every", [1, 8])
@pytest.mark.parametrize("members", [0, 4])
def test_a_completion_ends_with_the_first_text(name, rows, every, members, monkeypatch):
    monkeypatch.setitem(LOOK_EVERY, "cpu", every)
    model = small_model(name)
    asked = Requests(prompts=prompts(), samples=4, seed=3, logprobs=not members)
    if members:
        asked = dataclasses.replace(asked, population=Population(members=members))
    about = {"pad_id": 96, "stop_ids": (11, 12), "rows": rows}
    whole = Sampler(model, **about).generate(asked, sampling(1.0))
    made = Sampler(model, stops=STOPS, **about).generate(asked, sampling(1.0))
    ended = 0
    for row in range(len(whole.tokens)):
        tokens, finished = cut(whole, row)
        ended += len(tokens) < whole.lengths[row]
        assert made.lengths[row] == len(tokens)
        assert made.tokens[row, : len(tokens)].tolist() == tokens
        assert (made.tokens[row, len(tokens) :] == 96).all()
        assert bool(made.finished[row]) == finished
        if made.logprobs is not None:
            count = len(tokens)
            torch.testing.assert_close(
                made.logprobs[row, :count], whole.logprobs[row, :count], rtol=0, atol=1e-5
            )
            assert not made.logprobs[row, count:].any()
    assert ended > 5


@pytest.mark.parametrize("tokens", [[4, 4, 5], [0, 1], [1] * 30 + [5, 6], [6, 7, 8]])
def test_what_was_seen_changes_nothing(tokens):
    for seen in range(len(tokens)):
        if STOPS.find(tokens[:seen]) is None:
            assert STOPS.find(tokens, seen) == STOPS.find(tokens)


def test_an_empty_text_is_refused():
    with pytest.raises(ValueError, match=r"algo.sampling.stop holds an empty text"):
        dataclasses.replace(sampling(1.0), stop=["a", ""])


@pytest.mark.parametrize("algo", ["grpo", "eggroll"])
def test_a_run_ends_completions_at_texts(algo, tmp_path):
    """Bytes of random weights: half of them are no letter of ASCII."""
    overrides = [text for text in SMALL_GRPO if not text.startswith("algo=")]
    if algo == "eggroll":
        overrides = [text for text in overrides if "samples_per_prompt" not in text]
        overrides += ["algo.members=4"]
    stops = ["a", "b", "c", "d", "e", "f", "g", "h", "(", ")", "1", "2", "3", "4"]
    command = [sys.executable, "launch.py", f"algo={algo}", *overrides, "algo.steps=1"]
    command += [f"algo.sampling.stop=[{','.join(map(repr, stops))}]"]
    command += [
        "algo.sampling.temperature=1.0",
        "algo.sampling.max_new_tokens=32",
        f"hydra.run.dir={tmp_path}",
    ]
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True, timeout=300)
    lines = (tmp_path / "completions" / "training.jsonl").read_text().splitlines()
    texts = [row["completion"] for line in lines for row in json.loads(line)["rows"]]
    for text in texts:
        assert not any(stop in text[:-1] for stop in stops), text
    assert any(text.endswith(tuple(stops)) for text in texts)
