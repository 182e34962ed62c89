"""The settings of TRL's GRPOConfig and scripts and of verl's ppo_trainer.yaml, with their
equivalents here.
"""

import re
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

Overrides = list[str]


@dataclass(frozen=True)
class Entry:
    """A setting of another trainer.

    Attributes:
        here: its name here; "" = there is none.
        note: the difference, or the reason that there is none.
        make: turns a value into overrides; None = `here` takes the value unchanged.
    """

    here: str
    note: str = ""
    make: Callable[[Any], Overrides] | None = None

    def overrides(self, value: Any) -> Overrides:
        """Return the overrides for a value."""
        if self.make is not None:
            return self.make(value)
        return [f"{self.here}={spell(value)}"] if self.here else []

    def __str__(self) -> str:
        """Return the entry as the end of a sentence: the setting to use, or the reason that there
        is none.
        """
        if not self.here:
            return self.note
        return f"{self.here}, {self.note}" if self.note else self.here


_STAYS = "a list of texts; the text stays at the end of the completion"


def _list_texts(value: Any) -> Overrides:
    return [f"algo.sampling.stop={spell([value] if isinstance(value, str) else value)}"]


def spell(value: Any) -> str:
    """Return a value as Hydra reads it on a command line."""
    if value is None:
        return "null"
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, list | tuple):
        return f"[{','.join(map(spell, value))}]"
    if isinstance(value, dict):
        return f"{{{', '.join(f'{key}: {spell(one)}' for key, one in value.items())}}}"
    text = str(value)
    if text and (not isinstance(value, str) or re.fullmatch(r"[A-Za-z0-9_./:~@+-]+", text)):
        return text
    # A backslash is one, but for those before a quotation mark.
    quoted = re.sub(r"(\\*)(\"|$)", lambda found: found[1] * 2 + found[2].replace('"', '\\"'), text)
    return f'"{quoted}"'


def switch(name: str) -> Callable[[Any], Overrides]:
    """Return a function that turns a value other than false into a switch of opt."""
    return lambda value: [f"opt+{name}"] if value else []


def _chosen(here: str, **names: str) -> Callable[[Any], Overrides]:
    """Return a function that translates the names of a choice."""
    return lambda value: [f"{here}={names.get(str(value).lower(), value)}"]


def _scaled(value: Any) -> Overrides:
    kinds = {"true": "group", "group": "group", "batch": "batch", "false": "none", "none": "none"}
    return [f"algo.advantage={kinds.get(str(value).lower(), value)}"]


def _schedule(value: Any) -> Overrides:
    name = str(value).lower()
    if name not in ("constant", "constant_with_warmup", "linear", "cosine", "cosine_with_min_lr"):
        return []
    kind = next((kind for kind in ("cosine", "linear") if name.startswith(kind)), "constant")
    end = {"cosine_with_min_lr": 0.1, "constant": 1.0}.get(name if "min" in name else kind, 0.0)
    return [f"algo.lr_schedule={{kind: {kind}, end: {end:g}}}"]


def _steps(value: Any) -> Overrides:
    return [f"algo.steps={value}"] if value and value > 0 else []


def _estimator(value: Any) -> Overrides:
    known = {"grpo": "group", "rloo": "rloo"}
    return [f"algo.advantage={known[value]}"] if value in known else []


def _top_k(value: Any) -> Overrides:
    return [f"algo.sampling.top_k={max(0, int(value or 0))}"]


def _targets(value: Any) -> Overrides:
    listed = [value] if isinstance(value, str) else list(value or [])
    return [f"model.adapter.targets={spell(','.join(map(str, listed)))}"] if listed else []


def _path(value: Any) -> Overrides:
    first = value[0] if isinstance(value, list) and value else value
    return ["task=custom", f"task.path={spell(first)}"]


def _model(value: Any) -> Overrides:
    return ["model=hf", f"model.path={spell(value)}"]


def _kl(value: Any) -> Overrides:
    return [
        f"algo.kl.estimator={ {'kl': 'k1', 'mse': 'k2', 'low_var_kl': 'k3'}.get(value, value) }"
    ]


def _tracker(value: Any) -> Overrides:
    names = value if isinstance(value, list) else [value]
    known = next((n for n in names if n in ("wandb", "tensorboard", "trackio")), None)
    return [f"tracker={known}"] if known else []


