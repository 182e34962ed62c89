"""report.md and its figures, of real runs of all algorithms, and of runs that did not get to their
end.
"""

import json
import math
import re
import shutil
import signal
import sys
import threading
import time
import urllib.error
import urllib.request
from contextlib import ExitStack, contextmanager
from functools import cache
from pathlib import Path
from statistics import fmean

import matplotlib
import pytest
from matplotlib.figure import Figure

from benchmarks import report as long_run
from benchmarks.browser import Browser, find_browser
from common.config import ConfigError
from common.config.plugins import COMPARISON
from common.report import __main__, panels, plots, run_folder
from common.report.page import write_report
from common.report.runs import read_runs
from common.report.serve import open_server
from common.system.events import EVALUATIONS, markdown_cell, markdown_table, numeric_values
from common.system.signals import RunStopped
from common.system.user_code import load
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
        *("algo.overlap=1", "scoring.kind=threads", "algo.retire_at=0.9"),
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
BROWSERS = ExitStack()
# Of a run without a reference model, and whose groups are all alive, and with one reward.
CONDITIONAL = {
    *("Groups with nothing to teach", "Components of the reward", "What the update is made of"),
    *("Held-out text", "Age of the samples", "Prompts that have retired"),
    *("Utilisation of the GPUs", "Logged by reward functions"),
}


@pytest.fixture(scope="module", autouse=True)
def one_browser():
    with BROWSERS:
        yield
        a_browser.cache_clear()


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
    if algo in ("eggroll", "grpo", "rft"):
        assert re.search(r"attention.*sdpa \(\w+\)", page), "which one, as the plan says"
    for name, value in result["metrics"]["after"].items():
        assert re.search(rf"^\| {re.escape(name)} \|.*\| {value:.2f} (\(|\|)", page, re.MULTILINE)
    links = re.findall(r"^- \[.*?\]\((.*?)\)", page, re.MULTILINE)
    assert links[0] == "report.html"
    assert all((folder / link).exists() for link in links)
    if algo == "rft":
        assert re.search(r"^## Acceptance by prompt\n\n\| iteration \|", page, re.MULTILINE)
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


@cache
def a_browser():
    """One for all tests of this file: it takes a second to start."""
    return BROWSERS.enter_context(Browser())


@contextmanager
def opened(page, width=1280, dark=False):
    """A page in a browser without a network, which has asked for nothing and complained of nothing
    when the block ends.
    """
    if find_browser() is None:
        pytest.skip("there is no Chromium")
    browser = a_browser()
    browser.show(width, dark=dark)
    browser.ask("Input.dispatchMouseEvent", type="mouseMoved", x=0, y=0)
    browser.open("about:blank")  # and nothing of the page before comes from here on
    browser.errors.clear()
    browser.requests.clear()
    browser.open(page.as_uri() if isinstance(page, Path) else page)
    yield browser
    assert browser.errors == []
    assert browser.requests == []


def select(browser, name, value):
    """Choose in a list of the page, as a hand does."""
    browser.run(
        f"(one => {{ one.value = {json.dumps(value)};"
        f" one.dispatchEvent(new Event('change')); }})(at('{name}'))"
    )


def texts(browser, selector):
    """The texts of all elements that are seen."""
    return browser.run(
        f"[...document.querySelectorAll({json.dumps(selector)})]"
        ".filter(one => one.checkVisibility()).map(one => one.innerText)"
    )


@pytest.mark.parametrize("algo", RUNS)
def test_a_run_leaves_a_page_for_browsers(finished, algo):
    folder = finished[algo]
    (data,), result = embedded(folder)["runs"], json.loads((folder / "result.json").read_text())
    assert data["title"] == (folder / "report.md").read_text().splitlines()[0].removeprefix("# ")
    assert {row[0] for row in data["measures"]["rows"]} == set(result["metrics"]["after"])
    drawn = {panel["title"] for panel in data["panels"] if panel["series"]}
    assert len(drawn) > 4
    for panel in data["panels"]:
        for series in panel["series"]:
            assert len(series["at"]) == len(series["y"]) == len(series["seconds"])
            assert ("tokens" in series) == (algo != "classify")
    if algo != "classify":
        rows = (folder / "completions" / "after.jsonl").read_text().splitlines()
        last = data["completions"]["evaluations"][-1]
        assert last["name"] == "after"
        assert last["texts"] == [json.loads(row)["completion"] for row in rows]
        kept = (folder / "completions" / "training.jsonl").read_text().splitlines()
        assert data["training"]["steps"] == [json.loads(line) for line in kept]
    if algo == "rft":
        names = [one["name"] for one in data["completions"]["evaluations"]]
        assert names == ["before", "iteration 1", "after"]
        axes = {panel["title"]: panel["x"] for panel in data["panels"]}
        assert axes["Fine-tuning"] == "fine-tuning step"
        assert axes["Sampling"] == "chunk of samples"
        assert axes["Held-out measures"] == "iteration (0 = base model)"
    page = (folder / "report.html").read_text()
    assert not re.search(r"""(src|href)\s*=\s*["']?(https?:)?//""", page), "nothing is fetched"


