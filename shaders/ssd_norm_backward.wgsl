// a = (y + skip x) silu(z), inv = 1 / sqrt(mean a^2 + eps): da = inv (weight dout - a inv^2 mean(weight dout a)); dout = dy = da silu(z);
// dzxbcdt's first columns = dz = da (y + skip x) silu'(z); weight_partials[p] = sum over the rows of part p of dout a inv
$$ set packed = "y" in vec4
$$ set width = 4 if packed else 1
$$ set columns = d_inner // norm_groups // width
{$ include "include/ssd_norm.wgsl" $}
$$ set pairs = rows_per_group * norm_groups
$$ set lanes = [workgroup // pairs, 1] | max

var<workgroup> dots: array<vec2f, {{ workgroup }}>; // sums of a^2 and of weight dout a
var<workgroup> pair_inv: array<f32, {{ pairs }}>;
var<workgroup> pair_mean: array<f32, {{ pairs }}>;

@compute @workgroup_size({{ workgroup }})
fn main(@builtin(workgroup_id) wid: vec3u, @builtin(num_workgroups) groups: vec3u, @builtin(local_invocation_index) lane: u32) {
    let part = group_index(wid, groups);
    let first_row = part * {{ rows_per_group }}u;
    let n_rows = min({{ rows_per_group }}u, {{ batch * seqlen }}u - min(first_row, {{ batch * seqlen }}u));
    // First, {{ lanes }} lanes a pair of row and group of columns: its means.
$$ for turn in range(ceil_div(pairs * lanes, workgroup))
    {
        let pair = {{ turn * (workgroup // lanes) }}u + lane / {{ lanes }}u;
        let row = first_row + pair / {{ norm_groups }}u;
        let first = pair % {{ norm_groups }}u * {{ columns }}u;
        var squares = pack(0.0);
        var products = pack(0.0);
        if (pair / {{ norm_groups }}u < n_rows) {
            for (var c = first + lane % {{ lanes }}u; c < first + {{ columns }}u; c += {{ lanes }}u) {
                let a = whole_y(row, c) * silu(z_at(row, c));
                squares += a * a;
                products += weight[c] * dout[row * {{ d_inner // width }}u + c] * a;
            }
        }
        dots[lane] = vec2f(fold(squares), fold(products));
        workgroupBarrier();
        let summed = {{ turn * (workgroup // lanes) }}u + lane;
        if (lane < {{ workgroup // lanes }}u && summed < {{ pairs }}u) {
            var sum = vec2f();
            for (var i = 0u; i < {{ lanes }}u; i++) { sum += dots[lane * {{ lanes }}u + i]; }
            let inv = inverseSqrt(sum.x / {{ d_inner // norm_groups }}.0 + {{ eps | f32 }});
            pair_inv[summed] = inv;
            pair_mean[summed] = inv * inv * sum.y / {{ d_inner // norm_groups }}.0;
        }
        workgroupBarrier();
    }
$$ endfor
    // Then a lane a column, all rows of the part: they are still in cache.
    for (var c = lane; c < {{ d_inner // width }}u; c += {{ workgroup }}u) {
        let w = weight[c];
        var dw = pack(0.0);
        for (var r = 0u; r < n_rows; r++) {
            let row = first_row + r;
            let i = row * {{ d_inner // width }}u + c;
            let pair = r * {{ norm_groups }}u + c / {{ columns }}u;
            let d = dout[i];
            let value = whole_y(row, c);
            let z = z_at(row, c);
            let s = sigmoid(z);
            let normed = value * z * s * pair_inv[pair];
            let da = pair_inv[pair] * w * d - normed * pair_mean[pair];
            dout[i] = da * z * s;
            dzxbcdt[row * {{ d_proj // width }}u + c] = da * value * s * (1.0 + z * (1.0 - s));
            dw += d * normed;
        }
$$ if "weight_partials" in bound
        if (part < parts) { weight_partials[part * {{ "stride / 4u" if packed else "stride" }} + c] = dw; }
$$ endif
    }
}