def _vllm(value: Any) -> Overrides:
    return ["engine=vllm"] if value in (True, "vllm") else []


def _no(note: str) -> Entry:
    return Entry("", note)


_BY_ITSELF = "is found by itself, from the memory of the device"
_NO_CODE = "a model's own code is never run"
_ONE_SERVER = "vLLM runs in the run's own process: engine=vllm"
_PENALTY = "samples are drawn from the policy that is trained, whose loss knows no penalty"
_CRITIC = "there is no critic: advantages are relative to the group"
_NO_HUB = "`python -m common.publish RUN --repo USER/NAME` after the run"
_ADAPTIVE = "algo.entropy_bonus is constant"
_VESPO = "that loss is not here: algo.loss lists those that are"

TRL: dict[str, Entry] = {
    "model_name_or_path": Entry("model.path", "with model=hf", _model),
    "model_revision": Entry("model.revision"),
    "trust_remote_code": _no(_NO_CODE),
    "dtype": Entry("opt=[amp]", "for 16 bits", lambda v: switch("amp")(v not in ("float32", None))),
    "torch_dtype": Entry(
        "opt=[amp]", "for 16 bits", lambda v: switch("amp")(v not in ("float32", None))
    ),
    "attn_implementation": Entry(
        "model.attention",
        "sdpa or eager",
        _chosen("model.attention", flash_attention_2="sdpa", flash_attention_3="sdpa"),
    ),
    "model_init_kwargs": _no("model.path, model.revision and model.attention say what is loaded"),
    "bf16": Entry("opt=[amp]", "", switch("amp")),
    "fp16": Entry(
        "opt=[amp]",
        "with opt.amp.dtype=float16",
        lambda v: ["opt+amp", "opt.amp.dtype=float16"] if v else [],
    ),
    "tf32": Entry("opt=[tf32]", "", switch("tf32")),
    "gradient_checkpointing": Entry("opt=[checkpointing]", "", switch("checkpointing")),
    "gradient_checkpointing_kwargs": _no("blocks are recomputed as use_reentrant=false does"),
    "torch_compile": Entry("opt=[compile]", "", switch("compile")),
    "deepspeed": Entry("opt=[fsdp]", "or opt=[ddp], opt=[offload]", switch("fsdp")),
    "fsdp": Entry("opt=[fsdp]", "", switch("fsdp")),
    "use_peft": _no("model.adapter.rank above 0 says it"),
    "lora_r": Entry("model.adapter.rank"),
    "lora_alpha": Entry("model.adapter.alpha"),
    "lora_dropout": Entry("model.adapter.dropout", "for algo=rft and algo=sft"),
    "lora_target_modules": Entry("model.adapter.targets", "ends of names, with commas", _targets),
    "lora_target_parameters": _no("adapters are on linear layers"),
    "lora_modules_to_save": _no("an adapter trains its own weights alone"),
    "lora_task_type": _no("it is always CAUSAL_LM"),
    "use_rslora": _no("set model.adapter.alpha to rank ** 0.5 times the alpha there"),
    "use_dora": _no("DoRA is not here"),
    "load_in_4bit": Entry("model.quantize", "nf4", lambda v: ["model.quantize=nf4"] if v else []),
    "load_in_8bit": Entry("model.quantize", "int8", lambda v: ["model.quantize=int8"] if v else []),
    "dataset_name": Entry("task.path", "with task=custom", _path),
    "dataset_config": Entry("task.dataset_config"),
    "dataset_train_split": Entry("task.dataset_split"),
    "dataset_test_split": Entry("task.dataset_test_split"),
    "dataset_streaming": _no("rows are read once, before the first step"),
    "dataset_prompt_column": Entry("task.prompt_field"),
    "system_prompt": Entry("task.system"),
    "remove_unused_columns": _no("a function gets the columns that it names"),
    "max_prompt_length": Entry(
        "prompts.too_long=skip",
        "which leaves out what does not fit the context",
        lambda _: ["prompts.too_long=skip"],
    ),
    "max_completion_length": Entry("algo.sampling.max_new_tokens"),
    "max_tokens": Entry("algo.sampling.max_new_tokens"),
    "num_generations": Entry("algo.samples_per_prompt"),
    "num_generations_eval": Entry("evaluate.samples"),
    "per_device_train_batch_size": Entry(
        "algo.prompts_per_step", "in prompts, of all ranks", lambda _: []
    ),
    "batch_size": Entry("algo.prompts_per_step", "in prompts, of all ranks", lambda _: []),
    "per_device_eval_batch_size": _no(f"rows in a forward pass: it {_BY_ITSELF}"),
    "gradient_accumulation_steps": Entry(
        "algo.prompts_per_step",
        "completions of an optimizer step; those of a backward pass are algo.train_rows",
        lambda _: [],
    ),
    "generation_batch_size": Entry(
        "algo.prompts_per_step", "times algo.samples_per_prompt completions", lambda _: []
    ),
    "steps_per_generation": Entry(
        "algo.minibatches", "times gradient_accumulation_steps", lambda _: []
    ),
    "num_iterations": Entry("algo.num_iterations"),
    "max_steps": Entry("algo.steps", "", _steps),
    "num_train_epochs": Entry(
        "algo.epochs", "", lambda v: [f"algo.epochs={spell(v)}"] if v and v > 0 else []
    ),
    "learning_rate": Entry("algo.lr"),
    "lr_scheduler_type": Entry(
        "algo.lr_schedule", "{kind: cosine, end: 0.1}, or linear", _schedule
    ),
    "lr_scheduler_kwargs": Entry("algo.lr_schedule", "whose end is min_lr_rate", lambda _: []),
    "warmup_steps": Entry("algo.warmup_steps"),
    "warmup_ratio": Entry("algo.warmup_steps", "below 1 a share of the run"),
    "weight_decay": Entry(
        "algo.optimizer.kwargs.weight_decay",
        "",
        lambda v: [f"+algo.optimizer.kwargs.weight_decay={v}"],
    ),
    "optim": Entry("algo.optimizer.name", "a class of torch.optim", lambda _: []),
    "optim_args": Entry("algo.optimizer.kwargs", "", lambda _: []),
    "adam_beta1": Entry("algo.optimizer.kwargs", "{betas: [beta1, beta2]}", lambda _: []),
    "adam_beta2": Entry("algo.optimizer.kwargs", "{betas: [beta1, beta2]}", lambda _: []),
    "adam_epsilon": Entry("algo.optimizer.kwargs.eps"),
    "max_grad_norm": Entry("algo.grad_clip"),
    "beta": Entry("algo.kl.beta"),
    "sync_ref_model": _no("the reference stays the initial model"),
    "ref_model_mixup_alpha": _no("the reference stays the initial model"),
    "ref_model_sync_steps": _no("the reference stays the initial model"),
    "epsilon": Entry(
        "algo.epsilon_low",
        "and algo.epsilon_high, where that is not set",
        lambda v: [f"algo.epsilon_low={v}"],
    ),
    "epsilon_high": Entry("algo.epsilon_high"),
    "delta": Entry("algo.delta"),
    "loss_type": Entry("algo.loss"),
    "importance_sampling_level": Entry(
        "algo.loss",
        "gspo for sequence",
        lambda v: ["algo.loss=gspo"] if v == "sequence" else [],
    ),
    "scale_rewards": Entry("algo.advantage", "group, batch or none", _scaled),
    "multi_objective_aggregation": Entry(
        "algo.advantage",
        "components for normalize_then_sum",
        lambda v: ["algo.advantage=components"] if v == "normalize_then_sum" else [],
    ),
    "reward_funcs": Entry("task.rewards", "{module.function: weight}", lambda _: []),
    "reward_weights": Entry("task.rewards", "{module.function: weight}, a mean", lambda _: []),
    "reward_model_name_or_path": _no("write a function of task.rewards that asks the model"),
    "temperature": Entry("algo.sampling.temperature"),
    "top_p": Entry("algo.sampling.top_p"),
    "top_k": Entry("algo.sampling.top_k", "0 = off", _top_k),
    "min_p": Entry("algo.sampling.min_p"),
    "repetition_penalty": _no(_PENALTY),
    "stop": Entry("algo.sampling.stop", _STAYS, _list_texts),
    "stop_strings": Entry("algo.sampling.stop", _STAYS, _list_texts),
    "generation_kwargs": _no("algo.sampling has what is drawn by"),
    "cache_implementation": _no("the sampler has its own cache"),
    "chat_template_kwargs": Entry("model.chat_template_kwargs"),
    "chat_template": _no("put it into a copy of the model's folder as chat_template.jinja"),
    "chat_template_path": _no("put it into a copy of the model's folder as chat_template.jinja"),
    "mask_truncated_completions": Entry("algo.mask_truncated"),
    "top_entropy_quantile": _no("all tokens carry loss; algo.entropy_bonus is a bonus on entropy"),
    "entropy_coef": Entry("algo.entropy_bonus"),
    "use_adaptive_entropy": _no(_ADAPTIVE),
    "entropy_coef_min": _no(_ADAPTIVE),
    "entropy_coef_max": _no(_ADAPTIVE),
    "entropy_coef_delta": _no(_ADAPTIVE),
    "entropy_target": _no(_ADAPTIVE),
    "sapo_temperature_neg": _no("it is 1.05, as in the paper"),
    "sapo_temperature_pos": _no("it is 1.0, as in the paper"),
    "vespo_k_pos": _no(_VESPO),
    "vespo_k_neg": _no(_VESPO),
    "vespo_lambda_pos": _no(_VESPO),
    "vespo_lambda_neg": _no(_VESPO),
    "cast_lm_head_to_fp32": Entry(
        "opt.amp.head", "float32", lambda v: ["opt.amp.head=float32"] if v else []
    ),
    "ds3_gather_for_generation": _no("weights are gathered by themselves with opt=[fsdp]"),
    "bnb_4bit_quant_type": Entry("model.quantize", "nf4", lambda _: []),
    "bnb_4bit_quant_storage": _no("packed weights are bytes"),
    "use_bnb_nested_quant": _no("scales are not quantised"),
    "router_aux_loss_coef": _no("the balance of a mixture's experts is not trained"),
    "disable_dropout": _no("there is no dropout in training"),
    "shuffle_dataset": _no("rows are always shuffled, by the seed"),
    "pad_to_multiple_of": _no("sequences are laid out without padding"),
    "use_vllm": Entry("engine=vllm", "", _vllm),
    "vllm_mode": _no(_ONE_SERVER),
    "vllm_model_impl": _no(_ONE_SERVER),
    "vllm_enable_sleep_mode": _no("the engine sleeps by itself where the device needs its memory"),
    "vllm_structured_outputs_regex": _no("completions are not constrained"),
    "vllm_server_base_url": _no(_ONE_SERVER),
    "vllm_server_host": _no(_ONE_SERVER),
    "vllm_server_port": _no(_ONE_SERVER),
    "vllm_server_timeout": _no(_ONE_SERVER),
    "vllm_group_port": _no(_ONE_SERVER),
    "vllm_gpu_memory_utilization": Entry("engine.cache_gb", f"which {_BY_ITSELF}", lambda _: []),
    "vllm_max_model_length": _no("prompts and completions say how long it is"),
    "vllm_tensor_parallel_size": _no("each rank has the whole model: opt=[ddp]"),
    "vllm_importance_sampling_correction": Entry(
        "algo.correction", "", lambda v: ["algo.correction=off"] if v is False else []
    ),
    "vllm_importance_sampling_mode": Entry("algo.correction"),
    "vllm_importance_sampling_cap": Entry(
        "algo.correction_bounds", "[0, cap]", lambda v: [f"algo.correction_bounds=[0,{v}]"]
    ),
    "vllm_importance_sampling_clip_max": Entry(
        "algo.correction_bounds", "[least, most]", lambda _: []
    ),
    "vllm_importance_sampling_clip_min": Entry(
        "algo.correction_bounds", "[least, most]", lambda _: []
    ),
    "off_policy_mask_threshold": Entry("algo.off_policy_mask"),
    "use_bias_correction_kl": Entry("algo.kl.unbiased"),
    "use_transformers_continuous_batching": _no("the native engine batches continuously"),
    "transformers_continuous_batching_config": _no("the native engine batches continuously"),
    "use_transformers_paged": _no("the native engine has no pages"),
    "max_tool_calling_iterations": Entry("task.max_turns", "with task=environment"),
    "log_completions": Entry("completions", "all", lambda v: ["completions=all"] if v else []),
    "log_multimodal": _no("prompts are texts"),
    "num_completions_to_print": _no("RUN/report.html has the completions"),
    "log_unique_prompts": _no("RUN/report.html has the completions by prompt"),
    "log_completions_hub_repo": _no(_NO_HUB),
    "push_to_hub": _no(_NO_HUB),
    "hub_model_id": _no(_NO_HUB),
    "report_to": Entry("tracker", "wandb, trackio or tensorboard", _tracker),
    "run_name": Entry("tracker.name", "with tracker=wandb", lambda _: []),
    "output_dir": Entry("hydra.run.dir"),
    "logging_steps": _no("each step is logged"),
    "eval_strategy": Entry("evaluate.every", "steps; null = by itself", lambda _: []),
    "eval_steps": Entry("evaluate.every"),
    "save_steps": Entry("checkpoint.every"),
    "save_strategy": Entry("checkpoint.every", "", lambda _: []),
    "save_total_limit": Entry("checkpoint.keep"),
    "resume_from_checkpoint": Entry("resume", "auto", lambda v: ["resume=auto"] if v else []),
    "seed": Entry("seed"),
}

