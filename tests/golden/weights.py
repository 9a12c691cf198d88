"""Weights of the tiny models, computed from their names: nothing is stored, and no NumPy version can change them.

A tensor's numbers come from splitmix64 in counter mode, seeded with the CRC-32 of its name (without the wrapper's
`language_model.`). Every linear map of attention, MLP and experts lies on a grid that all published forms share:

    w[o, i] = q[o, i] * 2**e[o, i // 32] * c[o // 128, i // 128],   q in -8..7,  c = (16 + k) / 16 * 2**b

q has at most 3 significant bits and c has 5, so w is exact in bf16; q with scale 2**e * c is exact INT4 (groups of 32
inputs), q * 2**e with scale c is exact fp8 e4m3 (blocks of 128 by 128). One golden file therefore serves a checkpoint
in float32, bf16, INT4 or fp8. Embeddings, norms, head and router are bf16; the router's bias is float32.
"""

import math
import zlib
from dataclasses import dataclass

import numpy as np

from .families import Config, text_config

GROUP = 32  # inputs that share an INT4 scale
BLOCK = 128  # rows and columns that share an fp8 scale

Weights = dict[str, np.ndarray]

# Standard deviation of a projection's output for inputs of unit size. The latents are small so that the eps of their
# norms is visible in the logits; the rotary rows of kv_a are lifted back to unit size (see _ROPE_LIFT).
_GAIN = {
    "q_a_proj": 0.06,
    "kv_a_proj_with_mqa": 0.06,
    "q_proj": 1.2,
    "q_b_proj": 1.2,
    "kv_b_proj": 1.0,
    "o_proj": 1.0,
    "gate_proj": 1.2,
    "up_proj": 1.2,
    "down_proj": 1.5,
    "eh_proj": 1.0,
}
_ROPE_LIFT = 4  # power of two
_UNSCALED_STD = 3.64  # of q * 2**e


