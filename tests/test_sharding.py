"""opt=fsdp: two ranks with a share of the weights each end where one rank does, and go on from each other's checkpoints.

A pair of processes makes all runs of two ranks one after the other, as under torchrun: starting them is what takes time.
"""

import json
import os
import shutil
import socket
from pathlib import Path

import pytest
import test_classify
import test_grpo
import test_rft
import torch
import torch.multiprocessing as mp
from conftest import events
from letters import Letters
from safetensors.torch import load_file
from test_eggroll import MOVING
from transformers import AutoModelForCausalLM

from common import checkpoint
from common.config import ConfigError
from launch import compose, train

GRPO = [*test_grpo.SMALL, "algo.passes=2", "algo.kl.beta=0.05", "algo.loss=grpo", "checkpoint.every=2"]
# 3 prompts of which rank 1 has one, and held-out examples of which it has one less: ranks make different numbers of forwards.
UNEVEN = ["algo.micro_batch_rows=3", "evaluate.examples=5", "algo.rows_per_forward=4"]
CLASSIFY = [*test_classify.SMALL, *test_classify.LAST, "algo.micro_batch_rows=8"]
RFT = [*test_rft.LETTERS, "algo.iterations=1", "algo.prompts=30", "algo.batch_rows=8", "algo.accumulate=2"]
EGGROLL = {
    "default": [*MOVING, "algo.rows_per_forward=6"],
    "full": [*MOVING, "algo.noise.vectors=full", "algo.noise.embeddings=full"],
    "rank 3": [*MOVING, "algo.rank=3", "algo.optimizer.name=Adam", "algo.lr=0.01", "algo.weight_decay=0.1"],
}
FSDP, LAYERWISE = ["opt=[fsdp]"], ["opt=[fsdp]", "opt.fsdp.rollout=layerwise"]
GROUPS = [*FSDP, "opt.fsdp.ranks_per_group=1"]

# Folder -> settings, of two ranks.
PAIR = {
    "grpo/gathered": [*GRPO, *UNEVEN, *FSDP],
    "grpo/layerwise": [*GRPO, *UNEVEN, *LAYERWISE, "opt=[fsdp,checkpointing]"],
    "grpo/ddp": [*GRPO, *UNEVEN],
    "grpo/two first": [*GRPO, *UNEVEN, *FSDP, "algo.steps=2"],
    "grpo/one first": [*GRPO, *UNEVEN, *FSDP, "resume=auto"],
    "grpo/plain first": [*GRPO, *UNEVEN, *FSDP, "resume=auto"],
    "classify/gathered": [*CLASSIFY, *FSDP],
    "classify/layerwise": [*CLASSIFY, *LAYERWISE, "algo.validation_share=0.1"],
    "rft/gathered": [*RFT, *FSDP],
    **{f"eggroll/{name}/one group": [*more, *LAYERWISE] for name, more in EGGROLL.items()},
    **{f"eggroll/{name}/two groups": [*more, *GROUPS] for name, more in EGGROLL.items()},
}


def start(out: Path, folder: str, overrides: list[str]):
    task = Letters("smooth") if folder.startswith("eggroll") else None
    return train(compose(overrides, str(test_rft.TESTS / "conf")), out / folder, task)


def work(rank: int, out: Path, ports: dict[str, int]) -> None:
    os.environ |= {
        "TORCHELASTIC_RUN_ID": "test",
        "WORLD_SIZE": "2",
        "LOCAL_WORLD_SIZE": "2",
        "MASTER_ADDR": "127.0.0.1",
    }
    os.environ |= {"RANK": str(rank), "LOCAL_RANK": str(rank)}
    for folder, overrides in PAIR.items():
        os.environ["MASTER_PORT"] = str(ports[folder])
        start(out, folder, overrides)


def free_ports(count: int) -> list[int]:
    sockets = [socket.socket() for _ in range(count)]
    for one in sockets:
        one.bind(("127.0.0.1", 0))
    ports = [one.getsockname()[1] for one in sockets]
    for one in sockets:
        one.close()
    return ports


@pytest.fixture(scope="module")
def runs(tmp_path_factory, cache) -> Path:
    """A folder with all of PAIR, and what one rank does."""
    out = tmp_path_factory.mktemp("runs")
    os.environ["CLUTCH_CACHE"] = str(cache)
    torch.set_num_threads(1)
    start(out, "grpo/one", [*GRPO, *UNEVEN])
    start(out, "grpo/plain first", [*GRPO, *UNEVEN, "algo.steps=2"])
    start(out, "grpo/one first", [*GRPO, *UNEVEN, *FSDP, "opt.fsdp.ranks=1", "algo.steps=2"])
    start(out, "classify/one", CLASSIFY)
    start(out, "rft/one", RFT)
    for name, more in EGGROLL.items():
        start(out, f"eggroll/{name}/one", more)
    mp.start_processes(
        work, args=(out, dict(zip(PAIR, free_ports(len(PAIR)), strict=True))), nprocs=2, start_method="spawn"
    )
    return out


def weights(folder: Path) -> dict[str, torch.Tensor]:
    return load_file(folder / "model" / "model.safetensors")


def same(first: Path, second: Path, **tolerance: float) -> None:
    one, other = weights(first), weights(second)
    assert one.keys() == other.keys()
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, other[name], **(tolerance or {"rtol": 1e-4, "atol": 1e-6}), msg=name)


@pytest.mark.parametrize("how", ["gathered", "layerwise", "ddp"])
def test_grpo_ends_where_one_rank_does(runs, how):
    one, two = runs / "grpo/one", runs / "grpo" / how
    same(one, two)
    for mine, theirs in zip(events(two), events(one), strict=True):
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
        for key in ("loss", "kl", "ratio_kl", "reward"):
            assert mine[key] == pytest.approx(theirs[key], rel=1e-4, abs=1e-7), key
    first, second = (json.loads((folder / "result.json").read_text()) for folder in (one, two))
    assert (first["world_size"], second["world_size"]) == (1, 2)
    assert first["metrics"] == second["metrics"]


