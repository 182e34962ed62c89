"""The model card of an exported model or adapter, README.md in its folder, with the metadata of the
Hugging Face hub. It is made only from the files of the run folder.

It holds no local path and no secret: of a path on this machine the name of its file or folder is
left.
"""

import json
import logging
import math
import re
import shlex
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import yaml
from huggingface_hub import EvalResult, ModelCard, ModelCardData, try_to_load_from_cache
from huggingface_hub.errors import HFValidationError

from common.config import ADAPTER, ConfigError, flat, hide_secrets, name_folder
from common.report import page
from common.report.completions import cut, find_evaluations
from common.report.run_folder import (
    RESULT,
    arguments,
    find_facts,
    find_measures,
    load,
    read_rows,
    read_run,
)
from common.system import (
    EXIT_SIGNAL,
    FAILED,
    OVERRIDES,
    events,
    markdown_cell,
    markdown_table,
    safe_read,
    visible,
    write_text,
)
from common.task import plain

log = logging.getLogger("clutch")

CARD = "README.md"
EXPORTS = ("adapter", "model")  # folders of a run that a card is written into
HERE = "FOLDER_OR_HUB_ID"  # the place of the folder's own name in the code that loads it
LIBRARY = "clutch"  # the tag of this project's models
_LONGEST = 1200  # the most characters of a prompt, of a completion and of an answer
_LONGEST_LINE = 400  # the most characters of a fact
_LONGEST_COMMAND = 3000
_MOST_MEASURES = 40
_MOST_LAYERS = 12  # the most kinds of adapted layers that are named
_LOOKED_AT = 2000  # the most held-out rows that are looked at for a failure
_PATHS = ("path", "dir", "folder", "file", "source", "target", "train", "test", "python", "text")
_HUB_ID = re.compile(r"[A-Za-z0-9][\w.-]*/[\w.-]+")
_DATA = re.compile(
    r"\.(jsonl?|ndjson|csv|tsv|txt|parquet|arrow|feather|xlsx|gz|bz2|xz|zst|zip|py|yaml|gguf)$",
    re.I,
)

Content = dict[str, Any]


def write_or_warn(folder: Path, loaded_by: str | None = None) -> None:
    """Write the cards of a run without failing it.

    Args:
        folder: the run folder.
        loaded_by: a text with the function that loads the model in brackets; None = a language
            model.
    """
    for name in EXPORTS:
        if (folder / name).is_dir():
            try:
                write_text(folder / name / CARD, make(folder, name, loaded_by))
            except Exception as error:
                log.warning(
                    "%s could not be written (%s: %s)",
                    *(folder / name / CARD, type(error).__name__, error),
                )


def find_exports(folder: Path, then: str) -> list[Path]:
    """Return the exported folders of a run, in the order of `EXPORTS`.

    Args: then: what is done with them afterwards, such as "publish it".
    Raises: ConfigError if there are none, or one has no weights.
    """
    page.check_folder(folder)
    again = f"{name_folder(folder)} resume=auto"
    if measured := [n for n in ("scaling", "prediction") if (folder / f"{n}.json").is_file()]:
        raise ConfigError(f"{folder} has trained no model: it has measured {measured[0]}.json.")
    if not (folder / "result.json").is_file():
        failed = safe_read.read(folder / FAILED, {"code": int, "error": str})
        why, first = "the run has not ended", ""
        if failed and failed["code"] != EXIT_SIGNAL:
            why, first = f"the run has failed: {failed['error'].rstrip('.')}", "Correct that. "
        raise ConfigError(
            f"{folder} has no result yet: {why}. {first}Go on with it ({again}), and {then} then."
        )
    there = [folder / name for name in EXPORTS if (folder / name).is_dir()]
    if not there:
        raise ConfigError(
            f"{folder} has neither model/ nor adapter/: they have been removed. The command of the"
            f" run in another folder writes them again."
        )
    for export in there:
        if not any(export.glob("*.safetensors")):
            raise ConfigError(
                f"{export} has no weights (*.safetensors): they have been removed. The command of"
                " the run in another folder writes them again."
            )
    return there


