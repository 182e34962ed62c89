"""An error on one rank of two, where the others notice nothing and taking the group down blocks, as
with NCCL: the run ends at once with that error, and every rank's log names it.
"""

import errno
import importlib
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from datetime import timedelta
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from torch.multiprocessing import ProcessRaisedException

from common import language_model
from common.checkpoint import checkpoint
from common.config import ConfigError
from common.distributed import alarm, workers
from common.distributed.workers import ATTEMPT, launch, set_apart
from common.sampling.native import Sampler
from common.system.signals import EXIT_SIGNAL, EXIT_WRITE, RunStopped
from launch import compose
from tests.support import SMALL, SMALL_GRPO, SMALL_RFT
from tests.support.letters import Letters

pytestmark = pytest.mark.faults

SHORT = 5.0  # seconds
RANKS = ["opt=[ddp]", "opt.ddp.ranks=2", "checkpoint.every=1"]
RUNS = {
    "eggroll": ["algo=eggroll", *SMALL],
    "grpo": SMALL_GRPO,
    "rft": [*SMALL_RFT, "task=countdown", "model.tiny.pretrain_steps=0", "algo.select.accept=0.01"],
}


class Bad(Letters):
    """Raises on one rank: reading its rows, or scoring."""

    def __init__(self, fault, rank):
        super().__init__("smooth")
        self.what, self.rank = fault, rank

    def examples(self, split):
        if self.what == "data" and self.rank == 1:
            raise ConfigError("rows.csv, line 7: the answer is empty.")
        return super().examples(split)

    def reward(self, example, completion):
        if self.what == "reward" and self.rank == 1:
            raise KeyError("no such letter")
        return super().reward(example, completion)


def fail(run, context, fault):
    """Train in each of two ranks, one of which fails."""
    alarm.LOOK, alarm.GRACE = 0.05, 0.2
    behave_like_nccl()
    if fault == "memory" and context.rank == 1:
        full = torch.OutOfMemoryError("CUDA out of memory")
        Sampler.generate_once = raising(full)
    if fault == "checkpoint":
        checkpoint.save = raising(OSError(errno.ENOSPC, "No space left on device"))
    if fault == "crash" and context.rank == 1:
        Sampler.generate_once = raising(ZeroDivisionError("division by zero"))
    train = importlib.import_module(f"{run.algo.name}.train").train
    return train(run, context, Bad(fault, context.rank))


def raising(error):
    def raise_it(*_, **__):
        raise error

    return raise_it


def behave_like_nccl():
    """A collective whose peer has gone does not end, nor does taking the group down."""

    def for_ever(*_, **__):
        while True:
            time.sleep(60)

    for name in ("all_reduce", "all_gather_object", "barrier"):
        collective = getattr(dist, name)

        def patient(*arguments, collective=collective, **options):
            try:
                return collective(*arguments, **options)
            except RuntimeError:
                for_ever()

        setattr(dist, name, patient)
    dist.destroy_process_group = for_ever


FAULTS = {
    "reward": (ConfigError, "no such letter", 1),
    "memory": (ConfigError, "out of memory", 1),
    "checkpoint": (RunStopped, "Make room, then go on with", 0),
    "data": (ConfigError, "rows.csv, line 7: the answer is empty.", 1),
    "crash": (ProcessRaisedException, "ZeroDivisionError: division by zero", 1),
}


# The alarm knows no algorithm: each of the other two has one fault.
CASES = [
    *(("rft", "reward"), ("eggroll", "checkpoint")),
    pytest.param("grpo", "crash", marks=pytest.mark.thorough),
    *(
        pytest.param("eggroll", fault, marks=pytest.mark.thorough)
        for fault in FAULTS
        if fault != "checkpoint"
    ),
]


@pytest.mark.parametrize(("algo", "fault"), CASES)
def test_the_run_ends_with_the_error_of_the_rank_that_failed(algo, fault, warm, cache, tmp_path):
    kind, text, rank = FAULTS[fault]
    given = compose([*RUNS[algo], *RANKS])
    with pytest.raises(kind, match=text) as raised:
        warm.call(launch, f"{__name__}:fail", given, tmp_path, fault, CLUTCH_CACHE=str(cache))
    if kind is RunStopped:
        assert raised.value.code == EXIT_WRITE
    waited = "run.log" if rank == 1 else "rank-1.log"
    assert text in (tmp_path / waited).read_text(), "the rank that only waited names it too"


