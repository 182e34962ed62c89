"""model.adapter: low-rank matrices, trained in place of the weights, for every algorithm."""

import copy
import importlib.util
import json
import re
import shutil

import pytest
import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM

from common.config import AdapterConfig, ConfigError
from common.device import hardware
from common.distributed.context import Context
from common.finetune import Finetuner
from common.model import logprobs
from common.model.adapter import Adapter
from common.model.load import load_model
from common.model.packed_linear import is_adapted, packed, packs
from common.model.precision_copies import keep_wide
from common.model.quantized import replace_layers
from common.parts import open_parts
from common.sampling.native import Sampler
from common.task import build
from grpo.loss import kl
from grpo.policy import Policy
from launch import compose
from tests.support import CONF, SMALL_GRPO, adapters, events
from tests.support.adapters import ADAPTER, AMP, EGGROLL, RFT, matrices, run, same
from tests.support.models import small_model

peft = pytest.importorskip("peft")
pytestmark = [
    pytest.mark.usefixtures("emulated_bf16"),
    pytest.mark.filterwarnings("ignore:`is_gradient_checkpointing` is deprecated:FutureWarning"),
]

GRPO = [*adapters.GRPO, "evaluate.every=2"]
LEAN = "opt=[amp,checkpointing]"


@pytest.mark.parametrize(
    "settings",
    [
        *(GRPO, [*EGGROLL, AMP]),
        *(
            pytest.param(more, marks=pytest.mark.thorough)
            for more in ([*RFT, LEAN], EGGROLL, [*GRPO, LEAN])
        ),
    ],
)
def test_a_run_trains_the_adapter_alone(tmp_path, settings):
    result = run(tmp_path / "out", *settings, "model.adapter.merge=true")
    base = AutoModelForCausalLM.from_pretrained(
        json.loads((tmp_path / "out/adapter/adapter_config.json").read_text())[
            "base_model_name_or_path"
        ]
    )
    half = AMP in settings or LEAN in settings
    if half:  # the run has held it like this
        for parameter in base.parameters():
            parameter.data = parameter.data.bfloat16().float()
    merged = AutoModelForCausalLM.from_pretrained(tmp_path / "out/model")
    loaded = peft.PeftModel.from_pretrained(base, tmp_path / "out/adapter").eval()
    again, tokenizer = result.model_and_tokenizer()
    ids = torch.tensor([tokenizer("ab => abab")["input_ids"]])
    with torch.no_grad():
        wanted = loaded(ids).logits
        torch.testing.assert_close(merged(ids).logits, wanted, rtol=1e-5, atol=1e-5)
        if not half:
            torch.testing.assert_close(again(ids).logits, wanted, rtol=1e-5, atol=1e-5)
        with loaded.disable_adapter():
            assert not torch.allclose(loaded(ids).logits, wanted, atol=1e-3)
    found = matrices(tmp_path / "out")
    assert all("lora_" in name for name in found)
    assert any(tensor.any() for name, tensor in found.items() if "lora_B" in name)


# --- what is computed


def lm_of(tmp_path, *overrides, **options):
    run = compose(list(overrides), CONF)
    return open_parts(run, Context(0, 1, hardware.find(run.hardware), tmp_path), **options)


def likelihoods(parts, model):
    laid = logprobs.group([[5, 6, 7], [8, 9]], [[[3, 4, 5]] * 2] * 2, parts.lm.device)
    with torch.no_grad(), torch.autocast("cpu", parts.lm.precision.compute, enabled=parts.lm.half):
        return logprobs.token_logprobs(model, laid, 1.0)[0]


@torch.no_grad()
def disturb(parts):
    for parameter in parts.lm.adapter.parameters.values():
        parameter.add_(torch.randn_like(parameter) / 10)


