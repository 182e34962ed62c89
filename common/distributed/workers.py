"""Start the workers of a run and their process group.

A worker is started by a function call, not by running the command again: in this process if there
is only one, spawned for `opt=ddp` and `opt=fsdp`, or the process that torchrun or srun has started.
"""

import copy
import gc
import hashlib
import logging
import os
import pickle
import re
import signal
import sys
import tempfile
import uuid
import warnings
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any, TextIO

import torch
import torch.distributed as dist
import torch.multiprocessing as mp
import transformers
from torch.distributed.device_mesh import init_device_mesh

from common.config import ConfigError, Run, flat, name_folder
from common.device import hardware, precision, threads
from common.distributed.alarm import Alarm
from common.distributed.context import Context
from common.distributed.fsdp import cut_mesh
from common.system import (
    EXIT_CONFIG,
    EXIT_CRASH,
    EXIT_INTERRUPTED,
    EXIT_NUMBERS,
    EXIT_SIGNAL,
    EXIT_WRITE,
    FULL,
    CheckpointError,
    RunStopped,
    StopSignal,
    lock,
    open_log,
    ranked,
    show_any_text,
    take_early,
    taken,
    terminal,
    user_code,
    visible,
)
from common.task import task_name

log = logging.getLogger("clutch")

# The longest wait of a rank for another in a collective. While a rank loads, writes a checkpoint or
# uploads, which may take longer, the others wait on the store instead (`Context.meet`).
TIMEOUT = timedelta(minutes=20)
ATTEMPT = "clutch_attempt"  # the key, in torchrun's store, of the name of an attempt
PATIENCE = 20.0  # seconds for spawned ranks to end by themselves after one has failed


@dataclass(frozen=True)
class _Job:
    """The arguments of the call that every rank makes."""

    entry: str
    run: Run
    out_dir: Path
    task: Any


def launch(entry: str, run: Run, out_dir: Path, task: Any = None) -> Any:
    """Run `entry` ("module:function", called with run, context, task) on every rank; return rank
    0's result.

    Raises: ConfigError and RunStopped as the worker raised them; other failures with the worker's
    traceback.
    """
    out_dir = out_dir.resolve()
    out_dir.mkdir(parents=True, exist_ok=True)
    hardware.check_driver(run.hardware)
    switch, workers = run.opt.workers
    if workers.backend == "nccl" and not hardware.local_devices(run.hardware):
        raise ConfigError(
            f"opt.{switch}.backend=nccl needs CUDA devices. Use opt.{switch}.backend=auto or gloo."
        )
    hardware.check_visible(run.hardware)
    hardware.set_environment(run.hardware.p2p)
    _free_device()
    job = _Job(entry, copy.deepcopy(run), out_dir, task)  # the caller's run is not changed
    if ranked():
        check_started(run)
        if workers.ranks is not None:
            starter, instead = "srun", "srun --ntasks-per-node, or slurm.ranks_per_node"
            if _torchrun():
                starter, instead = "torchrun", "torchrun --nproc_per_node"
            raise ConfigError(
                f"opt.{switch}.ranks={workers.ranks} has no effect: {starter} has started"
                f" {os.environ['WORLD_SIZE']} ranks. Leave it out, and say how many with {instead}."
            )
        rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
        return _grouped(job, rank, world, int(os.environ["LOCAL_RANK"]), "env://")
    ranks = _ranks(run)
    # a group of one rank, whose shards and checkpoints hold full tensors
    if ranks == 1 and run.opt.fsdp.enabled:
        with tempfile.TemporaryDirectory() as folder:
            return _grouped(job, 0, 1, 0, f"file://{folder}/meeting")
    if ranks == 1:
        return _work(job, Context(0, 1, hardware.find(run.hardware), out_dir))
    return _spawn(job, ranks)


def _free_device() -> None:
    """Free the GPU memory that an earlier job of this process holds: ranks and engines in other
    processes can use only free memory.
    """
    if torch.cuda.is_initialized():
        gc.collect()
        torch.cuda.empty_cache()


def _torchrun() -> bool:
    """Return whether torchrun started this rank. A rank that was started neither by torchrun nor by
    this program was started by srun.
    """
    return "TORCHELASTIC_RUN_ID" in os.environ


