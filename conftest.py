"""Fixtures of all tests; helpers are in tests/support/.

What imports torch is imported in the fixtures: the process that hands out the tests to others reads
this file too, and they wait for it.
"""

import gc
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

# Before torch is imported: what a shell or a launcher has set is not what is tested.
FOREIGN = (
    *("CLUTCH_", "WANDB_", "SLURM_", "TORCHELASTIC_", "MASTER_", "RANK", "WORLD_SIZE", "LOCAL_"),
    *("A100_", "CHUNK_SIZE", "MICRO_BATCH_SIZE"),
    *("USE_AMP", "AMP_DTYPE", "USE_TF32", "COMPILE_MODEL", "PARALLEL_REWARDS", "NUM_WORKERS"),
)
for name in [name for name in os.environ if name.startswith(FOREIGN) and name != "SLURM_CONF"]:
    del os.environ[name]
# Threads do not survive a fork, and two test processes with two threads each slow all of them.
os.environ |= dict.fromkeys(("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS"), "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
# A shell has what it runs in the background ignore Ctrl-C, and so would all that is started here.
signal.signal(signal.SIGINT, signal.default_int_handler)
# What is imported stays: looking for garbage in it takes a tenth of the time of imports.
gc.disable()
# Thousands of waits for the disk, for power cuts that no test makes.
os.fsync = lambda _: None

import pytest
import yaml

# Hydra parses a score of files for each run that is composed; this takes a quarter of the time off.
yaml.SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)

from tests.support import CONF, ROOT, SHARED, SMALL_RFT
from tests.support.commands import Begin, Launch, Started, Warm
from tests.support.standin import LIBRARY, build

SLOWEST = 15  # tests that are shown where all of them took long
STARTED = pytest.StashKey[float]()
# Fixtures that start processes or train: make quick leaves out what uses them.
RUNS = {"warm", "launch", "begin", "standin", "cache", "in_cache"}


def pytest_addoption(parser: pytest.Parser) -> None:
    """Let the Makefile say how long a tier takes by CONTRIBUTING.md."""
    parser.addoption(
        "--documented",
        type=float,
        metavar="SECONDS",
        help="what these tests are documented to take; twice as long, and the slowest are shown",
    )


def pytest_sessionstart(session: pytest.Session) -> None:
    session.config.stash[STARTED] = time.monotonic()


