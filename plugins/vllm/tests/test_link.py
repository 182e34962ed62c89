"""The link to vLLM in another process, without a vLLM (plugins/vllm/tests/test_vllm.py has one)."""

import json
import sys
import threading
import time
from pathlib import Path
from threading import RLock
from typing import Any

import pytest
import torch
from safetensors.torch import save

from common.config import ConfigError
from common.device import Device
from common.distributed import Context
from common.engine import Setup
from common.system.torchrun import leave_out_ours
from plugins.vllm import client, server
from plugins.vllm.link import EndedError, Link
from tests.support.models import small_model
from tests.support.refusals import refuses

OF_TORCHRUN = {
    **{"RANK": "0", "LOCAL_RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"},
    **{"GROUP_RANK": "0", "GROUP_WORLD_SIZE": "1", "ROLE_RANK": "0", "ROLE_WORLD_SIZE": "2"},
    **{"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"},
    **{"TORCHELASTIC_RUN_ID": "x", "TORCHELASTIC_USE_AGENT_STORE": "True"},
}


def test_the_process_has_nothing_of_our_ranks_and_of_our_allocator():
    """With torchrun's store vLLM would wait for half an hour; with expandable segments that it does
    not know of, its sleep mode gives no memory back.
    """
    kept = {"PATH": "/bin", "CUDA_VISIBLE_DEVICES": "0", "VLLM_LOGGING_LEVEL": "DEBUG"}
    kept["LOCAL_MODELS"] = "/models"  # a name of the user's that only begins alike
    kept["PYTORCH_CUDA_ALLOC_CONF"] = "max_split_size_mb:64"  # the user's, which vLLM reads
    ours = OF_TORCHRUN | {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    assert leave_out_ours(kept | ours) == kept


# --- a vLLM that is not what it should be

SPEAKER = """#!{python}
import socket, sys
connection = socket.socket(fileno=int(sys.argv[2]))
connection.sendall({frames!r})
while connection.recv(1 << 16):
    pass
"""


def speaker(folder: Path, *messages: Any) -> str:
    """Return a Python that says these frames: an object, the bytes of a JSON text, or a header of
    sizes alone; and then listens until the connection ends.
    """
    frames = b""
    for message in messages:
        if isinstance(message, tuple):
            frames += server.HEADER.pack(*message)
        else:
            text = message if isinstance(message, bytes) else json.dumps(message).encode()
            frames += server.HEADER.pack(len(text), 0) + text
    path = folder / "python"
    path.write_text(SPEAKER.format(python=sys.executable, frames=frames))
    path.chmod(0o755)
    return str(path)


GREETING = {"vllm": "0.32.0", "torch": "2"}
ANSWERS = {
    "no_version": [{}],
    "odd_version": [{"vllm": "x.y"}],
    "version_of_a_number": [{"vllm": 7}],
    "no_torch": [{"vllm": "0.32.0"}],
    "no_json": [b"\xff"],
    "no_object": [b"[]"],
    "too_large": [((1 << 32) - 1, 0)],
    "much_beside": [(2, 4 << 30)],
    "no_weights": [GREETING, {}],
    "other_weights": [GREETING, {"version": "1"}],
    "odd_progress": [GREETING, {"finished": "x"}],
    "odd_length": [GREETING, {"version": 1, "context_length": []}],
    "error_of_a_list": [GREETING, {"error": []}],
}


@pytest.mark.parametrize("answer", ANSWERS)
def test_an_answer_that_is_none_is_named(answer, tmp_path):
    python = speaker(tmp_path, *ANSWERS[answer])
    link = Link(python, tmp_path / "log", torch.device("cpu"), 1)
    engine = object.__new__(client.Vllm)
    engine.link, engine.version, engine.context_length = link, 1, 8

    def ask() -> None:
        link.connect()
        engine.ask("stamp", lambda _: None)

    with pytest.raises(ConfigError) as caught:
        ask()
    link.close()
    assert f"engine.python={python}" in str(caught.value)


def test_completions_that_are_none_are_refused():
    right = {
        "tokens": torch.tensor([1, 2, 3]),
        "lengths": torch.tensor([1, 2]),
        "finished": torch.tensor([True, False]),
        "logprobs": torch.zeros(3),
    }
    sampling: Any = type("Sampling", (), {"max_new_tokens": 2})
    assert client.check_answer(right, 2, sampling) is right
    wrong = [{**right, name: value[:-1]} for name, value in right.items()]
    wrong += [{**right, name: value.double()} for name, value in right.items()]
    wrong += [right | {"lengths": torch.tensor([0, 3])}, right | {"tokens": -right["tokens"]}]
    for found in wrong:
        with pytest.raises(ValueError, match="asked for"):
            client.check_answer(found, 2, sampling)
    assert len(save(right)) < client.HEAD


def test_late_requests_do_not_restart_closed_engines():
    """A run that a guard stops may have a rollout under way."""
    engine = client.Vllm.__new__(client.Vllm)
    engine.link, engine.asking = Link("python", Path("log"), torch.device("cpu"), 1), RLock()
    asked = []

    def ends() -> None:
        asked.append(1)
        engine.close()  # as the run's own thread does
        raise EndedError

    with pytest.raises(EndedError):
        engine.attempt_twice(ends)
    assert (asked, engine.link.falls) == ([1], 0)
    with pytest.raises(EndedError):
        engine.link.connect()


def test_a_thread_that_waits_for_an_answer_ends_with_the_connection(tmp_path):
    """A socket that is closed leaves it waiting, and with it the process."""
    ended = threading.Event()

    def wait() -> None:
        with pytest.raises(EndedError):
            link.ask({"do": "generate"})
        ended.set()

    link = Link(speaker(tmp_path, GREETING), tmp_path / "log", torch.device("cpu"), 1)
    link.connect()
    threading.Thread(target=wait, daemon=True).start()
    time.sleep(0.2)  # it waits by then
    link.end()
    assert ended.wait(5)


# --- settings


def opened(ranks: int = 1, **given: Any) -> client.Vllm:
    """Return the engine of a rank on a GPU of 80 GB, which need not be there."""
    gpu = Device(torch.device("cuda"), "cuda", 80.0, False)
    context = Context(0, ranks, gpu, Path())
    setup = Setup(model=small_model("llama"), pad_id=0, stop_ids=(), context=context, rows=4)
    usual: dict[str, Any] = {"python": "python", "cache_gb": 1.0, "settings": {}}
    return client.open_vllm(setup, **usual | given)


def test_vllm_gets_a_share_of_the_gpu():
    assert 0.03 < opened().choose_settings("folder")["gpu_memory_utilization"] < 0.05


def test_a_rank_has_one_device_for_its_vllm():
    given = {"settings": {"tensor_parallel_size": 2}}
    refuses(
        lambda: opened(ranks=2, **given), key="tensor_parallel_size", value="2", try_next="2 ranks"
    )
    assert opened(**given).choose_settings("folder")["tensor_parallel_size"] == 2
