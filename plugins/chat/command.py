"""Try a model: complete prompts that are typed, piped or given.

    python -m common.chat outputs/mine                        # type prompts; Ctrl-D ends
    python -m common.chat outputs/mine --prompt "seven"
    python -m common.chat outputs/mine --engine vllm --engine-python .vllm/bin/python
    cat prompts.txt | python -m common.chat FOLDER_OR_HUB_ID  # one prompt per line, but blank ones

For the result of a run, a prompt has the form of the training prompts: the typed text fills the
field of the run's template, after the same system text and examples. For other models, it is a
conversation if the tokenizer has a chat template. Prompts are independent of each other. The
sampler is the one that runs use.
"""

import argparse
import atexit
import json
import logging
import os
import re
import shutil
import string
import sys
import tempfile
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch

from common.config import (
    ADAPTER,
    REBUILD,
    ConfigError,
    ModelConfig,
    SamplingConfig,
    build,
    list_options,
    name_folder,
    shipped,
)
from common.device import Device, native_bf16, total_gb, watch_load
from common.distributed import Context
from common.engine import Engine, Requests, Setup, open_engine
from common.episodes import Turns
from common.model import Decoder, check_ids, encode_prompts, load_model, merge_folder, stop_ids
from common.report import run_folder
from common.rollout import sample
from common.sampling import Sampler
from common.system import EXIT_CONFIG, EXIT_INTERRUPTED, import_named, visible
from common.task import Messages, TaskFeatures, plain
from common.task import build as build_task
from common.tasks import guess_encoding


def model_of(given: str, step: int | None = None) -> tuple[str, str | None, str | Messages | None]:
    """Return the model's folder or hub id and, if `given` is a run, its adapter and one of its
    prompts.

    Args: step: the step of a run whose model is rebuilt; None = the exported model.
    """
    folder = Path(given).expanduser()
    if not (folder / "run.yaml").is_file():
        if step is not None:
            raise ConfigError(f"--step {step}: {given} is no run. Give a run of algo=eggroll.")
        return given, None, None
    rows = folder / "completions" / "after.jsonl"
    first = rows.read_text(encoding="utf-8").split("\n", 1)[0] if rows.is_file() else ""
    prompt = json.loads(first)["prompt"] if first else None
    if step is not None:
        return *rebuild(folder, step), prompt
    if (folder / "adapter" / ADAPTER).is_file():
        settings = json.loads((folder / "adapter" / ADAPTER).read_text(encoding="utf-8"))
        return settings["base_model_name_or_path"], str(folder / "adapter"), prompt
    if measured := [n for n in ("scaling", "prediction") if (folder / f"{n}.json").is_file()]:
        raise ConfigError(f"{given} has trained no model: it has measured {measured[0]}.json.")
    if not (folder / "model" / "config.json").is_file():
        raise ConfigError(
            f"{given} has no model/ yet: the run has not ended. Go on with it"
            f" ({name_folder(folder)} resume=auto), or give the folder of a model."
        )
    config = json.loads((folder / "model" / "config.json").read_text(encoding="utf-8"))
    if "model_type" not in config:  # which every language model's has
        raise ConfigError(f"{given} holds a classifier: its algorithm's page in docs/ says more.")
    return str(folder / "model"), None, prompt


def rebuild(folder: Path, step: int) -> tuple[str, str | None]:
    """Return the model's folder or hub id, and the adapter's folder if there is one, of a step of a
    run of EGGROLL, rebuilt from RUN/run.egg. Raises: ConfigError if that cannot be done.
    """
    make = import_named(f"--step={step}", REBUILD, "rebuild_step", "Leave --step out.")
    out = tempfile.mkdtemp(prefix="clutch-chat-")
    atexit.register(shutil.rmtree, out, ignore_errors=True)
    made = Path(make(folder, step, Path(out)))
    if not (made / ADAPTER).is_file():
        return str(made), None
    settings = json.loads((made / ADAPTER).read_text(encoding="utf-8"))
    return settings["base_model_name_or_path"], str(made)


def template_of(given: str, shown: str | Messages | None) -> tuple[str, str] | None:
    """Return the text before and after the only field of the run's task.template, if it has exactly
    one field and produced the given prompt.
    """
    path = Path(given).expanduser() / "run.yaml"
    saved = run_folder.read_run(path.parent, "config") if path.is_file() else {}
    task = (saved["config"].get("task") or {}) if saved else {}
    template = task.get("template") or ""
    if task.get("name") == "custom":
        parts = list(string.Formatter().parse(template))
    else:  # which have no other braces than those of their field
        parts = [(text, "question") for text in re.split(r"\{(?:question|source)\}", template)]
        parts[-1] = (parts[-1][0], "")
    fields = [number for number, (_, name, *_) in enumerate(parts, start=1) if name]
    if len(fields) != 1:
        return None
    texts = [text for text, *_ in parts]
    before, after = "".join(texts[: fields[0]]), "".join(texts[fields[0] :])
    if shown is None:
        return before, after
    last = shown[-1]["content"] if isinstance(shown, list) else shown
    return (before, after) if last.startswith(before) and last.endswith(after) else None


