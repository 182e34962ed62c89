"""Forty ways to break a task, a run or a command: each ends with its exit code and its words,
without a traceback, and leaves the run that was there as it was.
"""

import dataclasses
import io
import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest
import torch

from common.config import ConfigError
from common.scoring import score
from common.system.failures import show_any_text
from common.system.signals import StopSignal
from common.task import Example
from common.tasks.checked import Checked
from tests.support import ROOT, SMALL, SMALL_GRPO, SMALL_RFT

pytestmark = pytest.mark.faults

MODULE = '''
import sys
from common.tasks import Example


class Mine:
    """Numbers and their successors, with one thing that is wrong."""

    def __init__(self, wrong: str):
        self.wrong = wrong

    def examples(self, split):
        if self.wrong == "examples_none":
            return None
        answer = {"answer_none": None, "answer_surrogate": "\\ud800"}.get(self.wrong)
        if not self.wrong.startswith("answer_") or self.wrong == "answer_method":
            answer = "7"
        first = 0 if split == "train" else 8
        return [Example(id=i, question=f"{first + i}:", answer=answer) for i in range(8)]

    def prompt(self, example):
        if self.wrong == "prompt_raises":
            return example.extra["missing"]
        return None if self.wrong == "prompt_none" else example.question

    def reward(self, example, completion):
        if self.wrong == "reward_exits":
            sys.exit(3)
        if self.wrong == "reward_raises":
            return float("x")
        found = {"reward_huge": 10**400, "reward_text": "good", "reward_nan": float("nan")}
        return found.get(self.wrong, min(1.0, len(completion) / 8))

    def answer(self, completion):
        return 7 if self.wrong == "answer_method" else completion

    def metrics(self, examples, completions):
        if self.wrong == "metrics_raises":
            return {"exact": 1 / 0}
        if self.wrong == "metrics_exits":
            sys.exit(0)
        found = {"metrics_empty": {}, "metrics_text": {"exact": "all"}, "metrics_list": [1]}
        found |= {"metrics_nan": {"exact": float("nan")}}
        return found.get(self.wrong, {"exact": 50.0})
'''

EGGROLL, GRPO = ["algo=eggroll", *SMALL], SMALL_GRPO
RFT = [text for text in SMALL_RFT if text != "task=letters" and "pretrain" not in text]
RFT += ["model.tiny.pretrain_steps=0", "algo.prompts=4", "algo.validation_prompts=2"]
ROWS = ["task=custom", "task.path=rows.csv", "task.prompt_field=q", "task.answer_field=a"]
OUT = "hydra.run.dir=out"


@dataclass
class Attack:
    """name; arguments of launch.py, or of `module`; code and words of its end. files: that are made
    before, by name; run: folder that holds a run that has ended, as `out`; env: variables.
    """

    name: str
    arguments: list[str]
    code: int
    words: str
    files: dict[str, bytes] = dataclasses.field(default_factory=dict)
    folders: tuple[str, ...] = ()
    run: bool = False
    env: dict[str, str] = dataclasses.field(default_factory=dict)
    module: str | None = None


def own(name: str, code: int, words: str, algo: list[str] = EGGROLL) -> Attack:
    """An attack by a task of the user's."""
    given = [text for text in algo if not text.startswith("task=")]
    arguments = ["--config-dir", "conf", "task=mine", f"task.wrong={name}", *given, OUT]
    label = f"{name}-{next((a[5:] for a in algo if a.startswith('algo=')), '')}"
    return Attack(label, arguments, code, words, {"mine.py": MODULE.encode()})


