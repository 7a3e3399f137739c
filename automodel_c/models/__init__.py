"""Models that the recipes train."""
