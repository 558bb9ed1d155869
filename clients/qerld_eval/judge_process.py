"""The process of a `Judge`: lines [completion, reference, cut off] in, for each a line true, false or null out."""

from __future__ import annotations

import json
import os
import sys

from qerld_eval.answers import is_right


def main() -> None:
    # Whatever a library prints must not look like a verdict.
    verdicts = os.fdopen(os.dup(sys.stdout.fileno()), "w", encoding="utf-8")
    os.dup2(sys.stderr.fileno(), sys.stdout.fileno())
    for line in sys.stdin:
        verdicts.write(json.dumps(_verdict(*json.loads(line))) + "\n")
        verdicts.flush()


def _verdict(text: str, reference: str, cut_off: bool) -> bool | None:
    try:
        return is_right(text, reference, cut_off)
    # What a model wrote may break a parser in any way (math-verify's time-out is a BaseException): that is no verdict.
    except BaseException:
        return None


if __name__ == "__main__":
    main()
