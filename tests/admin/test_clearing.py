"""POST /admin/cache/clear by age and by conversation, and who holds how much, over a real engine."""

import asyncio
import time
from pathlib import Path
from typing import Any

import pytest

from omlx.storage.folder import folder_name
from omlx.testing import make_tiny_model
from tests.admin.test_routes import CLEAR, PROBE, TEXT, Bench, cached, fake, serving

__all__ = ["cached"]

DAY_NS = 86_400 * 10**9
SYSTEM = {"role": "system", "content": "You are a patient and careful helper. " * 3}


def chat(*texts: str) -> list[dict[str, str]]:
    """A conversation: user, assistant, user, ..."""
    roles = ("user", "assistant")
    return [SYSTEM, *({"role": roles[i % 2], "content": text} for i, text in enumerate(texts))]


async def say(bench: Bench, messages: list[dict[str, str]], **fields: Any) -> tuple[str, int]:
    """The answer's text and how much of the prompt was cached."""
    body = {"messages": messages, "max_tokens": 12, "temperature": 0, "ignore_eos": True} | fields
    answer = await bench.post("/v1/chat/completions", **body)
    return answer["choices"][0]["message"]["content"], answer["usage"]["prompt_tokens_details"]["cached_tokens"]


async def refused(bench: Bench, body: dict[str, Any]) -> tuple[int, str]:
    answer = await bench.call("POST", CLEAR, json=body)
    return answer.status_code, answer.json()["error"]["param"]


# ---- one conversation


@pytest.mark.parametrize("exact", ["on", "off"])
async def test_one_conversation_goes_and_the_system_prompt_stays(tiny_model_dir, tmp_path, cached, exact):
    async with serving(tmp_path, tiny_model_dir, exact=exact, **cached) as bench:
        mine, other = chat("What does a heron eat?"), chat("How deep is the lake over there?")
        answer, _ = await say(bench, mine)
        await say(bench, [*mine, {"role": "assistant", "content": answer}, {"role": "user", "content": "And why?"}])
        await say(bench, other)
        before = await bench.post(messages=other)
        done = await bench.post(CLEAR, messages=mine)
        assert done["blocks"] >= 3 and done["bytes"] > 0 and 16 <= done["kept_tokens"] < done["prompt_tokens"]
        assert done["kept_because"] == "shared with other conversations"
        after = await bench.post(messages=mine)
        assert after["cached_tokens"] <= done["kept_tokens"] + 16 and after["tokens"] == done["prompt_tokens"]
        assert await bench.post(messages=other) == before
        files = len(list((tmp_path / "cache").rglob("*.safetensors")))
        stored = (await bench.get())["stored"][0]
        assert stored["ssd"]["blocks"] == files  # the answer came when the files were gone
        gone = await bench.post(CLEAR, messages=other)
        assert (gone["kept_tokens"], gone["kept_because"]) == (0, None)
        assert list((tmp_path / "cache").rglob("*.safetensors")) == []


async def test_an_answer_at_the_end_need_not_be_the_one_that_was_given(tiny_model_dir, tmp_path, cached):
    async with serving(tmp_path, tiny_model_dir, **cached) as bench:
        question = chat("What does a heron eat?", "Fish.", "And at night?")
        await say(bench, question)
        edited = [*question, {"role": "assistant", "content": "Nothing."}, {"role": "assistant", "content": "Really."}]
        done = await bench.post(CLEAR, messages=edited)
        assert done["prompt_tokens"] == (await bench.post(messages=question))["tokens"] and done["kept_tokens"] == 0
        assert (await bench.get())["stored"][0]["ram"]["blocks"] == 0