def check_started(run: Run) -> None:
    """Raise ConfigError if torchrun or srun started more ranks than devices, or several groups of
    ranks.
    """
    local, torchrun = int(os.environ.get("LOCAL_WORLD_SIZE", "1")), _torchrun()
    # The tasks of the job step, such as "4" or "4(x2),1": a batch script outside of a step has no
    # such variable, and its torchrun runs once.
    tasks = re.match(r"\d+", os.environ.get("SLURM_STEP_TASKS_PER_NODE", ""))
    if torchrun and local > 1 and tasks and int(tasks[0]) > 1:
        raise ConfigError(
            f"srun started {tasks[0]} tasks on this node, and torchrun in each of them {local}"
            f" ranks: {int(tasks[0]) * local} processes in {tasks[0]} groups that get in each"
            f" other's way. Use srun --ntasks-per-node=1 with torchrun --nproc_per_node={local},"
            " one torchrun a node."
        )
    devices = hardware.local_devices(run.hardware)
    if devices and local > devices:
        started = f"srun started {local} ranks on this node"
        if torchrun:
            started = f"torchrun --nproc_per_node={local}"
        raise ConfigError(
            f"{started}, but this node has {devices} CUDA devices. Use at most {devices}, or "
            "give the job more (with Slurm: --gpus-per-node, not --gpus-per-task)."
        )


def _ranks(run: Run) -> int:
    switch, workers = run.opt.workers
    if not workers.enabled:
        return 1
    devices = hardware.local_devices(run.hardware)
    if workers.ranks is None:
        return devices or 2
    if devices and workers.ranks > devices:
        raise ConfigError(
            f"opt.{switch}.ranks={workers.ranks}, but this node has {devices} CUDA devices. Use at"
            f" most {devices}."
        )
    return workers.ranks


def _check_sendable(job: _Job) -> None:
    """Raise ConfigError for a task that cannot be pickled for the ranks that this
    process starts.
    """
    switch = job.run.opt.workers[0]
    advice = (
        "Define its functions and classes at the top of a module, or start the ranks with torchrun,"
        " which runs the whole script in each of them."
    )
    try:
        packed = pickle.dumps(job.task)
    except Exception as error:  # whatever its __reduce__ raises
        raise ConfigError(
            f"{task_name(job.task)} cannot be sent to the ranks of opt={switch}:"
            f" {type(error).__name__}: {error}. {advice}"
        ) from None
    script = getattr(sys.modules["__main__"], "__file__", None)
    if script is None and b"__main__" in packed:
        raise ConfigError(
            f"{task_name(job.task)} cannot be sent to the ranks of opt={switch}: it holds what this"
            f" notebook or shell defines, which ranks cannot import. {advice}"
        )
    if script is not None and not Path(script).exists():
        raise ConfigError(
            f"the ranks of opt={switch} cannot import the program that starts them, which is not in"
            f" a file but {script}. Write it to one."
        )


def _spawn(job: _Job, ranks: int) -> Any:
    out_dir = job.out_dir
    _check_sendable(job)
    # It warns of each rank that it ends after a failure; the failure itself is raised below.
    logging.getLogger("torch.multiprocessing.spawn").setLevel(logging.ERROR)
    with tempfile.TemporaryDirectory() as folder:
        workers = mp.start_processes(
            _spawned, args=(job, ranks, folder), nprocs=ranks, join=False, start_method="spawn"
        )
        assert workers is not None

        asked: int | None = None

        # Ctrl-C in a terminal reaches the workers by itself; a signal sent to this process alone
        # does not.
        def forward(number: int, _: Any) -> None:
            nonlocal asked
            StopSignal.last = asked = number
            # SIGUSR2 is submitit's; ranks ignore it
            number = signal.SIGUSR1 if number == signal.SIGUSR2 else number
            for worker in workers.processes:
                if worker is not None and worker.pid is not None and worker.is_alive():
                    os.kill(worker.pid, number)

        previous = {n: signal.signal(n, forward) for n in taken()}
        try:
            while not workers.join(grace_period=PATIENCE):
                pass
        except (mp.ProcessRaisedException, mp.ProcessExitedException) as error:
            exited = isinstance(error, mp.ProcessExitedException)
            if exited and error.exit_code == EXIT_INTERRUPTED:
                asked = signal.SIGINT
            if not _read_outcomes(folder) and not (exited and asked):
                raise (_explain_kill(error, out_dir) if exited else error) from None
        finally:
            for number, handler in previous.items():
                signal.signal(number, handler)
        outcomes = _read_outcomes(folder)
    failures = [outcome for outcome in outcomes if isinstance(outcome, Exception)]
    if outcomes and not failures:
        return outcomes[0]
    # a signal outside of the steps ends a rank at once, and the others fail without it
    crashed = any(isinstance(f, RunStopped) and f.code == EXIT_CRASH for f in failures[:1])
    if failures and not (asked and crashed):
        raise failures[0]
    if asked in (None, signal.SIGINT):
        raise KeyboardInterrupt
    raise RunStopped(
        f"ended by {signal.Signals(asked).name}, without saving. Go on with"
        f" {name_folder(out_dir)} resume=auto.",
        128 + asked,  # the exit code of a process that a signal has ended
    )


