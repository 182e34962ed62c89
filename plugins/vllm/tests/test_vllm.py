"""engine=vllm beside the native engine: the same tokens, log-probabilities and rewards from the
same weights; what happens when it dies; whole runs. A vLLM is started for most of these.
"""

import dataclasses
import json
import os
import resource
import signal
import subprocess
import sys
import time
from contextlib import ExitStack, closing
from pathlib import Path

import pytest
import torch
import yaml

import launch
from common.config import ConfigError
from common.device import hardware
from common.distributed import Context
from common.engine import Population, Requests
from common.episodes import play
from common.parts import open_parts, open_sampler
from common.system import CheckpointError
from eggroll.noise import Noise
from plugins.vllm import server
from tests.support import CONF, ROOT, SMALL_RFT, VLLM, events
from tests.support.calling import CALL, write_caller
from tests.support.models import sampling
from tests.support.refusals import refuses

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.skipif(not VLLM.exists(), reason=f"there is no vLLM: {VLLM} (make vllm)"),
]
BARE = ["engine=vllm", "engine.cache_gb=0.25"]
ENGINE = [*BARE, "engine.settings={enforce_eager: true}"]
LOCAL = [*ENGINE, f"engine.python={VLLM}"]
# Heads of 32, which vLLM's kernels for CPUs want.
MODEL = ["hardware=cpu", "model.tiny.hidden_size=64", "model.tiny.layers=2", "model.tiny.heads=2"]
MODEL += ["model.tiny.intermediate_size=128", "model.tiny.pretrain_steps=150"]
MODEL += ["task=translate", "evaluate.examples=8"]
GRPO = ["algo=grpo", *MODEL, "algo.prompts_per_step=4", "algo.samples_per_prompt=4"]
GRPO += ["algo.sampling.max_new_tokens=16"]
GREEDY = sampling(new=16)


@pytest.fixture
def open_lm(in_cache, tmp_path):
    """Make a language model with the settings of a run, which ends with the test."""
    with ExitStack() as stack:

        def make(*overrides, **more):
            run = launch.compose([*GRPO, *overrides])
            parts = open_parts(
                run, Context(0, 1, hardware.find(run.hardware), tmp_path / "run"), **more
            )
            stack.callback(parts.close)
            return parts

        yield make


def native_engine(parts):
    """The native engine of the same model."""
    node = yaml.safe_load((ROOT / "conf/engine/native.yaml").read_text())
    return open_sampler(dataclasses.replace(parts.run, engine=node), parts.lm)


def both(parts, requests, sampling):
    """The completions of vLLM and of the native engine with the weights of `parts`."""
    theirs = parts.rollouter.sample(requests, sampling)
    return theirs, native_engine(parts).generate(requests, sampling)


def prompts(parts, count):
    return parts.rollouter.request(parts.examples.order.take(0, count)).prompts


@torch.no_grad()
def move(model):
    """Change every weight, the norms and the tied head among them."""
    generator = torch.Generator().manual_seed(1)
    for parameter in model.parameters():
        noise = torch.randn(parameter.shape, generator=generator)
        parameter.add_(0.3 * parameter.abs().mean() * noise)


def shares_equal(one, other):
    """The share of rows that are equal, and the largest difference of log-probabilities while they
    are.
    """
    same = (one.tokens == other.tokens).all(1) & (one.lengths == other.lengths)
    gap = 0.0
    if one.logprobs is not None and other.logprobs is not None:
        agree = (one.tokens == other.tokens).cumprod(1).bool()
        inside = torch.arange(one.tokens.shape[1]) < one.lengths[:, None]
        gap = (one.logprobs - other.logprobs)[agree & inside].abs().max().item()
    return same.double().mean().item(), gap


def test_greedy_tokens_and_log_probabilities_are_those_of_the_native_engine(open_lm):
    parts = open_lm(*LOCAL)
    requests = Requests(prompts=prompts(parts, 64), logprobs=True)
    theirs, ours = both(parts, requests, GREEDY)
    share, gap = shares_equal(theirs, ours)
    print(f"{share:.1%} of 64 rows equal, log-probabilities within {gap:.1e}")
    assert share >= 0.95
    assert gap < 1e-3
    assert (theirs.finished == ours.finished).double().mean() >= 0.95
    assert not theirs.broken.any()


