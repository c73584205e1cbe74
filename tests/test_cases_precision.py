"""Known faults of half precision elsewhere, each with the right value."""

import json
import warnings
from dataclasses import replace

import numpy as np
import pytest

import wgsl_train as wt
from tests.oracle_model import loss_and_grads
from tests.test_cases_optimizer import PLAIN, Stepper
from tests.test_model import batch, lively, relative
from wgsl_train.config import LAYER_TYPES, MambaConfig, TrainConfig
from wgsl_train.encoder import Buffers, Encoder
from wgsl_train.errors import DeviceError
from wgsl_train.kernel import PORTABLE
from wgsl_train.model import plan_step
from wgsl_train.models.language_model import parameters
from wgsl_train.ops import linear, optimizer
from wgsl_train.ops.selective_scan import selective_scan
from wgsl_train.plan import Layout, ParamSpec, Plan
from wgsl_train.precision import check_f16

HALF = replace(PORTABLE, features=frozenset({"shader-f16"}))
CONFIG = MambaConfig(vocab_size=23, d_model=8, n_layer=1, d_state=4, d_conv=3, dt_rank=2)
SHAPE = (2, 9)
MIXER = "backbone.layers.0.mixer."


def planned(config, precision, shape=SHAPE, target=HALF, **options):
    layout = Layout(parameters(config), target)
    return plan_step(
        config, layout, target, *shape, update=True, precision=precision, **options
    ).plan


def make(device, config=CONFIG, **train):
    model = wt.Model(config, device)
    model.load_state_dict(lively(config))
    return wt.Trainer(model, TrainConfig(**{"steps": 50, "lr": 1e-2, "precision": "f16", **train}))


def scale_of(trainer):
    values = trainer.model.buffers.read(trainer._optimizer.loss_scale)
    return dict(zip(optimizer.LOSS_SCALE, values, strict=True))


def set_scale(trainer, scale, clean=0):
    trainer.model.buffers.write(trainer._optimizer.loss_scale, np.array([scale, clean, 0]))


def everything(trainer):
    """Weights and moments, bit by bit."""
    arrays = trainer.model.state_dict()
    arrays |= {n: trainer.model.read_moment(n) for n in trainer._moment_shapes()}
    return {name: array.tobytes() for name, array in arrays.items()}


# What is planned


def test_f32_enables_nothing_and_evaluation_is_f32():  # D09
    layout = Layout(parameters(CONFIG), HALF)
    evaluation = plan_step(CONFIG, layout, HALF, *SHAPE, training=False, precision="f16").plan
    for plan in (planned(CONFIG, "f32"), evaluation):
        assert not any("f16" in d.render().source for d in plan.dispatches)


def test_f16_is_enabled_where_it_is_bound_alone():
    enabled = set()
    for d in planned(CONFIG, "f16").dispatches:
        source = d.render().source
        bound = any(t.dtype == "f16" for t in d.tensors.values())
        assert ("enable f16;" in source.split("\n")[1]) == bound == ("f16" in source)
        enabled |= {d.kernel.name} if bound else set()
    assert {"rms_norm_forward", "linear_backward_x", "scan_backward", "scan_forward"} <= enabled


def test_what_must_be_exact_stays_f32():
    """Residual stream, delta, states, statistics, logits, and everything of the optimizer."""
    for d in planned(CONFIG, "f16").dispatches:
        for t in d.tensors.values():
            if t.dtype == "f16":
                name = t.root.name.rpartition(".")[2].removeprefix("d")
                assert name in {"norm", "xz", "u", "gy"} or "scan.gy" in t.root.name, t.name
                assert t.root.kind == "activation"


@pytest.mark.parametrize("layers", [*LAYER_TYPES, "mamba:mlp=swiglu"])
def test_every_type_of_layer_stores_something_as_f16(layers):
    config = MambaConfig(vocab_size=23, d_model=16, head_dim=8, layers=(layers,))
    kept = {
        t.root for d in planned(config, "f16").sections["backward"] for _, t in d.bound("reads")
    }
    assert any(t.dtype == "f16" and ".norm" in t.name for t in kept)
    if layers.split(":")[0] == "mamba":
        assert sum(t.dtype == "f16" for t in kept) >= 4


# What is computed


@pytest.mark.gpu
def test_the_self_test_sees_what_it_should(device, monkeypatch):  # D09
    check_f16(device)
    read = Encoder.read
    monkeypatch.setattr(Encoder, "read", lambda self, t: np.zeros_like(read(self, t)))
    with pytest.raises(DeviceError, match="stores 1 as f16 and reads 0, not 1: update"):
        check_f16(device)


