"""python -m common.publish against a stand-in for the hub's API; no network."""

import base64
import json
import os
import shutil
import subprocess
import sys
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any, ClassVar

import pytest
from huggingface_hub import ModelCard, constants

from common.report import card
from launch import compose, train
from plugins.publish import command
from tests.support import ROOT, SMALL_GRPO

TOKEN = "hf_" + "aB3" * 12
pytestmark = pytest.mark.run


class Hub(BaseHTTPRequestHandler):
    """The part of the hub's API that an upload calls."""

    answers: ClassVar[dict[str, int]] = {}  # a part of a path -> a status to refuse with
    private = True
    requests: ClassVar[list[tuple[str, Any]]] = []
    files: ClassVar[dict[str, bytes]] = {}

    def log_message(self, format: str, *args: Any) -> None:
        """Print nothing."""

    def reply(self, content: Any, code: int = 200) -> None:
        text = json.dumps(content).encode()
        self.send_response(code)
        self.send_header("Content-Type", "application/json")
        self.send_header("Content-Length", str(len(text)))
        self.end_headers()
        self.wfile.write(text)

    def handle_one(self) -> None:
        raw = self.rfile.read(int(self.headers.get("Content-Length") or 0))
        path = self.path.partition("?")[0]
        lines = [json.loads(line) for line in raw.splitlines() if line.startswith(b"{")]
        self.requests.append((path, lines))
        if "validate" not in path and self.headers["Authorization"] != f"Bearer {TOKEN}":
            return self.reply({"error": "who are you?"}, 401)
        for part, code in self.answers.items():
            if part in path:
                return self.reply({"error": f"no, {TOKEN}"}, code)
        if path == "/api/repos/create":
            return self.reply({"url": f"http://{self.headers['Host']}/me/mine"})
        if path == "/api/validate-yaml":
            return self.reply({"errors": [], "warnings": []})
        if "/preupload/" in path:
            named = [one["path"] for one in lines[0]["files"]]
            modes = [
                {"path": name, "uploadMode": "regular", "shouldIgnore": False} for name in named
            ]
            return self.reply({"files": modes})
        if "/commit/" in path:
            for line in lines:
                if line["key"] == "file":
                    content = line["value"]["content"]
                    self.files[line["value"]["path"]] = base64.b64decode(content)
            url = f"http://{self.headers['Host']}/me/mine/commit/abc"
            return self.reply({"success": True, "commitOid": "abc", "commitUrl": url})
        self.reply({"id": "me/mine", "private": self.private, "sha": "abc", "siblings": []})

    do_GET = do_POST = handle_one


@pytest.fixture
def hub(monkeypatch):
    """A running stand-in; its address, and what it was sent."""
    handler = type("Handler", (Hub,), {"requests": [], "files": {}, "answers": {}})
    server = ThreadingHTTPServer(("127.0.0.1", 0), handler)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    monkeypatch.setattr(constants, "ENDPOINT", f"http://127.0.0.1:{server.server_port}")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    monkeypatch.setenv("HF_TOKEN", TOKEN)
    yield handler
    server.shutdown()
    server.server_close()


@pytest.fixture(scope="module")
def run(cache, tmp_path_factory) -> Path:
    """A run that has trained all weights."""
    folder = tmp_path_factory.mktemp("runs") / "mine"
    os.environ["CLUTCH_CACHE"] = str(cache)
    train(compose([*SMALL_GRPO, "algo.steps=1"]), folder)
    return folder


@pytest.fixture
def adapter(run, tmp_path) -> Path:
    """A run with an adapter on a local base."""
    folder = tmp_path / "adapted"
    shutil.copytree(run, folder)
    shutil.rmtree(folder / "model")
    base = tmp_path / "secret-place" / "my-base"
    base.mkdir(parents=True)
    (folder / "adapter").mkdir()
    settings = {"base_model_name_or_path": str(base), "r": 4, "lora_alpha": 8, "peft_type": "LORA"}
    (folder / "adapter" / "adapter_config.json").write_text(json.dumps(settings))
    (folder / "adapter" / "adapter_model.safetensors").write_bytes(b"0" * 100)
    return folder


@pytest.fixture
def publish(capsys, monkeypatch):
    """Runs the command in this process; returns what it printed."""

    def call(*arguments: str | Path, code: int = 0) -> str:
        monkeypatch.setattr(sys, "argv", ["publish", *map(str, arguments)])
        try:
            ended = command.main()
        except SystemExit as end:
            ended = end.code
        said = "".join(capsys.readouterr())
        assert ended == code, said
        assert TOKEN not in said
        return said

    return call


def test_a_run_is_sent_with_its_card(publish, hub, run):
    said = publish(run, "--repo", "me/mine")
    assert "/me/mine" in said
    created = dict(hub.requests)["/api/repos/create"][0]
    assert created.get("private") or created.get("visibility") == "private", created
    assert set(hub.files) == {path.name for path in (run / "model").iterdir()}
    sent = ModelCard(hub.files["README.md"].decode())
    assert "grpo" in sent.data.tags
    assert 'from_pretrained("me/mine")' in sent.text
    assert hub.files["model.safetensors"] == (run / "model/model.safetensors").read_bytes()


def test_public_is_asked_for(publish, hub, run):
    publish(run, "--repo", "me/mine", "--public")
    created = dict(hub.requests)["/api/repos/create"][0]
    assert not created.get("private")
    assert created.get("visibility") != "private"
    hub.private = False
    assert "--public" in publish(run, "--repo", "me/mine", code=2)


