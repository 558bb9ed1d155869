"""Write `qerld_kernels/plans.py` from what `kernels.py --only tune` measured.

    python benchmarks/plan_table.py tune-h200.json [more.json] > kernels/qerld_kernels/plans.py

For each layer and number of tokens any plan within 3% of the fastest will do; of these, as few different kernels are
taken as cover everything, since each is compiled when a server starts. A layer's plans end where it is faster to
dequantise its weight first.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from dataclasses import replace
from pathlib import Path

from qerld_kernels.fused_product import Plan

from kernels import MODELS

SLACK = 1.03
Case = tuple[int, int, int]
"""Outputs, inputs, tokens."""


def measured(files: list[Path]) -> dict[Case, list[tuple[float, Plan]]]:
    """Microseconds and plans of each case, the fastest first."""
    cases: dict[Case, list[tuple[float, Plan]]] = {}
    for file in files:
        for row in json.loads(file.read_text())["tune"]:
            if row["near"][0][0] > row["dequantized_us"]:
                continue
            case = (*MODELS[row["model"]][row["layer"]], row["tokens"])
            cases[case] = sorted(((us, Plan(**plan)) for us, plan in row["near"]), key=lambda pair: pair[0])
    return cases


def kernel_of(plan: Plan) -> Plan:
    """What is compiled: all but the parts."""
    return replace(plan, parts=1)


def chosen(cases: dict[Case, list[tuple[float, Plan]]]) -> dict[Case, Plan]:
    """A greedy cover: the kernel that serves most of the cases left, again and again."""
    good = {
        case: {kernel_of(plan): plan for us, plan in reversed(found) if us <= SLACK * found[0][0]}
        for case, found in cases.items()
    }
    picked: dict[Case, Plan] = {}
    while left := [case for case in good if case not in picked]:
        serves: dict[Plan, list[Case]] = defaultdict(list)
        for case in left:
            for kernel in good[case]:
                serves[kernel].append(case)
        best = max(serves, key=lambda kernel: (len(serves[kernel]), str(kernel)))
        picked |= {case: good[case][best] for case in serves[best]}
    return picked


def module(picked: dict[Case, Plan]) -> str:
    """The source of `plans.py`."""
    shapes: dict[tuple[int, int], list[tuple[int, Plan]]] = defaultdict(list)
    for (outputs, inputs, tokens), plan in sorted(picked.items()):
        shapes[outputs, inputs].append((tokens, plan))
    lines = [
        '"""Plans of the fused product by layer and tokens: written by benchmarks/plan_table.py."""',
        "",
    ]
    lines += ["from __future__ import annotations", "", "from qerld_kernels.fused_product import Plan", ""]
    lines += ['__all__ = ["PLANS"]', "", "PLANS: dict[tuple[int, int], tuple[tuple[int, Plan], ...]] = {"]
    for shape, plans in shapes.items():
        lines.append(f"    {shape}: (")
        lines += [f"        ({tokens}, {short(plan)})," for tokens, plan in plans]
        lines.append("    ),")
    closing = '"""(outputs, inputs) of a layer: most tokens, plan. On an H200: benchmarks/results."""'
    return "\n".join([*lines, "}", closing, ""])


def short(plan: Plan) -> str:
    fields = [plan.tokens, plan.groups, plan.inputs, plan.stages, plan.programs]
    return f"Plan({', '.join(map(str, fields if plan.parts == Plan.parts else [*fields, plan.parts]))})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="JSON of kernels.py --only tune")
    print(module(chosen(measured(parser.parse_args().files))), end="")


if __name__ == "__main__":
    main()
