"""Every bias with its oracle, by name."""

from __future__ import annotations

import math

import pytest
import torch

from biased_flash_attn import biases
from tests.support import oracles

HEADS = 3
SLOPES = [0.5, 0.0, 2.0]


def given(num_heads: int) -> list[float]:
    return SLOPES


# id: (bias of HEADS heads, its oracle)
DISTANCE_CASES = {
    "alibi": (lambda: biases.ALiBi(HEADS), oracles.alibi()),
    "alibi-shift": (lambda: biases.ALiBi(HEADS, shift=-3), oracles.alibi(shift=-3)),
    "alibi-equal": (lambda: biases.ALiBi(HEADS, exponent=4), oracles.alibi(exponent=4)),
    "alibi-geometric": (
        lambda: biases.ALiBi(HEADS, slopes="geometric", shift=1),
        oracles.alibi(shift=1, slopes=oracles.geometric_slopes),
    ),
    "alibi-numbers": (lambda: biases.ALiBi(HEADS, slopes=SLOPES), oracles.alibi(slopes=given)),
    "alibi-trained": (lambda: biases.ALiBi(HEADS, trainable=True), oracles.alibi_trained),
    "kerple_log": (lambda: biases.KerpleLog(HEADS), oracles.kerple_log),
    "kerple_power": (lambda: biases.KerplePower(HEADS), oracles.kerple_power),
    "fire": (lambda: biases.FIRE(HEADS, init_length=3), oracles.fire(3)),
    "sandwich": (lambda: biases.Sandwich(HEADS), oracles.sandwich()),
    "sandwich-16": (lambda: biases.Sandwich(HEADS, dbar=16), oracles.sandwich(16)),
    "sandwich-code": (
        lambda: biases.Sandwich(HEADS, first_frequency=0),
        oracles.sandwich(first=0),
    ),
    "sandwich-trained": (lambda: biases.Sandwich(HEADS, trainable=True), oracles.sandwich()),
    "smoothed_sandwich": (lambda: biases.SmoothedSandwich(HEADS), oracles.smoothed_sandwich),
    "type1": (lambda: biases.Type1(HEADS), oracles.type1),
    "type2": (lambda: biases.Type2(HEADS), oracles.type2),
    "inverse_distance": (lambda: biases.InverseDistance(HEADS), oracles.inverse_distance),
    "inverse_log_distance": (
        lambda: biases.InverseLogDistance(HEADS),
        oracles.inverse_log_distance,
    ),
    "type1-slopes": (
        lambda: biases.Type1(HEADS, slopes="alibi"),
        oracles.scaled(lambda d: math.log(1 / (1 + d**2)), oracles.published_slopes),
    ),
    "type2-slopes": (
        lambda: biases.Type2(HEADS, slopes="geometric"),
        oracles.scaled(lambda d: -(math.log(3 + d) ** 2), oracles.geometric_slopes),
    ),
    "inverse_distance-slopes": (
        lambda: biases.InverseDistance(HEADS, slopes=torch.tensor(SLOPES)),
        oracles.scaled(lambda d: math.log(1 / (1 + d)), given),
    ),
    "inverse_log_distance-slopes": (
        lambda: biases.InverseLogDistance(HEADS, slopes=SLOPES),
        oracles.scaled(lambda d: math.log(1 / ((3 + d) * math.log(3 + d))), given),
    ),
    "t5": (lambda: biases.T5(HEADS), oracles.t5()),
    "t5-both": (lambda: biases.T5(HEADS, bidirectional=True), oracles.t5(bidirectional=True)),
    "t5-small": (
        lambda: biases.T5(HEADS, num_buckets=6, max_distance=9),
        oracles.t5(num_buckets=6, max_distance=9),
    ),
    "clipped_table": (lambda: biases.ClippedTable(HEADS, 4), oracles.clipped_table(4)),
    "function": (
        lambda: biases.DistanceBias.from_function(lambda d: -torch.log1p(d), HEADS),
        oracles.inverse_distance,
    ),
}

DIM = 5
CONTEXT_CASES = {
    "cable": (lambda: biases.Cable(DIM, HEADS), oracles.cable()),
    "cable-softplus": (
        lambda: biases.Cable(DIM, HEADS, activation="softplus", weighted=False),
        oracles.cable(oracles.softplus, weighted=False),
    ),
    "cable_nw": (lambda: biases.CableNW(DIM, HEADS), oracles.cable(weighted=False)),
    "cable_nw-code": (
        lambda: biases.CableNW(DIM, HEADS, activation="softplus", bias=True, init=0.02),
        oracles.cable(oracles.softplus, weighted=False),
    ),
    "kernelized_cable-bias": (
        lambda: biases.KernelizedCable(DIM, HEADS, bias=True),
        oracles.cable(kernel=True),
    ),
    "kernelized_cable": (lambda: biases.KernelizedCable(DIM, HEADS), oracles.cable(kernel=True)),
    "forget_gate": (lambda: biases.ForgetGate(DIM, HEADS), oracles.forget_gate),
}


def cases(table):
    return pytest.mark.parametrize("case", table.values(), ids=table.keys())
