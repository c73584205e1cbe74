"""Models of several layer types: schedules, their form on disk, and whole models against NumPy."""

import itertools
import json
from dataclasses import fields, replace

import numpy as np
import pytest

import wgsl_train as wt
from tests.oracle_model import loss_and_grads
from tests.test_model import assert_matches_oracle, batch, lively, relative
from wgsl_train.checkpoint import check_names
from wgsl_train.config import LAYER_TYPES, LORA_TARGETS, MambaConfig, expand_preset, load_toml
from wgsl_train.errors import CheckpointError, ConfigError
from wgsl_train.kernel import PORTABLE
from wgsl_train.model import plan_step
from wgsl_train.models import language_model
from wgsl_train.models.initialization import initialize
from wgsl_train.plan import Layout

SIZES = dict(vocab_size=37, d_model=20, d_state=5, dt_rank=3, head_dim=10)
STACKS = {
    "options": "mamba,mamba:d_state=3:d_conv=2,mamba:discretization=zoh:use_bias=true:expand=1",
    "shared": "mamba:share=a,mamba,mamba:share=a,mamba:d_state=4:share=b,mamba:d_state=4:share=b",
    "attention": "attention*2",
    "jamba": "mamba,attention:attn_heads=4:attn_kv_heads=2:attn_head_dim=6:attn_rotary_dim=4"
    ":attn_bias=true:mlp=swiglu,mamba:mlp=swiglu:d_ff=9",
    "zamba": "mamba,attention:mlp=swiglu:share=a,mamba,attention:mlp=swiglu:share=a",
    "mamba2": "mamba,mamba2:n_groups=2:d_state=6:head_dim=5,mamba2:expand=1:use_bias=true",
    "three_types": "mamba,mamba2:mlp=swiglu,attention:attn_rotary_dim=6",
    "mlp": "mamba:mlp=swiglu:d_ff=13,mamba,mamba:mlp=swiglu",
    "shared_mlp": "mamba:mlp=swiglu:d_ff=24:share=a*2",
}


def config(layers, **options):
    return MambaConfig(**{**SIZES, **options}, layers=layers)


# Schedules


def test_a_schedule_says_what_each_layer_is():
    assert MambaConfig(**SIZES, n_layer=3).layers == ("mamba",) * 3
    assert config("mamba*2, mamba:d_state=3").layers == ("mamba", "mamba", "mamba:d_state=3")
    assert config(["mamba*2", "mamba:d_state=3"]).n_layer == 3
    assert config("mamba,mamba:d_conv=2", n_layer=4).layers == ("mamba", "mamba:d_conv=2") * 2
    assert config("mamba,mamba:d_conv=2*3").layers == ("mamba", *["mamba:d_conv=2"] * 3)
    first, second = config("mamba,mamba:d_state=3:expand=1:discretization=zoh").schedule
    assert (first.type, first.owner, second.owner) == ("mamba", 0, 1)
    assert (first.config.d_state, second.config.d_state) == (5, 3)
    assert (second.config.d_inner, second.config.discretization) == (20, "zoh")


def test_layers_that_share_parameters_have_them_once():
    c = config("mamba:share=a,mamba,mamba:share=a")
    assert [layer.owner for layer in c.schedule] == [0, 1, 0]
    names = [spec.name for spec in language_model.parameters(c)]
    assert len(names) == len(set(names))
    assert not [name for name in names if ".layers.2." in name]
    assert len(names) == len(language_model.parameters(config("mamba,mamba")))


@pytest.mark.parametrize(
    "layers, message",
    [
        ("mamba,mambo", "no layer is of type 'mambo'; did you mean 'mamba'? known: mamba"),
        ("", "no layer is of type ''; known: mamba"),
        ("mamba,", "no layer is of type ''"),
        ("transformer*2", "no layer is of type 'transformer'; "),
        ("mamba*0", "'mamba*0': a number from 1 to 9999 must follow *"),
        ("mamba*", "must follow *"),
        ("mamba*x", "must follow *"),
        ("mamba:d_sate=3", "has no 'd_sate'; did you mean 'd_state'?"),
        ("mamba:d_model=3", "has no 'd_model'; "),
        (
            "mamba:d_ff=12",
            "'mamba:d_ff=12': a layer of type 'mamba' with mlp 'none' has no 'd_ff'; known: d_state,",
        ),
        ("mamba2:attn_heads=2", "a layer of type 'mamba2' with mlp 'none' has no 'attn_heads'"),
        ("mamba:d_state", "'d_state' is no option=value"),
        ("mamba:d_state=", "'d_state=' is no option=value"),
        ("mamba:d_state=0", "MambaConfig.d_state is 0; allowed: an integer from 1 to 1024"),
        ("mamba:d_state=x", "MambaConfig.d_state is 'x'; allowed: "),
        ("mamba:use_bias=1", "MambaConfig.use_bias is 1; allowed: true or false"),
        ("mamba:share=a,mamba:d_state=3:share=a", "cannot share parameters: they differ"),
        (["mamba", 3], "MambaConfig.layers is ['mamba', 3]; allowed: "),
        (3, "MambaConfig.layers is 3; allowed: "),
    ],
)
def test_a_schedule_that_is_none(layers, message):
    with pytest.raises(ConfigError) as caught:
        config(layers)
    assert message in str(caught.value)
    assert "MambaConfig.layers" in str(caught.value)


