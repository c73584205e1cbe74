// matmul.wgsl through workgroup memory. A tile is kept there by lines, as vec4s of neighbouring lines, k after k; or packed, as
// vec4s of neighbouring k, line after line. An operand that lies along k in storage is packed as it comes, or turned on the way.
$$ set threads_m, threads_n = tile_m // thread_m, tile_n // thread_n
$$ set quads = tile_k // 4
$$ set packed_a, packed_b = a.along == "k" and packed in ("a", "ab"), b.along == "k" and packed in ("b", "ab")
// A packed line takes one vec4 more than it has, so that 8 neighbouring lines begin in different banks. Packed lines of b are dealt
// out to four quarters: a thread's 4 neighbouring columns come one from each, and neighbouring threads read neighbouring lines.
$$ set pitch = quads + 1
$$ set quarter = tile_n // 4 * pitch + (quads - tile_n // 4 * pitch) % 8
$$ set row_a, row_b = tile_m // 4, tile_n // 4
// A thread's columns lie in groups of 4, a run of threads apart, and unless a is packed its rows too.
{$ macro row_at(i) $}{{ "row0 + tm + " ~ i * threads_m ~ "u" if packed_a else "row0 + tm * 4u + " ~ (i // 4 * 4 * threads_m + i % 4) ~ "u" }}{$ endmacro $}
{$ macro col_at(g) $}{{ "col0 + tn * 4u + " ~ g * 4 * threads_n ~ "u" }}{$ endmacro $}
var<workgroup> tile_a: array<vec4f, {{ tile_m * pitch if packed_a else tile_k * row_a }}>;
var<workgroup> tile_b: array<vec4f, {{ 4 * quarter if packed_b else tile_k * row_b }}>;

// Staging goes by blocks of 4 loads, a's blocks first, then b's.
$$ set blocks_a, blocks_b = row_a * quads, row_b * quads
$$ set fetches = ceil_div(blocks_a + blocks_b, workgroup)
$$ set even = (blocks_a + blocks_b) % workgroup == 0
$$ for side, t, row, packs, blocks in [("a", a, row_a, packed_a, blocks_a), ("b", b, row_b, packed_b, blocks_b)]
$$ if packs
// Neighbouring threads take neighbouring k of a line, then the next line; the 4 loads of a block are far apart.
fn fetch_{{ side }}(block: u32, first: u32, first_k: u32) -> mat4x4f {
    let line = first + block / {{ quads }}u;
    let k = first_k + block % {{ quads }}u * 4u;
    return mat4x4f({$ for j in range(4) $}load_{{ side }}(line + {{ j * row }}u, k){{ ", " if j < 3 }}{$ endfor $});
}
fn keep_{{ side }}(block: u32, values: mat4x4f) {
    let line = block / {{ quads }}u;
    let quad = block % {{ quads }}u;
$$ for j in range(4)
$$ if side == "a"
    tile_a[(line + {{ j * row }}u) * {{ pitch }}u + quad] = values[{{ j }}];
$$ else
    tile_b[(line + {{ j * row }}u) % 4u * {{ quarter }}u + (line + {{ j * row }}u) / 4u * {{ pitch }}u + quad] = values[{{ j }}];
$$ endif
$$ endfor
}
$$ else
// A block is 4 lines by 4 k. Neighbouring threads take neighbouring lines (where memory runs along k only 8, then the next k, so
// that loads stay whole), so that no two of 8 threads write to the same banks.
$$ set run = row if t.along == "lines" else 8 if row % 8 == 0 else 4 if row % 4 == 0 else 1
fn place_{{ side }}(block: u32) -> vec2u {
    return vec2u(block / {{ run * quads }}u * {{ run }}u + block % {{ run }}u, block / {{ run }}u % {{ quads }}u);
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
$$ endif
$$ endfor
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
$$ if products is defined
    let product = product_index(group_index(wid, groups));
    let tile = product_tile(group_index(wid, groups));
    begin(product, tile.x * {{ tile_m }}u);
$$ else
    let tile = tile_index(group_index(wid, groups));
$$ endif
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
$$ if per_fold is defined
    var s{{ i }}_{{ g }} = vec4f();
$$ endif
$$ endfor
$$ endfor
$$ if row_sums
    let sums_rows = tile.y == 0u && lane < {{ tile_m // 4 }}u;
    var row_sums = vec4f();
$$ endif
$$ for f in range(fetches)
    var block{{ f }} = {{ "fetch(lane + " ~ f * workgroup ~ "u, row0, col0, " ~ from_k ~ ")" if prefetch else "mat4x4f()" }};
$$ endfor
    for (var k = {{ from_k }}; k < {{ to_k }}; k += {{ tile_k }}u) {
$$ if not prefetch
$$ for f in range(fetches)
        block{{ f }} = fetch(lane + {{ f * workgroup }}u, row0, col0, k);
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
$$ for q in range(quads)
        {
$$ if packed_a
$$ for i in range(thread_m)
            let a{{ i }} = tile_a[tm * {{ pitch }}u + {{ i * threads_m * pitch + q }}u];
$$ endfor
$$ endif
$$ if packed_b
$$ for i in range(thread_n)
            let b{{ i }} = tile_b[tn * {{ pitch }}u + {{ i % 4 * quarter + i // 4 * threads_n * pitch + q }}u];
$$ endfor
$$ endif
$$ for j in range(4)
            {
$$ if not packed_a
$$ for g in range(gm)
                let a{{ g }} = tile_a[{{ (4 * q + j) * row_a + g * threads_m }}u + tm];
$$ endfor
$$ endif
$$ for g in range(gn)
$$ if packed_b
                let v{{ g }} = vec4f(b{{ 4 * g }}.{{ "xyzw"[j] }}, b{{ 4 * g + 1 }}.{{ "xyzw"[j] }}, b{{ 4 * g + 2 }}.{{ "xyzw"[j] }}, b{{ 4 * g + 3 }}.{{ "xyzw"[j] }});
$$ else
                let v{{ g }} = tile_b[{{ (4 * q + j) * row_b + g * threads_n }}u + tn];
$$ endif
$$ endfor
$$ for i in range(thread_m)
$$ for g in range(gn)
                c{{ i }}_{{ g }} += {{ "a" ~ i ~ "." ~ "xyzw"[j] if packed_a else "a" ~ i // 4 ~ "." ~ "xyzw"[i % 4] }} * v{{ g }};
$$ endfor
$$ endfor
            }
$$ endfor
        }
$$ endfor
{$ include "include/matmul_fold.wgsl" $}
    }
$$ for i in range(thread_m)
$$ for g in range(gn)
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