CONFIGS = {
    "default": MambaConfig(vocab_size=64, d_model=32, n_layer=2),
    "odd": MambaConfig(vocab_size=37, d_model=21, n_layer=2, d_state=5, dt_rank=3, expand=1),
    "mlp": MambaConfig(vocab_size=37, d_model=20, n_layer=1, d_state=5, mlp="swiglu"),
    "zoh": MambaConfig.memory_engine(vocab_size=37, d_model=24, n_layer=1),
    "hybrid": MambaConfig(vocab_size=37, d_model=16, layers=("mamba", "attention:mlp=swiglu")),
}


@pytest.mark.gpu
@pytest.mark.parametrize("name", CONFIGS)
def test_every_gradient_is_the_oracle_s(device, name):
    config = CONFIGS[name]
    trainer = make(device, config, activation_checkpointing=name == "mlp")
    trainer._encoder((2, 21)).encoder.poison()
    tokens, targets = batch(config, (2, 21), ignored=3)
    want_loss, want, _ = loss_and_grads(config, lively(config), tokens, targets)
    result = trainer.step(tokens, targets)
    assert not result.skipped
    grads = {n: g / result.loss_scale for n, g in trainer.model.read_grads().items()}
    worst = {n: relative(grads[n], want[n]) for n in want}
    assert max(worst.values()) <= 1e-2, worst
    assert max(worst.values()) > 1e-5  # or nothing was f16
    norm = np.sqrt(sum(np.square(g).sum() for g in want.values()))
    assert result.grad_norm == pytest.approx(norm, rel=1e-3)
    assert result.loss == pytest.approx(want_loss, rel=1e-3)


@pytest.mark.gpu
def test_an_adapter_trains(device):
    losses = {}
    for precision in ("f32", "f16"):
        trainer = make(device, precision=precision, lora_rank=2, max_grad_norm=0.0)
        results = [trainer.step(*batch(CONFIG, SHAPE)) for _ in range(12)]
        losses[precision] = [r.loss for r in results]
    assert losses["f16"][-1] < losses["f16"][0] - 0.05
    np.testing.assert_allclose(losses["f16"], losses["f32"], rtol=2e-3)


@pytest.mark.gpu
def test_softplus_of_an_f16_operand(kernel_buffers):  # N07
    raw = np.array([5, 10, 11, 12, 15, 30.0])
    target = kernel_buffers.device.target
    plan = Plan(Layout([], target), target)
    x = plan.persistent("x", (6, 1), "f16")
    weight, out = plan.persistent("weight", (1, 1)), plan.persistent("out", (6, 1))
    plan.dispatch(linear.FORWARD, x=x, weight=weight, out=out, activation="softplus")
    encoder = Encoder(kernel_buffers, plan)
    encoder.write(x, raw[:, None])
    encoder.write(weight, np.ones((1, 1)))
    encoder.run("forward")
    got = encoder.read(out)[:, 0]
    np.testing.assert_allclose(got, np.log1p(np.exp(raw)), rtol=2e-3)
    for tensor in (x, weight, out):
        kernel_buffers.drop(tensor)


@pytest.mark.gpu
def test_a_state_that_only_accumulates(device):  # N14
    """delta u B, 0.1, added up 4,096 times: a state that is f16 would stall at 256."""
    target, seqlen = device.target, 4096
    layout = Layout([ParamSpec("A_log", (1, 1)), ParamSpec("D", (1,))], target)
    plan = Plan(layout, target, training=False)
    given = {
        "u": plan.persistent("u", (1, seqlen, 1), "f16"),
        "delta": plan.persistent("delta", (1, seqlen, 1)),
        "x_dbl": plan.persistent("x_dbl", (1, seqlen, 3)),
        "xz": plan.persistent("xz", (1, seqlen, 2), "f16"),
    }
    g = selective_scan(
        plan, **given, A_log=layout.param("A_log"), D=layout.param("D"), dt_rank=1, d_state=1
    )
    assert g.dtype == "f16"
    encoder = Encoder(Buffers(device), plan, share_memory=False)
    values = {"u": 1.0, "delta": 0.1, "x_dbl": 1.0, "xz": 1.2784645427610738}  # silu(z) = 1
    for name, tensor in given.items():
        encoder.write(tensor, np.full(tensor.shape, values[name]))
    encoder.write(layout.param("A_log"), np.full((1, 1), -20.0))
    encoder.write(layout.param("D"), np.zeros(1))
    encoder.run("forward")
    assert float(encoder.read(g)[0, -1, 0]) == pytest.approx(409.6, rel=1e-3)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype, wanted", [("f32", 2.0**20), ("f16", np.inf)])