@pytest.mark.parametrize("algo", RUNS)
def test_every_number_of_a_curve_is_one_that_was_logged(finished, algo):
    folder = finished[algo]
    (data,) = embedded(folder)["runs"]
    measured = folder / EVALUATIONS
    lines = measured.read_text().splitlines() if measured.exists() else []
    known = {panel.title: panel for panel in panels.find_panels()[algo]}
    logged = run_folder.columns(events(folder))
    held = run_folder.columns([json.loads(line) for line in lines])
    checked = 0
    for shown in data["panels"]:
        panel = known[shown["title"]]
        points = held if any("metrics/" in name for name in panel.curves) else logged
        expected = {
            legend: [panel.scale * value for _, value in points[name]]
            for name, legend in panel.found(list(points)).items()
        }
        for series in shown["series"]:
            finite = [value for value in expected[series["name"]] if math.isfinite(value)]
            assert series["y"] == finite
            checked += len(finite)
            if panel.x == "step" and points is logged and "tokens" in series and algo != "rft":
                tokens = {event["step"]: event["generated_tokens"] for event in events(folder)}
                assert series["tokens"] == [tokens[step] for step in series["at"]]
    assert checked > 40
    result = json.loads((folder / "result.json").read_text())
    for row in data["measures"]["rows"]:
        for kind, text in (("before", row[1]), ("after", row[2])):
            if text:
                assert text.split()[0] == f"{result['metrics'][kind][row[0]]:.2f}"


@pytest.mark.parametrize(("width", "dark"), [(390, True), (1280, False)])
def test_a_browser_shows_it_without_a_network(finished, width, dark):
    folder = finished["grpo" if dark else "eggroll"]
    with opened(folder / "report.html", width, dark) as browser:
        wide, window = browser.run("[document.documentElement.scrollWidth, innerWidth]")
        assert wide <= window == width
        (data,) = embedded(folder)["runs"]
        drawn = browser.run("document.querySelectorAll('canvas').length")
        assert drawn == sum(bool(panel["series"]) for panel in data["panels"])
        assert len(texts(browser, "#completions .row")) == 8
        assert texts(browser, "#title") == [data["title"]]
        paper = browser.run("getComputedStyle(document.body).backgroundColor")
        assert (sum(map(int, re.findall(r"\d+", paper))) < 200) == dark
        assert texts(browser, "#runs") == [], "there is one run to choose"
        links = browser.run("[...document.querySelectorAll('nav a')].map(one => one.hash)")
        assert {"#curves", "#training", "#completions", "#settings"} <= set(links)
        asked = [row[0] for row in data["settings"] if len(row) > 2]
        shown = texts(browser, "#differing tr td:first-child")
        assert shown == asked
        assert not texts(browser, "#same td"), "the others are folded"
        wide = browser.run(
            "(box => [box.scrollWidth, box.clientWidth])(document.querySelector('#measures .wide'))"
        )
        assert wide[0] <= wide[1], "every column of the measures is in sight"


