"""Presets against the device that is there, which dtype it has, and sizes that fit."""

import math
import os
import subprocess
import sys
from types import SimpleNamespace

import pytest
import torch

from common import optim
from common.config import ConfigError
from common.device import hardware, precision
from common.device.hardware import Device, check, find
from common.distributed import workers
from common.memory.plan import name_experiment
from common.memory.row_limit import RowLimit
from launch import compose, train
from tests.support import SMALL, SMALL_GRPO, standin
from tests.support.refusals import refuses

CUDA = torch.device("cuda", 0)
elsewhere = pytest.mark.skipif(
    torch.cuda.is_available(), reason="needs a machine without CUDA devices"
)


def preset(name: str, *overrides: str):
    return compose([f"hardware={name}", *overrides])


@pytest.fixture
def pretend(monkeypatch):
    """Make torch say that there is one CUDA device, of a name, memory in GB and capability."""

    def device(
        name: str, gb: float, capability: tuple[int, int], built: tuple[str, ...] = ()
    ) -> None:
        facts = SimpleNamespace(name=name, total_memory=int(gb * 2**30))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: 1)
        monkeypatch.setattr(torch.cuda, "get_device_properties", lambda _: facts)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _=None: capability)
        monkeypatch.setattr(torch.cuda, "get_arch_list", lambda: list(built))

    return device


# --- the preset and the device


@pytest.mark.parametrize(
    ("name", "gb", "capability", "card", "sizes"),
    [
        ("NVIDIA A100-SXM4-40GB", 39.4, (8, 0), "a100_40g", "rft_a100_40g"),
        ("NVIDIA A100 80GB PCIe", 79.3, (8, 0), "a100_80g", "rft_a100_80g"),
        ("Tesla V100-SXM2-32GB", 31.7, (7, 0), "v100", "rft_v100"),
        ("Tesla V100-SXM2-16GB", 15.8, (7, 0), None, None),
        ("NVIDIA GeForce RTX 4090", 23.6, (8, 9), "rtx4090", "rft_rtx4090"),
        ("NVIDIA H100 80GB HBM3", 79.1, (9, 0), "h100", None),
        ("NVIDIA L4", 22.0, (8, 9), None, None),
    ],
)
def test_auto_names_the_experiment_of_the_card(pretend, name, gb, capability, card, sizes):
    pretend(name, gb, capability)
    run = compose(["algo=rft", "hardware=auto"])
    found = find(run.hardware)
    assert hardware.find_preset(found) == card
    named = name_experiment(run, found)
    assert named == (
        {"experiment": f"experiment={sizes} is made for this card (hardware={card})"}
        if sizes
        else {}
    )
    if sizes:
        for settings in ([f"experiment={sizes}"], ["algo=rft", f"hardware={card}"]):
            assert name_experiment(compose(settings), found) == {}, "nothing is left to name"


def test_auto_advises_only_matching_experiments(pretend):
    run = compose(["algo=rft", "hardware=auto"])
    assert name_experiment(run, Device(torch.device("cpu"), "EPYC", 40, True)) == {}
    pretend("NVIDIA A100-SXM4-40GB", 39.4, (8, 0))
    assert name_experiment(compose(["algo=eggroll"]), find(run.hardware)) == {}


@elsewhere
def test_another_device_is_one_warning_and_the_run_goes_on(in_cache, tmp_path, capsys):
    train(compose([*SMALL, "hardware=a100_40g", "algo.steps=1"]), tmp_path / "run")
    warnings = [
        line for line in capsys.readouterr().out.splitlines() if line.startswith("warning:")
    ]
    assert len(warnings) == 1
    assert warnings[0].startswith("warning: hardware=a100_40g describes another device; here is ")
    assert warnings[0].endswith(
        "Sizes are refitted to it and the run goes on (hardware.strict=true would stop)."
    )
    assert (tmp_path / "run" / "result.json").is_file()


