"""Configurations: ranges, derived sizes, and the three dialects of config.json."""

import json
import math
from dataclasses import fields, replace

import numpy as np
import pytest

from wgsl_train.config import MambaConfig, TrainConfig, load_toml
from wgsl_train.errors import ConfigError

SIZES = {"vocab_size": 277, "d_model": 64, "n_layer": 2}
TINY = {  # as transformers saves it, the keys without a say in the model included
    "architectures": None,
    "bos_token_id": 0,
    "conv_kernel": 4,
    "dtype": None,
    "eos_token_id": 0,
    "expand": 2,
    "hidden_act": "silu",
    "hidden_size": 24,
    "initializer_range": 0.1,
    "intermediate_size": 48,
    "layer_norm_epsilon": 1e-05,
    "model_type": "mamba",
    "num_hidden_layers": 2,
    "pad_token_id": 0,
    "rescale_prenorm_residual": False,
    "residual_in_fp32": False,
    "state_size": 5,
    "tie_word_embeddings": True,
    "time_step_floor": 0.0001,
    "time_step_init_scheme": "random",
    "time_step_max": 0.1,
    "time_step_min": 0.001,
    "time_step_rank": 3,
    "time_step_scale": 1.0,
    "transformers_version": "5.24.0",
    "use_bias": False,
    "use_cache": True,
    "use_conv_bias": True,
    "vocab_size": 61,
}
VARIANTS = {
    "official": MambaConfig(**SIZES),
    "memory_engine": MambaConfig.memory_engine(**SIZES, tie_embeddings=False),
    "padded": MambaConfig(**SIZES, pad_vocab_size_multiple=8, d_state=17, dt_rank=3),
    "odd": MambaConfig(**SIZES, d_conv=1, expand=3, use_conv_bias=False, eos_token_id=3),
    "zoh": MambaConfig(**SIZES, discretization="zoh"),
    "clamped": MambaConfig(**SIZES, a_log_clamp=(-10, 5)),
    "mamba2": MambaConfig(**SIZES, layers="mamba2"),
    "mamba2_odd": MambaConfig(
        **SIZES,
        layers="mamba2",
        head_dim=16,
        n_groups=4,
        d_state=7,
        pad_vocab_size_multiple=8,
        time_step_limit=(0.01, math.inf),
        rescale_prenorm_residual=False,
        discretization="zoh",
    ),
    "mamba2_biased": MambaConfig(**SIZES, layers="mamba2", lm_head_bias=True),
}


# MambaConfig


def test_derived_sizes():
    config = MambaConfig(**SIZES, pad_vocab_size_multiple=8)
    assert (config.d_inner, config.dt_rank, config.padded_vocab_size) == (128, 4, 280)
    assert MambaConfig(256, 65, 1).dt_rank == 5
    assert MambaConfig(256, 65, 1, dt_rank=2).dt_rank == 2
    assert MambaConfig(256, 65, 1, dt_rank="auto").dt_rank == 5
    assert MambaConfig(280, 8, 1, pad_vocab_size_multiple=8).padded_vocab_size == 280


def test_smallest_and_largest_sizes_are_allowed():
    MambaConfig(1, 1, 1, d_state=1, d_conv=1, expand=1, dt_rank=1)
    MambaConfig(1 << 20, 2048, 48, d_state=1024)


