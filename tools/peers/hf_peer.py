"""Hugging Face's MambaForCausalLM, on whatever path it takes on this machine."""

from __future__ import annotations

from measure import Case, Work
from torch_training import DEVICE, TorchPeer, to_tensor, training_step
from transformers import MambaConfig, MambaForCausalLM


class HuggingFace(TorchPeer):
    """transformers, on PyTorch."""

    packages = ("transformers",)

    def step(self, case: Case) -> dict[str, Work]:
        config = MambaConfig(
            vocab_size=case.vocab_size,
            hidden_size=case.d_model,
            num_hidden_layers=case.n_layer,
            state_size=case.d_state,
            time_step_rank=case.dt_rank,
            layer_norm_epsilon=case.norm_eps,
        )
        model = MambaForCausalLM(config)
        weights = {name: to_tensor(array) for name, array in case.weights.items()}
        missing, unexpected = model.load_state_dict(weights, strict=False)
        assert set(missing) <= {"lm_head.weight"}, missing
        assert not unexpected, unexpected
        model.tie_weights()
        model.to(DEVICE).train()
        tokens = to_tensor(case.tokens)
        return training_step(
            case, model.parameters(), lambda: model(input_ids=tokens, labels=tokens).loss
        )


if __name__ == "__main__":
    HuggingFace().main()
