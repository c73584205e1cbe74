// ssd_norm_backward.wgsl in two readings of some rows: first their means, then a lane a column.
$$ set pairs = rows_per_group * norm_groups
$$ set lanes = [workgroup // pairs, 1] | max

var<workgroup> dots: array<vec2f, {{ workgroup }}>;
var<workgroup> pair_means: array<vec2f, {{ pairs }}>;

@compute @workgroup_size({{ workgroup }})
fn main(@builtin(workgroup_id) wid: vec3u, @builtin(num_workgroups) groups: vec3u, @builtin(local_invocation_index) lane: u32) {
    let part = group_index(wid, groups);
    let first_row = min(part * {{ rows_per_group }}u, {{ batch * seqlen }}u);
    let n_rows = min({{ rows_per_group }}u, {{ batch * seqlen }}u - first_row);
    // First, {{ lanes }} lanes a pair of row and group of columns.
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
                products += weight[c] * dout[row * {{ all_columns }}u + c] * a;
            }
        }
        dots[lane] = vec2f(fold(squares), fold(products));
        workgroupBarrier();
        let summed = {{ turn * (workgroup // lanes) }}u + lane;
        if (lane < {{ workgroup // lanes }}u && summed < {{ pairs }}u) {
            var sum = vec2f();
            for (var i = 0u; i < {{ lanes }}u; i++) { sum += dots[lane * {{ lanes }}u + i]; }
            pair_means[summed] = means(sum);
        }
        workgroupBarrier();
    }
$$ endfor
    // Then all rows of a column: they are still in cache.
    for (var c = lane; c < {{ all_columns }}u; c += {{ workgroup }}u) {
        let w = weight[c];
        var dw = pack(0.0);
        for (var r = 0u; r < n_rows; r++) {
            let row = first_row + r;
            let found = pair_means[r * {{ norm_groups }}u + c / {{ columns }}u];
            dw += finish(row, c, whole_y(row, c), z_at(row, c), dout[row * {{ all_columns }}u + c], w, found.x, found.y);
        }
$$ if "weight_partials" in bound
        if (part < parts) { weight_partials[part * {{ "stride / 4u" if packed else "stride" }} + c] = dw; }
$$ endif
    }
}
