"""Configurations of every family read to the right numbers; whatever would change the maths is refused by name."""

import copy
import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from kimijax.config import (
    Fp8BlockConfig,
    GenerationDefaults,
    Int4Config,
    MoEConfig,
    TargetConfig,
    YarnConfig,
    load_config,
    load_generation_defaults,
    parse_config,
)
from kimijax.errors import ConfigError

from . import golden

REAL = Path(__file__).resolve().parents[2] / "shared" / "data" / "kimi_k25"
Config = dict[str, Any]

YARN = YarnConfig(64.0, 32, 32.0, 1.0, 1.0, 1.0)
MOE = MoEConfig(
    n_experts=16,
    n_chosen=4,
    n_shared=1,
    expert_width=32,
    n_groups=1,
    n_groups_kept=1,
    scoring="sigmoid",
    renormalise=True,
    scale=2.827,
)
K2_THINKING = TargetConfig(
    model_type="kimi_k2",
    text_type="kimi_k2",
    vocab_size=128,
    hidden=64,
    n_layers=3,
    n_heads=8,
    q_lora_rank=40,
    kv_lora_rank=48,
    nope_dim=32,
    rope_dim=16,
    v_dim=24,
    dense_width=96,
    n_dense_layers=1,
    moe=MOE,
    norm_eps=1e-5,
    latent_norm_eps=1e-5,
    rope_theta=50000.0,
    yarn=dataclasses.replace(YARN, beta_fast=1.0),
    max_positions=2048,
    bos_token_id=120,
    eos_token_ids=(122,),
    pad_token_id=None,
    quantization=None,
)
change = dataclasses.replace
RIGHT: dict[str, TargetConfig] = {
    "kimi_k2_thinking": K2_THINKING,
    "kimi_k25": change(
        K2_THINKING,
        model_type="kimi_k25",
        n_layers=4,
        moe=change(MOE, expert_width=256),
        yarn=YARN,
        eos_token_ids=(121,),
        pad_token_id=127,
        has_vision=True,
    ),
    "kimi_k2": change(
        K2_THINKING,
        norm_eps=1e-6,
        latent_norm_eps=1e-6,
        yarn=change(YARN, factor=32.0, beta_fast=1.0),
        max_positions=1024,
        eos_token_ids=(121,),
    ),
    "deepseek_v3": change(
        K2_THINKING,
        model_type="deepseek_v3",
        text_type="deepseek_v3",
        n_layers=5,
        n_dense_layers=3,
        moe=change(MOE, n_experts=32, n_groups=8, n_groups_kept=4, scale=2.5),
        norm_eps=1e-6,
        latent_norm_eps=1e-6,
        rope_theta=10000.0,
        yarn=change(YARN, factor=40.0),
        max_positions=1280,
        bos_token_id=0,
        eos_token_ids=(1,),
        n_mtp_layers=1,
    ),
    "moonlight": change(
        K2_THINKING,
        model_type="deepseek_v3",
        text_type="deepseek_v3",
        q_lora_rank=None,
        moe=change(MOE, n_shared=2, scale=2.446),
        yarn=None,
        max_positions=1024,
    ),
    "deepseek_v2_lite": change(
        K2_THINKING,
        model_type="deepseek_v2",
        text_type="deepseek_v2",
        q_lora_rank=None,
        moe=change(MOE, n_shared=2, scoring="softmax", renormalise=False, scale=1.0),
        norm_eps=1e-6,
        latent_norm_eps=1e-6,
        rope_theta=10000.0,
        yarn=change(YARN, factor=40.0, mscale=0.707, mscale_all_dim=0.707),
        max_positions=1280,
        bos_token_id=0,
        eos_token_ids=(1,),
    ),
}


def config_of(family: str, *, text: Config | None = None, **fields: Any) -> Config:
    """A copy of a family's golden `config.json` with changed fields, at the top and in its text part."""
    config = copy.deepcopy(golden.FAMILIES[family])
    config.update(fields)
    golden.text_config(config).update(text or {})
    return config


