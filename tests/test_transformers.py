"""The real transformers package reads what is saved here, and the other way round.

Needs the "transformers" extra: with torch it is too large for every run of the tests.
"""

import numpy as np
import pytest

import wgsl_train as wt
from wgsl_train.config import MambaConfig

torch = pytest.importorskip("torch", reason="needs pip install wgsl-train[transformers]")
transformers = pytest.importorskip("transformers")

SIZES = dict(vocab_size=61, d_model=24, n_layer=2, d_state=5, dt_rank=3)


@pytest.mark.gpu
@pytest.mark.parametrize("options", [{}, {"tie_embeddings": False, "use_bias": True}], ids=str)
def test_round_trip(device, tmp_path, options):
    model = wt.Model(MambaConfig(**SIZES, **options), device, seed=3)
    tokens = np.random.default_rng(0).integers(0, 61, (2, 17))
    model.save_pretrained(tmp_path / "ours")
    theirs = transformers.MambaForCausalLM.from_pretrained(tmp_path / "ours").float().eval()
    with torch.no_grad():
        logits = theirs(torch.tensor(tokens)).logits.numpy()
    np.testing.assert_allclose(logits, model.logits(tokens), rtol=1e-4, atol=1e-5)
    theirs.save_pretrained(tmp_path / "theirs")
    again = wt.Model.from_pretrained(tmp_path / "theirs", device)
    for name, array in model.state_dict().items():
        np.testing.assert_array_equal(again.state_dict()[name], array, name)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "options, name",
    [
        ({"discretization": "zoh"}, "wgsl_train_mamba"),
        ({"layers": "mamba,attention"}, "wgsl_train_hybrid"),
        ({"mlp": "swiglu"}, "wgsl_train_hybrid"),
    ],
    ids=str,
)
def test_a_model_that_it_cannot_compute_is_refused(device, tmp_path, options, name):
    wt.Model(MambaConfig(**SIZES, **options), device).save_pretrained(tmp_path)
    with pytest.raises(KeyError, match=name):
        transformers.MambaForCausalLM.from_pretrained(tmp_path)
    with pytest.raises(ValueError, match=name):
        transformers.AutoModelForCausalLM.from_pretrained(tmp_path)