RIGHT = b"q,a\n" + b"".join(b"%d,%d\n" % (i, i + 1) for i in range(20))
ATTACKS = [
    # --- tasks of the user's
    own("metrics_nan", 3, "Mine.metrics returned nan as 'exact': a held-out measure must be"),
    own("answer_method", 2, "Mine.answer returned 7, which is not text, for ", RFT),
    own("reward_raises", 2, "Mine.reward raised ValueError: could not convert string to float"),
    own("reward_exits", 2, "Mine.reward called sys.exit (", GRPO),
    own("reward_nan", 3, "NaN or infinity in a reward or logits"),
    # --- rows
    Attack("rows_missing", [*EGGROLL, *ROWS, OUT], 2, "task.path='rows.csv' does not exist"),
    Attack("rows_folder", [*EGGROLL, *ROWS, OUT], 2, "rows.csv", folders=("rows.csv",)),
    Attack(
        *("rows_empty", [*EGGROLL, *ROWS, OUT], 2, "task.path='rows.csv' has no rows."),
        {"rows.csv": b""},
    ),
    Attack(
        *("rows_other_column", [*EGGROLL, *ROWS, OUT], 2, "task.prompt_field='q' is not a field"),
        {"rows.csv": b"x,a\n1,2\n"},
    ),
    Attack(
        *("parquet_torn", [*EGGROLL, *ROWS, "task.path=rows.parquet", OUT], 2),
        "task.path='rows.parquet' cannot be read as Parquet: ",
        {"rows.parquet": b"PAR1" + bytes(40) + b"PAR1"},
    ),
    Attack(
        "class_rows_missing",
        [*("algo=classify", "task=custom_text", "task.train=a.csv", "task.test=b.csv"), OUT],
        2,
        "task.train='a.csv' does not exist",
    ),
    # --- settings and places
    Attack("opt_twice", [*EGGROLL, "opt=[amp,amp]", OUT], 2, "opt=[amp,amp] names amp twice."),
    Attack("lr_by_its_long_name", [*GRPO, "algo.learning_rate=1", OUT], 2, "Did you mean 'lr'?"),
    Attack(
        *("model_is_a_file", ["algo=eggroll", "model=hf", "model.path=rows.csv", OUT], 2),
        "model.path='rows.csv' is a file.",
        {"rows.csv": RIGHT},
    ),
    Attack("run_dir_is_a_file", [*EGGROLL, OUT], 2, "out cannot be made", {"out": b""}),
    Attack("script_is_a_folder", [*GRPO, "slurm.script=s"], 2, "Is a directory", folders=("s",)),
    Attack(
        *("script_is_foreign", [*GRPO, "slurm.script=s"], 2, "is there already, and is no script"),
        {"s": b"\xff\xfe\x00"},
    ),
    Attack(
        *("script_not_utf8", [*GRPO, "slurm.script=s", 'task.source="\udcff.en"'], 2),
        "holds bytes that are not UTF-8",
    ),
    # --- what is left of a run
    Attack(
        *("report_of_empty_settings", ["out"], 2, "out/run.yaml is damaged: it is empty."),
        {"out/run.yaml": b""},
        run=True,
        module="common.report",
    ),
    Attack(
        *("report_of_torn_settings", ["out"], 2, "out/run.yaml is damaged: "),
        {"out/run.yaml": b"config:\n  algo: {name: eggr"},
        run=True,
        module="common.report",
    ),
    Attack(
        *("report_of_a_torn_result", ["out"], 2, "out/result.json is damaged: "),
        {"out/result.json": b'{"algo": "egg'},
        run=True,
        module="common.report",
    ),
    Attack(
        *("comparison_of_empty_settings", ["out"], 0, "no result: `out`"),
        {"out/run.yaml": b""},
        run=True,
        module="common.compare",
    ),
    Attack(
        *("comparison_of_a_torn_result", ["out"], 0, "out/result.json is damaged: Unterminated"),
        {"out/result.json": b'{"algo": "egg'},
        run=True,
        module="common.compare",
    ),
    Attack(
        *("resumed_over_torn_settings", [*EGGROLL, OUT, "resume=auto"], 0, "held-out bleu"),
        {"out/run.yaml": b"config:\n  algo: {name: eggr"},
        run=True,
    ),
    Attack(
        *("resumed_over_a_torn_result", [*EGGROLL, OUT, "resume=auto"], 0, "held-out bleu"),
        {"out/result.json": b'{"algo": "egg'},
        run=True,
    ),
    Attack("begun_again", [*EGGROLL, OUT], 2, "already holds a run.", run=True),
    Attack("unreadable_override", [*EGGROLL, OUT, "seed=ñ"], 2, "seed=ñ cannot be read as KEY="),
]


