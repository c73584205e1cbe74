// sums[m, n] = sum over k of a[m, k] * b[n, k]: a workgroup owns a tile of outputs, a thread its part of it, in registers.
// The kernel sets lines_m, lines_n, depth (sizes); a and b: {name, stride, start, along}, along "k" where neighbours in memory
// differ in k, "lines" where they differ in m or n, and dtype where it is not f32: of i8, <name>_scale holds the factors of rows;
// more: none, or {depth, a, b}, another pair, whose product is added to the sums: the walk goes on in it behind depth, from the
// next multiple of tile_k on; row_sums: whether a's are wanted too.
// It defines finish(row, col, sum), sum of out_type: vec4f (neighbouring columns) or f32; and finish_row_sum(row, sum) where
// row_sums is set. Rows and columns past the edge reach them. Where the kernel has a dim parts, the depth is dealt out to these,
// and both take the part first; `more` is the last one's.
// What a kernel may set besides:
// own        in a or b: it defines that side's load_a or load_b itself
// blocks     in a, with own: it defines load_a_block(line, k) instead, the mat4x4f of four lines and k, so that it can be read either way
// weighed    with own: factors of what is loaded, made apart from loads, so that both are on their way at once. With blocks it defines
//            weigh_a_block(line, k), a mat4x4f where weighed is "all", or a vec4f, one for each line, where it is "columns"; for a b
//            along lines weigh_b(line, k), of four lines, and weigh_b_four(line, k), of these and four k
// fresh      it defines fresh(k), whether factors from this k on may differ from those before
// needs      used where operands go through workgroup memory: it defines needs(row, col, k), whether four rows and the columns from
//            these on have anything to sum in 16 k from this one on
// since, until   WGSL: where the walk begins and ends, if not at 0 and at the depth's end
// products   it makes so many products of these sizes, and defines begin(product, first_row), which is called first
// lower      with products: sums above the diagonal are not wanted; tiles there sum nothing. Neighbouring workgroups then make the same
//            tile of different products. A GPU deals workgroups out in turn: where tiles differ in work, and their number divides that
//            of its multiprocessors, some would get all the heavy ones
// per_fold   a multiple of tile_k: every so many k the sums so far are put aside, times fold_weight(row, col, k / per_fold), a vec4f
//            for 4 neighbouring columns
// row_terms  finish() returns a vec3f, which is added up along the tile's columns; it defines finish_rows(row, first_col, sums), which
//            gets the sums of four rows, a mat3x4f. A tile has thread_n tile_k rows at most. It also defines find(row, col),
//            which loads what finish() takes fourth; it is called one place ahead, since a compiler moves no load before a store
// each_row   it defines finish_row(row), which is called once for each row of outputs, by neighbouring threads
// joined     names of functions here and there begin with it, and main is the kernel's, which calls <joined>product(group, thread), a
//            workgroup's part: for kernels that do something else besides, or straight from storage, make two such products
$$ set row_terms = row_terms is defined and row_terms
$$ set each_row = each_row is defined and each_row
$$ set tiles_m, tiles_n = ceil_div(lines_m, tile_m), ceil_div(lines_n, tile_n)
$$ set gm, gn = thread_m // 4, thread_n // 4
$$ set seam = ceil_div(depth, tile_k) * tile_k
$$ set end = seam + more.depth if more else depth
$$ set lower = lower is defined and lower
$$ if lower
$$ set until = "select(" ~ end ~ "u, 0u, tile.y * " ~ tile_n ~ "u > tile.x * " ~ tile_m ~ "u + " ~ (tile_m - 1) ~ "u)"
$$ endif
$$ if parts is defined
$$ set part, span = "wid.z, ", ceil_div(ceil_div(depth, parts), 32) * 32
$$ set from_k, to_k = "wid.z * " ~ span ~ "u", "min(" ~ depth ~ "u, (wid.z + 1u) * " ~ span ~ "u)"
$$ if more
$$ set from_k, to_k = "min(" ~ from_k ~ ", " ~ seam ~ "u)", "select(" ~ to_k ~ ", " ~ end ~ "u, wid.z == " ~ (parts - 1) ~ "u)"
$$ endif
$$ else
$$ set part, from_k, to_k = "", since if since is defined else "0u", until if until is defined else end ~ "u"
$$ endif
$$ set eights = lanes and tile_k == 8
$$ set sums = "s" if per_fold is defined else "c"
$$ set mine = joined if joined is defined else ""
$$ if joined is not defined
{$ include "include/group_index.wgsl" $}
$$ endif

