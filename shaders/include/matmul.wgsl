// sums[m, n] = sum over k of a[m, k] * b[n, k]: a workgroup owns a tile of outputs, a thread its part of it, in registers.
// The kernel sets lines_m, lines_n, depth (sizes); from_k, to_k (WGSL: the range of k); a and b: {name, stride, start, along},
// along "k" where neighbours in memory differ in k, "lines" where they differ in m or n; row_sums: whether a's are wanted too.
// It defines finish(row, col, sum), sum of out_type: vec4f (neighbouring columns) or f32; and finish_row_sum(row, sum) where
// row_sums is set. Rows and columns past the edge reach them. Where the kernel has a dim parts, both take the part first.
$$ set tiles_m, tiles_n = ceil_div(lines_m, tile_m), ceil_div(lines_n, tile_n)
$$ set gm, gn = thread_m // 4, thread_n // 4
$$ set part = "wid.z, " if parts is defined else ""
{$ include "include/group_index.wgsl" $}

$$ for side, t in [("a", a), ("b", b)]
// Four neighbours in memory from (line, k) on; zeros where k is past the end. A line past the end only reaches sums that
// are not kept, so it may hold anything.
fn load_{{ side }}(line: u32, k: u32) -> vec4f {
    let i = {{ "line" if t.along == "k" else "k" }} * {{ t.stride }}u + {{ t.start }}u + {{ "k" if t.along == "k" else "line" }};
$$ if t.name in vec4
    let values = {{ t.name }}[i / 4u];
$$ else
    let values = vec4f({{ t.name }}[i], {{ t.name }}[i + 1u], {{ t.name }}[i + 2u], {{ t.name }}[i + 3u]);
$$ endif
$$ if depth % tile_k == 0
    return values;
$$ elif t.along == "k" and t.name not in vec4
    return select(vec4f(), values, vec4u(k) + vec4u(0u, 1u, 2u, 3u) < vec4u({{ depth }}u));
$$ else
    return select(vec4f(), values, k < {{ depth }}u);
$$ endif
}
$$ endfor

// The tile of a workgroup: {{ swizzle }} along m, then the next along n, so that workgroups that run together share operands.
fn tile_index(group: u32) -> vec2u {
    let first = group / {{ swizzle * tiles_n }}u * {{ swizzle }}u;
    let height = clamp({{ tiles_m }}u - first, 1u, {{ swizzle }}u);
    let rest = group % {{ swizzle * tiles_n }}u;
    return vec2u(first + rest % height, rest / height);
}

$$ if lanes == 0
{$ include "include/matmul_staged.wgsl" $}
$$ else
{$ include "include/matmul_direct.wgsl" $}
$$ endif
