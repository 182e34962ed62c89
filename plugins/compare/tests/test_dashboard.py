"""The W&B dashboard: its panels, and what it needs."""

import re
import sys

import pytest

from common.config import ConfigError
from common.report import panels
from plugins.compare import dashboard


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
            if not any("*" in name for name in panel.curves):
                assert config["metrics"] == list(panel.curves)
                continue
            names = [*panel.curves, "metrics/units/accuracy", "metrics/text/bits_per_byte"]
            for name in [name.replace("*", "some") for name in names]:
                found = re.match(config["metricRegex"], name) is not None
                assert found == bool(panel.found([name])), (panel.title, name)


def test_the_dashboard_says_what_it_needs(monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "wandb_workspaces.reports.v2", None)
    with pytest.raises(ConfigError, match=r"pip install -e '\.\[dashboard\]'"):
        dashboard.workspace("team", "clutch", ["grpo"])
    monkeypatch.setattr(sys, "argv", ["dashboard", "clutch", "--algo", "grpo", "egroll"])
    with pytest.raises(SystemExit, match="2"):
        dashboard.main()
    assert "Did you mean 'eggroll'?" in capsys.readouterr().err