def _explain_kill(error: mp.ProcessExitedException, out_dir: Path) -> Exception:
    """Return the exception for a rank that has exited without an outcome: killed by a signal from
    outside, or with an exit code.
    """
    if not error.signal_name:
        return error
    rank = error.error_index
    written = out_dir / ("run.log" if rank == 0 else f"rank-{rank}.log")
    return RunStopped(
        f"rank {rank} was killed from outside ({error.signal_name}; where memory runs out, the"
        f" system does that), so the others were stopped. Its log: {written}. Go on with"
        f" {name_folder(out_dir)} resume=auto.",
        EXIT_CRASH,
    )


def _spawned(local_rank: int, job: _Job, ranks: int, folder: str) -> None:
    signal.signal(signal.SIGUSR2, signal.SIG_IGN)  # submitit's, which the parent passes on
    meeting = f"file://{folder}/meeting"  # a file, not a port: nothing to collide with
    try:
        result = _grouped(job, local_rank, ranks, local_rank, meeting)
    except RunStopped as stopped:
        _write_outcome(folder, local_rank, stopped)
        if not _is_common(stopped):
            sys.exit(stopped.code)
        return
    # perhaps in this rank alone: leaving with a code ends the others, which wait for it
    except ConfigError as error:
        _write_outcome(folder, local_rank, error)
        sys.exit(EXIT_CONFIG)
    except KeyboardInterrupt:  # with a code, or it would not end the others either
        sys.exit(EXIT_INTERRUPTED)
    if local_rank == 0:
        _write_outcome(folder, local_rank, result)


def _write_outcome(folder: str, rank: int, outcome: Any) -> None:
    """Write the result or the exception of a rank to a file. A pipe holds only 64 KiB: the rank
    would wait for a reader, and the reader for the end of the rank.
    """
    beside = Path(folder, f"rank-{rank}.tmp")
    beside.write_bytes(pickle.dumps(outcome))
    beside.rename(beside.with_suffix(".outcome"))


def _read_outcomes(folder: str) -> list[Any]:
    """Return the outcomes of the ranks, the earliest first."""
    left = sorted(Path(folder).glob("*.outcome"), key=lambda path: path.stat().st_mtime_ns)
    return [pickle.loads(path.read_bytes()) for path in left]


def _grouped(job: _Job, rank: int, world: int, local_rank: int, meeting: str) -> Any:
    run = job.run
    device = hardware.find(run.hardware, local_rank)
    if device.device.type == "cuda":
        torch.cuda.set_device(device.device)
    # torchrun sets OMP_NUM_THREADS=1, which slows down computations on the host.
    if world > 1 and (_torchrun() or "OMP_NUM_THREADS" not in os.environ):
        here = int(os.environ.get("LOCAL_WORLD_SIZE", world))
        threads.share_cores(here, alike=ranked() and not _torchrun())
    switch, workers = run.opt.workers
    backend = workers.backend
    if backend == "auto":
        backend = "nccl" if device.device.type == "cuda" else "gloo"
    if backend == "nccl" and run.opt.fsdp.cpu_offload:
        backend = "cpu:gloo,cuda:nccl"  # norms of offloaded tensors are summed on the CPU
    store = _meet(switch, workers.arrival_seconds, meeting, rank, world)
    alarm = Alarm(store, rank)
    try:
        agree_on_backend(store, rank, backend, device.name)
        dist.init_process_group(
            backend,
            store=store,
            rank=rank,
            world_size=world,
            timeout=TIMEOUT,
            device_id=device.device if "nccl" in backend else None,  # also that of a barrier
        )
        mesh = None
        if run.opt.fsdp.enabled:  # each row of the mesh holds one copy of the weights
            sizes = cut_mesh(run.opt.fsdp, world)
            names = ("replicate", "shard")
            mesh = init_device_mesh(device.device.type, sizes, mesh_dim_names=names)
            for group in mesh.get_all_groups():  # these groups have the backend's default timeout
                dist.distributed_c10d._set_pg_timeout(TIMEOUT, group)
        if _torchrun():
            dist.barrier()  # all have read it
            store.underlying_store.delete_key(ATTEMPT)
        context = Context(rank, world, device, job.out_dir, mesh)
        result = _work(job, context)
    except BaseException as error:
        if world > 1:
            if not _is_common(error):
                raise alarm.sound(error) from error
            # Rank 0 still writes, and launchers end all ranks soon after the first has left.
            context.meet()
        alarm.stop()
        if dist.is_initialized():  # false if the initialization failed
            dist.destroy_process_group()
        raise
    dist.destroy_process_group()
    alarm.stop()
    return result