@pytest.mark.parametrize("cut", ["top_p=1.0", "top_p=0.8", "top_k=5", "min_p=0.1"])
def test_samples_have_the_log_probabilities_of_what_the_trainer_computes(open_lm, cut):
    """At a temperature of 0.7, of their own and of the trainer's forward; among the tokens that may
    be drawn, where some may not.
    """
    from common.model import logprobs

    parts = open_lm(*LOCAL, "algo.sampling.temperature=0.7", f"algo.sampling.{cut}")
    asked = prompts(parts, 4)
    made = parts.rollouter.sample(Requests(prompts=asked, samples=3, seed=1, logprobs=True))
    assert made.tokens.shape[0] == 12
    assert len({tuple(row) for row in made.tokens.tolist()}) > 4
    rows = [[made.tokens[3 * i + j, : made.lengths[3 * i + j]] for j in range(3)] for i in range(4)]
    laid = logprobs.group(asked, rows, torch.device("cpu"))
    with torch.no_grad():
        found, _ = logprobs.token_logprobs(parts.lm.model, laid, 0.7, parts.run.algo.sampling)
    gap = ((found - made.logprobs[:, : found.shape[1]]) * laid.mask).abs().max().item()
    assert gap < 1e-3
    again = parts.rollouter.sample(Requests(prompts=asked, samples=3, seed=2, logprobs=True))
    assert not torch.equal(again.tokens, made.tokens)


def test_completions_end_at_the_texts_of_the_native_engine(open_lm):
    parts = open_lm(*LOCAL, "algo.sampling.stop=[o,in]")
    theirs, ours = both(parts, Requests(prompts=prompts(parts, 64), logprobs=True), GREEDY)
    share, gap = shares_equal(theirs, ours)
    assert share >= 0.95
    assert gap < 1e-3
    assert (theirs.finished == ours.finished).double().mean() >= 0.95
    rows = zip(theirs.tokens.tolist(), theirs.lengths.tolist(), strict=True)
    texts = parts.lm.decode([tokens[:length] for tokens, length in rows])
    assert any(text.endswith(("o", "in")) for text in texts)
    assert not any("o" in text[:-1] or "in" in text[:-1] for text in texts)


def test_weights_that_changed_are_the_weights_that_answer(open_lm):
    parts = open_lm(*LOCAL)
    requests = Requests(prompts=prompts(parts, 16), logprobs=True)
    before = parts.rollouter.sample(requests, GREEDY)
    version = parts.engine.version
    assert torch.equal(parts.rollouter.sample(requests, GREEDY).tokens, before.tokens)
    assert parts.engine.version == version  # nothing was sent
    move(parts.lm.model)
    theirs, ours = both(parts, requests, GREEDY)
    assert parts.engine.version == version + 1
    assert not torch.equal(theirs.tokens, before.tokens)
    share, gap = shares_equal(theirs, ours)
    assert share >= 0.95
    assert gap < 1e-3
    parts.engine.version += 1  # as if a change had not arrived
    with pytest.raises(ConfigError, match=r"these are weights 2, not 3"):
        parts.engine.generate(requests, GREEDY)


@pytest.mark.parametrize("rank", [1, 2])
def test_members_earn_what_those_of_the_native_engine_earn(open_lm, rank):
    members = 16
    parts = open_lm(*LOCAL, population=members, noise_rank=rank)
    config = launch.compose(["algo=eggroll", *MODEL, *LOCAL]).algo.noise
    noise = Noise(parts.lm.model, config, rank=rank, mirrored=True, seed=3)

    def request(part, sigma):
        factors = noise.factors(1, part, sigma)
        population = Population(members=len(part), factors=lambda: factors, narrow=noise.narrow)
        return Requests(prompts=prompts(parts, 4), population=population)

    part = range(members)
    theirs = parts.rollouter.sample(request(part, 0.05), GREEDY)
    native = native_engine(parts)
    with noise.members(1, part, 0.05):
        ours = native.generate(request(part, 0.05), GREEDY)
    assert len({tuple(row) for row in ours.tokens.tolist()}) > members  # the noise moves them
    examples = parts.examples.order.take(0, 4) * members
    rewards = [
        parts.scorer.submit(examples, made.texts(parts.lm.decode)).result().rewards
        for made in (theirs, ours)
    ]
    same = sum(a == b for a, b in zip(*rewards, strict=True)) / len(examples)
    print(f"{same:.1%} of {len(examples)} rewards equal")
    assert same >= 0.95
    other = parts.rollouter.sample(request(part, 0.1), GREEDY)
    assert not torch.equal(other.tokens, theirs.tokens)  # new noise is a new adapter


