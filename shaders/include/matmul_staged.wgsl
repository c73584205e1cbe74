// matmul.wgsl through workgroup memory: tiles of both operands are staged there as vec4 of neighbouring lines, k by k.
$$ set threads_n = tile_n // thread_n
$$ set row_a, row_b = tile_m // 4, tile_n // 4
$$ set blocks_a, blocks_b = row_a * (tile_k // 4), row_b * (tile_k // 4)
$$ set fetches = ceil_div(blocks_a + blocks_b, workgroup)
var<workgroup> tile_a: array<vec4f, {{ tile_k * row_a }}>;
var<workgroup> tile_b: array<vec4f, {{ tile_k * row_b }}>;

// Staging goes by blocks of 4 lines by 4 k, one vec4 of lines for each k; a's blocks come first, then b's. Neighbouring threads
// take neighbouring lines (where memory runs along k only 8, then the next k, so that loads stay whole), so that no two of 8
// threads write to the same banks.
$$ for side, t, row in [("a", a, row_a), ("b", b, row_b)]
$$ set run = row if t.along == "lines" else 8 if row % 8 == 0 else 4 if row % 4 == 0 else 1
fn place_{{ side }}(block: u32) -> vec2u {
    return vec2u(block / {{ run * tile_k // 4 }}u * {{ run }}u + block % {{ run }}u, block / {{ run }}u % {{ tile_k // 4 }}u);
}
fn fetch_{{ side }}(block: u32, first: u32, first_k: u32) -> mat4x4f {
    let place = place_{{ side }}(block) * 4u + vec2u(first, first_k);
$$ if t.along == "k"
    return transpose(mat4x4f({$ for j in range(4) $}load_{{ side }}(place.x + {{ j }}u, place.y){{ ", " if j < 3 }}{$ endfor $}));
$$ else
    return mat4x4f({$ for j in range(4) $}load_{{ side }}(place.x, place.y + {{ j }}u){{ ", " if j < 3 }}{$ endfor $});
$$ endif
}
fn keep_{{ side }}(block: u32, values: mat4x4f) {
    let place = place_{{ side }}(block);
    let at = place.y * {{ 4 * row }}u + place.x;
$$ for j in range(4)
    tile_{{ side }}[at + {{ j * row }}u] = values[{{ j }}];
$$ endfor
}
$$ endfor
$$ set even = (blocks_a + blocks_b) % workgroup == 0
fn fetch(block: u32, row0: u32, col0: u32, k: u32) -> mat4x4f {
    if (block < {{ blocks_a }}u) { return fetch_a(block, row0, k); }
$$ if not even
    if (block >= {{ blocks_a + blocks_b }}u) { return mat4x4f(); }
$$ endif
    return fetch_b(block - {{ blocks_a }}u, col0, k);
}
fn keep(block: u32, values: mat4x4f) {
    if (block < {{ blocks_a }}u) { keep_a(block, values); } else {{ "" if even else "if (block < " ~ (blocks_a + blocks_b) ~ "u) " }}{ keep_b(block - {{ blocks_a }}u, values); }
}

@compute @workgroup_size({{ workgroup }})
fn main(@builtin(workgroup_id) wid: vec3u, @builtin(num_workgroups) groups: vec3u, @builtin(local_invocation_index) lane: u32) {
    let tile = tile_index(group_index(wid, groups));
    let row0 = tile.x * {{ tile_m }}u;
    let col0 = tile.y * {{ tile_n }}u;
$$ if warp_n
    // 32 neighbouring threads form a square-ish patch, which reads less of workgroup memory than a strip.
    let tm = lane / {{ 32 * threads_n // warp_n }}u * {{ 32 // warp_n }}u + lane % 32u / {{ warp_n }}u;
    let tn = lane / 32u % {{ threads_n // warp_n }}u * {{ warp_n }}u + lane % {{ warp_n }}u;
$$ else
    let tm = lane / {{ threads_n }}u;
    let tn = lane % {{ threads_n }}u;
$$ endif
$$ for i in range(thread_m)
$$ for g in range(gn)
    var c{{ i }}_{{ g }} = vec4f();
$$ endfor
$$ endfor
$$ if row_sums
    let sums_rows = tile.y == 0u && lane < {{ tile_m // 4 }}u;
    var row_sums = vec4f();
$$ endif
$$ if prefetch
$$ for f in range(fetches)
    var block{{ f }} = fetch(lane + {{ f * workgroup }}u, row0, col0, {{ from_k }});
$$ endfor
$$ endif
    for (var k = {{ from_k }}; k < {{ to_k }}; k += {{ tile_k }}u) {
$$ if not prefetch
$$ for f in range(fetches)
        let block{{ f }} = fetch(lane + {{ f * workgroup }}u, row0, col0, k);
$$ endfor
$$ endif
        workgroupBarrier();  // all have used the tiles before
$$ for f in range(fetches)
        keep(lane + {{ f * workgroup }}u, block{{ f }});
$$ endfor
        workgroupBarrier();
$$ if prefetch
$$ for f in range(fetches)
        block{{ f }} = fetch(lane + {{ f * workgroup }}u, row0, col0, k + {{ tile_k }}u);  // arrives while this round computes
$$ endfor
$$ endif
$$ if row_sums
        if (sums_rows) {
            for (var j = 0u; j < {{ tile_k }}u; j++) { row_sums += tile_a[j * {{ row_a }}u + lane]; }
        }
$$ endif
$$ for j in range(tile_k)
        {
$$ for g in range(gm)
            let a{{ g }} = tile_a[{{ j * row_a + g * (tile_m // thread_m) }}u + tm];
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