def _is_common(error: BaseException) -> bool:
    """Return whether all ranks raise this error: a stop after a signal, or by a check of the
    numbers.
    """
    return isinstance(error, RunStopped) and error.code in (EXIT_SIGNAL, EXIT_NUMBERS)


def _meet(switch: str, seconds: float, meeting: str, rank: int, world: int) -> Any:
    """Return the store through which the ranks have met. Raises: ConfigError if they do not meet in
    time.
    """
    wait = timedelta(seconds=seconds)
    try:
        store = next(dist.rendezvous(meeting, rank, world, timeout=wait))[0]
        return set_apart(store, rank) if _torchrun() else store
    except (dist.DistNetworkError, dist.DistStoreError) as error:
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        if "EADDRINUSE" in str(error):
            raise ConfigError(
                f"the ranks cannot meet at {where}: another program uses that port. Give another"
                " one, as MASTER_PORT or to torchrun."
            ) from None
        raise ConfigError(
            f"rank {rank} of {world} waited {seconds:g} s for the others at {where}"
            f" (opt.{switch}.arrival_seconds): {str(error).splitlines()[0]} Look whether every node"
            " has started its ranks and can reach that address."
        ) from None


def set_apart(shared: Any, rank: int) -> Any:
    """Return a view of torchrun's store with keys of this attempt only.

    After a restart (--max-restarts) ranks find the store of the previous attempt, with its
    addresses, to which a rank would try to connect, and with its alarm. The count of restarts
    cannot separate attempts, since each node has its own. So rank 0 draws a name, and the others
    wait for it.
    """
    if rank == 0:
        shared.set(ATTEMPT, uuid.uuid4().hex)
    return dist.PrefixStore(shared.get(ATTEMPT).decode(), shared)


def agree_on_backend(store: Any, rank: int, backend: str, device: str) -> None:
    """Raise ConfigError if a rank uses another backend than rank 0: both would wait for each other
    silently.
    """
    store.set(f"clutch_backend_{rank}", backend)
    first = store.get("clutch_backend_0").decode()
    if first != backend:
        raise ConfigError(
            f"rank {rank} computes on {device} and talks by {backend}, and rank 0 by {first}. Let"
            " all nodes see their GPUs, or set hardware=cpu."
        )


def _work(job: _Job, context: Context) -> Any:
    """Train, with the run folder locked on the rank that writes."""
    shard = getattr(job.run.algo, "shard", None)
    with lock.locked(context.out_dir, shard) if context.main else nullcontext():
        return _train(job, context)


def _train(job: _Job, context: Context) -> Any:
    run = job.run
    _logging(context)
    hardware.check(run.hardware, run.opt, context.device)
    if context.device.device.type == "cpu":
        hardware.keep_freed_memory()
        threads.watch_load()
    _agree(run, context)
    agree_on_numbers(run, context)
    run.algo.check_run(run)
    switch, workers = run.opt.workers
    # no error: a run of several ranks may be resumed with one, or be compared with it
    if workers.enabled and context.world_size == 1:
        nothing = "nothing is shared out: it holds all weights, gradients and optimizer state"
        log.info(
            "opt=%s with one rank: %s",
            switch,
            nothing if run.opt.fsdp.enabled else "the same as without it",
        )
    train = user_code.load(job.entry)
    try:
        return train(run, context, job.task)
    except (CheckpointError, OSError) as error:
        if isinstance(error, OSError) and error.errno not in FULL:
            raise
        raise RunStopped(
            f"{error} Earlier checkpoints stand. Make room, then go on with"
            f" {name_folder(context.out_dir)} resume=auto.",
            EXIT_WRITE,
        ) from error


