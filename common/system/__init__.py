"""The machine under a command: files, locks, signals, exit codes, the terminal, user code."""

from common.system import lock, run_record, safe_read, terminal, user_code
from common.system.exits import ending_command, ending_job, ending_tool
from common.system.failures import FAILED, is_main, keep_early, show_any_text, take_early
from common.system.files import (
    FULL,
    MANIFEST,
    TEMPORARY,
    CheckpointError,
    cache_folder,
    cached,
    first_line,
    problem,
    replacing,
    seal,
    write_text,
)
from common.system.run_record import open_log, write_log
from common.system.safe_read import NUMBER, DamagedError
from common.system.signals import (
    EXIT_CONFIG,
    EXIT_CRASH,
    EXIT_INTERRUPTED,
    EXIT_NUMBERS,
    EXIT_SIGNAL,
    EXIT_WRITE,
    RunStopped,
    StopSignal,
    leave_stops_to_the_run,
    taken,
)
from common.system.terminal import visible
from common.system.torchrun import check_group, is_of_srun, leave_out_ours, ranked
from common.system.user_code import import_named, import_optional, instantiate, wording

__all__ = [
    "EXIT_CONFIG",
    "EXIT_CRASH",
    "EXIT_INTERRUPTED",
    "EXIT_NUMBERS",
    "EXIT_SIGNAL",
    "EXIT_WRITE",
    "FAILED",
    "FULL",
    "MANIFEST",
    "NUMBER",
    "TEMPORARY",
    "CheckpointError",
    "DamagedError",
    "RunStopped",
    "StopSignal",
    "cache_folder",
    "cached",
    "check_group",
    "ending_command",
    "ending_job",
    "ending_tool",
    "first_line",
    "import_named",
    "import_optional",
    "instantiate",
    "is_main",
    "is_of_srun",
    "keep_early",
    "leave_out_ours",
    "leave_stops_to_the_run",
    "lock",
    "open_log",
    "problem",
    "ranked",
    "replacing",
    "run_record",
    "safe_read",
    "seal",
    "show_any_text",
    "take_early",
    "taken",
    "terminal",
    "user_code",
    "visible",
    "wording",
    "write_log",
    "write_text",
]
