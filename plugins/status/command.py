"""Say where a run stands.

    python -m common.status outputs/mine          # in words
    python -m common.status outputs/mine --json   # for programs

Reads the run folder alone, and changes nothing.
"""

import argparse
import json
from pathlib import Path

from common.system import ending_tool, visible
from common.uncertainty import show_interval
from plugins.status.reading import Status, read_status


def describe(found: Status) -> str:
    """Return the status in words, a line per fact."""
    head = f"{found.folder}: {found.state}"
    if found.exit_code is not None:
        head += f", exit code {found.exit_code} ({found.exit_meaning})"
    rows = {} if found.error is None else {"error": found.error}
    if found.iteration is not None:
        rows["iteration"] = f"{found.iteration} of {found.iterations or '?'}"
    elif found.step is not None:
        rows["step"] = f"{found.step}{f' of {found.steps}' if found.steps else ''}"
    if found.share is not None and found.state != "ended":
        left = "" if found.seconds_left is None else f", about {found.seconds_left:.0f} s left"
        rows["done"] = f"{100 * found.share:.0f} %{left}"
    if measure := found.measure:
        sure = f" (95 % {show_interval(measure['interval'])})" if measure["interval"] else ""
        text = f"{measure['value']:.2f}{sure} at step {measure['step']}"
        rows[f"held-out {measure['name']}"] = text
    if found.verdict:
        rows["verdict"] = found.verdict
    for one in found.advice if not found.verdict else ():
        rows[one["code"]] = one["text"]
    if found.exported:
        rows["exported"] = found.exported
    if found.heartbeat is not None and found.state not in ("ended", "failed", "stopped"):
        rows["last written"] = f"{found.heartbeat:.0f} s ago"
    if found.next_command:
        rows["try next"] = found.next_command
    rows |= {f"problem {number}": text for number, text in enumerate(found.problems, 1)}
    width = max(map(len, rows), default=0)
    return "\n".join([head, *(f"{key:<{width}}  {value}" for key, value in rows.items())])


def main() -> None:
    """Run the command. Exit codes: 0 done, 2 a mistake of the user."""
    parser = argparse.ArgumentParser(
        "python -m common.status", description="Say where a run stands, by its folder."
    )
    parser.add_argument("run", type=Path, metavar="RUN", help="a run folder, such as outputs/mine")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    options = parser.parse_args()
    with ending_tool():
        found = read_status(options.run)
        text = json.dumps(found.content(), indent=2) if options.json else describe(found)
        print(text if options.json else visible(text, kept="\n"))


if __name__ == "__main__":
    main()
