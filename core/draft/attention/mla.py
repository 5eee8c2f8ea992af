"""Multi-head latent attention (DeepSeek-V2, arXiv:2405.04434, section 2.1): keys and values from one low-rank latent."""

from collections.abc import Callable

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from transformers import PretrainedConfig
from transformers.models.deepseek_v3.modeling_deepseek_v3 import yarn_get_mscale

from ...contracts.draft import KeyValueCache, Pattern
from .geometry import Regions, Rotary, among_keys, normed, region, rotated, take_rows


class MultiHeadLatentAttention(nn.Module):
    """Latent attention with a free input width; queries of full rank where `config.q_lora_rank` is None.

    Parameter names are those of transformers' DeepseekV3Attention. Patterns see plain heads: the latent is expanded before
    it is cached.
    """

    def __init__(self, config: PretrainedConfig, layer: int, input_size: int, make_norm: Callable[[int], nn.Module]):
        super().__init__()
        self.regions: Regions = None
        self.layer, self.latent, self.interleave = layer, config.kv_lora_rank, config.rope_interleave
        self.heads, self.nope, self.rope, self.v = (
            config.num_attention_heads,
            config.qk_nope_head_dim,
            config.qk_rope_head_dim,
            config.v_head_dim,
        )
        # Some kernels want one head dim: the shorter of q, k and v is filled up with zeros, which change no score and no output.
        self.scale, self.head_dim = softmax_scale(config), max(self.nope + self.rope, self.v)
        queries, bias = self.heads * (self.nope + self.rope), config.attention_bias
        # transformers norms the latents with its default eps, engines with the config's: a draft is trained for the engines.
        if config.q_lora_rank is None:
            self.q_proj = nn.Linear(input_size, queries, bias=False)
        else:
            self.q_a_proj = nn.Linear(input_size, config.q_lora_rank, bias=bias)
            self.q_a_layernorm = make_norm(config.q_lora_rank)
            self.q_b_proj = nn.Linear(config.q_lora_rank, queries, bias=False)
        self.kv_a_proj_with_mqa = nn.Linear(input_size, self.latent + self.rope, bias=bias)
        self.kv_a_layernorm = make_norm(self.latent)
        self.kv_b_proj = nn.Linear(self.latent, self.heads * (self.nope + self.v), bias=False)
        self.o_proj = nn.Linear(self.heads * self.v, config.hidden_size, bias=bias)

    def forward(self, x_BSX: Tensor, rotary: Rotary, pattern: Pattern, cache: KeyValueCache | None, rows: Tensor | int | None) -> Tensor:
        """Attention output [B, Q, D] of the inputs `rows`; all inputs give keys and values."""
        cos, sin = rotary
        x_BQX, cos_q, sin_q = (take_rows(t, rows) for t in (x_BSX, cos, sin))
        q_BQX = self._queries(x_BQX)
        latent_BSl, k_rope_BSr = self.kv_a_proj_with_mqa(x_BSX).split([self.latent, self.rope], dim=-1)
        kv_BSX = self.kv_b_proj(region(self, normed, self.kv_a_layernorm, latent_BSl))
        turned = cos, sin, cos_q, sin_q
        q_BHQd, k_BHSd, v_BHSd = region(self, MultiHeadLatentAttention._put_together, self, q_BQX, k_rope_BSr, kv_BSX, *turned)
        keys, values = cache.extend(self.layer, k_BHSd, v_BHSd) if cache is not None else ([k_BHSd], [v_BHSd])
        out_BHQd = pattern.attend(q_BHQd, keys, values, self.scale, among_keys(rows, keys, x_BSX))[..., : self.v]
        return self.o_proj(out_BHQd.transpose(1, 2).flatten(2))

    def _put_together(
        self, q_BQX: Tensor, k_rope_BSr: Tensor, kv_BSX: Tensor, cos: Tensor, sin: Tensor, cos_q: Tensor, sin_q: Tensor
    ) -> tuple[Tensor, Tensor, Tensor]:
        """Queries, keys and values by heads, of one width and dtype, as kernels want them: norms and rotation may hand back float32."""
        k_nope_BSHd, v_BSHd = self._split_heads(kv_BSX).split([self.nope, self.v], dim=-1)
        q_nope_BQHd, q_rope_BQHr = self._split_heads(q_BQX).split([self.nope, self.rope], dim=-1)
        q_rope_BQHr = self._rotate(q_rope_BQHr, cos_q, sin_q)
        k_rope_BSHr = self._rotate(k_rope_BSr[:, :, None], cos, sin).expand(-1, -1, self.heads, -1)  # one for all heads
        q_BHQd, k_BHSd, v_BHSd = (
            F.pad(t, (0, self.head_dim - t.shape[-1])).to(v_BSHd.dtype).transpose(1, 2)
            for t in (torch.cat([q_nope_BQHd, q_rope_BQHr], dim=-1), torch.cat([k_nope_BSHd, k_rope_BSHr], dim=-1), v_BSHd)
        )
        return q_BHQd, k_BHSd, v_BHSd

    def _queries(self, x_BQX: Tensor) -> Tensor:
        if hasattr(self, "q_proj"):
            return self.q_proj(x_BQX)
        return self.q_b_proj(region(self, normed, self.q_a_layernorm, self.q_a_proj(x_BQX)))

    def _rotate(self, x_BSHr: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        if self.interleave:  # pairs stand side by side; turned, they stand half a head apart, in queries and keys alike
            x_BSHr = x_BSHr.unflatten(-1, (-1, 2)).transpose(-1, -2).flatten(-2)
        return rotated(x_BSHr, cos, sin)

    def _split_heads(self, x_BSX: Tensor) -> Tensor:
        return x_BSX.unflatten(-1, (self.heads, -1))


def softmax_scale(config: PretrainedConfig) -> float:
    """(nope + rope)^-0.5, times YaRN's mscale² where the rotary embedding is scaled and says `mscale_all_dim`, as in transformers and
    engines."""
    scale: float = (config.qk_nope_head_dim + config.qk_rope_head_dim) ** -0.5
    rope = config.rope_parameters
    if rope["rope_type"] != "default" and rope.get("mscale_all_dim"):
        scale *= yarn_get_mscale(rope["factor"], rope["mscale_all_dim"]) ** 2
    return scale
