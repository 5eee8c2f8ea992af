"""Cells of adapter × algorithm: trained for some dozen steps, saved, loaded; better than the fresh draft, and lossless.

Each adapter and nearly each algorithm once in every run, all pairs of them among the slow tests.
"""

from functools import cache
from typing import Any

import matrix
import pytest
import torch

from foredraft import generate

FAMILIES = list(matrix.TARGETS)
LONG = {"EAGLE-3.1", "DFlash2", "MTP", "Medusa, served"}
"""Which are near others (MTP to EAGLE-1), and among the slow tests only."""
QUICK = {(FAMILIES[i % len(FAMILIES)], algorithm) for i, algorithm in enumerate(matrix.ALGORITHMS) if algorithm not in LONG}
CELLS = [
    pytest.param(family, algorithm, marks=() if (family, algorithm) in QUICK else pytest.mark.slow)
    for family in FAMILIES
    for algorithm in matrix.ALGORITHMS
]
SAMPLES, TEMPERATURE = 120, 2.0


def test_the_quick_cells_cover_all() -> None:
    assert {family for family, _ in QUICK} == set(FAMILIES)
    assert {algorithm for _, algorithm in QUICK} == set(matrix.ALGORITHMS) - LONG


STEPS = 40
"""Of training the target: fewer than for the README's table, enough to tell."""


# Half as many prompts, targets half as deep.
matrix.beginnings = lambda: matrix.chain(20_000, 4, 6, noise=0)
for fields in matrix.TARGETS.values():
    fields["num_hidden_layers"] = 4
matrix.TARGETS["DeepSeek-V3"]["first_k_dense_replace"] = 2
for _, options in matrix.ALGORITHMS.values():
    options |= {"aux_layers": (1, 3) if "block_size" in options else (1, 2, 3)} if options else {}


@cache
def trained(family: str, algorithm: str) -> Any:
    quick = (family, algorithm) in QUICK and algorithm != "DFlash"  # whose blocks are learned late
    return matrix.run(family, algorithm, STEPS, steps=40 if quick else 60)


@pytest.mark.parametrize(("family", "algorithm"), CELLS)
def test_training_lifts_tau_and_greedy_output_is_the_targets(family: str, algorithm: str) -> None:
    _, cell = trained(family, algorithm)
    assert cell.identical
    assert cell.trained > cell.untrained + 0.5, f"τ {cell.untrained:.2f} untrained, {cell.trained:.2f} trained"


@pytest.mark.slow
@pytest.mark.parametrize(("family", "algorithm"), CELLS)
def test_sampling_keeps_the_targets_distribution(family: str, algorithm: str) -> None:
    """The second token, the first that can be a drafted one, against its exact marginal; bins of 10 expected draws or more."""
    model, (draft, _) = matrix.trained_target(family, STEPS), trained(family, algorithm)
    prompt = matrix.chain(30_000, 1, 6, noise=0)
    with torch.no_grad():
        first_V = (model(input_ids=prompt).logits[0, -1] / TEMPERATURE).softmax(-1)
        vocab = torch.arange(len(first_V))
        after = torch.cat([prompt.expand(len(vocab), -1), vocab[:, None]], dim=1)
        second_V = first_V @ (model(input_ids=after).logits[:, -1] / TEMPERATURE).softmax(-1)
        torch.manual_seed(0)
        settings = {"do_sample": True, "temperature": TEMPERATURE, "top_k": 0, "max_new_tokens": 3}
        drawn = torch.stack([generate(model, draft, prompt, num_draft_tokens=2, **settings)[0, -2] for _ in range(SAMPLES)])
    order = second_V.argsort(descending=True)
    bins = (second_V[order].cumsum(0) * SAMPLES / 10).long().clamp(max=SAMPLES // 10 - 1)
    expected, observed = torch.zeros(SAMPLES // 10), torch.zeros(SAMPLES // 10)
    expected.index_add_(0, bins, second_V[order] * SAMPLES)
    observed.index_add_(0, bins, torch.bincount(drawn, minlength=len(vocab))[order].float())
    filled = expected >= 5
    chi_square = float(((observed - expected)[filled] ** 2 / expected[filled]).sum())
    degrees = int(filled.sum()) - 1
    assert degrees >= 3
    assert chi_square < degrees + 4 * (2 * degrees) ** 0.5, f"χ² {chi_square:.1f} on {degrees} degrees of freedom"
