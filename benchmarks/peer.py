"""Another project's package in an environment of its own, for a benchmark."""

import json
import os
import subprocess
from pathlib import Path
from tempfile import TemporaryFile
from typing import Any, Self

from common.system import leave_out_ours


class Peer:
    """A script of this folder that runs in the environment of another project, and answers each
    line with a line. It prints a line when it is ready.
    """

    def __init__(self, script: str, python: Path, *arguments: Path | str) -> None:
        self.name = script.removesuffix(".py")
        self.log = TemporaryFile("w+")  # noqa: SIM115 (open as long as the process)
        pipe = subprocess.PIPE
        self.process = subprocess.Popen(
            [str(python), str(Path(__file__).with_name(script)), *map(str, arguments)],
            stdin=pipe,
            stdout=pipe,
            env=leave_out_ours(os.environ),
            stderr=self.log,
            text=True,
        )
        self.read()

    def read(self) -> str:
        """Return its next line. Raises: RuntimeError with the end of its log if it has ended."""
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.log.seek(0)
            raise RuntimeError(f"{self.name} ended: {self.log.read()[-800:]}")
        return line

    def ask(self, work: dict[str, Any]) -> str:
        """Send a piece of work, and return the line that answers it."""
        assert self.process.stdin is not None
        print(json.dumps(work), file=self.process.stdin, flush=True)
        return self.read()

    def generate(self, prompts: list[list[int]], samples: int, new_tokens: int) -> int:
        """Return the number of tokens that vLLM sampled."""
        work = {"prompts": prompts, "samples": samples, "new_tokens": new_tokens}
        return int(self.ask(work))

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self.process.kill()
        self.process.wait()
        self.log.close()
