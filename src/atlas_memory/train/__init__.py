"""Training: one typed recipe, a loop on Accelerate, checkpoints that resume exactly, and records of what happened."""

from atlas_memory.train.checkpoint import Checkpoints, DamagedCheckpointError
from atlas_memory.train.loop import DivergedError, train
from atlas_memory.train.recipe import Recipe
from atlas_memory.train.recipe_files import RecipeError, load_recipe, shipped_recipes

__all__ = [
    "Recipe",
    "RecipeError",
    "load_recipe",
    "shipped_recipes",
    "train",
    "DivergedError",
    "Checkpoints",
    "DamagedCheckpointError",
]