@pytest.mark.parametrize("more", [[], [AMP]])
def test_without_its_adapter_it_is_the_base_to_the_bit(tmp_path, in_cache, more):
    """In bfloat16 too, where the base has no float32 weights: it has been saved in bfloat16."""
    run = compose(SMALL_GRPO, CONF)
    small = load_model(run.model, build(run.task), torch.bfloat16, torch.device("cpu"))
    for part in small:
        part.save_pretrained(tmp_path / "base")
    mine = [text for text in SMALL_GRPO if "model.tiny" not in text]
    mine += ["model=hf", f"model.path={tmp_path / 'base'}", *more]
    plain = lm_of(tmp_path, *mine)
    adapted = lm_of(tmp_path, *mine, ADAPTER, reference=True)
    wanted = likelihoods(plain, plain.model)
    assert torch.equal(likelihoods(adapted, adapted.model), wanted), "B is zero"
    disturb(adapted)
    moved = likelihoods(adapted, adapted.model)
    assert not torch.allclose(moved, wanted, atol=1e-2)
    with adapted.lm.reference_on_device() as reference:
        assert torch.equal(likelihoods(adapted, reference), wanted)
    assert torch.equal(likelihoods(adapted, adapted.model), moved)
    masters = {name: p.dtype for name, p in adapted.model.named_parameters() if p.requires_grad}
    assert set(masters.values()) == {torch.float32}
    frozen = [p for p in adapted.model.parameters() if p.ndim == 2 and not p.requires_grad]
    assert {p.dtype for p in frozen} == {torch.bfloat16 if more else torch.float32}


def test_adapter_updates_equal_a_plain_peft_loop(tmp_path, in_cache, monkeypatch):
    """Two steps of SGD; in the second one the KL term has a gradient."""
    seen, own = [], Policy.step

    def step(self, batch, advantage, loss, update):
        if not seen:
            weights = {n: t.clone() for n, t in self.parts.lm.adapter.parameters.items()}
            seen.append((copy.deepcopy(self.parts.lm.model), weights))
        seen.append((batch, advantage))
        return own(self, batch, advantage, loss, update)

    monkeypatch.setattr(Policy, "step", step)
    sgd = ["algo.optimizer.name=SGD", "algo.lr=1.0", "algo.grad_clip=1e9", "algo.train_rows=4"]
    sgd.append("algo.warmup_steps=0")
    run(tmp_path / "out", *GRPO, *sgd, "algo.steps=2", "algo.kl.beta=0.5")
    (model, start), *steps = seen
    for name, parameter in model.named_parameters():
        if name in start:
            parameter.data = start[name]
    trained = [p for p in model.parameters() if p.requires_grad]

    def likelihood(prompt, completion):
        ids = torch.tensor([prompt + completion])
        chosen = model(input_ids=ids, use_cache=False).logits[0, len(prompt) - 1 : -1]
        return chosen.log_softmax(-1).gather(1, ids[0, len(prompt) :, None])[:, 0]

    layers = [module for module in model.modules() if hasattr(module, "lora_A")]
    for batch, advantage in steps:
        total = 0.0
        for row, (tokens, length) in enumerate(zip(batch.tokens, batch.lengths, strict=True)):
            if not batch.loss_mask[row].any():
                continue
            group, sample = divmod(row, batch.size)
            rollout, place = batch.sources[group]
            text = rollout.requests.prompts[place], tokens[:length].tolist()
            for layer in layers:
                layer.enable_adapters(False)
            reference = likelihood(*text).detach()
            for layer in layers:
                layer.enable_adapters(True)
            logp = likelihood(*text)
            ratio = (logp - logp.detach()).exp()
            divergence = ratio * kl(logp, reference, "k3", 1e9)
            total = total + (-ratio * advantage[group, sample] + 0.5 * divergence).sum()
        (total / batch.count(1).tokens).backward()
        with torch.no_grad():
            for parameter in trained:
                parameter -= parameter.grad
                parameter.grad = None
    found = matrices(tmp_path / "out")
    wanted = {f"base_model.model.{n}": p for n, p in model.named_parameters() if p.requires_grad}
    assert len(found) == len(wanted)
    for name, parameter in wanted.items():
        tensor = found[name.replace(".default", "")]
        torch.testing.assert_close(tensor, parameter.detach(), rtol=1e-4, atol=1e-6)
    assert all(tensor.abs().max() > 1e-5 for name, tensor in found.items() if "lora_B" in name)
    assert events(tmp_path / "out")[1]["kl"] > 0


