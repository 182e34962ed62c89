"""opt=fsdp: two ranks with a share of the weights each end where one rank does, and go on from each
other's checkpoints.

A pair of processes makes all runs of two ranks one after the other, as under torchrun: starting
them is what takes time.
"""

import json
import os
import shutil
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp
from safetensors.torch import load_file
from torch.distributed.device_mesh import init_device_mesh
from transformers import AutoModelForCausalLM

from common import optim
from common.checkpoint import checkpoint
from common.config import Run
from common.device import hardware, precision
from common.device.precision import Precision
from common.distributed import shard, sharding_of, workers
from common.distributed.context import Context
from common.language_model import load_on_all_ranks
from common.memory import plan as plans
from common.model.load import load_model
from common.report import page
from common.system.files import CheckpointError
from ddp_bench import models
from grpo.collect import Collector
from grpo.policy import Policy
from launch import compose, train
from tests.support import (
    CONF,
    LAST_WEIGHTS,
    MOVING,
    SMALL_CLASSIFY,
    SMALL_GRPO,
    SMALL_RFT,
    events,
    samples,
)
from tests.support.commands import free_ports
from tests.support.counted import Counted
from tests.support.letters import Letters
from tests.support.refusals import COLUMNS, refuses

GRPO = [
    *SMALL_GRPO,
    "algo.num_iterations=2",
    "algo.kl.beta=0.05",
    "algo.loss=grpo",
    "checkpoint.every=2",
]
# 3 prompts of which rank 1 has one, and held-out examples of which it has one less: ranks make
# different numbers of forwards.
UNEVEN = ["algo.train_rows=3", "evaluate.examples=5", "algo.rollout_rows=4"]
CLASSIFY = [
    *SMALL_CLASSIFY,
    *LAST_WEIGHTS,
    "algo.train_rows=8",
    "algo.epochs=1",
    "task.test_rows=49",
]
RFT = [
    *SMALL_RFT,
    "algo.iterations=1",
    "algo.prompts=30",
    "algo.batch_size=8",
]
EGGROLL = {
    "default": [*MOVING, "algo.rollout_rows=6", "algo.stop_at.drift=1e9"],
    "of all kinds": [
        *(*MOVING, "algo.noise.vectors=full", "algo.noise.embeddings=full", "algo.rank=3"),
        *("algo.optimizer.name=Adam", "algo.lr=0.01", "algo.weight_decay=0.1"),
    ],
}
FSDP, CHECKPOINTING = ["opt=[fsdp]"], ["opt=[fsdp,checkpointing]"]
GROUPS = [*FSDP, "opt.fsdp.ranks_per_group=1"]

# A model that is large beside its activations, for a step whose bytes are counted.
LARGER = [*SMALL_GRPO, *FSDP, "algo.steps=1", "task=letters", "task.scoring=smooth"]
LARGER += ["model.tiny.hidden_size=256", "model.tiny.layers=6", "model.tiny.intermediate_size=512"]

# Folder -> settings, of two ranks: for make test, what make test-all has beside it, and the same in
# other combinations.
PAIR = {
    "grpo/gathered": [*GRPO, *UNEVEN, *FSDP],
    "grpo/two first": [*GRPO, *UNEVEN, *FSDP, "algo.steps=2"],
    "grpo/one first": [*GRPO, *UNEVEN, *FSDP, "resume=auto"],
}
MORE = {
    "classify/one group": [*CLASSIFY, *FSDP],
    "eggroll/default/one group": [*EGGROLL["default"], *FSDP],
    "grpo/checkpointing": [*GRPO, *UNEVEN, *CHECKPOINTING],
    "rft/gathered": [*RFT, *FSDP],
    "eggroll/of all kinds/one group": [*EGGROLL["of all kinds"], *FSDP],
    "eggroll/of all kinds/two groups": [*EGGROLL["of all kinds"], *GROUPS],
}
LONG = {
    "grpo/ddp": [*GRPO, *UNEVEN],
    "grpo/plain first": [*GRPO, *UNEVEN, *FSDP, "resume=auto"],
    "classify/groups": [*CLASSIFY, *GROUPS],
    "grpo/groups": [*GRPO, *UNEVEN, *GROUPS],
    "rft/checkpointing": [*RFT, *CHECKPOINTING],
}


