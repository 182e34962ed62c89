"""Put the model or the adapter of a run on the Hugging Face hub, with its card.

    python -m common.publish outputs/mine --repo USER/NAME --dry-run   # what would go
    python -m common.publish outputs/mine --repo USER/NAME             # private; --public

The token is that of `hf auth login`, or of HF_TOKEN. It is never printed.
"""

import argparse
import importlib
import json
import re
import shlex
import sys
import tempfile
from pathlib import Path
from typing import Any

from huggingface_hub import HfApi, ModelCard, constants, get_token
from huggingface_hub.errors import (
    HfHubHTTPError,
    HFValidationError,
    LocalTokenNotFoundError,
    OfflineModeIsEnabled,
)
from huggingface_hub.utils import disable_progress_bars, get_session, validate_repo_id

from common.config import ADAPTER, ConfigError, hide_secrets
from common.report import card
from common.system import ending_tool, first_line, safe_read

SHOWN = 40  # lines of the card that a dry run shows
_BASE = "base_model_name_or_path"  # of adapter_config.json


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    about = "Put the model or the adapter of a run on the Hugging Face hub, with its card."
    command_line = argparse.ArgumentParser("python -m common.publish", description=about)
    options: dict[str, dict[str, Any]] = {
        "run": {"type": Path, "metavar": "RUN", "help": "a run folder, such as outputs/mine"},
        "--repo": {"metavar": "USER/NAME", "help": "where it goes; made if it does not exist"},
        "--public": {"action": "store_true", "help": "everybody can see it (private)"},
        "--dry-run": {"action": "store_true", "help": "show what would go, and send nothing"},
        "--what": {"choices": card.EXPORTS, "help": "of a run that has both (adapter)"},
        "--base": {"metavar": "HUB_ID", "help": "the adapter's base, if it was a local folder"},
        "--license": {"metavar": "ID", "help": "such as apache-2.0, for the card"},
    }
    for name, option in options.items():
        command_line.add_argument(name, **option)
    return command_line


def find_export(folder: Path, what: str | None) -> Path:
    """Return the folder of a run that is sent. Raises: ConfigError if there is none."""
    there = [path.name for path in card.find_exports(folder, "publish it")]
    if what is not None and what not in there:
        raise ConfigError(
            f"--what {what}: {folder} has no {what}/. Leave it out, or give {there[0]}."
        )
    return folder / (what or there[0])


def check_repo(repo: str | None) -> str:
    """Return the name of a repository. Raises: ConfigError if it is not USER/NAME."""
    if not repo:
        raise ConfigError(
            "--repo is missing. Give USER/NAME, your name on the hub and the model's."
        )
    try:
        validate_repo_id(repo)
    except HFValidationError as error:
        raise ConfigError(f"--repo {repo!r} is not USER/NAME: {first_line(error)}") from None
    if not re.fullmatch(r"[\w.-]+/[\w.-]+", repo):
        raise ConfigError(f"--repo {repo!r} is not USER/NAME. Give both, such as me/my-model.")
    return repo


def check_license(license_id: str | None) -> None:
    """Raise ConfigError if a licence does not have the form of the hub's ids."""
    if license_id is not None and not re.fullmatch(r"[a-z0-9][a-z0-9.+-]*", license_id):
        raise ConfigError(
            f"--license {license_id!r} is none of the hub's licences, which are written as"
            " apache-2.0, mit or llama3.2. Give one of them, or other."
        )


def make_card(given: argparse.Namespace, export: Path) -> str:
    """Return the card's text, with the repository's name in place of the folder's. A card that is
    there and has been changed stays as it is otherwise.
    """
    path = export / card.CARD
    text = path.read_text(encoding="utf-8") if path.is_file() else ""
    try:
        kept = card.LIBRARY in (ModelCard(text).data.get("tags") or []) if text else False
    except (ValueError, TypeError) as error:
        advice = "Correct it, or remove it: it is then written again."
        raise ConfigError(f"{path} cannot be read: {first_line(error)}. {advice}") from None
    if not kept:  # of an earlier version, or peft's
        text = card.make(given.run, export.name)
    made = ModelCard(text.replace(card.HERE, given.repo))
    if given.license is not None:
        made.data["license"] = given.license
        for key in ("license_name", "license_link"):
            made.data.pop(key)
    if given.base is not None:
        made.data["base_model"] = given.base
    return hide_secrets(str(made))