@pytest.mark.parametrize("name", ["llama", "gpt2"])
def test_what_is_packed_has_the_adapter_in_it(name, tmp_path):
    """And counts as the sum of both where it is perturbed."""
    model = small_model(name).bfloat16()
    if not packs(model.device, model.dtype):
        pytest.skip("this CPU does not multiply bfloat16")
    one = Context(0, 1, hardware.find(compose(SMALL_GRPO, CONF).hardware), tmp_path)
    adapter = Adapter(model, AdapterConfig(rank=4), one, seed=0)
    with torch.no_grad(), torch.random.fork_rng():
        torch.manual_seed(0)
        for parameter in adapter.parameters.values():
            parameter.data = (parameter + torch.randn_like(parameter) / 5).bfloat16()
    plain = small_model(name)
    plain.load_state_dict(adapter.merged(None), strict=False)
    ids = torch.arange(5, 13)[None]
    with torch.no_grad(), packed(model):
        found = model(ids).logits.float()
        assert all("packed" in layer.__dict__ for layer in adapter.layers)
    with torch.no_grad():
        wanted, beside = plain.bfloat16()(ids).logits.float(), model(ids).logits.float()
        with adapter.initially():
            base = model(ids).logits.float()
    moved = (wanted - base).norm()
    assert (found - wanted).norm() < 0.2 * moved
    assert (beside - wanted).norm() < 0.2 * moved
    adapter.layers[0].lora_A["default"].forward = lambda x: x[..., :4]
    with packed(model):
        assert "packed" not in adapter.layers[0].__dict__
        assert "packed" in adapter.layers[0].base_layer.__dict__


@pytest.mark.parametrize(("name", "kind"), [("llama", None), ("gpt2", None), ("llama", "int8")])
def test_what_samples_on_cuda_has_the_adapter_in_it(name, kind, tmp_path):
    """Renewed in place, and parted again where training wants the memory."""
    model = small_model(name).bfloat16()
    if kind is not None:
        replace_layers(model, kind, "model.quantize")
    one = Context(0, 1, hardware.find(compose(SMALL_GRPO, CONF).hardware), tmp_path)
    adapter = Adapter(model, AdapterConfig(rank=4), one, seed=0)
    keep_wide(model)
    sampler = Sampler(model, pad_id=96, stop_ids=(), rows=4, autocast=torch.bfloat16)

    def logits(model):
        with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
            return model(torch.arange(5, 13)[None]).logits.float()

    def change(seed):
        with torch.no_grad(), torch.random.fork_rng():
            torch.manual_seed(seed)
            for parameter in adapter.parameters.values():
                parameter.copy_(torch.randn_like(parameter) / 5)

    base, addresses = logits(model), set()
    change(0)
    sampler.refresh()
    assert torch.equal(logits(sampler.used), logits(model)), "on a CPU it is not merged"
    sampler.merged_bytes = 1  # as on CUDA
    for seed in (1, 2):
        change(seed)
        sampler.refresh()
        assert not any(map(is_adapted, sampler.used.modules()))
        beside = logits(model)
        assert (logits(sampler.used) - beside).norm() < 0.2 * (beside - base).norm()
        addresses.add(tuple(parameter.data_ptr() for parameter in sampler.used.parameters()))
    assert len(addresses) == 1
    sampler.rest()
    assert torch.equal(logits(sampler.used), beside)
    for layer, twin in sampler.narrowed.adapted:
        assert twin.base_layer.weight is layer.base_layer.weight


# --- going on


@pytest.mark.parametrize(
    "settings", [[*GRPO, AMP], pytest.param([*EGGROLL, AMP], marks=pytest.mark.thorough)]
)
def test_a_run_in_two_parts_ends_as_a_whole_one(tmp_path, settings):
    run(tmp_path / "whole", *settings, "checkpoint.every=2")
    shutil.copytree(tmp_path / "whole", tmp_path / "parts")
    shutil.rmtree(tmp_path / "parts/checkpoints/step-00000004")
    shutil.rmtree(tmp_path / "parts/adapter")
    saved = load_file(next(tmp_path.glob("parts/checkpoints/*2/tensors.safetensors")))
    assert saved
    assert all("lora_" in name for name in saved)
    run(tmp_path / "parts", *settings, "checkpoint.every=2", "resume=auto")
    same(matrices(tmp_path / "whole"), matrices(tmp_path / "parts"))
    rewards = [[event.get("reward") for event in events(tmp_path / f)] for f in ("whole", "parts")]
    assert rewards[0] == rewards[1]


