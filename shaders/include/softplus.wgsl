// softplus(x) = max(x, 0) + log1p(exp(-|x|)), exact to float32 for large |x| too.
fn softplus(x: f32) -> f32 {
    let e = exp(-abs(x));
    // log(1 + e) loses e below 1e-7; the series is exact to float32 below 2^-6
    let series = e * (1.0 - e * (0.5 - e * (0.33333334 - e * 0.25)));
    return max(x, 0.0) + select(log(1.0 + e), series, e < 0.015625);
}
