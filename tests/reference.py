"""The whole forward pass in plain NumPy, written from the papers and the published configs; no kimijax inside.

It is the second opinion beside `transformers`: tests compare kimijax with both. Works on a `config.json` dict and a
dict of float weights under their checkpoint names ([out, in]). Sources: MLA and the softmax router, DeepSeek-V2
(arXiv:2405.04434); sigmoid router with bias and groups, DeepSeek-V3 (arXiv:2412.19437); YaRN (arXiv:2309.00071).

Axes: T tokens, D width, N heads, R latent rank, E experts, K experts chosen, V vocabulary, L layers.
"""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

Array = np.ndarray
Config = Mapping[str, Any]


@dataclass(frozen=True)
class Forward:
    """Results of `forward`; dictionaries are keyed by MoE layer.

    logits [T, V]; taps [L+1, T, D] (tap i = residual entering layer i, tap L = before the final norm);
    experts int [T, K], ascending; expert_weights [T, K] in the same order; margins [T] = how far the closest expert
    left out (or group left out) was from being chosen: below the rounding error the choice is a coin flip.
    """

    logits: Array
    taps: Array
    experts: dict[int, Array]
    expert_weights: dict[int, Array]
    margins: dict[int, Array]


def rms_norm(x: Array, weight: Array, eps: float) -> Array:
    """x / sqrt(mean(x²) + eps) · weight over the last axis."""
    return x / np.sqrt(np.mean(x * x, axis=-1, keepdims=True) + eps) * weight


def silu(x: Array) -> Array:
    return x / (1 + np.exp(-x))


def softmax(x: Array) -> Array:
    e = np.exp(x - np.max(x, axis=-1, keepdims=True))
    return e / np.sum(e, axis=-1, keepdims=True)


