"""Reinforcement-learning post-training on any accelerator.

This module calls anyroll's programs, which do all the work. They run in processes of their own.
"""

from importlib.metadata import version

from anyroll._reward import Reward, reward
from anyroll._runs import Error, frame, metrics, resume, run

__all__ = ["Error", "Reward", "frame", "metrics", "resume", "reward", "run"]
__version__ = version("anyroll")