@elsewhere
def test_strict_makes_it_an_error(launch):
    done = launch("hardware=a100_40g", "hardware.strict=true", code=2)
    assert done.stderr.startswith("error: hardware=a100_40g describes another device; here is ")
    assert done.stderr.endswith(" GB. Use hardware=auto, or hardware.strict=false to go on.\n")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("name", "device", "gb", "same"),
    [
        ("a100_40g", "NVIDIA A100-SXM4-40GB", 39.4, True),
        ("a100_80g", "NVIDIA A100-SXM4-40GB", 39.4, False),  # the name alone would match
        ("a100_80g", "NVIDIA A100-SXM4-80GB", 79.3, True),
        ("v100", "Tesla V100-SXM2-32GB", 31.7, True),
        ("v100", "Tesla V100-SXM2-16GB", 15.8, False),
        ("rtx4090", "NVIDIA GeForce RTX 4090", 23.6, True),
        ("h100", "NVIDIA H100 80GB HBM3", 79.1, True),
        ("h200", "NVIDIA H200", 139.8, True),
        ("h100", "NVIDIA H200", 139.8, False),
        ("auto", "NVIDIA T4", 14.6, True),
    ],
)
def test_which_device_matches(pretend, name, device, gb, same):
    pretend(device, gb, (8, 0))
    found = find(preset(name).hardware)
    assert (found.device.type, found.name, found.matches) == ("cuda", device, same)
    assert found.memory_gb == pytest.approx(gb)


def test_the_cpu_preset_uses_no_gpu(pretend):
    pretend("NVIDIA H200", 139.8, (9, 0))
    found = find(preset("cpu").hardware)
    assert found.device.type == "cpu"
    assert found.matches
    assert found.memory_gb > 0.5


def test_cpu_memory_follows_settings_and_control_group(tmp_path, monkeypatch):
    with_limit = find(preset("cpu", "hardware.memory_gb=0.25").hardware)
    assert with_limit.memory_gb == 0.25
    monkeypatch.setattr(hardware, "find_limit", lambda: 2**28)
    assert find(preset("cpu").hardware).memory_gb == 0.25


@pytest.mark.parametrize(
    ("group", "files", "limit"),
    [
        ("0::/job/step", {"job/memory.max": "500", "job/step/memory.max": "max"}, 500),
        ("0::/job/step", {"job/memory.max": "500", "job/step/memory.max": "300"}, 300),
        ("0::/not/here", {"memory.max": "700"}, 700),  # of a container, which is the top
        ("4:cpu:/a\n7:memory:/a", {"memory/a/memory.limit_in_bytes": "900"}, 900),
        ("0::/", {}, math.inf),
    ],
)
def test_the_limit_of_a_control_group(tmp_path, group, files, limit):
    (tmp_path / "cgroup").write_text(f"{group}\n")
    for name, text in files.items():
        (tmp_path / "root" / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / "root" / name).write_text(f"{text}\n")
    assert hardware.find_limit(tmp_path / "cgroup", tmp_path / "root") == limit
    assert hardware.find_limit(tmp_path / "nowhere", tmp_path / "root") == math.inf


def test_compile_is_refused_where_the_preset_rules_it_out(pretend):
    pretend("Tesla V100-SXM2-32GB", 32, (7, 0))
    run = preset("v100", "opt=[compile]")
    refuses(
        lambda: check(run.hardware, run.opt, find(run.hardware)),
        key=["opt=compile", "hardware=v100"],
        value="8.0",
        try_next="Leave it out",
    )
    check(run.hardware, preset("v100").opt, find(run.hardware))
    elsewhere = Device(torch.device("cpu"), "CPU", 16, matches=False)
    check(run.hardware, run.opt, elsewhere)  # the device that is there may well compile


def test_a_torch_without_kernels_for_the_device(pretend):
    run = preset("v100")
    pretend("Tesla V100-SXM2-32GB", 32, (7, 0), built=("sm_75", "sm_80", "sm_90a"))
    with pytest.raises(
        ConfigError, match=r"has no kernels for Tesla V100-SXM2-32GB \(sm_70; it has sm_75, sm_80"
    ):
        check(run.hardware, run.opt, find(run.hardware))
    pretend("Tesla V100-SXM2-32GB", 32, (7, 0), built=("sm_50", "sm_80"))  # sm_50 runs on 7.0
    check(run.hardware, run.opt, find(run.hardware))


OPEN = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  {}  Release Build  (user@host)"
CLOSED = "NVRM version: NVIDIA UNIX x86_64 Kernel Module  {}  Thu Feb 22 01:44:30 UTC 2024"


