"""A template that takes reasoning back out of the history: what is still reused, and what the probe says, over HTTP."""

from typing import Any

import pytest

from tests.api.test_real_answers import SYSTEM, Server, serving, user

# Shows what the last answer was thinking, and of those before only what they said.
REWRITES = (
    "{% set seen = namespace(last=-1) %}"
    "{% for message in messages %}{% if message.role == 'assistant' %}{% set seen.last = loop.index0 %}{% endif %}"
    "{% endfor %}"
    "{% for message in messages %}<|im_start|>{{ message.role }}{{ '\n' }}"
    "{% if message.reasoning_content and loop.index0 == seen.last %}"
    "{{ '<think>\n' + message.reasoning_content + '\n</think>\n' }}{% endif %}"
    "{{ message.content }}<|im_end|>{{ '\n' }}{% endfor %}"
    "{% if add_generation_prompt %}<|im_start|>assistant{{ '\n<think>\n' }}{% endif %}"
)
CELL = 32  # the grid's here: prompts stay below 512 tokens


async def ask(server: Server, messages: list[dict[str, Any]]) -> tuple[dict[str, Any], int, int]:
    """The answer as a message of the history, the prompt's tokens, and how many of them were cached."""
    body = await server.chat(*messages, max_tokens=40)
    message = body["choices"][0]["message"]
    assert message["reasoning_content"]
    answer = {"role": "assistant", "content": "Well.", "reasoning_content": message["reasoning_content"]}
    usage = body["usage"]
    return answer, usage["prompt_tokens"], usage["prompt_tokens_details"]["cached_tokens"]


async def count(server: Server, messages: list[dict[str, Any]]) -> int:
    return (await server.post("/tokenize", messages=messages, add_generation_prompt=False)).json()["count"]


def in_blocks(messages: list[dict[str, Any]]) -> dict[str, Any]:
    """The same conversation in the Anthropic dialect."""
    blocks = []
    for message in messages[1:]:
        text = {"type": "text", "text": message["content"]}
        thought = {"type": "thinking", "thinking": message.get("reasoning_content"), "signature": "omlx"}
        content = [thought, text] if message["role"] == "assistant" else [text]
        blocks.append({"role": message["role"], "content": content})
    return {"system": messages[0]["content"], "messages": blocks, "max_tokens": 4, "temperature": 0}


async def test_reasoning_that_leaves_the_history_costs_what_follows_it_and_the_probe_says_so(tmp_path):
    async with serving(tmp_path, REWRITES) as server:
        history = [SYSTEM, user("hi")]
        answer, prompt, _ = await ask(server, history)
        # The last answer's reasoning is still there: nothing is lost.
        history += [answer, user("and now?")]
        answer, _, cached = await ask(server, history)
        assert cached >= prompt // CELL * CELL
        # Now it goes, in the middle of what is cached.
        stable = await count(server, history[:2])
        history += [answer, user("go on")]
        found = await server.probe(*history)
        miss = found["first_miss"]
        assert (miss["message"], miss["role"]) == (2, "assistant")
        assert "reasoning" in miss["hint"]
        assert miss["token"] == found["cached_tokens"]
        assert stable // CELL * CELL <= found["cached_tokens"] < prompt
        # Both dialects are told the same.
        response = await server.post("/v1/messages", **in_blocks(history))
        assert response.status_code == 200, response.text
        usage = response.json()["usage"]
        assert usage["cache_read_input_tokens"] == found["cached_tokens"]
        assert usage["input_tokens"] + usage["cache_read_input_tokens"] == found["tokens"]
        # What the history was rewritten to is what the next turns continue.
        _, prompt, cached = await ask(server, history)
        assert cached == prompt - 1
        assert (await server.probe(*history))["first_miss"] is None


# Writes how hard the model is to think.
WITH_EFFORT = "{% if reasoning_effort %}<|im_start|>{{ reasoning_effort }}<|im_end|>{% endif %}" + REWRITES


async def test_the_probe_takes_the_same_body_in_every_dialect(tmp_path):
    async with serving(tmp_path, WITH_EFFORT) as server:

        async def asked(path: str, **body: Any) -> dict[str, Any]:
            answer = await server.post(path, **body)
            assert answer.status_code == 200, answer.text
            return answer.json()

        history = [SYSTEM, user("hi"), {"role": "assistant", "content": "Well."}, user("and now?")]
        chat = {"messages": history, "reasoning_effort": "low", "max_tokens": 4, "temperature": 0}
        usage = (await asked("/v1/chat/completions", **chat))["usage"]
        found = await asked("/admin/cache_probe", **chat)
        assert (found["tokens"], found["first_miss"]) == (usage["prompt_tokens"], None)

        items = {"instructions": SYSTEM["content"], "input": history[1:], "reasoning": {"effort": "low"}}
        limits = {"max_output_tokens": 4, "temperature": 0}
        assert await asked("/admin/cache_probe", dialect="responses", **items) == found
        first = await asked("/v1/responses", **items, **limits)
        further = {**items, **limits, "input": "go on", "previous_response_id": first["id"]}
        found = await asked("/admin/cache_probe", dialect="responses", **further)
        assert found["cached_tokens"] >= usage["prompt_tokens"] // CELL * CELL
        usage = (await asked("/v1/responses", **further))["usage"]
        assert (usage["input_tokens"], usage["input_tokens_details"]["cached_tokens"]) == (
            found["tokens"],
            found["cached_tokens"],
        )
        lost = await server.post("/admin/cache_probe", dialect="responses", input="a", previous_response_id="resp_x")
        assert (lost.status_code, lost.json()["error"]["param"]) == (400, "previous_response_id")


def turns(count: int) -> list[dict[str, Any]]:
    """So many questions and answers, each with words of its own."""
    return [
        {"role": role, "content": f"{role} number {k} says {chr(ord('a') + k) * 9} at length, then {k * 7919} again"}
        for k in range(count)
        for role in ("user", "assistant")
    ]


@pytest.mark.parametrize("dropped", [1, 2, 4])
async def test_the_probe_names_the_messages_that_a_client_dropped(tmp_path, dropped):
    async with serving(tmp_path) as server:
        talk = turns(5)
        await server.chat(SYSTEM, *talk)
        found = await server.probe(SYSTEM, *talk[dropped:], user("and now?"))
        miss = found["first_miss"]
        assert miss["message"] == 1
        which = "message 1 " if dropped == 1 else f"messages 1 to {dropped} "
        assert f"the client dropped {which}of" in miss["hint"]


async def test_other_words_are_no_dropped_messages(tmp_path):
    async with serving(tmp_path) as server:
        talk = turns(3)
        await server.chat(SYSTEM, *talk)
        found = await server.probe(SYSTEM, user("something else altogether, which nobody said before"), *talk[1:])
        assert "dropped" not in found["first_miss"].get("hint", "")