_ROWS = Entry("algo.train_rows", f"completions in a backward pass; it {_BY_ITSELF}", lambda _: [])

VERL: dict[str, Entry] = {
    "data.train_files": Entry("task.path", "with task=custom", _path),
    "data.val_files": Entry(
        "task.test_path",
        "",
        lambda v: [f"task.test_path={spell(v[0] if isinstance(v, list) else v)}"],
    ),
    "data.prompt_key": Entry("task.prompt_field"),
    "data.reward_fn_key": _no("a function gets the column data_source by its name"),
    "data.train_batch_size": Entry("algo.prompts_per_step"),
    "data.max_prompt_length": TRL["max_prompt_length"],
    "data.filter_overlong_prompts": TRL["max_prompt_length"],
    "data.max_response_length": Entry("algo.sampling.max_new_tokens"),
    "data.shuffle": TRL["shuffle_dataset"],
    "data.truncation": _no("prompts are never cut: prompts.too_long is error or skip"),
    "actor_rollout_ref.model.path": TRL["model_name_or_path"],
    "actor_rollout_ref.model.trust_remote_code": _no(_NO_CODE),
    "actor_rollout_ref.model.enable_gradient_checkpointing": TRL["gradient_checkpointing"],
    "actor_rollout_ref.model.use_remove_padding": TRL["pad_to_multiple_of"],
    "actor_rollout_ref.model.lora_rank": Entry(
        "model.adapter.rank", "", lambda v: [f"model.adapter.rank={v}"] if v else []
    ),
    "actor_rollout_ref.model.lora_alpha": Entry("model.adapter.alpha"),
    "actor_rollout_ref.model.target_modules": TRL["lora_target_modules"],
    "actor_rollout_ref.actor.optim.lr": Entry("algo.lr"),
    "actor_rollout_ref.actor.optim.lr_warmup_steps": Entry(
        "algo.warmup_steps", "", lambda v: [f"algo.warmup_steps={max(0, v)}"]
    ),
    "actor_rollout_ref.actor.optim.lr_warmup_steps_ratio": TRL["warmup_ratio"],
    "actor_rollout_ref.actor.optim.weight_decay": TRL["weight_decay"],
    "actor_rollout_ref.actor.grad_clip": Entry("algo.grad_clip"),
    "actor_rollout_ref.actor.clip_ratio": TRL["epsilon"],
    "actor_rollout_ref.actor.clip_ratio_low": Entry("algo.epsilon_low"),
    "actor_rollout_ref.actor.clip_ratio_high": Entry("algo.epsilon_high"),
    "actor_rollout_ref.actor.clip_ratio_c": Entry("algo.dual_clip"),
    "actor_rollout_ref.actor.entropy_coeff": Entry("algo.entropy_bonus"),
    "actor_rollout_ref.actor.use_kl_loss": Entry(
        "algo.kl.where", "with algo.kl.beta above 0", lambda _: []
    ),
    "actor_rollout_ref.actor.kl_loss_coef": Entry("algo.kl.beta"),
    "actor_rollout_ref.actor.kl_loss_type": Entry("algo.kl.estimator", "low_var_kl is k3", _kl),
    "actor_rollout_ref.actor.loss_agg_mode": Entry(
        "algo.aggregate",
        "tokens, completions or constant",
        _chosen(
            "algo.aggregate",
            **{
                "token-mean": "tokens",
                "seq-mean-token-mean": "completions",
                "seq-mean-token-sum": "constant",
                "seq-mean-token-sum-norm": "constant",
            },
        ),
    ),
    "actor_rollout_ref.actor.policy_loss.loss_mode": Entry(
        "algo.loss",
        "gspo; vanilla is grpo, dapo and so on",
        lambda v: ["algo.loss=gspo"] if v == "gspo" else [],
    ),
    "actor_rollout_ref.actor.ppo_epochs": Entry("algo.num_iterations"),
    "actor_rollout_ref.actor.ppo_mini_batch_size": Entry(
        "algo.minibatches", "data.train_batch_size over it", lambda _: []
    ),
    "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu": _ROWS,
    "actor_rollout_ref.actor.ppo_max_token_len_per_gpu": _ROWS,
    "actor_rollout_ref.actor.use_dynamic_bsz": _ROWS,
    "actor_rollout_ref.actor.use_torch_compile": TRL["torch_compile"],
    "actor_rollout_ref.actor.shuffle": _no("parts are in the order in which they were sampled"),
    "actor_rollout_ref.actor.strategy": Entry(
        "opt=[fsdp]", "", lambda v: switch("fsdp")(str(v).startswith("fsdp"))
    ),
    "actor_rollout_ref.actor.optim.min_lr_ratio": Entry(
        "algo.lr_schedule.end", "with algo.lr_schedule.kind=cosine", lambda _: []
    ),
    "actor_rollout_ref.actor.optim.warmup_style": TRL["lr_scheduler_type"],
    "actor_rollout_ref.actor.optim.lr_scheduler_type": TRL["lr_scheduler_type"],
    "actor_rollout_ref.actor.optim.total_training_steps": Entry(
        "algo.steps", "in optimizer steps", lambda _: []
    ),
    "actor_rollout_ref.rollout.prompt_length": TRL["max_prompt_length"],
    "actor_rollout_ref.rollout.response_length": Entry("algo.sampling.max_new_tokens"),
    "actor_rollout_ref.rollout.do_sample": _no("samples are drawn; evaluation is greedy"),
    "actor_rollout_ref.rollout.mode": _no(_ONE_SERVER),
    "actor_rollout_ref.rollout.dtype": TRL["dtype"],
    "actor_rollout_ref.rollout.repetition_penalty": _no(_PENALTY),
    "actor_rollout_ref.rollout.max_num_seqs": Entry(
        "algo.rollout_rows", f"it {_BY_ITSELF}", lambda _: []
    ),
    "actor_rollout_ref.rollout.log_prob_micro_batch_size_per_gpu": _ROWS,
    "actor_rollout_ref.ref.log_prob_micro_batch_size_per_gpu": _ROWS,
    "actor_rollout_ref.actor.ulysses_sequence_parallel_size": _no("a rank has whole sequences"),
    "actor_rollout_ref.actor.fsdp_config.param_offload": Entry(
        "opt=[offload]", "", switch("offload")
    ),
    "actor_rollout_ref.actor.fsdp_config.optimizer_offload": Entry(
        "opt=[offload]", "", switch("offload")
    ),
    "actor_rollout_ref.ref.fsdp_config.param_offload": Entry(
        "opt=[offload]", "which takes the reference model to the host, too", lambda _: []
    ),
    "actor_rollout_ref.rollout.name": Entry("engine=vllm", "or native", _vllm),
    "actor_rollout_ref.rollout.n": Entry("algo.samples_per_prompt"),
    "actor_rollout_ref.rollout.temperature": Entry("algo.sampling.temperature"),
    "actor_rollout_ref.rollout.top_p": Entry("algo.sampling.top_p"),
    "actor_rollout_ref.rollout.top_k": TRL["top_k"],
    "actor_rollout_ref.rollout.gpu_memory_utilization": TRL["vllm_gpu_memory_utilization"],
    "actor_rollout_ref.rollout.tensor_model_parallel_size": TRL["vllm_tensor_parallel_size"],
    "actor_rollout_ref.rollout.multi_turn.max_assistant_turns": TRL["max_tool_calling_iterations"],
    "actor_rollout_ref.rollout.val_kwargs.n": Entry(
        "evaluate.samples", "", lambda v: [f"evaluate.samples={v}"] if v and v > 1 else []
    ),
    "algorithm.adv_estimator": Entry(
        "algo.advantage",
        "group for grpo, rloo; there is no critic",
        _estimator,
    ),
    "algorithm.gamma": _no(_CRITIC),
    "algorithm.lam": _no(_CRITIC),
    "data.val_batch_size": _no(f"rows in a forward pass: it {_BY_ITSELF}"),
    "algorithm.norm_adv_by_std_in_grpo": Entry(
        "algo.advantage", "none for false", lambda v: [] if v else ["algo.advantage=none"]
    ),
    "algorithm.use_kl_in_reward": Entry(
        "algo.kl.where", "reward", lambda v: ["algo.kl.where=reward"] if v else []
    ),
    "algorithm.kl_ctrl.kl_coef": Entry("algo.kl.beta", "with algo.kl.where=reward", lambda _: []),
    "algorithm.filter_groups.enable": Entry(
        "algo.resample_rounds", "0 = off", lambda v: [] if v else ["algo.resample_rounds=0"]
    ),
    "custom_reward_function.path": Entry("task.rewards", "{module.function: weight}", lambda _: []),
    "custom_reward_function.name": Entry("task.rewards", "{module.function: weight}", lambda _: []),
    "reward_model.overlong_buffer.len": Entry("algo.overlong_buffer"),
    "trainer.total_epochs": TRL["num_train_epochs"],
    "trainer.total_training_steps": Entry("algo.steps", "", _steps),
    "trainer.logger": TRL["report_to"],
    "trainer.project_name": Entry("tracker.project", "with tracker=wandb", lambda _: []),
    "trainer.experiment_name": TRL["run_name"],
    "trainer.nnodes": Entry("slurm.nodes", "or torchrun: docs/nodes.md", lambda _: []),
    "trainer.n_gpus_per_node": Entry("opt=[ddp]", "takes all", lambda v: switch("ddp")(v > 1)),
    "trainer.save_freq": Entry("checkpoint.every", "", lambda v: [f"checkpoint.every={max(0, v)}"]),
    "trainer.test_freq": Entry("evaluate.every", "", lambda v: [f"evaluate.every={max(0, v)}"]),
    "trainer.max_actor_ckpt_to_keep": Entry("checkpoint.keep"),
    "trainer.resume_mode": Entry("resume", "", lambda v: ["resume=auto"] if v == "auto" else []),
    "trainer.val_before_train": _no("a run always measures before its first step"),
    "trainer.critic_warmup": _no("there is no critic"),
    "trainer.balance_batch": _no("sequences are laid out without padding"),
}


