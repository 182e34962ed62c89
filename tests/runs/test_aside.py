"""A command that is refused changes nothing in the folder of a run."""

import hashlib
import logging
from contextlib import closing
from pathlib import Path

import pytest

from common.system import run_record
from tests.support import RFT_COMMAND, SMALL, SMALL_GRPO

RUNS = {
    "eggroll": [*SMALL, "algo.steps=2"],
    "grpo": [*SMALL_GRPO, "algo.steps=2"],
    "rft": RFT_COMMAND,
}
OTHERS = {"eggroll": "grpo", "grpo": "eggroll", "rft": "grpo"}


def read(folder: Path) -> dict[str, str]:
    """Return a hash of each file, but for the locks."""
    files = (path for path in folder.rglob("*") if path.is_file() and "lock" not in path.name)
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in files
    }


@pytest.mark.parametrize(
    "algo",
    ["eggroll", *(pytest.param(algo, marks=pytest.mark.thorough) for algo in ("grpo", "rft"))],
)
def test_a_refused_command_leaves_a_run_as_it_is(launch, tmp_path, algo):
    folder = tmp_path / "mine"
    command, of_another = [*RUNS[algo], f"hydra.run.dir={folder}"], RUNS[OTHERS[algo]]
    launch(*command)
    before, log = read(folder), (folder / "run.log").read_text()
    assert ".hydra/overrides.yaml" in before
    refused = {
        "again": command,
        "with other settings": [*command, "resume=auto", "algo.sampling.max_new_tokens=5"],
        "of another algorithm": [*of_another, f"hydra.run.dir={folder}", "resume=auto"],
    }
    if algo == "eggroll":
        refused["a probe"] = [*command, "probe=true"]
    if algo == "rft":
        again = [*command, "resume=auto"]
        refused["with another rate"] = [*again, "algo.lr=1e-5"]
        refused["with another optimizer"] = [*again, "algo.optimizer.name=Adam8"]
        refused["a stage that is done"] = [*command, "algo.stage=select"]
        refused["a later stage"] = [*command, "algo.stage=finetune"]
    for name, arguments in refused.items():
        assert launch(*arguments, code=2).stderr.startswith("error: "), name
        assert read(folder) == before, name
    launch(*command, "resume=auto")
    assert (folder / "run.log").read_text().startswith(log)
    assert "resume=auto" in (folder / ".hydra" / "overrides.yaml").read_text()
    assert not list(folder.glob(".hydra-*"))


def test_any_rank_writes_its_log_once_the_run_goes_on(tmp_path):
    log = logging.Logger("a rank")
    (tmp_path / run_record.RUN_FILE).write_text("")
    with closing(run_record.open_log(tmp_path / "rank-1.log")) as handler:
        log.addHandler(handler)
        log.warning("before")
        assert not (tmp_path / "rank-1.log").exists()
        run_record.write_log(log)
        log.warning("after")
    lines = (tmp_path / "rank-1.log").read_text().splitlines()
    assert [line.rpartition(" ")[2] for line in lines] == ["before", "after"]


@pytest.mark.parametrize("held", [False, True])
def test_a_rank_that_says_nothing_has_an_empty_log(tmp_path, held):
    log = logging.Logger("a rank")
    if held:
        (tmp_path / run_record.RUN_FILE).write_text("")
    with closing(run_record.open_log(tmp_path / "rank-1.log")) as handler:
        log.addHandler(handler)
        assert not (tmp_path / "rank-1.log").exists()
        run_record.write_log(log)
        assert (tmp_path / "rank-1.log").read_text() == ""
