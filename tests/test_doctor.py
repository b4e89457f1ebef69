"""`omlx doctor`: real measurements, and a warning for each thing that can be wrong."""

import io
from pathlib import Path

import pytest
from rich.console import Console

from omlx import blas, doctor
from omlx.settings import Settings
from omlx.sizes import GB


def test_a_report_names_versions_device_blas_and_speed() -> None:
    rows = dict(doctor.report(None).rows)
    assert rows["MLX"].endswith(f"mlx-lm {doctor.TESTED_MLX_LM}")
    assert rows["device"]
    assert rows["BLAS"]
    assert float(rows["speed"].split()[0]) > 0
    assert " available of " in rows["memory"]
    assert rows["SSD cache"].startswith("off")
    assert rows["KV cache"] == "as the model computes it"
    assert dict(doctor.report(None, kv_bits=8).rows)["KV cache"] == "quantised to 8 bits"


def test_the_cache_folder_is_looked_at_and_not_made(tmp_path: Path) -> None:
    folder = tmp_path / "later" / "cache"
    rows = dict(doctor.report(folder, GB).rows)
    assert rows["SSD cache"] == f"{folder}, at most 1 GB"
    assert rows["free disk there"]
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("below", ["", "cache"])
def test_a_file_in_place_of_the_cache_folder_is_a_warning(tmp_path: Path, below: str) -> None:
    file = tmp_path / "file"
    file.touch()
    warnings = " ".join(doctor.report(file / below).warnings)
    assert f"the SSD cache cannot be used: {file} is not a folder" in warnings


def test_a_limit_beyond_the_free_disk_is_a_warning(tmp_path: Path) -> None:
    assert any("may grow to" in warning or "only" in warning for warning in doctor.report(tmp_path, 2**60).warnings)


def test_a_missing_blas_and_compilation_are_warnings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(blas, "is_cpu_build", lambda: True)
    monkeypatch.setattr(blas, "problem", lambda: "no libgfortran")
    monkeypatch.delenv("MLX_DISABLE_COMPILE", raising=False)
    warnings = " ".join(doctor.report(None).warnings)
    assert "no fast BLAS: no libgfortran" in warnings
    assert "MLX_DISABLE_COMPILE=1" in warnings


def test_another_mlx_lm_is_a_warning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(doctor, "TESTED_MLX_LM", "9.9.9")
    assert any("omlx is made for 9.9.9" in warning for warning in doctor.report(None).warnings)


def test_rendering_shows_rows_and_warnings_as_they_are() -> None:
    console = Console(file=io.StringIO(), width=60)
    found = doctor.Report((doctor.Row("folder", "[cache]"),), ("mind the gap",))
    doctor.render(found, console)
    assert isinstance(console.file, io.StringIO)
    shown = console.file.getvalue()
    assert "[cache]" in shown
    assert "warning: mind the gap" in shown


def test_the_status_says_whether_there_are_warnings(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file"
    file.touch()
    settings = Settings(home=tmp_path, paged_ssd_cache_dir=file, cache_ttl="7d", cache_write_policy="back")  # type: ignore[arg-type]
    assert doctor.run(settings) == 1
    assert "write back, unused blocks go after 7d" in capsys.readouterr().out
    monkeypatch.setattr(doctor, "report", lambda *given, **more: doctor.Report((), ()))
    assert doctor.run(Settings(home=tmp_path)) == 0
    assert "all well" in capsys.readouterr().out