def prompt_like(
    text: str, shown: str | Messages | None, system: str | None, chat: bool
) -> str | Messages:
    """Return `text` as a prompt in the form of a run's prompt.

    Args:
        shown: a prompt of the run.
        system: the system text; None = the run's.
    """
    if not chat:
        return text
    messages = shown[:-1] if isinstance(shown, list) else []
    if system is not None:
        first = [{"role": "system", "content": system}] if system else []
        messages = first + [m for m in messages if m["role"] != "system"]
    return [*messages, {"role": "user", "content": text}]


def prompts(given: str | None) -> Iterator[str]:
    """Yield the given prompt, or else the lines of standard input that are not blank."""
    if given is not None:
        yield given
    elif sys.stdin.isatty():
        with suppress(EOFError):
            while True:
                if (line := input("> ")).strip():
                    yield line
        print()
    else:
        for number, raw in enumerate(sys.stdin.buffer, start=1):
            try:
                line = raw.decode().removesuffix("\n").removesuffix("\r")
            except UnicodeDecodeError:
                advice = f"Convert it, for example with iconv -f {guess_encoding(raw)} -t UTF-8."
                text = f"line {number} of standard input is not UTF-8. {advice}"
                raise ConfigError(text) from None
            if line.strip():
                yield line


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    about = "Try a model that a run trained, or any other."
    command_line = argparse.ArgumentParser("python -m common.chat", description=about)
    options: dict[str, dict[str, Any]] = {
        "model": {"metavar": "MODEL", "help": "a run or model folder, or an id of the HF hub"},
        "--step": {"type": int, "help": "the model after this step of a run of algo=eggroll"},
        "--prompt": {"help": "instead of lines of standard input, blank ones skipped"},
        "--play": {
            "type": int,
            "metavar": "N",
            "help": "held-out episode N of the run's environment",
        },
        "--system": {"help": "system text; for a run's model, instead of the run's"},
        "--plain": {"action": "store_true", "help": "no chat template: go on with the text"},
        "--temperature": {"type": float, "default": 0.0, "help": "0 = greedy, as reports are (0)"},
        "--max-new-tokens": {"type": int, "default": 256, "help": "longest answer (256)"},
        "--seed": {"type": int, "default": 0, "help": "of the draws (0)"},
        "--adapter": {"help": "folder of a LoRA adapter on top"},
        "--engine": {"choices": list_options("engine"), "default": "native", "help": "(native)"},
        "--engine-python": {"metavar": "PYTHON", "help": "of an environment that has vLLM"},
        "--device": {"choices": ("auto", "cpu", "cuda"), "default": "auto"},
    }
    for name, option in options.items():
        command_line.add_argument(name, **option)
    return command_line


def open_sampler(
    given: argparse.Namespace, model: Any, tokenizer: Any, device: torch.device
) -> Engine:
    """Open the chosen engine. Raises: ConfigError if it cannot be opened."""
    about: Any = {"pad_id": tokenizer.pad_token_id, "stop_ids": stop_ids(model, tokenizer)}
    if given.engine == "native":
        if given.engine_python is not None:
            raise ConfigError("--engine-python has no effect without --engine vllm. Leave it out.")
        return Sampler(model, rows=1, **about)
    here = Device(device, device.type, total_gb(device), matches=True)
    folder = tempfile.mkdtemp(prefix="clutch-chat-")  # of its log
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    context = Context(0, 1, here, Path(folder))
    setup = Setup(model=model, context=context, rows=1, **about)
    node = dict(shipped(f"engine/{given.engine}.yaml"))
    node |= {"python": given.engine_python, "cache_gb": 1.0, "settings": {"enforce_eager": True}}
    return open_engine(node, setup)


def print_episode(
    given: argparse.Namespace, decode: Decoder, sampler: Engine, sampling: SamplingConfig
) -> None:
    """Play an episode of a run's environment, and print the conversation and its reward.

    Raises: ConfigError for a run without an environment, or without such an episode.
    """
    folder = Path(given.model).expanduser()
    saved = run_folder.read_run(folder, "config") if (folder / "run.yaml").is_file() else {}
    task: Any = build_task(saved["config"]["task"]) if saved else None
    if TaskFeatures(task).episode is None:
        raise ConfigError(f"--play: {given.model} is no run in an environment. Leave it out.")
    examples = task.examples("test")
    if not 0 <= given.play < len(examples):
        raise ConfigError(f"--play {given.play} is out of range. Give 0 to {len(examples) - 1}.")
    example = examples[given.play]
    prompt = task.prompt(example)
    new = sampling.max_new_tokens
    sampling.max_new_tokens = min(new, saved["config"]["algo"]["sampling"]["max_new_tokens"])
    requests = Requests(
        prompts=encode_prompts(decode.tokenizer, [prompt]),
        ids=[example.id],
        seed=given.seed,
        episodes=Turns.of(task, decode, [example]),
    )
    played: Any = sample(sampler, requests, sampling).texts(decode)[0]
    text = f"{plain(prompt)}{played}".strip()
    print(visible(text, kept="\n\t") if sys.stdout.isatty() else text)
    reward = "none" if played.reward is None else f"{played.reward:g}"
    print(f"turns {played.turns}, {played.stop}, reward {reward}")


