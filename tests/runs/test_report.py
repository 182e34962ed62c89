"""report.md and its figures, of real runs of all algorithms, and of runs that did not get to their
end.
"""

import json
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.image import imread
from matplotlib.transforms import Bbox

from common.config import ConfigError
from common.report import __main__, dashboard, panels, plots, story
from common.report.events import EVALUATIONS, markdown_table, numbers
from common.report.page import write_report
from common.signals import RunStopped
from common.tasks.order import ExampleOrder
from launch import compose, train
from tests.support import CONF, SMALL, events
from tests.support.letters import Letters

TINY = [*SMALL[:6], "evaluate.examples=8"]
RUNS = {
    "eggroll": [*SMALL, "evaluate.every=2", "algo.sigma=0.1", "algo.stop_at.drift=1e9"],
    "grpo": [
        *(
            "algo=grpo",
            "task=letters",
            *TINY,
            "evaluate.every=2",
            "algo.steps=4",
            "algo.sampling.max_new_tokens=6",
        ),
        *("algo.prompts_per_step=2", "algo.samples_per_prompt=4", "task.scoring=smooth"),
    ],
    "rft": [
        *(
            "algo=rft",
            "task=letters",
            *TINY,
            "task.scoring=smooth",
            "algo.select.accept=0.3",
            "evaluate.samples=2",
        ),
        *(
            "algo.prompts=12",
            "algo.validation_prompts=4",
            "algo.samples_per_prompt=4",
            "algo.prompts_per_batch=4",
        ),
        *(
            "algo.chunk_size=4",
            "algo.sampling.max_new_tokens=6",
            "algo.epochs=1",
            "algo.batch_size=8",
        ),
        "algo.second_round_samples=0",
    ],
    "classify": [
        *(
            "algo=classify",
            "hardware=cpu",
            "task.rows=200",
            "task.test_rows=40",
            "algo.epochs=2",
            "algo.batch_size=40",
        ),
        *("algo.model.size=32", "algo.model.feedforward=64", "algo.tokenizer.vocabulary=600"),
    ],
}
# Of a run without a reference model, and whose groups are all alive, and with one reward.
CONDITIONAL = {"dead", "components", "component_cosine"}


@pytest.fixture(scope="module", autouse=True)
def drawn():
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("CLUTCH_PLOTS", raising=False)
        yield


@pytest.fixture(scope="module")
def finished(cache, tmp_path_factory):
    """The folder of a finished run of each algorithm."""
    folders = {}
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("CLUTCH_CACHE", str(cache))
        for algo, overrides in RUNS.items():
            folders[algo] = tmp_path_factory.mktemp(algo)
            train(compose(overrides, CONF), folders[algo])
    return folders


@pytest.mark.parametrize("algo", RUNS)
def test_a_run_leaves_a_report(finished, algo):
    folder = finished[algo]
    page = (folder / "report.md").read_text()
    result = json.loads((folder / "result.json").read_text())
    title = page.splitlines()[0]
    assert title.startswith(
        f"# {algo} on {result['task']}: {result['metric']} {result['before']:.2f} → "
    )
    for name, value in result["metrics"]["after"].items():
        assert re.search(rf"^\| {re.escape(name)} \|.*\| {value:.2f} (\(|\|)", page, re.MULTILINE)
    shown = re.findall(r'src="(plots/\w+\.png)"', page)
    assert sorted(shown) == sorted(f"plots/{path.name}" for path in (folder / "plots").iterdir())
    assert {"metric", "throughput", "phases", "loss" if algo != "eggroll" else "drift"} <= {
        Path(p).stem for p in shown
    }
    for path in shown:
        image = imread(folder / path)
        assert image.shape[:2] == (528, 825)
        assert image[:, :, :3].min() < 0.5 < image[:, :, :3].mean(), "something is drawn on white"
    for link in re.findall(r"^- \[.*?\]\((.*?)\)", page, re.MULTILINE):
        assert (folder / link).exists()
    if algo != "classify":
        first = json.loads((folder / "completions" / "before.jsonl").read_text().splitlines()[0])
        assert f"| {first['prompt']} |" in page


