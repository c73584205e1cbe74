// `pack`: what one lane moves at a time, 4 neighbouring elements ({{ packed }} is true) or 1.
$$ if packed
alias pack = vec4f;
fn fold(a: pack) -> f32 {
    return (a.x + a.y) + (a.z + a.w);
}
$$ else
alias pack = f32;
fn fold(a: pack) -> f32 {
    return a;
}
$$ endif