async def test_an_earlier_answer_that_was_edited_is_another_conversation(tiny_model_dir, tmp_path, cached):
    async with serving(tmp_path, tiny_model_dir, **cached) as bench:
        first, edited = chat("What does a heron eat?"), chat("What does a heron eat?", "Fish.", "And at night?")
        await say(bench, first)
        await say(bench, edited)
        done = await bench.post(CLEAR, messages=edited)
        assert done["kept_because"] == "shared with other conversations"
        assert (await bench.post(messages=first))["first_miss"] is None
        assert (await bench.post(CLEAR, messages=first))["kept_tokens"] == 0  # the first question takes all with it
        assert (await bench.get())["stored"][0]["ram"]["blocks"] == 0


@pytest.mark.parametrize("kind", ["prompt", "tokens"])
async def test_a_prompt_and_token_ids_name_a_conversation_too(tiny_model_dir, tmp_path, kind):
    async with serving(tmp_path, tiny_model_dir) as bench:
        prompt: Any = TEXT if kind == "prompt" else [i % 250 for i in range(80)]
        await bench.complete(prompt)
        await bench.complete("Quite another one. " * 6)
        held = (await bench.get())["stored"][0]["ram"]["blocks"]
        done = await bench.post(CLEAR, **{kind: prompt})
        assert 0 < done["blocks"] < held and await bench.complete(prompt) == 0


async def test_a_salt_is_honoured(tiny_model_dir, tmp_path):
    async with serving(tmp_path, tiny_model_dir) as bench:
        for salt in ("one", "two"):
            await bench.complete(TEXT, cache_salt=salt)
        assert (await bench.post(CLEAR, prompt=TEXT))["blocks"] == 0
        assert (await bench.post(CLEAR, prompt=TEXT, cache_salt="one"))["blocks"] > 0
        assert (await bench.post(prompt=TEXT, cache_salt="one"))["cached_tokens"] == 0
        assert (await bench.post(prompt=TEXT, cache_salt="two"))["cached_tokens"] > 100


async def test_a_conversation_that_is_being_answered_stays(tiny_model_dir, tmp_path):
    async with serving(tmp_path, tiny_model_dir) as bench:
        body = {"model": "tiny", "prompt": TEXT, "max_tokens": 1500, "temperature": 0, "ignore_eos": True}
        cold = asyncio.create_task(bench.call("POST", "/v1/completions", json=body))
        async with asyncio.timeout(60):
            while not (await bench.get())["total"]["generated_tokens"]:
                await asyncio.sleep(0.01)
        done = await bench.post(CLEAR, prompt=TEXT)
        assert done["kept_because"] == "in use by a running request" and done["kept_tokens"] >= 128
        text = (await cold).json()["choices"][0]["text"]
        assert (await bench.call("POST", "/v1/completions", json=body)).json()["choices"][0]["text"] == text


async def test_what_might_delete_more_than_is_meant_is_refused(tiny_model_dir, tmp_path):
    async with serving(tmp_path, tiny_model_dir) as bench:
        await bench.complete(TEXT)
        blocks = (await bench.get())["stored"][0]["ram"]["blocks"]
        for body, param in (
            ({"model": "tiny", "messages": None}, "messages"),
            ({"model": "tiny", "prompt": None}, "prompt"),
            ({"model": "tiny", "older_than": None}, "older_than"),
            ({"model": "tiny", "mesages": chat("x")}, "mesages"),
            ({"model": "tiny", "cache_salt": "tenant"}, "cache_salt"),
            ({"model": "tiny", "older": "7d"}, "older"),
            ({"model": "tiny", "messages": []}, "messages"),
            ({"model": "tiny", "messages": chat("x"), "prompt": "x"}, "messages"),
            ({"model": "tiny", "messages": chat("x"), "older_than": "7d"}, "older_than"),
            ({"model": None, "messages": chat("x")}, "model"),
            ({"messages": chat("x")}, "model"),
            ({"model": "tiny", "prompt": ""}, "prompt"),
        ):
            assert await refused(bench, body) == (400, param)
        answer = await bench.call("POST", CLEAR, json={"model": "nobody", "messages": chat("x")})
        assert answer.status_code == 404
        assert (await bench.get())["stored"][0]["ram"]["blocks"] == blocks > 0


