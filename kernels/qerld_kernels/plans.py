"""Plans of the fused product by layer and tokens, tuned on an H200; `benchmarks/plan_table.py` writes such tables."""

from __future__ import annotations

from qerld_kernels.fused_product import Plan
from qerld_kernels.low_rank import Sharing

__all__ = ["PLANS", "SHARINGS"]

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

SHARINGS: dict[tuple[int, int], tuple[tuple[int, Sharing], ...]] = {
    (3584, 3584): (
        (8, Sharing(14, 2)),
        (16, Sharing(14, 2)),
        (32, Sharing(14, 2)),
        (64, Sharing(14, 2)),
        (128, Sharing(7, 1)),
        (256, Sharing(7, 2)),
        (512, Sharing(4, 1)),
        (1024, Sharing(3, 1)),
        (2048, Sharing(4, 1, 0.5)),
        (4096, Sharing(8, 1, 0.9)),
    ),
    (3584, 18944): (
        (8, Sharing(25)),
        (16, Sharing(19)),
        (32, Sharing(13, 4)),
        (64, Sharing(13, 4)),
        (128, Sharing(19, 4)),
        (256, Sharing(13, 4)),
        (512, Sharing(6, 2)),
        (1024, Sharing(10, 4, 0.5)),
        (2048, Sharing(25, 1, 0.9)),
        (4096, Sharing(4, 1, 0.9)),
    ),
    (4608, 3584): (
        (8, Sharing(14, 1)),
        (16, Sharing(14, 1)),
        (32, Sharing(14, 1)),
        (64, Sharing(14, 1)),
        (128, Sharing(7, 2)),
        (256, Sharing(4, 1)),
        (512, Sharing(4, 4)),
        (1024, Sharing(4, 4)),
        (2048, Sharing(4, 2, 0.5)),
        (4096, Sharing(2, 1, 0.9)),
    ),
    (37888, 3584): (
        (8, Sharing(14)),
        (16, Sharing(7)),
        (32, Sharing(14, 1)),
        (64, Sharing(5, 65536, 0.5)),
        (128, Sharing(10, 6, 0.5)),
        (256, Sharing(10, 6, 0.5)),
        (512, Sharing(5, 1)),
        (1024, Sharing(7, 4, 0.9)),
        (2048, Sharing(7, 1, 0.9)),
        (4096, Sharing(1, 1, 0.9)),
    ),
}
"""(outputs, inputs) of a layer, the same ones: most tokens, how LoRA shares the launch."""