def stage(given: argparse.Namespace, export: Path, folder: Path) -> list[Path]:
    """Put what is sent into `folder`: the card, the adapter's settings without a local path, and
    links to all other files. Returns: the files.

    Raises: ConfigError for a file that cannot be read.
    """
    with safe_read.reading(export):
        (folder / card.CARD).write_text(make_card(given, export), encoding="utf-8")
        for path in sorted(export.rglob("*")):
            place = folder / path.relative_to(export)
            hidden = any(part.startswith(".") for part in path.relative_to(export).parts)
            if hidden or not path.is_file() or place.name == card.CARD:
                continue
            place.parent.mkdir(parents=True, exist_ok=True)
            if path.suffix == ".json" and path.name != "tokenizer.json":
                place.write_text(_without_paths(path, given.base), encoding="utf-8")
            else:
                place.symlink_to(path.resolve())
    return sorted(path for path in folder.rglob("*") if path.is_file())


def _without_paths(path: Path, base: str | None) -> str:
    """Return the text of a JSON file, with the names of files and folders in place of their paths.

    Args: base: the base of an adapter; None = as it is in the file.
    """
    content = json.loads(path.read_text(encoding="utf-8"))

    def shorten(node: Any) -> Any:
        if isinstance(node, dict):
            return {key: shorten(value) for key, value in node.items()}
        if isinstance(node, list):
            return [shorten(value) for value in node]
        rooted = isinstance(node, str) and re.match(r"(~|[A-Za-z]:)?[\\/][^\s\\/]", node)
        return card.hide_paths(node) if rooted and card.is_local(node) else node

    short = shorten(content)
    if path.name == ADAPTER and base is not None:
        short[_BASE] = base
    return json.dumps(short, indent=2, ensure_ascii=False) + "\n"


def show(given: argparse.Namespace, folder: Path, files: list[Path]) -> None:
    """Print what would go: files with their sizes, and the head of the card."""
    sizes = {str(path.relative_to(folder)): path.stat().st_size for path in files}
    sight = "public" if given.public else "private"
    print(f"{given.run} -> {constants.ENDPOINT}/{given.repo} ({sight})\n")
    width = max(map(len, sizes))
    for name, size in sizes.items():
        print(f"  {name:<{width}}  {_size(size):>9}")
    print(f"  {'together':<{width}}  {_size(sum(sizes.values())):>9}\n")
    lines = (folder / card.CARD).read_text(encoding="utf-8").splitlines()
    print("\n".join(lines[:SHOWN]))
    if len(lines) > SHOWN:
        print(f"... {len(lines) - SHOWN} more lines")


def _size(count: float) -> str:
    for unit in ("B", "kB", "MB"):
        if count < 1000:
            return f"{count:.0f} B" if unit == "B" else f"{count:.1f} {unit}"
        count /= 1000
    return f"{count:.2f} GB"


def check_base(given: argparse.Namespace, export: Path) -> None:
    """Raise ConfigError for --base without an adapter; warn about a base that others have not."""
    path = export / ADAPTER
    if not path.is_file():
        if given.base is not None:
            raise ConfigError(f"--base has no effect: {export} is no adapter. Leave it out.")
        return
    if given.base is not None:
        _check_hub_id(given.base)
        return
    kind = {f"{_BASE}?": (str, type(None))}
    base = (safe_read.read(path, kind) or {}).get(_BASE) or ""
    if card.is_local(base):
        print(
            f"warning: the adapter's base is a local folder, {Path(base).name}, which others do not"
            " have. Give its hub id: --base HUB_ID",
            file=sys.stderr,
        )