async def test_fields_of_a_chat_completion_may_come_along(tiny_model_dir, tmp_path):
    async with serving(tmp_path, tiny_model_dir) as bench:
        fields = {"temperature": 0.5, "stream": True, "user": "someone", "max_tokens": 5}
        await say(bench, chat("Hello there, heron!"))
        assert (await bench.post(CLEAR, messages=chat("Hello there, heron!"), **fields))["blocks"] > 0


async def test_a_model_without_a_cache_has_nothing_to_forget(tiny_model_dir, tmp_path):
    async with serving(tmp_path, tiny_model_dir, hot_cache_max_size=0) as bench:
        done = await bench.post(CLEAR, tokens=[1, 2, 3])
        assert done == {"blocks": 0, "bytes": 0, "prompt_tokens": 3, "kept_tokens": 0, "kept_because": None}


async def test_nobody_without_the_admin_key_deletes_a_conversation(tmp_path):
    bench = fake(tmp_path, api_key="s3cret", admin_key="0perator")
    body = {"model": "tiny", "messages": chat("x")}
    for headers in ({}, {"authorization": "Bearer s3cret"}):
        assert (await bench.call("POST", CLEAR, json=body, headers=headers)).status_code == 401
    assert (await fake(tmp_path).call("POST", CLEAR, json=body, peer="192.168.1.5")).status_code == 403


# ---- by age


def later(monkeypatch: pytest.MonkeyPatch, days: float) -> None:
    now = time.time_ns
    monkeypatch.setattr(time, "time_ns", lambda: now() + int(days * DAY_NS))


async def test_older_blocks_go_by_their_last_use_in_both_tiers(tiny_model_dir, tmp_path, cached, monkeypatch):
    async with serving(tmp_path, tiny_model_dir, **cached) as bench:
        old, used = TEXT, "Quite another text about nothing. " * 6
        for prompt in (old, used):
            await bench.complete(prompt)
        later(monkeypatch, 10)
        await bench.complete(used)
        assert await bench.post(CLEAR, older_than="11d") == {"blocks": 0, "bytes": 0, "images": 0}
        done = await bench.post(CLEAR, older_than="7d")
        assert done["blocks"] > 5 and done["bytes"] > 0
        probe = await bench.post(prompt=old)
        assert (probe["cached_tokens"], probe["first_miss"]["reason"]) == (0, "cleared")
        assert (await bench.post(prompt=used))["first_miss"] is None
        assert await bench.post(CLEAR, model=None, older_than="0") != {"blocks": 0, "bytes": 0, "images": 0}
        assert (await bench.get())["stored"] == [] or (await bench.get())["stored"][0]["ssd"]["blocks"] == 0


async def test_an_age_is_for_one_model_or_all_loaded_or_not(tmp_path, cached, monkeypatch):
    home, tokens = tmp_path / "home", list(range(60))
    for seed, name in enumerate(("one", "org/two", "three")):
        make_tiny_model(home / "models" / name, seed=seed)
    async with serving(home, **cached) as bench:
        for name in ("one", "org/two", "three"):
            await bench.complete(tokens, model=name)
    async with serving(home, **cached) as bench:
        later(monkeypatch, 10)
        await bench.complete(tokens, model="three")
        assert (await bench.post(CLEAR, model="org/two", older_than="7d"))["blocks"] == 4
        names = {path.parent.parent.name for path in (tmp_path / "cache").rglob("*.safetensors")}
        assert names == {"one", "three"} and folder_name("org/two") not in names
        assert (await bench.post(CLEAR, model=None, older_than="7d"))["blocks"] >= 4
        assert {path.parent.parent.name for path in (tmp_path / "cache").rglob("*.safetensors")} == {"three"}