def make(folder: Path, name: str, loaded_by: str | None = None) -> str:
    """Return the text of the card of FOLDER/NAME.

    Args: folder: a run folder with result.json; name: one of `EXPORTS`; loaded_by: as for
    `write_or_warn`.
    Raises: ConfigError if a file of the run is damaged.
    """
    with safe_read.reading(folder):
        story = _Story(folder, name, loaded_by)
        parts = [
            f"# {markdown_cell(story.title)}",
            story.describe_verdict(),
            _bullets(story.find_origin()),
            story.show_measures(),
            story.show_others(),
            story.show_failure(),
            "## Cost\n\n" + _bullets(story.find_costs()),
            story.show_making(),
            story.show_loading(),
        ]
        metadata = story.find_metadata()
    text = "\n\n".join(part for part in parts if part)
    card = f"---\n{metadata.to_yaml()}\n---\n\n{text}\n".encode("utf-8", "replace").decode()
    return str(ModelCard(hide_secrets(card)))


class _Story:
    """The texts and numbers of a card, without local paths.

    Attributes:
        base: the hub id of the base model, or the name of its folder; "" = built by the run.
        adapts: whether the exported folder holds an adapter.
    """

    def __init__(self, folder: Path, name: str, loaded_by: str | None) -> None:
        self.folder, self.name, self.loaded_by = folder, name, loaded_by
        self.saved = read_run(folder, "config", "versions", "commit", "device")
        self.config: Content = self.saved["config"]
        self.result: Content = load(folder / "result.json", RESULT) or {}
        self.history = events(folder / "metrics.jsonl")
        self.hidden = _find_hidden(folder, self.config)
        self.model: Content = self.config.get("model") or {}
        self.path: str = self.model.get("path") or ""
        self.is_language_model = loaded_by is None and "model" not in self.config["algo"]
        self.base = self._short(self.path) if self.is_language_model else ""
        self.adapts = (folder / name / ADAPTER).is_file()
        after = find_evaluations(folder / "completions")
        self.rows = read_rows(after[-1], _LOOKED_AT) if after else []

    def _short(self, path: str) -> str:
        """Return a hub id as it is, and the name of a local folder; for RUN/model, that of the
        run.
        """
        if not path or not is_local(path):
            return path
        parts = [part for part in re.split(r"[\\/]+", path) if part not in ("", ".", "..", "~")]
        inside = len(parts) > 1 and parts[-1] in EXPORTS
        return parts[-2 if inside else -1] if parts else "model"

    def _hide(self, text: str, own: bool = True) -> str:
        """Return a text without local paths and secrets, which must go before a text is cut.

        Args: own: whether it is a text of the project's, of which everything that looks like a
        path is hidden; in a text of a model, only paths of this run are.
        """
        for path, name in self.hidden:
            text = text.replace(path, name)
        text = hide_secrets(text)
        return hide_paths(text) if own else text

    # --- metadata

    @property
    def title(self) -> str:
        algo, task = self.result["algo"], self._hide(self.result["task"])
        model = self.base or self._hide(self.result["model"])
        made = "adapter of" if self.adapts else "trained from" if self.base else "trained:"
        what = f"{made} {model}" if self.base or self.adapts else f"{model}, trained"
        return _shorten(f"{what} by {algo} on {task}", 200)

    @property
    def pipeline(self) -> str | None:
        """The hub's name of what the model does; None if it has none."""
        if self.is_language_model:
            return "text-generation"
        texts = (self.folder / self.name / "tokenizer.json").is_file()
        return "text-classification" if texts else None

    def find_metadata(self) -> ModelCardData:
        """Return the metadata of the hub."""
        told = self._read_base_card()
        tags = [LIBRARY, self.result["algo"], self._hide(self.result["task"])]
        tags += ["lora"] if self.adapts else []
        tags += [self.model["quantize"]] if self.model.get("quantize") else []
        languages = (self.config.get("task") or {}).get("target_language") or told.get("language")
        license_id = told.get("license")
        more: Content = {}
        if license_id is None:
            license_id, more["license_name"] = "other", "not-stated"
            if self.base and not is_local(self.path):
                more |= {"license_name": "that-of-the-base-model"}
                more |= {"license_link": f"https://huggingface.co/{self.base}"}
        else:
            more |= {key: told.get(key) for key in ("license_name", "license_link")}
        hub_id = self.base if self.base and not is_local(self.path) else None
        if hub_id:
            more["base_model_relation"] = "adapter" if self.adapts else "finetune"
        library = "peft" if self.adapts else "transformers" if self.is_language_model else "pytorch"
        return ModelCardData(
            base_model=hub_id,  # the name of a local folder may be that of another model
            datasets=self._find_datasets() or None,
            language=languages,
            library_name=library,
            license=license_id,
            pipeline_tag=self.pipeline,
            tags=list(dict.fromkeys(_slug(str(tag)) for tag in tags)),
            model_name=_slug(f"{self.base.rpartition('/')[2] or self.result['model']}-"
                             f"{self.result['algo']}-{self._hide(self.result['task'])}"),
            eval_results=self._find_results() or None,
            **{key: value for key, value in more.items() if value is not None},
        )  # fmt: skip

    def _read_base_card(self) -> Content:
        """Return the metadata of the base model's card, as far as it is on this machine."""
        local = Path(self.path).expanduser() / CARD if self.path else None
        found: Any = local if local is not None and local.is_file() else None
        if found is None and self.base and not is_local(self.path):
            try:
                found = try_to_load_from_cache(
                    self.path, CARD, revision=self.saved.get("model_commit")
                )
            except HFValidationError:
                found = None
        if not isinstance(found, str | Path):
            return {}
        try:
            data = ModelCard.load(found, ignore_metadata_errors=True).data.to_dict()
        except (ValueError, TypeError, OSError, yaml.YAMLError):
            return {}
        kinds = {"license": str, "license_name": str, "license_link": str, "language": (str, list)}
        return {key: data[key] for key, kind in kinds.items() if isinstance(data.get(key), kind)}

    def _find_datasets(self) -> list[str]:
        """Return the hub ids of the data sets that were trained on."""
        task = self.config.get("task") or {}
        given = [task.get(key) for key in ("path", "dataset")]
        ids = [one for one in given if isinstance(one, str) and _HUB_ID.fullmatch(one)]
        return [one for one in ids if not is_local(one) and not _DATA.search(one)]

    def _find_results(self) -> list[EvalResult]:
        """Return the measures after training for `model-index`."""
        results = []
        for name, value in list(self.result["metrics"]["after"].items())[:_MOST_MEASURES]:
            if not isinstance(value, int | float) or not math.isfinite(value):
                continue
            other, _, measure = name.rpartition("/")
            task = self._hide(other or self.result["task"])
            sure = self.result.get("intervals", {}).get(name) or {}
            before = self.result["metrics"]["before"].get(name)
            facts = {"before": before, "interval_95": sure.get("after")}
            facts |= {"change_interval_95": sure.get("change"), "p_value": sure.get("p_value")}
            facts = {
                key: _round(one, 3 if key == "p_value" else 9)
                for key, one in facts.items()
                if _is_finite(one)
            }
            results.append(
                EvalResult(
                    task_type=self.pipeline or "other",
                    dataset_type=_slug(task),
                    dataset_name=_shorten(task, 100),
                    dataset_split="test",
                    metric_type=_slug(measure).replace("-", "_"),
                    metric_name=_shorten(measure, 100),
                    metric_value=_round(value),
                    metric_args=facts or None,
                )
            )
        return results

    # --- parts of the text

    def describe_verdict(self) -> str:
        """Return whether it has learnt, in words."""
        verdict = self.result.get("verdict") or ""
        if not verdict:
            name, values = self.result["metric"], self.result
            verdict = f"held-out {name} {values['before']:.2f} -> {values['after']:.2f}"
        return _sentence(self._hide(verdict))

    def find_origin(self) -> dict[str, str]:
        """Return what was trained, on what and how."""
        adapter, rows = self.model.get("adapter") or {}, {}
        if self.base:
            commit = self.saved.get("model_commit")
            rows["base model"] = self.base + (f" at {commit}" if commit else "")
            if is_local(self.path):
                rows["base model"] += ", a local folder"
            if self.model.get("gguf_file"):
                rows["base model"] += f", {Path(self.model['gguf_file']).name}"
        elif self.is_language_model:
            rows["base model"] = "none: a small model that the run built and pre-trained itself"
        quantized = self.model.get("quantize")
        if self.adapts:
            given = self._read_adapter()
            rows["trained"] = "a low-rank adapter" + (f" of {given}" if given else "")
        elif adapter:
            rows["trained"] = "a low-rank adapter, which is merged into these weights"
        else:
            rows["trained"] = "all weights"
        if quantized:
            rows["trained"] += f", with the base's linear layers in {quantized}"
        task = self.config.get("task") or {}
        sources = [
            self._hide(f"{key}={value}")
            for key, value in flat(task).items()
            if isinstance(value, str) and value and key.rpartition(".")[2] in
            (*_PATHS, "dataset", "test_path", "test_source", "test_target", "dataset_split")
        ]  # fmt: skip
        rows["task"] = self._hide(self.result["task"])
        if sources:
            rows["data"] = ", ".join(sources)
        rows["method"] = self.result["algo"] + self._describe_settings()
        if by := self.result.get("answered_by"):
            rows["measured"] = f"after training, {self._hide(by)}, not these weights alone"
        return rows

    def _read_adapter(self) -> str:
        try:
            path = self.folder / self.name / ADAPTER
            found = json.loads(path.read_text(encoding="utf-8"))
            named = _describe_layers(found.get("target_modules") or [])
            return f"rank {found['r']}, alpha {found['lora_alpha']}, on {named}"
        except (OSError, ValueError, KeyError, TypeError):
            return ""

    def _describe_settings(self) -> str:
        """Return the numbers that most depends on, as far as the algorithm has them."""
        algo = self.config["algo"]
        kinds = ("lr", "sigma", "members", "samples_per_prompt", "prompts_per_step", "epochs")
        shown = [
            f"{key}={algo[key]}"
            for key in ("method", "loss", "advantage", *kinds)
            if isinstance(algo.get(key), int | float | str) and not isinstance(algo[key], bool)
        ]
        return f" ({', '.join(shown)})" if shown else ""

    def _measures(self, others: bool) -> str:
        rows = [
            {key: self._hide(text) for key, text in row.items()}
            for row in find_measures(self.result, [])
            if ("/" in row["held-out"]) == others
        ]
        more = len(rows) - _MOST_MEASURES
        note = f"\n\n{more} more are in the run's result.json." if more > 0 else ""
        return markdown_table(rows[:_MOST_MEASURES]) + note if rows else ""

    def show_measures(self) -> str:
        """Return the table of held-out measures."""
        table = self._measures(others=False)
        count = f"{len(self.rows):,} held-out examples" if self.rows else "the held-out examples"
        if len(self.rows) == _LOOKED_AT:
            count = "the held-out examples"
        return (
            f"## Held-out measures\n\nOn {count}, which were not trained on. Intervals are 95 %,"
            f" and the test is of the change, paired by example.\n\n{table}"
        )

    def show_others(self) -> str:
        """Return the measures of other tasks and texts: what the model forgot."""
        table = self._measures(others=True)
        if not table:
            return (
                "## What it forgot\n\nNot measured: the run had neither `evaluate.also` nor"
                " `evaluate.text`."
            )
        return f"## What it forgot\n\nOther tasks and texts, before and after.\n\n{table}"

    def show_failure(self) -> str:
        """Return a held-out example that the model still gets wrong."""
        head = "## A failure\n\n"
        if wrong := self._find_misclassified():
            return head + _sentence(wrong)
        if not self.rows:
            return ""
        row = self._find_wrong()
        if row is None:
            return f"{head}None among {len(self.rows):,} held-out examples."
        texts = {
            "Prompt:": plain(row["prompt"]),
            "Completion:": row["completion"],
            "Right answer:": str(row["answer"]),
        }
        blocks = [f"{title}\n\n{self._show_text(text)}" for title, text in texts.items()]
        return f"{head}A held-out example that it still gets wrong.\n\n" + "\n\n".join(blocks)

    def _show_text(self, text: str) -> str:
        """Return a text of the task or of a model as a code block."""
        shown = self._hide(visible(text, kept="\n\t"), own=False)
        return _fence(cut(shown, _LONGEST))

    def _find_wrong(self) -> Content | None:
        """Return the first held-out row with the least score of the headline; None if all have the
        most that one can have.
        """
        name = self.result["metric"]
        scored = [
            (value, place)
            for place, row in enumerate(self.rows)
            if _is_finite(value := (row.get("scores") or {}).get(name)) and value is not None
        ]
        if not scored:
            unlike = (r for r in self.rows if r["completion"].strip() != str(r["answer"]).strip())
            return next(unlike, None)
        least, place = min(scored)
        most = 1.0 if max(value for value, _ in scored) <= 1 else 100.0
        return self.rows[place] if least < most else None

    def _find_misclassified(self) -> str:
        """Return a sentence about a test row that a classifier gets wrong; "" if there is none."""
        path = self.folder / "predictions.jsonl"
        for row in events(path, dict) if path.is_file() else ():
            if row.get("class") != row.get("predicted"):
                place = self._hide(str(row.get("place") or f"row {row.get('row')}"))
                return (
                    f"test {'' if row.get('place') is None else 'row '}{markdown_cell(place)} is"
                    f" {markdown_cell(row.get('class'))}, and it says"
                    f" {markdown_cell(row.get('predicted'))} with probability"
                    f" {row.get('probability')}"
                )
        return ""

    def find_costs(self) -> dict[str, str]:
        """Return tokens, seconds and energy, and what they were spent on."""
        facts = self._facts()
        kept = ("device", "numbers", "attention", "steps", "exported", "best iteration")
        kept += ("generated", "speed", "peak memory", "GPU utilisation", "GPU memory", "energy")
        rows = {key: facts[key] for key in kept if key in facts}
        rows["seconds"] = f"{self.result['seconds']:,.0f} of training, without evaluations"
        if ended := self.result.get("ended_by"):
            rows["ended by"] = self._hide(ended)
        if "energy" not in rows:
            rows["energy"] = "not measured"
        return rows

    def _facts(self) -> dict[str, str]:
        facts = find_facts(self.saved, self.result, self.history)
        return {key: self._hide(text) for key, text in facts.items()}

    def show_making(self) -> str:
        """Return the command, the commit and the versions."""
        facts = self._facts()
        rows = {key: facts[key] for key in ("made with", "commit", "seed") if key in facts}
        command = ""
        if (self.folder / OVERRIDES).exists():
            given = shlex.join(self._hide(one) for one in arguments(self.folder))
            line = f"python launch.py {given}".strip()
            command = f"\n\n{_fence(_shorten(visible(line), _LONGEST_COMMAND))}"
        return f"## How it was made\n\n{_bullets(rows)}{command}"

    def show_loading(self) -> str:
        """Return the code that loads it."""
        if not self.is_language_model:
            named = re.search(r"\(([\w.]+)\)", self.loaded_by or "")
            of = f"`{named[1]}`" if named else "the algorithm's own loader"
            return f"## How to load it\n\nWith Clutch: {of} of this folder."
        lines = ["from transformers import AutoModelForCausalLM, AutoTokenizer", ""]
        note = ""
        if self.adapts:
            lines.insert(0, "from peft import PeftModel")
            base = json.dumps(self.base or "FOLDER_OF_THE_BASE_MODEL")
            pinned = self.saved.get("model_commit")
            pin = f", revision={json.dumps(pinned)}" if pinned else ""
            lines += [
                f"base = AutoModelForCausalLM.from_pretrained({base}{pin})",
                f'model = PeftModel.from_pretrained(base, "{HERE}")',
            ]
            if self.model.get("quantize"):
                note = (
                    f"\n\nIt was trained beside weights in {self.model['quantize']}; beside"
                    " unquantised ones its answers may differ a little."
                )
            if not self.base:
                note += (
                    "\n\nIts base is a small model that the run built, in the folder that"
                    f" `{ADAPTER}` named on the machine of the run."
                )
        else:
            lines.append(f'model = AutoModelForCausalLM.from_pretrained("{HERE}")')
        lines.append(f'tokenizer = AutoTokenizer.from_pretrained("{HERE}")')
        return "## How to load it\n\n" + _fence("\n".join(lines), "python") + note


