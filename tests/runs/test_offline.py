"""Models of the hub on a machine that it cannot be reached from: an answer after one question."""

import os
import re
import socket
import subprocess
import sys
import threading

import pytest
from huggingface_hub import constants

from common.memory import plan
from common.model import load
from common.model.tiny import byte_tokenizer
from launch import compose
from tests.support import ROOT
from tests.support.models import small_model
from tests.support.refusals import refuses

GIVEN = ["algo=grpo", "task=chess", "model=hf", "model.path=someone/something"]
GIVEN += ["algo.sampling.max_new_tokens=4"]


@pytest.fixture(params=["refuses", pytest.param("swallows", marks=pytest.mark.thorough)])
def hub(request):
    """Yield the address of a hub that never answers, and the connections that were made."""
    asked = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def listen():
            while True:
                try:
                    asked.append(server.accept()[0])
                except OSError:  # closed
                    return
                if request.param == "refuses":
                    asked[-1].close()

        threading.Thread(target=listen, daemon=True).start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}", asked
        server.shutdown(socket.SHUT_RDWR)
    for connection in asked:
        connection.close()


def launch(hub, home, *arguments):
    env = {key: value for key, value in os.environ.items() if key != "HF_HUB_OFFLINE"}
    env |= {"HF_ENDPOINT": hub, "HF_HOME": str(home), "NO_PROXY": "127.0.0.1"}
    command = [sys.executable, ROOT / "launch.py", *GIVEN, *arguments]
    return subprocess.run(command, env=env, cwd=home, capture_output=True, text=True, timeout=240)


def make_plan(address, home):
    """In a process of its own, as a command does that finds these variables."""
    constants.ENDPOINT, constants.HF_HUB_CACHE, load.OFFLINE = address, str(home), False
    return plan.make("grpo.train:plan", compose([*GIVEN, "plan=true"]))


def test_a_hub_that_does_not_answer_is_asked_once(hub, warm, tmp_path):
    address, asked = hub
    refuses(
        lambda: warm.call(make_plan, address, tmp_path), key="model.path", value="someone/something"
    )
    assert len(asked) == 1, "no retries"


@pytest.mark.thorough
@pytest.mark.parametrize("how", ["plan=true", "hydra.run.dir=run"])
def test_an_unreachable_hub_is_asked_once(hub, how, tmp_path):
    address, asked = hub
    made = launch(address, tmp_path, how)
    assert made.returncode == 2
    assert len(asked) == 1, "no retries"
    assert re.search(r"model\.path='someone/something' could not be loaded", made.stderr)
    assert "model.path=FOLDER" in made.stderr


@pytest.mark.thorough
def test_a_model_in_the_cache_of_the_hub_is_loaded(hub, tmp_path):
    address, asked = hub
    place = tmp_path / "hub" / "models--someone--something"
    small_model("llama", 258).save_pretrained(place / "snapshots" / ("0" * 40))
    byte_tokenizer().save_pretrained(place / "snapshots" / ("0" * 40))
    (place / "refs").mkdir()
    (place / "refs" / "main").write_text("0" * 40)
    made = launch(address, tmp_path, "plan=true")
    assert made.returncode == 0, made.stderr
    assert "someone/something, " in made.stdout
    assert len(asked) == 1
