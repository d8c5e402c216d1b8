"""Where model-written programs run, what judges them, and functions that may hang, in a process of their own."""
