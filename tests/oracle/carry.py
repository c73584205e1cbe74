from . import case, oracle


@oracle(case(n=1001), case(n=1))
def carry_begin(state):
    return {"initial": state}