@dataclass(frozen=True)
class Grid:
    """One linear map [out, in] on the common grid.

    q: int8 [out, in] in -8..7. exponent: int8 [out, ceil(in/32)]. block_scale: float32 [ceil(out/128), ceil(in/128)].
    """

    q: np.ndarray
    exponent: np.ndarray
    block_scale: np.ndarray

    def _spread(self, a: np.ndarray, rows: int, columns: int) -> np.ndarray:
        out, inputs = self.q.shape
        return np.repeat(np.repeat(a, rows, 0)[:out], columns, 1)[:, :inputs]

    @property
    def fp8_values(self) -> np.ndarray:
        """float32 [out, in]: the e4m3 numbers, before the block scale."""
        return np.ldexp(self.q.astype(np.float32), self._spread(self.exponent, 1, GROUP).astype(np.int32))

    @property
    def int4_scale(self) -> np.ndarray:
        """float32 [out, in/32], exact in bf16; `in` is a multiple of 32."""
        out, groups = self.exponent.shape
        block = np.repeat(np.repeat(self.block_scale, BLOCK, 0)[:out], BLOCK // GROUP, 1)[:, :groups]
        return np.ldexp(block, self.exponent.astype(np.int32))

    @property
    def int4_packed(self) -> np.ndarray:
        """int32 [out, in/8]: code q + 8 in four bits, column 8j + n in bits 4n..4n+3 of word j."""
        out, inputs = self.q.shape
        codes = (self.q.astype(np.int64) + 8).astype(np.uint32).reshape(out, inputs // 8, 8)
        words = np.bitwise_or.reduce(codes << (4 * np.arange(8, dtype=np.uint32)), axis=-1)
        return words.astype(np.uint32).view(np.int32)

    @property
    def value(self) -> np.ndarray:
        """float32 [out, in], exact in bf16."""
        return self.fp8_values * self._spread(self.block_scale, BLOCK, BLOCK)


def random_bits(name: str, count: int) -> np.ndarray:
    """uint64 [count] of splitmix64 (Steele, Lea, Flood 2014) in counter mode; the stream is named by `name`."""
    z = np.arange(1, count + 1, dtype=np.uint64) * np.uint64(0x9E3779B97F4A7C15)
    z += np.uint64(zlib.crc32(name.encode()) * 0x100000001B3 % 2**64)
    z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    z = (z ^ (z >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    return z ^ (z >> np.uint64(31))


def uniform(name: str, shape: tuple[int, ...]) -> np.ndarray:
    """float32 in [-1, 1) on a lattice of 2**-23: exact, whatever the platform."""
    bits = random_bits(name, math.prod(shape)) >> np.uint64(40)
    return (bits.astype(np.float32) * np.float32(2.0**-23) - np.float32(1.0)).reshape(shape)


def round_bf16(x: np.ndarray) -> np.ndarray:
    """float32 rounded to the nearest bf16 number, ties to even."""
    bits = np.ascontiguousarray(x, np.float32).view(np.uint32)
    bits = bits + np.uint32(0x7FFF) + ((bits >> np.uint32(16)) & np.uint32(1))
    return (bits & np.uint32(0xFFFF0000)).view(np.float32)


def token_ids(name: str, count: int, vocab_size: int) -> np.ndarray:
    """int32 [count]: a deterministic token sequence."""
    return (random_bits(name, count) % np.uint64(vocab_size)).astype(np.int32)


def is_grid(name: str) -> bool:
    """Whether a tensor is one of the linear maps that lie on the grid (what the fp8 checkpoints quantise)."""
    return name.split(".")[-2] in _GAIN


def is_routed_expert(name: str) -> bool:
    """Whether a tensor is what the INT4 checkpoints quantise."""
    return ".mlp.experts." in name


def grid(config: Config, name: str, shape: tuple[int, int]) -> Grid:
    """The grid numbers of one linear map; `name` as in the checkpoint."""
    name = name.removeprefix("language_model.")
    kind = name.split(".")[-2]
    out, inputs = shape
    q = (random_bits(name, out * inputs) >> np.uint64(60)).astype(np.int8) - np.int8(8)
    groups = -(-inputs // GROUP)
    exponent = -(random_bits(name + "/exponent", out * groups) >> np.uint64(63)).astype(np.int8).reshape(out, groups)
    if kind == "kv_a_proj_with_mqa":
        exponent[-text_config(config)["qk_rope_head_dim"] :] += _ROPE_LIFT
    blocks = (-(-out // BLOCK), -(-inputs // BLOCK))
    k = (random_bits(name + "/scale", blocks[0] * blocks[1]) >> np.uint64(60)).astype(np.float32).reshape(blocks)
    b = round(math.log2(_GAIN[kind] / math.sqrt(inputs) / (_UNSCALED_STD * 1.45)))
    return Grid(q.reshape(shape), exponent, (16 + k) * np.float32(2.0 ** (b - 4)))


def _attention_shapes(t: Config) -> dict[str, tuple[int, ...]]:
    hidden, heads, rank, q_rank = t["hidden_size"], t["num_attention_heads"], t["kv_lora_rank"], t["q_lora_rank"]
    nope, rope, v = t["qk_nope_head_dim"], t["qk_rope_head_dim"], t["v_head_dim"]
    query: dict[str, tuple[int, ...]] = {"q_proj": (heads * (nope + rope), hidden)}
    if q_rank is not None:
        query = {"q_a_proj": (q_rank, hidden), "q_a_layernorm": (q_rank,), "q_b_proj": (heads * (nope + rope), q_rank)}
    return {
        **query,
        "kv_a_proj_with_mqa": (rank + rope, hidden),
        "kv_a_layernorm": (rank,),
        "kv_b_proj": (heads * (nope + v), rank),
        "o_proj": (hidden, heads * v),
    }


def _mlp_shapes(hidden: int, width: int) -> dict[str, tuple[int, ...]]:
    return {"gate_proj": (width, hidden), "up_proj": (width, hidden), "down_proj": (hidden, width)}


def _layer_shapes(t: Config, layer: int) -> dict[str, tuple[int, ...]]:
    hidden, width = t["hidden_size"], t["moe_intermediate_size"]
    p = f"model.layers.{layer}."
    shapes: dict[str, tuple[int, ...]] = {
        f"{p}input_layernorm.weight": (hidden,),
        f"{p}post_attention_layernorm.weight": (hidden,),
    }
    shapes |= {f"{p}self_attn.{n}.weight": s for n, s in _attention_shapes(t).items()}
    if layer < t["first_k_dense_replace"]:
        return shapes | {f"{p}mlp.{n}.weight": s for n, s in _mlp_shapes(hidden, t["intermediate_size"]).items()}
    shapes[f"{p}mlp.gate.weight"] = (t["n_routed_experts"], hidden)
    if t["scoring_func"] == "sigmoid":
        shapes[f"{p}mlp.gate.e_score_correction_bias"] = (t["n_routed_experts"],)
    shared = _mlp_shapes(hidden, width * t["n_shared_experts"])
    shapes |= {f"{p}mlp.shared_experts.{n}.weight": s for n, s in shared.items()}
    for e in range(t["n_routed_experts"]):
        shapes |= {f"{p}mlp.experts.{e}.{n}.weight": s for n, s in _mlp_shapes(hidden, width).items()}
    return shapes


def _prefix(config: Config) -> str:
    return "language_model." if config["model_type"] == "kimi_k25" else ""


def hf_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Names and shapes, unquantised, of the tensors that the text model needs."""
    t = text_config(config)
    vocabulary, hidden = t["vocab_size"], t["hidden_size"]
    shapes: dict[str, tuple[int, ...]] = {"model.embed_tokens.weight": (vocabulary, hidden)}
    for layer in range(t["num_hidden_layers"]):
        shapes |= _layer_shapes(t, layer)
    shapes |= {"model.norm.weight": (hidden,), "lm_head.weight": (vocabulary, hidden)}
    return {_prefix(config) + n: s for n, s in shapes.items()}


def extra_shapes(config: Config) -> dict[str, tuple[int, ...]]:
    """Tensors that a published checkpoint carries besides: a loader skips them.

    kimi_k25: vision tower and projector (a sample). kimi_k2, unwrapped: rotary frequencies. deepseek_v3 with
    `num_nextn_predict_layers`: one multi-token-prediction layer after the last one.
    """
    t = text_config(config)
    hidden, layers = t["hidden_size"], t["num_hidden_layers"]
    if config["model_type"] == "kimi_k25":
        width = config["vision_config"]["vt_hidden_size"]
        return {
            "vision_tower.patch_embed.proj.weight": (width, 3, 14, 14),
            "vision_tower.encoder.blocks.0.wqkv.weight": (3 * width, width),
            "vision_tower.encoder.blocks.0.wqkv.bias": (3 * width,),
            "mm_projector.pre_norm.weight": (width,),
            "mm_projector.proj.2.weight": (hidden, 4 * width),
        }
    if config["model_type"] == "kimi_k2":
        half = t["qk_rope_head_dim"] // 2
        return {f"model.layers.{i}.self_attn.rotary_emb.inv_freq": (half,) for i in range(layers)}
    if not t["num_nextn_predict_layers"]:
        return {}
    p = f"model.layers.{layers}."
    return _layer_shapes(t, layers) | {
        f"{p}embed_tokens.weight": (t["vocab_size"], hidden),
        f"{p}enorm.weight": (hidden,),
        f"{p}hnorm.weight": (hidden,),
        f"{p}eh_proj.weight": (hidden, 2 * hidden),
        f"{p}shared_head.norm.weight": (hidden,),
        f"{p}shared_head.head.weight": (t["vocab_size"], hidden),
    }


def tensor(config: Config, name: str, shape: tuple[int, ...]) -> np.ndarray:
    """One tensor, float32; exact in bf16 unless it is the router's bias."""
    plain = name.removeprefix("language_model.")
    if is_grid(name):
        out, inputs = shape
        return grid(config, name, (out, inputs)).value
    u = uniform(plain, shape) * np.float32(math.sqrt(3.0))  # unit variance
    if name.endswith("e_score_correction_bias"):
        return u * np.float32(0.2)
    if len(shape) == 1:
        return round_bf16(1 + np.float32(0.3) * u)
    if "embed_tokens" in name:
        return round_bf16(u)
    gain = 1.5 if name.endswith("mlp.gate.weight") else 2.0
    return round_bf16(u * np.float32(gain / math.sqrt(shape[-1])))


def hf_weights(config: Config) -> Weights:
    """All weights of the text model under their checkpoint names, [out, in], float32."""
    return {name: tensor(config, name, shape) for name, shape in hf_shapes(config).items()}


def extra_weights(config: Config) -> Weights:
    """The tensors of `extra_shapes`, float32."""
    return {name: tensor(config, name, shape) for name, shape in extra_shapes(config).items()}