def embedded(folder):
    """The numbers in report.html."""
    page = (folder / "report.html").read_text(encoding="utf-8")
    (text,) = re.findall(
        r'<script type="application/json" id="data">(.*?)</script>', page, re.DOTALL
    )
    return json.loads(text)


def browse(folder, width, *more):
    """The page as a browser without a network makes it."""
    browser = shutil.which("chromium") or shutil.which("google-chrome")
    if browser is None:
        pytest.skip("there is no Chromium")
    command = [browser, "--headless", "--no-sandbox", "--disable-gpu", "--dump-dom"]
    command += ["--host-resolver-rules=MAP * ~NOTFOUND", f"--window-size={width},900", *more]
    command += ["--enable-logging=stderr", f"--user-data-dir={folder / 'browser'}"]
    done = subprocess.run(
        [*command, (folder / "report.html").as_uri()], capture_output=True, text=True, timeout=120
    )
    assert "CONSOLE" not in done.stderr, done.stderr
    return done.stdout


@pytest.mark.parametrize("algo", RUNS)
def test_a_run_leaves_a_page_for_browsers(finished, algo):
    folder = finished[algo]
    data, result = embedded(folder), json.loads((folder / "result.json").read_text())
    assert data["title"] == (folder / "report.md").read_text().splitlines()[0].removeprefix("# ")
    assert {row[0] for row in data["measures"]["rows"]} == set(result["metrics"]["after"])
    drawn = {panel["title"] for panel in data["panels"] if panel["series"]}
    assert len(drawn) > 4
    for panel in data["panels"]:
        for series in panel["series"]:
            assert len(series["step"]) == len(series["y"]) == len(series.get("tokens", series["y"]))
    if algo != "classify":
        rows = (folder / "completions" / "after.jsonl").read_text().splitlines()
        last = data["completions"]["evaluations"][-1]
        assert last["name"] == "after"
        assert last["texts"] == [json.loads(row)["completion"] for row in rows]
    page = (folder / "report.html").read_text()
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", page), "nothing is fetched"


@pytest.mark.parametrize("width", [400, 1280])
def test_a_browser_shows_it_without_a_network(finished, width):
    dom = browse(finished["grpo"], width)
    assert dom.count("<canvas") == sum(
        bool(p["series"]) for p in embedded(finished["grpo"])["panels"]
    )
    assert dom.count('class="row"') == 8
    assert '<h1 id="title">grpo on' in dom


def test_what_a_model_wrote_stays_text(finished, tmp_path):
    folder = shutil.copytree(finished["grpo"], tmp_path / "run")
    path = folder / "completions" / "after.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0]["completion"] = hostile = "</script><script>document.title='taken'</script><b>&amp;"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_report(folder, figures=False)
    assert embedded(folder)["completions"]["evaluations"][-1]["texts"][0] == hostile
    dom = browse(folder, 800)
    assert "<title>taken" not in dom
    assert "&lt;/script&gt;" in dom


def test_a_long_run_is_a_small_page(finished, tmp_path):
    folder = shutil.copytree(finished["eggroll"], tmp_path / "run")
    (event, *_) = [e for e in events(folder) if "reward" in e]
    lines = (json.dumps(event | {"step": n, "reward": n / 20_000}) for n in range(1, 20_001))
    (folder / "metrics.jsonl").write_text("".join(line + "\n" for line in lines))
    write_report(folder, figures=False)
    assert (folder / "report.html").stat().st_size < 5e6
    (reward,) = [p for p in embedded(folder)["panels"] if p["title"].startswith("Reward")]
    curve = reward["series"][0]
    assert 1000 < len(curve["y"]) <= 1500
    assert curve["y"][0] == pytest.approx(7.5 / 20_000, rel=1e-3)  # a mean of the first 14
    assert curve["step"][-1] == 20_000


