"""The training step and the child process that runs it.

`client` and `messages` are free of torch, so that the learner's API process stays light; everything else is imported by
the child (`python -m qerld_learner.trainer`).
"""
