"""Bytes and files of the cache. No MLX here: everything can run in a thread of its own."""