@pytest.mark.parametrize("algo", RUNS)
def test_every_panel_shows_what_is_logged(finished, algo):
    """Of the report and of the dashboard alike: no panel is of a name that no run has."""
    folder = finished[algo]
    logged = (
        [
            *events(folder),
            *(json.loads(line) for line in (folder / EVALUATIONS).read_text().splitlines()),
        ]
        if (folder / EVALUATIONS).exists()
        else events(folder)
    )
    names = list(dict.fromkeys(name for event in logged for name in numbers(event)))
    drawn = {path.stem for path in (folder / "plots").iterdir()}
    for panel in panels.find_panels()[algo]:
        if panel.name not in CONDITIONAL:
            assert panel.found(names), panel
            assert panel.name in drawn
        else:
            assert all(curve in names or "*" in curve for curve in panel.curves), panel
    stems = [panel.name for panel in panels.find_panels()[algo]]
    assert len(stems) == len(set(stems)), "each panel has a file of its own"


def test_points_are_what_was_logged(finished):
    history = events(finished["eggroll"])
    drift = next(panel for panel in panels.find_panels()["eggroll"] if panel.name == "drift")
    idle = next(panel for panel in panels.find_panels()["eggroll"] if panel.name == "zero_fitness")
    points = story.columns(history)
    x, y = story.find_points(drift, points["drift"])
    assert x == [1, 2, 3, 4]
    assert y == [event["drift"] for event in history]
    assert story.find_points(idle, points["zero_fitness"])[1] == [
        100 * event["zero_fitness"] for event in history
    ]
    points["drift"][1] = (history[1], float("nan"))
    assert story.find_points(drift, points["drift"])[0] == [1, 3, 4]


def test_a_resumed_run_has_one_report_of_the_whole(in_cache, tmp_path):
    settings = [*SMALL, "evaluate.every=1"]
    train(compose([*settings, "algo.steps=2"]), tmp_path)
    train(compose([*settings, "algo.steps=4", "resume=auto"]), tmp_path)
    page = (tmp_path / "report.md").read_text()
    assert "| steps | 4 in" in page
    evaluations = [json.loads(line) for line in (tmp_path / EVALUATIONS).read_text().splitlines()]
    assert [record["step"] for record in evaluations] == [0, 1, 2, 3, 4]
    seconds = sum(event["phase_seconds"]["rollout"] for event in events(tmp_path))
    assert f"| rollout | {seconds:.1f} |" in page


def test_a_killed_run_gets_its_report_by_command(finished, tmp_path, monkeypatch, capsys):
    """As kill -9 leaves it: neither result nor report, and half a line."""
    folder = tmp_path / "killed"
    shutil.copytree(finished["grpo"], folder)
    for name in ("result.json", "report.md", "completions/after.jsonl"):
        (folder / name).unlink()
    shutil.rmtree(folder / "plots")
    log = folder / "metrics.jsonl"
    log.write_text(
        "".join(line + "\n" for line in log.read_text().splitlines()[:3]) + '{"step": 4, "rew'
    )
    monkeypatch.setattr(sys, "argv", ["report", str(folder)])
    __main__.main()
    assert capsys.readouterr().out == f"{folder}/report.md\n"
    page = (folder / "report.md").read_text()
    assert page.startswith("# grpo on Letters: not finished\n\n3 of 4 steps are logged. Go on with")
    assert (folder / "plots" / "reward.png").exists()
    assert "| prompt | before | last | answer |" in page
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        __main__.main()
    assert "is no run folder" in capsys.readouterr().err


def test_a_run_that_was_stopped_has_a_report(in_cache, tmp_path):
    second = (
        ExampleOrder(Letters().examples("train"), 0).take(2, 1)[0].id
    )  # its first prompt, two a step
    with pytest.raises(RunStopped):
        train(compose(SMALL), tmp_path, Letters(fault="infinite", fault_id=second))
    assert (
        (tmp_path / "report.md")
        .read_text()
        .startswith("# eggroll on Translate: not finished\n\n1 of 4 steps")
    )


def test_a_report_that_cannot_be_written_does_not_end_the_run(in_cache, tmp_path):
    (tmp_path / "plots").write_text("in the way")
    result = train(compose([*SMALL, "algo.steps=1"]), tmp_path)
    assert json.loads((tmp_path / "result.json").read_text())["steps"] == result.steps == 1
    assert (tmp_path / "model" / "config.json").exists()
    log = (tmp_path / "run.log").read_text()
    assert re.search(r"WARNING .*report\.md could not be written .*python -m common\.report", log)
    (tmp_path / "plots").unlink()
    page = write_report(tmp_path).read_text()
    assert "## Warnings\n\n- " in page


