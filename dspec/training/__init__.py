"""The main job around Lightning: stages, module, checkpoints."""
