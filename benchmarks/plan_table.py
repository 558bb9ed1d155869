"""Write tables of `qerld_kernels/plans.py` from what `kernels.py --only tune` or `--only sharing_tune` measured.

    python benchmarks/plan_table.py tune-h200.json [more.json]

For each layer and number of tokens any plan within 3% of the fastest will do; of these, as few different kernels are
taken as cover everything, since each is compiled when a server starts. A layer's plans end where it is faster to
dequantise its weight first. How LoRA shares the launch is all arguments: there the fastest is taken, up to the most
tokens at which one launch is faster than two.
"""

from __future__ import annotations

import argparse
import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import fields, replace
from pathlib import Path

from qerld_kernels.fused_product import Plan
from qerld_kernels.low_rank import Sharing

from kernels import MODELS

SLACK = 1.03
Case = tuple[int, int, int]
"""Outputs, inputs, tokens."""


def measured(files: list[Path]) -> dict[Case, list[tuple[float, Plan]]]:
    """Microseconds and plans of each case, the fastest first."""
    cases: dict[Case, list[tuple[float, Plan]]] = {}
    for file in files:
        for row in json.loads(file.read_text()).get("tune", []):
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


def shared(files: list[Path]) -> dict[Case, Sharing]:
    """The fastest of each case, where it is faster than two launches."""
    cases: dict[Case, Sharing] = {}
    for file in files:
        for row in json.loads(file.read_text()).get("sharing_tune", []):
            us, sharing = row["near"][0]
            if us < row.get("two_launches_us", us + 1):
                cases[*MODELS[row["model"]][row["layer"]], row["tokens"]] = Sharing(**sharing)
    return cases


def table(picked: Mapping[Case, Plan | Sharing]) -> str:
    """The rows of a table of `plans.py`."""
    shapes: dict[tuple[int, int], list[tuple[int, Plan | Sharing]]] = defaultdict(list)
    for (outputs, inputs, tokens), plan in sorted(picked.items()):
        shapes[outputs, inputs].append((tokens, plan))
    lines = []
    for shape, plans in shapes.items():
        lines.append(f"    {shape}: (")
        lines += [f"        ({tokens}, {short(plan)})," for tokens, plan in plans]
        lines.append("    ),")
    return "\n".join(lines)


def short(chosen: Plan | Sharing) -> str:
    """As one would write it: without what is there by default."""
    values = [getattr(chosen, field.name) for field in fields(chosen)]
    while fields(chosen)[len(values) - 1].default == values[-1]:
        values.pop()
    return f"{type(chosen).__name__}({', '.join(map(str, values))})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("files", type=Path, nargs="+", help="JSON of kernels.py")
    files = parser.parse_args().files
    for name, rows in (("PLANS", chosen(measured(files))), ("SHARINGS", shared(files))):
        print(f"{name}\n{table(rows)}")


if __name__ == "__main__":
    main()