def start(out: Path, folder: str, overrides: list[str]):
    task = Letters("smooth") if folder.startswith("eggroll") else None
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(page, "write_or_warn", lambda _: False)
        return train(compose(overrides, CONF), out / folder, task)


def work(rank: int, out: Path, jobs: dict[str, list[str]], ports: list[int]) -> None:
    os.environ |= {
        "TORCHELASTIC_RUN_ID": "test",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
    }
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    for (folder, overrides), port in zip(jobs.items(), ports, strict=False):
        os.environ["MASTER_PORT"] = str(port)
        start(out, folder, overrides)
    if jobs.keys() == MORE.keys():
        (out / f"peak-{rank}.json").write_text(json.dumps(count(out, ports[-2])))
    meeting = f"tcp://127.0.0.1:{ports[-1]}"
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=2)
    mesh = init_device_mesh("cpu", (1, 2), mesh_dim_names=("replicate", "shard"))
    run = compose([*GRPO, *FSDP], CONF)
    context = Context(rank, 2, hardware.find(run.hardware), out, mesh)
    momentum = ["algo.optimizer.name=SGD", "algo.optimizer.kwargs={momentum: 0.9}"]
    runs = (run, compose([*GRPO, *FSDP, *momentum], CONF))
    found = {"loaded": load(run, context), "overflow": [overflow(one, context) for one in runs]}
    (out / f"parts-{rank}.json").write_text(json.dumps(found))
    dist.destroy_process_group()


def count(out: Path, port: int) -> int:
    """Return the most bytes that this rank holds in a step of `LARGER`."""
    peaks = []
    collect, step = Collector.collect, Policy.step

    def collecting(*given):
        seen.forget()
        return collect(*given)

    def stepping(*given):
        made = step(*given)
        peaks.append(seen.peak)
        return made

    os.environ["MASTER_PORT"] = str(port)
    with pytest.MonkeyPatch.context() as patch, Counted() as seen:
        patch.setattr(Collector, "collect", collecting)
        patch.setattr(Policy, "step", stepping)
        start(out, "counted", LARGER)
    return peaks[0]


def load(run: Run, context: Context) -> dict[str, object]:
    """Load a model, and share it out. Return where its weights were before, and whether all is as
    in a plain one after.
    """
    model, _ = load_on_all_ranks(run, Letters(), context, torch.float32)
    tensors = [*model.parameters(), *model.buffers()]
    [before] = {tensor.device.type for tensor in tensors}
    shard(model, run, context, Precision(torch.float32))
    plain, _ = load_model(run.model, Letters(), torch.float32, torch.device("cpu"), progress=False)
    buffers = dict(model.named_buffers())
    with sharding_of(model).gathered():
        held = dict(model.named_parameters())
        weights = {n: torch.equal(held[n], p) for n, p in plain.named_parameters()}
    return {
        "before": before,
        "weights": all(weights.values()),
        "buffers": all(torch.equal(buffers[n], b) for n, b in plain.named_buffers()),
        "tied": model.lm_head.weight is model.model.embed_tokens.weight,
    }


def overflow(run: Run, context: Context) -> list[list[float]]:
    """Two steps in fp16 with a GradScaler: a gradient of rank 1 overflows in the first."""
    precision = Precision(torch.float16)
    model = torch.nn.Linear(4, 4)
    shard(model, run, context, precision)
    updater = optim.Updater(list(model.parameters()), run.algo, precision, torch.device("cpu"))
    seen = []
    for bad in (context.rank == 1, False):
        updater.clear()
        for parameter in updater.parameters:
            parameter.grad = torch.full_like(parameter, float("inf") if bad else 65536.0)
        sharding = sharding_of(model)
        before = sharding.local(updater.parameters[0]).clone()
        overflowed = updater.step(0.1, 1.0)["overflow"]
        moved = not torch.equal(before, sharding.local(updater.parameters[0]))
        seen.append([overflowed, moved])
    return seen


def on_two_ranks(out: Path, jobs: dict[str, list[str]]) -> None:
    ports = free_ports(len(jobs) + 2)
    mp.start_processes(work, args=(out, jobs, ports), nprocs=2)


