import numpy as np
import pytest

from tests import finite_differences
from tests.oracle import ssd as oracle

EPS = 0.1


class Dual:
    """The op, composed of its kernels' oracles, over several chunks."""

    def __init__(self, documents, limit, **sizes):
        self.v = oracle.dims(**sizes)
        self.documents, self.limit = documents, limit
        v = self.v
        self.score_shape = tuple(v[k] for k in ("batch", "chunks", "n_groups", "chunk", "chunk"))
        self.states = np.zeros(
            [v[k] for k in ("batch", "chunks", "n_heads", "d_state", "head_dim")]
        )
        planes = 2 if documents is None else 3
        self.dt_cum = np.zeros((*self.states.shape[:3], planes, v["chunk"]))
        self.sizes = {"d_state": v["d_state"], "head_dim": v["head_dim"]}
        self.norm = {"eps": EPS, "norm_groups": v["n_groups"]}

    def forward(self, zxbcdt, xBC, dt_bias, A_log, D, weight, state):
        """All tensors that the forward pass makes, from a state on."""
        v, sizes = self.v, self.sizes
        given = {"xBC": xBC}
        prepared = oracle.ssd_prepare(
            zxbcdt,
            dt_bias,
            A_log,
            self.documents,
            xBC,
            self.dt_cum,
            np.zeros(self.score_shape),
            self.limit,
            v["d_state"],
        )
        given["dt_cum"], scores = prepared["dt_cum"], prepared["scores"]
        own = oracle.ssd_states(
            **given, dy=None, states=self.states, n_groups=v["n_groups"], skip=""
        )
        combined = oracle.ssd_combine(
            given["dt_cum"], None, None, state, own["states"], state, None, False
        )
        given["states"] = combined["states"]
        y = np.zeros((v["batch"], v["seqlen"], v["d_inner"]))
        sums = np.zeros([v[k] for k in ("batch", "chunks", "n_heads", "of_step", "chunk")])
        made = oracle.ssd_output(
            **given,
            scores=scores,
            D=D,
            dy=None,
            y=None,
            out=y,
            sums=sums,
            reverse=False,
            begins_zero=False,
            **sizes,
        )
        gated = {"y": made["out"], "xBC": xBC, "zxbcdt": zxbcdt, "sums": made["sums"]}
        out = oracle.ssd_norm_forward(**gated, weight=weight, **self.norm)
        return {**given, "state": combined["state"], "scores": scores, "gated": gated, **out}

    def backward(self, dout, dfinal, zxbcdt, xBC, dt_bias, A_log, D, weight, state):
        v, sizes = self.v, self.sizes
        saved = self.forward(zxbcdt, xBC, dt_bias, A_log, D, weight, state)
        dt_cum, rows = saved["dt_cum"], v["batch"] * v["seqlen"]
        norm = oracle.ssd_norm_backward(
            **saved["gated"],
            weight=weight,
            dout=dout,
            dzxbcdt=zxbcdt,
            weight_partials=np.zeros((1, v["d_inner"])),
            rows_per_group=rows,
            **self.norm,
        )
        given = {"xBC": xBC, "dt_cum": dt_cum, "dy": norm["dout"]}
        own = oracle.ssd_states(**given, states=self.states, n_groups=v["n_groups"], skip="")
        dots = np.zeros((*self.states.shape[:3], v["blocks"]))
        back = oracle.ssd_combine(
            dt_cum, saved["states"], saved["state"], dfinal, own["states"], state, dots, True
        )
        made = oracle.ssd_output(
            **given,
            scores=saved["scores"],
            states=back["states"],
            D=None,
            y=saved["gated"]["y"],
            out=xBC,
            sums=np.nan_to_num(saved["gated"]["sums"]),
            reverse=True,
            begins_zero=False,
            **sizes,
        )
        dscores = oracle.ssd_backward_scores(
            **given, dscores=np.zeros((1, *self.score_shape)), **sizes
        )
        columns = 2 * v["n_groups"] * v["d_state"]
        shares = oracle.ssd_backward_bc(
            **given,
            **dscores,
            states=saved["states"],
            dstates=back["states"],
            out=np.zeros((2, v["batch"], v["seqlen"], columns)),
            out_start=0,
            begins_zero=False,
            ends_zero=False,
            **sizes,
        )["out"]
        trained = ("A_log", "D", "dt_bias")
        last = oracle.ssd_backward_sums(
            sums=made["sums"],
            dt_cum=dt_cum,
            A_log=A_log,
            dots=back["dots"],
            dBC=shares,
            dzxbcdt=zxbcdt,
            partials=np.zeros((len(trained), v["batch"] * v["chunks"], v["n_heads"])),
            dxBC=xBC,
            limit=self.limit,
            trained=trained,
        )
        return {
            # the columns between are the convolution's
            "zxbcdt": np.nan_to_num(norm["dzxbcdt"]) + np.nan_to_num(last["dzxbcdt"]),
            "xBC": np.nan_to_num(made["out"]) + np.nan_to_num(last["dxBC"]),
            "weight": norm["weight_partials"][0],
            "state": back["state"],
            **dict(zip(trained, last["partials"].sum(1), strict=True)),
        }


