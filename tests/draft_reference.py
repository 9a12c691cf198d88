"""An EAGLE-3 head in plain NumPy float64, written from the paper, the published code's order of operations and the
published file formats; no kimijax inside.

It works on a draft's `config.json` (SGLang's and vLLM's form) and its tensors by name: `midlayer.` names, [out, in].
The order: features g = fc(taps), norms before fc where the config asks for them; u = [input_layernorm(embedding of the
next token), hidden_norm(g)]; y = g + attention(u), the residual not normed unless `norm_before_residual`;
z = y + mlp(post_attention_layernorm(y)); logits = lm_head(norm(z)); the next step is fed z, or norm(z) with
`norm_output`. Rotary pairs are (i, i + d/2) in Llama heads and (2i, 2i + 1) in MLA heads.
"""

import math
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from .reference import rms_norm, rotate, silu, softmax, softmax_scale

Array = np.ndarray
Config = Mapping[str, Any]


class Draft:
    """A head whose steps attend to the rows that were written so far."""

    def __init__(self, config: Config, tensors: Mapping[str, Array]) -> None:
        self.config, self.tensors = config, tensors
        self.is_mla = "kv_lora_rank" in config
        self.eps = config["rms_norm_eps"]
        self.window = config["sliding_window"] if config.get("layer_types") == ["sliding_attention"] else None

    def w(self, name: str) -> Array:
        return np.asarray(self.tensors[name], np.float64)

    def fuse(self, taps: Sequence[Array]) -> Array:
        """Taps, each [T, target width], to features [T, D]."""
        x = np.concatenate([np.asarray(t, np.float64) for t in taps], axis=1)
        if self.config.get("norm_before_fc"):
            x = rms_norm(x, self.w("input_norm.weight"), self.eps)
        if self.config.get("fc_norm"):
            chunks = np.split(x, len(taps), axis=1)
            x = np.concatenate(
                [rms_norm(c, self.w(f"fc_norm.{i}.weight"), self.eps) for i, c in enumerate(chunks)], axis=1
            )
        return x @ self.w("fc.weight").T

    def layer(self, ids: Array, features: Array, positions: Array, seen: Sequence[Array]) -> tuple[Array, Array]:
        """One step: feedback [T, D] and logits [T, Vd].

        Args:
          ids: [T], the token after each position.
          features: [T, D].
          positions: [T], rising; they are the rows' numbers.
          seen: for each row the numbers of the rows it sees, those of earlier calls included.
        """
        g = np.asarray(features, np.float64)
        normed = rms_norm(g, self.w("midlayer.hidden_norm.weight"), self.eps)
        e = rms_norm(self.w("embed_tokens.weight")[ids], self.w("midlayer.input_layernorm.weight"), self.eps)
        u = np.concatenate([e, normed], axis=1)
        y = (normed if self.config.get("norm_before_residual") else g) + self.attention(u, positions, seen)
        x = rms_norm(y, self.w("midlayer.post_attention_layernorm.weight"), self.eps)
        gate, up = x @ self.w("midlayer.mlp.gate_proj.weight").T, x @ self.w("midlayer.mlp.up_proj.weight").T
        z = y + (silu(gate) * up) @ self.w("midlayer.mlp.down_proj.weight").T
        last = rms_norm(z, self.w("norm.weight"), self.eps)
        return (last if self.config.get("norm_output") else z), last @ self.w("lm_head.weight").T

    def forward(self, ids: Array, features: Array, segments: Array | None = None) -> tuple[Array, Array]:
        """Every row of a sequence sees itself and those before it in its document; positions count in the document."""
        n = len(ids)
        segments = np.zeros(n, int) if segments is None else np.asarray(segments)
        feedback, logits = [], []
        for s in dict.fromkeys(segments.tolist()):
            rows = np.flatnonzero(segments == s)
            self.rows: dict[int, tuple[Array, Array]] = {}
            count = np.arange(len(rows))
            out = self.layer(np.asarray(ids)[rows], features[rows], count, [np.arange(i + 1) for i in count])
            feedback.append(out[0])
            logits.append(out[1])
        return np.concatenate(feedback), np.concatenate(logits)

    def chain(self, ids: Array, features: Array, tokens: Sequence[int]) -> list[tuple[Array, Array]]:
        """Drafting after a prompt: a forward over it, then one step for each token, fed its predecessor's output."""
        feedback, logits = self.forward(ids, features)
        out = [(feedback[-1], logits[-1])]
        for j, token in enumerate(tokens):
            at = np.asarray([len(ids) + j])
            feedback, logits = self.layer(np.asarray([token]), out[-1][0][None], at, [np.arange(at[0] + 1)])
            out.append((feedback[0], logits[0]))
        return out

    def attention(self, u: Array, positions: Array, seen: Sequence[Array]) -> Array:
        """Writes the rows of u [T, 2D], then attends head by head: [T, D]."""
        q, k, v, scale = self.mla(u, positions) if self.is_mla else self.llama(u, positions)
        for i, p in enumerate(positions.tolist()):
            self.rows[p] = (k[i], v[i])
        out = []
        for i, p in enumerate(positions.tolist()):
            numbers = [s for s in seen[i].tolist() if self.window is None or p - s < self.window]
            keys, values = (np.stack([self.rows[s][x] for s in numbers]) for x in (0, 1))  # [S, M, H]
            group = q.shape[1] // keys.shape[1]
            heads = [
                softmax(keys[:, n // group] @ q[i, n] * scale) @ values[:, n // group] for n in range(q.shape[1])
            ]  # fmt: skip
            out.append(np.concatenate(heads))
        return np.stack(out) @ self.w("midlayer.self_attn.o_proj.weight").T

    def llama(self, u: Array, positions: Array) -> tuple[Array, Array, Array, float]:
        d = self.config["head_dim"]
        q, k, v = (
            (u @ self.w(f"midlayer.self_attn.{p}_proj.weight").T).reshape(len(u), -1, d) for p in ("q", "k", "v")
        )
        frequencies, gain = llama_frequencies(self.config)
        # The angle is a float32 product, as published implementations compute it.
        angle = np.outer(positions.astype(np.float32), frequencies.astype(np.float32)).astype(np.float64)
        turn = np.exp(1j * angle)[:, None] * gain

        def turned(x: Array) -> Array:
            z = (x[..., : d // 2] + 1j * x[..., d // 2 :]) * turn
            return np.concatenate([z.real, z.imag], axis=-1)

        return turned(q), turned(k), v, d**-0.5

    def mla(self, u: Array, positions: Array) -> tuple[Array, Array, Array, float]:
        c, p = self.config, "midlayer.self_attn."
        heads, nope, rope, v_dim = (
            c["num_attention_heads"], c["qk_nope_head_dim"], c["qk_rope_head_dim"], c["v_head_dim"]
        )  # fmt: skip
        if c["q_lora_rank"] is None:
            q = u @ self.w(p + "q_proj.weight").T
        else:
            low = rms_norm(u @ self.w(p + "q_a_proj.weight").T, self.w(p + "q_a_layernorm.weight"), self.eps)
            q = low @ self.w(p + "q_b_proj.weight").T
        q = q.reshape(len(u), heads, nope + rope)
        latent, k_rope = np.split(u @ self.w(p + "kv_a_proj_with_mqa.weight").T, [c["kv_lora_rank"]], axis=1)
        latent = rms_norm(latent, self.w(p + "kv_a_layernorm.weight"), self.eps)
        kv = (latent @ self.w(p + "kv_b_proj.weight").T).reshape(len(u), heads, nope + v_dim)
        q_rope = rotate(q[..., nope:].swapaxes(0, 1), positions, c).swapaxes(0, 1)
        k_rope = np.repeat(rotate(k_rope, positions, c)[:, None], heads, axis=1)
        query = np.concatenate([q[..., :nope], q_rope], axis=-1)
        return query, np.concatenate([kv[..., :nope], k_rope], axis=-1), kv[..., nope:], softmax_scale(c)


def llama_frequencies(config: Config) -> tuple[Array, float]:
    """Radians a token of each pair, float64 [head_dim / 2], and the factor on cos and sin, of published definitions.

    llama3: pairs of a wavelength beyond original / low_freq_factor are slowed by `factor`, those below
    original / high_freq_factor are kept, between them the two are mixed. yarn: a ramp over the pairs between those that
    make beta_fast and beta_slow turns over the original context.
    """
    d, theta, s = config["head_dim"], float(config["rope_theta"]), config.get("rope_scaling")
    plain = np.asarray([theta ** (-2 * i / d) for i in range(d // 2)])
    if not s:
        return plain, 1.0
    original, factor = s["original_max_position_embeddings"], s["factor"]
    if s["rope_type"] == "llama3":
        low, high, out = s["low_freq_factor"], s["high_freq_factor"], []
        for f in plain:
            wavelength = 2 * math.pi / f
            if wavelength > original / low:
                out.append(f / factor)
            elif wavelength < original / high:
                out.append(f)
            else:
                mix = (original / wavelength - low) / (high - low)
                out.append((1 - mix) * f / factor + mix * f)
        return np.asarray(out), 1.0

    def pair(turns: float) -> float:
        return d * math.log(original / (turns * 2 * math.pi)) / (2 * math.log(theta))

    first, last = max(math.floor(pair(s["beta_fast"])), 0), min(math.ceil(pair(s["beta_slow"])), d - 1)
    ramp = np.clip((np.arange(d // 2) - first) / max(last - first, 0.001), 0, 1)
    return plain * (1 - ramp) + plain / factor * ramp, 0.1 * math.log(factor) + 1


# ---- tiny drafts in the published forms --------------------------------------------------------------------------

VOCAB, TARGET_WIDTH = 128, 64

LLAMA: Config = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "attention_bias": False,
    "bos_token_id": 0,
    "eos_token_id": 1,
    "head_dim": 16,
    "hidden_act": "silu",
    "hidden_size": 64,
    "initializer_range": 0.02,
    "intermediate_size": 96,
    "max_position_embeddings": 2048,
    "max_window_layers": 36,
    "model_type": "llama",
    "num_attention_heads": 6,
    "num_hidden_layers": 1,
    "num_key_value_heads": 2,
    "rms_norm_eps": 1e-5,
    "rope_scaling": None,
    "rope_theta": 10000.0,
    "sliding_window": None,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "transformers_version": "4.51.0",
    "use_cache": True,
    "use_sliding_window": False,
    "vocab_size": VOCAB,
    "draft_vocab_size": 40,
}

MLA: Config = {
    "architectures": ["Eagle3DeepseekV2ForCausalLM"],
    "attention_bias": False,
    "aux_loss_alpha": 0.001,
    "draft_vocab_size": VOCAB,
    "eagle_config": {
        "eagle_aux_hidden_state_layer_ids": [2, 5, 7],
        "use_aux_hidden_state": True,
        "use_input_layernorm_in_first_layer": True,
        "use_last_layernorm": True,
        "use_mtp_layernorm": False,
    },
    "first_k_dense_replace": 1,
    "hidden_act": "silu",
    "hidden_size": 64,
    "intermediate_size": 96,
    "kv_lora_rank": 48,
    "max_position_embeddings": 4096,
    "model_type": "kimi_k2",
    "moe_intermediate_size": 32,
    "n_routed_experts": 16,
    "num_attention_heads": 4,
    "num_hidden_layers": 1,
    "num_key_value_heads": 4,
    "num_nextn_predict_layers": 0,
    "q_lora_rank": 40,
    "qk_nope_head_dim": 32,
    "qk_rope_head_dim": 16,
    "rms_norm_eps": 1e-5,
    "rope_scaling": {
        "beta_fast": 32.0,
        "beta_slow": 1.0,
        "factor": 4.0,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
        "original_max_position_embeddings": 64,
        "type": "yarn",
    },
    "rope_theta": 50000.0,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "v_head_dim": 24,
    "vocab_size": VOCAB,
}


def tensor_shapes(config: Config, n_taps: int = 3) -> dict[str, tuple[int, ...]]:
    """Float tensors of a draft, embedding and head included, as the formats list them."""
    d, f, n = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    width, fused = config.get("target_hidden_size") or d, n_taps * (config.get("target_hidden_size") or d)
    out: dict[str, tuple[int, ...]] = {"embed_tokens.weight": (config["vocab_size"], d), "fc.weight": (d, fused)}
    if config.get("norm_before_fc"):
        out["input_norm.weight"] = (fused,)
    if config.get("fc_norm"):
        out |= {f"fc_norm.{i}.weight": (width,) for i in range(n_taps)}
    out |= {f"midlayer.{p}.weight": (d,) for p in ("input_layernorm", "hidden_norm", "post_attention_layernorm")}
    at = "midlayer.self_attn."
    if "kv_lora_rank" in config:
        qk, v, r = config["qk_nope_head_dim"] + config["qk_rope_head_dim"], config["v_head_dim"], config["kv_lora_rank"]
        rank = config["q_lora_rank"]
        if rank is None:
            out[at + "q_proj.weight"] = (n * qk, 2 * d)
        else:
            out |= {at + "q_a_proj.weight": (rank, 2 * d), at + "q_a_layernorm.weight": (rank,)}
            out[at + "q_b_proj.weight"] = (n * qk, rank)
        out[at + "kv_a_proj_with_mqa.weight"] = (r + config["qk_rope_head_dim"], 2 * d)
        out[at + "kv_a_layernorm.weight"] = (r,)
        out[at + "kv_b_proj.weight"] = (n * (config["qk_nope_head_dim"] + v), r)
        out[at + "o_proj.weight"] = (d, n * v)
    else:
        h, m = config["head_dim"], config["num_key_value_heads"]
        out |= {at + "q_proj.weight": (n * h, 2 * d), at + "k_proj.weight": (m * h, 2 * d)}
        out |= {at + "v_proj.weight": (m * h, 2 * d), at + "o_proj.weight": (d, n * h)}
    mlp = {"gate_proj": (f, d), "up_proj": (f, d), "down_proj": (d, f)}
    out |= {f"midlayer.mlp.{name}.weight": shape for name, shape in mlp.items()}
    return out | {"norm.weight": (d,), "lm_head.weight": (config["draft_vocab_size"] or config["vocab_size"], d)}


def random_tensors(config: Config, seed: int = 0, n_taps: int = 3) -> dict[str, Array]:
    """float32 tensors of a draft, and `d2t` and `t2d` where its vocabulary is reduced."""
    rng = np.random.default_rng(seed)
    out: dict[str, Array] = {}
    for name, shape in tensor_shapes(config, n_taps).items():
        noise = rng.standard_normal(shape)
        scaled = 1 + 0.2 * noise if len(shape) == 1 else noise * (1.0 if "embed" in name else shape[-1] ** -0.5)
        out[name] = scaled.astype(np.float32)
    if (config["draft_vocab_size"] or VOCAB) < config["vocab_size"]:
        ids = np.sort(rng.permutation(config["vocab_size"])[: config["draft_vocab_size"]])
        out["d2t"] = ids - np.arange(len(ids))
        out["t2d"] = np.isin(np.arange(config["vocab_size"]), ids)
    return out