@pytest.mark.thorough
def test_the_browser_of_a_population_has_pairs_beside_each_other(finished):
    folder = finished["eggroll"]
    (data,) = embedded(folder)["runs"]
    last = data["training"]["steps"][-1]
    with opened(folder / "report.html") as browser:
        pairs = browser.run(
            "[...document.querySelectorAll('#training .sampled.pair')].map(one =>"
            " [...one.querySelectorAll('.about')].map(a => a.textContent))"
        )
        assert len(pairs) == len(last["rows"]) / 2 == 4
        for number, (one, other) in enumerate(pairs):
            assert one.startswith(f"member {2 * number} +E · reward")
            assert other.startswith(f"member {2 * number + 1} −E · reward")
            assert "fitness" in one
        left, right = browser.run(
            "[...document.querySelector('#training .sampled').children]"
            ".map(one => one.getBoundingClientRect().top)"
        )
        assert left == right
        assert texts(browser, "#asked .prompt")[0].strip() == last["prompt"].strip()
        browser.run("at('before').click()")
        earlier = data["training"]["steps"][-2]
        assert texts(browser, "#asked .prompt")[0].strip() == earlier["prompt"].strip()
        select(browser, "cut", "no")
        pairs = list(zip(earlier["rows"][::2], earlier["rows"][1::2], strict=True))
        left = [pair for pair in pairs if not all(row["cut"] for row in pair)]
        assert len(texts(browser, "#training .sampled")) == len(left)


@pytest.mark.thorough
def test_the_browser_of_groups_has_advantages_and_probabilities(finished):
    folder = finished["grpo"]
    (data,) = embedded(folder)["runs"]
    rows = data["training"]["steps"][-1]["rows"]
    with opened(folder / "report.html") as browser:
        shown = texts(browser, "#training .about")
        assert len(shown) == len(rows) == 4
        assert all("advantage" in text for text in shown)
        cells = browser.run(
            "[...document.querySelectorAll('#training .text')].map(one => one.textContent)"
        )
        assert cells == [row["completion"] for row in rows], "tokens lose no letter"
        tokens = browser.run("[...document.querySelectorAll('.token')].map(one => one.title)")
        logged = {f"log-probability {p:g}" for row in rows for p in row["logprobs"]}
        assert tokens
        assert {title.split(",")[0] for title in tokens} <= logged
        browser.run("at('colour').click()")
        assert browser.run("document.querySelectorAll('.token').length") == 0
        select(browser, "order", "fitness or advantage")
        found = [float(re.search(r"advantage ([^ ]+)", t)[1]) for t in texts(browser, ".about")[:4]]
        assert found == sorted(found, reverse=True)
        for right, wanted in (("all", lambda r: r >= 1), ("none", lambda r: r <= 0)):
            select(browser, "right", right)
            count = sum(wanted(row["reward"]) for row in rows)
            assert len(texts(browser, "#training .cell")) == count


@pytest.mark.thorough
def test_held_out_prompts_are_found_by_what_became_of_them(finished, tmp_path):
    """With the scores that a run keeps of its completions."""
    folder = shutil.copytree(finished["grpo"], tmp_path / "run")
    for name, scores in (("before", [0, 0, 100, 100] * 2), ("after", [0, 100, 0, 100] * 2)):
        path = folder / "completions" / f"{name}.jsonl"
        rows = [json.loads(line) for line in path.read_text().splitlines()]
        lines = (
            json.dumps({**row, "scores": {"exact": score}})
            for row, score in zip(rows, scores, strict=True)
        )
        path.write_text("".join(line + "\n" for line in lines))
    write_report(folder)
    with opened(folder / "report.html", 390) as browser:
        for became, count in (("learnt", 2), ("lost", 2), ("right", 4), ("", 8)):
            select(browser, "became", became)
            assert len(texts(browser, "#completions .row")) == count
        browser.run("at('grid').open = true")
        assert len(texts(browser, "#grid tr")) == 9
        wide, window = browser.run("[document.documentElement.scrollWidth, innerWidth]")
        assert wide <= window


def point(browser):
    """Move the mouse to the end of the first chart."""
    x, y = browser.run(
        "(box => [box.right - 1, box.top + 9])"
        "(document.querySelector('.u-over').getBoundingClientRect())"
    )
    browser.ask("Input.dispatchMouseEvent", type="mouseMoved", x=x, y=y)
    browser.run("new Promise(done => setTimeout(done, 100))")


@pytest.mark.thorough
def test_the_cursor_reads_what_was_logged(finished):
    folder = finished["eggroll"]
    with opened(folder / "report.html") as browser:
        counts = ".chart .u-legend tr:first-child"
        assert not any(texts(browser, counts)), "no chart repeats what its axis counts"
        point(browser)
        heads = ".chart:first-child .u-legend .u-value"
        step, mean, best = texts(browser, heads)
        assert step.startswith("optimizer step ")
        step, last = step.split()[-1], events(folder)[-1]
        assert (int(step), float(mean)) == (last["step"], pytest.approx(last["reward"], rel=1e-3))
        assert float(best) == pytest.approx(last["reward_best"], rel=1e-3)
        other = texts(browser, ".chart:nth-child(3) .u-legend .u-value")
        assert int(other[0].split()[-1]) == last["step"], (
            "panels that count the same share the cursor"
        )