def write_while_a_rank_fails(run, context, folder):
    """Rank 0 hangs in a collective, beside a thread that writes a checkpoint."""
    alarm.LOOK, alarm.GRACE = 0.05, 0.2
    behave_like_nccl()
    if context.rank == 1:
        raise ZeroDivisionError("division by zero")

    def write():
        time.sleep(1.5)
        (folder / "checkpoint").touch()

    threading.Thread(target=write, name=checkpoint.WRITER, daemon=True).start()
    context.barrier()


def test_a_checkpoint_survives_an_error_of_another_rank(warm, tmp_path):
    given = compose([*RUNS["grpo"], *RANKS])
    with pytest.raises(ProcessRaisedException, match="division by zero"):
        warm.call(launch, f"{__name__}:write_while_a_rank_fails", given, tmp_path, tmp_path)
    assert (tmp_path / "checkpoint").exists()


def stop_while_rank_0_writes(run, context, folder):
    """All ranks stop after a signal, and rank 0 has a report to write."""
    stop = alarm.Alarm.stop

    def leave(self):
        (folder / f"rank {context.rank} left").write_text(str((folder / "report").exists()))
        stop(self)

    alarm.Alarm.stop = leave
    if context.main:
        time.sleep(1.0)
        (folder / "report").touch()
    raise RunStopped("stopped", EXIT_SIGNAL)


def test_ranks_that_stop_wait_for_what_rank_0_writes(warm, tmp_path):
    """A launcher such as torchrun ends all of them once one has left."""
    given = compose([*RUNS["grpo"], *RANKS])
    with pytest.raises(RunStopped, match="stopped"):
        warm.call(launch, f"{__name__}:stop_while_rank_0_writes", given, tmp_path, tmp_path)
    assert (tmp_path / "rank 1 left").read_text() == "True"


def test_ranks_on_unlike_devices_are_refused_before_they_exchange_anything(monkeypatch):
    """An A100 would take bfloat16 and a V100 scaled float16, whose gradients would be added."""
    device = SimpleNamespace(device=torch.device("cuda"))
    context = SimpleNamespace(world_size=2, device=device)
    context.gather_objects = lambda mine: ["bfloat16", mine]
    run = compose(["opt=[amp,ddp]"])
    for here, raised in (("bfloat16", nullcontext()), ("float16", pytest.raises(ConfigError))):
        numbers = SimpleNamespace(name=here)
        monkeypatch.setattr(workers.precision, "resolve", lambda *_, found=numbers: found)
        with raised as caught:
            workers.agree_on_numbers(run, context)
    said = "opt=amp computes in bfloat16 on rank 0 and in float16 on rank 1. Set opt.amp.dtype="
    assert said in str(caught.value)
    device.device = torch.device("cpu")  # which has no float16
    with pytest.raises(ConfigError, match=r"on rank 1\. Leave out opt=amp\."):
        workers.agree_on_numbers(run, context)
    store = dist.HashStore()
    workers.agree_on_backend(store, 0, "nccl", "NVIDIA A100")
    workers.agree_on_backend(store, 1, "nccl", "NVIDIA A100")
    with pytest.raises(
        ConfigError, match=r"rank 2 computes on CPU and talks by gloo, and rank 0 by"
    ):
        workers.agree_on_backend(store, 2, "gloo", "CPU")


def test_an_attempt_after_another_finds_nothing_of_it():
    """torchrun --max-restarts keeps its store: the alarm of the first ranks is not for the next."""
    shared = dist.HashStore()
    with ThreadPoolExecutor() as pool:
        for _ in range(2):
            second = pool.submit(set_apart, shared, 1)  # comes before rank 0, and waits for it
            time.sleep(0.05)
            first = set_apart(shared, 0)
            assert not first.check([alarm.KEY])
            first.set(alarm.KEY, "{}")
            assert second.result().check([alarm.KEY])
            shared.delete_key(ATTEMPT)  # as when all have met


def begin_slowly(run, context, task):
    """Train, where the model takes rank 0 longer than a collective may take."""
    if context.main:
        load = language_model.load_model

        def slowly(*arguments, **options):
            time.sleep(1.6 * SHORT)
            return load(*arguments, **options)

        language_model.load_model = slowly
    train = importlib.import_module(f"{run.algo.name}.train").train
    return train(run, context, task)


def launch_with_a_short_limit(given, folder):
    workers.TIMEOUT = timedelta(seconds=SHORT)
    return workers.launch(f"{__name__}:begin_slowly", given, folder, Letters("smooth"))


@pytest.mark.thorough
def test_a_rank_may_load_for_longer_than_a_collective_may_take(warm, cache, tmp_path):
    given = compose(["algo=eggroll", *SMALL, *RANKS])
    warm.call(launch_with_a_short_limit, given, tmp_path, CLUTCH_CACHE=str(cache))
    assert (tmp_path / "result.json").is_file()
