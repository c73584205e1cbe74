import numpy as np
import pytest

from tests import finite_differences
from tests.oracle import selective_scan as oracle


def softplus(x):
    return np.maximum(x, 0) + np.log1p(np.exp(-np.abs(x)))


class Scan:
    """The op, composed of its kernels' oracles, over several segments."""

    def __init__(self, clamp, documents=None, **sizes):
        self.clamp, self.documents = clamp, documents
        self.values = oracle.dims(**sizes)
        self.values.setdefault("discretization", "euler")
        self.values["resets"] = documents is not None

    def pick(self, *names):
        return {k: self.values[k] for k in names}

    def forward(self, u, dt, x_dbl, xz, A_log, D, state):
        """All tensors that the forward pass makes."""
        v = self.values
        AD = oracle.scan_prepare(A_log, D, self.clamp)["AD"]
        delta = softplus(dt)
        if self.documents is not None:
            delta = oracle.scan_reset(self.documents, delta)["delta"]
        common = {"u": u, "delta": delta, "x_dbl": x_dbl, "AD": AD}
        cut = self.pick("dt_rank", "d_state", "chunk", "per_segment", "segments", "resets")
        zoh = self.pick("discretization")
        local = oracle.scan_local(**common, **cut, **zoh, chunks=v["chunks"])
        states, sums = local["chunk_states"], local["delta_sums"]
        several = self.pick("segments", "per_segment")
        starts = oracle.scan_combine(AD, sums, state, states, **several, reverse=False, resets=True)
        out = oracle.scan_forward(
            **common,
            xz=xz,
            chunk_states=starts["states"],
            state=state,
            started=True,
            gy=np.empty((2, u.size)),
            **cut,
            **zoh,
        )
        out["g"], out["y"] = (plane.reshape(u.shape) for plane in out.pop("gy"))
        return {**common, **out}

    def backward(self, dg, dfinal, u, dt, x_dbl, xz, A_log, D, state):
        saved = self.forward(u, dt, x_dbl, xz, A_log, D, state)
        cut = self.pick("dt_rank", "d_state", "chunk", "per_segment", "segments", "resets")
        common = {k: saved[k] for k in ("u", "delta", "x_dbl", "AD")}
        gate = oracle.scan_backward_gate(xz, saved["y"], dg)
        common["dy"] = gate["dg"]
        local = oracle.scan_backward_local(**{k: common[k] for k in common if k != "u"}, **cut)
        carry = oracle.scan_combine(
            saved["AD"],
            local["delta_sums"],
            dfinal,
            local["carry"],
            self.values["segments"],
            per_segment=1,
            reverse=True,
            resets=True,
        )
        main = oracle.scan_backward(
            **common,
            chunk_states=saved["chunk_states"],
            du_ddt=np.empty((2, u.size)),
            partials=carry["states"].ravel(),
            carried=carry["states"].size,
            leaves=True,
            **cut,
            **self.pick("channels", "discretization"),
        )
        shape = self.pick("batch", "seqlen", "dt_rank", "d_state", "d_inner", "blocks", "segments")
        shape["carried"] = carry["states"].size
        sums = oracle.scan_backward_sums(main["partials"], A_log, D, state, **shape)
        du, ddt = (plane.reshape(u.shape) for plane in main["du_ddt"])
        return {
            "u": du,
            "dt": ddt,
            "x_dbl": sums["dx_dbl"],
            "xz": np.nan_to_num(gate["dxz"]),  # the x half is the convolution's
            "A_log": sums["dA_log"],
            "D": sums["dD"],
            "state": sums["dstate"],
        }


@pytest.mark.parametrize("discretization", ["euler", "zoh"])
@pytest.mark.parametrize("clamp", [None, (-0.4, 0.5)], ids=["free", "clamped"])
@pytest.mark.parametrize("packed", [False, True], ids=["one document", "packed"])
def test_selective_scan(rng, discretization, clamp, packed):
    batch, seqlen, d_inner, d_state, dt_rank = 2, 7, 3, 5, 1
    documents = np.array([[0, 0, 0, 1, 1, 2, 2], [1, 2, 2, 2, 3, 3, 3]])
    scan = Scan(
        clamp,
        documents if packed else None,
        batch=batch,
        seqlen=seqlen,
        d_inner=d_inner,
        d_state=d_state,
        dt_rank=dt_rank,
        chunk=2,
        per_segment=2,
        channels=2,
        discretization=discretization,
    )
    arrays = {
        "u": rng.uniform(-1, 1, (batch, seqlen, d_inner)),
        "dt": rng.uniform(-2, 2, (batch, seqlen, d_inner)),
        "x_dbl": rng.uniform(-1, 1, (batch, seqlen, dt_rank + 2 * d_state)),
        "xz": rng.uniform(-1, 1, (batch, seqlen, 2 * d_inner)),
        "A_log": rng.uniform(-1, 1, (d_inner, d_state)),
        "D": rng.uniform(-1, 1, d_inner),
        "state": rng.uniform(-1, 1, (batch, 2, d_inner, 4)),
    }
    dg = rng.uniform(-1, 1, (batch, seqlen, d_inner))
    dfinal = rng.uniform(-1, 1, (batch, 2, d_inner, 4))
    dfinal[:, 1, :, 1:] = 0  # there are five states: the rest is padding
    grads = scan.backward(dg, dfinal, **arrays)

    def loss(**arrays):
        out = scan.forward(**arrays)
        return (dg * out["g"]).sum() + (dfinal * out["state"]).sum()

    finite_differences.check(loss, arrays, grads)
    if clamp:
        outside = (arrays["A_log"] <= clamp[0]) | (arrays["A_log"] >= clamp[1])
        assert outside.any()
        assert not grads["A_log"][outside].any()


def test_the_series_of_phi1_meet_their_quotients():
    X = np.array([-1.0001, -0.9999, 0.9999, 1.0001]) * oracle.SMALL
    for f in (oracle.phi1, oracle.dphi1):
        below, inside_below, inside_above, above = f(X)
        assert inside_below == pytest.approx(below, rel=1e-5)
        assert inside_above == pytest.approx(above, rel=1e-5)