@pytest.mark.parametrize(
    "field, value",
    [
        ("vocab_size", 0),
        ("vocab_size", (1 << 20) + 1),
        ("vocab_size", True),
        ("vocab_size", 256.0),
        ("vocab_size", "256"),
        ("vocab_size", None),
        ("d_model", 0),
        ("d_model", -4),
        ("n_layer", 0),
        ("d_state", 0),
        ("d_state", 1025),
        ("d_conv", 0),
        ("d_conv", 33),
        ("expand", 0),
        ("expand", 1.5),
        ("dt_rank", 0),
        ("dt_rank", "Auto"),
        ("dt_rank", None),
        ("discretization", "bilinear"),
        ("discretization", ["zoh"]),
        ("use_bias", 1),
        ("use_conv_bias", "yes"),
        ("norm_eps", 0.0),
        ("norm_eps", float("nan")),
        ("norm_eps", float("inf")),
        ("norm_eps", True),
        ("a_log_clamp", (5, -10)),
        ("a_log_clamp", (1, 1)),
        ("a_log_clamp", (1,)),
        ("a_log_clamp", (-1e9, 5)),
        ("a_log_clamp", (float("nan"), 5)),
        ("a_log_clamp", 5),
        ("head_dim", 0),
        ("n_groups", 0),
        ("attn_heads", 0),
        ("attn_kv_heads", 3),  # of 1
        ("attn_head_dim", 0),
        ("attn_rotary_dim", 3),
        ("attn_rotary_dim", 66),
        ("attn_rope_theta", 0.5),
        ("mlp", "gelu"),
        ("d_ff", 0),
        ("time_step_limit", (-1, 1)),
        ("time_step_limit", (1, 0.5)),
        ("time_step_limit", (float("nan"), 5)),
        ("pad_vocab_size_multiple", 0),
        ("init", "random"),
        ("initializer_range", -0.1),
        ("time_step_min", 0.2),
        ("eos_token_id", -1),
    ],
)
def test_refuses_naming_field_value_and_range(field, value):
    with pytest.raises(ConfigError) as caught:
        MambaConfig(**(SIZES | {field: value}), layers=("mamba", "attention"))
    text = str(caught.value)
    assert f"MambaConfig.{field} is {value!r}; allowed: " in text
    assert not text.endswith("allowed: ")


def test_padding_cannot_exceed_the_largest_vocabulary():
    with pytest.raises(ConfigError, match="pad_vocab_size_multiple"):
        MambaConfig((1 << 20) - 1, 8, 1, pad_vocab_size_multiple=50000)


def test_numbers_become_python_s_own():
    config = MambaConfig(np.int64(256), np.uint32(8), 1, norm_eps=1, a_log_clamp=[-10, 5])
    assert type(config.vocab_size) is type(config.d_model) is int
    assert type(config.norm_eps) is float
    assert config.a_log_clamp == (-10.0, 5.0)
    assert {config} == {replace(config)}  # hashable


def test_memory_engine_preset():
    config = MambaConfig.memory_engine(**SIZES)
    assert config.discretization == "zoh"
    assert config.use_bias
    assert config.use_conv_bias
    assert config.x_proj_bias
    assert config.lm_head_bias
    assert config.norm_eps == 1e-6
    assert config.a_log_clamp == (-10, 5)
    assert config.init == "memory_engine"
    assert MambaConfig.memory_engine(**SIZES, discretization="euler").discretization == "euler"
    with pytest.raises(ConfigError, match=r"has no 'd_modle'; did you mean 'd_model'"):
        MambaConfig.memory_engine(vocab_size=1, d_modle=1, n_layer=1)
    with pytest.raises(ConfigError, match="MambaConfig needs n_layer"):
        MambaConfig.memory_engine(vocab_size=1, d_model=1)


@pytest.mark.parametrize("config", VARIANTS.values(), ids=VARIANTS)
def test_both_forms_come_back_equal(config):
    assert MambaConfig.from_json(config.to_json()) == config
    theirs = json.loads(json.dumps(config.to_hugging_face(), allow_nan=False))
    assert MambaConfig.from_hugging_face(theirs) == config


def test_every_field_survives_the_round_trip():
    """Each field at a value that is not its default, so that none can be forgotten."""
    other = {
        "dt_rank": 9, "discretization": "zoh", "a_log_clamp": (-1.0, 1.0), "init": "memory_engine",
        "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 3, "time_step_limit": (0.01, math.inf),
        "layers": ("mamba", "mamba:d_state=9"), "mlp": "swiglu", "d_ff": 100,
        "attn_heads": 3, "attn_kv_heads": 1, "attn_head_dim": 10, "attn_rotary_dim": 2,
    }  # fmt: skip
    for f in fields(MambaConfig):
        if f.name in SIZES:
            value = SIZES[f.name] + 1
        elif f.name in other:
            value = other[f.name]
        elif isinstance(f.default, bool):
            value = not f.default
        elif isinstance(f.default, int):
            value = f.default + 1
        else:
            value = f.default / 2
        config = MambaConfig(**(SIZES | {f.name: value}))
        assert config != VARIANTS["official"], f.name
        assert MambaConfig.from_json(config.to_json()) == config
        assert MambaConfig.from_hugging_face(config.to_hugging_face()) == config, f.name


