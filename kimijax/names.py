"""The one name table: which Hugging Face tensors make up which parameter of `kimijax.model.Target`.

A checkpoint keeps each expert and each projection as a tensor of its own, [out, in]; the model keeps stacks that it can
use without a copy. Every parameter is therefore a list of pieces, and reading, verifying, counting and writing all go
through that list. Names are without the `language_model.` prefix of the multimodal wrapper (see `checkpoint.inspect`).
"""

import math
from dataclasses import dataclass
from typing import cast

from flax import nnx

from .config import TargetConfig
from .quant import GROUP_SIZE, NIBBLES_PER_WORD

type Path = tuple[str | int, ...]  # of a parameter, as in flax.nnx.to_flat_state: ("layers", 3, "attention", "k_up")

WRAPPER_PREFIX = "language_model."
VISION_PREFIXES = ("vision_tower.", "mm_projector.")


@dataclass(frozen=True)
class Piece:
    """One tensor's part of a parameter: `parameter[at] = tensor.reshape(view)[begin : begin + block]`.

    `block` is the shape of `parameter[at]`. A view splits the tensor's first dimension, its last, or neither; rows
    along the view's first dimension are whole rows of the tensor, so they are contiguous in the file.
    """

    name: str
    shape: tuple[int, ...]  # of the tensor in the file
    view: tuple[int, ...]
    begin: tuple[int, ...]
    block: tuple[int, ...]
    at: tuple[int, ...] = ()

    @property
    def stem(self) -> str:
        """The name without its last part: what `weight`, `weight_packed`, `weight_scale`, ... are appended to."""
        return self.name.rpartition(".")[0]

    @property
    def rows_per_unit(self) -> int:
        """Rows of the tensor in one step along the view's first dimension."""
        return self.shape[0] // self.view[0]


type Table = dict[Path, tuple[Piece, ...]]


def name_table(config: TargetConfig, *, int4: bool) -> Table:
    """Every parameter of the declaration and its pieces.

    Args:
      config: the model.
      int4: the routed experts are declared as words and scales instead of floats.
    """
    d, v = config.hidden, config.vocab_size
    table: Table = {
        ("embed",): (whole("model.embed_tokens.weight", v, d),),
        ("norm",): (whole("model.norm.weight", d),),
        ("lm_head",): (whole("lm_head.weight", v, d),),
    }
    for i in range(config.n_layers):
        at, layer = f"model.layers.{i}", ("layers", i)
        table[*layer, "input_norm"] = (whole(f"{at}.input_layernorm.weight", d),)
        table[*layer, "post_norm"] = (whole(f"{at}.post_attention_layernorm.weight", d),)
        table |= {(*layer, "attention", k): p for k, p in attention_pieces(config, f"{at}.self_attn").items()}
        if config.is_moe_layer(i):
            table |= {(*layer, "mlp", *k): p for k, p in _moe(config, f"{at}.mlp", int4).items()}
        else:
            table |= {(*layer, "mlp", k): p for k, p in mlp_pieces(d, config.dense_width, f"{at}.mlp").items()}
    return table


def parameters(model: nnx.Module) -> dict[Path, nnx.Param]:
    """A model's parameters by path, declared or filled."""
    return {cast(Path, path): cast(nnx.Param, param) for path, param in nnx.to_flat_state(nnx.state(model, nnx.Param))}


def skip_reason(name: str, config: TargetConfig) -> str | None:
    """Why a tensor is left unread on purpose, or None where it must be known to the table."""
    if name.startswith(VISION_PREFIXES):
        return "vision"
    if name.endswith(".rotary_emb.inv_freq"):
        return "rotary_emb.inv_freq"  # a derived buffer that some exporters store
    layer = name.removeprefix("model.layers.").partition(".")[0]
    last = config.n_layers + config.n_mtp_layers
    if name.startswith("model.layers.") and layer.isdecimal() and config.n_layers <= int(layer) < last:
        return "multi-token-prediction layer"
    return None


