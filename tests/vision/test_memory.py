"""What it takes to prepare a large picture: little beside its decoded pixels."""

import subprocess
import sys

import pytest

from tests.vision.models import folder

SIDE = 4000
_PROGRAM = """
import resource, sys
from pathlib import Path
from PIL import Image
from omlx.model.vlm_loader import load_vision

def peak():
    used = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return used if sys.platform == "darwin" else used * 1024

family = load_vision(Path(sys.argv[1])).family
family.pixels(Image.new("RGB", (64, 48)))
picture = Image.new("RGB", (SIDE, SIDE), "red")
before = peak()
family.pixels(picture)
print((peak() - before) / SIDE**2)
"""


@pytest.mark.parametrize("family", ["llava", "idefics3", "idefics3-unsplit", "qwen2_vl", "gemma3"])
def test_preparing_a_picture_takes_under_two_bytes_a_pixel_beside_its_decoded_ones(family: str) -> None:
    program = _PROGRAM.replace("SIDE", str(SIDE))
    done = subprocess.run(
        [sys.executable, "-c", program, str(folder(family))], capture_output=True, text=True, check=True, timeout=100
    )
    assert float(done.stdout) < 2