def rope_frequencies(text: Config) -> Array:
    """float64 [rope/2]: radians a token for each rotary pair, after YaRN's interpolation.

    Pair i turns n_i = original_context · θ^(-2i/d) / 2π times over the original context. Pairs with many turns
    (beta_fast and more) keep their frequency, those with few (beta_slow and fewer) are slowed by `factor`; a linear
    ramp over the pair index, between the two bounds rounded outwards, joins them.
    """
    d, theta, yarn = text["qk_rope_head_dim"], float(text["rope_theta"]), text.get("rope_scaling")
    plain = theta ** (-np.arange(0, d, 2, dtype=np.float64) / d)
    if not yarn:
        return plain

    def pair_with_turns(turns: float) -> float:
        wavelength_ratio = yarn["original_max_position_embeddings"] / (turns * 2 * math.pi)
        return d * math.log(wavelength_ratio) / (2 * math.log(theta))

    first = max(math.floor(pair_with_turns(yarn["beta_fast"])), 0)
    last = min(math.ceil(pair_with_turns(yarn["beta_slow"])), d - 1)
    slowed = np.clip((np.arange(d // 2) - first) / max(last - first, 0.001), 0, 1)
    return plain * (1 - slowed) + plain / yarn["factor"] * slowed


def _mscale(factor: float, m: float) -> float:
    return 1.0 if factor <= 1 else 0.1 * m * math.log(factor) + 1.0


def softmax_scale(text: Config) -> float:
    """(nope + rope)^-½, times YaRN's temperature mscale(factor, mscale_all_dim)²."""
    scale, yarn = (text["qk_nope_head_dim"] + text["qk_rope_head_dim"]) ** -0.5, text.get("rope_scaling")
    return scale * _mscale(yarn["factor"], yarn["mscale_all_dim"]) ** 2 if yarn else scale


def rotate(x: Array, positions: Array, text: Config) -> Array:
    """RoPE on adjacent pairs (0, 1), (2, 3), ...: [..., T, rope] -> the same. The angle is rounded as float32 is:
    published implementations multiply a float32 position by a float32 frequency."""
    angle = np.outer(positions.astype(np.float32), rope_frequencies(text).astype(np.float32))  # [T, rope/2]
    yarn = text.get("rope_scaling")
    gain = _mscale(yarn["factor"], yarn["mscale"]) / _mscale(yarn["factor"], yarn["mscale_all_dim"]) if yarn else 1.0
    turn = (np.exp(1j * angle.astype(np.float64)) * gain).astype(np.result_type(x.dtype, np.complex64))
    pairs = (x[..., 0::2] + 1j * x[..., 1::2]) * turn
    return np.stack([pairs.real, pairs.imag], axis=-1).reshape(x.shape)


class _Model:
    """One forward pass: the weights in one dtype, and the layers as methods."""

    def __init__(self, config: Config, weights: Mapping[str, Array], dtype: type, latent_eps: float | None) -> None:
        self.text: Config = config.get("text_config", config)
        self.prefix = "language_model." if config["model_type"] == "kimi_k25" else ""
        self.weights, self.dtype = weights, dtype
        self.eps = self.text["rms_norm_eps"]
        self.latent_eps = self.eps if latent_eps is None else latent_eps

    def w(self, name: str) -> Array:
        return np.asarray(self.weights[self.prefix + name], self.dtype)

    def attention(self, layer: int, x: Array) -> Array:
        """Multi-head latent attention, keys and values expanded; x [T, D] is already normed."""
        t, p = self.text, f"model.layers.{layer}.self_attn."
        heads, nope, rope, v_dim = (
            t["num_attention_heads"], t["qk_nope_head_dim"], t["qk_rope_head_dim"], t["v_head_dim"]
        )  # fmt: skip
        length, positions = len(x), np.arange(len(x))
        if t["q_lora_rank"] is None:
            q = x @ self.w(p + "q_proj.weight").T
        else:
            q = x @ self.w(p + "q_a_proj.weight").T
            q = rms_norm(q, self.w(p + "q_a_layernorm.weight"), self.latent_eps) @ self.w(p + "q_b_proj.weight").T
        q = q.reshape(length, heads, nope + rope).transpose(1, 0, 2)  # [N, T, nope + rope]
        latent, k_rope = np.split(x @ self.w(p + "kv_a_proj_with_mqa.weight").T, [t["kv_lora_rank"]], axis=-1)
        latent = rms_norm(latent, self.w(p + "kv_a_layernorm.weight"), self.latent_eps)
        kv = (latent @ self.w(p + "kv_b_proj.weight").T).reshape(length, heads, nope + v_dim).transpose(1, 0, 2)
        k, v = kv[..., :nope], kv[..., nope:]
        scores = q[..., :nope] @ k.transpose(0, 2, 1)
        scores = scores + rotate(q[..., nope:], positions, t) @ rotate(k_rope, positions, t).T  # one k_rope, all heads
        future = positions[None, :] > positions[:, None]
        probabilities = softmax(np.where(future, -np.inf, scores * self.dtype(softmax_scale(t))))
        out = (probabilities @ v).transpose(1, 0, 2).reshape(length, heads * v_dim)
        return out @ self.w(p + "o_proj.weight").T

    def mlp(self, prefix: str, x: Array) -> Array:
        gate, up = x @ self.w(prefix + "gate_proj.weight").T, x @ self.w(prefix + "up_proj.weight").T
        return (silu(gate) * up) @ self.w(prefix + "down_proj.weight").T

    def route(self, layer: int, x: Array) -> tuple[Array, Array, Array]:
        """Experts [T, K] ascending, their weights [T, K], margins [T]."""
        t, p = self.text, f"model.layers.{layer}.mlp.gate."
        n_experts, k = t["n_routed_experts"], t["num_experts_per_tok"]
        logits = x @ self.w(p + "weight").T
        if t["scoring_func"] == "softmax":
            scores = preference = softmax(logits)
        else:
            scores = 1 / (1 + np.exp(-logits))
            preference = scores + self.w(p + "e_score_correction_bias")  # the bias chooses; it does not weigh
        margins = np.full(len(x), np.inf)
        if t["topk_group"] < t["n_group"]:
            groups = preference.reshape(len(x), t["n_group"], -1)
            group_score = np.sort(groups, axis=-1)[..., -2:].sum(axis=-1)  # [T, G]: sum of the two best
            order = np.sort(group_score, axis=-1)
            margins = order[:, -t["topk_group"]] - order[:, -t["topk_group"] - 1]
            worst_kept = order[:, -t["topk_group"], None]
            preference = np.where((group_score >= worst_kept)[..., None], groups, -np.inf).reshape(len(x), n_experts)
        best = np.argsort(-preference, axis=-1, kind="stable")
        ranked = np.take_along_axis(preference, best, axis=-1)
        margins = np.minimum(margins, ranked[:, k - 1] - ranked[:, k])
        experts = np.sort(best[:, :k], axis=-1)
        weights = np.take_along_axis(scores, experts, axis=-1)
        if t["norm_topk_prob"]:
            weights = weights / (weights.sum(axis=-1, keepdims=True) + 1e-20)
        return experts, weights * self.dtype(t["routed_scaling_factor"]), margins

    def moe(self, layer: int, x: Array) -> tuple[Array, Array, Array, Array]:
        p = f"model.layers.{layer}.mlp."
        experts, weights, margins = self.route(layer, x)
        y = self.mlp(p + "shared_experts.", x)
        for e in np.unique(experts):
            rows, slot = np.nonzero(experts == e)
            y[rows] += weights[rows, slot, None] * self.mlp(f"{p}experts.{e}.", x[rows])
        return y, experts, weights, margins


def forward(
    config: Config,
    weights: Mapping[str, Array],
    ids: Sequence[int] | Array,
    *,
    dtype: type = np.float64,
    latent_norm_eps: float | None = None,
) -> Forward:
    """Logits, residual taps and expert choice of one sequence from position 0.

    Args:
      config: a `config.json` of any family (wrapper included).
      weights: float arrays under their checkpoint names.
      ids: token ids [T].
      dtype: of all computation; np.float64, or np.float32.
      latent_norm_eps: eps of the q_a and kv_a norms; None takes `rms_norm_eps`.
    """
    m = _Model(config, weights, dtype, latent_norm_eps)
    h = m.w("model.embed_tokens.weight")[np.asarray(ids)]
    taps: list[Array] = []
    experts: dict[int, Array] = {}
    expert_weights: dict[int, Array] = {}
    margins: dict[int, Array] = {}
    for layer in range(m.text["num_hidden_layers"]):
        taps.append(h)
        p = f"model.layers.{layer}."
        h = h + m.attention(layer, rms_norm(h, m.w(p + "input_layernorm.weight"), m.eps))
        x = rms_norm(h, m.w(p + "post_attention_layernorm.weight"), m.eps)
        if layer < m.text["first_k_dense_replace"]:
            y = m.mlp(p + "mlp.", x)
        else:
            y, experts[layer], expert_weights[layer], margins[layer] = m.moe(layer, x)
        h = h + y
    taps.append(h)
    logits = rms_norm(h, m.w("model.norm.weight"), m.eps) @ m.w("lm_head.weight").T
    return Forward(logits, np.stack(taps), experts, expert_weights, margins)


def greedy(config: Config, weights: Mapping[str, Array], ids: Sequence[int] | Array, n: int) -> list[int]:
    """The `n` tokens that greedy decoding appends to `ids`; the whole sequence is recomputed for each."""
    sequence = [int(i) for i in ids]
    for _ in range(n):
        sequence.append(int(np.argmax(forward(config, weights, sequence).logits[-1])))
    return sequence[-n:] if n else []