@pytest.mark.parametrize(
    "layers, name, message",
    [
        ("mamba", "head_dim", "head_dim has no effect: it is an option of layers of type 'mamba2'"),
        ("mamba", "time_step_limit", "time_step_limit has no effect: .* layers of type 'mamba2', "),
        ("mamba2", "a_log_clamp", "a_log_clamp has no effect: .* layers of type 'mamba', "),
        ("mamba", "a_log_clamp", None),
        ("mamba,mamba2", "time_step_limit", None),
        ("mamba", "d_ff", "d_ff has no effect: it is an option of mlp 'swiglu'"),
        ("mamba2", "attn_heads", "attn_heads has no effect: .* layers of type 'attention', and"),
        ("attention", "d_state", "d_state has no effect: .* of type 'mamba' or 'mamba2', and"),
        (
            "mamba:d_state=3",
            "d_state",
            "d_state has no effect: .* takes it from there; leave it out",
        ),
        ("mamba,mamba:mlp=swiglu:d_ff=4", "d_ff", "d_ff has no effect: "),
        ("mamba,mamba:mlp=swiglu", "d_ff", None),
        ("mamba:d_state=3,mamba2", "d_state", None),
        ("mamba", "norm_eps", None),
    ],
)
def test_an_option_that_no_layer_has_is_without_effect(layers, name, message):
    c = config(layers)
    if message is None:
        c.check_effect([name])
    else:
        with pytest.raises(ConfigError, match=message):
            c.check_effect(["d_model", name])
    assert MambaConfig.from_json(c.to_json()) == c  # which holds such fields, and loads


def test_the_number_of_layers_must_fit_the_schedule():
    with pytest.raises(ConfigError, match="n_layer is 3; allowed: multiples of 2"):
        config("mamba,mamba:d_conv=2", n_layer=3)
    with pytest.raises(ConfigError, match="needs n_layer, or layers"):
        MambaConfig(**SIZES)


@pytest.mark.parametrize("name", LAYER_TYPES)
def test_every_layer_type_has_its_module_and_its_options(name):
    module = language_model.layer_type(name)
    assert all(hasattr(module, f) for f in ("layer_parameters", "block", "layer_state"))
    assert set(LAYER_TYPES[name]) <= {f.name for f in fields(MambaConfig)}
    c = config(f"mamba,{name}")
    for spec in module.layer_parameters(c.schedule[1].config, 1):
        assert spec.name.startswith("backbone.layers.1.")


def test_presets():
    jamba = MambaConfig.preset("jamba", vocab_size=256, d_model=64, n_layer=16)
    attends = [i for i, layer in enumerate(jamba.schedule) if layer.type == "attention"]
    assert attends == [4, 12]
    assert {layer.config.mlp for layer in jamba.schedule} == {"swiglu"}
    zamba = MambaConfig.preset("zamba", vocab_size=256, d_model=64)
    attends = [(i, s.owner) for i, s in enumerate(zamba.schedule) if s.type == "attention"]
    assert attends == [(6, 6), (13, 6)]
    assert {s.config.mlp for s in zamba.schedule if s.type == "mamba"} == {"none"}
    with pytest.raises(ConfigError, match="preset is 'samba'; allowed: memory_engine, jamba"):
        MambaConfig.preset("samba")
    with pytest.raises(ConfigError, match="n_layer is 4; allowed: multiples of 8"):
        MambaConfig.preset("jamba", vocab_size=256, d_model=64, n_layer=4)


