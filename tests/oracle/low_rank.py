from . import case, oracle


@oracle(
    case(rows=37, columns=5, rank=3, scale=2.5),
    case(rows=300, columns=16, rank=8),
    case(rows=1, columns=1, rank=1),
)
def low_rank_forward(weight, A, B, scale):
    return {"out": weight + scale * B @ A}


@oracle(
    case(rows=37, columns=5, rank=3, scale=2.5),
    case(rows=300, columns=16, rank=8),
    case(rows=1, columns=1, rank=1),
)
def low_rank_backward(dout, A, B, scale):
    return {"dA": scale * B.T @ dout, "dB": scale * dout @ A.T}