@pytest.fixture(scope="module")
def ended(tmp_path_factory, cache) -> Path:
    """A run that has ended."""
    from launch import compose, train

    folder = tmp_path_factory.mktemp("ended")
    with pytest.MonkeyPatch.context() as patched:
        patched.setenv("CLUTCH_CACHE", str(cache))
        train(compose(EGGROLL), folder)
    return folder


def kept(folder: Path) -> dict[str, bytes]:
    """What nobody may lose of a run; the model's card is made again with each result."""
    found = [*folder.glob("checkpoints/*/*"), *folder.glob("model/*"), folder / "metrics.jsonl"]
    found = [path for path in found if path.is_file() and path.name != "README.md"]
    return {str(path): path.read_bytes() for path in found}


# Of these the words alone are looked at: every algorithm calls a task through the same two doors.
WORDED = {
    "metrics_exits": "Mine.metrics called sys.exit (",
    "metrics_raises": "Mine.metrics raised ZeroDivisionError: division by zero (",
    "examples_none": "Mine.examples raised TypeError: 'NoneType' object is not iterable",
    "prompt_raises": "Mine.prompt raised KeyError: 'missing' (",
    "metrics_empty": "Mine.metrics returned {}, which is not a dict of measures",
    "metrics_text": "Mine.metrics returned 'all' as 'exact', which is not a number",
    "metrics_list": "Mine.metrics returned [1], which is not a dict of measures",
    "answer_none": "Mine.examples returned row 0 (id 0) with the answer None, which is not text",
    "answer_surrogate": "with the answer '\\ud800', which holds a lone surrogate",
    "prompt_none": "Mine.prompt returned None, which is not text, for example ",
    "reward_raises": "A reward must score any text; give 0 where it cannot.",
    "reward_text": "Mine.reward of example 0 is 'good', not a number. Return a float,",
    "reward_huge": "beyond what a float holds. Divide it",
}


@pytest.mark.parametrize("wrong", WORDED)
def test_a_task_is_told_what_is_wrong_with_it(wrong: str, monkeypatch):
    monkeypatch.setattr(StopSignal, "last", None)  # of other tests: sys.exit may be a second one's
    space: dict = {}
    exec(MODULE, space)
    mine = space["Mine"](wrong)
    task = Checked(mine)

    def call_all() -> None:
        rows = task.examples("train")
        prompts = [task.prompt(row) for row in rows]
        score(mine, rows, prompts)
        task.metrics(rows, prompts)

    with pytest.raises(ConfigError) as caught:
        call_all()
    assert WORDED[wrong] in str(caught.value)


def test_scalars_of_numpy_are_numbers():
    class Mine:
        def rewards(self, rows, completions):
            return [np.float32(0.5), np.bool_(True), np.int64(0), torch.tensor(0.25), True]

    rows = [Example(0, "", "")] * 5
    assert score(Mine(), rows, [""] * 5) == [0.5, 1.0, 0.0, 0.25, 1.0]  # type: ignore[arg-type]


# Whose words other tests show too: EARLY, test_custom.py, test_damage.py; or another attack here.
AGAIN = {
    *("rows_missing", "rows_other_column", "parquet_torn", "class_rows_missing", "model_is_a_file"),
    *("lr_by_its_long_name", "script_is_a_folder"),
    *("report_of_empty_settings", "report_of_a_torn_result", "comparison_of_empty_settings"),
    *("resumed_over_a_torn_result", "begun_again", "metrics_nan-eggroll"),
}