@pytest.mark.thorough
def test_the_curves_go_by_tokens_and_seconds_too(finished):
    for algo, axes in (("classify", ["at", "seconds"]), ("rft", ["at", "tokens", "seconds"])):
        with opened(finished[algo] / "report.html") as browser:
            offered = browser.run("[...at('axis').options].map(one => one.value)")
            assert offered == axes
            select(browser, "axis", "seconds")
            point(browser)
            heads = texts(browser, ".chart .u-legend tr:first-child")
            assert len(heads) > 4
            assert all(text.startswith("seconds of training") for text in heads)


LEVEL = {  # values of a curve -> whether it is drawn over all of the height
    "[1, 1.0002, 1.0004]": False,
    "[1e-6, 1e-6, 1e-6]": False,
    "[0, 0, 0]": False,
    "[0.999, 1, 0.9995]": False,
    "[1, 1.05, 1.1]": True,
    "[1e-6, 2e-6, 4e-6]": True,
    "[-0.001, 0.001, 0]": True,
}


@pytest.mark.thorough
@pytest.mark.parametrize("values", LEVEL)
def test_no_two_ticks_of_a_chart_read_alike(values, finished):
    with opened(finished["eggroll"] / "report.html") as browser:
        curve = f"{{label: 'a', colour: '#000000', dash: [], x: [1, 2, 3], y: {values}}}"
        options = "{label: 'step', sync: 'a', counts: true}"
        browser.run(f"u = draw(box({{title: '', unit: ''}}, document.body), [{curve}], {options})")
        ticks = browser.run("u.axes[1]._values")
        low, high = browser.run("[u.scales.y.min, u.scales.y.max]")
        assert len(ticks) > 2
        assert len(set(ticks)) == len(ticks)
        assert ticks == sorted(ticks, key=float)
        found = json.loads(values)
        assert (max(found) - min(found) > 0.5 * (high - low)) == LEVEL[values]
    assert browser.requests == []


@pytest.mark.thorough
def test_ticks_that_lie_close_are_told_apart(finished):
    with opened(finished["eggroll"] / "report.html") as browser:
        pairs = {(1.0002, 1e-4): "1.0002", (1e-6, 5e-8): "1.00e-6", (1.05e-6, 5e-8): "1.05e-6"}
        pairs |= {(0.25, 0.25): "0.25", (300, 100): "300", (12.00005, 5e-5): "12.00005"}
        for (tick, step), text in pairs.items():
            assert browser.run(f"say({tick}, {step})") == text


@pytest.mark.thorough
def test_zero_is_left_out_of_a_logarithmic_axis(finished):
    with opened(finished["eggroll"] / "report.html") as browser:
        curve = "{label: 'a', colour: '#000000', dash: [], x: [1, 2, 3], y: [0, 1, 10]}"
        options = "{label: 'step', log: true, sync: 'a', counts: true}"
        drawn = f"draw(box({{title: '', unit: ''}}, document.body), [{curve}], {options})"
        assert browser.run(f"{drawn}.data") == [[1, 2, 3], [None, 1, 10]]
        browser.run("at('log').click()")
        for values in ([1e-6, 1e-5, 1e-4], [1e-3, 1, 10]):
            charted = drawn.replace("[0, 1, 10]", json.dumps(values))
            browser.run(f"void (window.chart = {charted})")
            shown = browser.run("chart.axes[1]._values")
            ticks = zip(browser.run("chart.axes[1]._splits"), shown, strict=True)
            told = [(tick, float(text)) for tick, text in ticks if text]
            assert len(told) > 1
            assert all(text == pytest.approx(tick, rel=0.01) for tick, text in told)


def test_one_spike_leaves_the_running_mean_alone(finished):
    with opened(finished["eggroll"] / "report.html") as browser:
        values = [1e18, *[1.0] * 99]
        assert browser.run(f"smoothed({{y: {json.dumps(values)}}}, 0.1)")[-1] == 1


