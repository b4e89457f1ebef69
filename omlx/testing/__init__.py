"""Helpers for tests of omlx, and of programs that use it: tiny models, and a store on a disk that fails."""

from omlx.testing.faulty_store import Fault, FaultyStore, Injected
from omlx.testing.tiny_model import make_tiny_model
from omlx.testing.tiny_vlm import TINY_VLMS, make_tiny_vlm

__all__ = ["TINY_VLMS", "Fault", "FaultyStore", "Injected", "make_tiny_model", "make_tiny_vlm"]
