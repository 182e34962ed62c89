"""What comes beside the code: the notebook of one cell, the cluster's YAML, the citation."""

import json
import os
import re
import subprocess
import sys
import tomllib

import pytest
import yaml

from launch import compose
from tests.support import ROOT, SMALL

VERSION = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
COLAB = ROOT / "examples" / "colab.ipynb"
PLACEHOLDER = "https://github.com/OWNER/clutch"


def cell() -> str:
    notebook = json.loads(COLAB.read_text(encoding="utf-8"))
    assert notebook["nbformat"] == 4
    (found,) = [one for one in notebook["cells"] if one["cell_type"] == "code"]
    return "".join(found["source"])


@pytest.mark.run
def test_the_cell_of_the_notebook_runs(cache, tmp_path):
    """Its job is that of `make run`, here with a small model, and a checkout that is there."""
    assert "launch.py algo=eggroll hardware=a100_40g $(ARGS)" in (ROOT / "Makefile").read_text()
    settings = [one for one in SMALL if not one.startswith("hardware")]
    mine = {"CLUTCH_CHECKOUT": str(ROOT), "CLUTCH_SETTINGS": " ".join(settings)}
    mine |= {"CLUTCH_CACHE": str(cache), "MPLBACKEND": "Agg", "HF_HUB_OFFLINE": "1"}
    shown = "\nplt.savefig('curve.png')\nassert len(plt.gca().lines[0].get_xdata()) == 4"
    for _ in range(2):  # a cell may be run again
        done = subprocess.run(
            [sys.executable, "-c", cell() + shown],
            cwd=tmp_path,
            env=os.environ | mine,
            capture_output=True,
            text=True,
            timeout=300,
        )
        assert done.returncode == 0, done.stdout + done.stderr
        result = json.loads((tmp_path / "outputs" / "colab" / "result.json").read_text())
        assert done.stdout.rstrip().endswith(result["verdict"])


@pytest.mark.run
def test_the_cell_ends_with_the_error_of_a_command(tmp_path):
    done = subprocess.run(
        [sys.executable, "-c", cell()],
        cwd=tmp_path,
        env=os.environ | {"CLUTCH_CHECKOUT": str(ROOT), "CLUTCH_SETTINGS": "algo.stebs=1"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode != 0
    assert "algo.stebs" in done.stdout


@pytest.mark.parametrize(
    ("address", "said"),
    [
        (PLACEHOLDER, f"REPOSITORY is {PLACEHOLDER}"),
        ("file:///nowhere/clutch", "git clone --depth=1 file:///nowhere/clutch clutch ended"),
    ],
)
def test_the_cell_names_an_address_without_a_repository(tmp_path, address, said):
    """It clones nothing, and leaves no folder that the next try would take for a clone."""
    given = {key: value for key, value in os.environ.items() if not key.startswith("CLUTCH_")}
    assert cell().count(PLACEHOLDER) == 1
    done = subprocess.run(
        [sys.executable, "-c", cell().replace(PLACEHOLDER, address)],
        cwd=tmp_path,
        env=given | {"MPLBACKEND": "Agg"},
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == 1
    assert done.stderr.splitlines()[-1].startswith(said)
    assert not (tmp_path / "clutch").exists()


def test_the_address_of_the_repository_stands_in_one_place():
    """Whoever publishes a copy fills in one line."""
    places = ["*.md", "*.toml", "*.cff", "Makefile", "docs/*.md", "plugins/*/README.md"]
    places += ["examples/**/*.md", "examples/**/*.yaml", "examples/**/*.ipynb", "skills/*/*.md"]
    pages = [path for place in places for path in ROOT.glob(place)]
    assert [path for path in pages if re.search(r"\bOWNER\b", path.read_text("utf-8"))] == [COLAB]


def test_skypilot_goes_on_after_exit_code_75():
    job = yaml.safe_load((ROOT / "examples" / "skypilot" / "clutch.yaml").read_text())
    top = {"name", "resources", "workdir", "file_mounts", "envs", "setup", "run"}
    assert set(job) <= top  # of its schema
    recovery = job["resources"]["job_recovery"]
    assert recovery == {"max_restarts_on_errors": 0, "recover_on_exit_codes": [75]}
    assert job["resources"]["use_spot"] is True
    (place,) = job["file_mounts"]
    settings = job["run"].replace("$ARGS", job["envs"]["ARGS"]).split()
    assert f"hydra.run.dir={place}/mine" in settings  # what outlives the machine
    assert "resume=auto" in settings
    assert compose([one for one in settings[2:] if not one.startswith("hydra.")]).algo.name
    target = job["setup"].split()[1]
    assert f"\n{target}:" in (ROOT / "Makefile").read_text()


def test_citation_and_changelog_have_the_version():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text(encoding="utf-8"))
    assert citation["cff-version"] == "1.2.0"
    assert {"message", "title", "authors", "license"} <= set(citation)
    assert str(citation["version"]) == VERSION
    changes = (ROOT / "CHANGELOG.md").read_text(encoding="utf-8")
    assert re.findall(r"(?m)^## (\S+)", changes)[0] == VERSION