def test_what_a_model_wrote_stays_text(finished, tmp_path):
    folder = shutil.copytree(finished["grpo"], tmp_path / "run")
    path = folder / "completions" / "after.jsonl"
    rows = [json.loads(line) for line in path.read_text().splitlines()]
    rows[0]["completion"] = hostile = "</script><script>document.title='taken'</script><b>&amp;"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    write_report(folder)
    kept = folder / "completions" / "training.jsonl"
    lines = [json.loads(line) for line in kept.read_text().splitlines()]
    lines[-1]["prompt"] = 100 * "W" + hostile
    lines[-1]["rows"][0] |= {"completion": hostile, "ends": [3], "logprobs": [-1.0]}
    kept.write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_report(folder)
    (data,) = embedded(folder)["runs"]
    assert data["completions"]["evaluations"][-1]["texts"][0] == hostile
    with opened(folder / "report.html", 390) as browser:
        assert browser.run("[document.documentElement.scrollWidth, innerWidth]") == [390, 390]
        assert browser.run("document.title") == data["title"]
        assert hostile in browser.run("document.querySelector('#completions .rows').textContent")
        assert hostile in browser.run("document.querySelector('#training .rows').textContent")


@pytest.mark.thorough
def test_a_long_run_is_a_small_page(tmp_path):
    """Of 20,000 steps and 100,000 completions. python -m benchmarks report times it."""
    folder = tmp_path / "run"
    long_run.write_run(folder)
    write_report(folder)
    assert (folder / "report.html").stat().st_size < 5e6
    (data,) = embedded(folder)["runs"]
    logged = {event["step"]: event for event in events(folder)}
    (reward,) = [panel for panel in data["panels"] if panel["title"].startswith("Reward")]
    for series, name in zip(reward["series"], ("reward", "reward_best"), strict=True):
        assert 1000 < len(series["y"]) <= 1500
        assert series["y"] == [logged[step][name] for step in series["at"]]
        every = [event[name] for event in logged.values()]
        assert max(series["y"]) == max(every)
        assert min(series["y"]) == min(every)
        assert len(series["mean"]) == len(series["y"]) / 2
        assert fmean(series["mean"]) == pytest.approx(fmean(every), rel=1e-2)
    steps = [line["step"] for line in data["training"]["steps"]]
    assert len(steps) >= 12
    assert steps[0] == 1
    assert steps[-1] > 19_000
    assert sum(sum(row[1:]) for row in data["prompts"]["rows"]) == data["training"]["total"]


@pytest.mark.parametrize("algo", RUNS)
def test_settings_are_told_from_their_defaults(finished, algo):
    (data,) = embedded(finished[algo])["runs"]
    changed = {key: (value, *default) for key, value, *default in data["settings"] if default}
    assert all(value != default for value, default in changed.values() if default)
    if algo == "classify":
        assert changed["algo.batch_size"] == ("40", "32")
        assert "checkpoint.every" not in changed, "whose default is that of classify"


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
    names = list(dict.fromkeys(name for event in logged for name in numeric_values(event)))
    (data,) = embedded(folder)["runs"]
    drawn = {panel["title"] for panel in data["panels"] if panel["series"]}
    drawn |= {table["title"] for table in data["tables"]}
    for panel in panels.find_panels()[algo]:
        if panel.title not in CONDITIONAL:
            assert panel.found(names), panel
            assert panel.title in drawn
        else:
            assert all(curve in names or "*" in curve for curve in panel.curves), panel
    titles = [panel.title for panel in panels.find_panels()[algo]]
    assert len(titles) == len(set(titles))


@pytest.mark.thorough
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
    log = folder / "metrics.jsonl"
    log.write_text(
        "".join(line + "\n" for line in log.read_text().splitlines()[:3]) + '{"step": 4, "rew'
    )
    monkeypatch.setattr(sys, "argv", ["report", str(folder)])
    __main__.main()
    assert capsys.readouterr().out == f"{folder}/report.md\n"
    page = (folder / "report.md").read_text()
    assert page.startswith("# grpo on Letters: not finished\n\n3 of 4 steps are logged. Go on with")
    assert "| prompt | before | last | answer |" in page
    for later in (folder / "completions").glob("step-*.jsonl"):
        later.unlink()
    first = (folder / "completions/before.jsonl").read_text().splitlines()
    (folder / "completions/iteration-1.jsonl").write_text(f"{first[0]}\n")  # as RFT names it
    rows = write_report(folder).read_text().split("| prompt | before | last | answer |")[1]
    assert all(line.count(" | ") == 3 for line in rows.strip().splitlines()[1:3])
    monkeypatch.setattr(sys, "argv", ["report", str(tmp_path)])
    with pytest.raises(SystemExit, match="2"):
        __main__.main()
    error = capsys.readouterr().err
    assert f"such as {folder}" in error
    assert f"python -m common.compare {tmp_path}" in error


