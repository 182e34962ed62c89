"""Make the reports of run folders again: python -m common.report RUN."""

import argparse
from pathlib import Path

from common.exits import ending_tool
from common.report import page


def main() -> None:
    """Make the reports of run folders again. Exit codes: 0 done, 2 a mistake."""
    parser = argparse.ArgumentParser(
        "python -m common.report", description="Write RUN/report.md and RUN/plots again."
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="a run folder, of a killed run too"
    )
    with ending_tool():
        for folder in parser.parse_args().runs:
            print(page.write_report(folder))


if __name__ == "__main__":
    main()
