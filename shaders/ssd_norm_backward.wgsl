// skip the first plane of sums, a = (y + skip x) silu(z), inv = 1 / sqrt(mean a^2 + eps): da = inv (weight dout - a inv^2 mean(weight
// dout a)); dout = dy = da silu(z); dzxbcdt's first columns = dz = da (y + skip x) silu'(z); weight_partials[p] = sum over the rows of
// part p of dout a inv
$$ set packed = "y" in vec4
$$ set width = 4 if packed else 1
$$ set columns = d_inner // norm_groups // width
$$ set all_columns = d_inner // width
{$ include "include/ssd_norm.wgsl" $}

// dy and dz of a column, and what it adds to the gradient of its weight.
fn finish(row: u32, c: u32, value: pack, z: pack, d: pack, w: pack, inv: f32, mean: f32) -> pack {
    let s = sigmoid(z);
    let normed = value * z * s * inv;
    let da = inv * w * d - normed * mean;
    dout[row * {{ all_columns }}u + c] = da * z * s;
    dzxbcdt[row * {{ d_proj // width }}u + c] = da * value * s * (1.0 + z * (1.0 - s));
    return d * normed;
}

// Of the sums of a^2 and of weight dout a over a group of columns: inv, and inv^2 times the mean of the second.
fn means(sums: vec2f) -> vec2f {
    let inv = inverseSqrt(sums.x / {{ d_inner // norm_groups }}.0 + {{ eps | f32 }});
    return vec2f(inv, inv * inv * sums.y / {{ d_inner // norm_groups }}.0);
}

$$ if held
{$ include "include/ssd_norm_backward_held.wgsl" $}
$$ else
{$ include "include/ssd_norm_backward_twice.wgsl" $}
$$ endif