@pytest.mark.parametrize(
    ("driver", "built", "said"),
    [
        (
            CLOSED.format("550.54.14"),
            "13.0",
            "driver 550.54.14, .*CUDA 13.0.* --torch-backend=cu126",
        ),
        (
            OPEN.format("580.65.06"),
            None,
            "driver 580.65.06, .*without CUDA.* --torch-backend=cu130",
        ),
        (OPEN.format("580.65.06"), "13.0", "nvidia-smi -L"),
        (CLOSED.format("550.54.14"), "12.6", "nvidia-smi -L"),
        (CLOSED.format("470.82"), "13.0", "need driver 525 or later"),
    ],
)
def test_a_driver_without_a_device_is_told_before_anything_trains(
    driver, built, said, monkeypatch, tmp_path
):
    (tmp_path / "version").write_text(driver + "\nGCC version:  gcc version 12.3.0\n")
    monkeypatch.setattr(hardware, "DRIVER", tmp_path / "version")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(torch.version, "cuda", built)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    for name in ("auto", "a100_40g"):
        with pytest.raises(ConfigError, match=f"{said}.*hardware=cpu"):
            workers.launch("some:entry", preset(name), tmp_path)
    hardware.check_driver(preset("cpu").hardware)
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")  # hidden on purpose
    hardware.check_driver(preset("auto").hardware)


@pytest.mark.parametrize(("name", "wanted"), [("h100", None), ("rtx4090", "1")])
def test_peer_to_peer_is_disabled_on_a_4090(name, wanted, monkeypatch, tmp_path):
    """NCCL reads it as the process group is made."""
    monkeypatch.setenv("NCCL_P2P_DISABLE", "")  # so that it is restored after the test
    monkeypatch.delenv("NCCL_P2P_DISABLE")
    seen = []
    monkeypatch.setattr(
        workers, "_work", lambda job, context: seen.append(os.environ.get("NCCL_P2P_DISABLE"))
    )
    workers.launch("some:entry", preset(name), tmp_path)
    assert seen == [wanted]


@pytest.mark.run
def test_a_state_that_does_not_fit_is_told(monkeypatch, tmp_path):
    def run_out(optimizer):
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 4.00 GiB.")

    monkeypatch.setattr(optim, "step_nowhere", run_out)
    with pytest.raises(ConfigError, match=r"optimizer keeps do not fit.*AdamW8bit.*4\.00 GiB"):
        train(compose(SMALL_GRPO), tmp_path)


# --- precision


@pytest.mark.parametrize(
    ("capability", "dtype", "scaler"),
    [
        ((7, 0), "float16", True),
        ((7, 5), "float16", True),
        ((8, 0), "bfloat16", False),
        ((9, 0), "bfloat16", False),
    ],
)
def test_amp_is_what_the_device_really_has(pretend, capability, dtype, scaler):
    pretend("a device", 16, capability)
    chosen = precision.resolve(compose(["opt=[amp]"]).opt, CUDA)
    assert (chosen.name, chosen.scaler) == (dtype, scaler)
    assert precision.resolve(compose([]).opt, CUDA) == precision.Precision(torch.float32)


def test_a_dtype_that_is_insisted_on(pretend):
    pretend("Tesla V100", 32, (7, 0))
    opt = compose(["opt=[amp]", "opt.amp.dtype=bfloat16"]).opt
    refuses(
        lambda: precision.resolve(opt, CUDA),
        key="opt.amp.dtype",
        value="bfloat16",
        try_next=["opt.amp.dtype=auto", "float16"],
    )
    pretend("A100", 40, (8, 0))
    half = precision.resolve(compose(["opt=[amp]", "opt.amp.dtype=float16"]).opt, CUDA)
    assert (half.name, half.scaler) == ("float16", True)
    opt = compose(["opt=[amp]", "opt.amp.dtype=float16"]).opt
    refuses(
        lambda: precision.resolve(opt, torch.device("cpu")),
        key="opt.amp.dtype",
        value="float16",
        try_next="opt.amp.dtype=auto",
    )


