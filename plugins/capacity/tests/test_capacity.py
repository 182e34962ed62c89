"""The plan past these machines: sizes, bytes and memory against what two ranks here do, and the
arithmetic of a step.
"""

import csv
import json

import pytest
import torch
from transformers import Qwen3MoeConfig

from common.config import ConfigError
from plugins.capacity import __main__ as capacity
from plugins.capacity.__main__ import (
    DEVICES,
    MODELS,
    Device,
    Model,
    Work,
    estimate_step,
    find_largest,
    find_limit,
    fixed_bytes,
)
from tests.support import SMALL

pytestmark = pytest.mark.run

WORK = Work()
GRPO = [setting for setting in SMALL if not setting.startswith(("algo.members", "algo.rows"))]


@pytest.mark.parametrize(
    ("name", "millions"),
    [
        ("gpt2", 124.4),
        ("smollm2_135m", 134.5),
        ("qwen2.5_0.5b", 494.0),
        ("qwen2.5_7b", 7615.6),
        ("llama3_8b", 8030.3),
    ],
)
def test_models_have_the_parameters_that_are_published(name, millions):
    assert Model(name).parameters / 1e6 == pytest.approx(millions, abs=0.1)


def test_flops_count_only_the_chosen_experts(tmp_path):
    sizes = {"hidden_size": 32, "num_hidden_layers": 2, "moe_intermediate_size": 16}
    config = Qwen3MoeConfig(**sizes, num_experts=8, num_experts_per_tok=2, vocab_size=100)
    config.architectures = ["Qwen3MoeForCausalLM"]
    config.save_pretrained(tmp_path)
    model = Model(str(tmp_path))
    experts = 2 * 8 * 3 * 32 * 16  # blocks, experts, matrices
    assert model.used == model.matrices + experts // 4
    assert sum(p.numel() for p in model.model.parameters() if p.ndim == 3) == experts


@pytest.mark.thorough
@pytest.mark.parametrize("algorithm", ["eggroll", "grpo"])
def test_ranks_send_what_is_predicted(launch, tmp_path, algorithm):
    settings = SMALL if algorithm == "eggroll" else ["task=translate", *GRPO]
    out = tmp_path / "out"
    short = "algo.sampling.max_new_tokens=2"  # what is traced takes long, and not to send
    launch(f"algo={algorithm}", *settings, short, "opt=[ddp,profile]", f"hydra.run.dir={out}")
    events = json.loads((out / "profile/trace.json").read_text())["traceEvents"]
    sent: dict[int, int] = {}  # times, by bytes of an all-reduce
    for event in events:
        if event.get("name") == "gloo:all_reduce":
            size = {"float": 4, "double": 8, "long int": 8}[event["args"]["Input type"][0]] * event[
                "args"
            ]["Input Dims"][0][0]
            sent[size] = sent.get(size, 0) + 1
    largest_message = max(sent)
    assert sent[largest_message] == 3, "one a step, of the three steps that are traced"
    model = Model(str(out / "model"))
    rows = Work(**(vars(WORK) | {"rows": 8 * 2}))
    predicted = estimate_step(algorithm, model, rows, Device("h100", WORK), 2).sent
    extra = 8 if algorithm == "eggroll" else 0  # the tokens
    assert largest_message == predicted + extra
    others = 80 if algorithm == "grpo" else 8
    assert all(size <= others for size in sent if size != largest_message), (
        "all else is a few numbers"
    )


def test_memory_is_that_of_adam_and_autocast():
    """Of a real model, its gradients and optimizer, without the 16-bit copy of a forward."""
    model = torch.nn.Linear(64, 32)
    optimizer = torch.optim.AdamW(model.parameters())
    model(torch.zeros(1, 64)).sum().backward()
    optimizer.step()
    held = [*model.parameters(), *(p.grad for p in model.parameters())]
    held += [s for state in optimizer.state.values() for s in state.values() if s.ndim]
    parameters = sum(p.numel() for p in model.parameters())
    assert sum(t.nbytes for t in held) == fixed_bytes("grpo", parameters, 1, 0) - 2 * parameters
    assert fixed_bytes("grpo", 8 * 10**9, 8, 0) == 16e9
    assert fixed_bytes("eggroll", 10**9, 1, 0) == 6e9, "masters and bf16 weights"


def test_a_rank_that_samples_has_all_weights():
    """However many devices they are shared out over, as in StateMemory.on_rank."""
    model = Model("qwen2.5_7b")
    weights = 2 * model.parameters
    for algorithm in ("eggroll", "grpo", "rft"):
        assert capacity.total_bytes(algorithm, model, WORK, 1024, 2) > weights
    assert capacity.total_bytes("classify", model, WORK, 1024, 2) < weights


def test_eggroll_sends_rewards_and_grpo_gradients():
    model, here = Model("qwen2.5_0.5b"), Device("a100_80g", WORK)
    assert {estimate_step("eggroll", model, WORK, here, n).sent for n in DEVICES[1:]} == {56 * 1024}
    assert {estimate_step("grpo", model, WORK, here, n).sent for n in DEVICES[1:]} == {
        4 * model.parameters
    }
    alone = estimate_step("grpo", model, WORK, here, 1)
    assert alone.communication == alone.sent == 0
    two, sixteen = (estimate_step("grpo", model, WORK, here, n).communication for n in (2, 16))
    assert sixteen > two > 0, "the network is slower than the link of a node"


