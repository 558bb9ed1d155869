"""Plans of the fused product by layer and tokens.

By hand, after what the kernel's first form took; `benchmarks/plan_table.py` writes it once the present form is tuned.
"""

from __future__ import annotations

from qerld_kernels.fused_product import Plan

__all__ = ["PLANS"]

PLANS: dict[tuple[int, int], tuple[tuple[int, Plan], ...]] = {
    (37888, 3584): (
        (8, Plan(8, 1, 256, 4, 3)),
        (16, Plan(16, 1, 256, 4, 3)),
        (32, Plan(32, 1, 256, 2, 3)),
        (64, Plan(64, 2, 128, 4, 1)),
        (128, Plan(128, 2, 128, 4, 1)),
        (1024, Plan(256, 2, 128, 3, 1)),
    ),
}
"""(outputs, inputs) of a layer: most tokens, plan."""
