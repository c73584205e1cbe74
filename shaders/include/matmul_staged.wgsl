// matmul.wgsl through workgroup memory. A tile is kept there by lines, as vec4s of neighbouring lines, k after k. An operand that
// lies along k in storage is turned on the way.
$$ set threads_m, threads_n = tile_m // thread_m, tile_n // thread_n
$$ set quads = tile_k // 4
$$ set skips = 4 if quads % 4 == 0 else quads
$$ set row_a, row_b = tile_m // 4, tile_n // 4
// Of a turned operand, 8 neighbouring threads load neighbouring k of few lines, so that they ask for few stretches of memory. What
// they keep would lie in the same banks; so its place is shifted by its k: that of a vec4 in its row, or where numbers are kept one
// by one, that of a number in its vec4.
$$ set shifts_a = a.along == "k" and row_a % 8 == 0 and threads_m % 8 == 0
$$ set shifts_b = b.along == "k" and row_b % 8 == 0 and threads_n % 8 == 0
$$ set one_by_one = shifts_a and single
$$ set stride = 8 // quads if quads < 8 else 1
{$ macro component(q, i) $}{{ ("xyzw", "yxwz", "zwxy", "wzyx")[q % 4 if one_by_one else 0][i] }}{$ endmacro $}
{$ macro shifted(thread, q, shifts) $}{{ "(" ~ thread ~ " ^ " ~ q * stride % 8 ~ "u)" if shifts else thread }}{$ endmacro $}
// A thread's rows and columns lie in groups of 4, a run of threads apart.
{$ macro row_at(i) $}{{ "row0 + tm * 4u + " ~ (i // 4 * 4 * threads_m + i % 4) ~ "u" }}{$ endmacro $}
{$ macro col_at(g) $}{{ "col0 + tn * 4u + " ~ g * 4 * threads_n ~ "u" }}{$ endmacro $}
{$ macro at_line(j, along) $}at.x{{ " + " ~ j ~ "u" if along == "k" and j }}, at.y{{ " + " ~ j ~ "u" if along == "lines" and j }}{$ endmacro $}
$$ macro multiply(first, count, groups, columns)
$$ for q in range(first, first + count)
$$ for j in range(4)
        {
$$ for g in groups
            let a{{ g }} = tile_a[{{ (4 * q + j) * row_a + g * threads_m }}u + {{ shifted("tm", q, shifts_a and not one_by_one) }}];
$$ endfor
$$ for g in columns
            let b{{ g }} = tile_b[{{ (4 * q + j) * row_b + g * threads_n }}u + {{ shifted("tn", q, shifts_b) }}];
$$ endfor
$$ for g in groups
$$ for i in range(4 * g, 4 * g + 4)
$$ for h in columns
            c{{ i }}_{{ h }} += a{{ g }}.{{ component(q, i % 4) }} * b{{ h }};
$$ endfor
$$ endfor
$$ endfor
        }
$$ endfor
$$ endfor
$$ endmacro
var<workgroup> tile_a: array<vec4f, {{ tile_k * row_a }}>;
var<workgroup> tile_b: array<vec4f, {{ tile_k * row_b }}>;

// Staging goes by blocks of 4 lines by 4 k, a's blocks first, then b's.
$$ set weighed = a.get("weighed") or b.get("weighed")
$$ set factors = "mat4x4f" if a.get("weighed") == "all" else "vec4f"
$$ set blocks_a, blocks_b = row_a * quads, row_b * quads
$$ set fetches = ceil_div(blocks_a + blocks_b, workgroup)
$$ set even = (blocks_a + blocks_b) % workgroup == 0
$$ for side, t, row, shifts in [("a", a, row_a, shifts_a), ("b", b, row_b, shifts_b)]
$$ set ones = one_by_one and side == "a"
$$ set turns = t.along == "k" and not ones
// Neighbouring threads take so many neighbouring lines, then the next k.
$$ set run = row if t.along == "lines" else 4 if row % 4 == 0 and not shifts else 1
fn place_{{ side }}(block: u32) -> vec2u {
    return vec2u(block / {{ run * quads }}u * {{ run }}u + block % {{ run }}u, block / {{ run }}u % {{ quads }}u);
}
fn fetch_{{ side }}(block: u32, first: u32, first_k: u32{{ ends_of }}) -> mat4x4f {
    let at = place_{{ side }}(block) * 4u + vec2u(first, first_k);
$$ if t.blocks is defined
    return {{ "transpose" if turns and not t.get("weighed") }}(load_{{ side }}_block(at.x, at.y));
$$ else
    return {{ "transpose" if turns and not t.get("weighed") }}(mat4x4f({$ for j in range(4) $}load_{{ side }}({{ at_line(j, t.along) }}{{ ends }}){{ ", " if j < 3 }}{$ endfor $}));
$$ endif
}
fn keep_{{ side }}(block: u32, fetched: mat4x4f{{ ", factors: " ~ factors if weighed }}) {
    let place = place_{{ side }}(block);
$$ if t.get("weighed")
    let values = {{ "transpose" if turns }}(mat4x4f({$ for j in range(4) $}factors[{{ j }}] * fetched[{{ j }}]{{ ", " if j < 3 }}{$ endfor $}));
$$ else
    let values = fetched;
$$ endif
    let to = place.y * {{ 4 * row }}u + {{ "(place.x ^ (place.y * " ~ stride ~ "u % 8u))" if shifts and not ones else "place.x" }};
$$ for j in range(4)
$$ if ones
    let line{{ j }} = {{ j }}u ^ (place.y % 4u);
$$ for k in range(4)
    tile_{{ side }}[to + {{ k * row }}u][line{{ j }}] = values[{{ j }}][{{ k }}];
$$ endfor
$$ else
    tile_{{ side }}[to + {{ j * row }}u] = values[{{ j }}];
$$ endif
$$ endfor
}
$$ endfor
fn fetch(block: u32, row0: u32, col0: u32, k: u32{{ ends_of }}) -> mat4x4f {
    if (block < {{ blocks_a }}u) { return fetch_a(block, row0, k{{ ends }}); }
$$ if not even
    if (block >= {{ blocks_a + blocks_b }}u) { return mat4x4f(); }
$$ endif
    return fetch_b(block - {{ blocks_a }}u, col0, k{{ ends }});
}
fn keep(block: u32, values: mat4x4f{{ ", factors: " ~ factors if weighed }}) {
    if (block < {{ blocks_a }}u) { keep_a(block, values{{ ", factors" if weighed }}); } else {{ "" if even else "if (block < " ~ (blocks_a + blocks_b) ~ "u) " }}{ keep_b(block - {{ blocks_a }}u, values{{ ", factors" if weighed }}); }
}
$$ if weighed
// What the columns of a fetched block, or all its numbers, are multiplied by. Made while the block is on its way.
fn weigh(block: u32, row0: u32, col0: u32, k: u32) -> {{ factors }} {
$$ if a.get("weighed")
    let at = place_a(block) * 4u + vec2u(row0, k);
    if (block < {{ blocks_a }}u) { return weigh_a_block(at.x, at.y); }
    return {{ factors }}();
$$ else
    if (block < {{ blocks_a }}u) { return vec4f(); }
    let at = place_b(block - {{ blocks_a }}u) * 4u + vec2u(col0, k);
    return weigh_b_four(at.x, at.y);
$$ endif
}
$$ endif

$$ if joined is defined
fn {{ mine }}product(group: u32, lane: u32) {
$$ else
@compute @workgroup_size({{ workgroup }})
fn main(@builtin(workgroup_id) wid: vec3u, @builtin(num_workgroups) groups: vec3u, @builtin(local_invocation_index) lane: u32) {
    let group = group_index(wid, groups);
$$ endif
$$ if products is defined
    let product = product_index(group);
    let tile = product_tile(group);
    begin(product, tile.x * {{ tile_m }}u);
$$ else
    let tile = tile_index(group);
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
    var block{{ f }} = {{ "fetch(lane + " ~ f * workgroup ~ "u, row0, col0, " ~ from_k ~ (", true" if peels else "") ~ ")" if prefetch else "mat4x4f()" }};
    {{ "var factors" ~ f ~ " = " ~ ("weigh(lane + " ~ f * workgroup ~ "u, row0, col0, " ~ from_k ~ ")" if prefetch else factors ~ "()") ~ ";" if weighed }}
$$ endfor
$$ for groups_m, groups_n in [(range(gm), range(gn))] + ([(range(used_m), range(used_n))] if short else [])
$$ if short
    {{ "if (tile.x < " ~ whole_m ~ "u && tile.y < " ~ whole_n ~ "u) {" if loop.first else "} else {" }}
$$ endif
    var k = {{ from_k }};
$$ set narrow = not loop.first
$$ for looks, end_k in ([("false", whole_k), ("true", to_k)] if peels else [("", to_k)])
    for (; k < {{ end_k }}; k += {{ tile_k }}u) {
$$ if not prefetch
$$ for f in range(fetches)
        block{{ f }} = fetch(lane + {{ f * workgroup }}u, row0, col0, k);
$$ endfor
$$ for f in range(fetches if weighed else 0)
        {{ "if (fresh(k)) " if fresh is defined }}{ factors{{ f }} = weigh(lane + {{ f * workgroup }}u, row0, col0, k); }
$$ endfor
$$ endif
        workgroupBarrier();  // all have used the tiles before
$$ for f in range(fetches)
        keep(lane + {{ f * workgroup }}u, block{{ f }}{{ ", factors" ~ f if weighed }});
$$ endfor
        workgroupBarrier();
$$ if prefetch
$$ for f in range(fetches)
        block{{ f }} = fetch(lane + {{ f * workgroup }}u, row0, col0, k + {{ tile_k }}u{{ ", " ~ looks if looks }});  // arrives while this round computes
$$ endfor
$$ for f in range(fetches if weighed else 0)
        {{ "if (fresh(k + %du)) " % tile_k if fresh is defined }}{ factors{{ f }} = weigh(lane + {{ f * workgroup }}u, row0, col0, k + {{ tile_k }}u); }
$$ endfor
$$ endif
$$ if row_sums
        if (sums_rows) {
            for (var j = 0u; j < {{ tile_k }}u; j++) { row_sums += tile_a[j * {{ row_a }}u + lane]; }
        }
$$ endif
$$ if needs is defined
$$ for first in range(0, quads, skips)
        {
$$ for g in range(gm)
            let needs{{ g }} = needs({{ row_at(4 * g) }}, {{ col_at(0) }}, k + {{ 4 * first }}u);
$$ endfor
            if ({$ for g in range(gm) $}{{ " && " if g }}needs{{ g }}{$ endfor $}) {
{{ multiply(first, skips, range(gm), range(gn)) }}
            }{$ if gm > 1 $} else {
$$ for g in range(gm)
                if (needs{{ g }}) {
{{ multiply(first, skips, [g], range(gn)) }}
                }
$$ endfor
            }{$ endif $}
        }
$$ endfor
$$ else
        {{ "if (row0 + tm * 4u < " ~ lines_m ~ "u && col0 + tn * 4u < " ~ lines_n ~ "u) {" if narrow }}
{{ multiply(0, quads, groups_m, groups_n) }}
        {{ "}" if narrow }}
$$ endif
{$ include "include/matmul_fold.wgsl" $}
    }
$$ endfor
$$ endfor
    {{ "}" if short }}
{$ include "include/matmul_finish.wgsl" $}
$$ if each_row
    if (tile.y == 0u) {
        for (var row = lane; row < {{ tile_m }}u; row += {{ workgroup }}u) { finish_row(row0 + row); }
    }
$$ endif
$$ if row_terms
    var totals = mat3x4f();
$$ for term in range(3)
    workgroupBarrier();  // tile_b is free now, or has been added up
$$ for g in range(gm)
    tile_b[(tm + {{ g * threads_m }}u) * {{ threads_n }}u + tn] = vec4f({$ for j in range(4) $}terms{{ 4 * g + j }}[{{ term }}]{{ ", " if j < 3 }}{$ endfor $});
$$ endfor
    workgroupBarrier();
    if (lane < {{ tile_m // 4 }}u) {
        for (var n = 0u; n < {{ threads_n }}u; n++) { totals[{{ term }}] += tile_b[lane * {{ threads_n }}u + n]; }
    }
$$ endfor
    if (lane < {{ tile_m // 4 }}u) { finish_rows(row0 + lane * 4u, col0, totals); }
$$ endif
$$ if row_sums
    if (sums_rows) {
$$ for j in range(4)
        finish_row_sum({{ part }}row0 + lane * 4u + {{ j }}u, row_sums.{{ "xyzw"[j] }});
$$ endfor
    }
$$ endif
}
