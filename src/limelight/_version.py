"""The version, where every part can see it."""

__version__ = "0.1.0"
