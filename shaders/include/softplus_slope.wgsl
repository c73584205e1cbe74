// 1 - exp(-delta), the derivative of the softplus that gave delta; by its series where it cancels.
fn softplus_slope(delta: f32) -> f32 {
    let series = delta * (1.0 - delta / 2.0 * (1.0 - delta / 3.0 * (1.0 - delta / 4.0 * (1.0 - delta / 5.0 * (1.0 - delta / 6.0 * (1.0 - delta / 7.0))))));
    return select(1.0 - exp(-delta), series, delta < 0.5);
}
