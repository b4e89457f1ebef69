"""Chat templates rendered in worker processes: the same text as transformers', and bounds on time and memory."""

import io
import logging
import threading
from collections.abc import Iterator
from typing import Any

import pytest
from mlx_lm.tokenizer_utils import TokenizerWrapper
from mlx_lm.tokenizer_utils import load as load_tokenizer

from omlx import worker
from omlx.errors import BadRequest, Overloaded
from omlx.model import chat_template

CONVERSATION = [
    {"role": "system", "content": 'é <b> "quoted" \ud800'},
    {"role": "user", "content": [{"type": "text", "text": "hi"}], "name": None},
    {"role": "assistant", "reasoning": "why", "tool_calls": [{"function": {"name": "f", "arguments": {"x": 1.5}}}]},
]
TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]

ENDLESS = "{% for a in range(99999) %}{% for b in range(99999) %}{% endfor %}{% endfor %}"
HUGE = "{% set text = namespace(it='a') %}{% for a in range(99) %}{% set text.it = text.it * 2 %}{% endfor %}"

TEMPLATES = [
    "{{ bos_token }}{% for m in messages %}{{ m | tojson }}{{ m | tojson(indent=2) }}\n{% endfor %}{{ tools }}",
    """
    {%- for m in messages %}
        {% if loop.index > 2 %}{% break %}{% endif %}
        {%- generation %} {{ m.role }} {% endgeneration %}
    {% endfor %}
    {{ strftime_now('%Y') }} {{ enable_thinking }} {{ extra.a }} {{ add_generation_prompt }}
    """,
    "{% for m in messages %}{{ m.reasoning_content }}{{ m.thinking }}{{ m.name is defined }}{% endfor %}",
]


@pytest.fixture
def tokenizer(tiny_model_dir: Any) -> Any:
    return load_tokenizer(tiny_model_dir)


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> Iterator[worker.WorkerPool]:
    """Processes with narrow bounds."""
    pool = worker.WorkerPool("omlx.model.template_worker", cpu_s=1, memory=300 << 20)
    monkeypatch.setattr(chat_template, "_PROCESSES", pool)
    yield pool
    pool.stop()


def render(tokenizer: Any, **args: Any) -> str:
    return chat_template.render(tokenizer, "the-model", CONVERSATION, args, TOOLS)


@pytest.mark.parametrize("template", [*TEMPLATES, None])
def test_the_text_is_that_of_transformers(tokenizer: Any, template: str | None) -> None:
    tokenizer.chat_template = template or tokenizer.chat_template
    args = {"extra": {"a": [1, None]}, "enable_thinking": True}
    expected = tokenizer.apply_chat_template(
        CONVERSATION, add_generation_prompt=True, tokenize=False, tools=TOOLS, **args
    )
    assert render(tokenizer, **args) == expected


@pytest.mark.parametrize("text", ["a漢😀", "漢", "\ud800\udc00", "é\n"])
def test_long_texts_pass_in_pieces(tokenizer: Any, monkeypatch: pytest.MonkeyPatch, text: str) -> None:
    monkeypatch.setattr(worker, "_PIECE", 1000)
    tokenizer.chat_template = "{{ messages[0].content }}"
    for length in (1000, 1001, 2000, 5001):
        content = (text * length)[:length]
        assert chat_template.render(tokenizer, "m", [{"role": "user", "content": content}], {}) == content


def test_no_part_of_a_pickle_is_much_longer_than_a_piece(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(worker, "_PIECE", 1000)
    value = [{"content": "漢" * 1_000_000, "n": None}, "x" * 2500, 5]
    parts = worker._pickled(value)
    assert max(map(len, parts)) < 200_000
    assert worker._Unpickler(io.BytesIO(b"".join(parts))).load() == value


def test_named_templates(tokenizer: Any) -> None:
    tokenizer.chat_template = {"default": "plain", "tool_use": "tools"}
    assert render(tokenizer) == "tools"
    assert chat_template.render(tokenizer, "m", CONVERSATION, {}) == "plain"


def test_a_template_of_mlx_lm_in_python(tokenizer: Any) -> None:
    def template(messages: list[dict[str, Any]], **options: Any) -> str:
        return f"{len(messages)} messages {options['add_generation_prompt']}"

    wrapped = TokenizerWrapper(tokenizer._tokenizer, chat_template=template)
    assert render(wrapped) == "3 messages True"


@pytest.mark.parametrize(("template", "reason"), [
    ("{{ raise_exception('only user turns') }}", "only user turns"),
    ("{{ messages[9].content }}", "no element 9"),
    ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "recursion"),
    ("{{ 1 / 0 }}", "division"),
])  # fmt: skip
def test_what_a_template_refuses(tokenizer: Any, template: str, reason: str) -> None:
    tokenizer.chat_template = template
    with pytest.raises(BadRequest, match=f"refused the messages: .*{reason}"):
        render(tokenizer)


@pytest.mark.parametrize(("template", "reason"), [(ENDLESS, "1 s of processor time"), (HUGE, "300 MB of memory")])
def test_a_template_without_bounds(
    tokenizer: Any, small: Any, template: str, reason: str, caplog: pytest.LogCaptureFixture
) -> None:
    tokenizer.chat_template = template
    with caplog.at_level(logging.WARNING), pytest.raises(BadRequest, match=f"template failed on .*{reason}"):
        render(tokenizer)
    assert [record.message for record in caplog.records if "the-model" in record.message and reason in record.message]
    tokenizer.chat_template = "fine"
    assert render(tokenizer) == "fine"


def test_looping_templates_delay_nobody_and_end_when_they_are_stopped(tokenizer: Any) -> None:
    """More of them than there are places for those that have just begun; they may go on for ever."""
    pool = worker.WorkerPool("omlx.model.template_worker", cpu_s=10_000, memory=1 << 30)
    options = {"add_generation_prompt": True, "tokenize": False}
    ended: list[str] = []

    def loop() -> None:
        with pytest.raises(Overloaded, match="stopping"):
            pool.call((ENDLESS, CONVERSATION, options), "the-model")
        ended.append("stopped")

    threads = [threading.Thread(target=loop) for _ in range(2)]
    for thread in threads:
        thread.start()
    try:
        assert pool.call(("fine", CONVERSATION, options), "the-model") == "fine"
        assert not ended
    finally:
        pool.stop()
        for thread in threads:
            thread.join()
    assert ended == ["stopped", "stopped"]
    assert pool.call(("later", CONVERSATION, options), "the-model") == "later"
    pool.stop()


def test_no_process_can_be_started(monkeypatch: pytest.MonkeyPatch) -> None:
    pool = worker.WorkerPool("omlx.model.no_such_module", cpu_s=1, memory=1 << 30)
    with pytest.raises(Overloaded, match="did not start"):
        pool.call("anything")
    monkeypatch.setattr("sys.executable", "/nonexistent/python")
    with pytest.raises(Overloaded, match="could be started"):
        pool.call("anything")
