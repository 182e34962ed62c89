"""Load a language model from a folder or the hub, or build the tiny one.

Every user error in `model.*` is a ConfigError that names the key, the value and the next step. Code
that comes with a model is never run (`trust_remote_code=False`).

The tiny model is a byte-level Llama of under a million parameters, pre-trained once on text of the
task, and cached by a hash of its settings and of its training rows. It makes every algorithm
runnable in minutes, on any machine, without a download.
"""

import importlib.util
import json
import logging
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from datetime import date
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from huggingface_hub import constants, get_session, try_to_load_from_cache
from huggingface_hub.errors import StrictDataclassError
from safetensors import SafetensorError
from transformers import (
    AutoConfig,
    AutoModelForCausalLM,
    AutoTokenizer,
    GgufConfig,
    PreTrainedModel,
    PreTrainedTokenizerBase,
    PreTrainedTokenizerFast,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
)
from transformers.models.auto.tokenization_auto import get_tokenizer_config
from transformers.utils import logging as transformers_logging

from common.config import ConfigError, ModelConfig, find_source
from common.model.export import progress_bars
from common.model.masks import ATTENDING, HYBRIDS, RECURRENT
from common.model.quantized import Quantization, replace_layers
from common.model.tiny import byte_tokenizer, tiny_model, untrained
from common.system import first_line

log = logging.getLogger("clutch")

TEMPLATE_DATE = date(2026, 1, 1)  # replaces today's date in chat templates
PINNED = f"{{#- today is {TEMPLATE_DATE} -#}}"  # marks the beginning of such a template
QUANTIZE = "model.quantize"
# Models of text and images whose text part can be used alone, and the prefixes that the weights of
# that part have in the files of the whole model.
TEXT_PARTS = ("gemma3", "gemma4", "internvl", "lfm2_vl", "llama4", "llava", "mistral3", "qwen3_5")
TEXT_PARTS += ("qwen3_5_moe", "smolvlm")
_PART = r"^(?:model\.)?(?:language_model|text_model)\."
OF_TEXT_PART = {rf"{_PART}lm_head": "lm_head", rf"{_PART}(?:model\.)?": "model."}
# The timeout of the hub's answer, in seconds; whether the user has set the hub offline.
ANSWER, OFFLINE = 5.0, constants.HF_HUB_OFFLINE
# The exceptions of transformers for a model that it cannot load.
UNLOADABLE = (OSError, ValueError, KeyError, TypeError, ImportError, RuntimeError)
UNLOADABLE += (SafetensorError, StrictDataclassError)


