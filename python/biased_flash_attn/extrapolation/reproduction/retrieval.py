"""Encoders: masked language modelling, beside retrieval by encoders that were trained with it."""

from __future__ import annotations

from ..experiment import Settings, Size
from ..experiment.report import brackets
from .preset import SCALE, SCALED, Preset, scaled, training
from .quotients import Printed, as_table, quotients

TRAIN_LENGTH, LENGTHS = 512, (512, 1024, 2048, 4096, 8192, 16384)
# nDCG@10 in percent of BERT models, trained by masked language modelling and then for retrieval.
PRINTED = (
    ("CABLE", "cable", (14.96, 15.15, 16.77, 21.36, 24.59, 25.10)),
    ("ALiBi", "alibi", (14.02, 12.88, 14.30, 18.71, 22.86, 23.44)),
    ("RoPE", "rotary", (15.16, 14.41, 10.26, 1.17, 0.12, 0.12)),
    ("Learnable", "learned", (10.42,)),
    ("Sinusoidal", "sinusoidal", (13.57, 12.80, 1.03, 0.00, 0.00, 0.00)),
)
# BERT-base has 12 layers, too many for two CPU cores to train until masked tokens are predicted.
SIZE = {"layers": 4, "dim": 128, "heads": 4, "batch": 64, "rate": 2e-3}
STEPS = 2500


class RetrievalTable(Preset):
    """Table 2 of Veisi et al. (2025), with perplexities of masked tokens in place of retrieval."""

    def experiments(self, seeds, steps=None):
        size = Size(**SIZE, steps=steps or STEPS, blocks=2048, gradients=1)
        schemes = tuple(scaled(scheme) for _, scheme, _ in PRINTED)
        lengths = tuple(length // SCALE for length in LENGTHS)
        return [Settings(schemes, lengths[0], lengths, size, seeds, objective="masked")]

    def beside(self, settings, results, reference):
        printed = [
            Printed(label, scheme, dict(zip(LENGTHS, values, strict=False)))
            for label, scheme, values in PRINTED
        ]
        columns = quotients(printed, TRAIN_LENGTH, results, reference)
        return (
            "Veisi et al., 2025, table 2: BERT-base, trained at 512 tokens by masked language"
            " modelling and then for retrieval on MS MARCO, and the quality of retrieval of long"
            " documents (MLDR, nDCG@10; higher is better)."
            f" {training(settings, results, reference)}{SCALED}"
            " These encoders predict masked bytes only, with a perplexity of which lower is better."
            " Quotients of nDCG@10 and of perplexities, at the paper's lengths."
            f"{brackets(settings, reference)} Figure 5 of the paper, without numbers, has the"
            " lowest loss of masked tokens for CABLE, and the highest ones for learned and"
            " sinusoidal positions."
            f"\n\n{as_table(printed, columns, 'paper, nDCG@10', 'here, perplexity')}"
        )