@pytest.fixture(scope="module")
def alone(tmp_path_factory, cache) -> Path:
    """A folder with what one rank does."""
    out = tmp_path_factory.mktemp("runs")
    os.environ["CLUTCH_CACHE"] = str(cache)
    torch.set_num_threads(1)
    start(out, "grpo/one", [*GRPO, *UNEVEN])
    start(out, "grpo/one first", [*GRPO, *UNEVEN, *FSDP, "opt.fsdp.ranks=1", "algo.steps=2"])
    return out


@pytest.fixture(scope="module")
def runs(alone, warm) -> Path:
    """And what two do."""
    warm.call(on_two_ranks, alone, PAIR)
    return alone


@pytest.fixture(scope="module")
def more_runs(alone, warm) -> Path:
    start(alone, "classify/one", CLASSIFY)
    start(alone, "rft/one", RFT)
    start(alone, "eggroll/default/one", EGGROLL["default"])
    start(alone, "eggroll/of all kinds/one", EGGROLL["of all kinds"])
    warm.call(on_two_ranks, alone, MORE)
    return alone


@pytest.fixture(scope="module")
def longer(more_runs, warm) -> Path:
    """In all combinations."""
    alone = more_runs
    start(alone, "grpo/plain first", [*GRPO, *UNEVEN, "algo.steps=2"])
    warm.call(on_two_ranks, alone, LONG)
    return alone


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def same(first: Path, second: Path, **tolerance: float) -> None:
    one, other = weights(first), weights(second)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(
            tensor, other[name], **(tolerance or {"rtol": 1e-4, "atol": 1e-6}), msg=name
        )


def grpo_is_that_of_one_rank(folder: Path, how: str) -> None:
    one, two = folder / "grpo/one", folder / "grpo" / how
    same(one, two)
    for mine, theirs in zip(events(two), events(one), strict=True):
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
        for key in ("loss", "kl", "approx_kl", "reward"):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-4, abs=1e-7), key
    first, second = (json.loads((path / "result.json").read_text()) for path in (one, two))
    assert (first["world_size"], second["world_size"]) == (1, 2)
    assert first["metrics"] == second["metrics"]


def rft_is_that_of_one_rank(folder: Path, how: str) -> None:
    one, two = folder / "rft/one", folder / "rft" / how
    assert samples(one) == samples(two)
    same(one, two, rtol=1e-3, atol=2e-3)
    losses = [[event["loss"] for event in events(path) if "loss" in event] for path in (one, two)]
    assert losses[0] == pytest.approx(losses[1], rel=1e-3)
    assert len(losses[0]) > 2


def classify_is_that_of_one_rank(folder: Path, how: str) -> None:
    one, two = folder / "classify/one", folder / "classify" / how
    same(one, two, rtol=1e-3, atol=2e-4)
    for mine, theirs in zip(events(two), events(one), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=2e-6)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    (first,), (second,) = (
        models.load(folder / "model").predict(["rain tomorrow"]) for folder in (one, two)
    )
    assert first[0] == second[0]
    assert first[1] == pytest.approx(second[1], rel=1e-4)


def eggroll_is_that_of_one_rank(folder: Path, how: str) -> None:
    one, two = folder / "one", folder / how
    same(one, two, rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(events(two), events(one), strict=True):
        assert mine["reward"] == pytest.approx(theirs["reward"], rel=1e-9)
        assert mine["drift"] == pytest.approx(theirs["drift"], rel=1e-5)
    assert events(one)[-1]["drift"] > 0.1, "the weights must have moved, or equality says nothing"


def test_grpo_ends_where_one_rank_does(runs):
    grpo_is_that_of_one_rank(runs, "gathered")


@pytest.mark.thorough
def test_grpo_with_checkpointing_ends_where_one_rank_does(more_runs):
    grpo_is_that_of_one_rank(more_runs, "checkpointing")


@pytest.mark.thorough
def test_rft_ends_where_one_rank_does(more_runs):
    rft_is_that_of_one_rank(more_runs, "gathered")


@pytest.mark.thorough
def test_classify_ends_where_one_rank_does(more_runs):
    classify_is_that_of_one_rank(more_runs, "one group")


@pytest.mark.thorough
def test_eggroll_ends_where_one_rank_does(more_runs):
    eggroll_is_that_of_one_rank(more_runs / "eggroll/default", "one group")


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["one group", "two groups"])
def test_noise_of_all_kinds_ends_where_one_rank_does(more_runs, how):
    """The groups of ranks make no difference, nor does who holds which rows."""
    eggroll_is_that_of_one_rank(more_runs / "eggroll/of all kinds", how)


