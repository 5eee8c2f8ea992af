"""Latent attention against transformers' DeepSeek modules and, under the patterns, against a loop over heads and keys."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.testing import assert_close
from transformers import DeepseekV2Config, DeepseekV3Config
from transformers.models.deepseek_v2.modeling_deepseek_v2 import DeepseekV2Attention, DeepseekV2RotaryEmbedding
from transformers.models.deepseek_v3.modeling_deepseek_v3 import DeepseekV3Attention, DeepseekV3RMSNorm, DeepseekV3RotaryEmbedding

from foredraft.draft.attention import Causal, DecodingCache, MultiHeadLatentAttention, Unrolled, UnrolledCache, take_rows
from foredraft.draft.attention.mla import softmax_scale

WIDTH, HEADS, NOPE, ROPE, LENGTH = 24, 3, 8, 4, 9
DEFAULT = {"rope_type": "default", "rope_theta": 10000.0}
YARN = {
    "rope_type": "yarn",
    "rope_theta": 10000.0,
    "factor": 4.0,
    "original_max_position_embeddings": 16,
    "mscale": 1.0,
    "mscale_all_dim": 1.0,
}
# What V3 never does but the format allows: a rotary factor other than 1, and no mscale in the softmax.
ONE_SIDED = {**YARN, "mscale": 0.7, "mscale_all_dim": 0.0}
DOCUMENTS = torch.tensor([[0, 0, 0, 0, 1, 1, 1, 2, 2], [0, 0, 0, 0, 0, 1, 1, -1, -1]])
SLOTS = torch.tensor([[0, 2, 3, 5, 6, 8], [1, 4, 6, 0, 0, 0]])


def config(cls: Any = DeepseekV3Config, **fields: Any) -> Any:
    """A tiny family config; eager attention is transformers' readable one."""
    shape: dict[str, Any] = {
        "hidden_size": WIDTH,
        "num_attention_heads": HEADS,
        "num_key_value_heads": HEADS,
        "q_lora_rank": 10,
        "kv_lora_rank": 12,
        "qk_nope_head_dim": NOPE,
        "qk_rope_head_dim": ROPE,
        "v_head_dim": 6,
        "max_position_embeddings": 64,
        "rope_parameters": DEFAULT,
        "attn_implementation": "eager",
    }
    return cls(**{**shape, **fields})


def ours(made: Any, input_size: int = WIDTH) -> Any:
    """Our geometry, its norms away from one."""
    torch.manual_seed(0)
    attention = MultiHeadLatentAttention(made, 0, input_size, lambda size: DeepseekV3RMSNorm(size, eps=made.rms_norm_eps))
    for name, p in attention.named_parameters():
        if "layernorm" in name:
            torch.nn.init.uniform_(p, 0.5, 1.5)
    return attention


def rotary(made: Any, positions: Tensor) -> tuple[Tensor, Tensor]:
    """The family's cos and sin."""
    cos, sin = DeepseekV3RotaryEmbedding(made)(torch.zeros(1), positions)
    return cos, sin


def inputs(size: int = WIDTH) -> tuple[Tensor, Tensor]:
    """x [2, S, X] and positions [2, S] that differ by row."""
    torch.manual_seed(1)
    return torch.randn(2, LENGTH, size, requires_grad=True), torch.arange(LENGTH) + torch.tensor([[0], [5]])


def outcome(out: Tensor, module: Any, x: Tensor) -> dict[str, Tensor]:
    """The output, and the gradients of the input and of every parameter by name."""
    torch.manual_seed(2)
    names, parameters = zip(*module.named_parameters(), strict=True)
    grads = torch.autograd.grad((out * torch.randn(out.shape)).sum(), [x, *parameters])
    return {"out": out, "x": grads[0], **dict(zip(names, grads[1:], strict=True))}


CAUSAL = torch.full((LENGTH, LENGTH), float("-inf")).triu(1)[None, None]


