"""The names of a model: aliases, Hugging Face snapshots, and a default for names that are not served."""

import shutil
from pathlib import Path
from typing import Any

import httpx
import pytest

from omlx.engine.pool import EnginePool
from omlx.errors import NotFound, SettingError
from omlx.model.folder import folder_name, models_folder
from omlx.model.options import ModelOptions
from omlx.scheduler import SchedulerConfig
from omlx.settings import Settings
from tests.engine.test_broken_folders import client_of

CONFIG = SchedulerConfig(block_size=16, exact="on")
MESSAGES = [{"role": "user", "content": "a question of more than sixteen tokens"}]


async def ask(client: httpx.AsyncClient, model: str, path: str = "/v1/chat/completions") -> httpx.Response:
    return await client.post(path, json={"model": model, "messages": MESSAGES, "max_tokens": 2, "temperature": 0})


@pytest.mark.parametrize(
    ("path", "name"),
    [
        ("models--org--name/snapshots/0123abcd", "org/name"),
        ("models--gpt2/snapshots/0123abcd", "gpt2"),
        ("datasets--org--name/snapshots/0123abcd", "0123abcd"),
        ("models--org--name/other/0123abcd", "0123abcd"),
        ("models--a--b--c/snapshots/x", "x"),
        ("models----/snapshots/x", "x"),
        ("snapshots/x", "x"),
        ("plain", "plain"),
    ],
)
def test_a_snapshot_folder_is_called_by_its_repository(path: str, name: str) -> None:
    assert folder_name(Path("/hub") / path) == name


async def test_every_name_reaches_the_one_model_and_its_one_cache(tiny_model_dir: Path, tmp_path: Path) -> None:
    snapshot = tmp_path / "hub" / "models--org--name" / "snapshots" / "0123abcd"
    shutil.copytree(tiny_model_dir, snapshot)
    names = ["first", "second", "org/name"]
    pool = EnginePool(
        CONFIG, tmp_path, str(snapshot), options=ModelOptions(aliases=tuple(names[:2])), default_model="second"
    )
    await pool.start()
    try:
        async with client_of(pool, tmp_path) as client:
            listed = (await client.get("/v1/models")).json()["data"]
            assert [entry["id"] for entry in listed] == names
            assert [entry.get("root") for entry in listed] == ["org/name", "org/name", None]
            for turn, name in enumerate([*names, "claude-haiku-4-5", "gpt-9"]):
                for path in ("/v1/chat/completions", "/v1/messages"):
                    answer = (await ask(client, name, path)).json()
                    assert answer["model"] == name
                    if turn and path.endswith("completions"):
                        assert answer["usage"]["prompt_tokens_details"]["cached_tokens"] > 16
            assert [engine.name for engine in pool.loaded()] == ["org/name"]
            probe = await client.post("/admin/cache_probe", json={"model": "first", "messages": MESSAGES})
            assert probe.status_code == 200
            assert (await client.get("/v1/models/second")).json()["id"] == "second"
            embedding = await client.post("/v1/embeddings", json={"model": "text-embedding-9", "input": "x"})
            assert embedding.status_code == 404
            cleared = await client.post("/admin/cache/clear", json={"model": "first"})
            assert cleared.status_code == 200 and cleared.json()["blocks"] > 0
    finally:
        await pool.stop(5.0)


async def test_unknown_names_are_not_found_without_a_default(tiny_model_dir: Path, tmp_path: Path) -> None:
    shutil.copytree(tiny_model_dir, models_folder(tmp_path) / "tiny")
    for default, status in ((None, 404), ("tiny", 200)):
        pool = EnginePool(CONFIG, tmp_path, default_model=default)
        await pool.start()
        try:
            async with client_of(pool, tmp_path) as client:
                assert (await ask(client, "claude-haiku-4-5", "/v1/messages")).status_code == status
        finally:
            await pool.stop(5.0)


def test_a_default_that_is_not_served_is_refused_at_start(tmp_path: Path) -> None:
    with pytest.raises(NotFound, match="--default-model: no model 'nothing' here"):
        EnginePool(CONFIG, tmp_path, default_model="nothing")


@pytest.mark.parametrize("text", ["a,b", "a b", "a, b,a"])
def test_names_are_listed_as_flags_of_other_servers_list_them(text: str, tmp_path: Path) -> None:
    environ: dict[str, Any] = {"OMLX_HOME": str(tmp_path)}
    assert Settings.load({"served_model_name": text, "model": "m"}, environ).served_model_name == ("a", "b")
    with pytest.raises(SettingError, match=r"--served-model-name .* is for one model: --model has to name it"):
        Settings.load({"served_model_name": text}, environ)
