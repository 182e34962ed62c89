"""Runs launch.py's main, another module's, or a function, in forks of a process that has its
imports done, which take longer than most runs in tests.

Reads a request a line, writes the fork's id and then its exit code, a line each. Each fork has its
own session, folder, environment, output and signals, as a command has; the ranks that it starts are
forks too. That a new interpreter does the same is what the tests of README's commands,
test_launch.py, test_faults.py and test_kills.py see to.
"""

import atexit
import gc
import importlib
import json
import os
import pickle
import resource
import runpy
import sys
import threading
from datetime import datetime
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]


def serve() -> None:
    """Fork for each request on standard input: {folder, environment, stdout, stderr} and
    {arguments, module} or {call}.
    """
    sys.path.insert(0, str(ROOT))
    os.fsync = lambda _: None  # as in the tests
    if "CLUTCH_STANDIN" in os.environ:  # before torch: see tests/support/standin
        from tests.support import standin

        standin.DEVICE = standin.start()
    import yaml

    yaml.SafeLoader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)  # as in the tests
    import matplotlib.figure  # noqa: F401
    import sacrebleu  # noqa: F401
    import scipy.stats  # noqa: F401
    import torch.multiprocessing
    from hydra._internal.hydra import Hydra
    from transformers import LlamaForCausalLM, PreTrainedTokenizerFast  # noqa: F401
    from transformers.conversion_mapping import get_checkpoint_conversion_mapping

    from common.device import threads
    from common.tasks import translate
    from launch import ALGORITHMS, compose
    from tests.support.held import hold_files

    hold_files()
    for settings in ALGORITHMS.values():
        importlib.import_module(settings.__module__.replace(".config", ".train"))
    compose([])  # Hydra looks for its plugins
    translate._number_words()
    get_checkpoint_conversion_mapping("llama")  # 400 patterns, compiled at the first model
    Hydra.get_mode = lambda *_, **__: None  # composes everything; no file here sets hydra.mode
    threads.watch_load = lambda: None  # the load is that of other tests
    torch.multiprocessing.start_processes = forking(torch.multiprocessing.start_processes)
    if sys.platform == "linux":
        assert len(os.listdir("/proc/self/task")) == 1, "threads do not survive a fork"
    gc.collect()
    gc.freeze()  # or the first collection in each fork looks at, and copies, all that was imported
    gc.set_threshold(100_000)  # nor do runs of a second need to collect often
    for line in sys.stdin:
        child = os.fork()
        if child == 0:
            end(json.loads(line))
        print(child, flush=True)
        print(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), flush=True)


def forking(start_processes):
    """With ranks that are forked, not spawned."""

    @wraps(start_processes)
    def start(*arguments, **options):
        return start_processes(*arguments, **options | {"start_method": "fork"})

    return start


def end(request: dict[str, Any]) -> NoReturn:
    """In the fork: run, and end as an interpreter does, but leave its memory to the system. Taking
    down all that was imported takes longer than many runs.
    """
    code = 0
    try:
        run(**request)
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else int(ended.code is not None)
        if isinstance(ended.code, str):
            print(ended.code, file=sys.stderr)
    except BaseException:
        sys.excepthook(*sys.exc_info())
        code = 1
    threading._shutdown()  # waits for threads
    atexit._run_exitfuncs()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)


def side_by_side(requests: list[dict[str, Any]]) -> list[int]:
    """In the fork: the ranks of a launcher, each in a fork of its own. Returns their exit codes."""
    forks = []
    for request in requests:
        forks.append(os.fork())
        if forks[-1] == 0:
            end(request)
    return [os.waitstatus_to_exitcode(os.waitpid(fork, 0)[1]) for fork in forks]


def run(
    folder: str,
    environment: dict[str, str],
    stdout: str,
    stderr: str,
    arguments: list[str] | None = None,
    module: str | None = None,
    call: str | None = None,
    stdin: str = os.devnull,
    largest_file: int | None = None,
) -> None:
    """In the fork: be a new process, then launch.py or a module; or call the function that is
    pickled in a file.
    """
    os.setsid()
    if largest_file is not None:
        most = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
        resource.setrlimit(resource.RLIMIT_FSIZE, (largest_file, most))
    for descriptor, path in ((0, stdin), (1, stdout), (2, stderr)):
        opened = os.open(path, os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_NOCTTY)
        os.dup2(opened, descriptor)
        os.close(opened)
    sys.stdin = os.fdopen(0)
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(environment)
    sys.path[:1] = [str(ROOT), *filter(None, environment.get("PYTHONPATH", "").split(os.pathsep))]
    if call is not None:
        return answer(Path(call))
    assert arguments is not None
    if module is not None:
        sys.argv = [module, *arguments]
        runpy.run_module(module, run_name="__main__", alter_sys=True)
        return
    sys.argv = [str(ROOT / "launch.py"), *arguments]
    import launch
    from common.config import resolvers

    resolvers._STARTED = datetime.now().strftime("%Y-%m-%d_%H-%M-%S-%f")
    launch.main()


def answer(call: Path) -> None:
    """Put what the function returned or raised in its file."""
    import torch

    torch.set_num_threads(1)  # as in the tests
    function, arguments = pickle.loads(call.read_bytes())
    try:
        outcome = function(*arguments)
    except Exception as error:
        outcome = error
    call.write_bytes(pickle.dumps(outcome))


if __name__ == "__main__":
    serve()