def test_presets_and_schedules_in_toml(tmp_path):
    path = tmp_path / "run.toml"
    path.write_text('[model]\nvocab_size = 9\nd_model = 8\npreset = "jamba"\nd_ff = 3\n')
    made = MambaConfig.from_dict(expand_preset(load_toml(path)["model"]))
    assert made == MambaConfig.preset("jamba", vocab_size=9, d_model=8, d_ff=3)
    path.write_text('[model]\nvocab_size = 9\nd_model = 8\nlayers = ["mamba*2", "attention"]\n')
    made = MambaConfig.from_dict(expand_preset(load_toml(path)["model"]))
    assert made.layers == ("mamba", "mamba", "attention")
    path.write_text('[model]\npreset = "jumbo"\n')
    with pytest.raises(
        ConfigError, match="preset is 'jumbo'; allowed: memory_engine, jamba, zamba"
    ):
        expand_preset(load_toml(path)["model"])


# On disk


@pytest.mark.parametrize("name", STACKS)
def test_the_schedule_comes_back_equal(name):
    c = config(STACKS[name], bos_token_id=1)
    theirs = json.loads(json.dumps(c.to_hugging_face(), allow_nan=False))
    assert theirs["model_type"] == "wgsl_train_hybrid"
    assert theirs["hidden_act"] == "silu in wgsl_train_hybrid"  # stops MambaForCausalLM
    assert theirs["layers"] == list(c.layers)
    assert MambaConfig.from_hugging_face(theirs) == c
    assert MambaConfig.from_json(c.to_json()) == c
    with pytest.raises(ConfigError, match="did you mean 'layers'"):
        MambaConfig.from_hugging_face(theirs | {"layer": ["mamba"]})


def test_an_mlp_makes_a_model_another_one():
    c = MambaConfig(**SIZES, n_layer=2, mlp="swiglu")
    theirs = c.to_hugging_face()
    assert theirs["model_type"] == "wgsl_train_hybrid"
    assert MambaConfig.from_hugging_face(theirs) == c
    assert c.schedule[1].config.d_ff == c.d_ff == 64
    assert MambaConfig(256, 768, 1).d_ff == 2048
    off = config("mamba,mamba:mlp=none", mlp="swiglu")
    assert [layer.config.mlp for layer in off.schedule] == ["swiglu", "none"]


def test_a_schedule_of_plain_mamba_is_what_transformers_reads():
    plain = MambaConfig(**SIZES, n_layer=2)
    assert config("mamba*2") == plain
    assert config("mamba*2").to_hugging_face()["model_type"] == "mamba"


@pytest.mark.gpu
def test_save_and_load_keep_every_bit(device, tmp_path):
    for name, layers in STACKS.items():
        model = wt.Model(config(layers), device)
        model.save_pretrained(tmp_path / name)
        again = wt.Model.from_pretrained(tmp_path / name, device)
        assert again.config == model.config
        for key, array in model.state_dict().items():
            np.testing.assert_array_equal(again.state_dict()[key], array, key)


def test_first_weights_of_an_mlp():
    """As mamba_ssm: what adds to the residual is divided by the root of the number of additions."""
    c = MambaConfig(vocab_size=37, d_model=48, layers="mamba:mlp=swiglu*2")
    state = dict(initialize(c, 0))
    layer = "backbone.layers.1."
    for name, bound in (
        ("mlp.fc1", 48**-0.5),
        ("mlp.fc2", (128 * 4) ** -0.5),
        ("mixer.out_proj", (96 * 4) ** -0.5),
    ):
        largest = np.abs(state[f"{layer}{name}.weight"]).max()
        assert 0.95 * bound < largest <= bound, name
    assert (state[layer + "norm2.weight"] == 1).all()
    assert not wt.TrainConfig().decays(layer + "norm2.weight")
    assert wt.TrainConfig().decays(layer + "mlp.fc2.weight")


@pytest.mark.parametrize(
    "theirs, message",
    [
        (dict(layers="mamba,attention:d_ff=9"), "check d_ff"),
        (
            dict(layers="mamba,attention:attn_heads=2"),
            "check attn_heads, attn_kv_heads, attn_head_dim",
        ),
        (dict(layers="mamba*2"), "layers.1.mixer.A_log"),
        (dict(layers="mamba*2"), "check layers"),
        (dict(layers="mamba,attention", mlp="none"), "check mlp"),
        (dict(layers="mamba,attention", attn_bias=True), "check attn_bias"),
    ],
    ids=str,
)
def test_tensors_that_do_not_fit_say_which_option_decides(theirs, message):
    ours = config("mamba,attention", mlp="swiglu")
    shapes = [
        {spec.name: spec.shape for spec in language_model.parameters(c)}
        for c in (ours, config(**{"mlp": "swiglu", **theirs}))
    ]
    with pytest.raises(CheckpointError) as caught:
        check_names(*shapes)
    assert message in str(caught.value)


# Whole models


