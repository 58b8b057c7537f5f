"""Reinforcement-learning post-training on any accelerator: the programs, for pip."""

from importlib.metadata import version

__version__ = version("anyroll")