@pytest.mark.parametrize("how", ["gathered"])
def test_rft_ends_where_one_rank_does(runs, how):
    assert test_rft.samples(runs / "rft/one") == test_rft.samples(runs / "rft" / how)
    same(runs / "rft/one", runs / "rft" / how, rtol=1e-3, atol=2e-3)
    of_one, of_two = ([e["loss"] for e in events(runs / "rft" / n) if "loss" in e] for n in ("one", how))
    assert of_one == pytest.approx(of_two, rel=1e-3)
    assert len(of_one) > 2


def test_classify_ends_where_one_rank_does(runs):
    same(runs / "classify/one", runs / "classify/gathered", rtol=1e-3, atol=2e-4)
    for mine, theirs in zip(events(runs / "classify/gathered"), events(runs / "classify/one"), strict=True):
        assert mine["loss"] == pytest.approx(theirs["loss"], abs=2e-6)
        assert mine["grad_norm"] == pytest.approx(theirs["grad_norm"], rel=1e-4)
    checked = [event["validation"] for event in events(runs / "classify/layerwise") if "validation" in event]
    assert len(checked) == 2


@pytest.mark.parametrize("groups", ["one group", "two groups"])
@pytest.mark.parametrize("noise", EGGROLL)
def test_eggroll_ends_where_one_rank_does(runs, noise, groups):
    one, two = runs / "eggroll" / noise / "one", runs / "eggroll" / noise / groups
    same(one, two, rtol=1e-4, atol=1e-5)
    for mine, theirs in zip(events(two), events(one), strict=True):
        assert mine["reward"] == pytest.approx(theirs["reward"], rel=1e-9)
        assert mine["drift"] == pytest.approx(theirs["drift"], rel=1e-5)
    assert events(one)[-1]["drift"] > 0.1, "the weights must have moved, or equality says nothing"


def test_a_run_goes_on_with_another_number_of_ranks(runs, in_cache, tmp_path):
    """Its shards are read by one rank, sharded or not; and those of one rank, or its whole weights, by two."""
    same(runs / "grpo/one", runs / "grpo/one first")
    same(runs / "grpo/one", runs / "grpo/plain first")
    for name, more in {"sharded": [*FSDP, "opt.fsdp.ranks=1"], "plain": []}.items():
        shutil.copytree(runs / "grpo/two first", tmp_path / name)
        start(tmp_path, name, [*GRPO, *UNEVEN, "resume=auto", *more])
        same(runs / "grpo/one", tmp_path / name)
        assert events(tmp_path / name)[-1]["grad_norm"] == pytest.approx(
            events(runs / "grpo/one")[-1]["grad_norm"], rel=1e-4
        )


def test_a_sharded_checkpoint_is_one_folder_of_safetensors_with_hashes(runs, tmp_path):
    saved = checkpoint.latest(runs / "grpo/two first/checkpoints")
    assert saved is not None
    assert saved.sharded
    assert sorted(path.suffix for path in saved.path.iterdir()) == [".json", ".json", ".pt", *[".safetensors"] * 2]
    damaged = tmp_path / "checkpoints" / saved.path.name
    shutil.copytree(saved.path, damaged)
    shard = next(damaged.glob("shard-00002*"))
    shard.write_bytes(shard.read_bytes()[:-1] + b"x")
    with pytest.raises(checkpoint.CheckpointError, match=r"shard-00002.* is damaged"):
        checkpoint.load(damaged)


def test_the_export_is_a_plain_folder(runs):
    model = AutoModelForCausalLM.from_pretrained(runs / "grpo/gathered/model")
    assert type(model).__name__ == "LlamaForCausalLM"
    assert model.config.architectures == ["LlamaForCausalLM"]
    assert model.lm_head.weight is model.model.embed_tokens.weight


@pytest.mark.parametrize(
    ("arguments", "text"),
    [
        (["opt=[fsdp,ddp]"], "opt=fsdp and opt=ddp do not go together"),
        (["opt=[fsdp,compile]"], "opt=fsdp and opt=compile do not go together"),
        (["opt=[fsdp,offload]"], "opt=fsdp and opt=offload do not go together"),
        (["opt=[fsdp]", "opt.fsdp.rollout=both"], "opt.fsdp.rollout='both' is not a choice"),
        (["opt.fsdp.ranks=2"], "opt.fsdp.ranks=2 has no effect: fsdp is off. Add it: 'opt=[fsdp,...]'"),
        (["opt=[fsdp]", "opt.fsdp.ranks=1", "opt.fsdp.cpu_offload=true"], "has no effect on a CPU"),
        (["opt=[fsdp]", "opt.fsdp.ranks=1", "opt.fsdp.ranks_per_group=2"], "does not divide the 1 ranks"),
        (["opt=[fsdp]", "opt.fsdp.backend=nccl"], "opt.fsdp.backend=nccl needs CUDA devices"),
        (["algo=classify", "opt=[fsdp]", "opt.fsdp.ranks=1", "algo.ddp.hook=powersgd"], "which opt=fsdp replaces"),
        (["algo=classify", "opt=[fsdp]", "algo.scaling=[1,2]"], "opt=fsdp has no effect with algo.scaling"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_mistakes_are_worded(arguments, text, tmp_path):
    algo = [] if "algo=classify" in arguments else ["algo=eggroll"]
    with pytest.raises(ConfigError) as caught:
        train(compose([*algo, "hardware=cpu", *arguments]), tmp_path)
    assert text in str(caught.value)
