"""Shared by the tests: small models, where the real data lies, and the command line in a
subprocess.
"""

import contextlib
import gc
import json
import os
import pickle
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

os.environ.setdefault(
    "OMP_NUM_THREADS", "1"
)  # two test processes with two threads each slow all of them
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault(
    "CLUTCH_PLOTS", "0"
)  # half a second of each run; tests of what a run leaves draw them

import pytest
import torch
from transformers import (
    GPT2Config,
    GPT2LMHeadModel,
    LlamaConfig,
    LlamaForCausalLM,
    Qwen2Config,
    Qwen2ForCausalLM,
    Qwen3Config,
    Qwen3ForCausalLM,
)

ROOT = Path(__file__).resolve().parent.parent
SHARED = ROOT.parent / "shared"

# A model of a few thousand parameters, without pre-training: seconds for a whole run.
SMALL = [
    "hardware=cpu",
    "model.tiny.hidden_size=32",
    "model.tiny.layers=2",
    "model.tiny.heads=2",
    "model.tiny.intermediate_size=64",
    "model.tiny.pretrain_steps=0",
    "algo.members=8",
    "algo.prompts_per_step=2",
    "algo.rows_per_forward=8",
    "algo.sampling.max_new_tokens=8",
    "algo.steps=4",
    "evaluate.examples=8",
]


def pytest_collection_finish() -> None:
    """What was imported stays: collections, which composing a run alone sets off, need not look at
    it again and again.
    """
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def one_thread() -> None:
    torch.set_num_threads(1)


@pytest.fixture(scope="session")
def cache(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """One cache of tiny models for all test processes."""
    base = tmp_path_factory.getbasetemp()
    return (base.parent if "PYTEST_XDIST_WORKER" in os.environ else base) / "clutch-cache"


@pytest.fixture
def shared_data() -> Path:
    if not (SHARED / "data").is_dir():
        pytest.skip("the shared data is not beside the repository")
    return SHARED / "data"


class Started:
    """A command or a function under way in a fork of tests/warm.py; with the methods of Popen that
    tests use.
    """

    def __init__(self, warm: "Warm", printed: Path) -> None:
        self.warm, self.printed, self.pid, self.returncode = warm, printed, int(warm.line()), None

    def poll(self) -> int | None:
        """The exit code, or None while it runs."""
        return self._ended(0)

    def send_signal(self, number: int) -> None:
        """To the process alone: its ranks are processes of their own."""
        os.kill(self.pid, number)

    def communicate(self, timeout: float = 300) -> tuple[str, str]:
        """Wait for its end. Returns: what it printed, on standard output and error."""
        if self._ended(timeout) is None:
            self.stop()
            pytest.fail(f"not done in {timeout} s\n" + "\n".join(self.said()))
        return self.said()

    def said(self) -> tuple[str, str]:
        """What it has printed so far."""
        files = [self.printed / name for name in ("stdout", "stderr")]
        out, err = (file.read_text() if file.exists() else "" for file in files)
        return out, err

    def stop(self) -> None:
        """Kill what is left of it and of its ranks."""
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self.pid, signal.SIGKILL)
        self._ended(60)

    def _ended(self, timeout: float) -> int | None:
        if self.returncode is None and self.warm.says(timeout):
            self.returncode = int(self.warm.line())
        return self.returncode