def test_plain_models_are_what_transformers_reads():
    theirs = VARIANTS["odd"].to_hugging_face()
    assert theirs["model_type"] == "mamba"
    assert theirs["architectures"] == ["MambaForCausalLM"]
    assert theirs["hidden_act"] == "silu"
    assert theirs["intermediate_size"] == 192
    assert theirs["time_step_rank"] == 4
    assert theirs["rescale_prenorm_residual"] is False  # or transformers draws out_proj anew
    assert theirs["wgsl_train"] == {"rescale_prenorm_residual": True}
    assert TINY.keys() - theirs.keys() <= {
        "dtype", "transformers_version", "use_cache", "time_step_init_scheme",
    }  # fmt: skip
    assert VARIANTS["padded"].to_hugging_face()["vocab_size"] == 280


def test_models_of_mamba2_are_what_transformers_reads():
    theirs = VARIANTS["mamba2"].to_hugging_face()
    assert theirs["model_type"] == "mamba2"
    assert theirs["architectures"] == ["Mamba2ForCausalLM"]
    assert (theirs["num_heads"], theirs["head_dim"], theirs["n_groups"]) == (2, 64, 1)
    assert "intermediate_size" not in theirs
    assert "time_step_limit" not in theirs  # its own default, which is infinite
    assert theirs["wgsl_train"] == {"rescale_prenorm_residual": True}
    theirs = VARIANTS["mamba2_odd"].to_hugging_face()
    assert theirs["time_step_limit"] == [0.01, {"__float__": "Infinity"}]
    assert theirs["wgsl_train"]["discretization"] == "zoh"  # which it has no use for
    theirs = VARIANTS["mamba2_biased"].to_hugging_face()
    assert theirs["model_type"] == "wgsl_train_mamba2"
    assert theirs["hidden_act"] != "silu"


def test_reads_mamba2_as_transformers_writes_it():
    tiny = {
        "architectures": ["Mamba2ForCausalLM"], "model_type": "mamba2", "hidden_size": 24,
        "num_hidden_layers": 2, "vocab_size": 61, "num_heads": 4, "head_dim": 12, "n_groups": 2,
        "state_size": 6, "use_bias": False, "time_step_limit": [0.0, {"__float__": "Infinity"}],
        "chunk_size": 4, "tie_word_embeddings": True,
    }  # fmt: skip
    config = MambaConfig.from_hugging_face(tiny)
    assert config.layers == ("mamba2", "mamba2")
    assert (config.n_heads, config.head_dim, config.n_groups, config.d_state) == (4, 12, 2, 6)
    assert config.tie_embeddings
    assert config.time_step_limit == (0.0, math.inf)
    older = tiny | {"time_step_limit": json.loads("[0.0, Infinity]")}
    assert MambaConfig.from_hugging_face(older) == config
    del older["tie_word_embeddings"], older["n_groups"]  # what is left out has its own defaults
    config = MambaConfig.from_hugging_face(older | {"num_heads": 8, "head_dim": 6})
    assert config.n_groups == 8
    assert not config.tie_embeddings
    with pytest.raises(ConfigError, match="num_heads is 5, but the other keys make it 4"):
        MambaConfig.from_hugging_face(tiny | {"num_heads": 5})


@pytest.mark.parametrize(
    "options, message",
    [
        ({"head_dim": 24}, "head_dim is 24; allowed: divisors of d_inner .*, 128"),
        ({"n_groups": 3}, "n_groups is 3; allowed: divisors of the number of heads .*, 2"),
    ],
)
def test_heads_must_come_out_even_where_there_are_any(options, message):
    MambaConfig(**SIZES, **options)
    with pytest.raises(ConfigError, match=message):
        MambaConfig(**SIZES, **options, layers="mamba2")


