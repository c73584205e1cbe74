// inv[r] = 1 / sqrt(mean_i x[r,i]^2 + eps);  out[r,i] = weight[i] * x[r,i] * inv[r]
$$ set packed = "x" in vec4
$$ set columns = d_model // 4 if packed else d_model
$$ set value_type = "f32"
{$ include "include/group_index.wgsl" $}
{$ include "include/pack.wgsl" $}
fn combine(a: f32, b: f32) -> f32 {
    return a + b;
}
{$ include "include/lane_reduce.wgsl" $}

@compute @workgroup_size({{ workgroup }})
fn main(@builtin(workgroup_id) wid: vec3u, @builtin(num_workgroups) groups: vec3u, @builtin(local_invocation_index) lane: u32) {
    let own_row = group_index(wid, groups) * {{ workgroup // lanes }}u + lane / {{ lanes }}u;
    let row = min(own_row, rows - 1u);  // lanes past the end repeat the last row, and store nothing
    let first = row * {{ columns }}u;
    let own = lane % {{ lanes }}u;
    var squares = pack(0.0);
$$ if held
$$ for j in range(held)
    let x{{ j }} = x[first + min(own + {{ j * lanes }}u, {{ columns - 1 }}u)];
$$ endfor
$$ for j in range(held)
    squares += {{ "select(pack(0.0), x%d * x%d, own < %du)" % (j, j, columns - j * lanes) if columns < (j + 1) * lanes else "x%d * x%d" % (j, j) }};
$$ endfor
$$ else
    for (var c = own; c < {{ columns }}u; c += {{ lanes }}u) {
        let a = x[first + c];
        squares += a * a;
    }
$$ endif
    let scale = inverseSqrt(lane_reduce(fold(squares), lane) / f32(d_model) + {{ eps | f32 }});
    if (own_row < rows) {
        if (own == 0u) { inv[row] = scale; }
$$ if held
$$ for j in range(held)
        {{ "if (own < %du) " % (columns - j * lanes) if columns < (j + 1) * lanes }}{ {{ store("out", "first + own + %du" % (j * lanes), "weight[own + %du] * x%d * scale" % (j * lanes, j)) }} }
$$ endfor
$$ else
        for (var c = own; c < {{ columns }}u; c += {{ lanes }}u) {
            {{ store("out", "first + c", "weight[c] * x[first + c] * scale") }}
        }
$$ endif
    }
}
