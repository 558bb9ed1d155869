"""Prefix-tree packing: every distinct prefix of a batch is computed once.

The sequences of a micro-batch form a trie over token ids; its nodes, laid out in depth-first order, are the rows of one
forward pass. A node sees its ancestors and itself, and its position is its depth, so that each path through the trie is
computed as the plain sequence would be. In depth-first order the descendants of node j are the rows [j, end_j): row i
attends to row j exactly when j ≤ i < end_j, and one integer a row describes the whole mask.

Legend: T nodes, P distinct scored (node, target) pairs, N nodes with at least one target. Tokens from the last scored
one of a completion on predict nothing that is scored, so they are never nodes.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor


class PackingError(ValueError):
    """A sequence cannot be scored: a part of it is empty, or its mask does not fit."""


@dataclass(frozen=True)
class TokenSequence:
    """A prompt and a completion, both non-empty; `trainable` marks the tokens to score, at least one (None: all)."""

    prompt_ids: Sequence[int]
    completion_ids: Sequence[int]
    trainable: Sequence[bool] | None = None

    @property
    def scored(self) -> Sequence[int]:
        """Positions in the completion of the tokens to score, ascending."""
        if self.trainable is None:
            return range(len(self.completion_ids))
        return [position for position, wanted in enumerate(self.trainable) if wanted]

    @property
    def inputs(self) -> tuple[int, ...]:
        """Tokens whose hidden states are needed: everything before the last token to score."""
        return (*self.prompt_ids, *self.completion_ids[: max(self.scored, default=0)])


@dataclass(frozen=True)
class PrefixTree:
    """One micro-batch.

    input_ids, positions, ends: int64 [T]; rows: int64 [N], nodes whose logits are needed; pair_row, pair_target: int64
    [P], index into `rows` and the token scored there; `spans[i]`: the pairs of the scored tokens of sequence
    `members[i]`.
    """

    input_ids: Tensor
    positions: Tensor
    ends: Tensor
    rows: Tensor
    pair_row: Tensor
    pair_target: Tensor
    members: list[int]
    spans: list[list[int]]
    plain_tokens: int

    def to(self, device: torch.device) -> PrefixTree:
        """Return the tree with its tensors on `device`."""
        names = ("input_ids", "positions", "ends", "rows", "pair_row", "pair_target")
        return replace(self, **{name: getattr(self, name).to(device) for name in names})

    @property
    def tokens(self) -> int:
        """Number of nodes, that is of tokens computed."""
        return int(self.input_ids.numel())


@dataclass
class _Builder:
    """Trie under construction. `path` holds the node of each depth of the sequence added last."""

    ids: list[int] = field(default_factory=list)
    depths: list[int] = field(default_factory=list)
    ends: list[int] = field(default_factory=list)
    path: list[int] = field(default_factory=list)
    row_of: dict[int, int] = field(default_factory=dict)
    pair_of: dict[tuple[int, int], int] = field(default_factory=dict)

    def add(self, inputs: Sequence[int], shared: int) -> None:
        self.close(shared)
        for depth in range(shared, len(inputs)):
            self.path.append(len(self.ids))
            self.ids.append(inputs[depth])
            self.depths.append(depth)
            self.ends.append(-1)

    def close(self, depth: int) -> None:
        for node in self.path[depth:]:
            self.ends[node] = len(self.ids)
        del self.path[depth:]

    def score(self, targets: Iterable[tuple[int, int]]) -> list[int]:
        """Return the pair of each (depth of the node that predicts, token)."""
        pairs = []
        for depth, target in targets:
            node = self.path[depth]
            self.row_of.setdefault(node, len(self.row_of))
            pairs.append(self.pair_of.setdefault((node, target), len(self.pair_of)))
        return pairs


def common_prefix(left: Sequence[int], right: Sequence[int]) -> int:
    """Return the length of the longest common prefix."""
    limit = min(len(left), len(right))
    return next((index for index in range(limit) if left[index] != right[index]), limit)


def build_tree(sequences: Sequence[TokenSequence], members: Sequence[int] | None = None) -> PrefixTree:
    """Return the prefix tree of `sequences[i] for i in members` (default: all of them)."""
    chosen = sorted(range(len(sequences)) if members is None else members, key=lambda i: sequences[i].inputs)
    previous: tuple[int, ...] = ()
    builder, spans, plain = _Builder(), [], 0
    for index in chosen:
        _check(index, sequences[index])
        inputs, before = sequences[index].inputs, len(sequences[index].prompt_ids) - 1
        builder.add(inputs, common_prefix(previous, inputs))
        completion = sequences[index].completion_ids
        spans.append(builder.score((before + position, completion[position]) for position in sequences[index].scored))
        previous, plain = inputs, plain + len(inputs)
    builder.close(0)
    return PrefixTree(
        input_ids=torch.tensor(builder.ids),
        positions=torch.tensor(builder.depths),
        ends=torch.tensor(builder.ends),
        rows=torch.tensor(list(builder.row_of)),
        pair_row=torch.tensor([builder.row_of[node] for node, _ in builder.pair_of]),
        pair_target=torch.tensor([target for _, target in builder.pair_of]),
        members=list(chosen),
        spans=spans,
        plain_tokens=plain,
    )


def pack(
    sequences: Sequence[TokenSequence], token_budget: int, *, members: Sequence[int] | None = None, share: bool = True
) -> list[PrefixTree]:
    """Split `sequences[i] for i in members` (default: all) into micro-batches of at most `token_budget` nodes each.

    Neighbours in lexicographic order share the longest prefixes, so the order is greedy and cheap. A sequence longer
    than the budget gets a micro-batch of its own. `share=False` gives one tree a sequence (the benchmark's baseline).
    """
    order = sorted(range(len(sequences)) if members is None else members, key=lambda i: sequences[i].inputs)
    if not share:
        return [build_tree(sequences, [index]) for index in order]
    batches: list[list[int]] = []
    previous: tuple[int, ...] = ()
    used = 0
    for index in order:
        inputs = sequences[index].inputs
        extra = len(inputs) - common_prefix(previous, inputs)
        if not batches or used + extra > token_budget:
            batches.append([])
            used, extra = 0, len(inputs)
        batches[-1].append(index)
        used, previous = used + extra, inputs
    return [build_tree(sequences, batch) for batch in batches]


def tree_mask(tree: PrefixTree, *, window: int | None = None) -> Tensor:
    """Return the boolean mask [1, 1, T, T] of who attends to whom; with `window`, over that many positions only."""
    rows = torch.arange(tree.tokens, device=tree.ends.device)
    mask = (rows[:, None] >= rows[None, :]) & (rows[:, None] < tree.ends[None, :])
    if window is not None:
        mask &= tree.positions[:, None] - tree.positions[None, :] < window
    return mask[None, None]


def _check(index: int, sequence: TokenSequence) -> None:
    for name in ("prompt_ids", "completion_ids"):
        if not len(getattr(sequence, name)):
            raise PackingError(
                f"sequence {index}: {name} must hold at least one token, got 0; drop the rollout instead"
            )
    if sequence.trainable is None:
        return
    if len(sequence.trainable) != len(sequence.completion_ids):
        raise PackingError(
            f"sequence {index}: trainable must hold one entry a completion token ({len(sequence.completion_ids)}), "
            f"got {len(sequence.trainable)}"
        )
    if not any(sequence.trainable):
        raise PackingError(f"sequence {index}: trainable must mark at least one token, got 0; drop the rollout instead")
