from . import case, oracle


@oracle(
    case(n=4),
    case(n=4 * 4096 * 256 + 20),
    case(n=1000, half=("x",)),
    case(n=1000, half=("out",)),
)
def probe_copy(x):
    return {"out": x}


@oracle(case(n=20, rounds=3), case(n=4096, rounds=1))
def probe_fma(x, rounds):
    out = 0.0
    for chain in range(8):
        s = chain + 0 * x
        for _ in range(16 * rounds):
            s = s / 2 + x
        out = out + s
    return {"out": out}