def test_only_an_adapter_is_sent(open_lm, tmp_path):
    parts = open_lm(*LOCAL, "model.adapter.rank=4")
    requests = Requests(prompts=prompts(parts, 16))
    parts.rollouter.sample(requests, GREEDY)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in parts.lm.adapter.parameters.values():
            parameter.add_(0.3 * torch.randn(parameter.shape, generator=generator))
    sent = []
    ask = parts.engine.link.ask
    parts.engine.link.ask = lambda message, **more: (
        sent.append(message["do"]),
        ask(message, **more),
    )[1]
    changed = parts.rollouter.sample(requests, GREEDY)
    assert sent == ["stamp", "generate"]
    ours = native_engine(parts).generate(requests, GREEDY)
    assert shares_equal(changed, ours)[0] >= 0.9


SLEEPING = """
import runpy, sys
sys.path[:0] = {path!r}
from vllm import LLM
pause = LLM.sleep
LLM.sleep = lambda self, level: (print("vLLM sleeps at level", level), pause(self, level=0))
sys.argv = sys.argv[1:]
runpy.run_path(sys.argv[0], run_name="__main__")
"""


def test_one_that_sleeps_wakes_with_the_weights_that_it_had(open_lm, tmp_path, monkeypatch):
    """vLLM sleeps on GPUs alone; a CPU knows the pause, in which nobody is answered."""
    script, python = tmp_path / "sleeping.py", tmp_path / "python"
    script.write_text(SLEEPING.format(path=[str(Path(server.__file__).parent)]))
    python.write_text(f'#!/bin/sh\nexec "{VLLM}" "{script}" "$@"\n')
    python.chmod(0o755)
    parts = open_lm(*ENGINE, f"engine.python={python}")
    parts.engine.sleeps = True
    requests = Requests(prompts=prompts(parts, 8))
    made = parts.rollouter.sample(requests, GREEDY)
    parts.engine.rest()
    told = parts.rollouter.sample(requests, GREEDY)
    assert torch.equal(told.tokens, made.tokens)
    parts.evaluate()  # which lets it sleep when it is done
    move(parts.lm.model)
    changed = parts.rollouter.sample(requests, GREEDY)
    assert not torch.equal(changed.tokens, made.tokens)
    ours = native_engine(parts).generate(requests, GREEDY)
    assert shares_equal(changed, ours)[0] >= 0.9
    log = (tmp_path / "run" / "engine-0.log").read_text()
    assert log.count("vLLM sleeps at level 1") == 2


