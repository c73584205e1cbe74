"""The real transformers package reads what is saved here, and the other way round.

Needs the "transformers" extra: with torch it is too large for every run of the tests.
"""

import json

import numpy as np
import pytest

import wgsl_train as wt
from wgsl_train.config import MambaConfig

torch = pytest.importorskip("torch", reason="needs pip install wgsl-train[transformers]")
transformers = pytest.importorskip("transformers")

SIZES = dict(vocab_size=61, d_model=24, n_layer=2, d_state=5, dt_rank=3)


MAMBA2 = {"layers": "mamba2", "head_dim": 12}


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"tie_embeddings": False, "use_bias": True},
        MAMBA2,
        {**MAMBA2, "n_groups": 2, "tie_embeddings": False, "time_step_limit": (0.01, 0.02)},
        {**MAMBA2, "time_step_limit": (0.05, float("inf")), "pad_vocab_size_multiple": 8},
    ],
    ids=str,
)
def test_round_trip(device, tmp_path, options):
    model = wt.Model(MambaConfig(**SIZES, **options), device, seed=3)
    tokens = np.random.default_rng(0).integers(0, 61, (2, 17))
    model.save_pretrained(tmp_path / "ours")
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours").float().eval()
    assert type(theirs).__name__ == model.config.to_hugging_face()["architectures"][0]
    with torch.no_grad():
        logits = theirs(torch.tensor(tokens)).logits.numpy()[..., :61]
    np.testing.assert_allclose(logits, model.logits(tokens), rtol=1e-4, atol=1e-5)
    theirs.save_pretrained(tmp_path / "theirs")
    again = wt.Model.from_pretrained(tmp_path / "theirs", device)
    for name, array in model.state_dict().items():
        np.testing.assert_array_equal(again.state_dict()[name], array, name)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {**MAMBA2, "n_groups": 2}], ids=["mamba", "mamba2"])
def test_loss_and_every_gradient_agree(device, tmp_path, options):
    model = wt.Model(MambaConfig(**SIZES, **options), device, seed=3)
    tokens = np.random.default_rng(0).integers(0, 61, (2, 17))
    targets = np.full(tokens.shape, -100)
    targets[:, :-1] = tokens[:, 1:]
    model.save_pretrained(tmp_path)
    theirs = transformers.AutoModelForCausalLM.from_pretrained(tmp_path).float()
    out = theirs(torch.tensor(tokens), labels=torch.tensor(tokens))
    out.loss.backward()
    loss, grads = model.loss_and_grads(tokens, targets)
    assert loss == pytest.approx(out.loss.item(), rel=1e-5)
    wanted = {name: p.grad.numpy() for name, p in theirs.named_parameters()}
    assert grads.keys() == wanted.keys()
    for name, want in wanted.items():
        assert np.linalg.norm(grads[name] - want) <= 1e-4 * np.linalg.norm(want), name


# The type is not known, or is taken for another one whose sizes make no sense
StrictDataclassError = pytest.importorskip("huggingface_hub.errors").StrictDataclassError
REFUSALS = (KeyError, ValueError, StrictDataclassError)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options, name",
    [
        ({"discretization": "zoh"}, "wgsl_train_mamba"),
        ({"layers": "mamba,attention"}, "wgsl_train_hybrid"),
        ({"mlp": "swiglu"}, "wgsl_train_hybrid"),
        ({**MAMBA2, "lm_head_bias": True}, "wgsl_train_mamba2"),
    ],
    ids=str,
)
def test_a_model_that_it_cannot_compute_is_refused(device, tmp_path, options, name):
    wt.Model(MambaConfig(**SIZES, **options), device).save_pretrained(tmp_path)
    assert json.loads((tmp_path / "config.json").read_text())["model_type"] == name
    for model in (
        transformers.MambaForCausalLM,
        transformers.Mamba2ForCausalLM,
        transformers.AutoModelForCausalLM,
    ):
        with pytest.raises(REFUSALS):
            model.from_pretrained(tmp_path)