@pytest.mark.parametrize(
    "attack",
    [pytest.param(a, marks=[pytest.mark.thorough] * (a.name in AGAIN)) for a in ATTACKS],
    ids=lambda attack: attack.name,
)
def test_an_attack_ends_in_words(attack: Attack, launch: Callable, ended: Path, tmp_path: Path):
    if attack.run:
        shutil.copytree(ended, tmp_path / "out")
    conf = tmp_path / "conf" / "task"
    conf.mkdir(parents=True)
    (conf / "mine.yaml").write_text("_target_: mine.Mine\nwrong: ''\n")
    for name, content in attack.files.items():
        (tmp_path / name).write_bytes(content)
    for name in attack.folders:
        (tmp_path / name).mkdir()
    before = kept(tmp_path / "out")
    done = launch(
        *attack.arguments,
        code=attack.code,
        module=attack.module,
        env={"PYTHONPATH": str(tmp_path)} | attack.env,
    )
    said = done.stdout + done.stderr
    assert attack.words in said, said
    assert "Traceback" not in said
    assert "--- Logging error" not in said
    assert kept(tmp_path / "out").items() >= before.items(), "nothing is lost"
    if attack.code == 2 and not attack.run:
        left = {path.name for path in tmp_path.iterdir()} - {"conf", "__pycache__", "s"}
        assert left - {"out", *attack.files, *attack.folders} == set()


EARLY = {
    "task=custom task.path=no.csv task.prompt_field=q task.answer_field=a": "does not exist",
    "task=custom task.path=rows.csv task.prompt_field=x task.answer_field=a": "'x' is not a field",
    "task=translate task.path=rows.csv task.source_field=x task.target_field=a": "rows.csv",
    "task=gsm8k task.path=rows.csv": "rows.csv",
    "model=hf model.path=./no": "there is no such folder",
    "model=hf model.path=rows.csv": "is a file. Give the folder",
    "algo=classify task=custom_text task.train=no.csv task.test=no.csv": "does not exist",
    "algo=rft task=units task.path=no.json": "no.json",
    "hardware=cpu evaluate.text=nothing.txt": "evaluate.text='nothing.txt'",
    "hardware=cpu evaluate.also=[gsm8k]": "evaluate.also, task gsm8k: ",
}


def test_mistakes_in_data_are_told_before_torch_is_imported(tmp_path):
    """Importing it takes seconds; the whole command takes a part of one without it."""
    (tmp_path / "rows.csv").write_bytes(RIGHT)
    code = (
        "import sys, json, launch\n"
        "for given in json.loads(sys.stdin.read()):\n"
        "    sys.argv = ['launch.py', *given.split(), 'hydra.run.dir=out']\n"
        "    try:\n"
        "        launch.main()\n"
        "    except SystemExit as ended:\n"
        "        print('ended with', ended.code, 'torch' in sys.modules, file=sys.stderr)\n"
    )
    done = subprocess.run(
        [sys.executable, "-c", code],
        input=json.dumps(list(EARLY)),
        cwd=tmp_path,
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=120,
    )
    said = done.stderr.splitlines()
    assert said[1::2] == ["ended with 2 False"] * len(EARLY), done.stderr
    for line, words in zip(said[::2], EARLY.values(), strict=True):
        assert words in line


def test_a_terminal_that_is_not_utf8_shows_escapes(monkeypatch):
    written = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(written, "ascii"))
    show_any_text()
    print("ñandú → 1", flush=True)
    assert written.getvalue() == b"\\xf1and\\xfa \\u2192 1\n"


def test_there_are_forty():
    names = [*(attack.name for attack in ATTACKS), *WORDED]
    assert len(set(names)) == len(names) >= 40
    assert set(names) > AGAIN
