// matmul.wgsl through workgroup memory: tiles of both operands are staged there as vec4 of neighbouring lines, k by k.
$$ set threads_n = tile_n // thread_n
$$ set row_a, row_b = tile_m // 4 + pad, tile_n // 4 + pad
$$ set blocks_a, blocks_b = tile_m // 4 * (tile_k // 4), tile_n // 4 * (tile_k // 4)
$$ set fetches = ceil_div(blocks_a + blocks_b, workgroup)
var<workgroup> tile_a: array<vec4f, {{ tile_k * row_a }}>;
var<workgroup> tile_b: array<vec4f, {{ tile_k * row_b }}>;

// Staging goes by blocks of 4 lines by 4 k, one vec4 of lines for each k; a's blocks come first, then b's.
$$ for side, t, tile, row in [("a", a, tile_m, row_a), ("b", b, tile_n, row_b)]
$$ set per_line = tile_k // 4 if t.along == "k" else tile // 4
fn fetch_{{ side }}(block: u32, first: u32, first_k: u32) -> mat4x4f {
$$ if t.along == "k"
    let line = first + block / {{ per_line }}u * 4u;
    let k = first_k + block % {{ per_line }}u * 4u;
    return transpose(mat4x4f(load_{{ side }}(line, k), load_{{ side }}(line + 1u, k), load_{{ side }}(line + 2u, k), load_{{ side }}(line + 3u, k)));
$$ else
    let line = first + block % {{ per_line }}u * 4u;
    let k = first_k + block / {{ per_line }}u * 4u;
    return mat4x4f(load_{{ side }}(line, k), load_{{ side }}(line, k + 1u), load_{{ side }}(line, k + 2u), load_{{ side }}(line, k + 3u));
$$ endif
}
fn keep_{{ side }}(block: u32, values: mat4x4f) {
$$ if t.along == "k"
    let at = block % {{ per_line }}u * {{ 4 * row }}u + block / {{ per_line }}u;
$$ else
    let at = block / {{ per_line }}u * {{ 4 * row }}u + block % {{ per_line }}u;
$$ endif
$$ for j in range(4)
    tile_{{ side }}[at + {{ j * row }}u] = values[{{ j }}];
$$ endfor
}
$$ endfor
fn fetch(block: u32, row0: u32, col0: u32, k: u32) -> mat4x4f {
    if (block < {{ blocks_a }}u) { return fetch_a(block, row0, k); }
    return fetch_b(block - {{ blocks_a }}u, col0, k);
}
fn keep(block: u32, values: mat4x4f) {
    if (block < {{ blocks_a }}u) { keep_a(block, values); } else if (block < {{ blocks_a + blocks_b }}u) { keep_b(block - {{ blocks_a }}u, values); }
}

@compute @workgroup_size({{ workgroup }})
fn main(@builtin(workgroup_id) wid: vec3u, @builtin(num_workgroups) groups: vec3u, @builtin(local_invocation_index) lane: u32) {
    let tile = tile_index(group_index(wid, groups));
    let row0 = tile.x * {{ tile_m }}u;
    let col0 = tile.y * {{ tile_n }}u;
    let tm = lane / {{ threads_n }}u;
    let tn = lane % {{ threads_n }}u;
$$ for i in range(thread_m)
$$ for g in range(gn)
    var c{{ i }}_{{ g }} = vec4f();
$$ endfor
$$ endfor
$$ if row_sums
    let sums_rows = tile.y == 0u && lane < {{ tile_m // 4 }}u;
    var row_sums = vec4f();
$$ endif
    for (var k = {{ from_k }}; k < {{ to_k }}; k += {{ tile_k }}u) {
$$ for f in range(fetches)
        let block{{ f }} = fetch(lane + {{ f * workgroup }}u, row0, col0, k);
$$ endfor
        workgroupBarrier();  // all have used the tiles before
$$ for f in range(fetches)
        keep(lane + {{ f * workgroup }}u, block{{ f }});
$$ endfor
        workgroupBarrier();
$$ if row_sums
        if (sums_rows) {
            for (var j = 0u; j < {{ tile_k }}u; j++) { row_sums += tile_a[j * {{ row_a }}u + lane]; }
        }
$$ endif
$$ for j in range(tile_k)
        {
$$ for g in range(gm)
            let a{{ g }} = tile_a[{{ j * row_a + g * tile_m // thread_m }}u + tm];
$$ endfor
$$ for g in range(gn)
            let b{{ g }} = tile_b[{{ j * row_b + g * threads_n }}u + tn];
$$ endfor
$$ for i in range(thread_m)
$$ for g in range(gn)
            c{{ i }}_{{ g }} += a{{ i // 4 }}.{{ "xyzw"[i % 4] }} * b{{ g }};
$$ endfor
$$ endfor
        }
$$ endfor
    }
    // A thread's rows lie in groups of 4, one group a run of threads apart, and its columns too: neighbouring threads then read
    // neighbouring vec4s of workgroup memory.
$$ for i in range(thread_m)
$$ for g in range(gn)
$$ set row, col = "row0 + " ~ (i // 4 * (4 * tile_m // thread_m) + i % 4) ~ "u + tm * 4u", "col0 + " ~ g * 4 * threads_n ~ "u + tn * 4u"
{$ include "include/matmul_finish.wgsl" $}
$$ endfor
$$ endfor
$$ if row_sums
    if (sums_rows) {
$$ for j in range(4)
        finish_row_sum({{ part }}row0 + lane * 4u + {{ j }}u, row_sums.{{ "xyzw"[j] }});
$$ endfor
    }
$$ endif
}