// Only in the last rounds need loads look for the end of the depth; those have a loop of their own, where the walk is long.
$$ set whole = a.own is not defined and b.own is not defined and (a.along == "lines" or a.name in vec4) and (b.along == "lines" or b.name in vec4)
$$ set peels = lanes == 0 and prefetch and depth % tile_k > 0 and whole and not more and parts is not defined
$$ set whole_k = [depth // tile_k - 1, 0] | max * tile_k ~ "u"
$$ set ends_of, ends = (", ends: bool", ", ends") if peels else ("", "")
$$ set pairs = [("a", a, depth), ("b", b, depth)] + ([("more_a", more.a, more.depth), ("more_b", more.b, more.depth)] if more else [])
$$ for side, t, length in pairs if t.own is not defined
$$ set name, dtype, aligned = t.name, t.get("dtype", "f32"), t.name in vec4
$$ if dtype != "f32"
{$ include "include/stored.wgsl" $}
$$ endif
$$ if name not in vec8
// Four neighbours in memory from (line, k) on; zeros where k is past the end. A line past the end only reaches sums that
// are not kept, so it may hold anything.
fn {{ mine }}load_{{ side }}(line: u32, k: u32{{ ends_of }}) -> vec4f {
$$ if more and side in ("a", "b")
    if (k >= {{ seam }}u) { return {{ mine }}load_more_{{ side }}(line, k - {{ seam }}u); }
$$ endif
$$ set ends_whole = t.along == "lines" or aligned
$$ if length % tile_k and ends_whole
    if ({{ "ends && " if peels }}k >= {{ length }}u) { return vec4f(); }  // a select() behind the load would wait for it
$$ endif
    let i = {{ "line" if t.along == "k" else "k" }} * {{ t.stride }}u + {{ t.start }}u + {{ "k" if t.along == "k" else "line" }};
$$ if dtype != "f32"
    let values = four_{{ name }}(i){{ " * " ~ name ~ "_scale[" ~ ("line" if t.along == "k" else "k") ~ "]" if dtype == "i8" }};
$$ elif aligned
    let values = {{ load(t.name, "i / 4u") }};
$$ else
    let values = vec4f({{ load(t.name, "i") }}, {{ load(t.name, "i + 1u") }}, {{ load(t.name, "i + 2u") }}, {{ load(t.name, "i + 3u") }});
$$ endif
$$ if length % tile_k == 0 or ends_whole
    return values;
$$ else
    return select(vec4f(), values, vec4u(k) + vec4u(0u, 1u, 2u, 3u) < vec4u({{ length }}u));
$$ endif
}
$$ endif
$$ if eights
// Eight neighbours in memory from (line, k) on, as two vec4s.
fn {{ mine }}eight_{{ side }}(line: u32, k: u32) -> mat2x4f {
$$ if name in vec8
$$ if more and side in ("a", "b")
    if (k >= {{ seam }}u) { return {{ mine }}eight_more_{{ side }}(line, k - {{ seam }}u); }
$$ endif
$$ if length % tile_k
    if (k >= {{ length }}u) { return mat2x4f(); }
$$ endif
    let words = {{ name }}[({{ "line" if t.along == "k" else "k" }} * {{ t.stride }}u + {{ t.start }}u + {{ "k" if t.along == "k" else "line" }}) / 8u];
    let low = vec4u(words);
    let high = vec4u(words >> vec4u(32u));
    return mat2x4f(bitcast<vec4f>(vec4u(low.x, high.x, low.y, high.y)), bitcast<vec4f>(vec4u(low.z, high.z, low.w, high.w)));
$$ elif t.along == "k"
    return mat2x4f({{ mine }}load_{{ side }}(line, k), {{ mine }}load_{{ side }}(line, k + 4u));
$$ else
    return mat2x4f({{ mine }}load_{{ side }}(line, k), {{ mine }}load_{{ side }}(line + 4u, k));
$$ endif
}
$$ endif
$$ endfor

// short: the last tile along m or n is half empty, or more; only the groups of its lines that have any are summed, in a loop of its
// own, and it comes last, where workgroups are few.
$$ set short, whole_m, whole_n = false, tiles_m, tiles_n
$$ if lanes == 0 and products is not defined and edge
$$ set used_m = ceil_div(lines_m - (tiles_m - 1) * tile_m, 4 * tile_m // thread_m)
$$ set used_n = ceil_div(lines_n - (tiles_n - 1) * tile_n, 4 * tile_n // thread_n)
$$ set short_n = used_n < gn and tiles_n > 1
$$ set short = short_n or used_m < gm and tiles_m > 1
$$ set used_m, used_n = (gm, used_n) if short_n else (used_m, gn)
$$ endif
$$ if short
$$ set whole_m, whole_n = (tiles_m, tiles_n - 1) if short_n else (tiles_m - 1, tiles_n)
$$ endif
// The tile of a workgroup: {{ swizzle }} along m, then the next along n, so that workgroups that run together share operands.
fn {{ mine }}tile_index(group: u32) -> vec2u {
$$ if short
    let last = group - {{ whole_m * whole_n }}u;
    if (group >= {{ whole_m * whole_n }}u) { return vec2u({{ "last, " ~ whole_n ~ "u" if short_n else whole_m ~ "u, last" }}); }
$$ endif
    let first = group / {{ swizzle * whole_n }}u * {{ swizzle }}u;
    let height = clamp({{ whole_m }}u - first, 1u, {{ swizzle }}u);
    let rest = group % {{ swizzle * whole_n }}u;
    return vec2u(first + rest % height, rest / height);
}

$$ if products is defined
$$ set tiles = tiles_m * tiles_n
$$ set product, tile = ("group % " ~ products, "group / " ~ products) if lower else ("group / " ~ tiles, "group % " ~ tiles)
// The product of a workgroup, and its tile there: one past the edge for workgroups past the last product's.
fn product_index(group: u32) -> u32 {
    return min({{ product }}u, {{ products - 1 }}u);
}
fn product_tile(group: u32) -> vec2u {
    return tile_index(select({{ ceil_div(tiles_m, swizzle) * swizzle * tiles_n }}u, {{ tile }}u, group < {{ products * tiles }}u));
}
$$ endif

$$ if lanes == 0
{$ include "include/matmul_staged.wgsl" $}
$$ else
{$ include "include/matmul_direct.wgsl" $}
$$ endif
