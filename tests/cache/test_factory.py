from pathlib import Path

import pytest

from omlx.cache.factory import CacheConfig, CacheFactory, folder_name
from omlx.storage.folder import model_of


@pytest.mark.parametrize(
    ("name", "folder"),
    [
        ("smollm2-135m", "smollm2-135m"), ("org/model", "org%2Fmodel"), ("..", "%2E."), (".hidden", "%2Ehidden"),
        ("a", "%a"), ("a b", "a%20b"), ("100%", "100%25"), ("é", "%C3%A9"), ("x\0y", "x%00y"), ("/etc", "%2Fetc"),
    ],
)  # fmt: skip
def test_a_models_folder_is_one_safe_component(name, folder):
    assert folder_name(name) == folder
    assert Path(folder).name == folder


def test_different_models_have_different_folders():
    names = ["a/b", "a%2Fb", "a_b", "A_b", "%a", "a", "..", "%2E."]
    assert len({folder_name(name) for name in names}) == len(names)


def test_sizes_of_zero_and_a_missing_folder_turn_tiers_off(tmp_path):
    assert CacheFactory.create_paged_ssd_cache(CacheConfig(hot_cache_max_size=0), "m") is None
    ram = CacheFactory.create_paged_ssd_cache(CacheConfig(), "m")
    ssd_off = CacheFactory.create_paged_ssd_cache(
        CacheConfig(paged_ssd_cache_dir=tmp_path, max_paged_ssd_cache_size=0), "m"
    )
    for store in (ram, ssd_off):
        assert store is not None and store.keeps_ram and store.save_block(b"x" * 32, [], 0)
        assert store.get_block_path(b"x" * 32) is None
        store.close()
    assert list(tmp_path.iterdir()) == []


def test_the_default_limit_is_100_gb():
    assert CacheConfig().max_paged_ssd_cache_size == 100 * 1024**3 and CacheConfig().block_size == 64


@pytest.mark.parametrize(
    "name", ["index.sqlite", "index.sqlite-journal", "vision_features", "\u6a21\u578b" * 20, "x" * 5000]
)
def test_names_that_the_root_uses_itself_or_that_are_too_long_get_a_folder_all_the_same(tmp_path, name):
    store = CacheFactory.create_paged_ssd_cache(CacheConfig(paged_ssd_cache_dir=tmp_path), name)
    assert store is not None and len(folder_name(name)) <= 200 and folder_name(name) != folder_name(name + "y")
    assert store.save_block(b"x" * 32, [], 0) and store.flush(60)
    path = store.get_block_path(b"x" * 32)
    assert path is not None and path.is_file() and path.parent.parent == tmp_path / folder_name(name)
    if len(folder_name(name)) < 200:
        assert model_of(folder_name(name)) == name
    store.close()


def test_a_configuration_takes_sizes_as_text_and_refuses_what_is_none():
    assert CacheConfig(max_paged_ssd_cache_size="200GB").max_paged_ssd_cache_size == 200 * 1024**3  # type: ignore[arg-type]
    for wrong in ("5 apples", -1, 1.5, "", "1e3", "200%"):
        with pytest.raises(ValueError, match=r"size|number|negative|empty|percent"):
            CacheConfig(hot_cache_max_size=wrong)  # type: ignore[arg-type]