@contextmanager
def serving(*folders):
    """The address of a server of runs."""
    server = open_server(folders, 0)
    thread = threading.Thread(target=server.serve_forever, args=(0.05,))
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_address[1]}/"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


def test_runs_with_several_step_kinds_get_own_panels(finished):
    with serving(finished["grpo"], finished["rft"]) as address, opened(address) as browser:
        axes = browser.run("[...panels().values()].map(of => [...new Set(of.map(([, p]) => p.x))])")
        assert axes
        assert all(len(of) == 1 for of in axes)
        titles = browser.run("[...panels().values()].map(of => of[0][1].title)")
        assert len(titles) > len(set(titles)), "both have held-out measures"


def test_completions_without_a_reward_are_neither_wrong_nor_counted(finished, tmp_path):
    folder = shutil.copytree(finished["grpo"], tmp_path / "run")
    path = folder / "completions" / "training.jsonl"
    lines = [json.loads(line) for line in path.read_text().splitlines()]
    for line in lines:
        for row in line["rows"][1:]:
            row |= {"reward": None, "unscored": True}
        line["rows"][0]["reward"] = 1.0
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    write_report(folder)
    with opened(folder / "report.html") as browser:
        (said,) = texts(browser, "#asked .quiet")
        assert "mean reward 1, 3 without one, 1 right" in said
        assert len(texts(browser, "#training .cell.right")) == 1
        assert not texts(browser, "#training .cell.wrong")


def test_runs_that_go_on_are_followed_in_one_page(finished, tmp_path):
    one = shutil.copytree(finished["eggroll"], tmp_path / "one")
    other = shutil.copytree(finished["grpo"], tmp_path / "other")
    log = one / "metrics.jsonl"
    lines = log.read_text().splitlines(keepends=True)
    log.write_text("".join(lines[:2]) + lines[2][:40])  # half a line: it is being written
    with serving(one, other) as address, opened(address) as browser:
        legend = " ".join(texts(browser, ".chart:first-child .u-legend th"))
        assert "one: mean" in legend
        assert "other: mean" in legend
        assert browser.run("data.runs[0].panels[0].series[0].y.length") == 2
        select(browser, "smooth", "0")
        log.write_text("".join(lines))
        for _ in range(100):
            if browser.run("data.runs[0].panels[0].series[0].y.length") == 4:
                break
            time.sleep(0.1)
        assert browser.run("data.runs[0].panels[0].series[0].y.length") == 4
        assert browser.run("at('smooth').value") == "0", "what was chosen stays"
        select(browser, "run", "1")
        assert texts(browser, "#title")[0].startswith("grpo on")
        with urllib.request.urlopen(f"{address}data") as answer:
            mark = json.load(answer)["mark"]
        with urllib.request.urlopen(f"{address}data?since={mark}") as answer:
            assert answer.status == 204
        stranger = urllib.request.Request(f"{address}data", headers={"Host": "elsewhere.example"})
        with pytest.raises(urllib.error.HTTPError, match="403"):
            urllib.request.urlopen(stranger)


def test_the_server_reports_errors_until_ctrl_c(finished, tmp_path, begin, launch):
    folder = str(finished["grpo"])
    started = begin(folder, "--serve", "--port", "0", module="common.report")
    for _ in range(300):
        if found := re.search(r"http://127\.0\.0\.1:(\d+)/", "".join(started.said())):
            break
        time.sleep(0.1)
    else:
        pytest.fail("it has not said where it is")
    taken = found[1]
    with pytest.raises(ConfigError, match=f"--port {taken} cannot be used"):
        open_server([Path(folder)], int(taken))
    with pytest.raises(ConfigError, match="no run folder"):
        open_server([tmp_path], 0)
    with pytest.raises(urllib.error.HTTPError, match="404"):
        urllib.request.urlopen(f"{found[0]}run.yaml")
    started.send_signal(signal.SIGINT)
    started.communicate(30)
    assert started.returncode == 0
    done = launch(folder, "--port", "1", module="common.report", code=2)
    assert "--port has no effect without --serve" in done.stderr