@pytest.mark.gpu
@pytest.mark.parametrize("shape", [(2, 33), (1, 1)], ids=str)
@pytest.mark.parametrize("name", STACKS)
def test_loss_logits_and_every_gradient_match_the_oracle(device, name, shape):
    c = config(STACKS[name])
    assert_matches_oracle(wt.Model(c, device), lively(c), *batch(c, shape))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["portable", "discrete"])
def test_the_gradient_of_shared_parameters_is_the_sum_over_their_layers(device, kind):
    """Against the same weights, not shared."""
    shared, apart = config("mamba:share=a*2,mamba"), config("mamba*3")
    weights, data = lively(shared), batch(shared, (2, 20))
    copies = {k: weights[k.replace(".layers.1.", ".layers.0.")] for k in lively(apart)}
    grads = []
    for c, state in ((shared, weights), (apart, copies)):
        model = wt.Model(c, wt.device.with_target(device, kind=kind))
        model.load_state_dict(state)
        grads.append(model.loss_and_grads(*data)[1])
    for name, grad in grads[0].items():
        want = grads[1][name]
        if ".layers.0." in name:
            want = want + grads[1][name.replace(".layers.0.", ".layers.1.")]
        assert relative(grad, want) <= 1e-5, name


def test_no_dispatch_adds_twice_to_a_shared_gradient():
    """Its workgroups would race for it."""
    c = config("mamba:share=a*4")
    for target in (PORTABLE, replace(PORTABLE, kind="cpu"), replace(PORTABLE, kind="discrete")):
        plan = plan_step(c, Layout(language_model.parameters(c), target), target, 2, 70).plan
        sums = [d.values["segments"] for d in plan.dispatches if d.kernel.name == "sum_partials"]
        assert sum(len(segments) for segments in sums) > 12
        for segments in sums:
            ends = sorted((first, first + size) for _, _, size, first in segments)
            assert all(a[1] <= b[0] for a, b in itertools.pairwise(ends))


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["jamba", "zamba", "shared_mlp"])
def test_activation_checkpointing_gives_the_same_bits(device, name):
    c = config(STACKS[name])
    model = wt.Model(c, device)
    model.load_state_dict(lively(c))
    data = batch(c, (2, 40))
    loss, grads = model.loss_and_grads(*data)
    again = model.loss_and_grads(*data, activation_checkpointing=True)
    assert again[0] == loss
    for key in grads:
        np.testing.assert_array_equal(again[1][key], grads[key], key)


@pytest.mark.gpu
def test_repeated_backward_gives_the_same_bits_whatever_lay_in_memory(device):
    c = config(STACKS["jamba"])
    model = wt.Model(c, device)
    model.load_state_dict(lively(c))
    data = batch(c, (2, 33))
    loss, grads = model.loss_and_grads(*data)
    for _ in range(3):
        model.step_encoder(2, 33).encoder.poison()
        again = model.loss_and_grads(*data)
        assert again[0] == loss
        for key in grads:
            np.testing.assert_array_equal(again[1][key], grads[key], key)


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["jamba", "zamba", "three_types"])
def test_generation_carries_the_state(device, name):
    """Past a prompt longer than the prefill's step, and past the room that the cache first has."""
    c = config(STACKS[name])
    model = wt.Model(c, device)
    model.load_state_dict(lively(c))
    rng = np.random.default_rng(3)
    for length in (9, 253, 9):  # each forgets what the one before carried
        prompt = rng.integers(0, c.vocab_size, length)
        tokens = model.generate(prompt, 5, temperature=0)
        logits = model.logits(np.concatenate([prompt, tokens[:-1]])[None])[0, length - 1 :]
        for token, row in zip(tokens, logits, strict=True):
            assert row[token] >= row.max() - 1e-4 * np.abs(row).max()


@pytest.mark.gpu
def test_state_space_layers_need_no_more_room(device):
    model = wt.Model(config("mamba*2"), device)
    model.generate([1], 1)
    nbytes, encoder = model.buffers.nbytes, model._decoder(1, 1)[0]
    model.generate(np.arange(300) % 37, 1)
    assert model._decoder(1, 1)[0] is encoder
    attends = wt.Model(config("mamba,attention"), device)
    for length, capacity in ((1, 256), (300, 512), (2, 512)):
        attends.generate(np.arange(length) % 37, 1)
        plan = attends._decoder(1, 1)[0].plan
        assert plan["state.1.1.kv"].shape == (1, capacity, 40)
    assert nbytes < attends.buffers.nbytes
    attends.use_tuning({"none": {}})  # begins anew, with what has room for as much as is planned
    assert len(attends.generate(np.arange(300) % 37, 300)) == 300


