// a = (y + skip x) silu(z), skip the first plane of sums;  out[i] = weight[i] a[i] / sqrt(mean of a^2 over i's group of columns + eps)
$$ set packed = "y" in vec4
$$ set width = 4 if packed else 1
$$ set columns = d_inner // norm_groups // width
{$ include "include/ssd_norm.wgsl" $}
$$ set value_type = "f32"
fn combine(a: f32, b: f32) -> f32 {
    return a + b;
}
{$ include "include/lane_reduce.wgsl" $}

@compute @workgroup_size({{ workgroup }})
fn main(@builtin(workgroup_id) wid: vec3u, @builtin(num_workgroups) groups: vec3u, @builtin(local_invocation_index) lane: u32) {
    let own = group_index(wid, groups) * {{ workgroup // lanes }}u + lane / {{ lanes }}u;
    let at = min(own, {{ batch * seqlen * norm_groups - 1 }}u);  // lanes past the end repeat the last, and store nothing
    let row = at / {{ norm_groups }}u;
    let first = at % {{ norm_groups }}u * {{ columns }}u;
    let c0 = lane % {{ lanes }}u;
    var squares = pack(0.0);
$$ if lanes > 1
    // A lane's columns stay in registers.
$$ for j in range(ceil_div(columns, lanes))
    let c{{ j + 1 }} = first + min(c0 + {{ j * lanes }}u, {{ columns - 1 }}u);
    let a{{ j }} = whole_y(row, c{{ j + 1 }}) * silu(z_at(row, c{{ j + 1 }}));
    squares += {{ "select(pack(0.0), a" ~ j ~ " * a" ~ j ~ ", c0 < " ~ (columns - j * lanes) ~ "u)" if columns < (j + 1) * lanes else "a" ~ j ~ " * a" ~ j }};
$$ endfor
$$ else
    for (var c = first; c < first + {{ columns }}u; c++) {
        let a = whole_y(row, c) * silu(z_at(row, c));
        squares += a * a;
    }
$$ endif
    let scale = inverseSqrt(lane_reduce(fold(squares), lane) / {{ d_inner // norm_groups }}.0 + {{ eps | f32 }});
    if (own == at) {
$$ if lanes > 1
$$ for j in range(ceil_div(columns, lanes))
        {{ "if (c0 < " ~ (columns - j * lanes) ~ "u) " if columns < (j + 1) * lanes }}{ out[row * {{ norm_groups * columns }}u + c{{ j + 1 }}] = weight[c{{ j + 1 }}] * scale * a{{ j }}; }
$$ endfor
$$ else
        for (var c = first; c < first + {{ columns }}u; c++) {
            out[row * {{ norm_groups * columns }}u + c] = weight[c] * scale * whole_y(row, c) * silu(z_at(row, c));
        }
$$ endif
    }
}
