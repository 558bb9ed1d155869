"""`qerld quickstart`: the whole loop on a small real model."""