@pytest.mark.parametrize("native", [True, False])
def test_amp_on_a_cpu(monkeypatch, native):
    monkeypatch.setattr(torch.cpu, "_is_avx512_bf16_supported", lambda: native)
    monkeypatch.setattr(torch.cpu, "_is_amx_tile_supported", lambda: False)
    chosen = precision.resolve(compose(["opt=[amp]"]).opt, torch.device("cpu"))
    assert chosen.name == ("bfloat16" if native else "float32")
    said = precision.advise(chosen, compose(["opt=[amp]"]), torch.device("cpu"), 10**9)
    assert ("changes nothing" in said) != native


def test_tf32(pretend, monkeypatch):
    monkeypatch.setattr(precision.transformers, "__version__", "5.23.0")
    run = compose(["opt=[tf32]"])
    try:
        for device, capability in ((torch.device("cpu"), (8, 0)), (CUDA, (7, 0))):
            pretend("a device", 16, capability)
            refuses(
                lambda device=device: precision.resolve(run.opt, device),
                key="opt=tf32",
                value="8.0",
                try_next="Leave it out",
            )
        pretend("a device", 16, (8, 0))
        precision.resolve(run.opt, CUDA)
        assert torch.get_float32_matmul_precision() == "high"
        precision.resolve(compose([]).opt, CUDA)
        assert torch.get_float32_matmul_precision() == "highest"
    finally:
        torch.set_float32_matmul_precision("highest")


def test_tf32_is_refused_where_it_would_round_positions(pretend, monkeypatch):
    pretend("a device", 16, (8, 0))
    monkeypatch.setattr(precision.transformers, "__version__", "5.18.0")
    precision.resolve(compose([]).opt, CUDA)
    with pytest.raises(ConfigError, match=r"transformers 5\.18\.0.* Install transformers 5\.19 or"):
        precision.resolve(compose(["opt=[tf32]"]).opt, CUDA)


# --- sizes


@pytest.mark.parametrize(
    ("preset", "capability", "opt", "said"),
    [
        ("a100_80g", (8, 0), "", "; 'opt=[amp]' computes in bfloat16, up to 16 times as fast by"),
        ("v100", (7, 0), "", "; 'opt=[amp]' computes in float16, up to 8 times as fast by"),
        (
            "a100_80g",
            (8, 0),
            "tf32",
            "; float32 products in TF32; 'opt=[amp]' computes in bfloat16",
        ),
        ("a100_80g", (8, 0), "amp,tf32", "; float32 products in TF32"),
        ("a100_80g", (8, 0), "amp", ""),
    ],
)
def test_the_plan_says_what_amp_would_bring(preset, capability, opt, said, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)
    run, device = compose([f"hardware={preset}", f"opt=[{opt}]"]), torch.device("cuda")
    half = torch.bfloat16 if "amp" in opt else torch.float32
    chosen = precision.Precision(half)
    text = precision.advise(chosen, run, device, 10**6)
    assert text.startswith(said)
    assert bool(text) == bool(said)


@pytest.mark.parametrize("native", [True, False])
def test_cpu_plans_report_native_bfloat16(native, monkeypatch):
    monkeypatch.setattr(precision, "native_bf16", lambda _: native)
    run, chosen = compose([]), precision.Precision(torch.float32)
    text = precision.advise(chosen, run, torch.device("cpu"), 135 * 10**6)
    assert ("'opt=[amp]' computes in bfloat16" in text) == native
    assert precision.advise(chosen, run, torch.device("cpu"), 10**6) == ""


def fit_rows(rows, row_bytes, fixed_bytes, memory_gb, multiple=1):
    limit = RowLimit("algo.rollout_rows", rows, floor=multiple)
    limit.fit(lambda rows: fixed_bytes + rows * row_bytes, memory_gb)
    return limit.rows


def halving(action, rows, floor, fixed=False):
    limit = RowLimit("algo.train_rows", rows, floor, fixed)
    return limit.run(action), limit.rows


def test_fit_rows():
    gb = 2**30
    assert fit_rows(256, gb / 100, 0, 10) == 256
    assert fit_rows(2000, gb / 100, 0, 10) == 900  # nine tenths of 10 GB, 100 rows a GB
    assert fit_rows(2000, gb / 100, 4 * gb, 10) == 500
    assert fit_rows(2000, gb / 100, 4.505 * gb, 10, multiple=64) == 448
    assert fit_rows(255, gb / 100, 0, 10, multiple=2) == 254
    assert (
        fit_rows(256, gb / 100, 11 * gb, 10, multiple=2) == 2
    )  # nothing fits: the smallest, and the device decides