def agree_on_numbers(run: Run, context: Context) -> None:
    """Raise ConfigError if ranks compute in different dtypes, as on different devices: their
    gradients, some of them scaled, would be added.
    """
    if context.world_size == 1 or not run.opt.amp.enabled:
        return
    named = context.gather_objects(precision.resolve(run.opt, context.device.device).name)
    rank = next((rank for rank, name in enumerate(named) if name != named[0]), None)
    if rank is not None:
        gpu = context.device.device.type == "cuda"
        advice = "Set opt.amp.dtype=float16, which both have, or leave" if gpu else "Leave"
        raise ConfigError(
            f"opt=amp computes in {named[0]} on rank 0 and in {named[rank]} on rank {rank}."
            f" {advice} out opt=amp."
        )


def _agree(run: Run, context: Context) -> None:
    """Raise ConfigError if a rank has other settings than rank 0; torchrun lets each rank compose
    its own.
    """
    if context.world_size == 1:
        return
    mine = {"hydra.run.dir": str(context.out_dir), "code": _code()} | flat(asdict(run))
    every = context.gather_objects(mine)
    for rank, theirs in enumerate(every):
        differing = next(
            (key for key in {**every[0], **theirs} if every[0].get(key) != theirs.get(key)), None
        )
        if differing == "code":
            raise ConfigError(
                f"the code of clutch differs on rank {rank} from that on rank 0. Give all nodes one"
                " checkout on a shared disk, or the same commit."
            )
        if differing is not None:
            raise ConfigError(
                f"{differing} is {every[0].get(differing)!r} on rank 0 and"
                f" {theirs.get(differing)!r} on rank {rank}. Start all ranks with the same command"
                " and the same version of the files in conf/."
            )


def _code() -> str:
    root = Path(__file__).resolve().parents[2]
    packages = [root / "common", *(path.parent for path in root.glob("*/config.py"))]
    files = sorted(path for package in packages for path in package.rglob("*.py"))
    return hashlib.sha256(b"\0".join(path.read_bytes() for path in files)).hexdigest()


def _logging(context: Context) -> None:
    """Set up logging: rank 0 prints and writes RUN/run.log; the others write RUN/rank-N.log and
    print nothing.
    """
    early = take_early(log.handlers)
    for handler in list(log.handlers):
        log.removeHandler(handler)
        handler.close()
    log.setLevel(logging.INFO)
    log.propagate = False
    name = "run.log" if context.main else f"rank-{context.rank}.log"
    log.addHandler(open_log(context.out_dir / name))
    if context.main:
        show_any_text()
        printed = _Printed(sys.stdout)
        printed.setFormatter(_Plain())
        log.addHandler(printed)
        for record in early:
            log.handle(record)
    else:  # libraries give the same warnings on all ranks
        warnings.simplefilter("ignore")
        transformers.logging.set_verbosity_error()


class _Printed(logging.StreamHandler[TextIO]):
    """Prints log records above the live lines of a terminal."""

    def emit(self, record: logging.LogRecord) -> None:
        with terminal.printing():
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:
        """Stop printing once the reader of a pipe, such as head, has closed it; the run continues,
        and run.log has all lines. Raises: OSError if the disk is full.
        """
        error = sys.exc_info()[1]
        full = error if isinstance(error, OSError) and error.errno in FULL else None
        if full or isinstance(error, BrokenPipeError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), self.stream.fileno())
        else:
            super().handleError(record)
        if full:
            raise OSError(full.errno, "what is printed cannot be written, the disk is full")


class _Plain(logging.Formatter):
    """Formats a record as its message, with its level in front for warnings and above."""

    def format(self, record: logging.LogRecord) -> str:
        text = visible(super().format(record), kept="\n\t")
        return text if record.levelno < logging.WARNING else f"{record.levelname.lower()}: {text}"
