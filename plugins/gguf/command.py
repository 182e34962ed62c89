"""Write the model of a run as a GGUF file, for llama.cpp and ollama.

    python -m common.export outputs/mine --gguf q8_0             # outputs/mine/model-q8_0.gguf
    python -m common.export outputs/mine --gguf f16 --out m.gguf

An adapter is merged into its model first. The folder of a model or of an adapter, such as
RUN/iteration-3/model, can stand in place of the run.
"""

import argparse
import sys
from pathlib import Path
from typing import Any

import torch
from transformers import AutoTokenizer

from common.config import ADAPTER, ConfigError, ModelConfig
from common.model import load_model, merge_folder
from common.report import card, run_folder
from common.system import ending_tool, safe_read
from plugins.gguf import convert


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    about = "Write the model of a run as a GGUF file, for llama.cpp and ollama."
    command_line = argparse.ArgumentParser("python -m common.export", description=about)
    options: dict[str, dict[str, Any]] = {
        "run": {"type": Path, "metavar": "RUN", "help": "a run folder, such as outputs/mine"},
        "--gguf": {"choices": convert.TYPES, "required": True, "help": "how weights are stored"},
        "--out": {"type": Path, "metavar": "FILE", "help": "(RUN/model-TYPE.gguf)"},
    }
    for name, option in options.items():
        command_line.add_argument(name, **option)
    return command_line


def find_model(folder: Path) -> Path:
    """Return the folder of a run's model, or of its adapter. Raises: ConfigError if it has none."""
    if (folder / "config.json").is_file() or (folder / ADAPTER).is_file():
        return folder
    return max(card.find_exports(folder, "export it"))  # model, if there are both


def read(folder: Path, run: Path, kind: str) -> tuple[Any, Any]:
    """Return the model of a folder in float32, with its adapter merged into it, and the tokenizer.

    Args: run: the run folder, whose run.yaml knows more about the model below an adapter.
    Raises: ConfigError.
    """
    options: dict[str, Any] = {"revision": None, "gguf_file": None, "attention": "sdpa"}
    adapter = (folder / ADAPTER).is_file()
    path = str(folder)
    if adapter:
        saved = safe_read.read(folder / ADAPTER, dict)
        path, options["revision"] = saved["base_model_name_or_path"], saved.get("revision")
        if (run / "run.yaml").is_file():
            trained = run_folder.read_run(run, "config")["config"].get("model") or {}
            options["gguf_file"] = trained.get("gguf_file")
    else:
        architecture = safe_read.read(folder / "config.json", dict).get("model_type")
        if architecture not in convert.ARCHITECTURES:
            raise convert.explain_other(f"its architecture is {architecture}", folder, kind)
    given = ModelConfig(name="hf", path=path, **options)
    model, tokenizer = load_model(given, None, torch.float32, torch.device("cpu"), progress=False)
    if adapter:
        model = merge_folder(model, str(folder), f"the model {path}", str(folder))
        tokenizer = AutoTokenizer.from_pretrained(folder)
    return model, tokenizer


def export(given: argparse.Namespace) -> Path:
    """Run the command, and return the file. Raises: ConfigError."""
    convert.import_gguf()
    folder = find_model(given.run)
    path = given.out or given.run / f"model-{given.gguf}.gguf"
    if path.is_dir():
        raise ConfigError(f"--out {path} is a folder. Give a file, such as {path}/model.gguf.")
    model, tokenizer = read(folder, given.run, given.gguf)
    name = given.run.resolve().name
    try:
        convert.write(model, tokenizer, path, given.gguf, name)
    except ConfigError as error:
        raise convert.explain_other(str(error), folder, given.gguf) from None
    return path


def main() -> int:
    """Run the command line. Exit codes: 0 done, 2 a mistake of the user, 4 a full disk."""
    given = parser().parse_args()
    with ending_tool():
        path = export(given)
        print(f"{path}: {path.stat().st_size / 1e6:.1f} MB. Try it: llama-cli -m {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