class TestAgainstTransformers:
    @pytest.mark.parametrize("v_head_dim", [6, 16], ids=["short v", "long v"])
    @pytest.mark.parametrize("rope", [DEFAULT, YARN, ONE_SIDED], ids=["default", "yarn", "one-sided yarn"])
    @pytest.mark.parametrize("interleave", [True, False])
    @pytest.mark.parametrize("q_lora_rank", [10, None])
    def test_v3(self, q_lora_rank: int | None, interleave: bool, rope: dict[str, Any], v_head_dim: int) -> None:
        """Same names, same output, same gradients."""
        made = config(q_lora_rank=q_lora_rank, rope_interleave=interleave, rope_parameters=rope, v_head_dim=v_head_dim)
        x, positions = inputs()
        mine, theirs = ours(made), DeepseekV3Attention(made, 0)
        theirs.load_state_dict(mine.state_dict())
        angles = rotary(made, positions)
        expected = outcome(theirs(x, angles, CAUSAL)[0], theirs, x)
        for pattern in (Causal(), Unrolled(torch.zeros(2, LENGTH, dtype=torch.long), torch.arange(LENGTH).expand(2, -1))):
            assert_close(outcome(mine(x, angles, pattern, None, None), mine, x), expected, rtol=1e-4, atol=1e-5)

    @pytest.mark.parametrize("rope", [DEFAULT, YARN], ids=["default", "yarn"])
    @pytest.mark.parametrize("q_lora_rank", [10, None])
    def test_v2(self, q_lora_rank: int | None, rope: dict[str, Any]) -> None:
        """V2 rotates neighbouring pairs in place, V3 also sorts them: the same scores, so one geometry serves both."""
        x, positions = inputs()
        made = config(q_lora_rank=q_lora_rank, rope_parameters=rope)
        v2 = config(DeepseekV2Config, q_lora_rank=q_lora_rank, rope_parameters=rope)
        mine, theirs = ours(made), DeepseekV2Attention(v2, 0)
        theirs.load_state_dict(mine.state_dict())
        expected = theirs(x, CAUSAL, position_embeddings=DeepseekV2RotaryEmbedding(v2)(x, positions))[0]
        found = mine(x, rotary(made, positions), Causal(), None, None)
        assert_close(outcome(found, mine, x), outcome(expected, theirs, x), rtol=1e-4, atol=1e-5)

    def test_biases(self) -> None:
        """Where the family has them."""
        made = config(attention_bias=True)
        x, positions = inputs()
        mine, theirs = ours(made), DeepseekV3Attention(made, 0)
        theirs.load_state_dict(mine.state_dict())
        angles = rotary(made, positions)
        expected = outcome(theirs(x, angles, CAUSAL)[0], theirs, x)
        assert_close(outcome(mine(x, angles, Causal(), None, None), mine, x), expected, rtol=1e-4, atol=1e-5)

    def test_the_latent_norms_use_the_configs_eps(self) -> None:
        """As engines do; transformers' modules always use 1e-6."""
        mine = ours(config(rms_norm_eps=1e-3))
        assert mine.kv_a_layernorm.variance_epsilon == mine.q_a_layernorm.variance_epsilon == 1e-3

    def test_yarn_scale(self) -> None:
        """By hand: mscale = 0.1 · mscale_all_dim · ln(factor) + 1, squared."""
        assert softmax_scale(config(rope_parameters=YARN)) == pytest.approx((0.1 * math.log(4) + 1) ** 2 / math.sqrt(NOPE + ROPE))
        assert softmax_scale(config()) == softmax_scale(config(rope_parameters=ONE_SIDED)) == pytest.approx((NOPE + ROPE) ** -0.5)


def heads_by_hand(attention: Any, x: Tensor, angles: tuple[Tensor, Tensor], b: int, i: int, h: int) -> tuple[Tensor, Tensor, Tensor]:
    """q, k [nope + rope] and v of one input and head, as the paper writes them (equations 9 to 19), pairs rotated as complex numbers."""
    a, r = attention, ROPE // 2
    angle = torch.complex(angles[0][b, i, :r], angles[1][b, i, :r])

    def rotated(y: Tensor) -> Tensor:
        return torch.view_as_real(torch.view_as_complex(y.reshape(r, 2).contiguous()) * angle).flatten()

    q = a.q_b_proj(a.q_a_layernorm(a.q_a_proj(x[b, i])))[h * (NOPE + ROPE) : (h + 1) * (NOPE + ROPE)]
    down = a.kv_a_proj_with_mqa(x[b, i])
    latent, k_rope = a.kv_a_layernorm(down[:-ROPE]), down[-ROPE:]
    up = a.kv_b_proj(latent)[h * (NOPE + a.v) : (h + 1) * (NOPE + a.v)]
    return torch.cat([q[:NOPE], rotated(q[NOPE:])]), torch.cat([up[:NOPE], rotated(k_rope)]), up[NOPE:]


