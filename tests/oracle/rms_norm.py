import numpy as np

from . import case, oracle, uniform


@oracle(
    case(rows=37, d_model=23, eps=1e-6),
    case(rows=5, d_model=260, eps=1e-5),
    case(rows=1, d_model=1, eps=1e-2),
    case(rows=5, d_model=9, eps=1e-5, half=("out",)),
    case(rows=7, d_model=132, eps=1e-5, half=("out",)),
    case(rows=9, d_model=1030, eps=1e-5, choices={"workgroup": 256, "lanes": 128, "held": 0}),
)
def rms_norm_forward(x, weight, eps):
    inv = 1 / np.sqrt(np.mean(x * x, -1) + eps)
    return {"out": weight * x * inv[:, None], "inv": inv}


@oracle(
    case(rows=37, d_model=23, parts=3, stride=64, rows_per_group=16),
    case(rows=130, d_model=260, parts=3, stride=320, rows_per_group=64),
    case(rows=3, d_model=1030, parts=1, stride=1088, rows_per_group=32),
    case(rows=18, d_model=9, parts=2, stride=64, rows_per_group=16, half=("dout",)),
    case(rows=18, d_model=12, parts=2, stride=64, rows_per_group=16, half=("dout",)),
    case(rows=37, d_model=24, rows_per_group=16, leave_out=("weight_partials",)),
    draw={"inv": uniform(0.5, 2)},
)
def rms_norm_backward(dout, x, weight, inv, weight_partials, rows_per_group):
    inv = inv[:, None]
    wd = weight * dout
    dx = inv * (wd - x * inv**2 * np.mean(wd * x, -1, keepdims=True))
    result = {"dx": dx}
    if weight_partials is not None:
        partials = np.full(weight_partials.shape, np.nan)
        for p in range(len(partials)):
            group = slice(p * rows_per_group, (p + 1) * rows_per_group)
            partials[p, : x.shape[1]] = (dout * x * inv)[group].sum(0)
        result["weight_partials"] = partials
    return result
