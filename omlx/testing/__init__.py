"""Helpers for tests of omlx, and of programs that use it: a tiny model, and a store on a disk that fails."""

from omlx.testing.faulty_store import Fault, FaultyStore, Injected
from omlx.testing.tiny_model import make_tiny_model

__all__ = ["Fault", "FaultyStore", "Injected", "make_tiny_model"]
