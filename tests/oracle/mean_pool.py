import numpy as np

from . import case, oracle


@oracle(
    case(batch=3, seqlen=7, d_model=37),
    case(batch=2, seqlen=5, d_model=72),
    case(batch=1, seqlen=1, d_model=1),
)
def mean_pool(x):
    mean = x.mean(1)
    return {"out": mean / np.linalg.norm(mean, axis=-1, keepdims=True)}