@pytest.mark.parametrize(
    "field, value",
    [
        ("discretization", "zoh"),
        ("a_log_clamp", (-10, 5)),
        ("x_proj_bias", True),
        ("lm_head_bias", True),
    ],
)
def test_what_transformers_would_compute_otherwise_it_must_refuse(field, value):
    theirs = MambaConfig(**SIZES, **{field: value}).to_hugging_face()
    assert theirs["model_type"] == "wgsl_train_mamba"
    assert theirs["architectures"] == []
    assert theirs["hidden_act"] != "silu"  # stops MambaForCausalLM, which reads any model_type
    assert theirs["wgsl_train"].keys() == {field, "rescale_prenorm_residual"}


def test_an_initialisation_alone_leaves_the_model_plain():
    theirs = MambaConfig(**SIZES, init="memory_engine").to_hugging_face()
    assert theirs["model_type"] == "mamba"


def test_reads_what_transformers_writes():
    config = MambaConfig.from_hugging_face(TINY)
    assert (config.vocab_size, config.d_model, config.n_layer) == (61, 24, 2)
    assert (config.d_state, config.dt_rank, config.d_inner) == (5, 3, 48)
    assert config.initializer_range == 0.1
    assert not config.residual_in_fp32
    # the published conversions hold both programs' keys
    both = TINY | {"d_model": 24, "n_layer": 2, "ssm_cfg": {}, "rms_norm": True, "d_inner": 48}
    assert MambaConfig.from_hugging_face(both) == config
    untied = MambaConfig.from_hugging_face(TINY | {"tie_word_embeddings": False})
    assert not untied.tie_embeddings


def test_reads_what_mamba_ssm_writes():  # C03
    sparse = {"d_model": 64, "n_layer": 2, "vocab_size": 277, "pad_vocab_size_multiple": 8}
    config = MambaConfig.from_hugging_face(sparse)
    assert (config.d_model, config.n_layer, config.padded_vocab_size) == (64, 2, 280)
    assert (config.dt_rank, config.d_inner) == (4, 128)
    full = sparse | {
        "ssm_cfg": {"d_state": 8, "d_conv": 3, "expand": 1, "dt_rank": "auto", "bias": True},
        "rms_norm": True,
        "residual_in_fp32": True,
        "fused_add_norm": True,
        "tie_embeddings": False,
    }
    config = MambaConfig.from_hugging_face(full)
    assert (config.d_state, config.d_conv, config.d_inner, config.dt_rank) == (8, 3, 64, 4)
    assert config.use_bias
    assert not config.tie_embeddings
    del sparse["pad_vocab_size_multiple"]  # 8 is that program's default
    assert MambaConfig.from_hugging_face(sparse).padded_vocab_size == 280


@pytest.mark.parametrize(
    "change, message",
    [
        ({"model_type": "mamba3"}, "model_type is 'mamba3'; only 'mamba' and 'mamba2' are known"),
        ({"model_type": "falcon_mamba"}, "model_type is 'falcon_mamba'"),
        ({"model_type": []}, "model_type"),
        ({"architectures": ["LlamaForCausalLM"]}, "architectures names 'LlamaForCausalLM'"),
        ({"architectures": "MambaModel"}, "architectures is 'MambaModel', not a list"),
        ({"architectures": 3}, "architectures is 3, not a list"),
        ({"hidden_act": "gelu"}, "hidden_act is 'gelu'"),
        ({"rms_norm": False}, "rms_norm is False"),
        ({"hidden_size": None}, "MambaConfig.d_model is None"),
        ({"hidden_size": "24"}, "MambaConfig.d_model is '24'"),
        ({"intermediate_size": 50}, "intermediate_size is 50, but the other keys make it 48"),
        ({"state_size": 4096}, "MambaConfig.d_state is 4096"),
        ({"wgsl_train": 3}, "wgsl_train is 3"),
        ({"wgsl_train": {"discretisation": "zoh"}}, "did you mean 'discretization'"),
        ({"wgsl_train": {"vocab_size": 7}}, "vocab_size is 61, but the other keys make it 7"),
    ],
)
def test_refuses_another_model(change, message):
    with pytest.raises(ConfigError) as caught:
        MambaConfig.from_hugging_face(TINY | change)
    assert message in str(caught.value)