def pytest_terminal_summary(
    terminalreporter: pytest.TerminalReporter, config: pytest.Config
) -> None:
    """Show what is slow where the tests took twice as long as documented."""
    documented = config.getoption("--documented")
    took = time.monotonic() - config.stash[STARTED]
    if documented is None or took <= 2 * documented:
        return
    seconds: Counter[str] = Counter()
    for reports in terminalreporter.stats.values():
        for report in reports:
            if isinstance(report, pytest.TestReport):
                seconds[report.nodeid] += report.duration
    terminalreporter.section("slow")
    terminalreporter.write_line(
        f"These tests took {took:.0f} s, and are documented to take {documented:.0f} s on two idle"
        f" cores. Here are {os.cpu_count()} cores, on which {os.getloadavg()[2]:.1f} processes ran"
        " in the last 15 minutes. The slowest tests, in seconds:"
    )
    for name, each in seconds.most_common(SLOWEST):
        terminalreporter.write_line(f"{each:8.1f}  {name}")


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark what uses one of them."""
    if RUNS.intersection(getattr(item, "fixturenames", ())):
        item.add_marker("run")


def pytest_runtest_setup(item: pytest.Item) -> None:
    """Skip what begins after TESTS_UNTIL, in seconds since 1970: .ci/run has an end."""
    if time.time() > float(os.environ.get("TESTS_UNTIL", "inf")):
        pytest.skip("the time of this run of the tests is up")


@pytest.hookimpl(trylast=True)  # when those that are not wanted are gone
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Whole runs go first: two processes begin with a half of the tests each, and the one that is
    done first takes over from the end of the other's, where what is left is quick, and needs no
    runs that the other has made.
    """
    modules = {item.path: item.path.parent.name in ("runs", "faults") for item in items}
    modules |= {
        item.path: True
        for item in items
        if "plugins" in item.path.parts and item.get_closest_marker("run")
    }
    runs = [path for path, long in modules.items() if long]
    first, second = ([i for i in items if i.path in runs[start::2]] for start in (0, 1))
    quick = [item for item in items if not modules[item.path]]
    room = max(0, len(items) // 2 - len(first))
    items[:] = [*first, *quick[:room], *second, *quick[room:]]


@pytest.fixture(scope="session", autouse=True)
def held() -> None:
    """Composing a run costs a fifth less where its files have been parsed."""
    from tests.support.held import hold_files

    hold_files()


@pytest.fixture(scope="module", autouse=True)
def frozen() -> None:
    """What was imported stays: collections, which composing a run alone sets off, need not look at
    it again and again.
    """
    gc.collect()
    gc.freeze()
    gc.set_threshold(100_000)
    gc.enable()


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    """And no look at the load of the machine, which other tests make. Nor does a test see the
    warnings of the one before it, which wait for a log to be opened.
    """
    import torch

    from common.device import threads
    from common.system import take_early

    take_early(logging.getLogger("clutch").handlers)
    torch.set_num_threads(1)
    monkeypatch.setattr(threads, "watch_load", lambda: None)
    monkeypatch.setattr(threads, "_watcher", None)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache of tiny models for all test processes."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "clutch-cache"


@pytest.fixture
def math_verify(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Any]:
    """A module in place of math-verify; a call says what it finds right."""
    from common.tasks import limited_process
    from tests.support.scoring import MathVerify

    (folder := tmp_path / "packages").mkdir()
    yield MathVerify(folder, monkeypatch)
    limited_process.end_all()
    sys.modules.pop("math_verify", None)


@pytest.fixture
def shared_data() -> Path:
    if not (SHARED / "data").is_dir():
        pytest.skip("the shared data is not beside the repository")
    return SHARED / "data"


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    """Commands without their imports."""
    process = Warm()
    yield process
    process.stop()


@pytest.fixture(scope="session")
def standin() -> Iterator[Warm]:
    """A process with the stand-in for a CUDA device; its `call` runs functions there."""
    try:
        library = build()
    except FileNotFoundError as error:
        pytest.skip(str(error))
    process = Warm(**{LIBRARY: str(library)})
    yield process
    process.stop()


@pytest.fixture(scope="session", autouse=True)
def asked_slurm() -> Iterator[subprocess.Popen[str] | None]:
    """The question for idle nodes. Where no Slurm is up, it takes ten seconds to say so."""
    if shutil.which("sinfo") is None or shutil.which("sbatch") is None:
        yield None
        return
    command = ["sinfo", "-h", "-t", "idle", "-o", "%D"]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        yield process
        process.kill()


@pytest.fixture(scope="session")
def slurm(asked_slurm: subprocess.Popen[str] | None) -> int:
    """How many nodes of a Slurm are idle; 0 where there is none."""
    if asked_slurm is None:
        return 0
    said = asked_slurm.communicate(timeout=20)[0]
    return 0 if asked_slurm.returncode else sum(map(int, said.split()))


@pytest.fixture
def launch(cache: Path, tmp_path: Path, begin: Begin) -> Launch:
    """Run launch.py as a user does, from another folder. Returns the finished process; asserts its
    exit code.

    fresh: in a new interpreter; else in a fork of one, which saves the seconds of its imports.
    module: that one in place of launch.py, as python -m does. largest_file: in bytes, of a fork.
    """

    def run(
        *arguments: str,
        code: int | None = 0,
        env: dict[str, str] | None = None,
        fresh: bool = False,
        module: str | None = None,
        **limits: int,
    ) -> subprocess.CompletedProcess[str]:
        if fresh:
            done = subprocess.run(
                [
                    sys.executable,
                    *(["-m", module] if module else [str(ROOT / "launch.py")]),
                    *arguments,
                ],
                cwd=ROOT if module else tmp_path,
                env=os.environ | {"CLUTCH_CACHE": str(cache)} | (env or {}),
                capture_output=True,
                text=True,
                timeout=300,
            )
        else:
            process = begin(*arguments, env=env, merged=False, module=module, **limits)
            out, err = process.communicate()
            assert process.returncode is not None
            done = subprocess.CompletedProcess(arguments, process.returncode, out, err)
        assert code is None or done.returncode == code, (
            f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
        return done

    return run


@pytest.fixture
def letters(in_cache: None, tmp_path: Path) -> Callable[..., Any]:
    """Run RFT on the letters task in this process; returns the result."""
    from launch import compose, train

    def run(*overrides: str, folder: str = "run", task: Any = None) -> Any:
        return train(compose([*SMALL_RFT, *overrides], CONF), tmp_path / folder, task)

    return run


@pytest.fixture(scope="session")
def first_iteration(cache: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of one iteration of RFT on the letters task, for tests that go on from there."""
    from launch import compose, train

    folder = tmp_path_factory.mktemp("rft")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("CLUTCH_CACHE", str(cache))
        train(compose([*SMALL_RFT, "algo.iterations=1"], CONF), folder)
    return folder


@pytest.fixture
def iterated(first_iteration: Path, tmp_path: Path) -> Path:
    """A copy of it, where `letters` goes on."""
    return shutil.copytree(first_iteration, tmp_path / "run")


@pytest.fixture
def begin(cache: Path, tmp_path: Path, warm: Warm) -> Iterator[Begin]:
    """Start launch.py in a fork, to be killed: `launch` that does not wait. All that it prints is
    in one text.
    """
    printed = ExitStack()

    def start(
        *arguments: str,
        env: dict[str, str] | None = None,
        merged: bool = True,
        **more: Any,
    ) -> Started:
        environment = dict(os.environ | {"CLUTCH_CACHE": str(cache)} | (env or {}))
        files = Path(printed.enter_context(tempfile.TemporaryDirectory()))
        return warm.start(tmp_path, environment, files, merged, arguments=arguments, **more)

    with printed:
        yield start
        if warm.last is not None:
            warm.last.stop()


@pytest.fixture
def emulated_bf16(monkeypatch: pytest.MonkeyPatch) -> None:
    """Runs in this process compute in bfloat16 where opt=amp asks for it, on any CPU."""
    from common.device import precision

    monkeypatch.setattr(precision, "native_bf16", lambda _: True)


@pytest.fixture
def in_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For tests that load the tiny model in this process."""
    monkeypatch.setenv("CLUTCH_CACHE", str(cache))
    return
