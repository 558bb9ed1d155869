"""Plans of the fused product by layer and tokens, tuned on an H200; `benchmarks/plan_table.py` writes such a table."""

from __future__ import annotations

from qerld_kernels.fused_product import Plan

__all__ = ["PLANS"]

PLANS: dict[tuple[int, int], tuple[tuple[int, Plan], ...]] = {
    (3584, 3584): (
        (8, Plan(8, 1, 256, 5, 3, 2)),
        (16, Plan(16, 1, 256, 6, 2, 2)),
        (32, Plan(32, 1, 256, 4, 2, 2)),
        (64, Plan(64, 1, 256, 4, 1, 2)),
        (128, Plan(64, 1, 256, 4, 1, 1)),
        (256, Plan(128, 2, 128, 4, 1, 2)),
        (512, Plan(128, 2, 128, 4, 1, 1)),
        (4096, Plan(256, 2, 128, 3, 1, 1)),
    ),
    (3584, 18944): (
        (8, Plan(8, 1, 256, 5, 3)),
        (16, Plan(16, 1, 256, 6, 2)),
        (32, Plan(32, 1, 256, 4, 2)),
        (64, Plan(64, 2, 256, 4, 1)),
        (128, Plan(128, 2, 128, 4, 1)),
        (512, Plan(256, 2, 128, 3, 1)),
        (4096, Plan(256, 2, 128, 3, 1, 1)),
    ),
    (4608, 3584): (
        (8, Plan(8, 1, 256, 6, 2)),
        (16, Plan(16, 1, 256, 6, 2)),
        (32, Plan(32, 1, 256, 4, 2, 3)),
        (64, Plan(64, 1, 256, 4, 1, 6)),
        (128, Plan(64, 1, 256, 4, 1)),
        (512, Plan(128, 2, 128, 4, 1)),
        (4096, Plan(256, 2, 128, 3, 1)),
    ),
    (37888, 3584): (
        (8, Plan(8, 1, 256, 5, 3, 2)),
        (16, Plan(16, 1, 256, 4, 3, 2)),
        (32, Plan(32, 1, 256, 4, 2, 4)),
        (64, Plan(64, 2, 256, 4, 1, 4)),
        (128, Plan(128, 2, 128, 4, 1, 4)),
        (256, Plan(256, 2, 128, 3, 1, 4)),
        (1024, Plan(256, 2, 128, 3, 1, 1)),
        (2048, Plan(256, 2, 128, 3, 1, 3)),
    ),
}
"""(outputs, inputs) of a layer: most tokens, plan."""