def refused(config: Config, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        parse_config(config)


@pytest.mark.parametrize("family", golden.FAMILIES)
def test_family(family: str) -> None:
    """Every field, whose values all differ from one another in size: none can be read in another's place."""
    config = parse_config(golden.FAMILIES[family])
    assert config == RIGHT[family]
    assert config.qk_dim == 48
    assert config.latent_dim == 64
    assert config.is_wrapped == (family == "kimi_k25")
    dense = RIGHT[family].n_dense_layers
    assert [config.is_moe_layer(i) for i in range(config.n_layers)] == [i >= dense for i in range(config.n_layers)]
    assert config.moe is not None
    assert config.moe.has_bias == (family != "deepseek_v2_lite")


def test_the_published_kimi_k25_config() -> None:
    if not REAL.is_dir():
        pytest.skip(f"the real Kimi-K2.5 config is not at {REAL}")
    assert load_config(REAL) == TargetConfig(
        model_type="kimi_k25",
        text_type="kimi_k2",
        vocab_size=163840,
        hidden=7168,
        n_layers=61,
        n_heads=64,
        q_lora_rank=1536,
        kv_lora_rank=512,
        nope_dim=128,
        rope_dim=64,
        v_dim=128,
        dense_width=18432,
        n_dense_layers=1,
        moe=MoEConfig(384, 8, 1, 2048, 1, 1, "sigmoid", True, 2.827),
        norm_eps=1e-5,
        latent_norm_eps=1e-5,
        rope_theta=50000.0,
        yarn=YarnConfig(64.0, 4096, 32.0, 1.0, 1.0, 1.0),
        max_positions=262144,
        bos_token_id=163584,
        eos_token_ids=(163586,),
        pad_token_id=163839,
        quantization=Int4Config(32),
        n_mtp_layers=0,
        has_vision=True,
    )


def test_latent_norm_eps_is_an_option() -> None:
    config = parse_config(golden.FAMILIES["kimi_k25"], latent_norm_eps=1e-6)
    assert (config.norm_eps, config.latent_norm_eps) == (1e-5, 1e-6)
    with pytest.raises(ConfigError, match="latent_norm_eps: found 0"):
        parse_config(golden.FAMILIES["kimi_k25"], latent_norm_eps=0)


@pytest.mark.parametrize("family", ["kimi_k25", "kimi_k2"])
def test_unknown_field_is_refused_by_name(family: str) -> None:
    where = "config.text_config" if family == "kimi_k25" else "config"
    refused(config_of(family, text={"attn_logit_softcap": 30.0}), rf"^{where}\.attn_logit_softcap: found 30.0, .*")
    refused(config_of(family, top_scale=1), r"^config\.top_scale: found 1, expected no such field")


CHANGED_MATHS: list[tuple[str, Any]] = [
    ("hidden_act", "gelu"),
    ("attention_bias", True),
    ("mlp_bias", True),
    ("tie_word_embeddings", True),
    ("moe_layer_freq", 2),
    ("rope_interleave", False),
    ("sliding_window", 4096),
    ("use_sliding_window", True),
    ("moe_router_dtype", "bfloat16"),
    ("linear_attn_config", {"kda_layers": [1]}),
    ("index_topk", 2048),
    ("num_key_value_heads", 4),
    ("topk_method", "group_limited_greedy"),
    ("scoring_func", "softmax"),
    ("scoring_func", "sqrtsoftplus"),
    ("topk_method", "greedy"),
    ("qk_rope_head_dim", 15),
    ("first_k_dense_replace", -1),
    ("q_lora_rank", 0),
    ("hidden_size", 0),
    ("hidden_size", "64"),
    ("hidden_size", 64.0),
    ("hidden_size", True),
    ("rms_norm_eps", None),
    ("rms_norm_eps", 0),
    ("rms_norm_eps", float("nan")),
    ("moe_layer_freq", True),
    ("norm_topk_prob", 1),
    ("num_experts_per_tok", 17),
    ("n_group", 3),
    ("n_group", 16),
    ("topk_group", 2),
    ("n_shared_experts", -1),
    ("eos_token_id", [1, -5]),
    ("eos_token_id", "</s>"),
    ("model_type", "deepseek_v4"),
    ("quantization_config", "int4"),
    ("rope_scaling", "yarn"),
    ("rope_theta", None),
]


@pytest.mark.parametrize(("field", "value"), CHANGED_MATHS, ids=lambda v: str(v)[:20])
@pytest.mark.parametrize("family", ["kimi_k25", "kimi_k2_thinking"])
def test_unsupported_value_is_refused_by_name(family: str, field: str, value: Any) -> None:
    refused(config_of(family, text={field: value}), field)


@pytest.mark.parametrize(
    "field",
    "hidden_size num_hidden_layers vocab_size kv_lora_rank qk_nope_head_dim v_head_dim intermediate_size rms_norm_eps "
    "max_position_embeddings num_attention_heads num_experts_per_tok moe_intermediate_size scoring_func topk_method "
    "rope_theta model_type".split(),
)
def test_missing_field_is_refused_by_name(field: str) -> None:
    for family in ("kimi_k25", "kimi_k2"):
        config = config_of(family)
        del golden.text_config(config)[field]
        refused(config, field)


def test_wrapper_without_text_config_is_refused() -> None:
    config = config_of("kimi_k25")
    del config["text_config"]
    refused(config, r"config\.text_config: found 'no such key'")


def test_noise_changes_nothing() -> None:
    noise = {
        "temperature": 0.2,
        "top_k": 7,
        "max_length": 99,
        "initializer_range": 1.0,
        "use_cache": False,
        "head_dim": 64,
        "transformers_version": "5.0.0",
        "torch_dtype": "float16",
        "id2label": {"0": "x"},
        "pretraining_tp": 8,
    }
    for family in golden.FAMILIES:
        assert parse_config(config_of(family, text=noise)) == RIGHT[family]
    assert parse_config(config_of("kimi_k25", architectures=["Other"], video_placeholder="?")) == RIGHT["kimi_k25"]


@pytest.mark.parametrize("family", golden.FAMILIES)
def test_rope_parameters_mean_the_same(family: str) -> None:
    """transformers 5 writes `rope_parameters` in place of `rope_theta` and `rope_scaling`; some files hold both."""
    config = config_of(family)
    text = golden.text_config(config)
    theta, scaling = text.pop("rope_theta"), text.pop("rope_scaling")
    scaling = {"type": "default"} if scaling is None else scaling
    name = scaling.pop("type")
    text["rope_parameters"] = {**scaling, "rope_type": name, "rope_theta": theta}
    assert parse_config(config) == RIGHT[family]
    text["rope_theta"] = theta
    assert parse_config(config) == RIGHT[family]
    text["rope_theta"] = theta + 1
    refused(config, r"rope_parameters\.rope_theta")


YARN_FIELDS: Config = golden.text_config(golden.FAMILIES["kimi_k2"])["rope_scaling"]


@pytest.mark.parametrize(
    ("scaling", "message"),
    [
        ({**YARN_FIELDS, "type": "linear"}, r"rope_scaling\.type: found \['linear'\]"),
        ({**YARN_FIELDS, "rope_type": "llama3"}, r"rope_scaling\.type"),
        ({k: v for k, v in YARN_FIELDS.items() if k != "type"}, r"rope_scaling\.type"),
        ({**YARN_FIELDS, "attention_factor": 1.2}, r"rope_scaling\.attention_factor"),
        ({**YARN_FIELDS, "truncate": False}, r"rope_scaling\.truncate"),
        ({**YARN_FIELDS, "factor": "32"}, r"rope_scaling\.factor"),
        ({k: v for k, v in YARN_FIELDS.items() if k != "beta_fast"}, r"rope_scaling\.beta_fast: found 'no such key'"),
        ({k: v for k, v in YARN_FIELDS.items() if k != "mscale_all_dim"}, r"rope_scaling\.mscale_all_dim"),
        ({"type": "default", "factor": 2.0}, r"rope_scaling\.factor"),
    ],
    ids=lambda v: v if isinstance(v, str) else "",
)
def test_other_rope_scaling_is_refused(scaling: Config, message: str) -> None:
    refused(config_of("kimi_k2", text={"rope_scaling": scaling}), message)


def int4(path: str = "", value: Any = None) -> Config:
    """The published INT4 `quantization_config`, with one value changed at a dotted path."""
    quantization = golden.text_config(golden.with_quantization(golden.FAMILIES["kimi_k2"], "int4"))[
        "quantization_config"
    ]
    if path:
        *folders, name = path.split(".")
        at = quantization
        for folder in folders:
            at = at[folder]
        at[name] = value
    return quantization


def test_quantization_is_read_wherever_it_stands() -> None:
    """In a wrapper's text_config (as published), at its top, in both; and at the top of a plain config."""
    nested, top = config_of("kimi_k25", text={"quantization_config": int4()}), config_of("kimi_k25")
    top["quantization_config"] = int4()
    both = copy.deepcopy(nested) | {"quantization_config": int4()}
    for config in (nested, top, both):
        assert parse_config(config) == change(RIGHT["kimi_k25"], quantization=Int4Config(32))
    plain = parse_config(golden.with_quantization(golden.FAMILIES["kimi_k2_thinking"], "int4"))
    assert plain == change(RIGHT["kimi_k2_thinking"], quantization=Int4Config(32))
    fp8 = parse_config(golden.with_quantization(golden.FAMILIES["deepseek_v3"], "fp8"))
    assert fp8 == change(RIGHT["deepseek_v3"], quantization=Fp8BlockConfig((128, 128)))
    other = copy.deepcopy(nested) | {"quantization_config": int4("ignore", ["lm_head"])}
    refused(other, r"^config\.quantization_config: found .* expected the same as text_config's")


WEIGHTS = "config_groups.group_0.weights"


@pytest.mark.parametrize(
    ("path", "value"),
    [
        ("quant_method", "gptq"),
        ("format", "int-quantized"),
        ("format", "nvfp4-pack-quantized"),
        ("quantization_status", "frozen"),
        ("kv_cache_scheme", {"num_bits": 8}),
        ("config_groups", {}),
        ("config_groups", {"a": {}, "b": {}}),
        ("config_groups.group_0.input_activations", {"num_bits": 8}),
        ("config_groups.group_0.output_activations", {"num_bits": 8}),
        ("config_groups.group_0.weights", None),
        (f"{WEIGHTS}.num_bits", 8),
        (f"{WEIGHTS}.type", "float"),
        (f"{WEIGHTS}.symmetric", False),
        (f"{WEIGHTS}.strategy", "channel"),
        (f"{WEIGHTS}.group_size", 128),
        (f"{WEIGHTS}.dynamic", True),
        (f"{WEIGHTS}.actorder", "group"),
        (f"{WEIGHTS}.block_structure", [128, 128]),
        (f"{WEIGHTS}.zero_point", 8),
        ("desc_act", True),
    ],
    ids=str,
)
def test_other_int4_is_refused(path: str, value: Any) -> None:
    refused(config_of("kimi_k2", text={"quantization_config": int4(path, value)}), path.rsplit(".", 1)[-1])


def test_names_of_layers_do_not_decide_what_is_int4() -> None:
    for path, value in (("ignore", []), ("config_groups.group_0.targets", ["Other"])):
        config = config_of("kimi_k2", text={"quantization_config": int4(path, value)})
        assert parse_config(config).quantization == Int4Config(32)


@pytest.mark.parametrize(
    "change_of",
    [{"fmt": "e5m2"}, {"weight_block_size": [128]}, {"weight_block_size": [128, 0]}, {"scale_fmt": "ue8m0"}],
    ids=str,
)
def test_other_fp8_is_refused(change_of: Config) -> None:
    config = golden.with_quantization(golden.FAMILIES["deepseek_v3"], "fp8")
    config["quantization_config"] |= change_of
    refused(config, next(iter(change_of)))


def test_int4_widths_must_be_whole_groups() -> None:
    quantized = config_of("kimi_k2", text={"quantization_config": int4(), "moe_intermediate_size": 40})
    refused(quantized, r"moe_intermediate_size: found 40, expected a multiple of the group size 32")
    assert parse_config(config_of("kimi_k2", text={"moe_intermediate_size": 40})).quantization is None


def test_end_tokens_are_those_of_both_files(tmp_path: Path) -> None:
    """config.json names the end of the text, generation_config.json the end of the turn: both end a generation."""
    (tmp_path / "config.json").write_text(json.dumps(golden.FAMILIES["kimi_k25"]))
    assert load_config(tmp_path).eos_token_ids == (121,)
    assert load_generation_defaults(tmp_path) == GenerationDefaults()
    generation = tmp_path / "generation_config.json"
    generation.write_text(json.dumps({"eos_token_id": 122, "max_length": 262144}))
    assert load_config(tmp_path).eos_token_ids == (122, 121)
    assert load_config(tmp_path / "config.json").eos_token_ids == (122, 121)
    generation.write_text(json.dumps({"eos_token_id": [121, 5], "temperature": 1, "top_p": 0.95, "top_k": 20}))
    assert load_config(tmp_path).eos_token_ids == (121, 5)
    assert load_generation_defaults(tmp_path) == GenerationDefaults((121, 5), 1.0, 0.95, 20)


def test_wrapper_end_tokens_are_merged() -> None:
    config = config_of("kimi_k25", eos_token_id=122, text={"eos_token_id": [121, 122]})
    assert parse_config(config).eos_token_ids == (122, 121)


def test_files_that_are_no_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json: found 'no such file'"):
        load_config(tmp_path)
    for text, message in ((b"{", "valid JSON"), (b"\xff", "valid JSON"), (b"[]", "a JSON object")):
        (tmp_path / "config.json").write_bytes(text)
        with pytest.raises(ConfigError, match=message):
            load_config(tmp_path)
