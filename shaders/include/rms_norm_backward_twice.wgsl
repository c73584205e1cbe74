// rms_norm_backward.wgsl in two readings of a group's rows: first their means, then a lane a column.
$$ set lanes = workgroup // rows_per_group
var<workgroup> dots: array<f32, {{ workgroup }}>;
var<workgroup> row_inv: array<f32, {{ rows_per_group }}>;
var<workgroup> row_mean: array<f32, {{ rows_per_group }}>;

@compute @workgroup_size({{ workgroup }})
fn main(@builtin(workgroup_id) wid: vec3u, @builtin(num_workgroups) groups: vec3u, @builtin(local_invocation_index) lane: u32) {
    let group = group_index(wid, groups);
    let first_row = group * {{ rows_per_group }}u;
    // First, {{ lanes }} lanes a row: its mean.
    let own_row = first_row + lane / {{ lanes }}u;
    var sum = pack(0.0);
    if (own_row < rows) {
        for (var c = lane % {{ lanes }}u; c < {{ columns }}u; c += {{ lanes }}u) {
            sum += weight[c] * {{ load("dout", "own_row * " ~ columns ~ "u + c") }} * x[own_row * {{ columns }}u + c];
        }
    }
    dots[lane] = fold(sum);
    workgroupBarrier();
    if (lane < {{ rows_per_group }}u && first_row + lane < rows) {
        var dot = 0.0;
        for (var i = 0u; i < {{ lanes }}u; i++) { dot += dots[lane * {{ lanes }}u + i]; }
        let scale = inv[first_row + lane];
        row_inv[lane] = scale;
        row_mean[lane] = scale * scale * dot / f32(d_model);
    }
    workgroupBarrier();
    // Then a lane a column, all rows of the group: they are still in cache.
    let n_rows = min({{ rows_per_group }}u, rows - min(first_row, rows));
    for (var c = lane; c < {{ columns }}u; c += {{ workgroup }}u) {
        let w = weight[c];
        var dw = pack(0.0);
        for (var r = 0u; r < n_rows; r++) {
            let i = (first_row + r) * {{ columns }}u + c;
            let d = {{ load("dout", "i") }};
            let a = x[i] * row_inv[r];
            {{ add("dx", "i", "row_inv[r] * w * d - a * row_mean[r]") }}
            dw += d * a;
        }
$$ if "weight_partials" in bound
        if (group < parts) { weight_partials[group * {{ stride // 4 if packed else stride }}u + c] = dw; }
$$ endif
    }
}
