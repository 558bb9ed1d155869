"""Tests of the learner's core."""