@pytest.mark.parametrize("key", ["hidden_size", "num_hidden_layers", "vocab_size", "use_bias"])
def test_no_size_is_guessed(key):
    with pytest.raises(ConfigError, match=f"no '{key}'"):
        MambaConfig.from_hugging_face({k: v for k, v in TINY.items() if k != key})


def test_reads_mamba2_of_mamba_ssm():
    config = MambaConfig.from_hugging_face(SIZES | {"ssm_cfg": {"layer": "Mamba2"}})
    assert config.layers == ("mamba2", "mamba2")
    assert (config.d_state, config.head_dim, config.n_groups, config.n_heads) == (128, 64, 1, 2)
    ssm = {
        "layer": "Mamba2", "headdim": 32, "ngroups": 2, "d_state": 9, "dt_limit": [0.01, 0.1],
        "chunk_size": 64, "rmsnorm": True,
    }  # fmt: skip
    config = MambaConfig.from_hugging_face(SIZES | {"ssm_cfg": ssm})
    assert (config.d_state, config.head_dim, config.n_groups) == (9, 32, 2)
    assert config.time_step_limit == (0.01, 0.1)
    heads = {"num_heads": 4, "causal": True}
    theirs = SIZES | {"ssm_cfg": ssm, "attn_layer_idx": [0], "attn_cfg": heads}
    assert MambaConfig.from_hugging_face(theirs).layers == ("attention", "mamba2")


def test_reads_hybrids_of_mamba_ssm():
    heads = {"num_heads": 4, "causal": True, "rotary_emb_dim": 8, "num_heads_kv": None}
    theirs = SIZES | {"d_intermediate": 200, "attn_layer_idx": [1], "attn_cfg": heads}
    config = MambaConfig.from_hugging_face(theirs)
    assert config.layers == ("mamba", "attention")
    assert (config.mlp, config.d_ff) == ("swiglu", 256)  # that program rounds up to 128
    assert (config.attn_heads, config.attn_kv_heads, config.attn_head_dim) == (4, 0, 16)
    assert (config.attn_rotary_dim, config.attn_bias) == (8, True)
    plain = {"qkv_proj_bias": False, "out_proj_bias": False, "head_dim": 32, "num_heads_kv": 2}
    config = MambaConfig.from_hugging_face(theirs | {"attn_cfg": heads | plain})
    assert (config.attn_kv_heads, config.attn_head_dim, config.attn_bias) == (2, 32, False)


@pytest.mark.parametrize(
    "change, message",
    [
        ({"rms_norm": False}, "rms_norm is False"),
        (
            {"attn_layer_idx": [2]},
            "attn_layer_idx is [2]; allowed: a list of numbers of layers, 0 to 1",
        ),
        ({"attn_layer_idx": 1}, "attn_layer_idx is 1; "),
        ({"attn_layer_idx": [1]}, "attn_cfg has no 'num_heads'"),
        ({"attn_layer_idx": [1], "attn_cfg": 3}, "attn_cfg is 3, not an object"),
        ({"attn_layer_idx": [1], "attn_cfg": {"num_heads": 0, "causal": True}}, "attn_heads is 0"),
        ({"attn_layer_idx": [1], "attn_cfg": {"num_heads": 2}}, "causal is False; only True"),
        ({"attn_layer_idx": [1], "attn_cfg": {"num_head": 2}}, "did you mean 'num_heads'"),
        (
            {"attn_layer_idx": [1], "attn_cfg": {"num_heads": 2, "qkv_proj_bias": False}},
            "qkv_proj_bias and out_proj_bias differ",
        ),
        (
            {"attn_layer_idx": [1], "attn_cfg": {"num_heads": 2, "causal": True, "d_conv": 4}},
            "attn_cfg.d_conv is 4; only 0 is known",
        ),
        ({"d_intermediate": "64"}, "d_intermediate is '64', not an integer"),
        ({"d_intermediate": -64}, "d_ff is 0"),
        ({"ssm_cfg": {"layer": "Mamba3"}}, "ssm_cfg.layer is 'Mamba3'; only 'Mamba1' and 'Mamba2'"),
        ({"ssm_cfg": {"layer": ["Mamba1"]}}, "ssm_cfg.layer is ['Mamba1']"),
        ({"ssm_cfg": {"layer": "Mamba2", "dt_rank": 3}}, "has no 'dt_rank'"),
        ({"ssm_cfg": {"layer": "Mamba2", "d_ssm": 32}}, "ssm_cfg.d_ssm is 32; only None is known"),
        ({"ssm_cfg": {"layer": "Mamba1", "headdim": 3}}, "has no 'headdim'"),
        ({"ssm_cfg": {"d_stat": 3}}, "did you mean 'd_state'"),
        ({"ssm_cfg": 3}, "ssm_cfg is 3"),
        ({"n_layers": 3}, "did you mean 'n_layer'"),
    ],
)
def test_refuses_another_model_of_mamba_ssm(change, message):
    with pytest.raises(ConfigError) as caught:
        MambaConfig.from_hugging_face(SIZES | change)
    assert message in str(caught.value)