# --- paths


def is_local(path: str) -> bool:
    """Return whether a text is a path on this machine, or looks like one, and is no hub id."""
    rooted = re.match(r"[~./\\]|[A-Za-z]:[\\/]", path) is not None
    if rooted or "\\" in path or path.count("/") > 1:
        return True
    try:
        return Path(path).expanduser().exists()
    except (OSError, ValueError, RuntimeError):
        return False


def hide_paths(text: str) -> str:
    """Return a text in which the name of the file or folder stands for each path. Hub ids, pages of
    docs/ and addresses stay.
    """

    def shorten(found: re.Match[str]) -> str:
        word = found[0].rstrip(".:") if not found[0].endswith("..") else found[0]
        rest = found[0][len(word) :]
        local = is_local(word) or bool(_DATA.search(word))
        if "://" in word or not re.search(r"\w", word) or word.startswith("docs/") or not local:
            return found[0]
        name = next((part for part in re.split(r"[\\/]+", word)[::-1] if part), "")
        return ("..." if name in ("", "~", ".", "..") else name) + rest

    return re.sub(r"[^\s,'\"\[\]{}()=;|<>`]*[/\\][^\s,'\"\[\]{}()=;|<>`]*", shorten, text)


def _find_hidden(folder: Path, config: Content) -> list[tuple[str, str]]:
    """Return each path of a run that a text may hold, with its name, the longest first."""
    paths = {str(folder.resolve()), str(folder.absolute()), str(Path.cwd()), str(Path.home())}
    paths |= set(_texts(config))
    names = {
        path: re.split(r"[\\/]+", path.rstrip("\\/"))[-1]
        for path in paths
        if re.match(r"~?[/\\]|[A-Za-z]:[\\/]", path) and len(path) > 3
    }
    names[str(Path.home())] = "~"
    return sorted(names.items(), key=lambda pair: -len(pair[0]))


