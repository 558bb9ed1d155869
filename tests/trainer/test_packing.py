"""Properties of prefix trees: every sequence is a path, nothing is computed twice, the mask is ancestry."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from qerld_learner.trainer.packing import PackingError, PrefixTree, TokenSequence, build_tree, pack, tree_mask

ids = st.lists(st.integers(0, 3), min_size=1, max_size=6)


@st.composite
def token_sequences(draw: st.DrawFn) -> TokenSequence:
    """With a mask or without; a mask marks at least one token."""
    prompt, completion = draw(ids), draw(ids)
    masks = st.lists(st.booleans(), min_size=len(completion), max_size=len(completion)).filter(any)
    return TokenSequence(prompt, completion, draw(st.none() | masks))


batches = st.lists(token_sequences(), min_size=1, max_size=8)


def path_to(tree: PrefixTree, node: int) -> list[int]:
    """The token ids that a node sees, in order of position."""
    seen = torch.nonzero(tree_mask(tree)[0, 0, node]).flatten()
    order = torch.argsort(tree.positions[seen])
    assert tree.positions[seen][order].tolist() == list(range(len(seen)))
    return tree.input_ids[seen][order].tolist()


@settings(deadline=None, max_examples=150)
@given(batches)
def test_each_scored_token_sees_exactly_its_own_prefix(sequences: list[TokenSequence]) -> None:
    tree = build_tree(sequences)
    for member, span in zip(tree.members, tree.spans, strict=True):
        sequence = sequences[member]
        whole = [*sequence.prompt_ids, *sequence.completion_ids]
        wanted = sequence.trainable or [True] * len(sequence.completion_ids)
        positions = [len(sequence.prompt_ids) + offset for offset, one in enumerate(wanted) if one]
        for position, pair in zip(positions, span, strict=True):
            assert int(tree.pair_target[pair]) == whole[position]
            assert path_to(tree, int(tree.rows[tree.pair_row[pair]])) == whole[:position]


@settings(deadline=None, max_examples=150)
@given(batches)
def test_every_distinct_prefix_is_computed_once(sequences: list[TokenSequence]) -> None:
    tree = build_tree(sequences)
    prefixes = {s.inputs[:end] for s in sequences for end in range(1, len(s.inputs) + 1)}
    assert tree.tokens == len(prefixes)
    assert {tuple(path_to(tree, node)) for node in range(tree.tokens)} == prefixes
    assert len(set(tree.rows.tolist())) == len(tree.rows)
    assert tree.plain_tokens == sum(len(s.inputs) for s in sequences)


@settings(deadline=None, max_examples=150)
@given(batches, st.integers(1, 30))
def test_packing_keeps_every_sequence_once_and_within_the_budget(sequences: list[TokenSequence], budget: int) -> None:
    trees = pack(sequences, budget)
    assert sorted(member for tree in trees for member in tree.members) == list(range(len(sequences)))
    assert all(tree.tokens <= budget or len({sequences[m].inputs for m in tree.members}) == 1 for tree in trees)


def test_shared_prompt_and_shared_system_prefix_are_counted_once() -> None:
    system = list(range(10))
    sequences = [TokenSequence([*system, 20 + g, 30 + g], [40 + r, 50 + r, 60 + r]) for g in range(2) for r in range(3)]
    assert build_tree(sequences).tokens == 10 + 2 * 2 + 6 * 2


def test_only_predecessors_of_trainable_tokens_have_logits_and_nothing_behind_them_is_computed() -> None:
    policy, environment = [True, True], [False, False, False]
    sequence = TokenSequence([1, 2], [3, 4, 5, 6, 7, 8, 9, 5, 5, 5], [*policy, *environment, *policy, *environment])
    tree = build_tree([sequence])
    assert tree.input_ids.tolist() == [1, 2, 3, 4, 5, 6, 7, 8]
    assert tree.rows.tolist() == [1, 2, 6, 7]
    assert tree.pair_target.tolist() == [3, 4, 8, 9]


@pytest.mark.parametrize(("mask", "text"), [([True], "one entry a completion token"), ([False] * 2, "at least one")])
def test_masks_that_do_not_fit_are_refused(mask: list[bool], text: str) -> None:
    with pytest.raises(PackingError, match=f"sequence 0: trainable must .*{text}"):
        build_tree([TokenSequence([1], [2, 3], mask)])


def test_window_limits_how_far_back_a_node_sees() -> None:
    mask = tree_mask(build_tree([TokenSequence([1, 2, 3, 4], [5])]), window=2)[0, 0]
    assert mask.int().tolist() == [[1, 0, 0, 0], [1, 1, 0, 0], [0, 1, 1, 0], [0, 0, 1, 1]]


@pytest.mark.parametrize(("prompt", "completion", "field"), [([], [1], "prompt_ids"), ([1], [], "completion_ids")])
def test_empty_parts_are_refused(prompt: list[int], completion: list[int], field: str) -> None:
    with pytest.raises(PackingError, match=f"sequence 0: {field}"):
        build_tree([TokenSequence(prompt, completion)])
