// ssd_norm_backward.wgsl with a workgroup a row, one after another, whose columns its lanes hold in registers.
$$ set value_type = "vec2f"
{$ include "include/workgroup_sum.wgsl" $}

@compute @workgroup_size({{ workgroup }})
fn main(@builtin(workgroup_id) wid: vec3u, @builtin(num_workgroups) groups: vec3u, @builtin(local_invocation_index) lane: u32) {
    let part = group_index(wid, groups);
    let first_row = min(part * {{ rows_per_group }}u, {{ batch * seqlen }}u);
    let end_row = min(first_row + {{ rows_per_group }}u, {{ batch * seqlen }}u);
$$ for j in range(held)
    let c{{ j }} = min(lane + {{ j * workgroup }}u, {{ all_columns - 1 }}u);
    let w{{ j }} = {{ "select(pack(0.0), weight[c" ~ j ~ "], lane < " ~ (all_columns - j * workgroup) ~ "u)" if all_columns < (j + 1) * workgroup else "weight[c" ~ j ~ "]" }};
    var dw{{ j }} = pack(0.0);
$$ endfor
    for (var row = first_row; row < end_row; row++) {
        var squares = pack(0.0);
        var products = pack(0.0);
$$ for j in range(held)
        let value{{ j }} = whole_y(row, c{{ j }});
        let z{{ j }} = z_at(row, c{{ j }});
        let d{{ j }} = dout[row * {{ all_columns }}u + c{{ j }}];
$$ endfor
$$ for j in range(held)
        let a{{ j }} = {{ "select(pack(0.0), value" ~ j ~ " * silu(z" ~ j ~ "), lane < " ~ (all_columns - j * workgroup) ~ "u)" if all_columns < (j + 1) * workgroup else "value" ~ j ~ " * silu(z" ~ j ~ ")" }};
        squares += a{{ j }} * a{{ j }};
        products += w{{ j }} * d{{ j }} * a{{ j }};
$$ endfor
        let found = means(workgroup_sum(vec2f(fold(squares), fold(products)), lane));
$$ for j in range(held)
        {{ "if (lane < " ~ (all_columns - j * workgroup) ~ "u) " if all_columns < (j + 1) * workgroup }}{ dw{{ j }} += finish(row, c{{ j }}, value{{ j }}, z{{ j }}, d{{ j }}, w{{ j }}, found.x, found.y); }
$$ endfor
    }
$$ if "weight_partials" in bound
    if (part < parts) {
$$ for j in range(held)
        {{ "if (lane < " ~ (all_columns - j * workgroup) ~ "u) " if all_columns < (j + 1) * workgroup }}{ weight_partials[part * {{ "stride / 4u" if packed else "stride" }} + c{{ j }}] = dw{{ j }}; }
$$ endfor
    }
$$ endif
}
