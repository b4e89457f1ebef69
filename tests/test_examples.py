"""The scripts in examples/ run as they stand; what they promise they assert themselves."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


@pytest.mark.parametrize("script", EXAMPLES, ids=lambda path: path.stem)
def test_an_example_ends_well(script: Path, tmp_path: Path) -> None:
    """In a folder of its own, with no settings from outside."""
    env = {name: value for name, value in os.environ.items() if not name.startswith("OMLX_")}
    env |= {"OMLX_HOME": str(tmp_path / "home"), "TMPDIR": str(tmp_path)}
    command = [sys.executable, "-W", "error", str(script)]
    run = subprocess.run(command, cwd=tmp_path, env=env, capture_output=True, text=True, timeout=120)
    assert run.returncode == 0, run.stderr
    assert run.stdout
    assert list(tmp_path.iterdir()) == []


def test_readme_links_the_examples_and_they_are_all_listed() -> None:
    assert "examples/README.md" in (ROOT / "README.md").read_text("utf-8")
    table = (ROOT / "examples" / "README.md").read_text("utf-8")
    listed = [line.split("`")[1] for line in table.splitlines() if line.startswith("| `")]
    assert sorted(listed) == [path.name for path in EXAMPLES]
