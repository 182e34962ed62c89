"""Moving over from TRL and verl: the table, and the command of a configuration."""

import ast
import importlib.util
import shlex
import subprocess
import sys
from contextlib import suppress
from pathlib import Path

import pytest

from common.config import ConfigError
from common.config.validate import UnreadableError
from launch import compose
from plugins.moving.__main__ import translate
from plugins.moving.table import TRL, VERL, as_markdown, describe, spell
from tests.support import ROOT

VALUES = {
    "attn_implementation": "flash_attention_2",
    "scale_rewards": "batch",
    "loss_type": "dr_grpo",
    "lr_scheduler_type": "cosine",
    "lora_target_modules": ["q_proj", "v_proj"],
    "vllm_importance_sampling_mode": "token_mask",
    "report_to": ["wandb"],
    "vllm_importance_sampling_correction": False,
    "multi_objective_aggregation": "normalize_then_sum",
    "importance_sampling_level": "sequence",
    "algorithm.adv_estimator": "rloo",
    "actor_rollout_ref.actor.loss_agg_mode": "token-mean",
    "actor_rollout_ref.actor.kl_loss_type": "low_var_kl",
    "actor_rollout_ref.actor.policy_loss.loss_mode": "gspo",
    "actor_rollout_ref.rollout.name": "vllm",
    "trainer.logger": ["console", "wandb"],
    "chat_template_kwargs": {"enable_thinking": False},
    "dtype": "bfloat16",
    "torch_dtype": "bfloat16",
    "log_completions": True,
    "mask_truncated_completions": True,
    "use_bias_correction_kl": False,
    "top_p": 0.9,
    "stop": ["Q:"],
    "stop_strings": "it's",
    "min_p": 0.1,
    "trainer.resume_mode": "auto",
    "trainer.n_gpus_per_node": 1,
    "delta": 4.0,
    "lora_dropout": 0.1,
    "epsilon": 0.2,
    "epsilon_high": 0.28,
    "actor_rollout_ref.model.target_modules": "all-linear",
    "actor_rollout_ref.actor.clip_ratio": 0.2,
    "actor_rollout_ref.actor.clip_ratio_low": 0.2,
    "actor_rollout_ref.actor.clip_ratio_high": 0.28,
    "actor_rollout_ref.rollout.top_p": 0.9,
}
# What a setting needs beside it, by its beginning; the first that fits.
NEEDS = {
    "task.max_turns": ["task=guess"],
    "task.": ["task=custom", "task.path=x", "task.prompt_field=q", "task.answer_field=a"],
    "model.": ["model=hf", "model.path=x"],
    "opt.amp": ["opt=[amp]"],
    "algo.kl.": ["algo.kl.beta=0.1"],
    "engine.": ["engine=vllm"],
}


def given(key):
    return VALUES.get(key, 2)


@pytest.mark.run
@pytest.mark.parametrize("key", [*TRL, *VERL])
def test_what_is_here_is_a_setting(key):
    """It composes, or is refused for what stands beside it, and not as unknown or unreadable."""
    overrides, _ = translate({key: given(key)})
    said = " ".join(overrides)
    needed = next((more for start, more in NEEDS.items() if start in said), [])
    names = {one.partition("=")[0] for one in overrides}
    needed = [one for one in needed if one.partition("=")[0] not in names]
    with suppress(Beside):
        compose_or_say([*needed, *overrides])


class Beside(Exception):
    """A setting is read, and does not go with another one."""


def compose_or_say(overrides):
    try:
        compose(overrides)
    except UnreadableError:
        raise
    except ConfigError as error:
        if "is not a setting" in str(error):
            raise
        raise Beside from error


def test_a_configuration_of_trl_becomes_a_command():
    overrides, left = translate(
        {
            "model_name_or_path": "Qwen/Qwen2.5-0.5B-Instruct",
            "dataset_name": "rows.jsonl",
            "dataset_prompt_column": "prompt",
            "learning_rate": 1e-6,
            "bf16": True,
            "gradient_checkpointing": True,
            "num_generations": 4,
            "beta": 0.04,
            "top_k": -1,
            "scale_rewards": False,
            "lora_target_modules": ["q_proj", "v_proj"],
            "lora_r": 8,
            "chat_template": "mine",
            "reward_funcs": ["f"],
            "use_dora": False,
            "mine": 1,
        }
    )
    run = compose([*overrides, "task.answer_field=a"])
    assert (run.algo.lr, run.algo.samples_per_prompt, run.algo.kl.beta) == (1e-6, 4, 0.04)
    assert (run.algo.sampling.top_k, run.algo.advantage) == (0, "none")
    assert run.opt.amp.enabled
    assert run.opt.checkpointing.enabled
    assert run.model.adapter.targets == "q_proj,v_proj"
    assert left.keys() == {"chat_template", "reward_funcs", "mine"}


