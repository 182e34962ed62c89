"""Shared by the tests: small models, where the real data lies, and the command line in a subprocess."""

import json
import os
import select
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

os.environ.setdefault("OMP_NUM_THREADS", "1")  # two test processes with two threads each slow all of them
os.environ.setdefault("HF_HUB_OFFLINE", "1")
os.environ.setdefault("CLUTCH_PLOTS", "0")  # half a second of each run; tests of what a run leaves draw them

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


Launch = Callable[..., subprocess.CompletedProcess[str]]


class Warm:
    """tests/warm.py: started at the first command, and again after one that took too long."""

    def __init__(self) -> None:
        self.process: subprocess.Popen[str] | None = None

    def run(
        self, arguments: list[str], folder: Path, environment: dict[str, str], seconds: float
    ) -> subprocess.CompletedProcess[str]:
        if self.process is None:
            command = [sys.executable, str(ROOT / "tests/warm.py")]
            self.process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, start_new_session=True
            )
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        with tempfile.TemporaryDirectory() as printed:
            files = [f"{printed}/stdout", f"{printed}/stderr"]
            request = {"arguments": arguments, "folder": str(folder), "environment": environment}
            self.process.stdin.write(json.dumps(request | {"stdout": files[0], "stderr": files[1]}) + "\n")
            self.process.stdin.flush()
            ready, _, _ = select.select([self.process.stdout], [], [], seconds)
            out, err = (Path(file).read_text() if Path(file).exists() else "" for file in files)
            if not ready:
                self.stop()
                pytest.fail(f"{arguments} takes more than {seconds} s\n{out}\n{err}")
            return subprocess.CompletedProcess(arguments, int(self.process.stdout.readline()), out, err)

    def stop(self) -> None:
        if self.process is not None:
            os.killpg(self.process.pid, signal.SIGKILL)
            self.process.communicate()
            self.process = None


@pytest.fixture(scope="session")
def warm() -> Iterator[Warm]:
    """Commands without their imports."""
    process = Warm()
    yield process
    process.stop()


@pytest.fixture
def launch(cache: Path, tmp_path: Path, warm: Warm) -> Launch:
    """Run launch.py as a user does, from another folder. Returns the finished process; asserts its exit code.

    fresh: in a new interpreter; else in a fork of one, which saves the seconds of its imports.
    """

    def run(
        *arguments: str, code: int | None = 0, env: dict[str, str] | None = None, fresh: bool = False
    ) -> subprocess.CompletedProcess[str]:
        environment = os.environ | {"CLUTCH_CACHE": str(cache)} | (env or {})
        if fresh:
            done = subprocess.run(
                [sys.executable, str(ROOT / "launch.py"), *arguments],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                timeout=300,
            )
        else:
            done = warm.run(list(arguments), tmp_path, dict(environment), 300)
        assert code is None or done.returncode == code, f"exit {done.returncode}\n{done.stdout}\n{done.stderr}"
        return done

    return run


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
