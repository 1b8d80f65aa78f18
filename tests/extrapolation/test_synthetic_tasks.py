"""Synthetic tasks: their optimum, against sums over everything that could have been drawn."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch

from biased_flash_attn.extrapolation.synthetic import TASKS
from biased_flash_attn.extrapolation.synthetic.markov import RESTARTS, Markov, draw, random_chains
from biased_flash_attn.extrapolation.synthetic.tasks import SCORED, Recall
from biased_flash_attn.extrapolation.training.loop import IGNORED

LENGTHS = (16, 40, 64)


def generator(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def chains_of_two_states(points: int) -> tuple[np.ndarray, np.ndarray]:
    """Transitions (points^2, 3, 3) and weights of a quadrature over all chains of two states,
    which is exact for polynomials of degree 2 points - 1 in either row."""
    nodes, weights = np.polynomial.legendre.leggauss(points)
    nodes, weights = (nodes + 1) / 2, weights / 2
    chains, of_chains = [], []
    for (p, wp), (q, wq) in itertools.product(zip(nodes, weights, strict=True), repeat=2):
        states = np.array([[p, 1 - p], [q, 1 - q], [0.5, 0.5]])
        chains.append(np.column_stack([(1 - RESTARTS) * states, np.full(3, RESTARTS)]))
        of_chains.append(wp * wq)
    return np.array(chains), np.array(of_chains)


def test_optimum_is_the_posterior_mean_over_all_chains():
    """Of windows inside of documents, given only their own tokens."""
    chains, weights = chains_of_two_states(24)
    length = 2 * SCORED
    documents = Markov(2).documents(4, (length, length + 3), generator(0))
    window = documents.window(length)
    for tokens, optimum in zip(window.tokens.tolist(), window.optimum, strict=True):
        for scored in range(SCORED):
            seen = tokens[: length - SCORED + 1 + scored]
            posterior = weights.copy()
            for a, b in itertools.pairwise(seen):
                posterior *= chains[:, a, b]
            expected = posterior @ chains[:, seen[-1]] / posterior.sum()
            np.testing.assert_allclose(optimum[scored].numpy(), expected, rtol=1e-12)


def test_no_prediction_has_less_loss_than_the_optimum():
    """The mean over all chains of two states, and all documents without a second restart."""
    chains, weights = chains_of_two_states(12)
    length = SCORED + 2
    tokens = torch.tensor(list(itertools.product(range(2), repeat=length - 1)))
    tokens = torch.cat([torch.full((len(tokens), 1), 2), tokens], 1)
    documents = Markov(2).documents(1, (length,), generator(0))
    optima = type(documents)(torch.zeros(len(tokens), 3, 3), tokens).window(length).optimum[:, -1]

    def loss(predictions: torch.Tensor) -> float:
        total = 0.0
        for document, prediction in zip(tokens.tolist(), predictions.numpy(), strict=True):
            likely = weights.copy()
            for a, b in itertools.pairwise(document):
                likely *= chains[:, a, b]
            total -= likely @ chains[:, document[-1]] @ np.log(prediction)
        return total

    least = loss(optima)
    for n in range(5):
        change = 0.05 * torch.randn(optima.shape, generator=generator(n), dtype=torch.float64)
        assert loss((optima.log() + change).softmax(-1)) > least


def test_truth_is_what_documents_are_drawn_from():
    chains = random_chains(1, 3, generator(1)).expand(2000, -1, -1)
    tokens = draw(chains, 100, (50,), generator(2))
    assert (tokens[:, [0, 50]] == 3).all()
    pairs = torch.stack([tokens[:, :-1], tokens[:, 1:]])[:, :, torch.arange(99) != 49]
    counts = torch.zeros(4, 4, dtype=torch.float64)
    counts.index_put_(tuple(pairs.flatten(1)), torch.ones(()).double(), accumulate=True)
    total = counts.sum(-1, keepdim=True)
    deviations = (chains[0] * (1 - chains[0]) / total).sqrt()
    assert ((counts / total - chains[0]).abs() < 5 * deviations).all()


@pytest.mark.parametrize("name", TASKS)
def test_windows_score_the_same_tokens(name):
    task = TASKS[name]
    documents = task.documents(20, LENGTHS, generator(3))
    windows = [documents.window(length) for length in LENGTHS]
    for length, window in zip(LENGTHS, windows, strict=True):
        assert window.tokens.shape == (20, length)
        assert window.truth.shape == window.optimum.shape
        for distribution in (window.truth, window.optimum):
            torch.testing.assert_close(distribution.sum(-1), torch.ones_like(distribution[..., 0]))
        scored = window.truth.shape[1]
        assert torch.equal(window.tokens[:, -scored:], windows[-1].tokens[:, -scored:])
        if name != "parity":  # where the answer depends on what comes before
            assert torch.equal(window.truth, windows[-1].truth)


def loss(window, predictions: torch.Tensor) -> float:
    return -torch.xlogy(window.truth, predictions).sum(-1).mean().item()


def test_the_optimum_of_markov_gains_by_context_and_the_others_are_never_wrong():
    lengths = (16, 64, 256, 1024)
    for name, task in TASKS.items():
        documents = task.documents(200, lengths, generator(4))
        windows = [documents.window(length) for length in lengths]
        least = loss(windows[0], windows[0].truth)
        losses = [loss(window, window.optimum) for window in windows]
        if task.optimum_improves:
            assert losses == sorted(losses, reverse=True), name
            assert losses[-1] < least + 0.01 < losses[1] - 0.05, name
        else:
            assert losses == [0] * len(lengths), name


def test_recall_asks_for_the_marked_symbol():
    tokens, targets = Recall().batch(500, 12, generator(5))
    for document, wanted in zip(tokens.tolist(), targets.tolist(), strict=True):
        assert document.count(Recall.MARKER) == 1
        symbol = document[document.index(Recall.MARKER) + 1]
        assert symbol < Recall.SYMBOLS
        asked = [token == Recall.QUERY for token in document]
        assert asked[-1]
        assert wanted == [symbol if query else IGNORED for query in asked]
        assert document.index(Recall.QUERY) > document.index(Recall.MARKER)
    window = Recall().documents(5, (3, 30), generator(6)).window(30)
    assert (window.tokens[:, 0] == Recall.MARKER).all()
    assert (window.tokens[:, -1] == Recall.QUERY).all()
    assert torch.equal(window.truth.argmax(-1)[:, 0], window.tokens[:, 1])


def test_parity_is_that_of_all_bits_so_far():
    bits, targets = TASKS["parity"].batch(3, 9, generator(7))
    for document, wanted in zip(bits.tolist(), targets.tolist(), strict=True):
        assert wanted == [sum(document[: n + 1]) % 2 for n in range(9)]
    window = TASKS["parity"].documents(3, (8, 32), generator(8)).window(8)
    assert window.truth.argmax(-1)[:, -1].tolist() == (window.tokens.sum(1) % 2).tolist()


def test_documents_depend_only_on_the_generator():
    for task in TASKS.values():
        drawn = []
        for seed in (9, 9, 10):
            torch.rand(3)
            tokens, _ = task.batch(2, 30, generator(seed))
            window = task.documents(2, (16, 30), generator(seed)).window(30)
            drawn.append((tokens, window.tokens, window.truth))
        first, again, other = drawn
        assert all(torch.equal(a, b) for a, b in zip(first, again, strict=True))
        assert not any(torch.equal(a, b) for a, b in zip(first[:2], other[:2], strict=True))
