"""The command line: parses, calls, prints. One file for each group of commands."""

from atlas_memory.cli import evaluating, generating, looking, planning, studying, tokenizing, training
from atlas_memory.cli.application import app

__all__ = ["app", "evaluating", "generating", "looking", "planning", "studying", "tokenizing", "training"]