@pytest.mark.parametrize("limit", [(0.0, np.inf), (0.4, 1.1)], ids=["free", "clamped"])
@pytest.mark.parametrize("packed", [False, True], ids=["one document", "documents"])
def test_ssd(rng, limit, packed):
    batch, seqlen = 2, 6
    documents = np.array([[0, 0, 1, 1, 2, 2], [1, 1, 1, 1, 1, 2]]) if packed else None
    dual = Dual(
        documents, limit, batch=batch, seqlen=seqlen, n_heads=4, head_dim=2, d_state=3, n_groups=2
    )
    v = dual.v
    arrays = {
        "zxbcdt": rng.uniform(-1, 1, (batch, seqlen, v["d_proj"])),
        "xBC": rng.uniform(-1, 1, (batch, seqlen, v["d_xBC"])),
        "dt_bias": rng.uniform(-1, 1, v["n_heads"]),
        "A_log": rng.uniform(-1, 1, v["n_heads"]),
        "D": rng.uniform(-1, 1, v["n_heads"]),
        "weight": rng.uniform(0.5, 1.5, v["d_inner"]),
        "state": rng.uniform(-1, 1, dual.states[:, 0].shape),
    }
    dout = rng.uniform(-1, 1, (batch, seqlen, v["d_inner"]))
    dfinal = rng.uniform(-1, 1, arrays["state"].shape)
    grads = dual.backward(dout, dfinal, **arrays)

    def loss(**arrays):
        made = dual.forward(**arrays)
        return (dout * made["out"]).sum() + (dfinal * made["state"]).sum()

    finite_differences.check(loss, arrays, grads)
    if np.isfinite(limit[1]):
        dt = arrays["zxbcdt"][..., -v["n_heads"] :] + arrays["dt_bias"]
        delta = oracle.softplus(dt)
        outside = (delta <= limit[0]) | (delta >= limit[1])
        assert outside.any()
        assert not grads["zxbcdt"][..., -v["n_heads"] :][outside].any()


def test_the_dual_is_the_recurrence(rng):
    """Its forward pass, step by step, with documents."""
    batch, seqlen = 2, 10
    documents = np.cumsum(rng.random((batch, seqlen)) < 0.3, 1)
    dual = Dual(
        documents,
        (0.0, np.inf),
        batch=batch,
        seqlen=seqlen,
        n_heads=4,
        head_dim=3,
        d_state=5,
        n_groups=2,
    )
    v = dual.v
    zxbcdt = rng.uniform(-1, 1, (batch, seqlen, v["d_proj"]))
    xBC = rng.uniform(-1, 1, (batch, seqlen, v["d_xBC"]))
    dt_bias, A_log, D = rng.uniform(-1, 1, (3, v["n_heads"]))
    state = rng.uniform(-1, 1, (batch, 4, 5, 3))
    saved = dual.forward(zxbcdt, xBC, dt_bias, A_log, D, np.ones(v["d_inner"]), state)
    y, _, _, _ = oracle.gated(**saved["gated"], **dual.norm)
    x, B, C = np.split(xBC, [v["d_inner"], v["d_inner"] + 10], -1)
    x = x.reshape(batch, seqlen, 4, 3)
    B, C = (np.repeat(m.reshape(batch, seqlen, 2, 5), 2, 2) for m in (B, C))
    delta = oracle.softplus(zxbcdt[..., -4:] + dt_bias)
    h, before = state, np.zeros(batch)
    for t in range(seqlen):
        h = h * np.exp(-np.exp(A_log) * delta[:, t])[..., None, None]
        h *= (documents[:, t] == before)[:, None, None, None]
        before = documents[:, t]
        h += (delta[:, t, :, None] * B[:, t])[..., None] * x[:, t, :, None, :]
        want = np.einsum("bhn,bhnp->bhp", C[:, t], h) + D[:, None] * x[:, t]
        np.testing.assert_allclose(y[:, t], want.reshape(batch, -1), rtol=1e-10, atol=1e-12)
    np.testing.assert_allclose(saved["state"], h, rtol=1e-10, atol=1e-12)