@pytest.mark.parametrize("age", ["", "7", 7, "a week", "-1d", "0.5s", True, [7], "off", "1e3s"])
async def test_a_wrong_age_deletes_nothing_and_is_named(tiny_model_dir, tmp_path, age):
    async with serving(tmp_path, tiny_model_dir) as bench:
        await bench.complete(TEXT)
        answer = await bench.call("POST", CLEAR, json={"model": None, "older_than": age})
        error = answer.json()["error"]
        assert (answer.status_code, error["param"]) == (400, "older_than")
        assert error["message"].startswith(f'older_than: "{age}') and "\n" not in error["message"]
        assert (await bench.get())["stored"][0]["ram"]["blocks"] > 0


# ---- who holds how much


async def test_each_models_share_is_shown_loaded_or_not(tmp_path, cached):
    home, tokens = tmp_path / "home", list(range(60))
    for seed, name in enumerate(("one", "org/two")):
        make_tiny_model(home / "models" / name, seed=seed)
    started = time.time_ns()
    async with serving(home, **cached) as bench:
        assert (await bench.get())["stored"] == []
        await bench.complete(tokens, model="org/two")
    async with serving(home, **cached) as bench:
        (other,) = (await bench.get())["stored"]  # no model is loaded
        assert (other["model"], other["loaded"]) == ("org/two", False)
        assert other["ram"] == {"blocks": 0, "tokens": 0, "bytes": 0}
        assert (other["ssd"]["blocks"], other["ssd"]["tokens"]) == (4, 64) and started < other["last_used_ns"]
        assert (await bench.get())["total"]["bytes"]["ssd"] > other["ssd"]["bytes"]
        await bench.complete(tokens, model="one")
        one, again = (await bench.get())["stored"]
        assert again == other and (one["model"], one["loaded"]) == ("one", True)
        assert one["last_used_ns"] > other["last_used_ns"]
        stats = bench.pool._loaded["one"].tiers.stats()
        assert one["ram"] == {"blocks": 4, "tokens": 64, "bytes": stats["kv_cache_memory"]}
        assert one["ssd"] == {"blocks": 4, "tokens": 64, "bytes": stats["bytes"]["ssd"]}


async def test_what_was_written_and_what_still_will_be_is_shown(tiny_model_dir, tmp_path, cached):
    async with serving(tmp_path, tiny_model_dir, cache_write_policy="back", **cached) as bench:
        await bench.complete(TEXT)
        total = (await bench.get())["total"]
        assert (total["files_written"], total["bytes_written"]) == (0, 0)
        assert total["unsaved_bytes"] == total["kv_cache_memory"] > 0
        bench.pool._loaded["tiny"].tiers.flush(60)
        total = (await bench.get())["total"]
        assert total["unsaved_bytes"] == 0 and total["files_written"] == total["blocks_hot"]
        assert total["bytes_written"] == bench.pool._loaded["tiny"].tiers.stats()["bytes"]["ssd"]


# ---- expiry, by a server


async def test_blocks_expire_while_no_model_is_loaded(tiny_model_dir, tmp_path, cached):
    async with serving(tmp_path, tiny_model_dir, **cached) as bench:
        await bench.complete(TEXT)
    folder: Path = tmp_path / "cache"
    assert len(list(folder.rglob("*.safetensors"))) > 5
    async with serving(tmp_path, cache_ttl="1s", **cached) as bench:
        async with asyncio.timeout(60):
            while list(folder.rglob("*.safetensors")):
                await asyncio.sleep(0.1)
        assert (await bench.get())["stored"] == []


async def test_a_probe_says_that_blocks_have_expired(tiny_model_dir, tmp_path, cached):
    async with serving(tmp_path, tiny_model_dir, cache_ttl="1s", **cached) as bench:
        await bench.complete(TEXT)
        async with asyncio.timeout(60):
            while (probe := await bench.post(PROBE, prompt=TEXT))["cached_tokens"]:
                await asyncio.sleep(0.1)
        assert probe["first_miss"] == {"token": 0, "reason": "expired"}
        figures = (await bench.get())["models"]["tiny"]
        assert figures["expired"] == figures["expired_ram"] + figures["expired_ssd"] >= 10
        assert await bench.complete(TEXT) == 0