def test_products_are_summed_in_f32(kernel_buffers, dtype, wanted):  # N17
    target = kernel_buffers.device.target
    plan = Plan(Layout([], target), target)
    x = plan.persistent("x", (1, 4096), "f16")
    weight, out = plan.persistent("weight", (1, 4096)), plan.persistent("out", (1, 1), dtype)
    plan.dispatch(linear.FORWARD, x=x, weight=weight, out=out)
    encoder = Encoder(kernel_buffers, plan)
    for tensor in (x, weight):
        encoder.write(tensor, np.full(tensor.shape, 16.0))
    encoder.run("forward")
    assert encoder.read(out)[0, 0] == wanted
    for tensor in (x, weight, out):
        kernel_buffers.drop(tensor)


# The loss scale


class Scaled(Stepper):
    """An optimizer whose gradients, as the test writes them, are scaled."""

    def __init__(self, device, specs, scale=65536.0, clean=0, **of):
        super().__init__(device, specs, **of)
        self.plan = Plan(self.layout, device.target)
        self.loss = self.plan.persistent("loss", (1,))
        self.scale = self.plan.persistent("loss_scale", (3,))
        self.optimizer = optimizer.optimizer(self.plan, 64, self.scale)
        self.encoder = Encoder(self.encoder.buffers, self.plan)
        self.encoder.write(self.scale, np.array([scale, clean, 0]))


@pytest.mark.gpu
@pytest.mark.parametrize("scale", [1.0, 1024.0, 2.0**24])
def test_clipping_comes_after_unscaling(device, scale):  # T04
    s = Scaled(device, [("w", (2,))], scale, **{**PLAIN, "max_norm": 1.0})
    s.grad("w", np.array([3, 4]) * scale)
    row = s.step()
    assert row["grad_norm"] == 5.0
    assert row["loss_scale"] == scale
    m, v = s.moments("w")
    np.testing.assert_allclose(m / 0.1, [0.6, 0.8], rtol=1e-5)
    np.testing.assert_allclose(v / 0.001, [0.36, 0.64], rtol=1e-5)


@pytest.mark.gpu
@pytest.mark.parametrize("bits", [0x7F800000, 0xFF800000, 0x7FC00000])
def test_an_overflow_moves_nothing_but_the_scale(device, bits):  # T06, N10
    s = Scaled(device, [("w", (1_000_003,))], lr=0.1, **PLAIN)
    s.write("w", 1.0)
    s.grad("w", 0.5 * 65536)
    grad = s.layout.grad(s.layout.param("w"))
    planted = s.encoder.read(grad)
    planted.view(np.uint32)[777_777] = bits
    s.encoder.write(grad, planted)
    before = s.everything()
    row = s.step()
    assert (row["skipped"], row["loss_scale"]) == (1, 65536)
    assert s.everything() == before
    assert s.state == {"steps": 0, "calls": 1, "skipped_in_a_row": 1, "skipped": 1}
    assert list(s.encoder.read(s.scale)) == [32768, 0, 1]
    s.grad("w", 0.5 * 32768)
    row = s.step()
    assert (row["skipped"], row["loss_scale"]) == (0, 32768)
    assert row["lr"] == np.float32(0.1)
    np.testing.assert_allclose(s.read("w"), 0.9, rtol=1e-6)  # 0.9256 if the overflow had counted


@pytest.mark.gpu
def test_the_scale_grows_after_200_clean_steps_in_a_row(device):
    s = Scaled(device, [("w", (3,))], 1024.0, **PLAIN)
    s.grad("w", 1.0)
    scales = [s.step()["loss_scale"] for _ in range(100)]
    s.grad("w", np.inf)
    s.step()
    s.grad("w", 1.0)
    scales += [s.step()["loss_scale"] for _ in range(202)]
    assert scales == [1024] * 100 + [512] * 200 + [1024] * 2
    assert list(s.encoder.read(s.scale)) == [1024, 2, 1]


