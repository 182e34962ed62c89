"""Calls of tools that stand in a model's thoughts are none."""

import pytest

from common.episodes.tool_calls import PLAIN, Calls
from common.model.tiny import byte_tokenizer
from common.tasks.thoughts import MARKS
from tests.support.calling import CHAT, TOOLS


def call(number):
    return f'<tool_call>{{"name": "add", "arguments": {{"number": {number}}}}}</tool_call>'


@pytest.fixture(scope="module")
def calls():
    tokenizer = byte_tokenizer()
    tokenizer.split_special_tokens = False
    tokenizer.chat_template = CHAT
    return Calls.find(tokenizer, TOOLS)


def read(calls, text, before="a:"):
    def encode(part):
        return calls.tokenizer(part, add_special_tokens=False)["input_ids"]

    found = calls.read(encode(text), encode(f"u:?<eos>{before}"))
    return [one["function"]["arguments"]["number"] for one in found.get("tool_calls", [])]


@pytest.mark.parametrize("begin", PLAIN)
def test_only_calls_behind_the_thoughts_are_made(calls, begin):
    end = MARKS[begin]
    assert read(calls, f"{begin}maybe {call(9)}{end}{call(1)}") == [1]
    assert read(calls, f"maybe {call(9)}{end}\n{call(1)}{call(2)}") == [1, 2]
    assert read(calls, f"{begin}x{begin}y{end}{call(9)}{end}{call(1)}") == [1]
    assert read(calls, f"{begin}I could say {call(9)}") == []
    assert read(calls, f"{call(1)}{begin}or {call(9)}") == [1]
    assert read(calls, f"{call(9)}{end}{call(1)}", f"a:{begin}\n") == [1]
    assert read(calls, f"I could say {call(9)}", f"a:{begin}\n") == []
    assert read(calls, call(3)) == [3]
