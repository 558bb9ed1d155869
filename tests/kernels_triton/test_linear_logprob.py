"""Softmax statistics, log-probabilities and gradients of the head against float64."""

from __future__ import annotations

import pytest
import torch
from qerld_kernels import linear_logprob
from qerld_kernels.linear_logprob import Head, pair_logprobs, softmax_statistics, softmax_statistics_reference

HEADS = [Head(torch.zeros(1)), Head(torch.zeros(1), temperature=0.7), Head(torch.zeros(1), 1.3, softcap=5.0)]


@pytest.mark.parametrize("head", HEADS, ids=["plain", "temperature", "softcap"])
@pytest.mark.parametrize("vocabulary", [1, 7, 4096, 5000, 9001])
def test_statistics_against_float64(vocabulary: int, head: Head, device: str) -> None:
    raw = 10 * torch.randn(5, vocabulary)
    found = softmax_statistics(raw.to(device), head, torch.float32)
    wanted = softmax_statistics_reference(raw.double(), head, torch.float64)
    for one, other in zip(found, wanted, strict=True):
        assert one is not None
        assert other is not None
        torch.testing.assert_close(one.cpu().double(), other, rtol=1e-5, atol=2e-5)
    assert softmax_statistics(raw.to(device), head, None)[2] is None


def test_large_logits_do_not_overflow(device: str) -> None:
    raw = torch.tensor([[3e4, -3e4, 2.99e4], [-3e4, -3e4, -3e4]])
    normaliser, entropy, p = softmax_statistics(raw.to(device), HEADS[0], torch.float32)
    assert p is not None
    torch.testing.assert_close(normaliser.cpu(), torch.logsumexp(raw, dim=1))
    torch.testing.assert_close(p.sum(1).cpu(), torch.ones(2))
    torch.testing.assert_close(entropy.cpu(), torch.tensor([0.0, torch.tensor(3.0).log()]))


@pytest.mark.parametrize("head", HEADS, ids=["plain", "temperature", "softcap"])
def test_logprobs_and_gradients_against_autograd(head: Head, device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(linear_logprob, "CHUNK_BYTES", {"cpu": 4 * 300 * 3, "cuda": 4 * 300 * 3})  # three rows a chunk
    weight = torch.randn(300, 24)
    hidden = torch.randn(10, 24).to(device).requires_grad_()
    rows, targets = torch.randint(0, 10, (23,)), torch.randint(0, 300, (23,))
    used = Head(weight.to(device), head.temperature, head.softcap)
    logprobs, entropy = pair_logprobs(hidden, used, rows.to(device), targets.to(device), entropy_gradient=True)
    (logprobs * torch.arange(23, device=device)).sum().backward(retain_graph=True)

    plain = hidden.detach().cpu().double().requires_grad_()
    logits = head.logits(plain @ weight.double().T)
    table = logits.log_softmax(1)
    (table[rows, targets] * torch.arange(23)).sum().backward(retain_graph=True)
    torch.testing.assert_close(logprobs.detach().cpu().double(), table[rows, targets].detach(), rtol=1e-5, atol=1e-5)
    shares = -(table.exp() * table).sum(1)
    torch.testing.assert_close(entropy.detach().cpu().double(), shares.detach(), rtol=1e-5, atol=1e-5)
    assert hidden.grad is not None
    assert plain.grad is not None
    torch.testing.assert_close(hidden.grad.cpu().double(), plain.grad, rtol=1e-4, atol=1e-4)

    (slope,) = torch.autograd.grad((entropy * torch.arange(10, device=device)).sum(), hidden)
    (expected,) = torch.autograd.grad((shares * torch.arange(10)).sum(), plain)
    torch.testing.assert_close(slope.cpu().double(), expected, rtol=1e-4, atol=1e-4)


def test_logits_must_be_rows_of_float32(device: str) -> None:
    with pytest.raises(ValueError, match="raw: must be float32"):
        softmax_statistics(torch.zeros(3, 4, device=device).T, HEADS[0], None)


@pytest.mark.parametrize("want_gradient", [True, False])
def test_no_rows_and_rows_without_targets(want_gradient: bool, device: str) -> None:
    head = Head(torch.randn(30, 8, device=device))
    nothing = torch.zeros(0, dtype=torch.int64, device=device)
    for rows in (0, 3):
        hidden = torch.randn(rows, 8, device=device, requires_grad=want_gradient)
        logprobs, entropy = pair_logprobs(hidden, head, nothing, nothing)
        assert (logprobs.shape, entropy.shape) == ((0,), (rows,))
        if want_gradient:
            logprobs.sum().backward()
            assert hidden.grad is not None
            assert not hidden.grad.any()