def brute_force(attention: Any, steps: list[tuple[Tensor, tuple[Tensor, Tensor]]]) -> Tensor:
    """Training-time test by a loop: the causal inputs of step 0, then the slot's own of later steps; the output of the last one."""
    out = []
    for b in range(2):
        for n in range(SLOTS.shape[1]):
            slot = int(SLOTS[b, n])
            seen = [(0, j) for j in range(slot + 1) if DOCUMENTS[b, j] == DOCUMENTS[b, slot]]
            seen += [(k, n) for k in range(1, len(steps))]
            query = n if len(steps) > 1 else slot
            mixed = []
            for h in range(HEADS):
                q = heads_by_hand(attention, *steps[-1], b, query, h)[0]
                keys, values = zip(*(heads_by_hand(attention, *steps[k], b, j, h)[1:] for k, j in seen), strict=True)
                mixed.append(torch.softmax(torch.stack(keys) @ q * attention.scale, dim=0) @ torch.stack(values))
            out.append(attention.o_proj(torch.cat(mixed)))
    return torch.stack(out).unflatten(0, (2, -1))


class TestPatterns:
    @pytest.mark.parametrize("backend", ["auto", "eager"])
    @pytest.mark.parametrize("v_head_dim", [6, 16], ids=["short v", "long v"])
    def test_unrolled_equals_brute_force(self, v_head_dim: int, backend: Any) -> None:
        """A fused first layer's wide input, three steps, packed documents, some rows: output and gradients."""
        made = config(v_head_dim=v_head_dim, rope_parameters=YARN)
        attention = ours(made, 2 * WIDTH)
        x, positions = inputs(2 * WIDTH)
        torch.manual_seed(3)
        later = torch.randn(2, 2, SLOTS.shape[1], 2 * WIDTH)
        later[:, 1, 4:] = later[:, 1, 3, None]  # padding is like the slot that it repeats, and nothing is learned from it
        taught = (torch.arange(6) < torch.tensor([[6], [4]]))[None, ..., None]
        at = positions.gather(1, SLOTS)
        steps = [(x, rotary(made, positions))] + [(later[k], rotary(made, at + k + 1)) for k in range(2)]
        pattern, cache = Unrolled(DOCUMENTS, SLOTS, backend), UnrolledCache()
        found = torch.stack([attention(z, angles, pattern, cache, None if k else SLOTS) for k, (z, angles) in enumerate(steps)])
        expected = torch.stack([brute_force(attention, steps[: k + 1]) for k in range(len(steps))])
        assert_close(outcome(found * taught, attention, x), outcome(expected * taught, attention, x), rtol=1e-4, atol=1e-5)

    def test_some_rows_equal_the_whole(self) -> None:
        """Rows choose queries, never keys."""
        made = config()
        attention, (x, positions) = ours(made), inputs()
        angles = rotary(made, positions)
        whole = attention(x, angles, Causal(DOCUMENTS), None, None)
        some = attention(x, angles, Causal(DOCUMENTS, SLOTS), None, SLOTS)
        assert_close(some, take_rows(whole, SLOTS), rtol=1e-5, atol=1e-6)

    def test_decoding_equals_the_whole(self) -> None:
        """Through the cache in pieces, one of them cut back and fed again."""
        made = config()
        attention, (x, positions) = ours(made), inputs()
        cos, sin = rotary(made, positions)
        whole, cache = attention(x, (cos, sin), Causal(), None, None), DecodingCache()
        for start, end in ((0, 4), (4, 5), (5, 7)):
            piece = slice(start, end)
            found = attention(x[:, piece], (cos[:, piece], sin[:, piece]), Causal(), cache, None)
            assert_close(found, whole[:, piece], rtol=1e-5, atol=1e-6)
        cache.crop(5)
        piece = slice(5, 9)
        found = attention(x[:, piece], (cos[:, piece], sin[:, piece]), Causal(), cache, None)
        assert_close(found, whole[:, piece], rtol=1e-5, atol=1e-6)

    def test_half_precision(self) -> None:
        """Under autocast, norms and rotation hand back float32; the kernels get one dtype and stay near float32."""
        made = config()
        attention, (x, positions) = ours(made), inputs()
        angles, pattern = rotary(made, positions), Unrolled(DOCUMENTS, SLOTS)
        with torch.autocast("cpu", torch.bfloat16):
            rough = attention(x, angles, pattern, UnrolledCache(), SLOTS)
        assert rough.dtype == torch.bfloat16
        assert_close(rough.float(), attention(x, angles, pattern, UnrolledCache(), SLOTS), rtol=5e-2, atol=2e-2)
