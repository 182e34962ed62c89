"""A tiny model that has learnt one conversation with a tool by heart, and the tool."""

import json
from pathlib import Path

from transformers.utils import get_json_schema

from common.config import TinyConfig
from common.model.tiny import byte_tokenizer, train_from_scratch

# Every message ends with a token that nothing else is, as instruction models have it.
CHAT = """{% for tool in tools or [] %}{{ tool['function']['name'] }}
{% endfor %}{% for m in messages %}{{ m['role'][0] }}:{{ m['content'] }}\
{% for call in m['tool_calls'] or [] %}<tool_call>{{ call['function'] | tojson }}</tool_call>\
{% endfor %}<eos>{% endfor %}{% if add_generation_prompt %}a:{% endif %}"""
CALL = '<tool_call>{"name": "add", "arguments": {"number": 7}}</tool_call>'
END = b"\xff"  # common.model.tiny: <eos> in a row


class Adder:
    """Ten is wanted."""

    reward = 0.0

    def reset(self, a, **more):
        self.sum = a

    def add(self, number: int) -> int:
        """
        Add to the number.

        Args:
            number: what is added
        """
        self.sum += number
        self.reward = float(self.sum == 10)
        return self.sum


TOOLS = [get_json_schema(Adder.add)]


def write_caller(folder: Path) -> list[str]:
    """Write a model that calls add(7), and says `done`, and rows of which the second is to come to
    ten. Returns the settings of a run with both.
    """
    tokenizer = byte_tokenizer()
    tokenizer.split_special_tokens = False
    tokenizer.chat_template = CHAT
    rows = [
        (
            b"add\nu:From %d." % a + END + b"a:",
            CALL.encode() + END + b"t:%d" % (a + 7) + END + b"a:done",
        )
        for a in range(2, 6)
    ]
    config = TinyConfig(
        hidden_size=64,
        layers=2,
        heads=2,
        intermediate_size=128,
        context=512,
        pretrain_steps=150,
        pretrain_rows=8,
        pretrain_lr=4e-3,
        pretrain_seed=0,
    )
    train_from_scratch(config, rows * 300, False).save_pretrained(folder)
    tokenizer.save_pretrained(folder)
    lines = [json.dumps({"prompt": f"From {a}.", "a": a}) for a in (2, 3, 4, 5)]
    (folder / "rows.jsonl").write_text("\n".join(lines))
    settings = ["model=hf", f"model.path={folder}", "task=environment", "hardware=cpu"]
    settings += ["task.factory=tests.support.calling:Adder", f"task.path={folder}/rows.jsonl"]
    settings += ["task.test_problems=2", "task.reply_tokens=40", "evaluate.examples=2"]
    return [*settings, "algo.sampling.max_new_tokens=90"]