@pytest.mark.slow
def test_in_all_combinations(longer):
    classify_is_that_of_one_rank(longer, "groups")
    for how in ("ddp", "groups", "plain first"):
        grpo_is_that_of_one_rank(longer, how)
    rft_is_that_of_one_rank(longer, "checkpointing")


def test_a_rank_holds_its_share(runs):
    """Weights, gradients and two moments, measured; a plain run holds all of them."""
    one, two = (events(runs / "grpo" / name)[0]["state_memory_gb"] for name in ("one", "gathered"))
    model = AutoModelForCausalLM.from_pretrained(runs / "grpo/one/model")
    size = sum(parameter.numel() for parameter in model.parameters())
    assert one * 2**30 == pytest.approx(16 * size, rel=0.01)
    assert two / one == pytest.approx(0.5, abs=0.01)
    log = (runs / "grpo/gathered/run.log").read_text()
    assert "measured: training state 0.22 MB a rank, with opt=ddp 0.44 MB" in log
    assert "; training state 0.28 MB a rank, with opt=ddp 0.55 MB" in log, (
        "the plan, with the reference model"
    )


@pytest.mark.thorough
def test_planned_rank_memory_is_within_ten_percent(more_runs):
    given = compose([*LARGER, "opt.fsdp.ranks=2", "plan=true"], CONF)
    planned = plans.make("grpo.train:plan", given).peak_gb * 2**30
    for rank in (0, 1):
        peak = json.loads((more_runs / f"peak-{rank}.json").read_text())
        assert planned == pytest.approx(peak, rel=0.1)


def test_an_overflow_on_one_rank_skips_the_step_on_all(runs):
    for rank in (0, 1):
        found = json.loads((runs / f"parts-{rank}.json").read_text())["overflow"]
        assert found == [[[1.0, False], [0.0, True]]] * 2, "of AdamW, and of SGD with momentum"


def test_only_one_rank_reads_the_whole_model(runs):
    """To the bit, with tied weights, and buffers that no file has."""
    for rank, before in enumerate(("cpu", "meta")):
        found = json.loads((runs / f"parts-{rank}.json").read_text())["loaded"]
        assert found == {"before": before, "weights": True, "buffers": True, "tied": True}


def test_a_run_goes_on_with_another_number_of_ranks(runs, in_cache, tmp_path):
    """Its shards are read by one rank, sharded or not, and those of one rank by two."""
    same(runs / "grpo/one", runs / "grpo/one first")
    for name, more in {"sharded": [*FSDP, "opt.fsdp.ranks=1"], "plain": []}.items():
        shutil.copytree(runs / "grpo/two first", tmp_path / name)
        start(tmp_path, name, [*GRPO, *UNEVEN, "resume=auto", *more])
        same(runs / "grpo/one", tmp_path / name)
        assert events(tmp_path / name)[-1]["grad_norm"] == pytest.approx(
            events(runs / "grpo/one")[-1]["grad_norm"], rel=1e-4
        )


@pytest.mark.parametrize(
    ("switches", "said"),
    [
        (
            ["opt=[fsdp]", "opt.fsdp.ranks=1"],
            ["opt=fsdp with one rank: nothing is shared out: it holds all weights, "],
        ),
        (["opt=[ddp]", "opt.ddp.ranks=1"], ["opt=ddp with one rank: the same as without it"]),
        ([], []),
    ],
)
def test_one_rank_says_that_nothing_is_shared_out(in_cache, tmp_path, switches, said):
    start(tmp_path, "out", [*SMALL_GRPO, "algo.steps=1", *switches])
    lines = (tmp_path / "out/run.log").read_text().splitlines()
    found = [line for line in lines if "one rank" in line]
    assert len(found) == len(said)
    assert all(text in line for text, line in zip(said, found, strict=True))