@pytest.mark.parametrize(
    "labels", [["a", "b"], ["copy_levenshtein"] * 8, ["from the policy that sampled", "kl"]]
)
@pytest.mark.parametrize("values", [(0.0, 0.0), (1e-7, 3e-7), (0.0, 123456.0)])
def test_a_figure_covers_and_cuts_nothing(tmp_path, labels, values):
    """The legend lies above the axes and below the title; all text lies within the picture."""
    boxes: dict[str, Bbox] = {}
    with plots.saved(tmp_path / "figure.png") as axis:
        plots.lines(axis, {f"{label}{' ' * i}": ([1, 2], values) for i, label in enumerate(labels)})
        plots.finished(
            axis,
            "Where the time of a fine-tuning step goes",
            "optimizer step",
            "norm before clipping",
            True,
        )
        figure: Figure = axis.figure
        canvas = FigureCanvasAgg(figure)
        canvas.draw()
        boxes = {
            "axes": axis.get_window_extent(),
            "legend": axis.get_legend().get_window_extent(),
            "title": axis._left_title.get_window_extent(),
            "x": axis.xaxis.get_tightbbox(),
            "y": axis.yaxis.get_tightbbox(),
        }
        whole = figure.bbox
    assert boxes["legend"].y0 >= boxes["axes"].y1 - 2
    assert boxes["title"].y0 >= boxes["legend"].y1 - 6  # its box has room for letters that go lower
    for name, box in boxes.items():
        assert whole.x0 <= box.x0 < box.x1 <= whole.x1, name
        assert whole.y0 <= box.y0 < box.y1 <= whole.y1, name


def test_long_curves_are_thinned_and_means_keep_the_mean():
    x, y = plots.binned(list(range(10_000)), [float(i % 2) for i in range(10_000)])
    assert len(x) == len(y) <= plots.BINS
    assert all(0.3 < value < 0.7 for value in y)
    assert plots.running_mean([1.0, 2.0, 6.0], 1) == [1.5, 3.0, 4.0]


def test_what_would_end_a_cell_is_escaped():
    table = markdown_table([{"a": "x|y", "b": "1\n2"}])
    assert table == "| a | b |\n| --- | --- |\n| x\\|y | 1<br>2 |"


@pytest.mark.filterwarnings("ignore::DeprecationWarning")  # pydantic, of wandb-workspaces
def test_the_dashboard_has_the_panels_of_each_algorithm():
    pytest.importorskip("wandb_workspaces")
    view = (
        dashboard.workspace("team", "clutch", tuple(panels.find_panels()))
        ._to_model()
        .spec.model_dump(by_alias=True)
    )
    sections = {
        section["name"]: section["panels"]
        for section in view["section"]["panelBankConfig"]["sections"]
    }
    assert list(sections) == ["All algorithms", *panels.find_panels(), "Completions", "System"]
    for algo in panels.find_panels():
        titles = [panel["config"]["chartTitle"] for panel in sections[algo]]
        assert titles == [panel.title for panel in panels.find_panels()[algo]]
        for panel, shown in zip(panels.find_panels()[algo], sections[algo], strict=True):
            config = shown["config"]
            assert set(config["metrics"] or []) == {
                name for name in panel.curves if "*" not in name
            }
            for name in panel.curves:
                if "*" in name:
                    assert re.match(config["metricRegex"], name.replace("*", "some"))


def test_the_dashboard_says_what_it_needs(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb_workspaces.reports.v2", None)
    with pytest.raises(ConfigError, match=r"pip install 'clutch\[dashboard\]'"):
        dashboard.workspace("team", "clutch", ["grpo"])
    monkeypatch.setattr(sys, "argv", ["dashboard", "clutch", "--algo", "grpo", "egroll"])
    with pytest.raises(SystemExit, match="2"):
        dashboard.main()
    assert "Did you mean 'eggroll'?" in capsys.readouterr().err
