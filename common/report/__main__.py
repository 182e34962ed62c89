"""Make the reports of run folders again, or serve them: python -m common.report RUN [--serve]."""

import argparse
from pathlib import Path

from common.config import ConfigError
from common.report import page, serve
from common.system import ending_tool

PORT = 8640


def main() -> None:
    """Rewrite the reports of run folders, or serve them. Exit codes: 0 done, 2 a user error."""
    parser = argparse.ArgumentParser(
        "python -m common.report",
        description="Write RUN/report.md and RUN/report.html again, or serve the pages.",
    )
    parser.add_argument(
        "runs", nargs="+", type=Path, metavar="RUN", help="a run folder, of a killed run too"
    )
    parser.add_argument(
        "--serve",
        action="store_true",
        help="follow the runs in a browser on this machine, all of them in the same curves",
    )
    port = f"of --serve; 0 = any that is free; default: {PORT}"
    parser.add_argument("--port", type=int, metavar="N", help=port)
    options = parser.parse_args()
    if options.port is not None and not options.serve:
        parser.error("--port has no effect without --serve. Add it, or leave --port out.")
    if options.port is not None and not 0 <= options.port < 2**16:
        parser.error(f"--port {options.port} is no port. Give a number from 0 to 65535.")
    with ending_tool("make its folder writable, or copy the run"):
        if options.serve:
            serve.serve(options.runs, PORT if options.port is None else options.port)
            return
        damaged = []
        for folder in options.runs:
            try:
                print(page.write_report(folder))
            except ConfigError as error:
                damaged.append(str(error))
        if damaged:
            raise ConfigError("\n".join(damaged))


if __name__ == "__main__":
    main()
