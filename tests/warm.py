"""Runs launch.py's main in forks of a process that has its imports done, which take longer than most runs in tests.

Reads a request a line, writes an exit code a line. Each fork has its own folder, environment, output and signals, as a command has; that
a new interpreter does the same is what the tests of README's commands and test_launch.py see to.
"""

import json
import os
import sys
from datetime import datetime
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def serve() -> None:
    """Fork for each request on standard input: {arguments, folder, environment, stdout, stderr}."""
    sys.path.insert(0, str(ROOT))
    import matplotlib.figure  # noqa: F401
    import sacrebleu  # noqa: F401

    import rft.train  # noqa: F401

    assert len(os.listdir("/proc/self/task")) == 1, "threads do not survive a fork"
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            return run(**json.loads(line))
        code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
        print(code, flush=True)


def run(arguments: list[str], folder: str, environment: dict[str, str], stdout: str, stderr: str) -> None:
    """In the fork: be a new process, then launch.py."""
    for descriptor, path in ((0, os.devnull), (1, stdout), (2, stderr)):
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdin = os.fdopen(0)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:1] = [str(ROOT), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    sys.argv = [str(ROOT / "launch.py"), *arguments]
    import launch
    from conf import resolvers

    resolvers._STARTED = datetime.now().strftime("%Y-%m-%d_%H-%M-%S-%f")
    launch.main()


if __name__ == "__main__":
    serve()