def test_rows_are_refitted_to_a_small_device(in_cache, tmp_path, monkeypatch):
    """As if the machine had next to no memory left beside the weights: forwards of one pair."""
    monkeypatch.setattr(
        hardware, "find", lambda *_: Device(torch.device("cpu"), "a small CPU", 1e-4, True)
    )
    train(compose([*SMALL, "algo.steps=1"]), tmp_path)
    assert (
        "4 per step, 2 rows each (algo.rollout_rows=2), 4 per rank"
        in (tmp_path / "run.log").read_text()
    )


class Memory:
    """An action that fails above a number of rows."""

    def __init__(self, holds: int, error: Exception) -> None:
        self.holds, self.error, self.tried = holds, error, []

    def __call__(self, rows: int) -> str:
        self.tried.append(rows)
        if rows > self.holds:
            raise self.error
        return f"done with {rows}"


CPU_ALLOCATOR = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: you"
    " tried"
)


@pytest.mark.parametrize(
    "error",
    [torch.OutOfMemoryError("CUDA out of memory"), MemoryError(), RuntimeError(CPU_ALLOCATOR)],
    ids=repr,
)
def test_halving(error):
    memory = Memory(holds=70, error=error)
    assert halving(memory, 256, floor=2) == ("done with 64", 64)
    assert memory.tried == [256, 128, 64]
    memory = Memory(holds=5, error=error)
    assert halving(memory, 48, floor=5) == ("done with 5", 5), "the floor itself is tried"
    memory = Memory(holds=1, error=error)
    with pytest.raises(ConfigError, match=r"2 rows .* algo\.sampling\.max_new_tokens"):
        halving(memory, 8, floor=2)
    assert memory.tried == [8, 4, 2]


def test_ranks_that_keep_step_are_told_what_to_lower():
    """With opt=fsdp a rank cannot repeat a forward alone."""
    with pytest.raises(ConfigError, match=r"8 rows .*algo\.train_rows"):
        halving(Memory(holds=4, error=torch.OutOfMemoryError()), 8, floor=1, fixed=True)


def test_halving_lets_other_errors_through():
    with pytest.raises(RuntimeError, match="shapes do not match"):
        halving(Memory(holds=0, error=RuntimeError("shapes do not match")), 8, floor=1)


@pytest.mark.gpu
def test_real_memory_runs_out():
    """The device's own allocator raises, and what is left is enough for the repetition."""
    if not torch.cuda.is_available():
        pytest.skip("needs a CUDA device")
    if standin.DEVICE is not None:
        pytest.skip("the stand-in device takes its memory from the machine, which may have less")
    total = torch.cuda.get_device_properties(0).total_memory
    made, rows = halving(
        lambda rows: torch.empty(rows, total // 24, dtype=torch.int8, device="cuda"), 64, floor=1
    )
    assert (rows, made.shape[0]) == (16, 16)


def test_offload_has_no_effect_on_a_cpu():
    run = compose(["opt=[offload]", "hardware=cpu"])
    with pytest.raises(ConfigError, match="opt=offload has no effect on a CPU"):
        check(run.hardware, run.opt, find(run.hardware))


PAGES = """
import resource, sys, torch
from common.device.hardware import keep_freed_memory
if sys.argv[1] == "keep":
    keep_freed_memory()
a = torch.ones(10_000_000)
before = resource.getrusage(resource.RUSAGE_SELF).ru_minflt
for _ in range(30):
    a = a * 1.0
print(resource.getrusage(resource.RUSAGE_SELF).ru_minflt - before)
"""


@pytest.mark.thorough
@pytest.mark.run
@pytest.mark.skipif(sys.platform != "linux", reason="glibc's allocator is Linux's")
def test_freed_memory_is_used_again():
    """The kernel hands out few new pages for 30 tensors of 40 MB in turn."""

    def count(way: str) -> int:
        command = [sys.executable, "-c", PAGES, way]
        env = os.environ | {"OMP_NUM_THREADS": "1"}
        return int(subprocess.run(command, check=True, capture_output=True, env=env).stdout)

    assert count("keep") < count("give back") / 2
