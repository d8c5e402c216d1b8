"""Where model-written programs run, and what judges them."""
