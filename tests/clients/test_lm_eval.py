"""lm-eval's `local-completions` runs a small task of our own end to end: choices by log-probability, and generation."""

import json
import os
import subprocess
import sys
from pathlib import Path

from omlx.engine.pool import EnginePool
from omlx.scheduler import SchedulerConfig
from omlx.server import create_app
from omlx.settings import Settings
from tests.api.serving import served

QUESTIONS = [
    {"q": "The capital of France is", "choices": [" Paris", " purple", " seven"], "a": 0},
    {"q": "Two plus two is", "choices": [" a river", " four", " singing"], "a": 1},
    {"q": "The sky on a clear day is", "choices": [" blue", " hungry", " nine"], "a": 0},
]
TASKS = {
    "small_choice": {
        "output_type": "multiple_choice",
        "doc_to_choice": "{{choices}}",
        "doc_to_target": "{{a}}",
        "target_delimiter": "",
        "metric_list": [{"metric": "acc"}],
    },
    "small_answer": {
        "output_type": "generate_until",
        "doc_to_target": "{{choices[a]}}",
        "generation_kwargs": {"until": ["\n", "."], "max_gen_toks": 8, "temperature": 0},
        "metric_list": [{"metric": "exact_match", "aggregation": "mean", "higher_is_better": True}],
    },
}


def test_a_task_runs_end_to_end(starter_model_dir: Path, tmp_path: Path) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text("".join(json.dumps(question) + "\n" for question in QUESTIONS))
    common = {"dataset_path": "json", "dataset_kwargs": {"data_files": {"test": str(data)}}, "test_split": "test"}
    for name, task in TASKS.items():  # JSON is YAML
        (tmp_path / f"{name}.yaml").write_text(json.dumps({"task": name, "doc_to_text": "{{q}}"} | common | task))
    pool = EnginePool(SchedulerConfig(), tmp_path, str(starter_model_dir))
    with served(create_app(pool, Settings(home=tmp_path))) as address:
        model = f"model={starter_model_dir.name},base_url={address}/v1/completions,tokenizer={starter_model_dir}"
        command = [
            sys.executable, "-m", "lm_eval", "run", "--model", "local-completions", "--model_args", model,
            "--tasks", ",".join(TASKS), "--include_path", str(tmp_path), "--output_path", str(tmp_path / "out"),
        ]  # fmt: skip
        environ = os.environ | {"HF_HUB_OFFLINE": "1", "HF_HOME": str(tmp_path / "hf"), "HOME": str(tmp_path)}
        done = subprocess.run(command, env=environ, cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    (report,) = (tmp_path / "out").rglob("*.json")
    results = json.loads(report.read_text())["results"]
    assert results["small_choice"]["acc,none"] == 1.0
    assert results["small_answer"]["exact_match,none"] >= 1 / 3