def as_markdown() -> str:
    """Return both tables, for docs/migrate.md."""
    lines: list[str] = []
    for of, table in (("TRL", TRL), ("verl", VERL)):
        lines += ["", f"## {of}", "", f"| {of} | here |", "|---|---|"]
        for key, entry in table.items():
            here = f"`{entry.here}`" if entry.here else "none"
            lines.append(f"| `{key}` | {here}{': ' if entry.note else ''}{entry.note} |")
    return "\n".join(lines[1:]) + "\n"


def describe(name: str) -> str:
    """Return a sentence with the equivalent of a setting of TRL or verl; "" for an unknown name.

    Args: name: the dotted name, or a part of it, such as actor.optim.lr or algo.num_generations.
    """
    tables = [(of, *item) for of, table in (("TRL", TRL), ("verl", VERL)) for item in table.items()]
    last = name.rpartition(".")[2]
    for of, key, entry in sorted(tables, key=lambda row: -_likeness(row[1], name)):
        if _likeness(key, name) or last == key.rpartition(".")[2]:
            if entry.here:
                note = f" ({entry.note})" if entry.note else ""
                return f"{of}'s {key} is {entry.here} here{note}."
            return f"{of}'s {key} has no counterpart here: {entry.note}."
    return ""


def _likeness(key: str, name: str) -> int:
    """Return the number of letters that a dotted name shares with a key; 0 if neither ends with the
    other.
    """
    short, long = sorted((f".{key}", f".{name}"), key=len)
    return len(short) if long.endswith(short) else 0
