"""How a config is composed, checked and turned into objects, and the run folder that it gets."""