@pytest.mark.thorough
def test_rft_stopped_while_it_learns_ends_as_a_whole_run(tmp_path, in_cache, monkeypatch):
    more = ["checkpoint.every=1", "model.adapter.dropout=0.2", "algo.iterations=2"]
    more += ["algo.start_from=last", "algo.patience=2"]
    run(tmp_path / "whole", *RFT, *more)
    own, steps = Finetuner.step, []

    def step(self, *given):
        steps.append(self.done)
        if len(steps) in (3, 9):
            raise KeyboardInterrupt
        return own(self, *given)

    monkeypatch.setattr(Finetuner, "step", step)
    for _ in range(2):
        with pytest.raises(KeyboardInterrupt):
            run(tmp_path / "parts", *RFT, *more, "resume=auto")
    result = run(tmp_path / "parts", *RFT, *more, "resume=auto")
    assert result.after > result.before
    same(matrices(tmp_path / "whole"), matrices(tmp_path / "parts"))
    for folder in ("iteration-1", "iteration-2"):
        same(matrices(tmp_path / "whole" / folder), matrices(tmp_path / "parts" / folder))
        assert not (tmp_path / "parts" / folder / "model").exists()


def test_a_run_goes_on_from_an_adapter(tmp_path, in_cache):
    """And is pulled towards the model that it went on from."""
    run(tmp_path / "first", *GRPO)
    again = [text for text in GRPO if text != ADAPTER]
    again.append(f"model.adapter.path={tmp_path / 'first' / 'adapter'}")
    parts = lm_of(tmp_path, *again, reference=True)
    first = likelihoods(parts, parts.lm.model)
    disturb(parts)
    with parts.lm.reference_on_device() as reference:
        assert torch.equal(likelihoods(parts, reference), first)
    result = run(tmp_path / "second", *again, "algo.lr=1e-12")
    assert result.steps == 4
    one, two = matrices(tmp_path / "first"), matrices(tmp_path / "second")
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, two[name])
    plan = (tmp_path / "second" / "run.log").read_text()
    assert f"adapter of rank 4 from {tmp_path}" in plan


# --- ranks


@pytest.mark.parametrize(
    ("settings", "switch"),
    [
        (GRPO, "fsdp"),
        *(
            pytest.param(settings, switch, marks=pytest.mark.thorough)
            for settings, switch in ((GRPO, "ddp"), (EGGROLL, "fsdp"), (RFT, "fsdp"))
        ),
    ],
)
def test_two_ranks_make_the_adapter_of_one(launch, tmp_path, settings, switch):
    own = ["--config-dir", CONF, *settings]
    if settings is GRPO:
        own += ["algo.optimizer.name=SGD", "algo.lr=0.3"]
    launch(*own, "hydra.run.dir=one")
    launch(*own, f"opt=[{switch}]", f"opt.{switch}.ranks=2", "hydra.run.dir=two")
    one, two = matrices(tmp_path / "one"), matrices(tmp_path / "two")
    assert one.keys() == two.keys()
    tolerance = {"rtol": 1e-3, "atol": 2e-3} if settings is RFT else {"rtol": 1e-4, "atol": 1e-6}
    for name, tensor in one.items():
        torch.testing.assert_close(tensor, two[name], **tolerance, msg=name)
    assert json.loads((tmp_path / "two/result.json").read_text())["world_size"] == 2


@pytest.mark.thorough
def test_sharded_weights_in_half_precision(launch, tmp_path):
    own = ["--config-dir", CONF, *GRPO, "model.adapter.merge=true", "hydra.run.dir=out"]
    launch(*own, "opt=[fsdp,amp]", "opt.fsdp.ranks=2")
    assert all(t.any() for name, t in matrices(tmp_path / "out").items() if "lora_B" in name)
    merged = load_file(tmp_path / "out/model/model.safetensors")
    assert {t.dtype for t in merged.values()} == {torch.float32}