class Warm:
    """tests/warm.py, started at the first request, which serves one at a time."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[bytes] | None = None
        self.last: Started | None = None

    def start(
        self,
        folder: Path,
        environment: dict[str, str],
        printed: Path,
        merged: bool = False,
        **what: Any,
    ) -> Started:
        """what: arguments and module (None: launch.py), or call, the file of a pickled function;
        merged: standard error into standard output.
        """
        if self.process is None:
            command = [sys.executable, str(ROOT / "tests/warm.py")]
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
            )
        assert self.last is None or self.last.poll() is not None, "one at a time"
        assert self.process.stdin is not None
        files = {
            "stdout": str(printed / "stdout"),
            "stderr": str(printed / ("stdout" if merged else "stderr")),
        }
        request = {"folder": str(folder), "environment": environment, **files, **what}
        self.process.stdin.write(json.dumps(request).encode() + b"\n")
        self.last = Started(self, printed)
        return self.last

    def call(self, function: Callable[..., Any], *arguments: Any, **environment: str) -> Any:
        """What a function of a module returns in a process of its own; what it raises is raised
        here, what it prints is printed.
        """
        with tempfile.TemporaryDirectory() as printed:
            file = Path(printed) / "call"
            file.write_bytes(pickle.dumps((function, arguments)))
            started = self.start(
                ROOT, dict(os.environ | environment), Path(printed), call=str(file)
            )
            out, err = started.communicate()
            print(out, end="")
            print(err, end="", file=sys.stderr)
            assert started.returncode == 0, started.returncode
            outcome = pickle.loads(file.read_bytes())
        if isinstance(outcome, Exception):
            raise outcome
        return outcome

    def says(self, seconds: float) -> bool:
        """True if a line comes in that time."""
        assert self.process is not None
        return bool(select.select([self.process.stdout], [], [], seconds)[0])

    def line(self) -> bytes:
        """The next line."""
        assert self.process is not None
        assert self.process.stdout is not None
        return self.process.stdout.readline()

    def stop(self) -> None:
        if self.last is not None:
            self.last.stop()
        if self.process is not None:
            self.process.kill()
            self.process.communicate()


Launch = Callable[..., subprocess.CompletedProcess[str]]
Begin = Callable[..., Started]


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    """Commands without their imports."""
    process = Warm()
    yield process
    process.stop()


@pytest.fixture
def launch(cache: Path, tmp_path: Path, begin: Begin) -> Launch:
    """Run launch.py as a user does, from another folder. Returns the finished process; asserts its
    exit code.

    fresh: in a new interpreter; else in a fork of one, which saves the seconds of its imports.
    module: that one in place of launch.py, as python -m does.
    """

    def run(
        *arguments: str,
        code: int | None = 0,
        env: dict[str, str] | None = None,
        fresh: bool = False,
        module: str | None = None,
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
            process = begin(*arguments, env=env, merged=False, module=module)
            out, err = process.communicate()
            assert process.returncode is not None
            done = subprocess.CompletedProcess(arguments, process.returncode, out, err)
        assert code is None or done.returncode == code, (
            f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        )
        return done

    return run


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
        module: str | None = None,
    ) -> Started:
        environment = dict(os.environ | {"CLUTCH_CACHE": str(cache)} | (env or {}))
        files = Path(printed.enter_context(tempfile.TemporaryDirectory()))
        return warm.start(tmp_path, environment, files, merged, arguments=arguments, module=module)

    with printed:
        yield start
        if warm.last is not None:
            warm.last.stop()


@pytest.fixture
def in_cache(cache: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """For tests that load the tiny model in this process."""
    monkeypatch.setenv("CLUTCH_CACHE", str(cache))
    return


def events(folder: Path) -> list[dict]:
    return [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def small_model(name: str, vocabulary: int = 97) -> torch.nn.Module:
    """A random model of a real architecture, float32, in eval mode; the same at every call."""
    sizes = dict(
        vocab_size=vocabulary,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=128,
        bos_token_id=0,
        eos_token_id=1,
    )
    with torch.random.fork_rng():
        torch.manual_seed(0)
        if name == "llama":
            model = LlamaForCausalLM(LlamaConfig(**sizes, tie_word_embeddings=False))
        elif name == "qwen2":
            model = Qwen2ForCausalLM(Qwen2Config(**sizes, tie_word_embeddings=True))
        elif name == "qwen3":
            model = Qwen3ForCausalLM(Qwen3Config(**sizes, head_dim=8, tie_word_embeddings=True))
        else:
            assert name == "gpt2"
            model = GPT2LMHeadModel(
                GPT2Config(
                    vocab_size=vocabulary,
                    n_embd=32,
                    n_layer=2,
                    n_head=4,
                    n_positions=128,
                    bos_token_id=0,
                    eos_token_id=1,
                )
            )
        # Random biases and norms too: fresh ones are 0 and 1, which hides mistakes.
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.add_(0.1 * torch.randn_like(parameter))
    return model.eval()


ARCHITECTURES = ("llama", "qwen2", "qwen3", "gpt2")
