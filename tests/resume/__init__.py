"""Streams that are cut, resumed elsewhere and whole: `python -m tests.resume`."""
