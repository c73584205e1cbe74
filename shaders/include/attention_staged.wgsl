// Products of tiles through workgroup memory. A workgroup owns tile_m lines; a thread owns lines tm + i threads_m of them and, in
// groups of four, columns 4 (tn + g threads_n). An operand is (binding, base, first line). Tiles are free before and after each.
$$ set quads = depth // 4
// A line takes one vec4 more than it has, so that 8 neighbouring lines begin in different banks. Lines that become columns are dealt
// out to four quarters: a thread's 4 neighbouring columns come one from each, and neighbouring threads read neighbouring lines.
$$ set pitch = quads + 1
$$ set quarter = tile_n // 4 * pitch + (quads - tile_n // 4 * pitch) % 8
$$ set pitch_p = threads_n + 1
$$ set columns = groups_d * threads_n
$$ set d_quads = ceil_div(head_dim, 4)

$$ macro memory()
var<workgroup> tile_a: array<vec4f, {{ [tile_m * pitch, tile_m * pitch_p] | max }}>;
var<workgroup> tile_b: array<vec4f, {{ [4 * quarter, depth_n * columns] | max }}>;
$$ endmacro

$$ macro place()
$$ if threads_n % 8 == 0 and threads_m % 4 == 0
    // 32 neighbouring threads form a square-ish patch, which reads less of workgroup memory than a strip.
    let tm = lane / {{ 4 * threads_n }}u * 4u + lane % 32u / 8u;
    let tn = lane / 32u % {{ threads_n // 8 }}u * 8u + lane % 8u;
$$ else
    let tm = lane / {{ threads_n }}u;
    let tn = lane % {{ threads_n }}u;
$$ endif
$$ endmacro

{$ macro load(x, line, e) $}load_{{ x[0] }}({{ x[1] }}, {{ x[2] }} + {{ line }}, {{ e }}){$ endmacro $}

// put: a statement about `at`, for every at below count.
$$ macro stage(count, put)
$$ for f in range(ceil_div(count, workgroup))
        {{ "{" if (f + 1) * workgroup <= count else "if (lane + " ~ f * workgroup ~ "u < " ~ count ~ "u) {" }}
            let at = lane + {{ f * workgroup }}u;
            {{ put }}
        }
$$ endfor
$$ endmacro

// New variables c{i}_{g}: the products of lines of a with lines of b, over the elements of a head.
$$ macro nt(c, a, b)
$$ for i in range(thread_m)
$$ for g in range(groups_n)
    var {{ c }}{{ i }}_{{ g }} = vec4f();
$$ endfor
$$ endfor
    for (var e = 0u; e < {{ head_dim }}u; e += {{ depth }}u) {
{{ stage(tile_m * quads, "tile_a[at / " ~ quads ~ "u * " ~ pitch ~ "u + at % " ~ quads ~ "u] = " ~ load(a, "at / " ~ quads ~ "u", "e + at % " ~ quads ~ "u * 4u") ~ ";") }}
{{ stage(tile_n * quads, "tile_b[at / " ~ quads ~ "u % 4u * " ~ quarter ~ "u + at / " ~ 4 * quads ~ "u * " ~ pitch ~ "u + at % " ~ quads ~ "u] = " ~ load(b, "at / " ~ quads ~ "u", "e + at % " ~ quads ~ "u * 4u") ~ ";") }}
        workgroupBarrier();
        for (var q = 0u; q < {{ quads }}u; q += {{ unroll }}u) {
$$ for u in range(unroll)
            {
$$ for i in range(thread_m)
            let a{{ i }} = tile_a[tm * {{ pitch }}u + q + {{ i * threads_m * pitch + u }}u];
$$ endfor
$$ for j in range(thread_n)
            let b{{ j }} = tile_b[tn * {{ pitch }}u + q + {{ j % 4 * quarter + j // 4 * threads_n * pitch + u }}u];
$$ endfor
$$ for x in "xyzw"
            {
$$ for g in range(groups_n)
                let v{{ g }} = vec4f(b{{ 4 * g }}.{{ x }}, b{{ 4 * g + 1 }}.{{ x }}, b{{ 4 * g + 2 }}.{{ x }}, b{{ 4 * g + 3 }}.{{ x }});
$$ endfor
$$ for i in range(thread_m)
$$ for g in range(groups_n)
                {{ c }}{{ i }}_{{ g }} += a{{ i }}.{{ x }} * v{{ g }};
$$ endfor
$$ endfor
            }
$$ endfor
            }
$$ endfor
        }
        workgroupBarrier();
    }
$$ endmacro

// Sums that nn adds into: a thread's, of its lines and of columns of a head.
$$ macro sums(c)
$$ for i in range(thread_m)
$$ for g in range(groups_d)
    var {{ c.name }}{{ i }}_{{ g }} = vec4f();
$$ endfor
$$ endfor
$$ endmacro

// c[m] = c[m] * keep[m] + sum over the columns n of p[m, n] * line n of b; p is spread over the threads that own its columns.
$$ macro nn(c, p, b, fresh, keep="")
$$ if keep
$$ for i in range(thread_m)
$$ for g in range(groups_d)
    {{ c.name }}{{ i }}_{{ g }} *= {{ keep }}{{ i }};
$$ endfor
$$ endfor
$$ endif
$$ for n in range(groups_n)
$$ for i in range(thread_m)
    tile_a[(tm + {{ i * threads_m }}u) * {{ pitch_p }}u + tn] = {{ p }}{{ i }}_{{ n }};
$$ endfor
    for (var n = 0u; n < {{ 4 * threads_n }}u; n += {{ depth_n }}u) {
{{ stage(depth_n * d_quads, "tile_b[at / " ~ d_quads ~ "u * " ~ columns ~ "u + at % " ~ d_quads ~ "u] = " ~ load(b, n * 4 * threads_n ~ "u + n + at / " ~ d_quads ~ "u", "at % " ~ d_quads ~ "u * 4u") ~ ";") }}
        workgroupBarrier();
        for (var q = 0u; q < {{ depth_n // 4 }}u; q += {{ unroll_n }}u) {
$$ for u in range(unroll_n)
            {
$$ for i in range(thread_m)
            let a{{ i }} = tile_a[(tm + {{ i * threads_m }}u) * {{ pitch_p }}u + n / 4u + q + {{ u }}u];
$$ endfor
$$ for j, x in [(0, "x"), (1, "y"), (2, "z"), (3, "w")]
            {
$$ for g in range(groups_d)
                let v{{ g }} = tile_b[(4u * q + {{ 4 * u + j }}u) * {{ columns }}u + tn + {{ g * threads_n }}u];
$$ endfor
$$ for i in range(thread_m)
$$ for g in range(groups_d)
                {{ c.name }}{{ i }}_{{ g }} += a{{ i }}.{{ x }} * v{{ g }};
$$ endfor
$$ endfor
            }
$$ endfor
            }
$$ endfor
        }
        workgroupBarrier();
    }
$$ endfor
$$ endmacro

// Stores the sums, times factor[m].
$$ macro finish(c, factor="")
$$ for i in range(thread_m)
$$ for g in range(groups_d)
    store_{{ c.to }}({{ c.base }}, {{ c.line }} + tm + {{ i * threads_m }}u, (tn + {{ g * threads_n }}u) * 4u, {{ c.name }}{{ i }}_{{ g }}{{ " * " ~ factor ~ i if factor }});
$$ endfor
$$ endfor
$$ endmacro

$$ macro line_memory()
var<workgroup> line_values: array<vec4f, {{ tile_m // 4 * threads_n }}>;
$$ endmacro

// Every thread of a line gets op over the line's values x[m] of all its threads, in their order.
$$ macro over_line(x, op)
$$ for r in range(thread_m // 4)
    line_values[(tm * {{ thread_m // 4 }}u + {{ r }}u) * {{ threads_n }}u + tn] = vec4f({{ x }}{{ 4 * r }}, {{ x }}{{ 4 * r + 1 }}, {{ x }}{{ 4 * r + 2 }}, {{ x }}{{ 4 * r + 3 }});
$$ endfor
    workgroupBarrier();
$$ for r in range(thread_m // 4)
    {
        let first = (tm * {{ thread_m // 4 }}u + {{ r }}u) * {{ threads_n }}u;
        var all = line_values[first];
        for (var n = 1u; n < {{ threads_n }}u; n++) { all = {{ op.format("all", "line_values[first + n]") }}; }
$$ for j in range(4)
        {{ x }}{{ 4 * r + j }} = all.{{ "xyzw"[j] }};
$$ endfor
    }
$$ endfor
$$ endmacro