@pytest.mark.thorough
def test_a_comparison_has_bands_over_seeds(finished, tmp_path):
    for seed in range(3):
        folder = shutil.copytree(finished["eggroll"], tmp_path / "sweep" / str(seed))
        text = (folder / "run.yaml").read_text()
        (folder / "run.yaml").write_text(text.replace("  seed: 0\n", f"  seed: {seed}\n"))
        result = json.loads((folder / "result.json").read_text())
        (folder / "result.json").write_text(json.dumps(result | {"after": 10.0 * seed}))
    shutil.copytree(finished["grpo"], tmp_path / "sweep" / "grpo")
    runs, failures = read_runs([tmp_path / "sweep"])
    load(COMPARISON)(runs, failures, tmp_path / "sweep")
    for width, dark in ((390, True), (1280, False)):
        with opened(tmp_path / "sweep" / "comparison.html", width, dark) as browser:
            wide, window = browser.run("[document.documentElement.scrollWidth, innerWidth]")
            assert wide <= window
            cells = texts(browser, "main td")
            assert "10.00 ± 10.00" in cells
            kinds = browser.run("data.kinds")
            assert browser.run("document.querySelectorAll('canvas').length") == sum(
                len(kind["costs"]) for kind in kinds
            )
            (setting,) = [
                one
                for kind in kinds
                for one in kind["costs"][0]["settings"]
                if "mean of 3" in one["name"]
            ]
            assert setting["y"][-1] == 10
            assert setting["low"][-1] < 10 < setting["high"][-1]
            assert len(setting["runs"]) == 3


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


def test_an_unwritable_report_does_not_end_the_run(in_cache, tmp_path):
    (tmp_path / "report.html").mkdir(parents=True)  # in the way
    result = train(compose([*SMALL, "algo.steps=1"]), tmp_path)
    assert json.loads((tmp_path / "result.json").read_text())["steps"] == result.steps == 1
    assert (tmp_path / "model" / "config.json").exists()
    log = (tmp_path / "run.log").read_text()
    assert re.search(r"WARNING .*report\.md could not be written .*python -m common\.report", log)
    (tmp_path / "report.html").rmdir()
    page = write_report(tmp_path).read_text()
    assert "## Warnings\n\n- " in page


@pytest.mark.parametrize(
    "labels", [["a", "b"], ["copy_levenshtein"] * 8, ["from the policy that sampled", "kl"]]
)
@pytest.mark.parametrize("values", [(0.0, 0.0), (1e-7, 3e-7), (0.0, 123456.0)])
def test_a_figure_covers_and_cuts_nothing(tmp_path, labels, values):
    """The legend lies below the axes and their labels; all text lies within the picture."""
    title, x, y = "Where the time of a step goes", "optimizer step", "norm before clipping"
    with plots.saved(tmp_path / "figure.png", title, x, y) as axis:
        for number, label in enumerate(labels):
            axis.plot([1, 2], values, label=f"{label}{' ' * number}")
        figure: Figure = axis.figure
    with matplotlib.rc_context(plots.STYLE):
        boxes = {
            "axes": axis.get_window_extent(),
            "legend": figure.legends[0].get_window_extent(),
            "title": axis._left_title.get_window_extent(),
            "x": axis.xaxis.get_tightbbox(),
            "y": axis.yaxis.get_tightbbox(),
        }
    assert boxes["legend"].y1 <= boxes["x"].y0 + 1
    assert boxes["title"].y0 >= boxes["axes"].y1
    for name, box in boxes.items():
        assert figure.bbox.x0 <= box.x0 < box.x1 <= figure.bbox.x1, name
        assert figure.bbox.y0 <= box.y0 < box.y1 <= figure.bbox.y1, name


def test_what_would_end_a_cell_is_escaped():
    table = markdown_table([{"a": "x|y", "b": "1\n2"}])
    assert table == "| a | b |\n| --- | --- |\n| x\\|y | 1<br>2 |"
    assert markdown_table([{"a": "p < 0.001, <b>"}]).endswith("| p < 0.001, &lt;b> |")
    shown = {"3*4*5": "3\\*4\\*5", "~~a~~": "\\~\\~a\\~\\~", "`a`": "\\`a\\`", "_a_": "\\_a\\_"}
    for text, cell in (shown | {"algo.prompts_per_step": "algo.prompts_per_step"}).items():
        assert markdown_cell(text) == cell
