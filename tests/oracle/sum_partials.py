import numpy as np

from . import case, oracle


@oracle(
    case(n_partials=64 * 3 + 64 * 5 * 5, n=300, segments=((0, 3, 5, 0), (192, 5, 280, 20))),
    case(
        n_partials=64 * 3 + 64 * 5 * 5,
        n=300,
        segments=((0, 3, 5, 0), (192, 5, 280, 20)),
        half=("grads",),
    ),
    case(n_partials=320 * 40, n=300, segments=((0, 40, 300, 0),)),
    case(n_partials=70016 * 5 + 64, n=70100, segments=((0, 5, 70001, 8), (350080, 1, 60, 70020))),
    rtol=1e-6,
)
def sum_partials(partials, n, segments):
    grads = np.full(n, np.nan)
    for start, parts, size, first in segments:
        stride = -(-size // 64) * 64
        block = partials[start : start + parts * stride].reshape(parts, stride)
        grads[first : first + size] = block.sum(0)[:size]
    return {"grads": grads}
