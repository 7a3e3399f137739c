"""Recipes: dataclasses filled from YAML, and the training loops that they drive."""