def test_a_dry_run_sends_nothing(publish, hub, run):
    said = publish(run, "--repo", "me/mine", "--dry-run")
    assert hub.requests == []
    for shown in ("private", "model.safetensors", "MB" if "MB" in said else "kB", "library_name"):
        assert shown in said


def test_the_command_needs_no_login_for_a_dry_run(run, tmp_path):
    done = subprocess.run(
        [sys.executable, "-m", "common.publish", run, "--repo", "me/mine", "--dry-run"],
        cwd=ROOT,
        env=os.environ | {"HF_TOKEN": "", "HF_HOME": str(tmp_path)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stderr
    assert "model.safetensors" in done.stdout


def test_an_adapter_is_sent_without_local_paths(publish, hub, adapter):
    said = publish(adapter, "--repo", "me/mine")
    assert "--base" in said
    settings = json.loads(hub.files["adapter_config.json"])
    assert settings["base_model_name_or_path"] == "my-base"
    assert b"secret-place" not in b"".join(hub.files.values())
    publish(adapter, "--repo", "me/mine", "--base", "org/base", "--license", "apache-2.0")
    settings = json.loads(hub.files["adapter_config.json"])
    assert settings["base_model_name_or_path"] == "org/base"
    sent = ModelCard(hub.files["README.md"].decode())
    assert (sent.data.base_model, sent.data.license) == ("org/base", "apache-2.0")
    assert sent.data.library_name == "peft"


def test_the_base_of_an_adapter_is_checked(publish, adapter, tmp_path):
    base = tmp_path / "secret-place" / "my-base"
    said = publish(adapter, "--repo", "me/mine", "--base", base, "--dry-run", code=2)
    assert "hub id" in said
    for wrong in ("a b", "", "me/mine.git"):
        assert "--base" in publish(adapter, "--repo", "me/m", "--base", wrong, code=2)
    for damage in ("{", "[]", '{"base_model_name_or_path": 5}'):
        (adapter / "adapter" / "adapter_config.json").write_text(damage)
        said = publish(adapter, "--repo", "me/mine", "--dry-run", code=2)
        assert "adapter_config.json is damaged" in said


def test_an_edited_card_stays(publish, hub, run, tmp_path):
    shutil.copytree(run, tmp_path / "run")
    path = tmp_path / "run" / "model" / card.CARD
    path.write_text(path.read_text() + "\nMine.\n")
    publish(tmp_path / "run", "--repo", "me/mine")
    assert hub.files["README.md"].decode().endswith("\nMine.\n")
    path.unlink()  # as of an earlier version
    publish(tmp_path / "run", "--repo", "me/mine")
    assert "Held-out measures" in hub.files["README.md"].decode()


def test_mistakes_end_with_the_next_step(publish, run, tmp_path, monkeypatch):
    monkeypatch.setenv("HF_TOKEN", "")
    monkeypatch.setattr(constants, "HF_TOKEN_PATH", str(tmp_path / "none"))
    (tmp_path / "empty").mkdir()
    assert "run.yaml" in publish(tmp_path / "empty", "--repo", "me/mine", code=2)
    begun = tmp_path / "begun"
    begun.mkdir()
    shutil.copy(run / "run.yaml", begun)
    assert "resume=auto" in publish(begun, "--repo", "me/mine", code=2)
    (begun / "failed.json").write_text('{"code": 2, "error": "algo.lr=-1 is below 0."}')
    said = publish(begun, "--repo", "me/mine", "--dry-run", code=2)
    assert "algo.lr=-1 is below 0." in said
    assert "resume=auto" in said
    assert str(begun) in publish(tmp_path, "--repo", "me/mine", code=2)  # a sweep's folder
    assert f"the run {run}:" in publish(run / "model", "--repo", "me/mine", code=2)
    assert "not there" in publish(tmp_path / "nothing", "--repo", "me/mine", code=2)
    (tmp_path / "file").write_text("")
    assert "is a file" in publish(tmp_path / "file", "--repo", "me/mine", code=2)
    assert "--repo" in publish(run, code=2)
    for name in ("mine", "a b/c", "me/", "/mine", "me/mine/more", "https://huggingface.co/me/mine"):
        assert "USER/NAME" in publish(run, "--repo", name, code=2)
    assert "--what" in publish(run, "--repo", "me/mine", "--what", "adapter", code=2)
    assert "--base" in publish(run, "--repo", "me/mine", "--base", "a/b", code=2)
    for wrong in ("", "MIT", "Apache 2.0"):
        assert "apache-2.0" in publish(run, "--repo", "me/mine", "--license", wrong, code=2)
    assert "hf auth login" in publish(run, "--repo", "me/mine", code=2)


def test_an_export_without_weights_is_refused(publish, run, tmp_path):
    mine = shutil.copytree(run, tmp_path / "mine")
    (mine / "model" / "model.safetensors").unlink()
    assert "has no weights" in publish(mine, "--repo", "me/mine", "--dry-run", code=2)
    shutil.rmtree(mine / "model")
    assert "neither model/ nor adapter/" in publish(mine, "--repo", "me/mine", code=2)


def test_refusals_and_no_network_end_with_the_next_step(publish, hub, run, monkeypatch):
    for code, advice in ((401, "hf auth login"), (403, "hf auth login"), (501, "later")):
        hub.answers = {"/commit/": code}
        assert advice in publish(run, "--repo", "me/mine", code=2)
    hub.answers = {"/api/repos/create": 400}
    assert "refused" in publish(run, "--repo", "me/mine", code=2)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert "network" in publish(run, "--repo", "me/mine", code=2)
