"""The end of a command, or of one job of a sweep: its messages, its record and its exit code."""

import os
import shutil
import signal
import sys
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

from hydra.core.hydra_config import HydraConfig
from hydra.types import RunMode

from common.config import (
    HYDRA_ERRORS,
    ConfigError,
    explain,
    find_config_dir,
    name_folder,
)
from common.system import run_record
from common.system.failures import failed, is_main, show_any_text
from common.system.files import FULL, CheckpointError
from common.system.lock import InUseError
from common.system.signals import (
    EXIT_CONFIG,
    EXIT_CRASH,
    EXIT_INTERRUPTED,
    EXIT_SIGNAL,
    EXIT_WRITE,
    RunStopped,
    StopSignal,
)
from common.system.terminal import complain, visible


@contextmanager
def ending_command(arguments: Sequence[str]) -> Iterator[None]:
    """Turn the exceptions of the block into a message for the user and an exit code.

    A sweep continues after a job that fails, and exits with the code of the first failure.
    """
    show_any_text()
    try:
        yield
    except (ConfigError, RunStopped) as error:
        sys.exit(_print_end(error))
    except HYDRA_ERRORS as error:
        text = explain(error, arguments, find_config_dir(arguments))
        sys.exit(_print_end(ConfigError(text)))
    except Exception as error:
        if isinstance(error, CheckpointError) or getattr(error, "errno", None) in FULL:
            text = f"error: {error}. Make room, or use another hydra.run.dir."
            sys.exit(_print_end(RunStopped(text, EXIT_WRITE)))
        if not type(error).__module__.startswith("submitit."):
            raise
        print(
            "error: a job of the sweep ended without a word (killed, or out of time):"
            f" {str(error).splitlines()[0]}\nOthers may go on. When they have ended: python -m"
            " common.compare SWEEP_FOLDER",
            file=sys.stderr,
        )
        sys.exit(EXIT_CRASH)
    except KeyboardInterrupt:  # before the first step or after the last: nothing is to be saved
        complain("interrupted")
        sys.exit(EXIT_INTERRUPTED)


@contextmanager
def ending_tool(advice: str = "give another --out") -> Iterator[None]:
    """Turn a user error in a command that starts no run into a message and exit code 2, and a full
    disk into a message and exit code 4.

    Args: advice: the next step if the output cannot be written.
    """
    show_any_text()
    try:
        yield
        sys.stdout.flush()
    except ConfigError as error:
        sys.exit(_print_end(error))
    except BrokenPipeError:  # the reader, such as head, has closed the pipe
        _drop_output()
    except OSError as error:
        what, full = error.filename, error.errno in FULL
        if what is None and full:
            _drop_output()
        text = f"error: {what or 'what is printed'} cannot be written: {error.strerror}."
        then = f"Make room, or {advice}." if full else f"{advice[0].upper()}{advice[1:]}."
        code = EXIT_WRITE if full else EXIT_CONFIG
        sys.exit(_print_end(RunStopped(f"{text} {then}", code)))


def _drop_output() -> None:
    """Discard the remaining output: Python would report the error again when it exits."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def remove_unused(folder: Path) -> None:
    """Remove a run folder that holds only Hydra's files, locks and empty logs. If it also holds
    other empty files, these stay, and so does the folder. A folder with anything else is left as it
    is.
    """
    with suppress(OSError):  # another rank has removed it, or it holds something else
        paths = list(folder.iterdir())
        files = [path for path in paths if path.name not in (".hydra", ".lock-command")]
        if any(not path.is_file() or path.stat().st_size for path in files):
            return
        for path in paths:
            if path.name == ".hydra":
                shutil.rmtree(path, ignore_errors=True)
            elif path.name.startswith(".lock") or path.suffix in (".log", ".jsonl"):
                path.unlink()
        folder.rmdir()


@contextmanager
def ending_job() -> Iterator[Path]:
    """Yield the folder of Hydra's job. If the block fails, exit in a single run, or go on in a
    sweep. The failure is recorded in the folder, in a single run only if the run had begun.
    """
    settings = HydraConfig.get()
    folder, alone = Path(settings.runtime.output_dir), settings.mode == RunMode.RUN
    run_record.set_aside(folder, settings.output_subdir)
    requeue = signal.getsignal(signal.SIGUSR2)  # submitit's handler, which requeues the job
    try:
        try:
            yield folder
        finally:
            if is_main():
                run_record.settle(folder)
        if alone:
            remove_unused(folder)  # a plan leaves nothing
    except (ConfigError, RunStopped) as error:
        code = _print_end(error)
        if alone and isinstance(error, ConfigError):
            remove_unused(folder)
        elif alone:
            _record_end(folder, code, str(error))
        if not alone and code == EXIT_SIGNAL:
            again = f"{name_folder(settings.sweep.dir, 'hydra.sweep.dir')} resume=auto."
            complain(f"The whole sweep: the same command with {again}")
        if code == EXIT_SIGNAL and StopSignal.last == signal.SIGUSR2 and callable(requeue):
            signal.signal(signal.SIGUSR2, requeue)
            signal.raise_signal(signal.SIGUSR2)  # all is saved: submitit may end the process now
        here = settings.runtime.choices["hydra/launcher"] == "basic"
        taken = isinstance(error, InUseError)  # by another sweep, whose folder this is
        if alone or taken or (code == EXIT_SIGNAL and here):  # a signal is meant for the sweep
            sys.exit(code)  # past Hydra, which would print a line of its own first
        failed(folder, code, str(error))
    except Exception as error:
        if alone:
            _record_end(folder, EXIT_CRASH, f"{type(error).__name__}: {error}")
            raise
        traceback.print_exc()
        failed(folder, EXIT_CRASH, f"{type(error).__name__}: {error}")


def _record_end(folder: Path, code: int, error: str) -> None:
    """Record how a single run ended, if it had begun and the disk has room."""
    if (folder / run_record.RUN_FILE).is_file():
        with suppress(OSError):
            failed(folder, code, error)


def _print_end(error: ConfigError | RunStopped) -> int:
    """Print the reason that a run ended early, on rank 0 only; return the exit code."""
    stopped = isinstance(error, RunStopped)
    if is_main():
        text = str(error) if stopped else f"error: {error}"
        complain(visible(text, kept="\n\t"))  # it may quote a model or a package
    return error.code if stopped else EXIT_CONFIG