@pytest.mark.thorough
def test_applied_share_is_measured_on_gathered_weights(in_cache, tmp_path, monkeypatch):
    """Which are in half precision, although all that is held is float32."""
    monkeypatch.setattr(precision, "native_bf16", lambda _: True)  # emulated where it is not
    found = {}
    for switches in ("amp", "fsdp,amp"):
        more = ["opt.fsdp.ranks=1"] if "fsdp" in switches else []
        asked = [*MOVING, f"opt=[{switches}]", "opt.amp.dtype=bfloat16", *more]
        start(tmp_path, f"eggroll/{switches}", [*asked, "algo.lr=1e-4", "algo.steps=1"])
        (found[switches],) = events(tmp_path / f"eggroll/{switches}")
    plain, sharded = found.values()
    assert plain["applied_share"] < 0.5, "otherwise this says nothing"
    for name in ("applied_share", "applied_cosine", "applied_cosine_all"):
        assert sharded[name] == pytest.approx(plain[name], rel=0.05), name


def test_a_group_of_one_that_cannot_begin_says_why(in_cache, tmp_path, monkeypatch):
    """Nothing is there to be taken down, which would be another error, and hide the first."""

    def refuse(*_, **__):
        raise RuntimeError("no network interface")

    monkeypatch.setattr(dist, "init_process_group", refuse)
    with pytest.raises(RuntimeError, match=r"^no network interface$"):
        start(tmp_path, "out", [*SMALL_GRPO, *FSDP, "opt.fsdp.ranks=1"])


def test_a_sharded_checkpoint_is_one_folder_of_safetensors_with_hashes(runs, tmp_path):
    saved = checkpoint.latest(runs / "grpo/two first/checkpoints")
    assert saved is not None
    assert saved.sharded
    assert sorted(path.suffix for path in saved.path.iterdir()) == [
        ".json",
        ".json",
        ".pt",
        *[".safetensors"] * 2,
    ]
    damaged = tmp_path / "checkpoints" / saved.path.name
    shutil.copytree(saved.path, damaged)
    shard = next(damaged.glob("shard-00002*"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    with pytest.raises(CheckpointError, match=r"shard-00002.* is damaged"):
        checkpoint.load(damaged)


def test_the_export_is_a_plain_folder(runs):
    model = AutoModelForCausalLM.from_pretrained(runs / "grpo/gathered/model")
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.config.architectures == ["LlamaForCausalLM"]
    assert model.lm_head.weight is model.model.embed_tokens.weight


MISTAKES = [
    ("opt=[fsdp,ddp]", "opt=fsdp", "opt=ddp", None),
    ("opt=[fsdp,compile]", "opt=fsdp", "opt=compile", None),
    ("opt=[fsdp,offload]", "opt=fsdp", "opt=offload", None),
    ("opt.fsdp.ranks=2", "opt.fsdp.ranks", 2, "'opt=[fsdp,...]'"),
    (
        "opt=[fsdp] opt.fsdp.ranks=1 opt.fsdp.cpu_offload=true",
        "opt.fsdp.cpu_offload",
        "true",
        "CPU",
    ),
    (
        "opt=[fsdp] opt.fsdp.ranks=1 opt.fsdp.ranks_per_group=2",
        "opt.fsdp.ranks_per_group",
        2,
        "1 ranks",
    ),
    ("opt=[fsdp] opt.fsdp.backend=nccl", "opt.fsdp.backend", "nccl", "CUDA devices"),
    (
        "algo=classify opt=[fsdp] opt.fsdp.ranks=1 algo.ddp.hook=fp16",
        "algo.ddp.hook",
        "fp16",
        "opt=fsdp",
    ),
    ("algo=scaling opt=[fsdp]", "opt", "fsdp", "algo=scaling"),
]


@pytest.mark.parametrize(COLUMNS, MISTAKES)
def test_mistakes_are_refused(overrides, key, value, try_next, tmp_path):
    given = ["algo=eggroll", "hardware=cpu", *overrides.split()]
    refuses(lambda: train(compose(given), tmp_path), key=key, value=value, try_next=try_next)


def read_timeouts(_: Run, context: Context, __: object) -> list[timedelta]:
    """Return how long the groups of this rank wait in a collective."""
    groups = context.mesh.get_all_groups()
    return [group._get_backend(torch.device("cpu")).options._timeout for group in groups]


@pytest.mark.thorough
def test_groups_of_ranks_wait_as_long_as_all_ranks_do(tmp_path):
    run = compose([*GRPO, *GROUPS, "opt.fsdp.ranks=2"], CONF)
    entry = f"{__name__}:{read_timeouts.__name__}"
    assert workers.launch(entry, run, tmp_path) == [workers.TIMEOUT] * 2
