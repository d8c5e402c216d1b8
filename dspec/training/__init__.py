"""The main job, built on Lightning: stages, module, checkpoints."""