def test_where_it_stops_and_why():
    model, here = Model("qwen2.5_0.5b"), Device("a100_80g", Work(network_gbs=0.1))
    few = Work(**(vars(WORK) | {"rows": 64}))
    steps = [estimate_step("eggroll", model, few, here, n) for n in DEVICES]
    most, why = find_limit(steps)
    assert most < 64
    assert why.startswith("decoding does not shrink")
    assert (
        find_limit([estimate_step("classify", model, WORK, here, n) for n in DEVICES])[1]
        == "gradients are waited for"
    )
    many = Work(
        **(
            vars(WORK)
            | {
                "rows": 4096,
                "scaling": "weak",
                "member_prompts": 1,
                "new_tokens": 1,
                "prompt_tokens": 1,
            }
        )
    )
    assert (
        find_limit([estimate_step("eggroll", model, many, here, n) for n in DEVICES])[1]
        == "every rank makes the whole update"
    )


def test_the_largest_model_fits_and_a_larger_one_does_not():
    models, here = {name: Model(name) for name in MODELS}, Device("a100_40g", WORK)
    for algorithm, rows in (("eggroll", 2), ("grpo", 1)):
        most, shared = (
            models[find_largest(algorithm, list(models.values()), WORK, here, shards)].parameters
            for shards in (1, 8)
        )
        for model in models.values():
            fits = (
                capacity.total_bytes(algorithm, model, WORK, 1, rows)
                <= capacity.FITTED * here.memory
            )
            assert fits == (model.parameters <= most), model.name
        assert shared > 4 * most
    assert find_largest("grpo", [models["llama3_70b"]], WORK, here, 1) == "none"


def test_memory_and_messages_are_told_in_the_same_units(capsys, monkeypatch):
    assert [
        capacity.format_bytes(n) for n in (0, 1023, 8192, 2**20, 1000 * 2**20, 2**30, 40 * 2**30)
    ] == [*("0 B", "1023 B", "8 kB", "1 MB", "1000 MB", "1 GB", "40 GB")]
    monkeypatch.setattr("sys.argv", ["capacity", "--model", "qwen2.5_7b", "--shards", "1"])
    capacity.main()
    printed = capsys.readouterr().out
    model = Model("qwen2.5_7b")
    assert f"{4 * model.parameters / 2**30:.1f} GB" in printed.split("grpo")[1].split("\n")[0], (
        "gradients"
    )
    assert f"{fixed_bytes('grpo', model.parameters, 1, 0) / 2**30:.1f} GB" in printed
    assert (
        "GB, MB and kB are of 2**30, 2**20 and 2**10 bytes, and a GB/s is 10**9 bytes a second."
        in printed
    )


@pytest.mark.thorough
def test_the_command(monkeypatch, capsys, tmp_path):
    def command(*arguments: str) -> int:
        monkeypatch.setattr("sys.argv", ["capacity", *arguments])
        try:
            capacity.main()
        except SystemExit as ended:
            return int(ended.code or 0)
        return 0

    assert (
        command("--model", "gpt2", "--hardware", "rtx4090", "v100", "--out", str(tmp_path / "out"))
        == 0
    )
    printed = capsys.readouterr().out
    assert (
        "gpt2 on v100: milliseconds of a step, 1,024 rows a step in all (strong scaling)" in printed
    )
    assert max(map(len, printed.splitlines())) <= 160
    with (tmp_path / "out/capacity.csv").open() as file:
        assert len(list(csv.DictReader(file))) == 2 * 4 * len(DEVICES)
    assert (tmp_path / "out" / "speedup_rtx4090.png").read_bytes().startswith(b"\x89PNG")
    other = tmp_path / "classifier"
    other.mkdir()
    (other / "config.json").write_text('{"classes": ["a", "b"]}')
    for arguments, text in (
        (
            ["--model", "qwen2.5_7"],
            "--model=qwen2.5_7 is not a choice. Did you mean 'qwen2.5_7b'?",
        ),
        (["--model", str(other)], f"--model={other} is no language model's folder: "),
        (["--hardware", "cpu"], "--hardware=cpu is not a choice."),
        (["--rows", "0"], "--rows=0 is too small."),
        (["--accepted", "2"], "--accepted=2 is too large."),
        (
            ["--model", "gpt2", "--out", "/dev/null/x"],
            "/dev/null/x cannot be written: Not a directory. Give another --out.",
        ),
    ):
        assert command(*arguments) == 2
        assert f"error: {text}" in capsys.readouterr().err
    assert "does not fit" not in printed
    assert (
        command(
            "--model", "qwen2.5_0.5b", "--hardware", "a100_40g", "--out", str(tmp_path / "small")
        )
        == 0
    )
    assert "does not fit" not in capsys.readouterr().out
    assert (
        command("--model", "qwen2.5_7b", "--hardware", "h100", "--out", str(tmp_path / "large"))
        == 0
    )
    warned = (
        "does not fit a device with weights replicated, as these times have them: grpo, rft,"
        " classify\n"
    )
    assert warned in capsys.readouterr().out
    with pytest.raises(ConfigError, match="is not a choice"):
        Model(str(tmp_path))