def whole(name: str, *shape: int, at: tuple[int, ...] = ()) -> Piece:
    """A tensor that is a part of the parameter as it is."""
    return Piece(name, shape, shape, (0,) * len(shape), shape, at)


def viewed(name: str, shape: tuple[int, int], view: tuple[int, int, int]) -> Piece:
    """A tensor that is a parameter under another shape."""
    if math.prod(shape) != math.prod(view):
        raise ValueError(f"{name}: {shape} cannot be viewed as {view}")
    return Piece(name, shape, view, (0, 0, 0), view)


def attention_pieces(c: TargetConfig, at: str) -> dict[str, tuple[Piece, ...]]:
    n, d, r = c.n_heads, c.hidden, c.kv_lora_rank
    out: dict[str, tuple[Piece, ...]] = {}
    if c.q_lora_rank is None:
        out["q"] = (viewed(f"{at}.q_proj.weight", (n * c.qk_dim, d), (n, c.qk_dim, d)),)
    else:
        rank = c.q_lora_rank
        out["q_a"] = (whole(f"{at}.q_a_proj.weight", rank, d),)
        out["q_a_norm"] = (whole(f"{at}.q_a_layernorm.weight", rank),)
        out["q_b"] = (viewed(f"{at}.q_b_proj.weight", (n * c.qk_dim, rank), (n, c.qk_dim, rank)),)
    out["kv_a"] = (whole(f"{at}.kv_a_proj_with_mqa.weight", c.latent_dim, d),)
    out["kv_a_norm"] = (whole(f"{at}.kv_a_layernorm.weight", r),)
    kv, both = f"{at}.kv_b_proj.weight", c.nope_dim + c.v_dim  # per head: the rows of the key, then of the value
    shape, view = (n * both, r), (n, both, r)
    out["k_up"] = (Piece(kv, shape, view, (0, 0, 0), (n, c.nope_dim, r)),)
    out["v_up"] = (Piece(kv, shape, view, (0, c.nope_dim, 0), (n, c.v_dim, r)),)
    out["o"] = (viewed(f"{at}.o_proj.weight", (d, n * c.v_dim), (d, n, c.v_dim)),)
    return out


def mlp_pieces(d: int, f: int, at: str) -> dict[str, tuple[Piece, ...]]:
    return {
        "gate_up": tuple(whole(f"{at}.{p}_proj.weight", f, d, at=(i,)) for i, p in enumerate(("gate", "up"))),
        "down": (whole(f"{at}.down_proj.weight", d, f),),
    }


def _moe(c: TargetConfig, at: str, int4: bool) -> dict[tuple[str, ...], tuple[Piece, ...]]:
    assert c.moe is not None
    e, d, f = c.moe.n_experts, c.hidden, c.moe.expert_width
    out: dict[tuple[str, ...], tuple[Piece, ...]] = {("router",): (whole(f"{at}.gate.weight", e, d),)}
    if c.moe.has_bias:
        out["router_bias",] = (whole(f"{at}.gate.e_score_correction_bias", e),)
    # (suffix of the parameter, of the tensor, inputs that one stored value covers)
    forms = [("", "weight", 1)]
    if int4:
        forms = [("_packed", "weight_packed", NIBBLES_PER_WORD), ("_scale", "weight_scale", GROUP_SIZE)]
    for suffix, tensor, per in forms:
        out["experts", f"gate_up{suffix}"] = tuple(
            whole(f"{at}.experts.{x}.{p}_proj.{tensor}", f, d // per, at=(x, i))
            for x in range(e)
            for i, p in enumerate(("gate", "up"))
        )
        out["experts", f"down{suffix}"] = tuple(
            whole(f"{at}.experts.{x}.down_proj.{tensor}", d, f // per, at=(x,)) for x in range(e)
        )
    if c.moe.n_shared:
        shared = mlp_pieces(d, c.moe.n_shared * f, f"{at}.shared_experts")
        out |= {("shared", k): p for k, p in shared.items()}
    return out