@pytest.mark.parametrize("text", ["", "[]", "3", "{", "{}", '{"model_type": "wgsl_train"}'])
def test_refuses_what_is_no_configuration(text):
    with pytest.raises(ConfigError):
        MambaConfig.from_json(text)


# TrainConfig


def test_defaults():
    config = TrainConfig()
    assert (config.lr, config.beta1, config.beta2, config.eps) == (1e-4, 0.9, 0.999, 1e-8)
    assert (config.weight_decay, config.max_grad_norm, config.max_delta) == (0.01, 1.0, 0.0)


@pytest.mark.parametrize(
    "field, value",
    [
        ("lr", -1.0),
        ("lr", "1e-3"),
        ("lr", 10**400),
        ("schedule", "cosin"),
        ("warmup_steps", -1),
        ("min_lr", -1.0),
        ("min_lr", 1.0),
        ("beta1", 1.0),
        ("beta2", 1.0),
        ("eps", 0.0),
        ("weight_decay", -0.1),
        ("no_decay", "*.bias"),
        ("no_decay", (1,)),
        ("max_grad_norm", -1.0),
        ("max_grad_norm", 10**400),
        ("max_delta", -1.0),
        ("steps", 0),
        ("steps", 1.5),
        ("epochs", 0),
        ("batch_size", 0),
        ("seq_len", 0),
        ("gradient_accumulation", 0),  # T02
        ("seed", -1),
        ("eval_fraction", 1.0),
        ("eval_every", -1),
        ("save_every", -1),
        ("log_every", 0),
        ("keep_checkpoints", 0),
        ("activation_checkpointing", 1),
        ("memory_budget", 0),
        ("max_skips", 0),
    ],
)
def test_training_refuses_naming_field_value_and_range(field, value):
    with pytest.raises(ConfigError) as caught:
        TrainConfig(**{field: value})
    assert f"TrainConfig.{field} is {value!r}; allowed: " in str(caught.value)


def test_how_long():
    with pytest.raises(ConfigError, match="steps is 5 and epochs is 2: set one"):
        TrainConfig(steps=5, epochs=2)
    with pytest.raises(ConfigError, match="needs steps or epochs"):
        TrainConfig().total_steps(7)
    with pytest.raises(ConfigError, match=r"warmup_steps is 11; allowed: at most steps, 10"):
        TrainConfig(steps=10, warmup_steps=11)
    assert TrainConfig(steps=5).total_steps(7) == 5


def test_a_partial_window_is_a_step():  # T02
    assert TrainConfig(epochs=1, gradient_accumulation=4).total_steps(7) == 2
    assert TrainConfig(epochs=1, gradient_accumulation=4).total_steps(3) == 1
    assert TrainConfig(epochs=3, gradient_accumulation=4).total_steps(8) == 6


def test_which_parameters_decay():  # T11
    config = TrainConfig()
    layer = "backbone.layers.0."
    for name in ("in_proj.weight", "conv1d.weight", "x_proj.weight", "dt_proj.weight"):
        assert config.decays(f"{layer}mixer.{name}")
    assert config.decays("backbone.embeddings.weight")
    assert config.decays("lm_head.weight")
    for name in (
        "norm.weight",
        "mixer.A_log",
        "mixer.D",
        "mixer.dt_proj.bias",
        "mixer.conv1d.bias",
    ):
        assert not config.decays(layer + name)
    assert not config.decays("backbone.norm_f.weight")
    assert not config.decays("lm_head.bias")
    assert TrainConfig(no_decay=[]).decays(f"{layer}mixer.A_log")


