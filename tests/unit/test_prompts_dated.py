"""Chat templates that write today's date."""

from common.memory.plan import describe_template
from common.model.load import PINNED, pin_date
from common.model.tiny import byte_tokenizer


def test_a_date_in_a_chat_template_is_pinned_and_named():
    tokenizer = byte_tokenizer()
    plain = "{% for m in messages %}{{ m['content'] }}{% endfor %}"
    assert pin_date(plain) == plain
    dated = (
        """{%- set today = strftime_now("%d %b %Y") %}{{ today }}: {{ strftime_now( '%Y' ) }} """
    )
    tokenizer.chat_template = pin_date(dated + plain)
    messages = [{"role": "user", "content": "?"}]
    said = tokenizer.apply_chat_template(messages, tokenize=False)
    assert said == "01 Jan 2026: 2026 ?"
    assert tokenizer.chat_template.startswith(PINNED)
    assert "in which today is 2026-01-01" in describe_template(tokenizer)