def _texts(node: Any) -> Iterator[str]:
    """Yield the texts in nested dicts and lists."""
    if isinstance(node, str):
        yield node
    elif isinstance(node, dict):
        for value in node.values():
            yield from _texts(value)
    elif isinstance(node, list):
        for value in node:
            yield from _texts(value)


# --- layout


def _bullets(rows: dict[str, str]) -> str:
    return "\n".join(
        f"- {name}: {markdown_cell(_shorten(text, _LONGEST_LINE))}" for name, text in rows.items()
    )


def _shorten(text: str, longest: int) -> str:
    """Return a text; if it is longer than `longest` characters, its first whole words and dots."""
    if len(text) <= longest:
        return text
    end = max(text.rfind(" ", 0, longest + 1), text.rfind(",", 0, longest))
    if end < longest // 2:  # a single long word
        return cut(text, longest)
    return f"{text[:end].rstrip(' ,;')} ..."


def _describe_layers(targets: str | Sequence[str]) -> str:
    """Return the layers that an adapter changes.

    Args: targets: a pattern of names, or a list of names or of the ends of names.
    """
    if isinstance(targets, str):
        return targets
    kinds = sorted({target.rpartition(".")[2] for target in targets})
    text = ", ".join(kinds[:_MOST_LAYERS])
    if (more := len(kinds) - _MOST_LAYERS) > 0:
        text += f" and {more} more"
    whole = any("." in target for target in targets)
    return f"{len(targets)} linear layers: {text}" if whole else text


