"""Whether a completion's final answer is the reference's. Runs in the judge's process: see `judging`."""

from __future__ import annotations

import logging
import re

# What math-verify logs of an answer that it cannot parse is no news, and its warning about threads does not hold here.
logging.getLogger("math_verify").setLevel(logging.CRITICAL)

_TAGGED = re.compile(r"<answer>(.*?)</answer>", re.DOTALL)
_HASHED = re.compile(r"####\s*(\S[^\n]*)")
_HASHED_LINE = re.compile(r"####\s*(\S[^\n]*)\n")


def is_right(text: str, reference: str, cut_off: bool = False) -> bool:
    r"""Return whether a completion answers as the reference does.

    The final answer is the last `\boxed{…}`, else the last `<answer>…</answer>`, else what follows the last `####`,
    else the whole text, or what math-verify finds in it. Equal texts are right; otherwise math-verify parses both
    (LaTeX, or plain numbers and expressions) and compares them as mathematics: "0.5" is "\frac{1}{2}". A completion
    that was cut off is right only by an answer that is closed: "The answer is 80" may have been on its way to 800.
    """
    final = final_answer(text, cut_off)
    if final is None and cut_off:
        return False
    if plain(text if final is None else final) == plain(reference):
        return True
    from math_verify import parse, verify

    gold = parse(f"\\boxed{{{reference}}}", parsing_timeout=5)
    said = parse(text if final is None else f"\\boxed{{{final}}}", parsing_timeout=5)
    return bool(gold) and bool(said) and bool(verify(gold, said, timeout_seconds=5))


def final_answer(text: str, cut_off: bool = False) -> str | None:
    """Return the answer that a completion marks as its last, or None when it marks none.

    With `cut_off` the text's last line may lack its end, and an answer behind #### counts only with its line's end.
    """
    if (boxed := _last_boxed(text)) is not None:
        return boxed
    for pattern in (_TAGGED, _HASHED_LINE if cut_off else _HASHED):
        if found := pattern.findall(text):
            return str(found[-1]).strip()
    return None


def plain(answer: str) -> str:
    """Return an answer without what carries no meaning: blanks, dollar signs, separators of thousands, final dots."""
    text = re.sub(r"\\[,;! ]|\\left|\\right|[\s$]", "", answer.replace("\\$", ""))
    text = text.replace("\\dfrac", "\\frac").replace("\\tfrac", "\\frac").rstrip(".")
    return re.sub(r"(?<=\d),(?=\d{3}(?!\d))", "", text)


def _last_boxed(text: str) -> str | None:
    r"""Return what is in the last \boxed{…} whose braces balance."""
    begin = text.rfind("\\boxed{")
    while begin >= 0:
        depth = 0
        for position in range(begin + len("\\boxed"), len(text)):
            depth += {"{": 1, "}": -1}.get(text[position], 0)
            if depth == 0:
                return text[begin + len("\\boxed{") : position].strip()
        begin = text.rfind("\\boxed{", 0, begin)
    return None