def test_training_round_trip():
    config = TrainConfig(lr=3e-3, no_decay=["*.D"], steps=7, schedule="cosine")
    assert TrainConfig.from_dict(json.loads(json.dumps(config.to_dict()))) == config
    with pytest.raises(ConfigError, match="did you mean 'batch_size'"):
        TrainConfig.from_dict({"batchsize": 3})


# TOML


def test_toml(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text(
        '[model]\nvocab_size = 256\nd_model = 32\nn_layer = 1\ndt_rank = "auto"\n'
        'a_log_clamp = [-10, 5]\n[train]\nlr = 1\nno_decay = []\n[data]\npaths = ["a.txt"]\n'
    )
    tables = load_toml(path)
    assert MambaConfig.from_dict(tables["model"]).a_log_clamp == (-10, 5)
    assert TrainConfig.from_dict(tables["train"]) == TrainConfig(lr=1.0, no_decay=())
    assert tables["data"] == {"paths": ["a.txt"]}
    path.write_text("")
    assert load_toml(path) == {"model": {}, "train": {}, "data": {}}


@pytest.mark.parametrize(
    "text, message",
    [
        ("[model]\nd_modle = 3", "[model] has no 'd_modle'; did you mean 'd_model'?"),
        ("[train]\nlearning = 3", "[train] has no 'learning'; "),
        ("[modl]\n", "has no 'modl'; did you mean 'model'?"),
        ("train = 3", "train is 3, not a table"),
        ("[model", "not TOML"),
    ],
)
def test_toml_faults(tmp_path, text, message):
    path = tmp_path / "run.toml"
    path.write_text(text)
    with pytest.raises(ConfigError) as caught:
        load_toml(path)
    assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_toml_that_is_not_there(tmp_path):
    with pytest.raises(ConfigError, match="cannot be read"):
        load_toml(tmp_path / "none.toml")
    (tmp_path / "binary.toml").write_bytes(b"\xff\xfe")
    with pytest.raises(ConfigError, match="not TOML"):
        load_toml(tmp_path / "binary.toml")


def test_an_entry_s_own_heads_are_what_those_of_keys_divide():
    sizes = {"vocab_size": 9, "d_model": 128, "attn_kv_heads": 3}
    made = MambaConfig(**sizes, layers=("mamba", "attention:attn_heads=6"))
    assert [layer.config.attn_heads for layer in made.schedule] == [2, 6]
    with pytest.raises(
        ConfigError, match=r"'attention': .*attn_kv_heads is 3; allowed: divisors of"
    ):
        MambaConfig(**sizes, layers=("attention:attn_heads=6", "attention"))


def test_an_entry_s_own_width_of_heads_sets_their_number():
    def heads(config):
        return [(la.config.attn_heads, la.config.attn_head_dim) for la in config.schedule]

    layers = "attention,attention:attn_head_dim=32,attention:attn_head_dim=32:attn_heads=3"
    config = MambaConfig(8, 128, n_layer=6, layers=layers)
    assert heads(config) == [(2, 64), (4, 32), (3, 32)] * 2
    assert heads(MambaConfig(8, 128, 1, layers="attention", attn_head_dim=32)) == [(4, 32)]
    assert heads(MambaConfig(8, 128, layers=layers, attn_heads=1)) == [(1, 64), (1, 32), (3, 32)]
    assert heads(MambaConfig(8, 128, layers="attention:attn_head_dim=32:attn_kv_heads=4")) == [
        (4, 32)
    ]
    again = MambaConfig.from_hugging_face(json.loads(json.dumps(config.to_hugging_face())))
    assert again == config == MambaConfig.from_json(config.to_json()) == replace(config)
    assert heads(again) == heads(config)
    with pytest.raises(ConfigError, match="attn_head_dim is 0"):
        MambaConfig(8, 128, layers="attention:attn_head_dim=0")