# Training


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["jamba", "zamba", "three_types"])
def test_one_batch_is_learnt(device, name):
    c = config(STACKS[name])
    trainer = wt.Trainer(wt.Model(c, device), wt.TrainConfig(steps=60, lr=1e-2))
    data = batch(c, (2, 16))
    losses = [trainer.step(*data).loss for _ in range(60)]
    assert losses[0] == pytest.approx(np.log(37), rel=0.1)
    assert losses[-1] < 0.2


@pytest.mark.gpu
def test_a_run_goes_on_to_the_bit(device, tmp_path):
    c = config(STACKS["zamba"])
    dataset = wt.Dataset(np.random.default_rng(0).integers(0, 37, 401))
    options = dict(lr=1e-2, steps=6, batch_size=2, seq_len=20, gradient_accumulation=2)

    def run(stop_at=None):
        trainer = wt.Trainer(wt.Model(c, device), wt.TrainConfig(**options))
        trainer.fit(dataset, should_stop=lambda: trainer.progress.step == stop_at)
        return trainer

    whole, half = run(), run(stop_at=3)
    path = half.save(tmp_path)
    resumed = wt.Trainer(wt.Model.from_pretrained(path, device), wt.TrainConfig(**options))
    resumed.load(path)
    resumed.fit(dataset)
    for key, array in whole.model.state_dict().items():
        np.testing.assert_array_equal(resumed.model.state_dict()[key], array, key)
    for key in whole._moment_shapes():
        np.testing.assert_array_equal(
            resumed.model.read_moment(key), whole.model.read_moment(key), key
        )


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["jamba", "zamba"])
def test_adapters_of_every_layer_type(device, name):
    """Gradients of A and B follow from those of the merged weight: dB = s G Aᵀ, dA = s Bᵀ G."""
    c, rng = config(STACKS[name]), np.random.default_rng(0)
    model, weights, data = wt.Model(c, device), lively(c), batch(c, (2, 9))
    model.load_state_dict(weights)
    model.add_adapter(wt.TrainConfig(lora_rank=2, lora_alpha=3.0))
    assert {m.rpartition(".")[2] for m in model.adapter.ranks} == set(LORA_TARGETS)
    adapter = {k: rng.uniform(-0.3, 0.3, v.shape) for k, v in model.adapter_state().items()}
    model.update(adapter)
    merged = dict(weights)
    for module in model.adapter.ranks:
        a, b = (adapter[f"{module}.lora_{x}.weight"] for x in "AB")
        merged[f"{module}.weight"] = weights[f"{module}.weight"] + 1.5 * b @ a
    want_loss, want, _ = loss_and_grads(c, merged, *data)
    loss, grads = model.loss_and_grads(*data)
    assert loss == pytest.approx(want_loss, rel=1e-5)
    assert grads.keys() == adapter.keys()
    for module in model.adapter.ranks:
        a, b = (adapter[f"{module}.lora_{x}.weight"] for x in "AB")
        G = want[f"{module}.weight"]
        assert relative(grads[f"{module}.lora_A.weight"], 1.5 * b.T @ G) <= 1e-4, module
        assert relative(grads[f"{module}.lora_B.weight"], 1.5 * G @ a.T) <= 1e-4, module


@pytest.mark.gpu
def test_only_what_matches_trains(device):
    c = config(STACKS["zamba"])
    model = wt.Model(c, device)
    before = model.state_dict()
    options = wt.TrainConfig(steps=2, lr=1e-2, train=("*.mlp.*", "*.1.mixer.in_proj.*"))
    trainer = wt.Trainer(model, options)
    for _ in range(2):
        trainer.step(*batch(c, (2, 9)))
    changed = {k for k, v in model.state_dict().items() if not np.array_equal(v, before[k])}
    names = ("mlp.fc1.weight", "mlp.fc2.weight", "mixer.in_proj.weight")
    assert changed == {f"backbone.layers.1.{name}" for name in names}


@pytest.mark.gpu
def test_the_union_of_shards_is_the_whole_step(device):
    c = config(STACKS["zamba"])

    def step(**options):
        model = wt.Model(c, device)
        trainer = wt.Trainer(model, wt.TrainConfig(steps=1, lr=1e-2, **options))
        trainer.step(*batch(c, (2, 9)))
        return trainer

    whole = step().model.state_dict()
    parts = [step(shard=(i, 2)).owned_state() for i in range(2)]
    assert parts[0].keys() | parts[1].keys() == whole.keys()
    for part in parts:
        for key, array in part.items():
            np.testing.assert_array_equal(array, whole[key], key)
