// Logistic function; exp's argument is capped so that it never overflows.
fn sigmoid(a: pack) -> pack {
    return 1.0 / (1.0 + exp(min(-a, pack(80.0))));
}