def answer_all(given: argparse.Namespace) -> None:
    """Load the model and print a completion per prompt. Raises: ConfigError."""
    path, adapter, shown = model_of(given.model, given.step)
    if given.plain and given.system:
        raise ConfigError("--system has no effect with --plain. Leave out one of them.")
    asked = {"--prompt": given.prompt, "--system": given.system, "--plain": given.plain}
    if given.play is not None and (vain := [name for name, value in asked.items() if value]):
        raise ConfigError(f"{vain[0]} has no effect with --play. Leave out one of them.")
    if given.max_new_tokens < 1:
        raise ConfigError(f"--max-new-tokens {given.max_new_tokens} is too small. Give 1 or more.")
    values = {"max_new_tokens": given.max_new_tokens, "temperature": given.temperature}
    sampling = build(SamplingConfig, values | {"top_p": 1.0, "top_k": 0, "min_p": 0.0}, "sampling")
    if given.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError("--device cuda: there is no CUDA device. Use --device cpu.")
    device = torch.device("cuda" if given.device != "cpu" and torch.cuda.is_available() else "cpu")
    if device.type == "cpu":
        watch_load()
    dtype = torch.bfloat16 if device.type == "cuda" and native_bf16(device) else torch.float32
    options: dict[str, Any] = {"revision": None, "gguf_file": None, "attention": "sdpa"}
    folder = Path(given.model).expanduser()
    saved = (
        run_folder.read_run(folder, "config") if (folder / "run.yaml").exists() else {"config": {}}
    )
    trained = saved["config"].get("model") or {}
    options["attention"] = trained.get("attention") or "sdpa"
    if adapter is not None:  # of a run, beside the very weights that it was trained on
        keys = ("gguf_file", "chat_template_kwargs")
        options |= {"revision": saved.get("model_commit")} | {key: trained.get(key) for key in keys}
    config = ModelConfig(name="hf", path=path, **options)
    model, tokenizer = load_model(config, None, dtype, device, progress=False)
    if (adapter := given.adapter or adapter) is not None:
        model = merge_folder(model, adapter, f"the model {path}", "--adapter")
    sampler = open_sampler(given, model, tokenizer, device)
    decode = Decoder.of(model, tokenizer)
    if given.play is not None:
        print_episode(given, decode, sampler, sampling)
        return
    formed = shown is not None or tokenizer.chat_template is not None
    chat = formed and not given.plain and not isinstance(shown, str)
    chat = chat or given.system is not None
    template = template_of(given.model, shown)
    before, after = template or ("", "")
    if given.prompt is None and sys.stdin.isatty():
        form = "through its chat template" if chat and tokenizer.chat_template else "as plain text"
        print(f"{given.model}: prompts go in {form}, each alone. Ctrl-D ends.")
        if shown is not None:
            filled = ", task.template filled in" if template else ""
            one = plain(shown[-1:]) if isinstance(shown, list) else shown
            shown_prompt = visible(one.strip(), kept="\n\t")
            print(f"One of the run's{filled}: {shown_prompt}")
    for number, typed in enumerate(prompts(given.prompt)):
        text = typed if given.plain else f"{before}{typed}{after}"
        ids = encode_prompts(tokenizer, [prompt_like(text, shown, given.system, chat)])[0]
        check_ids(model, tokenizer, ids, "the prompt")
        room = sampler.context_length - len(ids)
        if room < 1:
            context = f"the model's context of {sampler.context_length}"
            raise ConfigError(f"a prompt of {len(ids)} tokens fills {context}. Shorten it.")
        sampling.max_new_tokens = min(given.max_new_tokens, room)
        requests = Requests(prompts=[ids], seed=given.seed, draw=number)
        completions = sample(sampler, requests, sampling)
        completion = completions.texts(decode)[0].strip()
        if sys.stdout.isatty():  # who reads a pipe gets what the model wrote
            completion = visible(completion, kept="\n\t")
        print(completion, flush=True)


def main() -> int:
    """Run the command line. Exit codes: 0 done, 2 a mistake of the user, 130 Ctrl-C."""
    # of its retries; what comes of them is said below
    logging.getLogger("huggingface_hub").setLevel(logging.ERROR)
    try:
        answer_all(parser().parse_args())
    except ConfigError as error:
        print(f"error: {error}", file=sys.stderr)
        return EXIT_CONFIG
    except KeyboardInterrupt:
        print(file=sys.stderr)
        return EXIT_INTERRUPTED
    except BrokenPipeError:  # Python would complain once more when it closes the pipe
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


if __name__ == "__main__":
    sys.exit(main())
