// Products of tiles straight from storage, for CPUs, where loads cost by the element and barriers are dear. A thread owns the lines
// tm + i threads_m of a workgroup's tile_m and all columns, so that nothing passes between threads, but that {{ lanes }} threads, a
// subgroup, share the loads of what is common to all. Sums over lines stay in storage. An operand is (binding, base, first line).
$$ set d_quads = ceil_div(head_dim, 4)

$$ macro memory()
$$ endmacro

$$ macro place()
    let tm = lane;
    let tn = 0u;
$$ endmacro

{$ macro load(x, line, e) $}load_{{ x[0] }}({{ x[1] }}, {{ x[2] }} + {{ line }}, {{ e }}){$ endmacro $}

// b0, b1, ...: four elements from e on of every line of b.
$$ macro shared_lines(b, e)
$$ for f in range(thread_n // lanes)
        let shared{{ f }} = {{ load(b, f * lanes ~ "u + lane % " ~ lanes ~ "u", e) }};
$$ endfor
$$ for j in range(thread_n)
        let b{{ j }} = {{ "subgroupBroadcast(shared" ~ j // lanes ~ ", " ~ j % lanes ~ "u)" if lanes > 1 else "shared" ~ j }};
$$ endfor
$$ endmacro

// New variables c{i}_{g}: the products of lines of a with lines of b, over the elements of a head.
$$ macro nt(c, a, b)
$$ for i in range(thread_m)
$$ for g in range(groups_n)
    var {{ c }}{{ i }}_{{ g }} = vec4f();
$$ endfor
$$ endfor
    for (var e = 0u; e < {{ head_dim }}u; e += 4u) {
$$ for i in range(thread_m)
        let a{{ i }} = {{ load(a, "tm + " ~ i * threads_m ~ "u", "e") }};
$$ endfor
{{ shared_lines(b, "e") }}
$$ for g in range(groups_n)
$$ for i in range(thread_m)
        {{ c }}{{ i }}_{{ g }} += vec4f(dot(a{{ i }}, b{{ 4 * g }}), dot(a{{ i }}, b{{ 4 * g + 1 }}), dot(a{{ i }}, b{{ 4 * g + 2 }}), dot(a{{ i }}, b{{ 4 * g + 3 }}));
$$ endfor
$$ endfor
    }
$$ endmacro

$$ macro sums(c)
$$ endmacro

// c[m] = c[m] * keep[m] + sum over the columns n of p[m, n] * line n of b. fresh: nothing is in c yet.
$$ macro nn(c, p, b, fresh, keep="")
    for (var e = 0u; e < {{ head_dim }}u; e += 4u) {
{{ shared_lines(b, "e") }}
$$ for i in range(thread_m)
        {
            let line = {{ c.line }} + tm + {{ i * threads_m }}u;
            var sum = select(load_{{ c.to }}({{ c.base }}, line, e){{ " * " ~ keep ~ i if keep }}, vec4f(), {{ fresh }});
$$ for g in range(groups_n)
            sum += {{ p }}{{ i }}_{{ g }}.x * b{{ 4 * g }} + {{ p }}{{ i }}_{{ g }}.y * b{{ 4 * g + 1 }} + {{ p }}{{ i }}_{{ g }}.z * b{{ 4 * g + 2 }} + {{ p }}{{ i }}_{{ g }}.w * b{{ 4 * g + 3 }};
$$ endfor
            store_{{ c.to }}({{ c.base }}, line, e, sum);
        }
$$ endfor
    }
$$ endmacro

// Multiplies the sums by factor[m].
$$ macro finish(c, factor="")
$$ if factor
    for (var e = 0u; e < {{ head_dim }}u; e += 4u) {
$$ for i in range(thread_m)
        store_{{ c.to }}({{ c.base }}, {{ c.line }} + tm + {{ i * threads_m }}u, e, load_{{ c.to }}({{ c.base }}, {{ c.line }} + tm + {{ i * threads_m }}u, e) * {{ factor }}{{ i }});
$$ endfor
    }
$$ endif
$$ endmacro

$$ macro line_memory()
$$ endmacro

$$ macro over_line(x, op)
$$ endmacro
