// What the gated norm's kernels share. A column is {{ width }} neighbouring elements; a group has {{ columns }}.
{$ include "include/group_index.wgsl" $}
{$ include "include/pack.wgsl" $}
{$ include "include/sigmoid.wgsl" $}

// y with its skip
fn whole_y(row: u32, c: u32) -> pack {
    let head = c / {{ d_inner // n_heads // width }}u;
    let t = row % {{ seqlen }}u;
    let own = (row / {{ seqlen }}u * {{ chunks }}u + t / {{ chunk }}u) * n_heads + head;
    let skip = sums[own * {{ of_step * chunk }}u + t % {{ chunk }}u];
    return y[row * {{ d_inner // width }}u + c] + skip * xBC[row * {{ d_xBC // width }}u + c];
}

fn z_at(row: u32, c: u32) -> pack {
    return zxbcdt[row * {{ d_proj // width }}u + c];
}

fn silu(a: pack) -> pack {
    return a * sigmoid(a);
}
