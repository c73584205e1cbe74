"""The real PEFT reads adapters that are saved here, and the other way round.

Needs the "transformers" extra: with torch it is too large for every run of the tests.
"""

import numpy as np
import pytest

import wgsl_train as wt
from tests.test_lora import CONFIG, UNTIED, base, trainer_of
from tests.test_model import relative
from tests.test_train import pair

torch = pytest.importorskip("torch", reason="needs pip install wgsl-train[transformers]")
transformers = pytest.importorskip("transformers")
peft = pytest.importorskip("peft")
pytestmark = pytest.mark.filterwarnings(
    "ignore"
)  # of what PEFT and transformers think of each other


def logits(theirs, tokens):
    with torch.no_grad():
        return theirs(torch.tensor(tokens)).logits.numpy()


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config, targets",
    [
        (CONFIG, ("in_proj",)),
        (CONFIG, ("x_proj",)),
        (CONFIG, ("in_proj", "x_proj", "dt_proj")),
        (CONFIG, ("A_log",)),
        (UNTIED, ("in_proj", "A_log", "embeddings", "lm_head")),
    ],
)
def test_peft_reads_ours(device, tmp_path, config, targets):
    """Merged, since transformers takes the raw weight of dt_proj past an adapter."""
    model, (tokens, _) = trainer_of(device, config=config, lora_targets=targets).model, pair()
    model.save_adapter(tmp_path / "adapter")
    base(device, config).save_pretrained(tmp_path / "base")
    theirs = transformers.MambaForCausalLM.from_pretrained(tmp_path / "base").float()
    adapted = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").merge_and_unload().eval()
    assert relative(logits(adapted, tokens), model.logits(tokens)) <= 1e-5


@pytest.mark.gpu
def test_peft_ties_an_adapter_of_tied_embeddings(device, tmp_path):
    """Not merged: PEFT would add the adapter to the one table twice."""
    model, (tokens, _) = trainer_of(device, lora_targets=("embeddings",)).model, pair()
    model.save_adapter(tmp_path / "adapter")
    base(device).save_pretrained(tmp_path / "base")
    theirs = transformers.MambaForCausalLM.from_pretrained(tmp_path / "base").float()
    adapted = peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter").eval()
    assert relative(logits(adapted, tokens), model.logits(tokens)) <= 1e-5


@pytest.mark.gpu
def test_transformers_reads_what_is_merged_where_peft_refuses(device, tmp_path):
    """PEFT takes no adapter of Mamba's out_proj, which is among our targets."""
    model, (tokens, _) = trainer_of(device).model, pair()
    model.save_adapter(tmp_path / "adapter")
    base(device).save_pretrained(tmp_path / "base")
    theirs = transformers.MambaForCausalLM.from_pretrained(tmp_path / "base").float()
    with pytest.raises(ValueError, match="out_proj"):
        peft.PeftModel.from_pretrained(theirs, tmp_path / "adapter")
    want = model.logits(tokens)
    model.merge_adapter()
    model.save_pretrained(tmp_path / "merged")
    theirs = transformers.MambaForCausalLM.from_pretrained(tmp_path / "merged").float().eval()
    assert relative(logits(theirs, tokens), want) <= 1e-5


@pytest.mark.gpu
@pytest.mark.parametrize(
    "config, targets",
    [
        (CONFIG, {"target_modules": ["in_proj", "x_proj"]}),
        (CONFIG, {"target_modules": ["in_proj"], "target_parameters": ["mixer.A_log"]}),
        (UNTIED, {"target_modules": ["lm_head", "embeddings"]}),
    ],
    ids=["projections", "A_log", "tables"],
)
def test_we_read_peft_s(device, tmp_path, config, targets):
    base(device, config).save_pretrained(tmp_path / "base")
    theirs = transformers.MambaForCausalLM.from_pretrained(tmp_path / "base").float()
    given = peft.LoraConfig(r=8, lora_alpha=4, init_lora_weights=False, **targets)
    adapted = peft.get_peft_model(theirs, given)
    adapted.save_pretrained(tmp_path / "adapter")
    model, (tokens, _) = wt.Model.from_pretrained(tmp_path / "base", device), pair()
    model.load_adapter(tmp_path / "adapter")
    assert {low.scale for low in model.adapter.low_rank().values()} == {0.5}
    want = logits(adapted.merge_and_unload().eval(), tokens)
    assert relative(model.logits(tokens), want) <= 1e-5
    assert np.abs(want - base(device, config).logits(tokens)).max() > 1e-2