def test_a_configuration_of_verl_is_nested():
    overrides, left = translate(
        {
            "data": {"train_files": ["train.parquet"], "prompt_key": "prompt"},
            "actor_rollout_ref": {
                "rollout": {"n": 5, "temperature": 0.7},
                "actor": {"kl_loss_coef": 0.001, "kl_loss_type": "low_var_kl"},
            },
            "trainer": {"critic_warmup": 0, "total_training_steps": 7, "balance_batch": True},
        }
    )
    run = compose([*overrides, "task.answer_field=reward_model.ground_truth"])
    assert (run.algo.samples_per_prompt, run.algo.steps, run.algo.kl.beta) == (5, 7, 0.001)
    assert run.task["path"] == "train.parquet"
    assert left.keys() == {"trainer.balance_batch"}


def test_the_command_line(tmp_path):
    path = tmp_path / "trl.yaml"
    path.write_text("system_prompt: \"Think, 'then' answer.\"\nmax_steps: 3\nuse_dora: true\n")
    command = [sys.executable, "-m", "plugins.moving", str(path)]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    line, note = done.stdout.splitlines()
    assert note == "# use_dora: DoRA is not here"
    words = [*shlex.split(line)[2:], "task=custom", "task.path=x", "task.prompt_field=q"]
    run = compose([*words, "task.answer_field=a"])
    assert (run.task["system"], run.algo.steps) == ("Think, 'then' answer.", 3)
    path.write_text("- a\n")
    failed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
    assert (failed.returncode, failed.stdout) == (1, "")
    assert "holds no settings" in failed.stderr


@pytest.mark.parametrize("value", ["a b", "a,b", 'say "no"', "back\\slash", "", "x=y", "{a}", "é"])
def test_values_are_spelt_as_hydra_reads_them(value):
    run = compose(["algo=grpo", "task=custom", "task.path=x", f"task.system={spell(value)}"])
    assert run.task["system"] == value


def test_an_unknown_setting_names_its_counterpart(launch):
    said = launch("algo=grpo", "bf16=true", code=2).stderr
    assert "TRL's bf16 is opt=[amp] here" in said
    assert describe("no_such_setting") == ""


def test_the_page_has_the_table():
    assert as_markdown() in (ROOT / "docs" / "migrate.md").read_text()


def test_no_setting_of_trl_is_missing():
    spec = importlib.util.find_spec("trl")
    if spec is None or spec.origin is None:
        pytest.skip("needs pip install -e '.[peers]'")
    names = set()
    for name in ("grpo_config", "model_config"):
        text = (Path(spec.origin).parent / "trainer" / f"{name}.py").read_text()
        classes = [node for node in ast.parse(text).body if isinstance(node, ast.ClassDef)]
        names |= {
            node.target.id
            for one in classes
            for node in one.body
            if isinstance(node, ast.AnnAssign) and isinstance(node.target, ast.Name)
        }
    assert names - TRL.keys() == set()


def test_untranslatable_values_make_no_broken_command():
    overrides, left = translate(
        {
            "max_steps": -1,
            "loss_type": "dr_grpo",
            "importance_sampling_level": "sequence",
            "algorithm": {"adv_estimator": "gae"},
            "trainer": {"total_training_steps": None},
            "actor_rollout_ref": {"ref": {"fsdp_config": {"param_offload": True}}},
        }
    )
    assert overrides == ["algo=grpo", "algo.loss=gspo"]
    assert {"algorithm.adv_estimator", "algo.loss=dr_grpo"} <= left.keys()
    assert compose([*overrides]).algo.steps == 150


def test_batches_of_trl_become_prompts_and_parts():
    sizes = {"per_device_train_batch_size": 8, "gradient_accumulation_steps": 4}
    overrides, left = translate({**sizes, "num_generations": 8, "steps_per_generation": 8})
    algo = compose(overrides).algo
    assert (algo.prompts_per_step, algo.samples_per_prompt, algo.minibatches) == (8, 8, 2)
    assert "one device" in left["per_device_train_batch_size"]
    overrides, left = translate({**sizes, "num_generations": 8, "generation_batch_size": 64})
    algo = compose(overrides).algo
    assert (algo.prompts_per_step, algo.minibatches, left) == (8, 2, {})
    overrides, left = translate({"per_device_train_batch_size": 3, "num_generations": 8})
    assert "no whole number of groups" in left["per_device_train_batch_size"]
    assert compose(overrides).algo.prompts_per_step == 8


