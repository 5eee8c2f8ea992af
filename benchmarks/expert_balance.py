"""Does a draft with experts keep them all in use? Load over the experts with and without moving the router's bias.

`python benchmarks/expert_balance.py` trains a DeepSeek-V3-shaped draft of 16 experts on a tiny target that has learned a small language,
once with the bias's speed at 0 and once at DeepSeek-V3's 0.001, and prints the loss and how evenly tokens were spread over the last steps.
"""

import argparse

import torch
from matrix import TARGETS, chain, rows_of, trained_target

from foredraft import DraftCollator, Target, auto_draft
from foredraft.adapters import deepseek_v3

EXPERTS, LAST = 16, 30


def train(speed: float, steps: int, learning_rate: float) -> tuple[float, torch.Tensor]:
    """(mean loss, tokens per expert) over the last steps."""
    deepseek_v3.BALANCE_SPEED = speed
    model = trained_target("DeepSeek-V3")
    torch.manual_seed(0)
    draft = auto_draft(model.config, "eagle3", adapter="deepseek_v3_moe", ttt_steps=3)
    target = Target(model, draft.config.aux_layers)
    rows = rows_of(chain(10_000, 8 * 16))
    draft.start_from(target, rows)
    collate = DraftCollator(draft.algorithm)
    optimizer = torch.optim.AdamW([p for p in draft.parameters() if p.requires_grad], lr=learning_rate)
    losses, load = [], torch.zeros(EXPERTS)
    draft.train()
    for step in range(steps):
        batch = collate(rows[8 * (step % 16) : 8 * (step % 16) + 8])
        loss = draft(batch, target.capture(batch))["loss"]
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if step >= steps - LAST:
            losses.append(float(loss.detach()))
            load += draft.layers[0].mlp.gate.load
    return sum(losses) / len(losses), load


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--steps", type=int, default=200)
    arguments = parser.parse_args()
    TARGETS["DeepSeek-V3"] |= {"n_routed_experts": EXPERTS}
    print("learning rate  bias speed   loss   entropy (1 = even)  busiest / mean  experts below a tenth of the mean")
    for learning_rate in (1e-3, 1e-2):
        for speed in (0.0, 0.001):
            loss, load = train(speed, arguments.steps, learning_rate)
            share = load / load.sum()
            entropy = float(-(share * share.clamp(min=1e-9).log()).sum() / torch.tensor(EXPERTS).log())
            idle = int((share < 0.1 / EXPERTS).sum())
            print(f"{learning_rate:13g}  {speed:10g}  {loss:.4f}  {entropy:18.3f}  {float(share.max() * EXPERTS):14.2f}  {idle}")
