"""Translate settings of TRL or verl that depend on each other: the sizes of batches, and settings
that do not go together here.
"""

from typing import Any

# verl counts these in rollouts; here they are optimizer steps.
IN_ROLLOUTS = ("algo.steps", "algo.warmup_steps", "evaluate.every", "checkpoint.every")
BETAS = {"adam_beta1": 0.9, "adam_beta2": 0.999}
BOUNDS = ("algo.epsilon_low", "algo.epsilon_high", "algo.dual_clip", "algo.delta")

ACTOR = "actor_rollout_ref.actor"
SIZES = ("per_device_train_batch_size", "gradient_accumulation_steps", "steps_per_generation")
SIZES += ("generation_batch_size",)


def _whole(value: Any) -> bool:
    return type(value) is int and value > 0


def find_sizes(settings: dict[str, Any]) -> tuple[dict[str, int], dict[str, str]]:
    """Return the sizes of a rollout and of its parts, by their names here, and remarks about the
    settings that they come from. settings: by their dotted names.
    """
    given = {key: settings[key] for key in SIZES if settings.get(key) is not None}
    if given and all(map(_whole, given.values())):
        return _of_trl(given, settings.get("num_generations", 8))
    prompts, part = (
        settings.get(k) for k in ("data.train_batch_size", f"{ACTOR}.ppo_mini_batch_size")
    )
    if not (isinstance(prompts, int) and isinstance(part, int) and 0 < part <= prompts):
        return {}, {}
    if prompts % part:
        why = f"{part} does not divide data.train_batch_size={prompts}: choose algo.minibatches"
        return {}, {f"{ACTOR}.ppo_mini_batch_size": why}
    return {"algo.minibatches": prompts // part}, {}


def _of_trl(given: dict[str, int], samples: Any) -> tuple[dict[str, int], dict[str, str]]:
    each = given.get("per_device_train_batch_size", 8)
    accumulated = given.get("gradient_accumulation_steps", 1)
    batches = given.get("steps_per_generation", accumulated)
    whole = given.get("generation_batch_size")
    if whole is not None:
        batches = max(1, whole // each)
    completions = whole or each * batches
    first = next(iter(given))
    if not _whole(samples) or completions % samples:
        return {}, {
            first: f"{completions} completions are no whole number of groups of {samples}: choose"
            " algo.prompts_per_step"
        }
    sizes = {"algo.prompts_per_step": completions // samples}
    notes: dict[str, str] = {}
    if whole is None:
        notes[first] = (
            f"{completions} completions of one device are algo.prompts_per_step="
            f"{completions // samples}; with more devices, take so many times as many"
        )
    parts, rest = divmod(batches, accumulated)
    if rest or not 1 <= parts <= completions // samples:
        notes["steps_per_generation"] = (
            f"{batches} over gradient_accumulation_steps={accumulated} are no parts of whole"
            " groups: choose algo.minibatches"
        )
    elif parts > 1:
        sizes["algo.minibatches"] = parts
    return sizes, notes


def combine(settings: dict[str, Any], overrides: list[str]) -> tuple[list[str], dict[str, str]]:
    """Return the overrides of single settings after settings that depend on each other are
    combined, and remarks about them.
    """
    sizes, left = find_sizes(settings)
    made = dict.fromkeys(one for one in overrides if "=" not in one)  # the switches of opt
    values = dict(one.split("=", 1) for one in overrides if "=" in one)
    values |= {
        key: str(size) for key, size in sizes.items() if key != "algo.minibatches" or size > 1
    }
    if any(settings.get(key) is not None for key in BETAS):
        first, second = (settings.get(key) or usual for key, usual in BETAS.items())
        values["algo.optimizer.kwargs.betas"] = f"[{first},{second}]"
    passes = values.get("algo.num_iterations", "1")
    updates = (int(passes) if passes.isdigit() else 1) * sizes.get("algo.minibatches", 1)
    if updates > 1 and any("." in key for key in settings):
        for key in IN_ROLLOUTS:
            if values.get(key, "0").isdigit() and int(values.get(key, "0")):
                values[key] = str(int(values[key]) * updates)
                left[key] = (
                    f"times {updates} optimizer steps per rollout, which verl does not count"
                )
    if updates == 1:
        for key in BOUNDS:
            if (value := values.pop(key, None)) is not None:
                left[f"{key}={value}"] = "with one optimizer step per rollout all ratios are 1"
    if "algo.steps" in values and values.pop("algo.epochs", None):
        left["algo.epochs"] = "algo.steps says the length of the run"
    if "model.quantize" in values:
        if "opt+fsdp" in made:
            del made["opt+fsdp"]
            made["opt+ddp"] = None
            left["opt=[fsdp]"] = (
                "does not go with model.quantize, as a model in few bits is not shared out:"
                " opt=[ddp], where every rank holds it"
            )
        if "model.adapter.rank" not in values:
            left["model.quantize"] = "needs an adapter: add model.adapter.rank=16"
    return [*(f"{key}={value}" for key, value in values.items()), *made], left
