"""What operators see and delete of the caches that API keys have of their own; and names that nobody has."""

from pathlib import Path

from omlx.testing import make_tiny_model
from tests.admin.test_routes import CLEAR, PROBE, TEXT, serving

PROMPT = {"prompt": TEXT}


async def test_keys_with_salts_of_their_own_share_nothing(tiny_model_dir: Path, tmp_path: Path) -> None:
    file = tmp_path / "keys"
    file.write_text("alice: sk-alice\nbob: sk-bob\ncarol: sk-carol cache_salt=none\ndave: sk-dave cache_salt=none")
    keys = {"api_keys_file": file, "api_key_cache_salt": "auto", "admin_key": "op"}
    async with serving(tmp_path, tiny_model_dir, **keys) as bench:

        async def cached(key: str, salt: str | None = None) -> int:
            body = {"model": "tiny", "prompt": TEXT, "max_tokens": 2, "temperature": 0, "cache_salt": salt}
            answer = await bench.call("POST", "/v1/completions", json=body, headers={"x-api-key": key})
            assert answer.status_code == 200, answer.text
            found: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
            return found

        assert await cached("sk-alice") == await cached("sk-bob") == await cached("sk-carol") == 0
        full = await cached("sk-alice")
        assert full > 100 and await cached("sk-dave") == full  # those without a salt share one cache
        assert await cached("sk-alice", "x") == await cached("sk-bob", "x") == 0
        assert await cached("sk-alice", "x") == await cached("sk-bob") == full

        for name, kept in (("alice", full), ("bob", full), (None, full)):
            assert (await bench.post(PROBE, api_key_name=name, **PROMPT))["cached_tokens"] == kept
        assert (await bench.post(PROBE, api_key_name="alice", cache_salt="y", **PROMPT))["cached_tokens"] == 0
        assert (await bench.post(PROBE, api_key_name="alice", cache_salt="x", **PROMPT))["cached_tokens"] == full
        assert (await bench.post(CLEAR, api_key_name="alice", **PROMPT))["blocks"] > 0
        assert await cached("sk-alice") == 0
        assert await cached("sk-bob") == await cached("sk-alice", "x") == await cached("sk-carol") == full


async def test_a_key_that_is_not_there_is_named_by_its_field(tiny_model_dir: Path, tmp_path: Path) -> None:
    async with serving(tmp_path, tiny_model_dir, api_key="s3cret", admin_key="op") as bench:
        for path in (PROBE, CLEAR):
            for name in ("nobody", 5, ["key1"], ""):
                body = {"model": "tiny", "api_key_name": name} | PROMPT
                answer = await bench.call("POST", path, json=body, headers=bench.operator)
                assert (answer.status_code, answer.json()["error"]["param"]) == (400, "api_key_name")
        body = {"model": "tiny", "api_key_name": "key1"}
        answer = await bench.call("POST", CLEAR, json=body, headers=bench.operator)
        assert answer.status_code == 400  # not all of the model's blocks


async def test_clearing_a_model_that_nobody_knows_is_a_404(tmp_path: Path) -> None:
    cached = {"paged_ssd_cache_dir": str(tmp_path / "cache")}
    home, gone = tmp_path / "home", tmp_path / "gone"
    make_tiny_model(home / "models" / "tiny")
    make_tiny_model(gone / "models" / "old")
    async with serving(gone, **cached) as bench:
        await bench.complete(TEXT, model="old")
    async with serving(home, **cached) as bench:
        for body in ({"model": "tyni"}, {"model": "tyni", "older_than": "7d"}):
            answer = await bench.call("POST", CLEAR, json=body)
            assert (answer.status_code, answer.json()["error"]["code"]) == (404, "model_not_found")
        nothing = {"blocks": 0, "bytes": 0, "images": 0}
        assert await bench.post(CLEAR, model="tiny") == await bench.post(CLEAR, model=None, older_than="7d") == nothing
        assert await bench.post(CLEAR, model="old", older_than="7d") == nothing
        assert (await bench.post(CLEAR, model="old"))["blocks"] > 0  # not served any more, but stored
        assert (await bench.call("POST", CLEAR, json={"model": "old"})).status_code == 404