def _check_hub_id(base: str) -> None:
    """Raise ConfigError if --base is not the id of a model on the hub."""
    if card.is_local(base):
        raise ConfigError(
            f"--base {base} is a folder of this machine, which others do not have. Give the hub id"
            " of the base model, such as HuggingFaceTB/SmolLM2-135M-Instruct."
        )
    try:
        validate_repo_id(base)
    except HFValidationError as error:
        raise ConfigError(f"--base {base!r} is no hub id: {first_line(error)}") from None


def upload(given: argparse.Namespace, folder: Path) -> str:
    """Send a folder, and return the address. Raises: ConfigError with the next step."""
    if get_token() is None:
        raise ConfigError(
            "not logged in to the hub. Run hf auth login, or set HF_TOKEN to a token that may write"
            f" ({constants.ENDPOINT}/settings/tokens)."
        )
    api = HfApi()
    try:
        api.create_repo(given.repo, private=not given.public, exist_ok=True)
        if not given.public and not api.model_info(given.repo).private:
            raise ConfigError(
                f"{given.repo} is public already. Add --public, or give another --repo."
            )
        disable_progress_bars()
        api.upload_folder(
            folder_path=folder,
            repo_id=given.repo,
            commit_message=f"Upload {given.run.resolve().name} with Clutch",
        )
    except HfHubHTTPError as error:
        raise ConfigError(_explain_refusal(given.repo, error)) from None
    except LocalTokenNotFoundError:
        raise ConfigError("not logged in to the hub. Run hf auth login.") from None
    except OfflineModeIsEnabled:
        raise ConfigError(
            "HF_HUB_OFFLINE is set, so nothing can be sent. Unset it, and run the command again."
        ) from None
    except _find_network_errors() as error:
        raise ConfigError(
            f"{constants.ENDPOINT} cannot be reached ({type(error).__name__}). Check the network,"
            " and run the command again: what has arrived is not sent twice."
        ) from None
    return f"{constants.ENDPOINT}/{given.repo}"


def _find_network_errors() -> tuple[type[Exception], ...]:
    """Return the exceptions of the client that the hub's library uses, which differs between its
    versions, for a connection that fails.
    """
    client = importlib.import_module(type(get_session()).__module__.partition(".")[0])
    named = [getattr(client, name, OSError) for name in ("TransportError", "RequestException")]
    return (ConnectionError, *(one for one in named if one is not OSError))


def _explain_refusal(repo: str, error: HfHubHTTPError) -> str:
    """Return the error text for an answer of the hub that refuses."""
    code = getattr(error.response, "status_code", None)
    said = hide_secrets(first_line(error)).replace(get_token() or "\0", "[secret]")
    if code in (401, 403):
        return (
            f"the hub refused {repo} ({code}): the token is not valid, or may not write there. Run"
            " hf auth login with one that may, or give a --repo of your own."
        )
    if code is not None and code >= 500:
        return f"the hub has an error of its own ({code}). Run the command again later."
    return f"the hub refused {repo}: {said} Correct that, and run the command again."


def publish(given: argparse.Namespace) -> None:
    """Run the command. Raises: ConfigError."""
    export = find_export(given.run, given.what)
    given.repo = check_repo(given.repo)
    check_license(given.license)
    check_base(given, export)
    with tempfile.TemporaryDirectory(prefix="clutch-publish-") as temporary:
        folder = Path(temporary)
        files = stage(given, export, folder)
        if given.dry_run:
            show(given, folder, files)
            return
        address = upload(given, folder)
    print(f"{address} has {len(files)} files of {shlex.quote(str(export))}.")


def main() -> int:
    """Run the command line. Exit codes: 0 done, 2 a mistake of the user."""
    given = parser().parse_args()
    with ending_tool("set TMPDIR to a folder that can be written"):
        publish(given)
    return 0


if __name__ == "__main__":
    sys.exit(main())