def _sentence(text: str) -> str:
    text = " ".join(visible(_shorten(text, _LONGEST), kept="\n").split())
    return text[:1].upper() + text[1:] + ("" if text.endswith((".", "!", "?")) else ".")


def _fence(text: str, language: str = "") -> str:
    """Return a code block whose fence is longer than any run of backticks in the text."""
    longest = max((len(run) for run in re.findall(r"`+", text)), default=0)
    fence = "`" * max(3, longest + 1)
    return f"{fence}{language or 'text'}\n{text}\n{fence}"


def _slug(text: str) -> str:
    """Return a text in the letters that the hub's tags and names have."""
    letters = re.sub(r"[^a-z0-9._]+", "-", text.lower()).strip("-._")
    return letters[:90].rstrip("-._") or "unnamed"


def _round(value: Any, digits: int = 9) -> Any:
    """Return a number, or each number of a list, with `digits` significant digits, so that a small
    one does not become 0.
    """
    if isinstance(value, Sequence):
        return [_round(one, digits) for one in value]
    return float(f"{value:.{digits}g}")


def _is_finite(value: Any) -> bool:
    if isinstance(value, Sequence) and not isinstance(value, str):
        return bool(value) and all(map(_is_finite, value))
    return isinstance(value, int | float) and math.isfinite(value)