@pytest.mark.gpu
def test_it_stays_between_1_and_2_to_the_24(device):
    s = Scaled(device, [("w", (3,))], 2.0, **PLAIN)
    s.grad("w", np.nan)
    assert [s.step()["loss_scale"] for _ in range(3)] == [2, 1, 1]
    s = Scaled(device, [("w", (3,))], 2.0**24, clean=199, **PLAIN)
    s.grad("w", 1.0)
    assert [s.step()["loss_scale"] for _ in range(2)] == [2**24] * 2


@pytest.mark.gpu
def test_f16_gradients_that_overflow_are_seen(device):
    """At 2^24 some gradient of an activation is beyond f16, though none is beyond f32."""
    trainer = make(device)
    set_scale(trainer, 2.0**24)
    before = everything(trainer)
    results = [trainer.step(*batch(CONFIG, SHAPE))]
    with pytest.warns(UserWarning, match="step 1 was skipped: non-finite at gradient of"):
        assert results[0].skipped
    assert np.isfinite(results[0].loss)
    assert everything(trainer) == before
    while results[-1].skipped:
        results.append(trainer.step(*batch(CONFIG, SHAPE)))
    halvings = len(results) - 1
    assert 1 <= halvings < 12
    assert scale_of(trainer) == {
        "scale": 2.0 ** (24 - halvings),
        "clean_steps": 1,
        "overflows": halvings,
    }
    assert [r.loss_scale for r in results] == [2.0 ** (24 - i) for i in range(halvings + 1)]
    fresh = make(device)
    set_scale(fresh, 2.0 ** (24 - halvings))
    fresh.step(*batch(CONFIG, SHAPE))
    assert everything(fresh) == everything(trainer)  # as if nothing had been before


@pytest.mark.gpu
def test_activations_beyond_f16_are_seen(device):  # N17
    """in_proj makes 1e5 and more: the f16 run must not go on as if nothing were."""
    for precision, skips in (("f32", False), ("f16", True)):
        trainer = make(device, precision=precision)
        weights = lively(CONFIG)
        weights[MIXER + "in_proj.weight"] *= 1e6
        trainer.model.load_state_dict(weights)
        before = everything(trainer)
        result = trainer.step(*batch(CONFIG, SHAPE))
        if skips:
            with pytest.warns(UserWarning, match="step 1 was skipped"):
                assert result.skipped
        assert result.skipped == skips
        assert (everything(trainer) == before) == skips


@pytest.mark.gpu
def test_one_scale_for_all_micro_batches(device):
    whole, parts = make(device), make(device)
    tokens, targets = batch(CONFIG, (4, 9))
    result = whole.step(tokens, targets)
    halves = [
        wt.data.Batch(t.astype(np.uint32), w.astype(np.uint32), w.size)
        for t, w in zip(np.split(tokens, 2), np.split(targets, 2), strict=True)
    ]
    of_parts = parts.step_batches(halves)
    assert of_parts.grad_norm == pytest.approx(result.grad_norm, rel=1e-3)
    want = whole.model.read_grads()
    for name, grad in parts.model.read_grads().items():
        assert relative(grad, want[name]) <= 5e-3, name


@pytest.mark.gpu
def test_a_resumed_run_goes_on_to_the_bit(device, tmp_path):  # C09
    options = dict(batch_size=2, seq_len=9, gradient_accumulation=2, save_every=3, steps=7)
    data = wt.Dataset(np.random.default_rng(2).integers(0, 23, 200))
    straight = make(device, **options)
    set_scale(straight, 2.0**22, clean=5)
    losses = []
    with pytest.warns(UserWarning, match="skipped"):
        straight.fit(data, out=tmp_path, on_step=losses.append)
    state = json.loads((tmp_path / "checkpoint-3/trainer_state.json").read_text())
    assert 1 < state["loss_scale"]["scale"] < 2**22
    resumed, again = make(device, **options), []
    resumed.load(tmp_path / "checkpoint-3")
    assert scale_of(resumed) == state["loss_scale"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it may overflow still
        resumed.fit(data, on_step=again.append)
    assert [r.record() for r in again] == [r.record() for r in losses[3:]]
    assert everything(resumed) == everything(straight)
    assert scale_of(resumed) == scale_of(straight)


@pytest.mark.gpu
def test_evaluation_is_that_of_f32(device):
    f32, f16 = make(device, precision="f32"), make(device)
    pair = batch(CONFIG, SHAPE)
    f16.step(*pair)
    f16.model.load_state_dict(f32.model.state_dict())
    assert f16.model.loss(*pair) == f32.model.loss(*pair)
