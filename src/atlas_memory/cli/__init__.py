"""The command line: parses, calls, prints. One file for each group of commands."""

from atlas_memory.cli import (
    demonstrating,
    evaluating,
    generating,
    long_contexts,
    looking,
    planning,
    studying,
    tokenizing,
    training,
    writing,
)
from atlas_memory.cli.application import app

__all__ = [
    "app",
    "demonstrating",
    "evaluating",
    "generating",
    "long_contexts",
    "looking",
    "planning",
    "studying",
    "tokenizing",
    "training",
    "writing",
]
