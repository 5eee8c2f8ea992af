"""A plugin of every kind, written against foredraft's public contracts alone."""