# --- mistakes


@pytest.mark.parametrize(
    ("overrides", "text"),
    [
        (
            ["algo=grpo", "model.adapter.alpha=16"],
            "model.adapter.alpha=16 has no effect without model.adapter.rank. Set it, for example",
        ),
        (
            ["algo=grpo", "model.adapter={path: somewhere, rank: 4}"],
            "model.adapter.rank=4 has no effect with model.adapter.path: the adapter there has its",
        ),
        (
            ["algo=grpo", "model.adapter={rank: 4, dropout: 0.1}"],
            "model.adapter.dropout=0.1 does not go with algo=grpo",
        ),
        (
            ["algo=eggroll", "model.adapter={rank: 4, dropout: 0.1}"],
            "model.adapter.dropout=0.1 has no effect with algo=eggroll",
        ),
        (
            ["algo=eggroll", ADAPTER, "algo.noise.head=full"],
            "algo.noise.head=full has no effect with model.adapter",
        ),
        (
            ["algo=eggroll", ADAPTER, "opt=[fsdp,amp]"],
            "algo=eggroll with model.adapter does not go with opt=[fsdp,amp]",
        ),
        (["algo=grpo", "model.adapter={rank: 0}"], "model.adapter.rank=0 is too small"),
        (
            ["algo=grpo", "model.adapter={rnk: 4}"],
            "model.adapter.rnk=4 is not a setting. Did you mean 'rank'?",
        ),
    ],
)
def test_settings_that_do_not_go_together(overrides, text):
    def check() -> None:
        given = compose([*overrides, "hardware=cpu"], CONF)
        given.algo.check_run(given)

    with pytest.raises(ConfigError, match=re.escape(text)):
        check()


@pytest.mark.parametrize(
    ("targets", "text"),
    [
        ("nothing", "model.adapter.targets='nothing': the model has no module 'nothing' with a ma"),
        ("lm_head", "puts an adapter on lm_head, the model's head, which is tied: the adapter"),
        ("q_proj,embed_tokens", "an adapter on model.embed_tokens, the model's embedding, which"),
    ],
)
def test_targets_that_cannot_be(tmp_path, in_cache, targets, text):
    with pytest.raises(ConfigError, match=re.escape(text)):
        lm_of(tmp_path, *SMALL_GRPO, f"model.adapter={{rank: 4, targets: '{targets}'}}")


def test_a_rank_above_that_of_a_layer(tmp_path, in_cache):
    text = "model.adapter.rank=200 is more than model.layers.0.self_attn.q_proj can have, a matrix"
    with pytest.raises(ConfigError, match=re.escape(text)):
        lm_of(tmp_path, *SMALL_GRPO, "model.adapter={rank: 200}")


def test_an_adapter_of_other_weights_is_told(tmp_path, in_cache, caplog):
    parts = lm_of(tmp_path, *SMALL_GRPO, ADAPTER)
    parts.lm.adapter.save(tmp_path / "adapter", parts.lm.tokenizer)
    again = [*SMALL_GRPO, f"model.adapter.path={tmp_path / 'adapter'}"]
    lm_of(tmp_path, *again)
    assert "beside the weights of" not in caplog.text
    settings = tmp_path / "adapter" / "adapter_config.json"
    saved = json.loads(settings.read_text()) | {"base_model_name_or_path": "other/model-1b"}
    settings.write_text(json.dumps(saved))
    lm_of(tmp_path, *again)
    assert "was trained beside the weights of other/model-1b, and this model is" in caplog.text
    for damage in ("[]", json.dumps(saved)[:-5]):
        settings.write_text(damage)
        with pytest.raises(ConfigError, match=r"model\.adapter\.path=.*adapter_config\.json"):
            lm_of(tmp_path, *again)


def test_without_peft_the_package_is_named(tmp_path, in_cache, monkeypatch):
    monkeypatch.setattr(importlib.util, "find_spec", lambda _: None)
    with pytest.raises(ConfigError, match=r"model\.adapter needs a package: .*\.\[lora"):
        lm_of(tmp_path, *SMALL_GRPO, ADAPTER)
