import numpy as np

from . import case, oracle, uniform


def some_ignored(rng, shape, values):
    targets = rng.integers(0, values["vocab_size"], shape)
    targets[::5] = 2**32 - 100
    return targets


@oracle(
    case(("loss_scale",), rows=37, vocab_size=23, one=1),
    case(("loss_scale",), rows=5, vocab_size=5000, one=1),
    case(("loss_scale",), rows=11, vocab_size=260, one=1, gradient=False),
    case(("loss_scale",), rows=1, vocab_size=1, one=1),
    case(rows=7, vocab_size=24, one=1, n_scale=3),
    case(rows=7, vocab_size=25, one=1, n_scale=3),
    draw={"targets": some_ignored, "logits": uniform(-20, 20), "loss_scale": uniform(2, 9)},
)
def cross_entropy(targets, batch_scale, logits, gradient, loss_scale=None):
    rows = np.arange(len(targets))
    counted = targets < logits.shape[1]
    at = np.where(counted, targets, 0)
    highest = logits.max(-1, keepdims=True)
    exps = np.exp(logits - highest)
    log_sum = np.log(exps.sum(-1)) + highest[:, 0]
    row_loss = np.where(counted, log_sum - logits[rows, at], 0) * batch_scale
    if not gradient:
        return {"logits": np.full(logits.shape, np.nan), "row_loss": row_loss}
    dlogits = exps / exps.sum(-1, keepdims=True)
    dlogits[rows, at] -= 1
    scale = batch_scale * (1 if loss_scale is None else loss_scale[0])
    return {"logits": dlogits * counted[:, None] * scale, "row_loss": row_loss}


def whole(rng, shape, values):
    return rng.integers(-9, 9, shape)  # so that some are equal


@oracle(
    case(rows=37, vocab_size=23),
    case(rows=5, vocab_size=5000),
    case(rows=11, vocab_size=260),
    case(rows=1, vocab_size=1),
    draw={"targets": some_ignored, "logits": whole},
)
def row_rank(targets, logits):
    counted = targets < logits.shape[1]
    own = logits[np.arange(len(targets)), np.where(counted, targets, 0)]
    return {"row_rank": np.where(counted, (logits > own[:, None]).sum(-1), -1)}


@oracle(case(rows=1, one=1), case(rows=1000, one=1))
def loss_sum(row_loss):
    return {"loss": row_loss.sum(keepdims=True)}
