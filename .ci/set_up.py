"""Make an environment and install packages into it, with uv where that can be had and with pip
otherwise.

    python3 .ci/set_up.py .venv -r requirements.lock -e .

The arguments behind the folder are those of `uv pip install` and `pip install`. Needs Python 3.11
and a package index alone.

PyTorch on the package index is built for CUDA, with 4 GB of libraries. uv takes the build for this
machine (CPU, CUDA, ROCm) from PyTorch's own index, if that can be reached; pip and
requirements.lock know nothing of it. UV_TORCH_BACKEND chooses another build, such as cu126.
"""

import ast
import os
import shutil
import subprocess
import sys
from pathlib import Path

# What pip is configured with, such as a mirror or a folder of wheels, and uv's name for it.
SHARED = {
    "index-url": "UV_DEFAULT_INDEX",
    "find-links": "UV_FIND_LINKS",
    "cert": "SSL_CERT_FILE",
}


def main(folder: str, *arguments: str) -> int:
    """Return the exit code of the installer that worked, or of the last one that did not."""
    if sys.version_info < (3, 11):  # noqa: UP036 - whoever runs this has any Python
        print(
            f"{sys.executable} is Python {sys.version.split()[0]}, and 3.11 or later is needed."
            " Name another one: make run PYTHON=python3.12"
        )
        return 2
    subprocess.run([sys.executable, "-m", "venv", folder], check=True)
    python = str(Path(folder) / "bin" / "python")
    uv = shutil.which("uv") or install_uv(python)
    if uv is not None:
        environment = os.environ | pip_settings(python)
        command = [uv, "pip", "install", "--quiet", "--python", python, *arguments]
        if "UV_TORCH_BACKEND" not in environment:
            chosen = environment | {"UV_TORCH_BACKEND": "auto"}
            if resolves(command, chosen):
                environment = chosen
            else:
                print(
                    "PyTorch's own index, which has a build for each kind of machine, cannot be"
                    " used: installing the build that the package index has.",
                    flush=True,
                )
        if subprocess.run(command, env=environment).returncode == 0:
            return 0
        print(f"{uv} could not install: pip tries.", flush=True)
    return subprocess.run([python, "-m", "pip", "install", "--quiet", *arguments]).returncode


def install_uv(python: str) -> str | None:
    """Return the path of a uv that pip installs into the environment; None if pip cannot."""
    quiet = ["--quiet", "--disable-pip-version-check"]
    done = subprocess.run([python, "-m", "pip", "install", *quiet, "uv"])
    return str(Path(python).with_name("uv")) if done.returncode == 0 else None


def pip_settings(python: str) -> dict[str, str]:
    """Return pip's configuration as variables of uv's; what is set for uv already stays."""
    listed = subprocess.run(
        [python, "-m", "pip", "config", "list"], capture_output=True, text=True
    ).stdout
    found: dict[str, str] = {}
    for line in listed.splitlines():  # :env:.cert='/etc/...', then global.cert='/etc/...'
        key, _, value = line.partition("=")
        variable = SHARED.get(key.rpartition(".")[2])
        if variable is not None and variable not in os.environ:
            found.setdefault(variable, ",".join(ast.literal_eval(value).split()))
    return found


def resolves(command: list[str], environment: dict[str, str]) -> bool:
    """Return whether uv finds every package, without a second try where nobody answers."""
    tried = subprocess.run(
        [*command, "--dry-run"], env=environment | {"UV_HTTP_RETRIES": "0"}, capture_output=True
    )
    return tried.returncode == 0


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
