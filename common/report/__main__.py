"""Make the reports of run folders again: python -m common.report RUN."""

import argparse
import sys
from pathlib import Path

from common.config import ConfigError
from common.report import page


def main() -> int:
    """Make the reports of run folders again. Exit codes: 0 done, 2 a mistake."""
    parser = argparse.ArgumentParser(
        "python -m common.report", description="Write RUN/report.md and RUN/plots again."
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="a run folder, of a killed run too"
    )
    try:
        for folder in parser.parse_args().runs:
            print(page.write_report(folder))
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    return 0


if __name__ == "__main__":
    sys.exit(main())