def load_model(
    config: ModelConfig,
    task: Any,
    dtype: torch.dtype,
    device: torch.device,
    *,
    progress: bool = True,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """Load the model that `config` names, in eval mode on `device`, and its tokenizer, which has a
    pad token.

    Args:
        task: the task that a tiny model is pre-trained on; otherwise unused.
        dtype: the dtype of the weights.
        device: the device; "meta" reads or trains no weights.
        progress: whether to report on stderr.
    Raises: ConfigError for all that a user can correct: no such folder or hub id, no causal
    language model in it, no tokenizer, a tokenizer with more ids than the model has embeddings, a
    missing package.
    """
    shapes = device.type == "meta"
    if shapes and config.path is None:
        with device:
            model = untrained(config.tiny).eval()  # type: ignore[arg-type]
        if config.quantize is not None:
            replace_layers(model, config.quantize, QUANTIZE)
        return model, byte_tokenizer()
    if config.path is None:
        assert config.tiny is not None  # ModelConfig checks it
        path, where = str(tiny_model(config.tiny, task, progress=progress)), "model=tiny"
    else:
        path, where = find_source(config), f"model.path={config.path!r}"
    origin: dict[str, Any] = {"revision": config.revision, "trust_remote_code": False}
    if not Path(path).is_dir():
        _look_for_hub()
    with progress_bars(progress and config.path is not None and sys.stderr.isatty()):
        load = _shapes if shapes else _model
        try:
            model = load(config, path, where, origin, dtype)
        except ConfigError:
            raise
        except UNLOADABLE as error:
            raise _describe(error, path, where) from error
        tokenizer = _tokenizer(config, path, where, origin)
    if progress and (commit := model_commit(config)):
        log.info("%s is at commit %s (model.revision=COMMIT pins it)", where, commit)
    rows = model.get_input_embeddings().weight.shape[0]  # pyright: ignore[reportIndexIssue]
    # An added token may have no row, such as the image token in text models of Gemma 3.
    ids: set[Any] = set(tokenizer.get_vocab().values()) - tokenizer.added_tokens_decoder.keys()
    used: Any = tokenizer.pad_token_id, tokenizer.bos_token_id, tokenizer.eos_token_id
    ids |= {one for one in used if one is not None}
    if (largest := max(ids)) >= rows:
        raise ConfigError(
            f"{where}: its tokenizer has ids up to {largest}, its embedding has {rows} rows. The"
            " two do not belong together; put the tokenizer files that the model was trained with"
            " into the folder."
        )
    if tokenizer.pad_token_id is None:
        if tokenizer.eos_token is None:
            raise ConfigError(
                f"{where}: its tokenizer has neither a pad token nor an eos token. "
                'Set "pad_token" in its tokenizer_config.json to a token that it has.'
            )
        # padding is masked everywhere, so which token it is has no effect
        tokenizer.pad_token = tokenizer.eos_token
    # `to` is typed by a decorator that loses its first argument.
    model.to(device)  # pyright: ignore[reportArgumentType]
    return model.eval(), tokenizer


def model_commit(config: ModelConfig) -> str | None:
    """Return the commit of a hub model as it was loaded, from the hub's cache; None for a local
    model.
    """
    if config.path is None or Path(config.path).expanduser().exists():
        return None
    cached = try_to_load_from_cache(
        config.path, config.gguf_file or "config.json", revision=config.revision
    )
    if not isinstance(cached, str):
        return None
    parts = Path(cached).parts
    return parts[len(parts) - parts[::-1].index("snapshots")]  # .../snapshots/COMMIT/config.json


# --- inside


def _look_for_hub() -> None:
    """Use only the cache if the hub does not answer: its client would silently retry
    for minutes.
    """
    try:
        constants.HF_HUB_OFFLINE = OFFLINE
        if not OFFLINE:
            get_session().head(constants.ENDPOINT, timeout=ANSWER)
    except Exception:  # whatever its client raises
        log.warning("%s does not answer: only its cache is looked at", constants.ENDPOINT)
        constants.HF_HUB_OFFLINE = True


def _model(
    config: ModelConfig, path: str, where: str, origin: dict[str, Any], dtype: torch.dtype
) -> PreTrainedModel:
    """Return the model on the CPU, with all weights from its files. Raises: ConfigError."""
    options: dict[str, Any] = {}
    if config.gguf_file:
        missing = [
            name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None
        ]
        if missing:
            raise ConfigError(
                f"model.gguf_file={config.gguf_file!r} needs the Python package"
                f" {' and '.join(missing)}. Install: pip install -e '.[gguf]'."
            )
        options = {
            "gguf_file": config.gguf_file,
            "quantization_config": GgufConfig(dequantize=True),
        }
    elif config.quantize is not None:
        options = {"quantization_config": Quantization(config.quantize, QUANTIZE)}
    of_images = False
    if not config.gguf_file:
        whole = AutoConfig.from_pretrained(path, **origin)
        part = _trained_part(whole, config, where)
        of_images = part is not whole
        if of_images:
            options |= {"config": part, "key_mapping": OF_TEXT_PART}
    options |= {"dtype": dtype, "attn_implementation": config.attention}
    with _no_report() if of_images else nullcontext():
        loaded: Any = AutoModelForCausalLM.from_pretrained(
            path, output_loading_info=True, **origin, **options
        )
    model, info = loaded
    if of_images:
        # Otherwise a save would use the names of the weights in the whole model.
        del model._weight_conversions
    # A config may declare a tied head although the files have a separate matrix for it, which
    # transformers then keeps. Exports and vLLM rely on the config.
    head: Any = model.get_output_embeddings()
    if head is not None:
        tied = head.weight is model.get_input_embeddings().weight
        model.config.tie_word_embeddings = tied
    if info["missing_keys"] or info["mismatched_keys"]:
        names = sorted(str(name) for name in [*info["missing_keys"], *info["mismatched_keys"]])
        raise ConfigError(
            f"{where} is not a whole causal language model: {len(names)} weights are not in its"
            f" files (the first: {names[0]}). Give the folder of a model saved with its"
            " language-model head."
        )
    if config.gguf_file and hasattr(model.config, "quantization_config"):
        del model.config.quantization_config  # the weights are plain now, and an export must say so
    if config.gguf_file:
        _trained_part(model.config, config, where)
    return model


def _shapes(
    config: ModelConfig, path: str, where: str, origin: dict[str, Any], dtype: torch.dtype
) -> PreTrainedModel:
    """Return the model on the meta device, from its config.json. Raises: ConfigError."""
    if config.gguf_file:
        raise ConfigError(
            "plan=true needs a config.json, which a GGUF file comes without. Give the folder or hub"
            " id of the model that it was made from: model=hf model.path=..."
        )
    architecture = _trained_part(AutoConfig.from_pretrained(path, **origin), config, where)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(
            architecture, dtype=dtype, attn_implementation=config.attention
        )
    if config.quantize is not None:
        replace_layers(model, config.quantize, QUANTIZE)
    return model


@contextmanager
def _no_report() -> Iterator[None]:
    """Silence in the block transformers' report of unused weights: those of the image part."""
    before = transformers_logging.get_verbosity()
    transformers_logging.set_verbosity_error()
    try:
        yield
    finally:
        transformers_logging.set_verbosity(before)


def _trained_part(architecture: Any, config: ModelConfig, where: str) -> Any:
    """Return the config of the trained part, which is the text part of a model of text and images.
    Raises: ConfigError for a model that cannot be trained here, or not with these settings.
    """
    if getattr(architecture, "quantization_config", None):
        raise ConfigError(
            f"{where} is quantised already, and such weights are not trained here. Give the folder"
            f" or hub id of the model that it was made from, with {QUANTIZE} for few bits."
        )
    text = architecture.get_text_config()
    if text is not architecture:
        if architecture.model_type not in TEXT_PARTS:
            raise ConfigError(
                f"{where} is a model of text and images or sound ({architecture.model_type}). The"
                f" text parts of {', '.join(TEXT_PARTS)} can be trained here. Use one of these, or"
                " a model of text, such as gemma-3-1b."
            )
        text.tie_word_embeddings |= architecture.tie_word_embeddings
        log.info("%s is a model of text and images, of which the text part is trained", where)
    _check_causal(text, where)
    # Older versions of transformers have other names for the layers of RecurrentGemma.
    layers: list[str] = getattr(text, "layer_types", None) or getattr(text, "block_types", [])
    others = set(layers) - set(ATTENDING)
    if text.model_type in HYBRIDS:
        others -= {*RECURRENT, "mlp", "moe"}
    # ALiBi, or another order: a forward does not take the positions of tokens.
    known: Any = MODEL_FOR_CAUSAL_LM_MAPPING.get(type(text), None)
    takes = signature(known.forward).parameters if known else ("position_ids",)
    if getattr(text, "alibi", False) or "position_ids" not in takes:
        others.add("attention without positions")
    if others:
        raise ConfigError(
            f"{where} has layers of another kind than attention with rotary or learned positions:"
            f" {', '.join(sorted(others))}. Use a Llama, Qwen2, Qwen3, Qwen3.5, Gemma 3, LFM2,"
            " GPT-2 or similar model."
        )
    # sdpa ignores the cap, silently in transformers 5.17.
    if config.attention != "eager" and getattr(text, "attn_logit_softcapping", None):
        raise ConfigError(
            f"{where} caps the scores of its attention, and model.attention={config.attention} does"
            " not. Use model.attention=eager."
        )
    return text


def _check_causal(config: Any, where: str) -> None:
    """Raise ConfigError for encoders and encoder-decoders, some of which transformers would load
    silently.
    """
    known = set(MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values())
    architectures = config.architectures or []
    causal = not architectures or any(
        name in known or name.endswith(("ForCausalLM", "LMHeadModel")) for name in architectures
    )
    # BERT and similar models can be decoders if they declare it; GPT-NeoX has the same field and is
    # always a decoder.
    encoder = getattr(config, "is_decoder", True) is False and not config.model_type.startswith(
        "gpt_neox"
    )
    if not causal or encoder or config.is_encoder_decoder:
        kind = ", ".join(architectures) or config.model_type
        raise ConfigError(
            f"{where} is not a causal language model: its config.json says {kind}. Give a model"
            " that predicts the next token, such as gpt2, a Llama or a Qwen (architectures:"
            " ...ForCausalLM)."
        )


def _tokenizer(
    config: ModelConfig, path: str, where: str, origin: dict[str, Any]
) -> PreTrainedTokenizerBase:
    """Return the tokenizer of the folder, or the one inside the GGUF file. Raises: ConfigError if
    there is none.
    """
    options = {}
    if config.gguf_file and not (Path(path) / "tokenizer.json").is_file():
        options = {"gguf_file": config.gguf_file}
    try:
        # AutoTokenizer follows the model's type first: with a Qwen2 config it turns any
        # tokenizer.json into Qwen2's own, with other normalisation and one more id. If the folder
        # declares a plain tokenizer file, it is loaded as such.
        declared = get_tokenizer_config(path, revision=config.revision).get("tokenizer_class")
        if declared in ("TokenizersBackend", "PreTrainedTokenizerFast") and not options:
            tokenizer = PreTrainedTokenizerFast.from_pretrained(
                path, revision=config.revision or "main"
            )
        else:
            tokenizer = AutoTokenizer.from_pretrained(path, **origin, **options)
        # Without files transformers may build an empty vocabulary, which encodes every text to
        # nothing.
        known = tokenizer("a", add_special_tokens=False)["input_ids"]
        reason = "" if known else "its vocabulary is empty."
    except (AttributeError, *UNLOADABLE) as error:
        reason = f"{first_line(error)}."
    if reason:
        raise ConfigError(
            f"{where} has no tokenizer that can be loaded: {reason} Put its tokenizer files"
            " (tokenizer.json and tokenizer_config.json) into the folder."
        )
    _fill_template(tokenizer, config.chat_template_kwargs or {}, where)
    if isinstance(tokenizer.chat_template, str):
        tokenizer.chat_template = pin_date(tokenizer.chat_template)
    return tokenizer


def pin_date(template: str) -> str:
    """Return a chat template with `TEMPLATE_DATE` in place of today's date, so that prompts do not
    depend on the day.
    """

    def written(call: re.Match[str]) -> str:
        return json.dumps(TEMPLATE_DATE.strftime(call[2]))

    pinned = re.sub(r"""strftime_now\(\s*(["'])(.*?)\1\s*\)""", written, template)
    return template if pinned == template else f"{PINNED}{pinned}"


def template_date(tokenizer: Any) -> date | None:
    """Return the date that a chat template has in place of today's; None if it has none."""
    return TEMPLATE_DATE if PINNED in str(tokenizer.chat_template) else None


def _fill_template(tokenizer: Any, values: dict[str, Any], where: str) -> None:
    """Set variables of the chat template in the template itself, so that they apply wherever it is
    rendered, and in exports. Raises: ConfigError for variables that it does not use.
    """
    template = tokenizer.chat_template or ""
    for name, value in values.items():
        if not isinstance(template, str) or not re.search(rf"\b{re.escape(name)}\b", template):
            raise ConfigError(
                f"model.chat_template_kwargs.{name} has no effect: the chat template of {where}"
                " does not have it. Leave it out."
            )
        template = f"{{% set {name} = {json.dumps(value)} %}}{template}"
    if values:
        tokenizer.chat_template = template


def _describe(error: Exception, path: str, where: str) -> ConfigError:
    """Return the error for a model that cannot be loaded, with the next step."""
    # The reason for a wrong config.json is in the cause: "Validation error for field
    # 'hidden_size':" says little.
    reason = (error.__cause__ if isinstance(error, StrictDataclassError) else None) or error
    problem = f"{where} could not be loaded: {first_line(reason)}."
    return ConfigError(f"{problem} {_advice(path, error)}")


def _advice(path: str, error: Exception) -> str:
    text = str(error)
    if "trust_remote_code" in text or "contains custom code" in text:
        return (
            "Code that comes with a model is never run here. Choose a model that transformers knows"
            " by itself."
        )
    if "attn_implementation" in text or "scaled_dot_product_attention" in text:
        return "Use model.attention=eager."
    if Path(path).is_dir():
        return "Check that the folder is complete and written by save_pretrained."
    return (
        "Check the spelling and the network, log in for a gated model (hf auth login), or give the"
        " folder of a model that is on this machine: model.path=FOLDER."
    )