def test_one_that_dies_is_started_again_once(open_lm, monkeypatch):
    parts = open_lm(*LOCAL)
    requests = Requests(prompts=prompts(parts, 8), samples=2, seed=1)

    made = parts.rollouter.sample(requests)
    first = parts.engine.link.process

    receive = parts.engine.link.receive

    def kill(*how):  # as soon as it is asked, before it can have answered
        if first.poll() is None:
            first.send_signal(signal.SIGKILL)
            first.wait()
        return receive(*how)

    monkeypatch.setattr(parts.engine.link, "receive", kill)
    dying = parts.engine.generate(requests, parts.run.algo.sampling)
    assert dying.tokens.shape == made.tokens.shape
    assert parts.engine.link.falls == 1
    assert torch.equal(dying.lengths, made.lengths)  # the same seed, and the same weights
    parts.engine.link.process.send_signal(signal.SIGKILL)
    with pytest.raises(ConfigError, match=r"ended for the second time .*resume=auto"):
        parts.rollouter.sample(requests)


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        (ENGINE, "needs engine.python"),
        ([*ENGINE, "engine.python=/nowhere/python"], "cannot be started: No such file"),
        ([*ENGINE, f"engine.python={sys.executable}"], r"cannot import vllm: .*pip install"),
        (
            [*BARE, f"engine.python={VLLM}", "engine.settings={dtype: half}"],
            "engine.settings.dtype has no effect",
        ),
        ([*BARE, f"engine.python={VLLM}", "engine.settings={speed: 9}"], "speed"),
        (
            [*LOCAL, "model.quantize=int8", "model.adapter.rank=4"],
            "does not go with model.quantize",
        ),
        ([*LOCAL, "opt=[compile]"], "opt=compile has no effect with engine=vllm"),
        (
            [*LOCAL, "+engine.settings.enable_sleep_mode=true"],
            "enable_sleep_mode has no effect on a CPU",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_mistakes_are_told(open_lm, settings, text):
    with pytest.raises(ConfigError, match=text):
        open_lm(*settings).engine.refresh()


def test_noise_that_adapters_cannot_carry_is_told(in_cache, tmp_path):
    settings = ["algo=eggroll", *MODEL, *LOCAL, "algo.noise.vectors=full", "algo.members=2"]
    refuses(
        lambda: launch.train(launch.compose([*settings, "algo.steps=1"]), tmp_path / "run"),
        key="algo.noise.vectors",
        value="frozen",
    )


# --- whole runs


def children(log: Path) -> list[str]:
    """The processes that write to the log."""
    found = subprocess.run(["fuser", str(log)], capture_output=True, text=True)
    return found.stdout.split()


def test_grpo_goes_on_after_a_kill_and_nothing_is_left(begin, launch, tmp_path):
    arguments = [*GRPO, *LOCAL, "algo.steps=5", "checkpoint.every=1", "hydra.run.dir=run"]
    process = begin(*arguments)
    metrics, log = tmp_path / "run" / "metrics.jsonl", tmp_path / "run" / "engine-0.log"
    deadline = time.monotonic() + 200
    while not (metrics.exists() and len(metrics.read_text().splitlines()) >= 3):
        assert process.poll() is None, process.said()
        assert time.monotonic() < deadline
        time.sleep(0.05)
    folders = set(Path("/dev/shm").glob("clutch-engine-*"))
    process.send_signal(signal.SIGKILL)
    process.communicate()
    for _ in range(100):
        if not children(log):
            break
        time.sleep(0.1)
    assert children(log) == []
    assert not any(folder.exists() for folder in folders if str(os.getpid()) in folder.name)
    launch(*arguments, "resume=auto")
    steps = [event for event in events(tmp_path / "run") if "reward" in event]
    assert [event["step"] for event in steps] == [1, 2, 3, 4, 5]
    updated = [event for event in steps if "sampler_gap" in event]
    assert updated
    assert all(event["sampler_gap"] < 1e-3 for event in updated)
    assert all(event["sampler_weight"] == pytest.approx(1, abs=1e-2) for event in updated)
    assert yaml.safe_load((tmp_path / "run" / "run.yaml").read_text())["reproducible"] is False
    assert "cannot be repeated to the bit" in (tmp_path / "run" / "run.log").read_text()


def test_grpo_samples_the_next_rollout_while_it_trains(in_cache, tmp_path):
    """A rollout is a step old then; each is of the weights that its version says."""
    settings = [*GRPO, *LOCAL, "algo.overlap=1", "algo.steps=3", "algo.lr=1e-3"]
    launch.train(launch.compose(settings), tmp_path / "run")
    steps = [event for event in events(tmp_path / "run") if "staleness" in event]
    assert [event["staleness"] for event in steps] == [0, 1, 1]
    assert steps[0]["sampler_gap"] < 1e-3 < steps[2]["sampler_gap"]


def test_eggroll_learns_with_it(launch, tmp_path):
    arguments = ["algo=eggroll", *MODEL, *LOCAL, "algo.members=8", "algo.prompts_per_step=2"]
    arguments += ["algo.sampling.max_new_tokens=16", "algo.steps=3", "hydra.run.dir=run"]
    launch(*arguments)
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["steps"] == 3
    native = [text for text in arguments if not text.startswith(("engine", "hydra"))]
    launch(*native, "hydra.run.dir=native")
    one, other = (events(tmp_path / name) for name in ("run", "native"))
    # the same population earns the same with either engine
    assert one[1]["reward"] == pytest.approx(other[1]["reward"], abs=0.02)


def test_rft_iterates_with_it(launch, tmp_path):
    heads = ["model.tiny.hidden_size=64", "model.tiny.heads=2"]
    launch(
        "--config-dir", CONF, *SMALL_RFT, *heads, *LOCAL, "algo.iterations=1", "hydra.run.dir=run"
    )
    result = json.loads((tmp_path / "run" / "result.json").read_text())
    assert result["metrics"]["after"] if "metrics" in result else result["after"]
    log = (tmp_path / "run" / "engine-0.log").read_text()
    assert log.count("Initializing a V1 LLM engine") == 1  # one for all stages
    assert "Reloading weights" in log


def test_a_tool_is_called_with_it(in_cache, tmp_path):
    run = launch.compose(["algo=grpo", "algo.prompts_per_step=2", *write_caller(tmp_path), *LOCAL])
    parts = open_parts(run, Context(0, 1, hardware.find(run.hardware), tmp_path / "run"))
    with closing(parts):
        requests = parts.rollouter.request(parts.task.examples("train"), logprobs=True)
        theirs = parts.rollouter.sample(requests, sampling(new=90))
        ours = play(native_engine(parts), requests, sampling(new=90))
    for made in (theirs, ours):
        assert made.played == [f"{CALL}t:{a + 7}a:done" for a in (2, 3)]
        assert [text.reward for text in made.played] == [0.0, 1.0]
        assert [text.stop for text in made.played] == ["completed"] * 2
    assert torch.equal(theirs.written, ours.written)
    share, gap = shares_equal(theirs, ours)
    assert share == 1
    assert gap < 1e-3


def test_grpo_plays_with_it(launch, tmp_path):
    """The trainer finds the log-probabilities of the engine again, over all turns."""
    settings = [text for text in GRPO if not text.startswith(("task=", "algo.sampling"))]
    settings += [*LOCAL, "task=guess", "task.settings={largest: 7, guesses: 3}", "algo.steps=2"]
    launch(*settings, "hydra.run.dir=run")
    steps = [event for event in events(tmp_path / "run") if "sampler_gap" in event]
    assert len(steps) == 2
    assert all(step["sampler_gap"] < 1e-3 for step in steps)
    assert all(sum(step["stops"].values()) == pytest.approx(1) for step in steps)


def test_a_chat_with_it(launch, tmp_path):
    launch(*GRPO, "algo.steps=1", "hydra.run.dir=run")
    asked = ["run", "--prompt", "seven =>", "--max-new-tokens", "8"]
    native = launch(*asked, module="common.chat")
    made = launch(*asked, "--engine", "vllm", "--engine-python", str(VLLM), module="common.chat")
    assert made.stdout == native.stdout
    alone = launch(*asked, "--engine-python", str(VLLM), module="common.chat", code=2)
    assert "--engine-python has no effect without --engine vllm" in alone.stderr


def test_shared_memory_that_runs_full_is_told(open_lm):
    """A file that may not be as large as the weights is what a full folder is."""
    parts = open_lm(*LOCAL)
    parts.engine.refresh()
    move(parts.lm.model)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, before[1]))
    try:
        with pytest.raises(CheckpointError, match="where vLLM reads weights, could not be written"):
            parts.engine.refresh()
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before)
    requests = Requests(prompts=prompts(parts, 16))
    assert shares_equal(*both(parts, requests, GREEDY))[0] >= 0.95  # sent, once there is room


def test_two_ranks_have_one_each(launch, tmp_path):
    launch(*GRPO, *LOCAL, "algo.steps=2", "opt=[ddp]", "opt.ddp.ranks=2", "hydra.run.dir=run")
    assert json.loads((tmp_path / "run" / "result.json").read_text())["world_size"] == 2
    assert all((tmp_path / "run" / f"engine-{rank}.log").exists() for rank in (0, 1))


def test_each_rank_of_torchrun_has_one(tmp_path, cache):
    """torchrun's rendezvous is in the environment of its ranks; a vLLM that took it for its own
    would wait for a store that nobody serves.
    """
    settings = [*GRPO, *LOCAL, "algo.steps=2", f"hydra.run.dir={tmp_path}/run"]
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc_per_node=2", "--standalone"]
    environment = os.environ | {"CLUTCH_CACHE": str(cache)}
    done = subprocess.run(
        [*command, str(ROOT / "launch.py"), *settings],
        cwd=tmp_path,
        env=environment,
        timeout=400,
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads((tmp_path / "run" / "result.json").read_text())["world_size"] == 2
    assert all((tmp_path / "run" / f"engine-{rank}.log").exists() for rank in (0, 1))