def test_batches_of_verl_become_prompts_and_parts():
    settings = {
        "data": {"train_batch_size": 64},
        "actor_rollout_ref": {"actor": {"ppo_mini_batch_size": 16, "clip_ratio_high": 0.28}},
        "trainer": {"total_training_steps": 10, "test_freq": 5, "save_freq": -1},
    }
    overrides, left = translate(settings)
    run = compose(overrides)
    assert (run.algo.prompts_per_step, run.algo.minibatches) == (64, 4)
    assert (run.algo.steps, run.evaluate.every, run.checkpoint.every) == (40, 20, 0)
    assert run.algo.epsilon_high == 0.28
    assert left.keys() == {"algo.steps", "evaluate.every"}
    settings["actor_rollout_ref"]["actor"]["ppo_mini_batch_size"] = 64
    overrides, left = translate(settings)
    assert compose(overrides).algo.steps == 10
    assert "algo.epsilon_high=0.28" in left, "a bound without a ratio that moves"


def test_a_model_in_four_bits_is_not_shared_out():
    overrides, left = translate(
        {"model_name_or_path": "m", "load_in_4bit": True, "deepspeed": "zero3.json", "lora_r": 16}
    )
    run = compose(overrides)
    assert (run.model.quantize, run.opt.ddp.enabled, run.opt.fsdp.enabled) == ("nf4", True, False)
    assert "does not go with model.quantize" in left["opt=[fsdp]"]


def test_epochs_and_settings_of_the_optimizer():
    overrides, left = translate(
        {"num_train_epochs": 2, "adam_beta2": 0.95, "adam_epsilon": 1e-6, "max_steps": -1}
    )
    algo = compose(overrides).algo
    assert (algo.epochs, algo.steps) == (2, None)
    assert algo.optimizer.kwargs == {"betas": [0.9, 0.95], "eps": 1e-6}
    assert left == {} or left.keys() == {"max_steps"}
    overrides, _ = translate({"num_train_epochs": 2, "max_steps": 7})
    assert (compose(overrides).algo.epochs, compose(overrides).algo.steps) == (None, 7)


@pytest.mark.parametrize(
    ("override", "here"),
    [
        ("actor_rollout_ref.actor.optim.lr=1e-6", "algo.lr here"),
        ("+actor_rollout_ref.rollout.response_length=9", "algo.sampling.max_new_tokens here"),
        ("trainer.total_epochs=2", "algo.epochs here"),
        ("algorithm.gamma=1", "no critic"),
        ("algo.per_device_train_batch_size=8", "algo.prompts_per_step here"),
        ("algo.actor.optim.lr=1e-6", "algo.lr here"),
        ("algo.repetition_penalty=1.1", "no counterpart here"),
        ("data.val_batch_size=8", "no counterpart here"),
    ],
)
def test_names_of_others_on_the_command_line(override, here):
    with pytest.raises(ConfigError) as caught:
        compose(["algo=grpo", override])
    assert here in str(caught.value)


def test_quoted_numbers_are_numbers():
    quoted = {"max_steps": "100", "trainer.n_gpus_per_node": "8", "learning_rate": "1e-6"}
    overrides, _ = translate(quoted | {"num_generations": "1e1"})
    assert {"algo.steps=100", "opt=[ddp]", "algo.lr=1e-6"} < {*overrides}
    assert "algo.samples_per_prompt=10" in overrides


@pytest.mark.parametrize("first", ["warmup_ratio", "warmup_steps"])
def test_a_share_of_warm_up_counts_beside_no_steps(first):
    given = {"warmup_ratio": 0.1, "warmup_steps": 0}
    overrides, _ = translate({first: given.pop(first)} | given)
    assert [one for one in overrides if "warmup" in one] == ["algo.warmup_steps=0.1"]


def test_unknown_schedules_are_omitted_with_the_reason():
    overrides, left = translate({"lr_scheduler_type": "polynomial"})
    assert overrides == ["algo=grpo"]
    assert left.keys() == {"lr_scheduler_type"}
